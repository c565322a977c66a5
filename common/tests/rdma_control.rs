//! MoRI's control plane byte by byte: messages and parts of messages that the real library sent.

use common::wire::MemoryLocation;
use common::wire::rdma_control::{
    AskMemoryRegion, ControlTag, ControlType, EndpointHandle, HEADER_BYTES, MAX_BODY_BYTES,
    MemoryKeys, MemoryPart, RegEndpoint, Retire, TopoKey, framed, parse_header, unpack,
};

fn bytes(hex: &str) -> Vec<u8> {
    let digits: String = hex.split_whitespace().collect();
    hex::decode(digits).unwrap()
}

fn body(message: &[u8]) -> (ControlType, &[u8]) {
    let (header, body) = message.split_first_chunk::<HEADER_BYTES>().unwrap();
    let (kind, length) = parse_header(*header).unwrap();
    assert_eq!(length, body.len());
    (kind, body)
}

const HOST: TopoKey = TopoKey {
    device_id: -1,
    location: MemoryLocation::Host,
    numa_node: 0,
};

/// What a real initiator sends.
const REG_ENDPOINT: &str = "00 00000036 96 a5656e672d41 92 93ff0100 93ff0100 00 \
    95 00 cd1000 01 9100 92 c410 00000000000000000000ffff7f000001 c406 000000000000 00 00";

fn reg_endpoint() -> RegEndpoint {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
    RegEndpoint {
        engine_key: "eng-A".to_owned(),
        local: HOST,
        remote: HOST,
        device: 0,
        endpoint: EndpointHandle {
            queue_pair: 0x1000,
            port: 1,
            gid,
            ..EndpointHandle::default()
        },
        nic_rank: 0,
        rail: 0,
        tag_opt: None,
    }
}

#[test]
fn the_initiators_request_has_moris_bytes() {
    let recorded = bytes(REG_ENDPOINT);
    assert_eq!(
        framed(ControlType::RegEndpoint, &reg_endpoint()),
        Ok(recorded.clone())
    );
    let (kind, body) = body(&recorded);
    assert_eq!(kind, ControlType::RegEndpoint);
    assert_eq!(unpack(body), Ok(reg_endpoint()));
}

#[test]
fn the_acceptors_reply_has_moris_bytes() {
    // A device's memory on the other side, an acceptor's queue pair, and the uninitialised bytes
    // that a real reply had in place of an address.
    let recorded = bytes(
        "00 00000038 96 a5656e672d42 92 93ff0100 93 03 02 ff 02 \
         95 00 cd1a2b 01 9100 92 c410 00000000000000000000ffff0a000001 c406 8006ff6cd17f 01 cd0102",
    );
    let (kind, reply) = body(&recorded);
    assert_eq!(kind, ControlType::RegEndpoint);
    let reply: RegEndpoint = unpack(reply).unwrap();
    assert_eq!(
        (
            reply.engine_key.as_str(),
            reply.device,
            reply.nic_rank,
            reply.rail
        ),
        ("eng-B", 2, 1, 0x102)
    );
    assert_eq!(
        reply.remote,
        TopoKey {
            device_id: 3,
            location: MemoryLocation::Device,
            numa_node: -1
        }
    );
    assert_eq!(reply.endpoint.queue_pair, 0x1a2b);
    assert_eq!(reply.endpoint.gid[12..], [10, 0, 0, 1]);
    assert_eq!(framed(kind, &reply), Ok(recorded));
}

#[test]
fn the_question_for_a_region_and_its_answer_have_moris_bytes() {
    let question = bytes("01 0000000e 94 a5656e672d42 00 07 94 00000000");
    let asked = AskMemoryRegion {
        engine_key: "eng-B".to_owned(),
        device: 0,
        id: 7,
        ..AskMemoryRegion::default()
    };
    assert_eq!(
        framed(ControlType::AskMemoryRegion, &asked),
        Ok(question.clone())
    );
    assert_eq!(unpack(body(&question).1), Ok(asked));

    let answer = bytes(
        "01 00000020 94 a5656e672d41 00 00 94 cf000056375be92d80 cd0100 ce80000100 ce00010000",
    );
    let told = AskMemoryRegion {
        engine_key: "eng-A".to_owned(),
        device: 0,
        id: 0,
        keys: MemoryKeys {
            address: 0x5637_5be9_2d80,
            local_key: 0x100,
            remote_key: 0x8000_0100,
            length: 65_536,
        },
        tag_opt: None,
    };
    assert_eq!(
        framed(ControlType::AskMemoryRegion, &told),
        Ok(answer.clone())
    );
    assert_eq!(unpack(body(&answer).1), Ok(told));
}

#[test]
fn older_and_later_releases_are_read() {
    let eph = "95 00 cd1000 01 9100 92 c410 00000000000000000000ffff7f000001 c406 000000000000";
    let mut expected = reg_endpoint();
    expected.rail = -1;
    let five = bytes(&format!("95 a5656e672d41 92 93ff0100 93ff0100 00 {eph} 00"));
    assert_eq!(unpack(&five), Ok(expected.clone()));
    // 1.1: four elements, and topos of two.
    (expected.local.numa_node, expected.remote.numa_node) = (-1, -1);
    let four = bytes(&format!("94 a5656e672d41 92 92ff01 92ff01 00 {eph}"));
    assert_eq!(unpack(&four), Ok(expected));
    // One that is yet to come: extra elements everywhere that MoRI's macro allows them.
    let more = bytes(&format!(
        "98 a5656e672d41 92 94ff0100c0 93ff0100 00 {eph} 00 00 93010203 a3616263"
    ));
    assert_eq!(unpack(&more), Ok(reg_endpoint()));
    // Bytes behind the array.
    let mut trailing = body(&bytes(REG_ENDPOINT)).1.to_vec();
    trailing.push(0xc1);
    assert_eq!(unpack(&trailing), Ok(reg_endpoint()));
}

#[test]
fn a_ferry_tag_survives_and_moris_reader_would_ignore_it() {
    let mut message = reg_endpoint();
    message.tag_opt = Some(ControlTag {
        token: b"secret".to_vec(),
        region_key: Vec::new(),
        path_mtu: 5,
        refusal: "no".to_owned(),
        instance: vec![3; 16],
        ..ControlTag::default()
    });
    let packed = framed(ControlType::RegEndpoint, &message).unwrap();
    let plain = bytes(REG_ENDPOINT);
    assert_eq!(packed[5], 0x97, "a seventh element");
    assert_eq!(packed[6..6 + plain.len() - 6], plain[6..]);
    assert_eq!(unpack(body(&packed).1), Ok(message));

    let ask = AskMemoryRegion {
        engine_key: "e".to_owned(),
        tag_opt: Some(ControlTag {
            region_key: vec![7; 16],
            ..ControlTag::default()
        }),
        ..AskMemoryRegion::default()
    };
    let packed = framed(ControlType::AskMemoryRegion, &ask).unwrap();
    assert_eq!(unpack(body(&packed).1), Ok(ask.clone()));

    // Of device memory in two pieces; older engines take the elements before.
    let part = |bytes, remote_key| MemoryPart { bytes, remote_key };
    let told = AskMemoryRegion {
        tag_opt: Some(ControlTag {
            parts: vec![part(1 << 21, 7), part(4096, u32::MAX)],
            reads_back: true,
            ..ControlTag::default()
        }),
        ..ask
    };
    let packed = framed(ControlType::AskMemoryRegion, &told).unwrap();
    let tail = bytes("92 92 ce00200000 07 92 cd1000 ceffffffff c3");
    assert!(packed.ends_with(&tail), "{packed:02x?}");
    assert_eq!(unpack(body(&packed).1), Ok(told));
    for broken in [
        "91 92 01 00 c3",
        "91 91 01 c3",
        "91 92 01 cf0000000100000000 c3",
        "90 01",
    ] {
        let mut wrong = packed[..packed.len() - tail.len()].to_vec();
        wrong.extend(bytes(broken));
        let is_sound = unpack::<AskMemoryRegion>(&wrong[HEADER_BYTES..]).is_ok();
        assert_eq!(is_sound, broken == "91 92 01 00 c3", "{broken}");
    }

    let retire = Retire {
        queue_pair: 9,
        device: 1,
    };
    let packed = framed(ControlType::Retire, &retire).unwrap();
    assert_eq!(packed, bytes("02 00000003 92 09 01"));
    assert_eq!(unpack(body(&packed).1), Ok(retire));
}

#[test]
fn bad_bytes_are_errors() {
    let good = body(&bytes(REG_ENDPOINT)).1.to_vec();
    for end in 0..good.len() - 2 {
        assert!(unpack::<RegEndpoint>(&good[..end]).is_err(), "{end} bytes");
    }
    for bad in [
        "90",
        "80",
        "c0",
        "93 a165 92 92ff01 92ff01 00",
        // Counts that must be exact: an endpoint of four, a lid of two, a gid of 15 bytes.
        "94 a165 92 92ff01 92ff01 00 94 00 01 01 9100",
        "94 a165 92 92ff01 92ff01 00 95 00 01 01 920000 92 c410 00000000000000000000000000000000 c406 000000000000",
        "94 a165 92 92ff01 92ff01 00 95 00 01 01 9100 92 c40f 000000000000000000000000000000 c406 000000000000",
        // An array that claims four billion elements.
        "dd ffffffff",
        // A tag without a region key.
        "97 a165 92 92ff01 92ff01 00 95 00 01 01 9100 92 c410 00000000000000000000000000000000 c406 000000000000 00 00 92a446525931 c400",
    ] {
        assert!(unpack::<RegEndpoint>(&bytes(bad)).is_err(), "{bad}");
    }
    assert!(unpack::<AskMemoryRegion>(&bytes("94 a165 00 07 93 000000")).is_err());
    assert!(unpack::<AskMemoryRegion>(&bytes("92 a165 00")).is_err());
    let mut header = [0, 0, 0, 0, 0];
    header[1..].copy_from_slice(&(MAX_BODY_BYTES as u32 + 1).to_be_bytes());
    assert!(parse_header(header).is_err());
    assert!(parse_header([3, 0, 0, 0, 1]).is_err());
    assert!(parse_header(*b"FRYT\x01").is_err());
}
