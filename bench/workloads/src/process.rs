//! The other processes of a benchmark, and what the system says of processes.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// `USER_HZ`, which is 100 on every Linux that this runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// A child that answers lines with lines. It ends when its input does, at the latest when this is
/// dropped.
pub struct LineChild {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    name: String,
}

impl LineChild {
    /// Starts a program.
    pub fn start<I: AsRef<OsStr>>(
        program: &OsStr,
        words: impl IntoIterator<Item = I>,
    ) -> Result<Self> {
        let name = program.to_string_lossy().into_owned();
        let mut child = Command::new(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .env("FERRY_LOG", "warn")
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let output = child.stdout.take().context("no output to read")?;
        Ok(Self {
            input: child.stdin.take(),
            child,
            lines: BufReader::new(output).lines(),
            name,
        })
    }

    /// This program again, with another subcommand.
    pub fn again(subcommand: &str) -> Result<Self> {
        let program = std::env::current_exe().context("this program's path")?;
        Self::start(program.as_os_str(), [subcommand])
    }

    /// Number of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of its output.
    pub fn line(&mut self) -> Result<String> {
        match self.lines.next() {
            Some(line) => Ok(line?),
            None => bail!("{} has ended: {}", self.name, self.child.wait()?),
        }
    }

    /// Writes a line into its input.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the input is closed")?;
        writeln!(input, "{line}").and_then(|()| input.flush())?;
        Ok(())
    }

    /// Sends one JSON line and reads the JSON line that answers it.
    pub fn ask<T: DeserializeOwned>(&mut self, question: &impl Serialize) -> Result<T> {
        self.tell(&serde_json::to_string(question)?)?;
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("{} answered {line}", self.name))
    }
}

impl Drop for LineChild {
    fn drop(&mut self) {
        drop(self.input.take());
        // Those that serve for ever do not end with their input.
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Reads JSON lines until the input ends, and answers each.
pub fn serve<T: DeserializeOwned>(
    mut answer: impl FnMut(T) -> Result<serde_json::Value>,
) -> Result<()> {
    for line in std::io::stdin().lines() {
        let value = answer(serde_json::from_str(&line?)?)?;
        reply(&value)?;
    }
    Ok(())
}

/// Writes one JSON line.
pub fn reply(value: &impl Serialize) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{}", serde_json::to_string(value)?)?;
    Ok(output.flush()?)
}

/// Processor seconds, of user and system, that processes have used.
pub fn cpu_seconds(pids: &[u32]) -> Result<f64> {
    let mut ticks = 0;
    for pid in pids {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The name, in parentheses, may hold anything.
        let (_, fields) = stat.rsplit_once(')').context("no name in stat")?;
        let times = fields.split_whitespace().skip(11).take(2);
        ticks += times
            .filter_map(|field| field.parse::<u64>().ok())
            .sum::<u64>();
    }
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

/// Bytes of memory that the system can still give.
pub fn available_memory() -> Result<u64> {
    let info = std::fs::read_to_string("/proc/meminfo")?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("no MemAvailable")? * 1024)
}

/// The value below which this part of the values lies.
pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// The middle value.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}
