"""What a thread of Python that computes costs transfers of the same process.

A process writes batches into another one, and measures from the call to the end of the transfer,
with and without a thread that never gives the interpreter's lock up of its own accord, turn by
turn. The time that counts is the transfer's own, as the module counts it in its metrics: the caller
is Python, whom such a thread delays whatever it waits for.
"""

import argparse
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
    taken = {False: [], True: []}
    for turn in range(2 * options.rounds):
        spins = turn % 2 == 1
        if spins:
            spinner.is_on.set()
        before = seconds_of_transfers()
        for number in range(8):
            status = engine.batch_write([near], [places], [far], [places[::-1]], [sizes], [number])
            if engine.wait_all(status) != io.StatusCode.SUCCESS:
                raise RuntimeError(status[0].Message())
        after = seconds_of_transfers()
        spinner.is_on.clear()
        if turn > 1:
            taken[spins].append((after[0] - before[0]) / (after[1] - before[1]))
        time.sleep(0.01)
    quiet, spinning = (statistics.median(taken[spins]) for spins in (False, True))
    rate = RANGES * RANGE_BYTES / quiet / 1e9
    print(
        f"a transfer of {RANGES * RANGE_BYTES >> 20} MiB: {quiet * 1e3:.3f} ms ({rate:.2f} GB/s),"
        f" beside a thread that computes {spinning * 1e3:.3f} ms: {spinning / quiet - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
