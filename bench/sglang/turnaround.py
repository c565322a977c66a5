"""What our Python module adds to SGLang's own time for a request, and what our manager saves.

Two ranks of SGLang's classes, each a process of its own, finish requests of 36 layers over the
module, two over an engine that does nothing (their own Python is the floor), and two with the
manager of our plugin. The pairs take turns, request by request. A request's time goes from the
decode's announcement to its Success, and is taken where the status is set, not by polling.

Beside them stands what the same bytes cost with `process_vm_writev` alone, in calls of 64 ranges,
into one other process: what lies between that and nothing is not the bytes.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS, MAX_PAGES, TIMEOUT_S = 36, 128, 60
WAITING_FOR_INPUT, SUCCESS = 2, 4


def do_nothing():
    """Replace the transfers of the module by none."""
    from ferry.mori_compat import io
    from ferry.mori_compat.cpp import TransferStatus

    done = TransferStatus()
    done.Update(io.StatusCode.SUCCESS, "success")

    def batch_write(_engine, _locals, _local_offsets, _remotes, _offsets, sizes, _uids):
        return [done] * len(sizes)

    def wait_all(_engine, _statuses, timeout_ms=-1):
        return io.StatusCode.SUCCESS

    io.IOEngine.batch_write, io.IOEngine.wait_all = batch_write, wait_all


class Watched:
    """When a room of our manager's gets which status; the room itself says so."""

    def wait(self, request, status):
        """Return when a room got a status."""
        came = request.wait(status, TIMEOUT_S)
        if came not in (status, SUCCESS):
            raise TimeoutError(f"the room has status {came}, not {status}")
        return time.monotonic()


class Statuses:
    """When each room of a manager got which status."""

    def __init__(self, manager):
        """Listen where SGLang sets them."""
        self.changed = threading.Condition()
        self.times = {}
        update = manager.update_status

        def update_and_tell(bootstrap_room, status):
            update(bootstrap_room, status)
            with self.changed:
                self.times.setdefault((bootstrap_room, int(status)), time.monotonic())
                self.changed.notify_all()

        manager.update_status = update_and_tell

    def wait(self, request, status):
        """Return when a room got a status."""
        room = request.bootstrap_room
        with self.changed:
            came = self.changed.wait_for(lambda: (room, status) in self.times, TIMEOUT_S)
        if not came:
            raise TimeoutError(f"room {room} has not reached status {status}")
        return self.times[room, status]


def serve(pipe, mode, port, kind, page_bytes):
    """Be a rank: do what the pipe asks for, once for each request."""
    os.environ["SGLCONF_MORI"] = "installed"
    if kind == "manager":
        os.environ |= {"SGLCONF_PLUGIN": "1", "FERRY_MANAGER": "1", "FERRY_METRICS_PORT": "0"}
    sys.path.insert(0, str(ROOT / "tests/conformance"))
    import numpy as np

    import harness

    if kind == "nothing":
        do_nothing()
    is_prefill = mode == "prefill"
    if is_prefill:
        server = harness.start_bootstrap_server("127.0.0.1", port)
    sizes = {"layers": LAYERS, "pages": MAX_PAGES, "item_len": page_bytes}
    args = harness.make_args(is_random=is_prefill, **sizes)
    rank = harness.Rank(mode, args, ("127.0.0.1", port))
    statuses = Watched() if kind == "manager" else Statuses(rank.manager)
    pipe.send("up")
    while True:
        try:
            room, count = pipe.recv()
        except EOFError:
            # Whoever asks has ended.
            return
        # Scattered, so that every page is a range of its own.
        pages = np.random.default_rng(room).permutation(MAX_PAGES)[:count].astype(np.int32)
        if is_prefill:
            request = rank.sender(room)
            pipe.send("open")
            statuses.wait(request, WAITING_FOR_INPUT)
            rank.call(request.init, count, 0)
            rank.call(request.send, pages, None)
            statuses.wait(request, SUCCESS)
            pipe.send("done")
        else:
            request = rank.receiver(room)
            # The decode has found its prefill; SGLang's classes have then, too.
            statuses.wait(request, WAITING_FOR_INPUT)
            begun = time.monotonic()
            rank.call(request.send_metadata, pages, 0, None, None)
            pipe.send(statuses.wait(request, SUCCESS) - begun)
        rank.call(request.clear)
        del request
        assert not is_prefill or server


class Pair:
    """A prefill and a decode rank."""

    def __init__(self, kind, page_bytes):
        """Start both."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.pipes = []
        for mode in ("prefill", "decode"):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, mode, port, kind, page_bytes)
            spawn.Process(target=serve, args=arguments, daemon=True).start()
            self._receive(ours)
            self.pipes.append(ours)

    @staticmethod
    def _receive(pipe):
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError("a rank did not answer")
        return pipe.recv()

    def request(self, room, pages):
        """Return the seconds of one request."""
        prefill, decode = self.pipes
        prefill.send((room, pages))
        self._receive(prefill)
        decode.send((room, pages))
        seconds = self._receive(decode)
        self._receive(prefill)
        return seconds


class Iovec(ctypes.Structure):
    """A range, as the kernel reads it."""

    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def hold_memory(pipe, size):
    """Be a process with memory to write into."""
    memory = ctypes.create_string_buffer(size)
    pipe.send(ctypes.addressof(memory))
    # Whoever started it has ended then.
    with contextlib.suppress(EOFError):
        pipe.recv()


class Bare:
    """The bytes of a request without anything else."""

    CALL = 64

    def __init__(self, page_bytes):
        """Start the other process."""
        self.page_bytes, self.tensors = page_bytes, 2 * LAYERS
        size = self.tensors * MAX_PAGES * page_bytes
        self.source = ctypes.create_string_buffer(size)
        ctypes.memset(self.source, 1, size)
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=hold_memory, args=(theirs, size), daemon=True)
        self.process.start()
        self.there = self.pipe.recv()
        self.libc = ctypes.CDLL(None, use_errno=True)

    def median(self, pages, turns):
        """Return the median seconds of a request's bytes."""
        here, count = ctypes.addressof(self.source), self.tensors * pages
        chooser, taken = random.Random(pages), []
        for _ in range(turns):
            lists = []
            for base in (here, self.there):
                ranges = (Iovec * count)()
                starts = (
                    (tensor * MAX_PAGES + page) * self.page_bytes
                    for tensor in range(self.tensors)
                    for page in chooser.sample(range(MAX_PAGES), pages)
                )
                for at, start in enumerate(starts):
                    ranges[at] = Iovec(base + start, self.page_bytes)
                lists.append(ranges)
            begun = time.monotonic()
            for at in range(0, count, self.CALL):
                length = min(self.CALL, count - at)
                place = at * ctypes.sizeof(Iovec)
                local, remote = (ctypes.byref(ranges, place) for ranges in lists)
                moved = self.libc.process_vm_writev(
                    self.process.pid, local, length, remote, length, 0
                )
                if moved != length * self.page_bytes:
                    raise OSError(ctypes.get_errno(), "process_vm_writev")
            taken.append(time.monotonic() - begun)
        return statistics.median(taken)


def main():
    """Run all sizes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--page-bytes", type=int, default=1024, help="of one page of one tensor")
    parser.add_argument("--requests", type=int, default=200, help="requests of each size and pair")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    kinds = ("module", "nothing", "manager")
    pairs = {kind: Pair(kind, options.page_bytes) for kind in kinds}
    bare = Bare(options.page_bytes)
    results, room = [], 0
    for pages in options.pages:
        times = {name: [] for name in pairs}
        for turn in range(options.requests + 10):
            for name, pair in pairs.items():
                room += 1
                seconds = pair.request(room, pages)
                if turn >= 10:
                    times[name].append(seconds)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        ratio = medians["module"] / medians["nothing"]
        medians["bare"] = bare.median(pages, options.requests)
        share = medians["manager"] / medians["module"]
        result = {"pages": pages, "page_bytes": options.page_bytes}
        result |= {"ratio": ratio, "manager_share": share, **medians}
        results.append(result)
        print(
            f"{pages:3} pages: {medians['module'] * 1e3:.3f} ms over the module,"
            f" {medians['nothing'] * 1e3:.3f} ms over nothing, ratio {ratio:.3f};"
            f" {medians['manager'] * 1e3:.3f} ms with the manager, {share:.2f} of the classes';"
            f" the bytes alone {medians['bare'] * 1e3:.3f} ms",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
