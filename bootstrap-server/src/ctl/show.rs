//! Tables for people. What is shown came from whoever registered, so nothing of it may steer a
//! terminal.

use std::borrow::Cow;
use std::time::{Duration, UNIX_EPOCH};

use crate::api;

/// Between two columns.
const GAP: &str = "  ";
/// For what is not known.
const UNKNOWN: &str = "-";

/// Text without anything that a terminal would obey.
pub(super) fn plain(text: &str) -> Cow<'_, str> {
    if text.contains(char::is_control) {
        Cow::Owned(text.replace(char::is_control, "?"))
    } else {
        Cow::Borrowed(text)
    }
}

/// Lines of aligned columns below their names.
pub(super) fn table<const N: usize>(names: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut lines = vec![names.map(str::to_owned)];
    lines.extend(
        rows.into_iter()
            .map(|row| row.map(|cell| plain(&cell).into_owned())),
    );
    let length = |cell: &String| cell.chars().count();
    let mut widths = [0; N];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = length(cell).max(*width);
        }
    }
    let mut text = String::new();
    for line in &lines {
        let padded = line.iter().zip(widths);
        let padded = padded.map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(padded.collect::<Vec<_>>().join(GAP).trim_end());
        text.push('\n');
    }
    text
}

fn or_unknown<T: ToString>(value_opt: Option<T>) -> String {
    value_opt.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string())
}

fn age(seconds: u64) -> String {
    humantime::format_duration(Duration::from_secs(seconds)).to_string()
}

fn reachable(reachable_opt: Option<bool>) -> String {
    let word = match reachable_opt {
        Some(true) => "reachable",
        Some(false) => "unreachable",
        None => "not probed",
    };
    word.to_owned()
}

fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut units = UNITS.into_iter().peekable();
    while value >= 1024.0
        && let Some(_) = units.next_if(|unit| *unit != UNITS[UNITS.len() - 1])
    {
        value /= 1024.0;
    }
    let unit = units.next().unwrap_or_default();
    if unit == UNITS[0] {
        format!("{bytes} {unit}")
    } else {
        format!("{value:.1} {unit}")
    }
}

pub(super) fn engines(engines: &[api::EngineSummary]) -> String {
    let row = |engine: &api::EngineSummary| {
        let state = match engine {
            _ if engine.draining_since.is_some() => "draining",
            _ if engine.problem.is_some() => "failing",
            _ if engine.generation.is_none() => "empty",
            _ if engine.complete => "serving",
            _ => "incomplete",
        };
        [
            engine.namespace.clone(),
            state.to_owned(),
            format!("{}/{}", engine.ranks_present, engine.ranks_expected),
            or_unknown(engine.generation),
            engine.registrations.to_string(),
            engine.rooms.to_string(),
            if engine.listening { "yes" } else { "no" }.to_owned(),
            or_unknown(engine.problem.as_ref()),
        ]
    };
    let names = [
        "ENGINE",
        "STATE",
        "RANKS",
        "GENERATION",
        "REGISTRATIONS",
        "ROOMS",
        "LISTENING",
        "PROBLEM",
    ];
    table(names, engines.iter().map(row).collect())
}

pub(super) fn ranks(list: &api::RankList) -> String {
    let present = list.ranks.iter().map(|rank| {
        [
            rank.rank.clone(),
            reachable(rank.reachable),
            rank.instance.clone(),
            age(rank.age_seconds),
            rank.release.clone(),
        ]
    });
    let missing = list.ranks_missing.iter().map(|name| {
        let [unknown, also, too] = [(); 3].map(|()| UNKNOWN.to_owned());
        [name.clone(), "missing".to_owned(), unknown, also, too]
    });
    let names = ["RANK", "STATE", "INSTANCE", "REGISTERED", "RELEASE"];
    table(names, present.chain(missing).collect())
}

pub(super) fn registrations(registrations: &[api::Registration]) -> String {
    let row = |known: &api::Registration| {
        let components = known.components.as_ref().map(|components| {
            let kinds = components.iter().map(|component| component.kind.as_str());
            kinds.collect::<Vec<_>>().join(",")
        });
        [
            known.engine_key.clone(),
            known.role.clone(),
            known.rank.to_string(),
            reachable(known.reachable),
            known.instance.clone(),
            age(known.age_seconds),
            or_unknown(known.sglang_release.as_ref()),
            or_unknown(components),
        ]
    };
    let names = [
        "KEY",
        "ROLE",
        "RANK",
        "STATE",
        "INSTANCE",
        "REGISTERED",
        "RELEASE",
        "COMPONENTS",
    ];
    table(names, registrations.iter().map(row).collect())
}

/// One registration and its buffers.
pub(super) fn registration(known: &api::Registration) -> String {
    let row = |component: &api::Component| {
        let lengths = component.item_lengths.iter().map(ToString::to_string);
        let mut lengths: Vec<String> = lengths.collect();
        lengths.dedup();
        [
            component.kind.clone(),
            component.tensors.to_string(),
            component.elided_tensors.to_string(),
            bytes(component.bytes),
            lengths.join(","),
        ]
    };
    let names = ["COMPONENT", "BUFFERS", "ELIDED", "SIZE", "ITEM BYTES"];
    let components = || known.components.iter().flatten();
    let head = registrations(std::slice::from_ref(known));
    let summary = table(names, components().map(row).collect());
    let buffers = components().flat_map(|component| {
        let buffers = component.buffers.iter().flatten().flatten();
        buffers.map(|buffer| {
            [
                component.kind.clone(),
                buffer.id.to_string(),
                buffer.address.clone(),
                bytes(buffer.bytes),
                buffer.location.clone(),
                or_unknown(buffer.device),
                or_unknown(buffer.numa_node),
            ]
        })
    });
    let names = [
        "COMPONENT",
        "BUFFER",
        "ADDRESS",
        "SIZE",
        "LOCATION",
        "DEVICE",
        "NUMA",
    ];
    format!("{head}\n{summary}\n{}", table(names, buffers.collect()))
}

pub(super) fn rooms(rooms: &[api::Room]) -> String {
    let row = |room: &api::Room| {
        [
            room.room.to_string(),
            room.dp_rank.to_string(),
            age(room.age_seconds),
        ]
    };
    table(
        ["ROOM", "DP RANK", "BOUND"],
        rooms.iter().map(row).collect(),
    )
}

pub(super) fn reports(reports: &[api::Report]) -> String {
    let row = |known: &api::Report| {
        let report = &known.report;
        let mut transports: Vec<&str> = report
            .peers
            .iter()
            .map(|peer| peer.transport.as_str())
            .collect();
        transports.sort_unstable();
        transports.dedup();
        let moved = report.components.iter();
        let moved = moved.map(|component| component.bytes);
        let last_failure = report.failures.last();
        [
            known.namespace.clone(),
            known.engine_key.clone(),
            report.role.clone(),
            report.rank.clone(),
            report.version.clone(),
            if known.stale { "stale" } else { "fresh" }.to_owned(),
            age(known.age_seconds),
            report.peers.len().to_string(),
            or_unknown((!transports.is_empty()).then(|| transports.join(","))),
            report.rooms_open.to_string(),
            bytes(moved.fold(0, u64::saturating_add)),
            or_unknown(last_failure.map(|failure| format!("{}: {}", failure.room, failure.reason))),
        ]
    };
    let names = [
        "ENGINE",
        "KEY",
        "ROLE",
        "RANK",
        "VERSION",
        "STATE",
        "REPORTED",
        "PEERS",
        "TRANSPORT",
        "ROOMS",
        "MOVED",
        "LAST FAILURE",
    ];
    table(names, reports.iter().map(row).collect())
}

/// One line. Events are printed as they come, so nothing is aligned with what is yet to come.
pub(super) fn event(event: &api::Event) -> String {
    let at = UNIX_EPOCH + Duration::from_millis(event.at_ms);
    let at = humantime::format_rfc3339_millis(at);
    let kind = event.kind.name();
    let engine = event.namespace.as_deref().unwrap_or(UNKNOWN);
    let line = format!(
        "{at}  {}  {kind:<12}  {engine}  {}",
        event.id, event.message
    );
    plain(&line).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_nothing_steers_a_terminal() {
        let rows = vec![
            ["é".to_owned(), "\u{1b}[31mred".to_owned()],
            ["longer".to_owned(), String::new()],
        ];
        assert_eq!(
            table(["A", "B"], rows),
            "A       B\né       ?[31mred\nlonger\n"
        );
    }

    #[test]
    fn sizes_are_for_people() {
        for (size, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(size), expected);
        }
    }
}
