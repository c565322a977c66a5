//! Processes that the driver starts: none outlives it, and a signal ends them cleanly.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use tokio::process::{Child, ChildStdout, Command};

use crate::args::ChildArgs;

/// How long a process may take to end after it was asked to.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The hidden `child` command: asks the kernel for a signal when the driver dies, then becomes the
/// program. (The driver cannot ask for it on behalf of a child without unsafe code.)
pub fn become_program(args: &ChildArgs) -> Result<ExitCode> {
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .context("asking for a signal when the driver ends")?;
    let parent = rustix::process::getppid().map(Pid::as_raw_pid);
    if parent != Some(args.parent) {
        bail!("the driver has ended already");
    }
    let (program, arguments) = args.program.split_first().context("no program given")?;
    let error = std::process::Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("starting {}", Path::new(program).display()))
}

/// A running process.
pub struct ChildProcess {
    /// What it is called in messages.
    pub name: String,
    /// Where its standard error goes.
    pub log: PathBuf,
    child: Child,
}

impl ChildProcess {
    /// Starts a program that ends when the driver does. Its standard output is returned, its
    /// standard error goes to a file.
    pub fn start(
        name: &str,
        program: &Path,
        arguments: Vec<OsString>,
        log_folder: &Path,
    ) -> Result<(Self, ChildStdout)> {
        let log = log_folder.join(format!("{name}.log"));
        let log_file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let mut command = Command::new(std::env::current_exe().context("finding this program")?);
        command
            .arg("child")
            .arg(format!("--parent={}", std::process::id()))
            .arg("--")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file)
            // A Ctrl-C in the terminal goes to the driver alone, which then stops the rest.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let stdout = child
            .stdout
            .take()
            .context("the child has no standard output")?;
        Ok((
            Self {
                name: name.to_owned(),
                log,
                child,
            },
            stdout,
        ))
    }

    /// Waits until the process ends by itself.
    pub async fn exited(&mut self) -> Result<ExitStatus> {
        self.child
            .wait()
            .await
            .with_context(|| format!("waiting for {}", self.name))
    }

    /// Why the process has ended, with the last lines of its log.
    pub fn obituary(&self, status: ExitStatus) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let last_lines = lines[lines.len().saturating_sub(5)..].join("\n  ");
        format!(
            "{} ended with {status}; its last lines:\n  {last_lines}",
            self.name
        )
    }

    /// Asks the process to end, waits, and kills it if it does not.
    pub async fn stop(mut self) {
        let pid_opt = self
            .child
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        if let Some(pid) = pid_opt
            && rustix::process::kill_process(pid, Signal::TERM).is_ok()
            && tokio::time::timeout(STOP_TIMEOUT, self.child.wait())
                .await
                .is_ok()
        {
            return;
        }
        if self.child.kill().await.is_err() {
            eprintln!("{} could not be stopped", self.name);
        }
    }
}
