"""Engines of two processes: each transport, peers that die, memory that is taken back."""

import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import make_engine, until
from ferry.mori_compat.enums import PeerFailureReason
from ferry.mori_compat.io import EngineDesc, IOEngine, MemoryDesc, StatusCode

SIZE = 1 << 20


def connect(far, size=SIZE, environment=None):
    """Return an engine, its memory and descriptor, and those of one in another process."""
    engine = make_engine("near")
    other = far(size, environment)
    engine.register_remote_engine(EngineDesc.unpack(other.engine_desc))
    memory = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    near = engine.register_memory(memory)
    return engine, memory, near, other, MemoryDesc.unpack(other.memory_desc)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_bytes_move_between_processes_and_nothing_else_changes(far, monkeypatch, transport):
    monkeypatch.setenv("FERRY_TRANSPORTS", transport)
    engine, memory, near, other, there = connect(far)
    assert engine.create_session(near, there).transport == transport
    other.ask("know", engine.get_engine_desc().pack())
    sources, targets, sizes = [0, 5000, 300_000], [700_000, 1, 90_000], [100_000, 4096, 123]
    statuses = engine.batch_write([near], [sources], [there], [targets], [sizes], [41])
    assert engine.wait_all(statuses, 20_000) is StatusCode.SUCCESS
    expected = np.full(SIZE, 0xEE, np.uint8)
    for source, target, size in zip(sources, targets, sizes, strict=True):
        expected[target : target + size] = memory[source : source + size]
    assert other.ask("read") == expected.tobytes()
    until(lambda: other.ask("has_ended", "near", 41))
    assert not other.ask("has_ended", "near", 42)

    status = engine.read(near, 10, there, 0, 5000, 42)
    status.Wait()
    assert status.Succeeded()
    assert (memory[10:5010] == expected[:5000]).all()


@pytest.mark.parametrize("transport", ["cma", "tcp"])
def test_a_dead_peer_fails_its_transfers_and_is_reported_once(far, monkeypatch, transport):
    monkeypatch.setenv("FERRY_TRANSPORTS", transport)
    engine, _memory, near, other, there = connect(far)
    session = engine.create_session(near, there)
    assert engine.pop_peer_failure() is None
    other.kill()
    until(lambda: not session.alive())
    status = session.write(0, 0, 100, 0)
    status.Wait()
    assert status.Failed()
    event = until(engine.pop_peer_failure)
    assert event.remote_engine_key == EngineDesc.unpack(other.engine_desc).key
    assert event.reason is PeerFailureReason.PEER_UNREACHABLE
    assert (event.qp_num, event.port_num, event.device_name) == (0, 0, transport)
    assert event.detail
    assert engine.pop_peer_failure() is None
    with pytest.raises(RuntimeError, match="no transport reaches"):
        engine.write(near, 0, there, 0, 100, 0)


def test_a_peer_that_dies_in_the_middle_of_writes_fails_them_all_in_time(far):
    engine, _memory, near, other, there = connect(far, 64 << 20)
    offsets = np.arange(0, 64 << 20, 4096)
    sizes = np.full(len(offsets), 4096)
    session = engine.create_session(near, there)
    statuses, stop = [], threading.Event()

    def write_on():
        while not stop.is_set() and len(statuses) < 10_000:
            status = session.batch_write(offsets, offsets, sizes, len(statuses))
            statuses.append(status)
            if status.Failed():
                return
            if len(statuses) % 4 == 0:
                status.WaitFor(10_000)

    writer = threading.Thread(target=write_on)
    writer.start()
    until(lambda: len(statuses) > 8)
    other.kill()
    writer.join(20)
    stop.set()
    assert not writer.is_alive()
    begun = time.monotonic()
    for status in statuses:
        assert status.WaitFor(10_000) is not StatusCode.IN_PROGRESS
    assert time.monotonic() - begun < 10
    assert statuses[-1].Failed()


def test_a_successor_with_the_same_key_is_reached(far):
    engine, _memory, near, other, there = connect(far)
    status = engine.write(near, 0, there, 0, 8, 0)
    status.Wait()
    assert status.Succeeded()
    other.kill()
    successor = far()
    engine.register_remote_engine(EngineDesc.unpack(successor.engine_desc))
    status = engine.write(near, 0, MemoryDesc.unpack(successor.memory_desc), 0, SIZE, 0)
    status.Wait()
    assert status.Succeeded()


def test_nobody_writes_where_it_was_taken_back(far):
    engine, _memory, near, other, there = connect(far)
    offsets = np.arange(0, SIZE, 4096)
    session = engine.create_session(near, there)
    failures = []

    def write_on():
        while True:
            status = session.batch_write(offsets, offsets, np.full(len(offsets), 4096), 0)
            status.Wait()
            if status.Failed():
                failures.append(status.Code())
                return

    writer = threading.Thread(target=write_on)
    writer.start()
    time.sleep(0.05)
    other.ask("deregister")
    writer.join(20)
    assert failures == [StatusCode.ERR_NOT_FOUND]
    assert set(other.ask("read")) == {0x55}


def test_a_peer_that_is_not_there_raises(monkeypatch):
    monkeypatch.setenv("FERRY_TRANSPORTS", "tcp")
    engine, gone = make_engine("near"), make_engine("gone")
    desc, memory = gone.get_engine_desc(), np.zeros(64, np.uint8)
    there = gone.register_memory(memory)
    near = engine.register_memory(memory)
    del gone
    engine.register_remote_engine(desc)
    with pytest.raises(RuntimeError, match="gone"):
        engine.create_session(near, there)
    with pytest.raises(RuntimeError, match="refused"):
        engine.batch_write([near], [[0]], [there], [[0]], [[8]], [0])
    assert engine.pop_peer_failure().remote_engine_key == "gone"


def test_a_foreign_peer_is_refused_with_what_to_do(monkeypatch):
    engine = make_engine("near")
    foreign = EngineDesc.unpack(bytes.fromhex("96a5656e672d41a26e30a26830a7302e302e302e3009cd1092"))
    engine.register_remote_engine(foreign)
    memory = np.zeros(64, np.uint8)
    near = engine.register_memory(memory)
    there = bytes.fromhex("97a5656e672d4100ffa0cf00007f001234000040" + "01")
    with pytest.raises(RuntimeError, match="cma-trust-descriptors"):
        engine.write(near, 0, MemoryDesc.unpack(there), 0, 8, 0)


def test_an_interrupt_ends_a_wait():
    program = """
import _thread, signal, threading
# Where SIGINT is ignored, as in a shell's background job, Python leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
from ferry.mori_compat.cpp import StatusCode, TransferStatus
status = TransferStatus()
status.SetCode(StatusCode.IN_PROGRESS)
threading.Timer(0.2, _thread.interrupt_main).start()
try:
    status.Wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout == "interrupted\n"


def test_engines_leave_no_threads_and_no_descriptors_behind():
    def counts():
        from pathlib import Path

        return [len(list(Path("/proc/self", name).iterdir())) for name in ("task", "fd")]

    def one_life():
        one, other = make_engine("one"), make_engine("other")
        one.register_remote_engine(other.get_engine_desc())
        memory = np.zeros(1 << 16, np.uint8)
        near, there = one.register_memory(memory[:100]), other.register_memory(memory[100:])
        status = one.write(near, 0, there, 0, 100, 0)
        status.Wait()
        assert status.Succeeded()

    one_life()
    before = counts()
    for _ in range(10):
        one_life()
    until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))


def test_a_long_connect_holds_up_no_other_python_thread(monkeypatch):
    """A peer that accepts and never answers: the interpreter's lock is free meanwhile."""
    monkeypatch.setenv("FERRY_TRANSPORTS", "tcp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        template = make_engine("silent")
        packed = template.get_engine_desc().pack()
        real_port = template.get_engine_desc().port.to_bytes(2, "big")
        silent_port = silent.getsockname()[1].to_bytes(2, "big")
        desc = EngineDesc.unpack(packed.replace(real_port, silent_port))
        engine: IOEngine = make_engine("near")
        memory = np.zeros(64, np.uint8)
        near, there = engine.register_memory(memory), template.register_memory(memory)
        engine.register_remote_engine(desc)
        errors = []

        def connect_in_vain():
            try:
                engine.create_session(near, there)
            except RuntimeError as error:
                errors.append(str(error))

        connecting = threading.Thread(target=connect_in_vain)
        connecting.start()
        longest, turns = 0.0, 0
        while connecting.is_alive():
            begun = time.monotonic()
            time.sleep(0.001)
            longest, turns = max(longest, time.monotonic() - begun), turns + 1
        assert errors
        assert turns > 100, "the connection ended too soon to show anything"
        assert longest < 1, f"another thread stood still for {longest:.2f} s"
