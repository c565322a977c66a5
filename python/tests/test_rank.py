"""Ranks that Python drives: whole requests, and what is refused."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

import ferry
from ferry import RankError, RoomFailedError, RoomStatus

TIMEOUT_S = 20
PAGES, PAGE_BYTES, AUX_ROWS, AUX_BYTES = 16, 256, 4, 32


@pytest.fixture
def server():
    """Serve ranks in memory."""
    with ferry.BootstrapServer() as server:
        yield server


class Side:
    """A pool with K, V and an aux buffer, and the rank over it."""

    def __init__(self, kind, seed_opt, page_bytes=PAGE_BYTES, **options):
        """Fill the pool, with zeros without a seed, and start the rank."""
        sizes = [(PAGES, page_bytes), (PAGES, page_bytes), (AUX_ROWS, AUX_BYTES)]
        total = sum(items * item_len for items, item_len in sizes)
        self.pool = ferry.Pool(total)
        if seed_opt is not None:
            random = np.random.default_rng(seed_opt)
            self.pool.numpy()[:] = random.integers(0, 256, total, dtype=np.uint8)
        self.tensors, offset = [], 0
        for items, item_len in sizes:
            self.tensors.append(self.pool.tensor(offset, items, item_len))
            offset += items * item_len
        self.key, self.value, self.aux = (
            self.pool.numpy(shape=size, offset=tensor.offset)
            for size, tensor in zip(sizes, self.tensors, strict=True)
        )
        kv = ferry.Kv(self.tensors[:2], head_num=2)
        self.layout = ferry.Layout(4, kv, aux=self.tensors[2:])
        self.rank = kind(self.layout, **options)


@pytest.fixture
def sides(server):
    """Start a prefill and a decode rank."""
    prefill = Side(ferry.PrefillRank, 5, bootstrap=server.address)
    decode = Side(ferry.DecodeRank, None)
    yield prefill, decode
    prefill.rank.stop()
    decode.rank.stop()


def begin(sides, server, room, pages=(3, 1, 2)):
    """Open and announce a room, and wait until it can be sent."""
    prefill, decode = sides
    prefill.rank.open(room, aux_index=2)
    decode.rank.open(room, server.address)
    decode.rank.announce(room, pages, aux_index=1)
    prefill.rank.wait(room, RoomStatus.WAITING_FOR_INPUT, TIMEOUT_S)


def test_a_request_moves_and_nothing_else_changes(sides, server):
    prefill, decode = sides
    before = prefill.pool.numpy().copy()
    begin(sides, server, 2**63 - 1, np.array([3, 1, 2], np.int32))
    prefill.rank.send_chunk(2**63 - 1, np.array([0, 9]), last=False)
    prefill.rank.send_chunk(2**63 - 1, [4], last=True)
    seen = decode.rank.wait(2**63 - 1, timeout_s=TIMEOUT_S)
    assert (seen.status, seen.reason) == (RoomStatus.SUCCESS, None)
    for one, other in ((prefill.key, decode.key), (prefill.value, decode.value)):
        expected = np.zeros_like(other)
        expected[[3, 1, 2]] = one[[0, 9, 4]]
        assert (other == expected).all()
    expected = np.zeros_like(decode.aux)
    expected[1] = prefill.aux[2]
    assert (decode.aux == expected).all()
    assert (prefill.pool.numpy() == before).all()

    seen = prefill.rank.wait(2**63 - 1, timeout_s=TIMEOUT_S)
    moved = {each.component: (each.nbytes, each.outcome) for each in seen.transfers}
    assert moved["kv"] == (2 * 3 * PAGE_BYTES, "success")
    assert moved["aux"] == (AUX_BYTES, "success")
    assert {each.transport for each in seen.transfers} == {"local"}
    assert {each.peer for each in seen.transfers} == {decode.rank.control}
    assert seen.verification is None
    for side in sides:
        assert side.rank.room(2**63 - 1).generation > 0
        side.rank.clear(2**63 - 1)
        with pytest.raises(RankError, match="unknown_room"):
            side.rank.room(2**63 - 1)
    assert 'ferry_transfer_bytes_total{component="kv"' in ferry.metrics_text()
    observed = prefill.rank.observe()
    assert observed["role"] == "prefill"
    assert observed["sessions"][0]["peer"] == decode.rank.engine_key


def test_a_room_says_how_far_it_was_compared(server):
    prefill = Side(ferry.PrefillRank, 5, bootstrap=server.address)
    decode = Side(ferry.DecodeRank, None, verify="full")
    sides = prefill, decode
    begin(sides, server, 1)
    assert decode.rank.room(1).verification == "pending"
    prefill.rank.send_chunk(1, [0, 9, 4], last=True)
    for side in sides:
        assert side.rank.wait(1, timeout_s=TIMEOUT_S).verification == "full"
        side.rank.stop()
    assert 'ferry_verify_bytes_total{component="kv"}' in ferry.metrics_text()
    with pytest.raises(RankError, match="there are off, sampled and full"):
        Side(ferry.DecodeRank, None, verify="some")


def test_a_room_that_is_given_up_fails_on_both_sides(sides, server):
    prefill, decode = sides
    begin(sides, server, 1)
    decode.rank.abort(1, "the user left")
    with pytest.raises(RoomFailedError, match="room 1"):
        prefill.rank.wait(1, timeout_s=TIMEOUT_S)
    assert decode.rank.wait(1, RoomStatus.FAILED, TIMEOUT_S).reason == "the user left"
    deadline = time.monotonic() + TIMEOUT_S
    while not decode.rank.room(1).release_safe:
        assert time.monotonic() < deadline
    assert not decode.pool.numpy().any()


def test_a_peer_that_stops_fails_the_room(sides, server):
    prefill, decode = sides
    begin(sides, server, 1)
    prefill.rank.stop()
    assert not prefill.rank.is_alive
    with pytest.raises(RoomFailedError, match="the engine has ended"):
        decode.rank.wait(1, timeout_s=TIMEOUT_S)
    with pytest.raises(RankError, match="rank_gone"):
        prefill.rank.room(1)


def test_waiting_has_an_end_and_lets_others_run(sides):
    prefill, _decode = sides
    prefill.rank.open(1)
    turns = []
    done = threading.Event()

    def count():
        while not done.is_set():
            turns.append(1)
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    with pytest.raises(TimeoutError, match="BOOTSTRAPPING after 0.3 s"):
        prefill.rank.wait(1, timeout_s=0.3)
    done.set()
    counter.join()
    assert len(turns) > 30


def test_calls_that_make_no_sense_are_refused_with_a_code(sides, server):
    prefill, decode = sides
    prefill.rank.open(1)
    for code, call in (
        ("room_exists", lambda: prefill.rank.open(1)),
        ("bad_room", lambda: prefill.rank.open(2**63)),
        ("unknown_room", lambda: prefill.rank.wait(99)),
        ("not_ready", lambda: prefill.rank.send_chunk(1, [0], last=True)),
        ("unknown_room", lambda: decode.rank.announce(1, [0])),
    ):
        with pytest.raises(RankError) as raised:
            call()
        assert raised.value.code == code
    decode.rank.open(5, server.address)
    for wrong, error in (([-1], TypeError), ([2**31], ValueError), (["0"], TypeError)):
        with pytest.raises(error):
            decode.rank.announce(5, wrong)
    with pytest.raises(RankError) as raised:
        decode.rank.announce(5, [PAGES])
    assert raised.value.code == "bad_indices"


def test_ranks_that_make_no_sense_are_refused(server):
    pool = ferry.Pool(4096)
    inside = pool.tensor(0, 4, 256)
    kv = ferry.Kv([inside, pool.tensor(1024, 4, 256)])
    outside = ferry.Kv([inside, pool.tensor(4000, 4, 256)])
    overlapping = ferry.Kv([inside, pool.tensor(512, 4, 256)])
    for what, make in (
        ("kv tensor 1.*leave pool 0", lambda: ferry.DecodeRank(ferry.Layout(4, outside))),
        ("overlaps", lambda: ferry.DecodeRank(ferry.Layout(4, overlapping))),
        ("page_size", lambda: ferry.DecodeRank(ferry.Layout(0, kv))),
        ("bootstrap", lambda: ferry.PrefillRank(ferry.Layout(4, kv))),
        ("carrier pigeon", lambda: _with_transport(kv, "carrier pigeon")),
        ("192.0.2.1", lambda: ferry.DecodeRank(ferry.Layout(4, kv), host="192.0.2.1")),
    ):
        with pytest.raises(RankError, match=what):
            make()
    with pytest.raises(ValueError, match="time in seconds"):
        ferry.DecodeRank(ferry.Layout(4, kv), waiting_timeout_s=float("nan"))
    server.stop()
    begun = time.monotonic()
    with pytest.raises(RankError) as raised:
        ferry.PrefillRank(ferry.Layout(4, kv), bootstrap=server.address, bootstrap_timeout_s=0.5)
    assert raised.value.code == "bootstrap_unreachable"
    assert time.monotonic() - begun < TIMEOUT_S


def _with_transport(kv, name):
    return ferry.DecodeRank(ferry.Layout(4, kv), transports=[name])


def test_an_interrupt_ends_a_start_that_waits():
    program = """
import _thread, signal, threading, ferry
# Where SIGINT is ignored, as in a shell's background job, Python leaves it so.
signal.signal(signal.SIGINT, signal.default_int_handler)
pool = ferry.Pool(4096)
layout = ferry.Layout(4, ferry.Kv([pool.tensor(0, 4, 256), pool.tensor(1024, 4, 256)]))
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    ferry.PrefillRank(layout, bootstrap="127.0.0.1:9")
except KeyboardInterrupt:
    print("interrupted")
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "interrupted\n"


def test_the_example_runs():
    example = Path(__file__).parents[1] / "examples/two_ranks.py"
    ended = subprocess.run([sys.executable, example], timeout=60, check=True, capture_output=True)
    assert b"every byte is right" in ended.stdout


def start_again(address, folder):
    """Start a server on the folder of one that has ended: its lock is let go a moment later."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return ferry.BootstrapServer(address, data_dir=folder)
        except RuntimeError as error:
            if "lock" not in str(error) or time.monotonic() > deadline:
                raise


def test_registrations_outlive_a_server_with_a_folder(tmp_path):
    pool = ferry.Pool(4096)
    layout = ferry.Layout(4, ferry.Kv([pool.tensor(0, 4, 256), pool.tensor(1024, 4, 256)]))

    def engines(server):
        with urlopen(f"http://{server.admin_address}/v1/engines", timeout=TIMEOUT_S) as answer:
            return json.dumps(json.load(answer))

    folder = str(tmp_path / "registrations")
    with ferry.BootstrapServer(data_dir=folder) as server:
        address = server.address
        rank = ferry.PrefillRank(layout, bootstrap=address)
        with pytest.raises(RuntimeError):
            ferry.BootstrapServer(data_dir=folder)
        assert "default" in engines(server)
    with start_again(address, folder) as server:
        assert "default" in engines(server)
    rank.stop()
    with pytest.raises(ValueError, match="listen"):
        ferry.BootstrapServer("nowhere")
