"""Packed descriptors are the original's, byte by byte, with a tag behind them."""

import os
import pickle

import msgpack
import numpy as np
import pytest

from conftest import make_engine
from ferry.mori_compat.io import EngineDesc, MemoryDesc, MemoryLocationType

ENGINE = bytes.fromhex("96a5656e672d41a26e30a26830a831302e302e302e31cda112cd1092")
HOST_MEMORY = bytes.fromhex(
    f"9fa5656e672d4107ffa0cf00007f0012340000ce0010000001c440{'00' * 64}0000c440{'00' * 64}ffa00000"
)
DEVICE_MEMORY = bytes.fromhex(
    "9fa5656e672d41cd012c03ac303030303a63313a30302e30"
    "cf00007f0012340000cf000000020000000002"
    f"c440{bytes(range(64)).hex()}ffcd1000c440{'00' * 64}ffa00000"
)


def test_the_published_bytes_unpack_and_pack():
    engine = EngineDesc.unpack(ENGINE)
    assert (engine.key, engine.node_id, engine.hostname) == ("eng-A", "n0", "h0")
    assert (engine.host, engine.port, engine.pid) == ("10.0.0.1", 41234, 4242)
    host = MemoryDesc.unpack(HOST_MEMORY)
    assert (host.engine_key, host.id, host.device_id, host.device_bus_id) == ("eng-A", 7, -1, "")
    assert (host.data, host.size, host.numa_node) == (0x7F0012340000, 1 << 20, 0)
    assert host.loc is MemoryLocationType.CPU
    assert host.ipc_handle == bytes(64)
    device = MemoryDesc.unpack(DEVICE_MEMORY)
    assert (device.id, device.device_id, device.device_bus_id) == (300, 3, "0000:c1:00.0")
    assert device.loc is MemoryLocationType.GPU
    assert device.ipc_handle == bytes(range(64))
    for packed, desc in ((ENGINE, engine), (HOST_MEMORY, host), (DEVICE_MEMORY, device)):
        assert desc.pack() == packed
        assert type(desc).unpack(desc.pack() + b"behind it") == desc


@pytest.mark.parametrize("length", [6, 7, 8])
def test_engines_of_every_release_unpack(length):
    elements = msgpack.unpackb(ENGINE) + ["later", [1, 2]]
    desc = EngineDesc.unpack(msgpack.packb(elements[:length]))
    assert (desc.key, desc.pid) == ("eng-A", 4242)


@pytest.mark.parametrize("length", [8, 9, 15, 16])
def test_memories_of_every_release_unpack(length):
    elements = [*msgpack.unpackb(DEVICE_MEMORY), "later"]
    desc = MemoryDesc.unpack(msgpack.packb(elements[:length]))
    assert (desc.id, desc.device_id, desc.size) == (300, 3, 8 << 30)
    assert desc.ipc_handle == bytes(range(64))
    assert desc.numa_node == -1


def test_own_descriptors_begin_as_the_original_ones():
    engine = make_engine("eng-A")
    desc = engine.get_engine_desc()
    memory = np.zeros(1 << 16, dtype=np.uint8)
    plain = engine.register_memory(memory.ctypes.data, memory.nbytes, -1, MemoryLocationType.CPU)
    elements = [desc.key, desc.node_id, desc.hostname, "127.0.0.1", desc.port, os.getpid()]
    packed = desc.pack()
    head = msgpack.packb(elements)
    assert packed[0] == head[0] + 2, "the tag and the place for notifications"
    assert packed[1 : len(head)] == head[1:]
    assert EngineDesc.unpack(packed) == desc
    expected = ["eng-A", 0, -1, "", memory.ctypes.data, memory.nbytes, 1, bytes(64), 0, 0]
    expected += [bytes(64), -1, "", 0, 0]
    head = msgpack.packb(expected)
    packed = plain.pack()
    assert packed[0] == 0xDC, "16 elements need the longer form"
    assert packed[1:3] == b"\0\x10"
    assert packed[3 : len(head) + 2] == head[1:]
    assert MemoryDesc.unpack(packed) == plain
    called_a_devices = engine.register_memory(memory, memory.nbytes, 3, MemoryLocationType.GPU)
    assert (called_a_devices.id, called_a_devices.device_id) == (1, 3)
    assert called_a_devices.loc is MemoryLocationType.GPU
    assert called_a_devices.numa_node == -1
    assert called_a_devices != plain


def test_the_node_can_be_named(monkeypatch):
    monkeypatch.setenv("MORI_NODE_ID", "rack 7")
    assert make_engine("named").get_engine_desc().node_id == "rack 7"


@pytest.mark.parametrize("kind", [EngineDesc, MemoryDesc])
def test_bad_bytes_raise_what_the_original_raises(kind):
    whole = ENGINE if kind is EngineDesc else HOST_MEMORY
    for short in (b"", whole[:1], whole[:-1]):
        with pytest.raises(RuntimeError, match="^insufficient bytes$"):
            kind.unpack(short)
    a_map = msgpack.packb({"key": "eng-A"})
    wrong_number = msgpack.packb(["eng-A", "id", "x", "y", -70000, 1])
    for wrong in (a_map, wrong_number, b"\xc0"):
        with pytest.raises(RuntimeError, match="^std::bad_cast$"):
            kind.unpack(wrong)
    for not_bytes in (bytearray(whole), memoryview(whole), "eng-A"):
        with pytest.raises(TypeError):
            kind.unpack(not_bytes)


def test_descriptors_are_neither_hashable_nor_picklable():
    for desc in (EngineDesc.unpack(ENGINE), MemoryDesc()):
        with pytest.raises(TypeError):
            hash(desc)
        with pytest.raises(TypeError):
            pickle.dumps(desc)
    with pytest.raises(TypeError):
        EngineDesc()
    assert MemoryDesc() == MemoryDesc()
    assert MemoryDesc().loc is MemoryLocationType.Unknown
