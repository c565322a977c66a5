#!/usr/bin/env python3
"""Measures Ferry, the machine's limits and (with --peers) Mooncake and NIXL in one run.

Paths that are compared form a group. All of a group are started, and within each case they take
turns (A B C, C B A, A B C, ...), so that every ratio is of turns that stand side by side on a
machine that is not quiet. A path that keeps a core busy while it has nothing to do is stopped
between its turns. The last round verifies every byte. Prints report.py's tables, and writes a
results file.
"""

import argparse
import datetime
import json
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common
import report

HERE = Path(__file__).parent
CASES = report.BANDWIDTH + report.LATENCY
# A turn, or the start of a path, that takes longer has failed.
TURN_TIMEOUT_S = 120.0
# Beside the arenas: interpreters and what is built up.
PATH_OVERHEAD_MIB = 200
BEST_MOONCAKE = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
}
# Fields that a path or a case has in every record, or that follow from others.
LEFT_OUT = {
    "peer",
    "path",
    "tag",
    "op",
    "thp",
    "bytes",
    "n_desc",
    "desc_size",
    "GBps_min",
    "GBps_max",
}
# A machine is quiet when everybody together uses fewer cores.
QUIET_CORES = 0.25


def python(name: str) -> str:
    """The interpreter of a virtual environment that `make bench` made; this one without it."""
    path = common.build_folder() / f"venv-{name}" / "bin" / "python"
    return str(path) if path.exists() else sys.executable


def has_avx2() -> bool:
    """Whether the processor has the streaming stores of the second limit of shm."""
    return " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def groups(threads: list[int], with_peers: bool) -> dict[str, dict]:
    """For each group its paths, for each path its command and environment."""
    found = {}
    for way, limit in (("shm", "shm"), ("cma", "cma"), ("tcp", "tcp"), ("local", "memcpy")):
        found[way] = {}
        for count in threads:
            for name, script, path in (
                ("limit", "bench_limits.py", limit),
                ("ferry", "bench_ours.py", way),
            ):
                options = ["--path", path, "--threads", str(count)]
                found[way][f"{name}-{path}-{count}"] = ([sys.executable, script, *options], {})
    if has_avx2():
        for count in threads:
            options = ["--path", "shm", "--threads", str(count), "--streaming"]
            streaming = [sys.executable, "bench_limits.py", *options]
            found["shm"][f"limit-streaming-{count}"] = (streaming, {})
    if with_peers:
        nixl, quiet = [python("nixl"), "bench_nixl.py"], ["--no-progress-thread"]
        found["shm"] |= {
            "nixl": (nixl, {}),
            "nixl-quiet": (nixl + quiet, {}),
            "nixl-repost": (nixl + quiet + ["--mode", "repost"], {}),
            "nixl-posix": (nixl + ["--backend", "POSIX", "--mode", "init"], {}),
        }
        tcp = {"UCX_TLS": "tcp"}
        found["tcp"] |= {
            "nixl-tcp": (nixl, tcp),
            "nixl-tcp-quiet": (nixl + quiet, tcp),
            "mooncake": ([python("mooncake"), "bench_mooncake.py"], BEST_MOONCAKE),
        }
    return found


def only_write(threads: list[int]) -> set[str]:
    """Paths that cannot read: the bare TCP, and what stays within one process."""
    names = ("limit-tcp", "limit-memcpy", "ferry-local")
    return {f"{name}-{count}" for name in names for count in threads}


class PathFailed(Exception):
    """A path's process went away or does not answer."""


class Competitor:
    """A path's processes, which wait for their turns."""

    def __init__(self, name: str, command: list[str], environment: dict, options: list[str]):
        self.name = name
        # Others' engines keep a core busy while they have nothing to do; ours must not.
        self.is_stopped_between = not name.startswith(("ferry", "limit"))
        self.errors = open(errors_of(name), "w", encoding="utf-8")
        self.process = subprocess.Popen(
            [str(HERE / "prio.sh"), *command, *options, "--tag", name, "--serve"],
            cwd=HERE,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        self.pids = []
        self.buffer = b""

    def wait_until_ready(self):
        """Waits for the arenas to be filled and the session to be open."""
        self.pids = self.answer()["pids"]
        self.stop()

    def answer(self) -> dict:
        """Reads one JSON line; libraries may print others."""
        deadline = time.monotonic() + TURN_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self.buffer:
                    line, self.buffer = self.buffer.split(b"\n", 1)
                    if line.startswith(b"{"):
                        return json.loads(line)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise PathFailed("no answer in time")
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    raise PathFailed(f"ended; see {self.errors.name}")
                self.buffer += data

    def turn(self, case: str, samples: int, warm: int, is_verifying: bool) -> dict:
        """Lets the path time a case."""
        self.signal(signal.SIGCONT)
        ask = {"case": case, "samples": samples, "warm": warm, "verify": is_verifying}
        try:
            self.process.stdin.write(json.dumps(ask).encode() + b"\n")
            self.process.stdin.flush()
            return self.answer()
        except OSError as error:
            raise PathFailed(repr(error)) from error
        finally:
            self.stop()

    def stop(self):
        """Stops the path until its next turn, if it would disturb the others."""
        if self.is_stopped_between:
            self.signal(signal.SIGSTOP)

    def signal(self, number: int):
        """Sends a signal to each of the path's processes."""
        for pid in self.pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def close(self):
        """Ends the path's processes."""
        self.signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self.errors.close()


def errors_of(name: str) -> Path:
    """Where a path's standard error goes."""
    folder = common.build_folder() / "stderr"
    folder.mkdir(exist_ok=True)
    return folder / f"{name}.txt"


def check_memory(paths: int, arena_mib: int):
    """Ends the run early if the arenas of a group do not fit."""
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read())
    available = int(found[1]) // 1024 if found else sys.maxsize
    needed = paths * (2 * arena_mib + PATH_OVERHEAD_MIB)
    if needed > available:
        raise SystemExit(
            f"{paths} paths side by side need {needed} MiB, and {available} are available;"
            " --arena-mib 256 needs less"
        )


def run_group(chosen: dict, args, records: list[dict]):
    """Lets the paths of a group take turns in every case, with new processes every few rounds."""
    check_memory(len(chosen), args.arena_mib)
    rounds = range(args.rounds)
    some = -(-args.rounds // args.restarts)
    for first in rounds[::some]:
        run_rounds(chosen, rounds[first : first + some], args, records)


def run_rounds(chosen: dict, rounds: range, args, records: list[dict]):
    """Some rounds of a group with the same processes; the last one is verified."""
    options = ["--arena-mib", str(args.arena_mib), "--op", args.op, "--budget-s", "5"]
    paths = []

    def failed(path, case, number, error):
        print(f"{path.name} {case}: {error}", file=sys.stderr)
        record = {"name": path.name, "round": number, "case": case}
        records.append(record | {"error": str(error), "verified": False})
        paths.remove(path)
        path.close()

    for name, (command, environment) in chosen.items():
        paths.append(Competitor(name, command, environment, options))
    try:
        for path in list(paths):
            try:
                path.wait_until_ready()
            except PathFailed as error:
                for case in args.cases:
                    records.append(
                        {"name": path.name, "round": rounds[0], "case": case, "error": str(error)}
                    )
                failed(path, args.cases[0], rounds[0], error)
        for case in args.cases:
            is_latency = case in report.LATENCY
            samples, warm = (args.lat_samples, 50) if is_latency else (args.samples, 1)
            began = time.monotonic()
            for number in rounds:
                is_last = number == rounds[-1]
                common.wait_until_quiet(QUIET_CORES, args.quiet_wait_s)
                for path in list(paths) if number % 2 == 0 else list(reversed(paths)):
                    try:
                        record = path.turn(case, samples, warm, is_last)
                        records.append({"name": path.name, "round": number} | record)
                    except PathFailed as error:
                        failed(path, case, number, error)
            took = f"{time.monotonic() - began:.0f} s"
            told = f"  rounds {rounds[0] + 1} to {rounds[-1] + 1}, {case}: {took}"
            print(told, file=sys.stderr, flush=True)
    finally:
        for path in paths:
            path.close()


def machine() -> dict:
    """What this is measured on."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        models = [
            line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")
        ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
    }


def run_probes() -> list[dict]:
    """What probe.py finds."""
    command = [str(HERE / "prio.sh"), sys.executable, "probe.py"]
    ended = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def names(text: str) -> list[str]:
    """A list that is separated by commas."""
    return [name for name in text.split(",") if name]


def main():
    """Runs the groups."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", action="store_true", help="Mooncake and NIXL too")
    parser.add_argument("--probes", action="store_true", help="then probe.py's findings too")
    parser.add_argument("--groups", type=names, default=["shm", "cma", "tcp", "local"])
    parser.add_argument("--paths", type=names, default=[], help="only these, such as ferry-shm-2")
    parser.add_argument("--cases", type=names, default=CASES)
    parser.add_argument("--op", default="write", choices=["write", "read"])
    parser.add_argument("--threads", type=names, default=["1", "2"], help="of ours and the limits")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--restarts", type=int, default=3, help="new processes, with other memory, so many times"
    )
    parser.add_argument("--samples", type=int, default=4, help="of a bandwidth case, each round")
    parser.add_argument("--lat-samples", type=int, default=500)
    parser.add_argument("--arena-mib", type=int, default=512)
    parser.add_argument(
        "--quiet-wait-s",
        type=float,
        default=0.0,
        help="wait so long for a quiet machine each round",
    )
    parser.add_argument("--write-to", type=Path, help="folder of the results file")
    args = parser.parse_args()
    # So that paths which are stopped between their turns are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    records = []
    threads = [int(count) for count in args.threads]
    for group, paths in groups(threads, args.peers).items():
        if args.op == "read":
            paths = {name: path for name, path in paths.items() if name not in only_write(threads)}
        if args.paths:
            paths = {name: path for name, path in paths.items() if name in args.paths}
        if group in args.groups and paths:
            print(f"{group}: {', '.join(paths)}", file=sys.stderr, flush=True)
            run_group(paths, args, records)
    written = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "rounds": args.rounds,
        "op": args.op,
        "paths": {record["name"]: record["path"] for record in records if "path" in record},
        "cases": {case: common.CASES[case][:2] for case in args.cases},
        "goals": report.Goals(report.Results(records)).rows,
        "probes": run_probes() if args.probes else [],
        "records": records,
    }
    print(report.report(written, False))
    if args.write_to:
        kind = f"{written['machine']['cpu']} {written['machine']['cores']} cores"
        kind = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
        suffix = "" if args.op == "write" else f"-{args.op}"
        file = args.write_to / f"{written['date']}-{kind}{suffix}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dump(written), encoding="utf-8")
        print(f"\nwritten to {file}")
    ours_failed = [record for record in records if record.get("verified") is False]
    return 1 if any(record["name"].startswith("ferry") for record in ours_failed) else 0


def dump(written: dict) -> str:
    """JSON with one line for each record: without what is the same in all records of a path or a
    case, and rounded to what was measured."""

    def rounded(value):
        return float(f"{value:.4g}") if isinstance(value, float) else value

    def line(row: dict, left_out: set[str]) -> str:
        kept = {key: rounded(value) for key, value in row.items() if key not in left_out}
        return "  " + json.dumps(kept, separators=(",", ":"))

    parts = []
    for key, value in written.items():
        text = json.dumps(value)
        if isinstance(value, list):
            left_out = LEFT_OUT if key == "records" else set()
            text = "[\n" + ",\n".join(line(row, left_out) for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
