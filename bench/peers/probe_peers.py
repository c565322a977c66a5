#!/usr/bin/env python3
"""What an engine does when it is left alone, or its peer is in trouble; one JSON line.

  probe_peers.py idle   ferry|mooncake|nixl   CPU, memory, threads and descriptors of an idle side
  probe_peers.py kill   ferry|mooncake|nixl   the target is killed amid 64 MiB batches: how long
                                              until an error, and does the next call fail fast
  probe_peers.py freeze ferry|mooncake|nixl   the same, with a target that is stopped
  probe_peers.py limit  mooncake              ranges of a batch until it is refused, and after that
  probe_peers.py gap    ferry|mooncake|nixl   batches after the session was not used for a while

Options of the path's own bench script may follow. Each peer needs its virtual environment.
"""

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common

DRIVERS = {"ferry": "Ours", "mooncake": "Mooncake", "nixl": "Nixl"}
MODULES = {"ferry": "bench_ours", "mooncake": "bench_mooncake", "nixl": "bench_nixl"}
ARENA_MIB = 128
CASE = "contig_64MiB"
IDLE_S = 5.0
# A peer that has not noticed after this time is said not to notice.
PATIENCE_S = 75.0
GAPS_S = (1, 3, 6, 12, 20)


def own_status(pid: int) -> dict:
    """Memory, threads and descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "rss_MiB": int(fields["VmRSS"].split()[0]) // common.KIB,
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def idle(initiator) -> dict:
    """An idle initiator; its memory has the arena in it."""
    driver = initiator.driver
    driver.transfer_variant(driver.prepare_case(CASE, range(1)), 0)
    before = driver.cpu_s()
    time.sleep(IDLE_S)
    share = 100 * (driver.cpu_s() - before) / IDLE_S
    return {"percent_of_a_core": share} | own_status(driver.engine_pid())


def attempt(driver, prepared) -> tuple[str | None, float]:
    """One batch: its error, and the seconds it took."""
    began = time.monotonic()
    try:
        driver.transfer_variant(prepared, 0)
    except Exception as error:  # peers raise what they like
        return repr(error)[:160], time.monotonic() - began
    return None, time.monotonic() - began


def trouble(initiator, number: int) -> dict:
    """Signals the target amid batches."""
    driver = initiator.driver
    prepared = driver.prepare_case(CASE, range(1))
    targets = [pid for pid in initiator.pids if pid not in (os.getpid(), driver.engine_pid())]
    struck = []

    def strike():
        time.sleep(0.5)
        struck.append(time.monotonic())
        for pid in targets:
            os.kill(pid, number)

    def give_up():
        time.sleep(PATIENCE_S)
        finish({"error": None, "waited_s": PATIENCE_S})

    def finish(found):
        for pid in targets:
            os.kill(pid, signal.SIGKILL)
        print(json.dumps({"path": driver.path} | found), flush=True)
        os._exit(0)

    threading.Thread(target=give_up, daemon=True).start()
    threading.Thread(target=strike, daemon=True).start()
    error, batches = None, 0
    while error is None and not (struck and time.monotonic() > struck[0] + PATIENCE_S / 2):
        error, _ = attempt(driver, prepared)
        batches += error is None
    noticed = time.monotonic() - struck[0]
    second, seconds = attempt(driver, prepared)
    found = {"batches": batches, "error": error, "seconds_to_error": noticed}
    finish(found | {"next_error": second, "next_seconds": seconds})
    return found


def limit(initiator) -> dict:
    """Batches of more and more ranges, then small ones again."""
    driver = initiator.driver

    def go(count):
        common.CASES["probe"] = (count, 4 * common.KIB, "bandwidth")
        return attempt(driver, driver.prepare_case("probe", range(1)))[0]

    counts = (512, 1024, 2000, 2048, 2053, 2100, 3000, 4096)
    growing = {count: go(count) for count in counts}
    return {"growing": growing, "after": {count: go(count) for count in (1, 512)}}


def gap(initiator) -> dict:
    """After each gap two batches of 1024 pages."""
    driver = initiator.driver
    prepared = driver.prepare_case("pages_1024x16KiB", range(1))
    found = {0: attempt(driver, prepared)}
    for gap_s in GAPS_S:
        time.sleep(gap_s)
        found[gap_s] = [attempt(driver, prepared), attempt(driver, prepared)]
    return {"after_gap_s": found}


PROBES = {
    "idle": idle,
    "kill": lambda initiator: trouble(initiator, signal.SIGKILL),
    "freeze": lambda initiator: trouble(initiator, signal.SIGSTOP),
    "limit": limit,
    "gap": gap,
}


def main():
    """Runs one probe of one peer."""
    parser = common.parser(__doc__)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("peer", choices=MODULES)
    peer = next((word for word in sys.argv[1:] if word in MODULES), None)
    if peer is None:
        return parser.parse_args()
    module = importlib.import_module(MODULES[peer])
    args = module.add_args(parser).parse_args()
    args.arena_mib = ARENA_MIB
    driver = getattr(module, DRIVERS[peer])
    if args.role == "target":
        return common.target_main(driver(args))
    initiator = common.Initiator(driver, args)
    found = PROBES[args.probe](initiator)
    print(json.dumps({"path": initiator.driver.path} | found), flush=True)
    initiator.close()
    os._exit(0)


if __name__ == "__main__":
    main()
