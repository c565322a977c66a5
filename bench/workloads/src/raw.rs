//! The raw limit: a small C program that moves the same ranges between the same pools, with as
//! many threads or streams. It is compiled when it is needed; no unsafe code is in this crate.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use io_engine::TransportKind;

use crate::process::{LineChild, cpu_seconds};

const SOURCE: &str = include_str!("../raw/raw_limit.c");

/// Both processes of the raw limit.
pub struct RawLimit {
    sender: LineChild,
    receiver: LineChild,
    _folder: tempfile::TempDir,
}

impl RawLimit {
    /// Compiles and starts it for a round of requests, each a list of ranges (pool, source offset,
    /// destination offset, length).
    pub fn start(
        threads: usize,
        requests: &[Vec<[u64; 4]>],
        src_pools: &[String],
        dst_pools: &[String],
    ) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let program = folder.path().join("raw_limit");
        compile(&program)?;
        let arrays = folder.path().join("arrays");
        write_arrays(&arrays, requests)?;
        let recv = ["recv".to_owned()]
            .into_iter()
            .chain(dst_pools.iter().cloned());
        let mut receiver = LineChild::start(program.as_os_str(), recv)?;
        let port = receiver.line()?;
        let arrays = arrays.to_string_lossy().into_owned();
        let mut words = vec!["send".to_owned(), threads.to_string(), port, arrays];
        words.extend_from_slice(src_pools);
        words.push("--".to_owned());
        words.extend_from_slice(dst_pools);
        let mut sender = LineChild::start(program.as_os_str(), words)?;
        ensure!(sender.line()? == "ready", "the raw limit is not ready");
        Ok(Self {
            sender,
            receiver,
            _folder: folder,
        })
    }

    /// Its processes.
    fn pids(&self) -> [u32; 2] {
        [self.sender.pid(), self.receiver.pid()]
    }

    /// Moves every request once in each way that the transport's limit could be; the seconds that
    /// the fastest took, and the processor seconds of that one.
    pub fn round(&mut self, kind: TransportKind) -> Result<(f64, f64)> {
        let ways: &[&str] = match kind {
            TransportKind::Tcp => &["tcp"],
            _ => &["copy", "stream"],
        };
        let mut fastest = (f64::INFINITY, 0.0);
        for way in ways {
            let before = cpu_seconds(&self.pids())?;
            self.sender.tell(way)?;
            let seconds = self.sender.line()?.parse::<f64>()? / 1e9;
            if seconds < fastest.0 {
                fastest = (seconds, cpu_seconds(&self.pids())? - before);
            }
        }
        Ok(fastest)
    }
}

fn compile(program: &Path) -> Result<()> {
    let source = program.with_extension("c");
    std::fs::write(&source, SOURCE)?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let compiled = Command::new(&compiler)
        .args(["-O2", "-pthread", "-o"])
        .args([program, &source])
        .status()
        .with_context(|| format!("starting {}", compiler.to_string_lossy()))?;
    ensure!(compiled.success(), "the raw limit does not compile");
    Ok(())
}

fn write_arrays(path: &Path, requests: &[Vec<[u64; 4]>]) -> Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut put = |number: u64| file.write_all(&number.to_ne_bytes());
    put(requests.len() as u64)?;
    for ranges in requests {
        put(ranges.len() as u64)?;
        for number in ranges.iter().flatten() {
            put(*number)?;
        }
    }
    Ok(file.flush()?)
}
