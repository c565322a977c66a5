//! The command-line client: `bootstrap-server ctl`. It speaks the admin API and nothing else.

mod client;
mod commands;
mod follow;
mod show;
mod trust;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use self::client::Client;
use crate::api::{ErrorBody, EventKind};

const DEFAULT_URL: &str = "http://127.0.0.1:8997";

/// Asks a running server, or tells it what to do.
///
/// Ends with 0 when it is done, 1 when the server refuses, 2 when the command line is wrong, and 3
/// when there is no answer that can be understood.
#[derive(Clone, Debug, Args)]
pub struct Ctl {
    /// The server's admin port; https:// where it speaks TLS.
    #[arg(long, global = true, value_name = "URL", env = "FERRY_BOOTSTRAP_URL", default_value = DEFAULT_URL)]
    pub url: String,
    /// File with the operators' token.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "FERRY_BOOTSTRAP_ADMIN_TOKEN_FILE"
    )]
    pub token_file: Option<PathBuf>,
    /// Authorities (PEM) one of which must have signed the server's certificate.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "FERRY_BOOTSTRAP_CA_FILE"
    )]
    pub ca_file: Option<PathBuf>,
    /// Certificate chain (PEM) to show to a server that asks for one.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        requires = "key_file",
        env = "FERRY_BOOTSTRAP_CERT_FILE"
    )]
    pub cert_file: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        requires = "cert_file",
        env = "FERRY_BOOTSTRAP_KEY_FILE"
    )]
    pub key_file: Option<PathBuf>,
    /// Prints what the API answers, as JSON, instead of a table.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What `ctl` can do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Lists the engines.
    Engines(Listed),
    /// Lists the ranks of an engine, those that are missing too.
    Ranks {
        /// The engine's name.
        engine: String,
        /// How much of the list.
        #[command(flatten)]
        listed: Listed,
    },
    /// Lists the registered io engines of an engine, or shows the buffers of one.
    Registrations {
        /// The engine's name.
        engine: String,
        /// The io engine's key.
        key: Option<String>,
        /// How much of the list.
        #[command(flatten)]
        listed: Listed,
    },
    /// Lists the rooms of an engine that are bound to a data-parallel rank.
    Rooms {
        /// The engine's name.
        engine: String,
        /// How much of the list.
        #[command(flatten)]
        listed: Listed,
    },
    /// Lists what rank actors reported last.
    Reports {
        /// Only those of this engine.
        engine: Option<String>,
        /// How much of the list.
        #[command(flatten)]
        listed: Listed,
    },
    /// Lists what happened, the oldest first.
    Events(EventArguments),
    /// Lets an engine take no new rooms; those that it knows are served to their end.
    Drain {
        /// The engine's name.
        engine: String,
    },
    /// Lets an engine take new rooms again.
    Undrain {
        /// The engine's name.
        engine: String,
    },
    /// Removes an engine, or one of its ranks or registrations. What lives may register again.
    Evict {
        /// The engine's name.
        engine: String,
        /// Only this rank, for example dp0-cp0-tp1-pp0.
        #[arg(long, value_name = "RANK", conflicts_with = "registration")]
        rank: Option<String>,
        /// Only this registration.
        #[arg(long, value_name = "KEY")]
        registration: Option<String>,
    },
    /// Writes the whole registry as JSON. It holds the keys of engines' memory: keep it safe.
    Export {
        /// Where to; standard output if absent.
        file: Option<PathBuf>,
        /// Only this engine.
        #[arg(long, value_name = "NAME")]
        engine: Option<String>,
    },
    /// Takes engines from an export: all of them or, if anything is wrong, none.
    Import {
        /// Where from; - is standard input.
        file: PathBuf,
        /// Removes the engines that the export does not have.
        #[arg(long)]
        replace: bool,
    },
}

/// How much of a list is wanted.
#[derive(Clone, Copy, Debug, Args)]
pub struct Listed {
    /// Entries at most; all if absent.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: Option<u64>,
}

/// Which events are wanted.
#[derive(Clone, Debug, Args)]
pub struct EventArguments {
    /// Goes on with what happens, until it is interrupted.
    #[arg(long, short)]
    pub follow: bool,
    /// Only those after this number. With --follow and without this, only what is yet to happen.
    #[arg(long, value_name = "NUMBER")]
    pub since: Option<u64>,
    /// Only those of this engine.
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
    /// Only those of this kind.
    #[arg(long, value_enum)]
    pub kind: Option<EventKind>,
    /// How much of the list.
    #[command(flatten)]
    pub listed: Listed,
}

/// Why a command did not succeed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{}", refusal(.0))]
    Refused(ErrorBody),
    #[error("{0}")]
    NoAnswer(String),
    #[error("{0}")]
    Arguments(String),
    #[error("{0}: {1}")]
    File(String, io::Error),
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

fn refusal(body: &ErrorBody) -> String {
    match &body.detail {
        Some(detail) => format!("{}: {detail} ({})", body.message, body.code),
        None => format!("{} ({})", body.message, body.code),
    }
}

impl Failure {
    fn code(&self) -> ExitCode {
        match self {
            Self::Refused(_) => ExitCode::from(1),
            Self::Arguments(_) | Self::File(..) => ExitCode::from(2),
            // Whoever read this has had enough.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Self::NoAnswer(_) | Self::Output(_) => ExitCode::from(3),
        }
    }
}

/// Does what is asked for, and prints it.
pub async fn run(ctl: Ctl) -> ExitCode {
    let done = async {
        let client = Client::new(&ctl)?;
        commands::run(&client, ctl.command, ctl.json).await
    };
    match done.await {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let code = failure.code();
            if code != ExitCode::SUCCESS {
                // There is nobody else to tell.
                let _ = writeln!(io::stderr(), "error: {}", show::plain(&failure.to_string()));
            }
            code
        }
    }
}
