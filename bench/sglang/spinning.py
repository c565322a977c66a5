"""What a thread of Python that computes costs transfers of the same process.

A process writes batches into another one: alone, with a thread that never gives the interpreter's
lock up of its own accord, and beside another process that computes as much, which takes a core but
no lock; turn by turn. The time that counts is the transfer's own, as the module counts it in its
metrics: the caller is Python, whom such a thread delays whatever it waits for.
"""

import argparse
import contextlib
import multiprocessing
import re
import statistics
import threading
import time

import numpy as np

from ferry import metrics_text
from ferry.mori_compat import io

RANGES, RANGE_BYTES = 256, 16 << 10
POOL = 2 * RANGES * RANGE_BYTES
# From one transfer to the next, longer than the interpreter lets its lock be waited for: cores and
# caches have been left alone for equally long then, whoever computes.
INTERVAL_S = 0.02


def make_engine(key):
    """Make an engine with memory."""
    engine = io.IOEngine(key, io.IOEngineConfig("127.0.0.1", 0))
    engine.create_backend(io.BackendType.RDMA)
    pool = np.ones(POOL, np.uint8)
    return engine, pool, engine.register_memory(pool)


def hold_memory(pipe):
    """Be the process that is written into."""
    engine, _pool, memory = make_engine("target")
    pipe.send((engine.get_engine_desc().pack(), memory.pack()))
    # Whoever started it has ended then.
    with contextlib.suppress(EOFError):
        pipe.recv()


def seconds_of_transfers():
    """Return the sum of all transfers' times so far, and their number."""
    found = []
    for what in ("sum", "count"):
        lines = re.findall(rf"^ferry_transfer_seconds_{what}{{.*}} (.+)$", metrics_text(), re.M)
        found.append(sum(float(line) for line in lines))
    return found


class Spinner:
    """A thread that computes while it is switched on."""

    def __init__(self):
        """Start the thread, switched off."""
        self.is_on, self.turns = threading.Event(), 0
        threading.Thread(target=self._spin, daemon=True).start()

    def _spin(self):
        while self.is_on.wait():
            for _ in range(10000):
                self.turns += 1


def spin_elsewhere(is_on):
    """Compute in a process of its own while that is switched on."""
    turns = 0
    while is_on.wait():
        for _ in range(10000):
            turns += 1


def main():
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    spawn.Process(target=hold_memory, args=(theirs,), daemon=True).start()
    desc, memory = pipe.recv()
    engine, _pool, near = make_engine("source")
    engine.register_remote_engine(io.EngineDesc.unpack(desc))
    far, spinner = io.MemoryDesc.unpack(memory), Spinner()
    places = np.random.default_rng(1).permutation(2 * RANGES)[:RANGES] * RANGE_BYTES
    sizes = np.full(RANGES, RANGE_BYTES)
    elsewhere = spawn.Event()
    spawn.Process(target=spin_elsewhere, args=(elsewhere,), daemon=True).start()
    switches = {"alone": None, "thread": spinner.is_on, "process": elsewhere}
    taken = {kind: [] for kind in switches}
    for turn in range(3 * options.rounds):
        kind, switch = list(switches.items())[turn % 3]
        if switch:
            switch.set()
        before, begin_at = seconds_of_transfers(), time.monotonic()
        for number in range(8):
            begin_at += INTERVAL_S
            time.sleep(max(0.0, begin_at - time.monotonic()))
            status = engine.batch_write([near], [places], [far], [places[::-1]], [sizes], [number])
            if engine.wait_all(status) != io.StatusCode.SUCCESS:
                raise RuntimeError(status[0].Message())
        after = seconds_of_transfers()
        if switch:
            switch.clear()
        if turn > 2:
            taken[kind].append((after[0] - before[0]) / (after[1] - before[1]))
        time.sleep(0.01)
    alone, thread, process = (statistics.median(times) for times in taken.values())
    rate = RANGES * RANGE_BYTES / alone / 1e9
    print(
        f"a transfer of {RANGES * RANGE_BYTES >> 20} MiB: {alone * 1e3:.3f} ms ({rate:.2f} GB/s);"
        f" beside another process that computes {process * 1e3:.3f} ms;"
        f" beside a thread that computes {thread * 1e3:.3f} ms, {thread / process - 1:+.1%} to that"
    )


if __name__ == "__main__":
    main()
