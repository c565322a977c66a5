"""What our Python module adds to SGLang's own time for a request.

Two ranks of SGLang's classes, each a process of its own, finish requests of 36 layers over the
module, and two more over an engine that does nothing: their own Python is the floor. The pairs take
turns, request by request. A request's time goes from the decode's announcement to its Success, and
is taken where SGLang sets the status, not by polling.
"""

import argparse
import json
import multiprocessing
import os
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

    def wait(self, room, status):
        """Return when a room got a status."""
        with self.changed:
            came = self.changed.wait_for(lambda: (room, status) in self.times, TIMEOUT_S)
        if not came:
            raise TimeoutError(f"room {room} has not reached status {status}")
        return self.times[room, status]


def serve(pipe, mode, port, moves):
    """Be a rank: do what the pipe asks for, once for each request."""
    os.environ["SGLCONF_MORI"] = "installed"
    sys.path.insert(0, str(ROOT / "tests/conformance"))
    import numpy as np

    import harness

    if not moves:
        do_nothing()
    is_prefill = mode == "prefill"
    if is_prefill:
        server = harness.start_bootstrap_server("127.0.0.1", port)
    args = harness.make_args(is_random=is_prefill, layers=LAYERS, pages=MAX_PAGES)
    rank = harness.Rank(mode, args, ("127.0.0.1", port))
    statuses = Statuses(rank.manager)
    pipe.send("up")
    while True:
        room, count = pipe.recv()
        # Scattered, so that every page is a range of its own.
        pages = np.random.default_rng(room).permutation(MAX_PAGES)[:count].astype(np.int32)
        if is_prefill:
            request = rank.sender(room)
            pipe.send("open")
            statuses.wait(room, WAITING_FOR_INPUT)
            rank.call(request.init, count, 0)
            rank.call(request.send, pages, None)
            statuses.wait(room, SUCCESS)
            pipe.send("done")
        else:
            request = rank.receiver(room)
            begun = time.monotonic()
            rank.call(request.send_metadata, pages, 0, None, None)
            pipe.send(statuses.wait(room, SUCCESS) - begun)
        rank.call(request.clear)
        del request
        assert not is_prefill or server


class Pair:
    """A prefill and a decode rank."""

    def __init__(self, moves):
        """Start both."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.pipes = []
        for mode in ("prefill", "decode"):
            ours, theirs = spawn.Pipe()
            spawn.Process(target=serve, args=(theirs, mode, port, moves), daemon=True).start()
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


def main():
    """Run all sizes and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=200, help="requests of each size and pair")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    pairs = {"module": Pair(True), "nothing": Pair(False)}
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
        result = {"pages": pages, "ratio": ratio, **medians}
        results.append(result)
        print(
            f"{pages:3} pages: {medians['module'] * 1e3:.3f} ms over the module,"
            f" {medians['nothing'] * 1e3:.3f} ms over nothing, ratio {ratio:.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
