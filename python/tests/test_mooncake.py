"""The face of Mooncake: names, results, and bytes between two processes."""

import multiprocessing

import numpy as np
import pytest

from ferry.mooncake_compat.engine import TransferEngine

SIZE = 1 << 16
DEADLINE_S = 30


def start(host="127.0.0.1"):
    engine = TransferEngine()
    assert engine.initialize(host, "P2PHANDSHAKE", "rdma", "") == 0
    return engine, f"{host}:{engine.get_rpc_port()}"


def serve(pipe):
    engine, session = start()
    first, second = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    assert engine.register_memory(first.ctypes.data, SIZE) == 0
    pipe.send((session, first.ctypes.data, second.ctypes.data))
    while (question := pipe.recv()) is not None:
        if question == "second":
            pipe.send(engine.register_memory(second.ctypes.data, SIZE))
        else:
            pipe.send((first.copy(), second.copy()))


@pytest.fixture
def peer():
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(DEADLINE_S)
    yield process, ours, ours.recv()
    process.kill()
    process.join()


def test_it_is_found_as_mooncake():
    from mooncake.engine import TransferEngine as Found

    assert Found is TransferEngine


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_ranges_land_and_nothing_else_changes(monkeypatch, peer, transports):
    monkeypatch.setenv("FERRY_TRANSPORTS", transports)
    _, pipe, (session, first, second) = peer
    engine, _ = start()
    source = np.random.default_rng(7).integers(1, 256, SIZE, dtype=np.uint8)
    address = source.ctypes.data
    assert engine.batch_register_memory([address], [SIZE]) == 0
    assert engine.transfer_sync_write(session, address + 5, first + 100, 40) == 0
    lists = ([address, address + 4096], [first + 8192, first + 300], [4096, 7])
    assert engine.batch_transfer_sync_write(session, *(np.array(part) for part in lists)) == 0
    wanted = np.zeros(SIZE, np.uint8)
    wanted[100:140], wanted[300:307] = source[5:45], source[4096:4103]
    wanted[8192:12288] = source[:4096]
    pipe.send("read")
    landed, untouched = pipe.recv()
    assert (landed == wanted).all()
    assert not untouched.any()
    # What the peer registers later is found, too.
    assert engine.transfer_sync_write(session, address, second, 16) < 0
    pipe.send("second")
    assert pipe.recv() == 0
    assert engine.transfer_sync_write(session, address, second, 16) == 0
    pipe.send("read")
    assert (pipe.recv()[1][:16] == source[:16]).all()


def test_what_leaves_registered_memory_is_refused(peer):
    _, pipe, (session, first, _) = peer
    engine, _ = start()
    source = np.ones(SIZE, np.uint8)
    address = source.ctypes.data
    assert engine.transfer_sync_write(session, address, first, 8) < 0
    assert engine.register_memory(address, SIZE // 2) == 0
    # Over the end here, over the end there, and around the whole address space.
    assert engine.transfer_sync_write(session, address + SIZE // 2 - 4, first, 8) < 0
    assert engine.transfer_sync_write(session, address, first + SIZE - 4, 8) < 0
    assert engine.transfer_sync_write(session, address, first, (1 << 64) - 1) < 0
    assert engine.register_memory(address + 8, 8) < 0
    pipe.send("read")
    assert not pipe.recv()[0].any()
    assert engine.unregister_memory(address) == 0
    assert engine.unregister_memory(address) < 0
    with pytest.raises(ValueError, match="2 buffers"):
        engine.batch_transfer_sync_write(session, [1, 2], [3], [4])


def test_results_before_it_is_initialized_and_for_peers_that_are_gone(peer):
    process, _, (session, first, _) = peer
    engine = TransferEngine()
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(4096, 8) < 0
    with pytest.raises(ValueError, match="P2PHANDSHAKE"):
        engine.initialize("127.0.0.1", "etcd://somewhere", "tcp", "")
    engine, _ = start()
    assert engine.send_probe(session) == 0
    source = np.ones(SIZE, np.uint8)
    assert engine.register_memory(source.ctypes.data, SIZE) == 0
    process.kill()
    process.join()
    assert engine.send_probe(session) < 0
    assert engine.transfer_sync_write(session, source.ctypes.data, first, 8) < 0
