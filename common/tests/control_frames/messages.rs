//! What SGLang sends is read and written alike.

use common::ids::Endpoint;
use common::wire::{
    Abort, AbortAck, AuxData, ControlMessage, Frame, KvPoll, Release, Status, TransferInfo,
    unique_rank,
};
use golden::{Tally, list};
use serde_json::json;

use crate::{
    FILE, decoded, frames_of, integers, number, outcome_of, register_of, room_of, text,
    transfer_info_outcome,
};

#[test]
fn registrations_are_read_and_written() {
    let golden = golden::load(FILE);
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
    let golden = golden::load(FILE);
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
            grant_opt: None,
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

#[test]
fn statuses_aborts_and_aux_data_are_read_and_written() {
    let golden = golden::load(FILE);
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
    let golden = golden::load(FILE);
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

#[test]
fn a_prefix_of_zero_is_read_as_it_came_and_sent_as_an_empty_frame() {
    // SGLang's reader gives 0 for "0" and None for an empty frame, its writer makes empty frames.
    let frames = |prefix: &[u8]| -> Vec<Frame> {
        let frames: [&[u8]; 10] = [
            b"MoriMsgGuard",
            b"7",
            b"127.0.0.1",
            b"1",
            b"key",
            b"",
            b"1",
            b"",
            b"1",
            prefix,
        ];
        frames.map(<[u8]>::to_vec).into()
    };
    for (prefix, expected) in [(b"0".as_slice(), Some(0)), (b"", None)] {
        let ControlMessage::TransferInfo(info) = decoded(&frames(prefix)).unwrap() else {
            panic!("not what was sent");
        };
        assert_eq!(info.decode_prefix_len, expected);
        let message = ControlMessage::TransferInfo(info);
        assert_eq!(message.encode(Release::NEWEST).unwrap()[9], b"");
    }
}
