//! Every case of `control_frames.json`: what SGLang's own code sent and how it read.

mod support;

use common::ids::{Endpoint, Room};
use common::wire::{
    Abort, AbortAck, AuxData, ControlMessage, EngineDesc, Frame, KvPoll, MemoryDesc, Register,
    Release, Status, TransferInfo, decode_message, descriptor::HANDLE_BYTES,
    descriptor::MemoryLocation, unique_rank,
};
use serde_json::{Value, json};
use support::{Tally, integer, list};

const FILE: &str = "control_frames.json";

fn frames_of(case: &Value) -> Vec<Frame> {
    list(case, "frames")
        .iter()
        .map(|frame| hex::decode(frame.as_str().expect("hex")).expect("hex"))
        .collect()
}

fn room_of(value: &Value) -> Room {
    let number = integer(value).and_then(|number| u64::try_from(number).ok());
    number.and_then(Room::new).expect("a room number")
}

fn integers<T: TryFrom<i128>>(value: &Value) -> Vec<T> {
    let items = value.as_array().map_or(&[][..], Vec::as_slice);
    items
        .iter()
        .map(|item| {
            integer(item)
                .and_then(|number| T::try_from(number).ok())
                .expect("an integer")
        })
        .collect()
}

fn nested<T: TryFrom<i128>>(value: &Value) -> Vec<Vec<T>> {
    value
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(integers)
        .collect()
}

fn number<T: TryFrom<i128>>(value: &Value) -> T {
    integer(value)
        .and_then(|number| T::try_from(number).ok())
        .expect("an integer")
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

/// A descriptor as the golden file spells it out (handles are left out there; they are zeros).
fn memory_desc(value: &Value) -> Option<MemoryDesc> {
    if value.is_null() {
        return None;
    }
    Some(MemoryDesc {
        engine_key: text(&value["engine_key"]),
        id: number(&value["id"]),
        device_id: number(&value["device_id"]),
        device_bus_id: text(&value["device_bus_id"]),
        data: number(&value["data"]),
        size: number(&value["size"]),
        location: MemoryLocation::from_number(number(&value["loc"])),
        ipc_handle: vec![0; HANDLE_BYTES],
        numa_node: number(&value["numa_node"]),
        ipc_offset: number(&value["ipc_offset"]),
        fabric_handle: vec![0; HANDLE_BYTES],
        vpod_id: number(&value["vpod_id"]),
        vpod_ppod_id: text(&value["vpod_ppod_id"]),
        fabric_offset: number(&value["fabric_offset"]),
        fabric_alloc_size: number(&value["fabric_alloc_size"]),
        extra: Vec::new(),
    })
}

fn descs(value: &Value) -> Vec<MemoryDesc> {
    let items = value.as_array().map_or(&[][..], Vec::as_slice);
    items
        .iter()
        .map(|item| memory_desc(item).expect("a descriptor"))
        .collect()
}

fn register_of(decoded: &Value) -> Register {
    let engine = &decoded["engine_desc"];
    let states = decoded["state"].as_array().map_or(&[][..], Vec::as_slice);
    Register {
        endpoint: Endpoint::new(text(&decoded["endpoint"]), number(&decoded["dst_port"])),
        engine: EngineDesc {
            key: text(&engine["key"]),
            node_id: text(&engine["node_id"]),
            hostname: text(&engine["hostname"]),
            host: text(&engine["host"]),
            port: number(&engine["port"]),
            pid: number(&engine["pid"]),
            extra: Vec::new(),
        },
        kv: descs(&decoded["kv"]),
        aux: descs(&decoded["aux"]),
        states: states
            .iter()
            .map(|component| {
                component
                    .as_array()
                    .expect("a list")
                    .iter()
                    .map(memory_desc)
                    .collect()
            })
            .collect(),
        gpu_id: number(&decoded["gpu_id"]),
        tp_size: number(&decoded["decode_tp_size"]),
        engine_rank: number(&decoded["decode_tp_rank"]),
        kv_item_len: number(&decoded["dst_kv_item_len"]),
        state_item_lens: nested(&decoded["dst_state_item_lens"]),
        state_dims: nested(&decoded["dst_state_dim_per_tensor"]),
        dcp_size: number(&decoded["dst_dcp_size"]),
        dcp_rank: number(&decoded["dst_dcp_rank"]),
        state_layer_ids: nested(&decoded["dst_state_layer_ids"]),
        kv_layer_ids: integers(&decoded["dst_kv_layer_ids"]),
        release: Release::Dcp0522,
    }
}

fn decoded(frames: &[Frame]) -> Result<ControlMessage, String> {
    decode_message(frames)
        .map(|incoming| incoming.message)
        .map_err(|error| error.to_string())
}

#[test]
fn registrations_are_read_and_written() {
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden, "registration") {
        let name = case["case"].to_string();
        let frames = frames_of(case);
        let mut register = register_of(&case["decoded"]);
        if register.kv.is_empty() {
            // The file leaves out the descriptors of a model with many layers; the frame has them.
            register.kv = match decoded(&frames) {
                Ok(ControlMessage::Register(ours)) => ours.kv,
                _ => Vec::new(),
            };
            let layers = list(&case["kv_args"], "kv_data_ptrs");
            let pointers: Vec<u64> = register.kv.iter().map(|desc| desc.data).collect();
            tally.compare(&name, &layers.iter().map(number).collect(), &pointers, None);
        }
        let message = ControlMessage::Register(Box::new(register));
        tally.compare(&name, &Ok(message.clone()), &decoded(&frames), None);
        tally.compare(&name, &Ok(frames), &message.encode(Release::NEWEST), None);
    }
    tally.finish("registration");
}

#[test]
fn transfer_infos_are_read_and_written() {
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden, "transfer_info") {
        let name = case["case"].to_string();
        let frames = frames_of(case);
        let (inputs, want) = (&case["inputs"], &case["decoded"]);
        let is_dummy = inputs["is_dummy"] == json!(true);
        let states = inputs["state_indices"].as_array().filter(|_| !is_dummy);
        let built = TransferInfo {
            room: room_of(&case["room"]),
            endpoint: Endpoint::new(text(&want["endpoint"]), number(&want["dst_port"])),
            engine_key: text(&want["engine_key"]),
            kv_indices: if is_dummy {
                vec![]
            } else {
                integers(&inputs["kv_indices"])
            },
            aux_index: inputs["aux_index"]
                .as_u64()
                .filter(|_| !is_dummy)
                .map(|row| row as u32),
            state_indices: states
                .map_or_else(Vec::new, |lists| lists.iter().map(integers).collect()),
            required_dst_info_num: number(&inputs["required_dst_info_num"]),
            decode_prefix_len: inputs["decode_prefix_len"].as_u64(),
        };
        let message = ControlMessage::TransferInfo(built.clone());
        tally.compare(
            &name,
            &Ok(frames.clone()),
            &message.encode(Release::NEWEST),
            None,
        );
        match decoded(&frames) {
            Ok(ControlMessage::TransferInfo(ours)) => {
                tally.compare(
                    &name,
                    &transfer_info_outcome(want),
                    &outcome_of(&ours),
                    None,
                );
            }
            other => tally.wrong(format!("{name}: {other:?}")),
        }
    }
    tally.finish("transfer_info");
}

/// The fields that SGLang's reader gives; -1 is its word for "no aux row".
fn outcome_of(info: &TransferInfo) -> Value {
    json!({
        "room": info.room.to_string(),
        "endpoint": info.endpoint.host,
        "dst_port": info.endpoint.port,
        "engine_key": info.engine_key,
        "dst_kv_indices": info.kv_indices,
        "dst_aux_index": info.aux_index.map_or(-1, i64::from),
        "dst_state_indices": info.state_indices,
        "required_dst_info_num": info.required_dst_info_num,
        "is_dummy": info.is_dummy(),
        "decode_prefix_len": info.decode_prefix_len,
    })
}

/// Indices are numbers or decimal strings in the file; keys may be fewer than ours.
fn transfer_info_outcome(value: &Value) -> Value {
    json!({
        "room": value["room"],
        "endpoint": value["endpoint"],
        "dst_port": value["dst_port"],
        "engine_key": value["engine_key"],
        "dst_kv_indices": integers::<i64>(&value["dst_kv_indices"]),
        "dst_aux_index": value["dst_aux_index"],
        "dst_state_indices": nested::<i64>(&value["dst_state_indices"]),
        "required_dst_info_num": value["required_dst_info_num"],
        "is_dummy": value["is_dummy"],
        "decode_prefix_len": value["decode_prefix_len"],
    })
}

#[test]
fn statuses_aborts_and_aux_data_are_read_and_written() {
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for case in list(&golden, "status") {
        let group = |name: &str| integers::<u32>(&case[name]);
        let (tp, pp, cp) = (group("tp"), group("pp"), group("cp"));
        let rank = unique_rank(tp[0], pp[0], pp[1], cp[0], cp[1]).expect("a small rank");
        tally.compare(
            "unique rank",
            &number::<u32>(&case["unique_rank"]),
            &rank.get(),
            None,
        );
        let message = ControlMessage::Status(Status {
            room: room_of(&case["parsed"][0]),
            poll: KvPoll::from_number(number(&case["status"])).expect("a status"),
            prefill_rank: rank.get().into(),
            reason: case["reason"].as_str().map(str::to_owned),
        });
        let frames = frames_of(case);
        tally.compare(
            "status",
            &Ok(frames.clone()),
            &message.encode(Release::NEWEST),
            None,
        );
        tally.compare("status", &Ok(message), &decoded(&frames), None);
    }
    for case in list(&golden, "abort") {
        let inputs = &case["inputs"];
        let port = inputs["decode_port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        let reply_to = inputs["decode_ip"].as_str().zip(port);
        let message = ControlMessage::Abort(Abort {
            room: room_of(&inputs["room"]),
            reply_to: reply_to.map(|(host, port)| Endpoint::new(host, port)),
            generation: inputs["generation"].as_i64(),
        });
        let frames = frames_of(case);
        tally.compare("abort", &Ok(frames), &message.encode(Release::NEWEST), None);
    }
    for case in list(&golden, "abort_ack") {
        let inputs = &case["inputs"];
        let message = ControlMessage::AbortAck(AbortAck {
            room: room_of(&inputs["room"]),
            prefill_rank: number(&inputs["prefill_rank"]),
            generation: inputs["generation"].as_i64(),
        });
        let frames = frames_of(case);
        tally.compare(
            "abort_ack",
            &Ok(frames.clone()),
            &message.encode(Release::NEWEST),
            None,
        );
        tally.compare("abort_ack", &Ok(message), &decoded(&frames), None);
    }
    for case in list(&golden, "aux_data") {
        let inputs = &case["inputs"];
        let frames = frames_of(case);
        let message = ControlMessage::AuxData(AuxData {
            room: room_of(&json!(String::from_utf8_lossy(&frames[1]))),
            buffer_index: number(&inputs["buffer_index"]),
            aux_index: number(&inputs["aux_index"]),
            data: (0..number::<usize>(&inputs["len"]))
                .map(|byte| byte as u8)
                .collect(),
        });
        tally.compare(
            "aux_data",
            &Ok(frames.clone()),
            &message.encode(Release::NEWEST),
            None,
        );
        tally.compare("aux_data", &Ok(message), &decoded(&frames), None);
    }
    for case in list(&golden, "bootstrap_msg") {
        round_trip(&mut tally, "bootstrap_msg", &frames_of(case));
    }
    tally.finish("status, abort, abort_ack, aux_data, bootstrap");
}

/// Real messages are read and give the same frames again.
fn round_trip(tally: &mut Tally, case: &str, frames: &[Frame]) {
    match decoded(frames) {
        Ok(message) => {
            let again = message.encode(Release::NEWEST);
            tally.compare(case, &Ok(frames.to_vec()), &again, None);
        }
        Err(error) => tally.wrong(format!("{case}: {error}")),
    }
}

#[test]
fn whole_flows_are_read_and_written() {
    let golden = support::load(FILE);
    let mut tally = Tally::default();
    for flow in list(&golden, "wire_flows") {
        for message in list(flow, "messages") {
            let frames = frames_of(message);
            let case = format!("{} {}", flow["name"], message["kind"]);
            let kind = decoded(&frames).map(|message| message.kind().to_uppercase());
            tally.compare(&case, &Ok(text(&message["kind"])), &kind, None);
            round_trip(&mut tally, &case, &frames);
        }
    }
    tally.finish("wire_flows");
}

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
    let golden = support::load(FILE);
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
    let golden = support::load(FILE);
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
    let golden = support::load(FILE);
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
