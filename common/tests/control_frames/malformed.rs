//! Short, malformed and legacy messages are told apart as SGLang does, but for the named rules.

use common::ids::Room;
use common::wire::{ControlMessage, Frame};
use golden::{Tally, list};
use serde_json::{Value, json};

use crate::{FILE, decoded, frames_of, nested, outcome_of, transfer_info_outcome};

/// "Integers are plain ASCII digits (a leading minus only where a value can be negative)".
fn is_loose_integer(frame: &[u8], may_be_negative: bool) -> bool {
    let Ok(text) = std::str::from_utf8(frame) else {
        return false;
    };
    let plain = text
        .strip_prefix('-')
        .filter(|_| may_be_negative)
        .unwrap_or(text);
    let is_plain = !plain.is_empty() && plain.bytes().all(|byte| byte.is_ascii_digit());
    let python_reads_it = text
        .trim()
        .trim_start_matches(['+', '-'])
        .chars()
        .all(|character| character.is_numeric() || character == '_');
    !is_plain && !text.trim().is_empty() && python_reads_it
}

const PLAIN_INTEGERS: &str =
    "integers are plain ascii digits, a minus only where a value can be negative";
const ROOM_RANGE: &str = "rooms are 0 to 2^63-1";
const WHOLE_LISTS: &str = "int lists are whole: no short tail";
const KNOWN_STATUS: &str = "a status is one of the five that a room can have";
const NO_ADDRESS: &str = "an empty host is no address";
const ENGINE_KEY: &str = "an engine descriptor has a key";

fn loose_room(frame: &[u8]) -> Option<&'static str> {
    if is_loose_integer(frame, false) {
        return Some(PLAIN_INTEGERS);
    }
    let number: Option<u128> = std::str::from_utf8(frame)
        .ok()
        .and_then(|text| text.parse().ok());
    number
        .filter(|number| *number > u128::from(Room::MAX))
        .map(|_| ROOM_RANGE)
}

fn ignored(rule: Option<&'static str>, recorded: &Value, ours: &Value) -> Option<&'static str> {
    // A loose form that both refuse is no deviation.
    rule.filter(|_| !(recorded.is_null() && ours.is_null()))
}

#[test]
fn bad_short_and_legacy_statuses_and_aborts_are_told_apart() {
    let golden = golden::load(FILE);
    let parse = &golden["parse"];
    let mut tally = Tally::default();
    for case in list(parse, "abort") {
        let frames = frames_of(case);
        let ours = match decoded(&frames) {
            Ok(ControlMessage::Abort(abort)) => json!({
                "room": abort.room.to_string(),
                "decode_ip": abort.reply_to.as_ref().map(|endpoint| endpoint.host.clone()),
                "decode_port": abort.reply_to.as_ref().map(|endpoint| endpoint.port),
                "generation": abort.generation,
            }),
            _ => Value::Null,
        };
        let recorded = &case["outcome"]["value"];
        let empty_host = frames.get(2).is_some_and(Vec::is_empty) && frames.len() >= 4;
        let rule = frames.get(1).and_then(|room| loose_room(room));
        let rule = rule.or(empty_host.then_some(NO_ADDRESS));
        tally.compare(
            &case["text"],
            recorded,
            &ours,
            ignored(rule, recorded, &ours),
        );
    }
    for case in list(parse, "abort_ack") {
        let frames = frames_of(case);
        let ours = match decoded(&frames) {
            Ok(ControlMessage::AbortAck(ack)) => json!({
                "room": ack.room.to_string(),
                "prefill_rank": ack.prefill_rank,
                "generation": ack.generation,
            }),
            _ => Value::Null,
        };
        let recorded = &case["outcome"]["value"];
        let rule = frames.get(1).and_then(|room| loose_room(room)).or_else(|| {
            let signed = frames.get(2..4.min(frames.len())).unwrap_or_default();
            signed
                .iter()
                .any(|frame| is_loose_integer(frame, true))
                .then_some(PLAIN_INTEGERS)
        });
        tally.compare(
            &case["text"],
            recorded,
            &ours,
            ignored(rule, recorded, &ours),
        );
    }
    for case in list(parse, "status") {
        let frames = frames_of(case);
        let ours = match decoded(&frames) {
            Ok(ControlMessage::Status(status)) => json!([
                status.room.to_string(),
                status.poll as u8,
                status.prefill_rank,
                status.reason
            ]),
            _ => Value::Null,
        };
        let recorded = &case["outcome"]["value"];
        let rule = frames.get(1).and_then(|room| loose_room(room)).or_else(|| {
            let status = frames.get(2).map_or(&b""[..], Vec::as_slice);
            let known = [b"0", b"1", b"2", b"3", b"4"]
                .iter()
                .any(|known| status == *known);
            let rank_is_loose = frames
                .get(3)
                .is_some_and(|rank| is_loose_integer(rank, true));
            if rank_is_loose {
                Some(PLAIN_INTEGERS)
            } else {
                (!known).then_some(KNOWN_STATUS)
            }
        });
        tally.compare(
            &case["text"],
            recorded,
            &ours,
            ignored(rule, recorded, &ours),
        );
    }
    tally.finish("parse.status, abort, abort_ack");
}

/// The value, or that there is an error; the words are free.
fn recorded_outcome(case: &Value) -> Value {
    if case["outcome"].get("raises").is_some() {
        Value::Null
    } else {
        case["outcome"]["value"].clone()
    }
}

fn with_guard(case: &Value) -> Vec<Frame> {
    let mut frames = vec![b"MoriMsgGuard".to_vec()];
    frames.extend(frames_of(case));
    frames
}

/// Whether a list of lists ends before its last list is whole.
fn has_short_tail(frame: &[u8]) -> bool {
    let (fields, _) = frame.as_chunks::<4>();
    let mut fields = fields
        .iter()
        .map(|field| u32::from_le_bytes(*field) as usize);
    let count = fields.next().unwrap_or_default();
    let lengths: Vec<usize> = fields.take(count).collect();
    !frame.is_empty()
        && (lengths.len() != count || frame.len() != 4 + 4 * count + lengths.iter().sum::<usize>())
}

#[test]
fn bad_short_and_legacy_transfer_infos_are_told_apart() {
    let golden = golden::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden["parse"], "transfer_info_payload_without_guard") {
        let frames = with_guard(case);
        let recorded = match recorded_outcome(case) {
            Value::Null => Value::Null,
            value => transfer_info_outcome(&value),
        };
        let ours = match decoded(&frames) {
            Ok(ControlMessage::TransferInfo(info)) => outcome_of(&info),
            _ => Value::Null,
        };
        let at = |position: usize| frames.get(position).map_or(&b""[..], Vec::as_slice);
        let rule = loose_room(at(1)).or_else(|| {
            let loose = [3, 6, 8, 9]
                .into_iter()
                .any(|position| is_loose_integer(at(position), false));
            if loose {
                Some(PLAIN_INTEGERS)
            } else {
                has_short_tail(at(7)).then_some(WHOLE_LISTS)
            }
        });
        tally.compare(
            &case["text"],
            &recorded,
            &ours,
            ignored(rule, &recorded, &ours),
        );
    }
    tally.finish("parse.transfer_info");
}

#[test]
fn bad_short_and_legacy_registrations_are_told_apart() {
    let golden = golden::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden["parse"], "registration_payload_without_guard") {
        let frames = with_guard(case);
        let fields = |value: &Value| {
            json!({
                "endpoint": value["endpoint"],
                "dst_port": value["dst_port"],
                "gpu_id": value["gpu_id"],
                "decode_tp_size": value["decode_tp_size"],
                "decode_tp_rank": value["decode_tp_rank"],
                "dst_kv_item_len": value["dst_kv_item_len"],
                "dst_state_item_lens": nested::<i64>(&value["dst_state_item_lens"]),
                "dst_dcp_size": value["dst_dcp_size"],
                "dst_dcp_rank": value["dst_dcp_rank"],
            })
        };
        let recorded = match recorded_outcome(case) {
            Value::Null => Value::Null,
            value => fields(&value),
        };
        let ours = match decoded(&frames) {
            Ok(ControlMessage::Register(register)) => json!({
                "endpoint": register.endpoint.host,
                "dst_port": register.endpoint.port,
                "gpu_id": register.gpu_id,
                "decode_tp_size": register.tp_size,
                "decode_tp_rank": register.engine_rank,
                "dst_kv_item_len": register.kv_item_len,
                "dst_state_item_lens": register.state_item_lens,
                "dst_dcp_size": register.dcp_size,
                "dst_dcp_rank": register.dcp_rank,
            }),
            _ => Value::Null,
        };
        let at = |position: usize| frames.get(position).map_or(&b""[..], Vec::as_slice);
        let loose = [3, 9, 10, 11, 14, 15]
            .into_iter()
            .any(|position| is_loose_integer(at(position), false));
        let short = [12, 13, 16]
            .into_iter()
            .any(|position| has_short_tail(at(position)));
        let rule = if at(4) == [0x90] {
            Some(ENGINE_KEY)
        } else if loose || is_loose_integer(at(8), true) {
            Some(PLAIN_INTEGERS)
        } else {
            short.then_some(WHOLE_LISTS)
        };
        tally.compare(
            format!("{} frames", frames.len()),
            &recorded,
            &ours,
            ignored(rule, &recorded, &ours),
        );
    }
    for case in list(&golden["parse"], "encoder_limits") {
        // A state item length beyond 32 bits and an index beyond 31 bits cannot be written: the
        // types of `Register` and `TransferInfo` have no such values.
        tally.compare(case, &true, &case["outcome"].get("raises").is_some(), None);
    }
    tally.finish("parse.registration");
}
