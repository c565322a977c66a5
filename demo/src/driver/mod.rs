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
    runtime.block_on(async {
        let mut terminate =
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        tokio::select! {
            outcome = demonstrate(args) => outcome.map(|()| ExitCode::SUCCESS),
            _ = tokio::signal::ctrl_c() => {
                eprintln!("\ninterrupted; every process that was started has been stopped");
                Ok(ExitCode::from(INTERRUPTED))
            }
            _ = terminate.recv() => {
                eprintln!("\nterminated; every process that was started has been stopped");
                Ok(ExitCode::from(INTERRUPTED))
            }
        }
    })
}

async fn demonstrate(args: RunArgs) -> Result<()> {
    let plan = RunPlan::new(args)?;
    println!("{}", plan.describe());
    let mut stage = Stage::start(&plan).await?;
    match run_on(&plan, &mut stage).await {
        Ok(totals) => {
            println!("{}", totals.conclusion());
            print!("{}", stage.describe(plan.args.keep));
            if plan.args.keep {
                println!("everything is left running; press Ctrl-C to stop it");
                return Err(stage.child_exited().await);
            }
            stage.stop().await;
            Ok(())
        }
        Err(error) => {
            let logs = stage.keep_logs();
            stage.stop().await;
            Err(error.context(format!("the demo failed (logs: {})", logs.display())))
        }
    }
}

async fn run_on(plan: &RunPlan, stage: &mut Stage) -> Result<Totals> {
    let engines = stage.engines.clone();
    let metrics_url = stage.metrics_url(Side::Prefill);
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
        Ok(totals)
    };
    tokio::select! {
        totals = run => totals,
        error = stage.child_exited() => Err(error),
    }
}
