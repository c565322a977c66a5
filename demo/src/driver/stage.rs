//! Everything that a run needs: one bootstrap server, a service and an engine for each side.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::io::{AsyncBufReadExt, BufReader};
use transfer_actor::bootstrap_access::plain_http;

use super::children::ChildProcess;
use super::plan::RunPlan;
use super::router::Engines;
use crate::args::Transport;
use crate::engine::Ready;
use crate::layout::Side;

/// How long a process may take until it can be used.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Time between two looks at a process that is starting.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The running processes, in the order in which they started.
pub struct Stage {
    /// Where the engines are.
    pub engines: Engines,
    admin_port: u16,
    metrics_ports: [u16; 2],
    children: Vec<ChildProcess>,
    folder: tempfile::TempDir,
}

impl Stage {
    /// Starts everything and waits until it can be used.
    pub async fn start(plan: &RunPlan) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ferry-demo-").tempdir()?;
        let mut stage = Self {
            engines: Engines {
                prefill: String::new(),
                decode: String::new(),
                bootstrap_host: "127.0.0.1".to_owned(),
                bootstrap_port: 0,
            },
            admin_port: 0,
            metrics_ports: [0; 2],
            children: Vec::new(),
            folder,
        };
        let started = tokio::time::timeout(START_TIMEOUT, stage.start_all(plan)).await;
        let started = started.unwrap_or_else(|_| {
            Err(anyhow!(
                "not everything was up after {} s",
                START_TIMEOUT.as_secs()
            ))
        });
        match started {
            Ok(()) => Ok(stage),
            Err(error) => {
                let logs = stage.keep_logs();
                stage.stop().await;
                Err(error.context(format!("starting the processes (logs: {})", logs.display())))
            }
        }
    }

    /// URL of the metrics of one side's service.
    pub fn metrics_url(&self, side: Side) -> String {
        format!(
            "http://127.0.0.1:{}/metrics",
            self.metrics_ports[side as usize]
        )
    }

    /// Where metrics and the admin API can be read, if they are left running.
    pub fn describe(&self, keeps_running: bool) -> String {
        let bootstrap = format!("http://127.0.0.1:{}", self.admin_port);
        let heading = if keeps_running {
            "metrics and admin API:"
        } else {
            "metrics and admin API (gone now; --keep leaves everything running):"
        };
        format!(
            "{heading}\n\
             \x20 prefill service   {}\n\
             \x20 decode service    {}\n\
             \x20 bootstrap server  {bootstrap}/  and /metrics\n\
             \x20 registrations     {bootstrap}/v1/engines\n\
             \x20 rooms and ranks   curl --unix-socket {} http://localhost/v1/ranks  (decode: {})\n",
            self.metrics_url(Side::Prefill),
            self.metrics_url(Side::Decode),
            self.api_socket(Side::Prefill).display(),
            self.api_socket(Side::Decode).display(),
        )
    }

    /// Resolves when any process ends by itself, with what its log says.
    pub async fn child_exited(&mut self) -> anyhow::Error {
        let exits = self.children.iter_mut().map(|child| {
            Box::pin(async move {
                match child.exited().await {
                    Ok(status) => anyhow!(child.obituary(status)),
                    Err(error) => error,
                }
            })
        });
        futures::future::select_all(exits).await.0
    }

    /// Keeps the folder with the logs when everything else is gone; where it is.
    pub fn keep_logs(&mut self) -> PathBuf {
        self.folder.disable_cleanup(true);
        self.folder.path().to_owned()
    }

    /// Stops every process, the last that started first.
    pub async fn stop(mut self) {
        while let Some(child) = self.children.pop() {
            child.stop().await;
        }
    }

    async fn start_all(&mut self, plan: &RunPlan) -> Result<()> {
        self.start_bootstrap_server().await?;
        for side in [Side::Prefill, Side::Decode] {
            self.start_service(plan, side).await?;
        }
        let (prefill, decode) = tokio::try_join!(
            start_engine(self, plan, Side::Prefill),
            start_engine(self, plan, Side::Decode)
        )?;
        let [(prefill, prefill_port), (decode, decode_port)] = [prefill, decode];
        self.engines.prefill = format!("http://127.0.0.1:{prefill_port}");
        self.engines.decode = format!("http://127.0.0.1:{decode_port}");
        self.children.extend([prefill, decode]);
        Ok(())
    }

    async fn start_bootstrap_server(&mut self) -> Result<()> {
        let (port, admin_port) = (free_port()?, free_port()?);
        let arguments = os_strings([
            "--listen".as_ref(),
            format!("127.0.0.1:{port}").as_ref(),
            "--admin-listen".as_ref(),
            format!("127.0.0.1:{admin_port}").as_ref(),
            "--data-dir".as_ref(),
            self.folder.path().join("registrations").as_os_str(),
        ]);
        let mut child = self.start_program("bootstrap-server", "bootstrap-server", arguments)?;
        wait_for_http(&mut child, &format!("http://127.0.0.1:{port}/health")).await?;
        self.engines.bootstrap_port = port;
        self.admin_port = admin_port;
        self.children.push(child);
        Ok(())
    }

    async fn start_service(&mut self, plan: &RunPlan, side: Side) -> Result<()> {
        let port = free_port()?;
        let mut arguments = os_strings([
            "serve".as_ref(),
            "--attach-socket".as_ref(),
            self.attach_socket(side).as_os_str(),
            "--api-socket".as_ref(),
            self.api_socket(side).as_os_str(),
            "--metrics-listen".as_ref(),
            format!("127.0.0.1:{port}").as_ref(),
        ]);
        let verify = plan.args.verify.name();
        arguments.extend(os_strings(["--verify".as_ref(), verify.as_ref()]));
        let transports = match plan.args.transport {
            Transport::Auto => None,
            Transport::Shm => Some("shm"),
            Transport::Cma => Some("cma"),
            Transport::Rdma => Some("rdma"),
            Transport::Tcp => Some("tcp"),
        };
        if let Some(transports) = transports {
            arguments.extend(os_strings(["--transports".as_ref(), transports.as_ref()]));
        }
        if let Some(fault) = plan.transport_fault(side) {
            arguments.extend(os_strings(["--inject-fault".as_ref(), fault.as_ref()]));
        }
        let name = format!("{side}-service");
        let mut child = self.start_program(&name, "transfer-actor", arguments)?;
        self.metrics_ports[side as usize] = port;
        wait_for_http(&mut child, &self.metrics_url(side)).await?;
        self.children.push(child);
        Ok(())
    }

    fn attach_socket(&self, side: Side) -> PathBuf {
        self.folder.path().join(format!("{side}-attach.sock"))
    }

    fn api_socket(&self, side: Side) -> PathBuf {
        self.folder.path().join(format!("{side}-api.sock"))
    }

    /// Starts one of the programs that are built beside this one.
    fn start_program(
        &self,
        name: &str,
        program: &str,
        arguments: Vec<OsString>,
    ) -> Result<ChildProcess> {
        let path = beside_this_program(program)?;
        let (child, _stdout) = ChildProcess::start(name, &path, arguments, self.folder.path())?;
        Ok(child)
    }
}

/// Starts an engine and waits until it says which port it has.
async fn start_engine(stage: &Stage, plan: &RunPlan, side: Side) -> Result<(ChildProcess, u16)> {
    let mut config = plan.engine_config(side);
    config.attach_socket = stage.attach_socket(side);
    config.api_socket = stage.api_socket(side);
    config.bootstrap = format!(
        "{}:{}",
        stage.engines.bootstrap_host, stage.engines.bootstrap_port
    );
    let program = std::env::current_exe().context("finding this program")?;
    let config = serde_json::to_string(&config)?;
    let arguments = os_strings([
        "engine".as_ref(),
        side.to_string().as_ref(),
        "--config".as_ref(),
        config.as_ref(),
    ]);
    let name = format!("{side}-engine");
    let (mut child, stdout) = ChildProcess::start(&name, &program, arguments, stage.folder.path())?;
    let line = BufReader::new(stdout).lines().next_line().await?;
    let Some(line) = line else {
        let status = child.exited().await?;
        bail!(child.obituary(status));
    };
    let ready: Ready = serde_json::from_str(&line)
        .with_context(|| format!("{name} said {line:?} instead of its port"))?;
    Ok((child, ready.port))
}

fn os_strings<'text>(parts: impl IntoIterator<Item = &'text std::ffi::OsStr>) -> Vec<OsString> {
    parts.into_iter().map(OsString::from).collect()
}

/// The path of another program of this project.
fn beside_this_program(program: &str) -> Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program")?;
    let path = this.with_file_name(program);
    if !path.is_file() {
        bail!(
            "{} is missing: `make demo` builds it, and so does `cargo build`",
            path.display()
        );
    }
    Ok(path)
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).context("finding a free port")?;
    Ok(listener.local_addr()?.port())
}

/// Waits until a URL answers, or the process that should answer has ended.
async fn wait_for_http(child: &mut ChildProcess, url: &str) -> Result<()> {
    let client = plain_http().no_proxy().build()?;
    let answered = async {
        loop {
            match client.get(url).send().await {
                Ok(response) if response.status().is_success() => return,
                Ok(_) | Err(_) => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
    };
    let status = tokio::select! {
        () = answered => return Ok(()),
        status = child.exited() => status?,
    };
    bail!(child.obituary(status))
}
