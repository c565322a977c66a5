#!/usr/bin/env python3
"""Writes what the fuzz targets begin from: the recorded messages, in the form of their inputs."""

import hashlib
import json
import pathlib
import struct
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = REPOSITORY / "tests" / "golden"
GUARD, NO_ROOM = b"MoriMsgGuard".hex(), b"None".hex()
REGISTER_FRAMES = 18

ATTACH = {
    "role": "prefill",
    "bootstrap": "127.0.0.1:8998",
    "parallel": {},
    "engine": {
        "kv_cache_dtype": "auto",
        "load_balance_method": "round_robin",
        "decode_allocation_policy": "early",
    },
    "pools": [65536],
    "layout": {
        "page_size": 1,
        "kv": {
            "tensors": [{"pool": 0, "offset": 0, "bytes": 4096, "item_len": 64}],
            "attention": "mla",
            "head_num": 1,
            "total_head_num": 1,
        },
        "aux": [{"pool": 0, "offset": 4096, "bytes": 64, "item_len": 8}],
        "states": [],
    },
}
EXPORTED = {"generation": None, "ranks": [], "registrations": {}, "draining_since": 7}
REG_ENDPOINT = (
    "00 00000036 96 a5656e672d41 92 93ff0100 93ff0100 00 95 00 cd1000 01 9100"
    "92 c410 00000000000000000000ffff7f000001 c406 000000000000 00 00"
)
ASK_REGION = "01 0000000e 94 a5656e672d42 00 07 94 00000000"
RETIRE = "02 00000003 92 09 01"
# An engine of no more than a key, and one memory without elements.
DIRECTORY = "92 c403 91a165 91 c401 90"
# Two tensors of one run of two ranges, and a sum of each.
CHECKS = [
    b"FERRY_CHECKS",
    b"7",
    b"0",
    b"1",
    b"full",
    struct.pack("<IIIIIIQQQIQQQQ", 0, 2, 1, 4, 0, 1, 64, 32, 128, 2, 1, 2, 3, 4),
]
CHECKED = [b"FERRY_CHECKED", b"7", b"127.0.0.1", b"9000", b"1", b"kv differs"]
LOG = b'0 commit 1 0 ["a\\u001fgeneration","a\\u001fdraining"]\t\t\x011\n'


def messages(value):
    """Every list of frames in a recording, as hex."""
    if isinstance(value, dict):
        frames = value.get("frames")
        if isinstance(frames, list) and all(isinstance(frame, str) for frame in frames):
            yield frames
        for inner in value.values():
            yield from messages(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from messages(inner)


def joined(frames):
    """Frames with two bytes of length before each."""
    parts = (bytes.fromhex(frame) for frame in frames)
    return b"".join(struct.pack("<H", len(part)) + part for part in parts if len(part) < 1 << 16)


def zmtp(frames):
    """One message as it crosses a connection."""
    wire = b""
    for at, frame in enumerate(bytes.fromhex(frame) for frame in frames):
        more = 1 if at + 1 < len(frames) else 0
        long = len(frame) > 255
        length = struct.pack(">Q", len(frame)) if long else bytes([len(frame)])
        wire += bytes([more | (2 if long else 0)]) + length + frame
    return wire


def seeds():
    """Pairs of a target and an input."""
    recorded = list(messages(json.loads((GOLDEN / "control_frames.json").read_text())))
    registers = [frames for frames in recorded if frames[:2] == [GUARD, NO_ROOM]]
    infos = [frames for frames in recorded if frames[:1] == [GUARD] and len(frames) in (9, 10)]
    for frames in recorded:
        yield "control_message", joined(frames)
        yield "zmtp_stream", zmtp(frames)
        for frame in frames:
            yield "descriptor", bytes.fromhex(frame)
            yield "int_lists", bytes.fromhex(frame)
    for at, register in enumerate(registers):
        padded = register + [""] * (REGISTER_FRAMES - len(register))
        for info in infos[at % 7 :: 7]:
            yield "plan", bytes([at & 0xFE, at % 3]) + joined(padded) + joined(info)
    scenarios = json.loads((GOLDEN / "bootstrap_http.json").read_text())["scenarios"]
    for step in (step for scenario in scenarios for step in scenario["steps"]):
        if body := step["request"].get("body"):
            text = body if isinstance(body, str) else json.dumps(body)
            yield "registration", text.encode()
            yield "admin_body", text.encode()
        if (text := step["response"].get("body", "")).startswith("{"):
            yield "bootstrap_answer", text.encode()
    registration = {"role": "prefill", "instance": "h:1", "rank": 0, "component_types": ["mamba"]}
    for register in registers:
        yield "admin_body", json.dumps(registration | {"register_frames": register}).encode()
    export = {"version": 1, "exported_at": 1, "engines": {"a": EXPORTED}}
    yield "admin_body", json.dumps(export).encode()
    for text in REG_ENDPOINT, ASK_REGION, RETIRE:
        yield "rdma_control", bytes.fromhex(text)
    for frames in CHECKS, CHECKED:
        yield "control_message", joined(frame.hex() for frame in frames)
    yield "directory", bytes.fromhex(DIRECTORY)
    yield "store_log", LOG
    yield "attach_request", json.dumps(ATTACH).encode()
    request = struct.pack("<BQIIQ", 1, 7, 1, 2, 0x300)
    group = struct.pack("<I16sI", 1, bytes(16), 2)
    yield "tcp_framing", request + group + struct.pack("<QQQQ", 0, 0x100, 0x1000, 0x200)
    yield "same_host_message", bytes.fromhex("81a55461626c6501")


def main():
    """Writes each input under its target's folder, named by its hash."""
    folder = pathlib.Path(sys.argv[1])
    for target, content in seeds():
        place = folder / target
        place.mkdir(parents=True, exist_ok=True)
        (place / hashlib.sha1(content).hexdigest()).write_bytes(content)


if __name__ == "__main__":
    main()
