#!/usr/bin/env python3
"""Probes of one engine: idle cost, fairness between batches, and what is left behind.

  idle        CPU of both sides with an open session and nothing to do
  fair        64 batches of different rooms at once over one session: the slowest and the mean
  behind      a 4 KiB batch submitted behind one of 1 GiB
  ranges      a batch of 200,000 ranges, and the next one
  sequential  sockets and descriptors over 30,000 small transfers, one after the other
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common
from bench_ours import Engine

IDLE_S = 5.0
PAGE = 4 * common.KIB


def descriptors(engine: Engine) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{engine.hello['pid']}/fd"))


def idle(source, target, _size) -> dict:
    """Share of a core, of the side that uses more."""
    before = [side.ask(op="stat")["cpu_s"] for side in (source, target)]
    time.sleep(IDLE_S)
    after = [side.ask(op="stat")["cpu_s"] for side in (source, target)]
    used = max(end - begin for begin, end in zip(before, after))
    return {"percent_of_a_core": 100 * used / IDLE_S, "goal": 0.5}


def fair(source, _target, size) -> dict:
    """64 batches of 1 MiB in pages of 16 KiB."""
    page, pages = 16 * common.KIB, 64
    lists = []
    for room in range(64):
        slots = [(room * pages + at) * page % size for at in range(pages)]
        lists.append({"src": slots, "dst": list(reversed(slots))})
    source.ask(op="prepare", size=page, lists=lists)
    ratios = []
    for _ in range(9):
        times = source.ask(op="concurrent", direction="write")["nanoseconds"]
        ratios.append(max(times) / statistics.mean(times))
    return {"slowest_to_mean": statistics.median(ratios), "goal": 1.5}


def behind(source, _target, size) -> dict:
    """The small batch's time; the large one fills the arena."""
    small = []
    for _ in range(5):
        large_ns, small_ns = source.ask(op="behind", large=size, small=PAGE)["nanoseconds"]
        assert small_ns < large_ns
        small.append(small_ns / 1e6)
    return {"small_ms": statistics.median(small), "goal": 5.0}


def ranges(source, _target, _size) -> dict:
    """Both batches complete; the time of each range of the second."""
    count, length = 200_000, 64
    slots = [at * length for at in range(count)]
    lists = [{"src": slots, "dst": list(reversed(slots))}] * 2
    source.ask(op="prepare", size=length, lists=lists)
    times = [source.ask(op="concurrent", direction="write")["wall"] for _ in range(2)]
    return {"ns_per_range": times[1] / (2 * count)}


def sequential(source, target, _size) -> dict:
    """Descriptors before and after."""
    lists = [{"src": [at * PAGE], "dst": [at * PAGE]} for at in range(16)]
    source.ask(op="prepare", size=PAGE, lists=lists)
    before = [descriptors(side) for side in (source, target)]
    measure = {"direction": "write", "warm": 0, "samples": 30_000, "budget_s": 600}
    source.ask(op="measure", **measure)
    after = [descriptors(side) for side in (source, target)]
    return {"descriptors_before": before, "descriptors_after": after}


def main():
    """Runs every probe over every transport."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", default="shm,cma,tcp")
    parser.add_argument("--arena-mib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for path in args.paths.split(","):
        args.path = path
        target, source = Engine(args, "target"), Engine(args, "initiator")
        source.ask(op="connect", engine=target.hello["engine"], region=target.hello["region"])
        for probe in (idle, fair, behind, ranges, sequential):
            found = probe(source, target, args.arena_mib * common.MIB)
            print(json.dumps({"path": path, "probe": probe.__name__} | found), flush=True)
        source.close()
        target.close()


if __name__ == "__main__":
    main()
