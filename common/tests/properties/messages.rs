//! Strategies for every control message, and what is left of a message in a release's form.

use common::check::{CheckMode, CheckRun};
use common::ids::{ByteLen, ByteOffset, ComponentId, Endpoint, Room};
use common::wire::descriptor::HANDLE_BYTES;
use common::wire::{
    Abort, AbortAck, AuxData, Bootstrap, CheckGroup, Checked, Checks, ControlMessage, EngineDesc,
    FerryTrailer, Grant, Hello, KvPoll, MemoryDesc, MemoryLocation, Register, Release, Status,
    TransferInfo,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// A value of msgpack that an extra element of a descriptor can be. No NaN, as it equals nothing.
pub fn msgpack_value() -> impl Strategy<Value = rmpv::Value> {
    let leaf = prop_oneof![
        Just(rmpv::Value::Nil),
        any::<bool>().prop_map(rmpv::Value::from),
        any::<i64>().prop_map(rmpv::Value::from),
        any::<u64>().prop_map(rmpv::Value::from),
        any::<i32>().prop_map(|number| rmpv::Value::F32(number as f32)),
        any::<i64>().prop_map(|number| rmpv::Value::F64(number as f64)),
        "\\PC{0,8}".prop_map(rmpv::Value::from),
        vec(any::<u8>(), 0..40).prop_map(rmpv::Value::Binary),
        (any::<i8>(), vec(any::<u8>(), 0..20))
            .prop_map(|(kind, data)| rmpv::Value::Ext(kind, data)),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(rmpv::Value::Array),
            vec((inner.clone(), inner), 0..3).prop_map(rmpv::Value::Map),
        ]
    })
}

pub fn engine_desc() -> impl Strategy<Value = EngineDesc> {
    let texts = ("\\PC{1,12}", "\\PC{0,12}", "\\PC{0,40}", "[0-9.]{0,12}");
    let rest = (any::<u16>(), any::<i64>(), vec(msgpack_value(), 0..3));
    (texts, rest).prop_map(
        |((key, node_id, hostname, host), (port, pid, extra))| EngineDesc {
            key,
            node_id,
            hostname,
            host,
            port,
            pid,
            extra,
        },
    )
}

pub fn memory_desc() -> impl Strategy<Value = MemoryDesc> {
    let owner = ("\\PC{0,12}", any::<u32>(), any::<i32>(), "[0-9a-f:.]{0,12}");
    let place = (any::<u64>(), any::<u64>(), any::<u32>(), any::<i32>());
    let handle = || vec(any::<u8>(), 0..=HANDLE_BYTES);
    let device = (handle(), any::<u64>(), handle(), any::<i32>());
    let fabric = ("\\PC{0,8}", any::<u64>(), any::<u64>());
    (owner, place, device, fabric, vec(msgpack_value(), 0..3)).prop_map(
        |(owner, place, device, fabric, extra)| MemoryDesc {
            engine_key: owner.0,
            id: owner.1,
            device_id: owner.2,
            device_bus_id: owner.3,
            data: place.0,
            size: place.1,
            location: MemoryLocation::from_number(place.2 % 4),
            ipc_handle: device.0,
            numa_node: place.3,
            ipc_offset: device.1,
            fabric_handle: device.2,
            vpod_id: device.3,
            vpod_ppod_id: fabric.0,
            fabric_offset: fabric.1,
            fabric_alloc_size: fabric.2,
            extra,
        },
    )
}

fn room() -> impl Strategy<Value = Room> {
    let number = prop_oneof![0..=Room::MAX, Just(0), Just(Room::MAX)];
    number.prop_map(|number| Room::new(number).expect("at most the largest room"))
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    ("[ -~]{1,20}", any::<u16>()).prop_map(|(host, port)| Endpoint { host, port })
}

fn lists<T: Arbitrary + Clone + 'static>() -> impl Strategy<Value = Vec<Vec<T>>> {
    vec(vec(any::<T>(), 0..5), 0..4)
}

pub fn register() -> impl Strategy<Value = Register> {
    let descs = || vec(memory_desc(), 0..3);
    let states = vec(vec(option::weighted(0.8, memory_desc()), 0..3), 0..3);
    let buffers = (engine_desc(), descs(), descs(), states);
    let numbers = (any::<i64>(), any::<u32>(), any::<u32>(), any::<u64>());
    let dcp = (any::<u32>(), any::<u32>());
    let layers = (lists(), lists(), lists(), vec(any::<u32>(), 0..5));
    (endpoint(), buffers, numbers, dcp, layers).prop_map(
        |(endpoint, buffers, numbers, dcp, layers)| Register {
            endpoint,
            engine: buffers.0,
            kv: buffers.1,
            aux: buffers.2,
            states: buffers.3,
            gpu_id: numbers.0,
            tp_size: numbers.1,
            engine_rank: numbers.2,
            kv_item_len: numbers.3,
            state_item_lens: layers.0,
            state_dims: layers.1,
            dcp_size: dcp.0,
            dcp_rank: dcp.1,
            state_layer_ids: layers.2,
            kv_layer_ids: layers.3,
            release: Release::NEWEST,
        },
    )
}

fn transfer_info() -> impl Strategy<Value = TransferInfo> {
    let indices = (vec(any::<i32>(), 0..8), lists());
    let numbers = (
        option::of(any::<u32>()),
        any::<u32>(),
        option::of(any::<u64>()),
    );
    (room(), endpoint(), "[ -~]{0,20}", indices, numbers).prop_map(
        |(room, endpoint, engine_key, indices, numbers)| TransferInfo {
            room,
            endpoint,
            engine_key,
            kv_indices: indices.0,
            aux_index: numbers.0,
            state_indices: indices.1,
            required_dst_info_num: numbers.1,
            decode_prefix_len: numbers.2,
            grant_opt: None,
        },
    )
}

fn status() -> impl Strategy<Value = Status> {
    let reason = option::of("\\PC{1,40}");
    (room(), select(&KvPoll::ALL[..]), any::<i64>(), reason).prop_map(
        |(room, poll, prefill_rank, reason)| Status {
            room,
            poll,
            prefill_rank,
            reason,
        },
    )
}

fn check_group() -> impl Strategy<Value = CheckGroup> {
    let component = prop_oneof![
        Just(ComponentId::Kv),
        Just(ComponentId::Aux),
        any::<u16>().prop_map(ComponentId::State),
    ];
    let run =
        (any::<[u64; 3]>(), any::<u32>()).prop_map(|([offset, len, stride], count)| CheckRun {
            offset: ByteOffset(offset),
            len: ByteLen(len),
            stride,
            count,
        });
    let lists = (
        vec(any::<u32>(), 1..5),
        vec(run, 1..5),
        vec(any::<u64>(), 1..9),
    );
    (component, lists).prop_map(|(component, (tensors, runs, sums))| CheckGroup {
        component,
        tensors,
        runs,
        sums,
    })
}

fn checks() -> impl Strategy<Value = Checks> {
    let numbers = (any::<i64>(), any::<u64>(), select(&CheckMode::ALL[..]));
    (room(), numbers, vec(check_group(), 0..4)).prop_map(
        |(room, (prefill_rank, token, mode), groups)| Checks {
            room,
            prefill_rank,
            token,
            mode,
            groups,
        },
    )
}

fn checked() -> impl Strategy<Value = Checked> {
    let mismatch = option::of("\\PC{1,40}");
    (room(), endpoint(), any::<u64>(), mismatch).prop_map(|(room, endpoint, token, mismatch)| {
        Checked {
            room,
            endpoint,
            token,
            mismatch,
        }
    })
}

/// Any message that can be sent.
pub fn message() -> impl Strategy<Value = ControlMessage> {
    let generation = || option::of(any::<i64>());
    let abort = (room(), option::of(endpoint()), generation());
    let abort = abort.prop_map(|(room, reply_to, generation)| Abort {
        room,
        reply_to,
        generation,
    });
    let ack = (room(), any::<i64>(), generation());
    let ack = ack.prop_map(|(room, prefill_rank, generation)| AbortAck {
        room,
        prefill_rank,
        generation,
    });
    let row = (any::<u32>(), any::<u32>(), vec(any::<u8>(), 0..40));
    let aux = (room(), row).prop_map(|(room, (buffer_index, aux_index, data))| AuxData {
        room,
        buffer_index,
        aux_index,
        data,
    });
    let bootstrap = (room(), endpoint()).prop_map(|(room, reply_to)| Bootstrap { room, reply_to });
    let mode = option::of(select(&CheckMode::ALL[..]));
    let hello = (endpoint(), engine_desc(), any::<u64>(), mode);
    let hello = hello.prop_map(|(endpoint, engine, register, checks)| Hello {
        endpoint,
        engine,
        register,
        checks,
    });
    prop_oneof![
        checks().prop_map(|message| ControlMessage::Checks(Box::new(message))),
        checked().prop_map(ControlMessage::Checked),
        hello.prop_map(|message| ControlMessage::Hello(Box::new(message))),
        status().prop_map(ControlMessage::Status),
        abort.prop_map(ControlMessage::Abort),
        ack.prop_map(ControlMessage::AbortAck),
        aux.prop_map(ControlMessage::AuxData),
        bootstrap.prop_map(ControlMessage::Bootstrap),
        transfer_info().prop_map(ControlMessage::TransferInfo),
        register().prop_map(|message| ControlMessage::Register(Box::new(message))),
    ]
}

pub fn release() -> impl Strategy<Value = Release> {
    select(&Release::ALL[..])
}

pub fn trailer() -> impl Strategy<Value = FerryTrailer> {
    let grant = ("[ -~]{0,20}", option::of(any::<[u8; 16]>()))
        .prop_map(|(engine, key)| Grant { engine, key });
    (
        option::of(any::<u64>()),
        vec(any::<u64>(), 0..5),
        option::of(grant),
    )
        .prop_map(|(generation, checksums, grant)| FerryTrailer {
            generation,
            checksums,
            grant,
        })
}

/// What a release's form keeps of a message, by the table of releases in the specification.
pub fn kept_by(release: Release, message: &ControlMessage) -> ControlMessage {
    let mut message = message.clone();
    let before = |other: Release| release < other;
    match &mut message {
        ControlMessage::Register(register) if before(Release::Dcp0522) => {
            register.dcp_size = 1;
            register.dcp_rank = 0;
            register.state_layer_ids.clear();
            register.kv_layer_ids.clear();
            register.release = Release::Nested0513;
        }
        ControlMessage::TransferInfo(info) => {
            // A prefix of zero is an empty frame.
            let prefix = info.decode_prefix_len.filter(|length| *length > 0);
            info.decode_prefix_len = prefix.filter(|_| !before(Release::Prefix0515));
        }
        ControlMessage::Abort(abort) => {
            abort.reply_to = abort
                .reply_to
                .take()
                .filter(|_| !before(Release::Nested0513));
            let carried = abort.reply_to.is_some() && !before(Release::Dcp0522);
            abort.generation = abort.generation.filter(|_| carried);
        }
        ControlMessage::AbortAck(ack) if before(Release::Dcp0522) => ack.generation = None,
        _ => {}
    }
    message
}
