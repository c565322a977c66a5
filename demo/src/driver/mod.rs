//! The driver: starts everything, sends the requests that a PD router would send, adds up what the
//! engines report, and compares that with the service's own metrics.

pub mod children;
mod metrics;
mod plan;
mod progress;
mod report;
mod router;
mod stage;

use std::process::ExitCode;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::RunArgs;
use crate::layout::Side;
use plan::RunPlan;
use report::Totals;
use stage::Stage;

/// Exit code after Ctrl-C, as shells expect it.
const INTERRUPTED: u8 = 130;

/// Runs the whole demo.
pub fn run(args: RunArgs) -> Result<ExitCode> {
    // Children die with the thread that started them, so everything happens on this one.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(demonstrate(args))
}

async fn demonstrate(args: RunArgs) -> Result<ExitCode> {
    let mut interrupts = Interrupts::listen()?;
    let plan = RunPlan::new(args)?;
    println!("{}", plan.describe());
    let mut stage = tokio::select! {
        stage = Stage::start(&plan) => stage?,
        // What had started is killed as it is dropped.
        name = interrupts.next() => return Ok(interrupted(name)),
    };
    let outcome = tokio::select! {
        outcome = run_to_end(&plan, &mut stage) => outcome.map(|()| ExitCode::SUCCESS),
        name = interrupts.next() => Ok(interrupted(name)),
    };
    let outcome = outcome.map_err(|error| {
        let logs = stage.keep_logs();
        error.context(format!("the demo failed (logs: {})", logs.display()))
    });
    stage.stop().await;
    outcome
}

fn interrupted(name: &str) -> ExitCode {
    eprintln!("\n{name}: stopping everything that was started");
    ExitCode::from(INTERRUPTED)
}

/// The signals that end a run early.
struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    fn listen() -> Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "interrupted",
            _ = self.terminate.recv() => "terminated",
        }
    }
}

/// Runs, reports, and stays if that was asked for.
async fn run_to_end(plan: &RunPlan, stage: &mut Stage) -> Result<()> {
    let totals = run_on(plan, stage).await?;
    println!("{}", totals.conclusion());
    print!("{}", stage.describe(plan.args.keep));
    if plan.args.keep {
        println!("everything is left running; press Ctrl-C to stop it");
        return Err(stage.child_exited().await);
    }
    Ok(())
}

async fn run_on(plan: &RunPlan, stage: &mut Stage) -> Result<Totals> {
    let engines = stage.engines.clone();
    let metrics_url = stage.metrics_url(Side::Prefill);
    let decode_url = stage.metrics_url(Side::Decode);
    let run = async {
        let metrics_before = metrics::transfer_bytes(&metrics_url).await?;
        let totals = router::send_all(plan, &engines).await?;
        let idle = router::check_idle(&engines)
            .await
            .context("checking the idle pools")?;
        let totals = totals.with_idle(plan, &idle)?;
        print!("{}", totals.table());
        let metrics_after = metrics::transfer_bytes(&metrics_url).await?;
        print!(
            "{}",
            totals.compare_with_metrics(&metrics_before, &metrics_after)?
        );
        let compared = metrics::verified_bytes(&decode_url).await?;
        print!("{}", totals.check_verified(plan.args.verify, &compared)?);
        Ok(totals)
    };
    tokio::select! {
        totals = run => totals,
        error = stage.child_exited() => Err(error),
    }
}
