#!/usr/bin/env python3
"""Probes of Ferry's io engine beyond throughput, one JSON line each, for each transport.

idle        CPU of both sides with an open session and nothing to do
fair        64 batches of different rooms at once over one session: the slowest and the mean
behind      a 4 KiB batch submitted behind one of 1 GiB
ranges      a batch of 200,000 ranges, and the next one
sequential  descriptors and sockets over 30,000 small transfers, one after the other
submission  (local) CPU of one range of a batch whose ranges are single bytes within a page: what
            expansion, checks and posting cost, with the smallest copy there is
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
import bench_ours

SETTLE_S, IDLE_S = 2.0, 5.0
PAGE = 4 * common.KIB
ROOMS, ROOM_PAGES, ROOM_PAGE = 64, 64, 16 * common.KIB
RANGES, RANGE_BYTES = 200_000, 64
SEQUENTIAL = 30_000
SUBMISSION_BATCHES = 20


class Session:
    """Two engines with an open session; within one process for `local`."""

    def __init__(self, path: str, threads: int, arena_mib: int):
        options = bench_ours.add_args(common.parser(__doc__)).parse_args([])
        options.path, options.threads, options.arena_mib = path, threads, arena_mib
        self.size = arena_mib * common.MIB
        self.source = bench_ours.Engine(options, "initiator")
        self.engines = [self.source]
        hello = self.source.hello.get("local")
        if not hello:
            self.engines.append(bench_ours.Engine(options, "target"))
            hello = self.engines[1].hello
        ends = {key: hello[key] for key in ("engine", "region")}
        self.source.ask(op="connect", direction="write", **ends)

    def prepare(self, case: str, size: int, lists: list[dict]):
        """Hands over page lists."""
        self.source.ask(op="prepare", case=case, size=size, lists=lists)

    def measure(self, case: str, samples: int) -> list[int]:
        """Nanoseconds of batches, one after the other."""
        count = {"warm": 0, "samples": samples, "fewest": samples, "budget_s": 0}
        asked = self.source.ask(op="measure", case=case, direction="write", **count)
        return asked["nanoseconds"]

    def concurrent(self, cases: list[str]) -> dict:
        """Submits all lists of the cases at once."""
        return self.source.ask(op="concurrent", cases=cases, direction="write")

    def cpu_s(self) -> list[float]:
        """CPU-seconds of each engine."""
        return [engine.ask(op="stat")["cpu_s"] for engine in self.engines]

    def descriptors(self) -> list[dict]:
        """Open descriptors, and sockets among them, of each engine."""
        counts = []
        for engine in self.engines:
            folder = Path(f"/proc/{engine.pid}/fd")
            links = [os.readlink(folder / name) for name in os.listdir(folder)]
            sockets = sum(link.startswith("socket:") for link in links)
            counts.append({"open": len(links), "sockets": sockets})
        return counts

    def close(self):
        """Ends the engines."""
        for engine in self.engines:
            engine.close()


def idle(session: Session) -> dict:
    """Share of a core, of the side that uses more."""
    # Pools are still being faulted in for a while after they were registered.
    time.sleep(SETTLE_S)
    before = session.cpu_s()
    time.sleep(IDLE_S)
    used = max(end - begin for begin, end in zip(before, session.cpu_s()))
    share = 100 * used / IDLE_S
    return {"percent_of_a_core": share, "goal": 0.5, "met": share < 0.5}


def fair(session: Session) -> dict:
    """64 batches of 1 MiB in pages of 16 KiB."""
    lists = []
    for room in range(ROOMS):
        first = room * ROOM_PAGES
        slots = [page * ROOM_PAGE for page in range(first, first + ROOM_PAGES)]
        lists.append({"src": slots, "dst": list(reversed(slots))})
    session.prepare("rooms", ROOM_PAGE, lists)
    ratios = []
    for _ in range(9):
        times = session.concurrent(["rooms"])["nanoseconds"]
        ratios.append(max(times) / statistics.mean(times))
    ratio = statistics.median(ratios)
    return {"slowest_to_mean": ratio, "goal": 1.5, "met": ratio <= 1.5}


def behind(session: Session) -> dict:
    """How long the small batch takes; the large one fills the arena."""
    session.prepare("large", session.size, [{"src": [0], "dst": [0]}])
    session.prepare("small", PAGE, [{"src": [0], "dst": [0]}])
    larges, smalls = [], []
    for _ in range(7):
        large, small = session.concurrent(["large", "small"])["nanoseconds"]
        larges.append(large / 1e6)
        smalls.append(small / 1e6)
    small, large = statistics.median(smalls), statistics.median(larges)
    worst = max(smalls)
    return {"small_ms": small, "worst_ms": worst, "large_ms": large, "goal": 5.0, "met": small <= 5}


def ranges(session: Session) -> dict:
    """Both batches complete; nanoseconds of each range of the second."""
    slots = [at * RANGE_BYTES for at in range(RANGES)]
    lists = [{"src": slots, "dst": list(reversed(slots))}]
    session.prepare("ranges", RANGE_BYTES, lists)
    times = session.measure("ranges", 2)
    return {
        "first_ms": times[0] / 1e6,
        "next_ms": times[1] / 1e6,
        "ns_per_range": times[1] / RANGES,
    }


def sequential(session: Session) -> dict:
    """Descriptors and sockets before and after."""
    lists = [{"src": [at * PAGE], "dst": [at * PAGE]} for at in range(16)]
    session.prepare("small", PAGE, lists)
    before = session.descriptors()
    session.measure("small", SEQUENTIAL)
    after = session.descriptors()
    return {"before": before, "after": after, "met": before == after}


def submission(session: Session) -> dict:
    """CPU nanoseconds for each range, of runs that are scattered and of one that is strided."""
    src = [at * 37 % PAGE for at in range(RANGES)]
    dst = [at * 41 % PAGE for at in range(RANGES)]
    session.prepare("scattered", 1, [{"src": src, "dst": dst}])
    session.source.ask(op="prepare_strided", case="strided", size=1, stride=2, count=RANGES)
    found = {}
    for case in ("scattered", "strided"):
        session.measure(case, 2)
        used = []
        for _ in range(SUBMISSION_BATCHES):
            before = sum(session.cpu_s())
            session.measure(case, 1)
            used.append((sum(session.cpu_s()) - before) * 1e9 / RANGES)
        found[f"{case}_cpu_ns_per_range"] = statistics.median(used)
    return found | {"goal": 30.0, "met": max(found.values()) <= 30}


def main():
    """Runs every probe over every transport."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("--paths", default="shm,cma,tcp,local")
    parser.add_argument("--arena-mib", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    is_failed = False

    def probe(path, probes, threads, arena_mib):
        nonlocal is_failed
        session = Session(path, threads, arena_mib)
        for one in probes:
            found = {"path": path, "probe": one.__name__} | one(session)
            is_failed |= found.get("met") is False
            print(json.dumps(found), flush=True)
        session.close()

    for path in args.paths.split(","):
        if path == "local":
            probe(path, (submission,), 1, 64)
        else:
            probe(path, (idle, fair, behind, ranges, sequential), args.threads, args.arena_mib)
    return 1 if is_failed else 0


if __name__ == "__main__":
    sys.exit(main())
