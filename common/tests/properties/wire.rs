//! Messages and descriptors.

use common::ids::{Endpoint, Room};
use common::wire::{
    Abort, AbortAck, AuxData, Bootstrap, ControlMessage, EngineDesc, FerryTrailer, Frame, KvPoll,
    MemoryDesc, MemoryLocation, Register, Release, Status, TransferInfo, decode_message,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn config() -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn room() -> impl Strategy<Value = Room> {
    (0..=Room::MAX).prop_map(|number| Room::new(number).expect("a room number"))
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    ("[a-z0-9.:-]{1,40}", any::<u16>()).prop_map(|(host, port)| Endpoint::new(host, port))
}

/// Elements that another engine may append; numbers in the forms that msgpack gives back.
fn extra() -> impl Strategy<Value = Vec<rmpv::Value>> {
    let element = prop_oneof![
        any::<u64>().prop_map(rmpv::Value::from),
        "[a-z]{0,10}".prop_map(|text| rmpv::Value::from(text.as_str())),
        vec(any::<u8>(), 0..20).prop_map(rmpv::Value::Binary),
        vec(any::<bool>().prop_map(rmpv::Value::from), 0..3).prop_map(rmpv::Value::Array),
    ];
    vec(element, 0..3)
}

prop_compose! {
    fn engine()(
        (key, node_id, hostname, host) in ("\\PC{1,20}", "\\PC{0,20}", "\\PC{0,20}", "\\PC{0,20}"),
        port in any::<u16>(),
        pid in any::<i64>(),
        extra in extra(),
    ) -> EngineDesc {
        EngineDesc { key, node_id, hostname, host, port, pid, extra }
    }
}

prop_compose! {
    fn memory()(
        (engine_key, device_bus_id, vpod_ppod_id) in ("\\PC{0,20}", "\\PC{0,12}", "\\PC{0,12}"),
        (id, data, size) in (any::<u32>(), any::<u64>(), any::<u64>()),
        (device_id, numa_node, vpod_id) in (any::<i32>(), any::<i32>(), any::<i32>()),
        location in (0u32..5).prop_map(MemoryLocation::from_number),
        (ipc_handle, fabric_handle) in (vec(any::<u8>(), 64), vec(any::<u8>(), 64)),
        (ipc_offset, fabric_offset, fabric_alloc_size) in
            (any::<u64>(), any::<u64>(), any::<u64>()),
        extra in extra(),
    ) -> MemoryDesc {
        MemoryDesc {
            engine_key, id, device_id, device_bus_id, data, size, location, ipc_handle, numa_node,
            ipc_offset, fabric_handle, vpod_id, vpod_ppod_id, fabric_offset, fabric_alloc_size,
            extra,
        }
    }
}

fn lists() -> impl Strategy<Value = Vec<Vec<u32>>> {
    vec(vec(any::<u32>(), 0..4), 0..4)
}

prop_compose! {
    fn register()(
        (endpoint, engine) in (endpoint(), engine()),
        (kv, aux) in (vec(memory(), 0..4), vec(memory(), 0..3)),
        states in vec(vec(option::of(memory()), 0..3), 0..3),
        gpu_id in any::<i64>(),
        (tp_size, engine_rank, dcp_size, dcp_rank) in
            (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>()),
        kv_item_len in any::<u64>(),
        (state_item_lens, state_dims, state_layer_ids) in (lists(), lists(), lists()),
        kv_layer_ids in vec(any::<u32>(), 0..5),
    ) -> Register {
        Register {
            endpoint, engine, kv, aux, states, gpu_id, tp_size, engine_rank, kv_item_len,
            state_item_lens, state_dims, dcp_size, dcp_rank, state_layer_ids, kv_layer_ids,
            release: Release::NEWEST,
        }
    }
}

prop_compose! {
    fn transfer_info()(
        (room, endpoint, engine_key) in (room(), endpoint(), "[ -~]{0,40}"),
        kv_indices in vec(any::<i32>(), 0..20),
        aux_index in option::of(any::<u32>()),
        state_indices in vec(vec(any::<i32>(), 0..5), 0..4),
        required_dst_info_num in any::<u32>(),
        decode_prefix_len in option::of(1..=u64::MAX),
    ) -> TransferInfo {
        TransferInfo {
            room, endpoint, engine_key, kv_indices, aux_index, state_indices,
            required_dst_info_num, decode_prefix_len,
        }
    }
}

fn message() -> impl Strategy<Value = ControlMessage> {
    let poll = prop::sample::select(KvPoll::ALL.to_vec());
    // An empty reason is an empty frame, which is no reason.
    let status = (room(), poll, any::<i64>(), option::of("\\PC{1,40}"));
    let abort = (room(), option::of((endpoint(), option::of(any::<i64>()))));
    let abort_ack = (room(), any::<i64>(), option::of(any::<i64>()));
    let aux_data = (room(), any::<u32>(), any::<u32>(), vec(any::<u8>(), 0..200));
    prop_oneof![
        register().prop_map(|message| ControlMessage::Register(Box::new(message))),
        transfer_info().prop_map(ControlMessage::TransferInfo),
        status.prop_map(|(room, poll, prefill_rank, reason)| {
            ControlMessage::Status(Status {
                room,
                poll,
                prefill_rank,
                reason,
            })
        }),
        abort.prop_map(|(room, reply)| {
            let (reply_to, generation) = reply.unzip();
            ControlMessage::Abort(Abort {
                room,
                reply_to,
                generation: generation.flatten(),
            })
        }),
        abort_ack.prop_map(|(room, prefill_rank, generation)| {
            ControlMessage::AbortAck(AbortAck {
                room,
                prefill_rank,
                generation,
            })
        }),
        aux_data.prop_map(|(room, buffer_index, aux_index, data)| {
            ControlMessage::AuxData(AuxData {
                room,
                buffer_index,
                aux_index,
                data,
            })
        }),
        (room(), endpoint()).prop_map(|(room, reply_to)| {
            ControlMessage::Bootstrap(Bootstrap { room, reply_to })
        }),
    ]
}

fn release() -> impl Strategy<Value = Release> {
    prop::sample::select(Release::ALL.to_vec())
}

/// What a message says in the form of a release: that form cannot carry everything.
fn as_release_says(message: &ControlMessage, release: Release) -> ControlMessage {
    let form = release.form();
    let mut said = message.clone();
    match &mut said {
        ControlMessage::Register(register) => {
            // From 14 to 17 frames a message does not tell which of four releases it is of.
            register.release = Release::Nested0513.max(release);
            if form.register_frames < Release::NEWEST.form().register_frames {
                register.release = Release::Nested0513;
                register.dcp_size = 1;
                register.dcp_rank = 0;
                register.state_layer_ids.clear();
                register.kv_layer_ids.clear();
            }
        }
        ControlMessage::TransferInfo(info) if form.transfer_info_frames < 10 => {
            info.decode_prefix_len = None;
        }
        ControlMessage::Abort(abort) => {
            if !form.abort_endpoint {
                abort.reply_to = None;
            }
            if !form.abort_generation || abort.reply_to.is_none() {
                abort.generation = None;
            }
        }
        ControlMessage::AbortAck(ack) if !form.abort_generation => ack.generation = None,
        _ => {}
    }
    said
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_message_comes_back_from_every_releases_form(
        message in message(),
        release in release(),
    ) {
        let is_flat = release == Release::Flat0512;
        let has_state = matches!(
            message,
            ControlMessage::Register(_) | ControlMessage::TransferInfo(_)
        );
        let Ok(frames) = message.encode(release) else {
            prop_assert!(is_flat && has_state, "only the flat form cannot carry everything");
            return Ok(());
        };
        if is_flat && has_state {
            // Recognised and refused, or one that has no state; never another message.
            if let Ok(incoming) = decode_message(&frames) {
                prop_assert_eq!(incoming.message.kind(), message.kind());
            }
            return Ok(());
        }
        let incoming = decode_message(&frames).expect("an encoded message is decoded");
        prop_assert_eq!(incoming.message, as_release_says(&message, release));
        prop_assert_eq!((incoming.trailer, incoming.ignored_frames), (None, 0));
    }

    #[test]
    fn a_trailer_comes_back_and_unknown_frames_are_counted(
        message in message(),
        generation in option::of(any::<u64>()),
        checksums in vec(any::<u64>(), 0..5),
        unknown in vec(vec(any::<u8>(), 0..4), 0..3),
    ) {
        let trailer = FerryTrailer { generation, checksums };
        let newest = Release::NEWEST;
        let mut frames = message.encode_with_trailer(newest, &trailer).expect("encodes");
        let unknown_count = unknown.len();
        frames.extend(unknown);
        let incoming = decode_message(&frames);
        // A frame behind a message without its optional ones may be one of them, and with more
        // frames a STATUS looks like a TRANSFER_INFO, to SGLang too.
        let is_whole = match &message {
            ControlMessage::Status(_) => false,
            ControlMessage::Abort(abort) => abort.generation.is_some(),
            ControlMessage::AbortAck(ack) => ack.generation.is_some(),
            _ => true,
        };
        if is_whole || unknown_count == 0 {
            let incoming = incoming.expect("decodes");
            prop_assert_eq!(incoming.message, as_release_says(&message, newest));
            prop_assert_eq!(incoming.trailer, Some(trailer));
            prop_assert_eq!(incoming.ignored_frames, unknown_count);
        }
    }

    #[test]
    fn descriptors_come_back(engine in engine(), memory in memory()) {
        let packed = (engine.pack().expect("packs"), memory.pack().expect("packs"));
        prop_assert_eq!(EngineDesc::unpack(&packed.0).expect("unpacks"), engine);
        prop_assert_eq!(MemoryDesc::unpack(&packed.1).expect("unpacks"), memory);
    }

    /// An older peer's array is shorter; what it leaves out has MoRI's defaults.
    #[test]
    fn shorter_arrays_have_defaults(mut memory in memory(), kept in 0usize..=15) {
        memory.extra.clear();
        let packed = memory.pack().expect("packs");
        let value: rmpv::Value = rmp_serde::from_slice(&packed).expect("msgpack");
        let elements = value.as_array().expect("an array").clone();
        prop_assert_eq!(elements.len(), 15);
        let shorter = elements.iter().take(kept).cloned().collect();
        let shorter = rmp_serde::to_vec(&rmpv::Value::Array(shorter)).expect("packs");
        let Ok(unpacked) = MemoryDesc::unpack(&shorter) else {
            prop_assert!(kept < 8, "the elements of the first releases are enough");
            return Ok(());
        };
        let repacked = unpacked.pack().expect("packs");
        let value: rmpv::Value = rmp_serde::from_slice(&repacked).expect("msgpack");
        let full = value.as_array().expect("an array");
        prop_assert_eq!(full.get(..kept), elements.get(..kept));
    }

    /// Whatever arrives, the answer is a message or an error, and a message that was understood
    /// says the same when it is said again.
    #[test]
    fn any_frames_are_a_message_or_an_error(
        frames in vec(vec(any::<u8>(), 0..40), 0..20),
        head in prop::sample::select(vec![
            &b"MoriMsgGuard"[..], b"ABORT", b"ABORT_ACK", b"AUX_DATA", b"BOOTSTRAP", b"",
        ]),
    ) {
        let mut all: Vec<Frame> = vec![head.to_vec()];
        all.extend(frames);
        understood_alike(&all)?;
    }

    /// Damage to one frame of a good message.
    #[test]
    fn damaged_messages_are_a_message_or_an_error(
        message in message(),
        which in any::<prop::sample::Index>(),
        damage in prop_oneof![
            (any::<prop::sample::Index>(), 0u8..8).prop_map(Some),
            Just(None),
        ],
    ) {
        let mut frames = message.encode(Release::NEWEST).expect("encodes");
        let place = which.index(frames.len());
        let Some((at, bit)) = damage else {
            frames.truncate(place);
            return understood_alike(&frames);
        };
        let frame = &mut frames[place];
        if !frame.is_empty() {
            let at = at.index(frame.len());
            frame[at] ^= 1 << bit;
        }
        understood_alike(&frames)?;
    }
}

fn understood_alike(frames: &[Frame]) -> Result<(), TestCaseError> {
    let Ok(incoming) = decode_message(frames) else {
        return Ok(());
    };
    let again = incoming.message.encode(Release::NEWEST).expect("encodes");
    let understood = decode_message(&again).expect("what was understood can be said");
    prop_assert_eq!(
        as_release_says(&understood.message, Release::NEWEST),
        as_release_says(&incoming.message, Release::NEWEST)
    );
    Ok(())
}
