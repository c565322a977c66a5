#!/usr/bin/env python3
"""Measures Ferry, the machine's limits and (with --peers) Mooncake and NIXL in one run.

The paths take turns, round after round, so that each ratio is of runs that stand side by side on
a machine that is not quiet. Prints a table of medians and of ratios, and writes a results file.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CASES = [
    "contig_64MiB",
    "contig_256MiB",
    "pages_512x64KiB",
    "pages_1024x16KiB",
    "pages_4096x4KiB",
    "lat_4KiB",
    "lat_64KiB",
]
PAGES = [case for case in CASES if case.startswith("pages")]
SMALL_PAGES = ["pages_1024x16KiB", "pages_4096x4KiB"]
BEST_MOONCAKE = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
}
# What counts as NIXL's best on one host, and over TCP.
NIXL_LOCAL = ["nixl", "nixl-quiet", "nixl-repost", "nixl-posix"]
NIXL_TCP = ["nixl-tcp", "nixl-tcp-quiet"]


def python(name: str) -> str:
    """The interpreter of a virtual environment under target/peers; this one if it is not there."""
    path = ROOT / "target" / "peers" / f"venv-{name}" / "bin" / "python"
    return str(path) if path.exists() else sys.executable


def paths(with_peers: bool) -> dict:
    """Each path's command and environment. Neighbours are compared, so they run side by side."""
    found = {}
    for way in ("shm", "cma", "tcp"):
        for threads in (1, 2):
            for name, script in (("limit", "bench_limits.py"), ("ferry", "bench_ours.py")):
                options = ["--path", way, "--threads", str(threads)]
                found[f"{name}-{way}-{threads}"] = ([sys.executable, script, *options], {})
    if not with_peers:
        return found
    nixl = [python("nixl"), "bench_nixl.py"]
    quiet = ["--no-progress-thread"]
    tcp = {"UCX_TLS": "tcp"}
    found |= {
        "nixl": (nixl, {}),
        "nixl-quiet": (nixl + quiet, {}),
        "nixl-repost": (nixl + quiet + ["--mode", "repost"], {}),
        "nixl-posix": (nixl + ["--backend", "POSIX", "--mode", "init"], {}),
        "nixl-tcp": (nixl, tcp),
        "nixl-tcp-quiet": (nixl + quiet, tcp),
        "mooncake": ([python("mooncake"), "bench_mooncake.py"], BEST_MOONCAKE),
    }
    return found


def run_path(command, environment, cases, samples) -> list[dict]:
    """Runs one path once; a path that breaks has results that say so."""
    command = [str(HERE / "prio.sh"), *command, "--cases", ",".join(cases)]
    command += ["--samples", str(samples)]
    ended = subprocess.run(
        command,
        cwd=HERE,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(ended.stderr[-2000:], file=sys.stderr)
    return [json.loads(line) for line in lines]


class Results:
    """Results by path and case, one for each round."""

    def __init__(self, records: list[dict]):
        self.records = records

    def values(self, path: str, case: str, field: str) -> dict[int, float]:
        """A field by round."""
        return {
            record["round"]: record[field]
            for record in self.records
            if record["name"] == path and record["case"] == case and field in record
        }

    def median(self, path: str, case: str, field: str) -> float | None:
        """The median over the rounds."""
        values = self.values(path, case, field).values()
        return statistics.median(values) if values else None

    def ratio(self, path: str, other: str, case: str, field: str) -> float | None:
        """The median of the ratios of each round."""
        ours, theirs = self.values(path, case, field), self.values(other, case, field)
        ratios = [ours[at] / theirs[at] for at in ours if theirs.get(at)]
        return statistics.median(ratios) if ratios else None

    def cpu_ratio(self, path: str, other: str, case: str) -> float | None:
        """As ratio, of the CPU-seconds of both sides for each GB."""
        both = []
        for name in (path, other):
            sides = ("init_cpu_s_per_GB", "tgt_cpu_s_per_GB")
            first, second = (self.values(name, case, side) for side in sides)
            both.append({at: first[at] + second[at] for at in first})
        ratios = [both[0][at] / both[1][at] for at in both[0] if both[1].get(at)]
        return statistics.median(ratios) if ratios else None

    def best_of(self, names: list[str], case: str, field: str) -> str | None:
        """The path with the highest median."""
        medians = {name: self.median(name, case, field) for name in names}
        known = {name: median for name, median in medians.items() if median}
        return max(known, key=known.get) if known else None


def goals(results: Results) -> list[dict]:
    """The ratios that are promised, each with what was measured."""
    rows = []

    def add(what, case, measured, goal, at_least=True):
        if measured is not None:
            met = measured >= goal if at_least else measured <= goal
            row = {"what": what, "case": case, "measured": measured, "goal": goal}
            rows.append(row | {"at_least": at_least, "met": met})

    speed = "GBps_median"
    for threads in (1, 2):
        for case in CASES[:5]:
            is_4k = case == "pages_4096x4KiB"
            for way, goal in (("shm", 0.85 if is_4k else 0.9), ("cma", 0.95), ("tcp", 0.9)):
                ours, limit = f"ferry-{way}-{threads}", f"limit-{way}-{threads}"
                against = f"{ours} / limit"
                add(against, case, results.ratio(ours, limit, case, speed), goal)
            ours, limit = f"ferry-shm-{threads}", f"limit-shm-{threads}"
            cpu = results.cpu_ratio(ours, limit, case)
            add(f"{ours} / limit, CPU", case, cpu, 1.15, at_least=False)
    for case in PAGES:
        add("ferry-shm-2 / nixl", case, results.ratio("ferry-shm-2", "nixl", case, speed), 3.0)
        if best := results.best_of(NIXL_LOCAL, case, speed):
            ratio = results.ratio("ferry-shm-2", best, case, speed)
            add(f"ferry-shm-2 / best nixl ({best})", case, ratio, 1.5)
        goal = 4.0 if case in SMALL_PAGES else 2.0
        ratio = results.ratio("ferry-tcp-2", "mooncake", case, speed)
        add("ferry-tcp-2 / mooncake", case, ratio, goal)
    for case in SMALL_PAGES:
        if best := results.best_of(NIXL_TCP, case, speed):
            ratio = results.ratio("ferry-tcp-2", best, case, speed)
            add(f"ferry-tcp-2 / best nixl over tcp ({best})", case, ratio, 2.0)
    latency, case = "us_median", "lat_4KiB"
    ratio = results.ratio("ferry-shm-2", "nixl", case, latency)
    add("ferry-shm-2 / nixl, p50", case, ratio, 0.5, at_least=False)
    ratio = results.ratio("ferry-tcp-1", "limit-tcp-1", case, latency)
    add("ferry-tcp-1 / limit, p50", case, ratio, 1.3, at_least=False)
    return rows


def table(results: Results, names: list[str]) -> str:
    """Medians by path and case."""
    lines = [f"{'GB/s, medians':18}" + "".join(f"{case[:17]:>18}" for case in CASES)]
    for name in names:
        cells = []
        for case in CASES:
            is_latency = case.startswith("lat")
            field = "us_median" if is_latency else "GBps_median"
            value = results.median(name, case, field)
            cells.append("-" if value is None else f"{value:.1f} us" if is_latency else f"{value:.2f}")
        lines.append(f"{name:18}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def goal_lines(rows: list[dict]) -> str:
    """The ratios beside their goals; missed ones first."""
    lines = []
    for row in sorted(rows, key=lambda row: row["met"]):
        sign = ">=" if row["at_least"] else "<="
        verdict = "" if row["met"] else "  MISSED"
        what = f"{row['what']:52}{row['case']:18}"
        lines.append(f"{what}{row['measured']:7.2f}  (goal {sign} {row['goal']}){verdict}")
    return "\n".join(lines)


def machine() -> dict:
    """What this was measured on."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


def main():
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="Mooncake and NIXL too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--only", default="", help="paths to run, separated by commas")
    parser.add_argument("--out", type=Path, help="the results file; none without it")
    args = parser.parse_args()
    chosen = paths(args.peers)
    if args.only:
        chosen = {name: chosen[name] for name in args.only.split(",")}
    records = []
    for number in range(args.rounds):
        for name, (command, environment) in chosen.items():
            print(f"round {number + 1}/{args.rounds}: {name}", file=sys.stderr, flush=True)
            for record in run_path(command, environment, CASES, args.samples):
                records.append({"name": name, "round": number} | record)
    results = Results(records)
    rows = goals(results)
    print(table(results, list(chosen)))
    print()
    print(goal_lines(rows))
    unverified = [record for record in records if not record.get("verified")]
    for record in unverified:
        print(f"NOT VERIFIED: {record['name']} {record['case']}: {record.get('error', 'bytes')}")
    if args.out:
        today = datetime.date.today().isoformat()
        written = {"date": today, "machine": machine(), "goals": rows, "records": records}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.out}")
    return 1 if any(record["name"].startswith("ferry") for record in unverified) else 0


if __name__ == "__main__":
    sys.exit(main())
