//! The commands, one request or a few each.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use reqwest::Method;
use reqwest::header::CONTENT_TYPE;
use serde::Serialize;

use super::client::Client;
use super::{Command, EventArguments, Failure, follow, show};
use crate::api;

pub(super) async fn run(client: &Client, command: Command, as_json: bool) -> Result<(), Failure> {
    match command {
        Command::Engines(listed) => {
            let mut engines = Vec::new();
            let mut next = None;
            let add =
                |page: api::EngineList| added(&mut engines, page.engines, &mut next, page.next);
            client
                .pages(&["engines"], &[], listed.limit, "after", add)
                .await?;
            let list = api::EngineList { engines, next };
            print(as_json, &list, |list| show::engines(&list.engines))
        }
        Command::Ranks { engine, listed } => {
            let mut list_opt: Option<api::RankList> = None;
            let add = |mut page: api::RankList| {
                let (entries, next) = (page.ranks.len(), page.next.clone());
                if let Some(before) = list_opt.take() {
                    page.ranks.splice(0..0, before.ranks);
                }
                list_opt = Some(page);
                (entries, next)
            };
            let path = ["engines", &engine, "ranks"];
            client.pages(&path, &[], listed.limit, "after", add).await?;
            match list_opt {
                Some(list) => print(as_json, &list, show::ranks),
                None => Ok(()),
            }
        }
        Command::Registrations {
            engine,
            key: Some(key),
            ..
        } => {
            let path = ["engines", &engine, "registrations", &key];
            let known: api::Registration = client.json(client.request(Method::GET, &path)).await?;
            print(as_json, &known, show::registration)
        }
        Command::Registrations { engine, listed, .. } => {
            let mut registrations = Vec::new();
            let mut next = None;
            let add = |page: api::RegistrationList| {
                added(&mut registrations, page.registrations, &mut next, page.next)
            };
            let path = ["engines", &engine, "registrations"];
            client.pages(&path, &[], listed.limit, "after", add).await?;
            let list = api::RegistrationList {
                registrations,
                next,
            };
            print(as_json, &list, |list| {
                show::registrations(&list.registrations)
            })
        }
        Command::Rooms { engine, listed } => {
            let mut rooms = Vec::new();
            let mut next = None;
            let add = |page: api::RoomList| added(&mut rooms, page.rooms, &mut next, page.next);
            let path = ["engines", &engine, "rooms"];
            client.pages(&path, &[], listed.limit, "after", add).await?;
            print(as_json, &api::RoomList { rooms, next }, |list| {
                show::rooms(&list.rooms)
            })
        }
        Command::Reports { engine, listed } => {
            let mut reports = Vec::new();
            let mut next = None;
            let add =
                |page: api::ReportList| added(&mut reports, page.reports, &mut next, page.next);
            let query: Vec<_> = engine
                .map(|engine| ("namespace", engine))
                .into_iter()
                .collect();
            client
                .pages(&["reports"], &query, listed.limit, "after", add)
                .await?;
            let list = api::ReportList { reports, next };
            print(as_json, &list, |list| show::reports(&list.reports))
        }
        Command::Events(arguments) => events(client, &arguments, as_json).await,
        Command::Drain { engine } => drain(client, &engine, true, as_json).await,
        Command::Undrain { engine } => drain(client, &engine, false, as_json).await,
        Command::Evict {
            engine,
            rank,
            registration,
        } => {
            let mut path = vec!["engines", engine.as_str()];
            path.extend(rank.iter().flat_map(|rank| ["ranks", rank.as_str()]));
            path.extend(
                registration
                    .iter()
                    .flat_map(|key| ["registrations", key.as_str()]),
            );
            client.send(client.request(Method::DELETE, &path)).await?;
            Ok(())
        }
        Command::Export { file, engine } => export(client, file.as_deref(), engine).await,
        Command::Import { file, replace } => import(client, &file, replace, as_json).await,
    }
}

/// Joins a page to a list; says how many entries it had, and where the next one begins.
fn added<T>(
    list: &mut Vec<T>,
    page: Vec<T>,
    next_opt: &mut Option<String>,
    page_next_opt: Option<String>,
) -> (usize, Option<String>) {
    let entries = page.len();
    list.extend(page);
    next_opt.clone_from(&page_next_opt);
    (entries, page_next_opt)
}

/// Prints an answer for programs, or for people.
fn print<T: Serialize>(
    as_json: bool,
    answer: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    if as_json {
        let text = serde_json::to_string_pretty(answer).map_err(io::Error::from)?;
        writeln!(output, "{text}")?;
    } else {
        output.write_all(table(answer).as_bytes())?;
    }
    Ok(output.flush()?)
}

/// The filters of a request for events.
pub(super) fn event_filter(arguments: &EventArguments) -> Vec<(&'static str, String)> {
    let engine = arguments
        .engine
        .iter()
        .map(|engine| ("namespace", engine.clone()));
    let kind = arguments
        .kind
        .iter()
        .map(|kind| ("kind", kind.name().to_owned()));
    engine.chain(kind).collect()
}

async fn events(client: &Client, arguments: &EventArguments, as_json: bool) -> Result<(), Failure> {
    let print_line = |event: &api::Event| {
        let line = if as_json {
            serde_json::to_string(event).map_err(io::Error::from)?
        } else {
            show::event(event)
        };
        let mut output = io::stdout().lock();
        writeln!(output, "{line}")?;
        Ok(output.flush()?)
    };
    if arguments.follow {
        return follow::run(client, arguments, print_line).await;
    }
    let mut query = event_filter(arguments);
    let mut wanted = arguments.listed.limit.unwrap_or(u64::MAX);
    let mut since = arguments.since.unwrap_or_default();
    while wanted > 0 {
        query.retain(|(name, _)| !["since", "limit"].contains(name));
        query.push(("since", since.to_string()));
        query.push(("limit", wanted.min(1000).to_string()));
        let request = client.request(Method::GET, &["events"]).query(&query);
        let page: api::EventList = client.json(request).await?;
        page.events.iter().try_for_each(print_line)?;
        wanted = wanted.saturating_sub(page.events.len() as u64);
        if page.events.is_empty() {
            break;
        }
        since = page.next;
    }
    Ok(())
}

async fn drain(
    client: &Client,
    engine: &str,
    draining: bool,
    as_json: bool,
) -> Result<(), Failure> {
    let request = client.request(Method::PUT, &["engines", engine, "drain"]);
    let engine: api::EngineSummary = client.json(request.json(&api::Drain { draining })).await?;
    print(as_json, &engine, |engine| {
        show::engines(std::slice::from_ref(engine))
    })
}

async fn export(
    client: &Client,
    file_opt: Option<&Path>,
    engine_opt: Option<String>,
) -> Result<(), Failure> {
    let query = engine_opt.map(|engine| [("namespace", engine)]);
    let request = client.request(Method::GET, &["export"]).query(&query);
    let export: api::Export = client.json(request).await?;
    let text = serde_json::to_string_pretty(&export).map_err(io::Error::from)?;
    let Some(file) = file_opt else {
        let mut output = io::stdout().lock();
        writeln!(output, "{text}")?;
        return Ok(output.flush()?);
    };
    let failed = |error| Failure::File(file.display().to_string(), error);
    // It holds the keys of engines' memory. An older backup is replaced only by a whole new one.
    let mut beside = file.as_os_str().to_owned();
    beside.push(".partial");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut partial = options.open(&beside).map_err(failed)?;
    let written = partial
        .write_all(text.as_bytes())
        .and_then(|()| partial.write_all(b"\n"))
        .and_then(|()| partial.sync_all())
        .and_then(|()| std::fs::rename(&beside, file));
    written.map_err(|error| {
        // What is left of it is of no use; that it cannot be removed changes nothing.
        let _ = std::fs::remove_file(&beside);
        failed(error)
    })
}

async fn import(
    client: &Client,
    file: &Path,
    is_replacing: bool,
    as_json: bool,
) -> Result<(), Failure> {
    let mut text = Vec::new();
    let read = if file == Path::new("-") {
        io::stdin().lock().read_to_end(&mut text)
    } else {
        std::fs::File::open(file).and_then(|mut file| file.read_to_end(&mut text))
    };
    read.map_err(|error| Failure::File(file.display().to_string(), error))?;
    let mode = if is_replacing { "replace" } else { "merge" };
    let request = client.request(Method::POST, &["import"]);
    let request = request.query(&[("mode", mode)]);
    let request = request.header(CONTENT_TYPE, "application/json").body(text);
    let imported: api::Imported = client.json(request).await?;
    print(as_json, &imported, |imported| {
        let rows = imported
            .engines
            .iter()
            .map(|engine| [engine.clone(), "imported".to_owned()]);
        let removed = imported.removed.iter();
        let removed = removed.map(|engine| [engine.clone(), "removed".to_owned()]);
        show::table(["ENGINE", "RESULT"], rows.chain(removed).collect())
    })
}
