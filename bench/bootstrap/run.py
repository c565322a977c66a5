"""Bootstrap servers side by side, in one run: SGLang's Python server, the Rust registry that its
wheel carries, ours, and a limit. Prints one table and writes JSON.

The servers run all the time, and each case takes turns over them, round after round; what is shown
is the median of the rounds. wrk (2 threads, 32 connections) makes the load. Processor time is that
of the server's process.

The limit (`limit.c`) does not look at what it is asked: it answers at once, or appends what came to
a file, synchronises it and answers. On a machine of few cores wrk leaves even to that no more than
the table says. A goal that it misses itself is out of reach there: it is then called limited, and
fails the run only below `LIMIT_SHARE` of the limit's requests per second.
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
RANKS = 8
ROOMS = 2000
FIRST_ROOM = 10**18 + 1
CONNECTIONS = 32
REGISTERING = 50
OURS, RUST, PYTHON, LIMIT = "ferry", "sglang-rust", "sglang-python", "limit"
ADDRESS = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=3&target_pp_rank=0"
TOPOLOGY = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
QUERY = "/query_dp_ranks"
# Name, path, rooms of a query.
CASES = [
    ("GET /route, a rank", ADDRESS, None),
    ("GET /route, topology", TOPOLOGY, None),
    ("query_dp_ranks, 1 room", QUERY, 1),
    ("query_dp_ranks, 32 rooms", QUERY, 32),
    ("query_dp_ranks, 256 rooms", QUERY, 256),
]
# Case, compared with, the least ratio of requests per second, the most ratio of processor time.
GOALS = [
    ("GET /route, a rank", PYTHON, 8.0, None),
    ("GET /route, topology", PYTHON, 8.0, None),
    ("GET /route, a rank", RUST, 0.9, 1.0),
    ("GET /route, topology", RUST, 0.9, 1.0),
    ("query_dp_ranks, 256 rooms", RUST, 2.0, None),
]
PUT_GOAL = 5.0
LIMIT_SHARE = 0.9
MET, LIMITED, MISSED = "met", "limited", "MISSED"


class Server:
    """A server's process on a free port of loopback."""

    def __init__(self, name, command, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name = name
        command = [part.replace("{port}", str(self.port)) for part in command]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{self.port}"
        deadline = time.monotonic() + 60
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                sys.exit(f"{name} does not answer:\n{Path(log.name).read_text()}")
            time.sleep(0.1)

    def answers(self):
        try:
            self.call("POST", QUERY, {"bootstrap_rooms": []})
        except OSError:
            return False
        return True

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()

    def register(self):
        for rank in range(RANKS):
            self.call("PUT", "/route", route_body(RANKS, rank, 40000 + rank))
        for at in range(ROOMS):
            room = {"bootstrap_room": FIRST_ROOM + at, "dp_rank": at % RANKS}
            self.call("POST", "/register_dp_rank", room)

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    def end(self):
        self.process.kill()
        self.process.wait()


def route_body(tp_size, tp_rank, port):
    return {
        "attn_tp_size": tp_size, "attn_tp_rank": tp_rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
        "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": port, "page_size": 64,
        "kv_cache_dtype": "auto", "prefill_http_port": 30000, "load_balance_method": "round_robin",
    }  # fmt: skip


def milliseconds(text):
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def load(server, path, seconds, connections=CONNECTIONS, script=None, rooms=None):
    """One turn of wrk; what it says, and the server's processor time for a request."""
    command = ["wrk", "-t2", f"-c{connections}", f"-d{seconds}s", "--latency"]
    if script:
        command += ["-s", str(HERE / script)]
    before = server.cpu_seconds()
    environment = dict(os.environ, ROOMS=str(rooms or 0))
    command.append(server.base + path)
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    used = server.cpu_seconds() - before
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", said)
    if wrong:
        sys.exit(f"{server.name} {path}: {wrong[0]}")
    requests = int(re.search(r"(\d+) requests in", said)[1])
    return {
        "rps": float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1]),
        "cpu_us": used / requests * 1e6,
        "p50_ms": milliseconds(re.search(r"\n +50%\s+(\S+)", said)[1]),
        "p99_ms": milliseconds(re.search(r"\n +99%\s+(\S+)", said)[1]),
    }


def medians(turns):
    return {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}


def bare_fdatasync(folder, seconds):
    """Appends 4 KiB and synchronises, again and again: what the disk itself takes."""
    block, times = os.urandom(4096), []
    with tempfile.TemporaryFile(dir=folder) as file:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            os.write(file.fileno(), block)
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - begun) * 1e3)
    times.sort()
    return {"p50_ms": times[len(times) // 2], "p99_ms": times[len(times) * 99 // 100]}


def machine():
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else "unknown",
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
    }


def commands(options, folder):
    python = str(Path(options.compared) / "venv/bin/python")
    wheel = str(Path(options.compared) / "wheel")
    return {
        PYTHON: [python, str(HERE / "serve_python.py"), wheel, "{port}"],
        RUST: [python, str(HERE / "serve_rust_registry.py"), wheel, "{port}"],
        OURS: [options.server, "--listen", "127.0.0.1:{port}", "--admin-listen", "127.0.0.1:0"]
        + ["--data-dir", f"{folder}/data"]
        + options.server_args.split(),
        LIMIT: [f"{folder}/limit", "{port}", "100"],
    }


def build_limit(folder):
    """Compiles the limit into a folder."""
    command = ["cc", "-O2", "-o", f"{folder}/limit", str(HERE / "limit.c"), "-lpthread"]
    subprocess.run(command, check=True)


def measure(options, folder, log):
    servers = {}
    try:
        for name, command in commands(options, folder).items():
            if options.only and name not in options.only:
                continue
            servers[name] = Server(name, command, log)
            if name != LIMIT:
                servers[name].register()
        turns = {(case, name): [] for case, _, _ in CASES for name in servers}
        for _ in range(options.rounds):
            for case, path, rooms in CASES:
                for name, server in servers.items():
                    if name == LIMIT and rooms:
                        continue
                    script = "query_dp_ranks.lua" if rooms else None
                    turn = load(server, path, options.seconds, script=script, rooms=rooms)
                    turns[case, name].append(turn)
        cases = {
            case: {name: medians(turns[case, name]) for name in servers if turns[case, name]}
            for case, _, _ in CASES
        }
        rss = {name: server.rss_mib() for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.end()
    return cases, rss


def loaded_fdatasync(server, folder, seconds):
    """The same beside as many connections that only look up: what the disk and the cores take
    together, as the load leaves none of them idle."""
    command = ["wrk", "-t2", f"-c{REGISTERING}", f"-d{seconds + 1}s", server.base + QUERY]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as looking_up:
        times = bare_fdatasync(folder, seconds)
        looking_up.wait()
    return times


def measure_put(options, folder, log):
    """Registrations on the disk beside bare synchronisations of it, in turns."""
    command = commands(options, folder)[OURS]
    command[command.index("--data-dir") + 1] = f"{folder}/put"
    server = Server(OURS, command, log)
    limit = Server(LIMIT, [*commands(options, folder)[LIMIT][:-1], "2", f"{folder}/limit-log"], log)
    puts, bare, loaded, limits = [], [], [], []
    try:
        for _ in range(options.rounds):
            bare.append(bare_fdatasync(folder, options.seconds))
            loaded.append(loaded_fdatasync(server, folder, options.seconds))
            puts.append(load(server, "/route", options.seconds, REGISTERING, "put_route.lua"))
            limits.append(load(limit, "/route", options.seconds, REGISTERING, "put_route.lua"))
    finally:
        server.end()
        limit.end()
    ratios = [put["p99_ms"] / sync["p99_ms"] for put, sync in zip(puts, bare)]
    return {
        "put": medians(puts),
        "fdatasync": medians(bare),
        "fdatasync_under_load": medians(loaded),
        "limit": medians(limits),
        "limit_ratio_p99": statistics.median(
            limit["p99_ms"] / sync["p99_ms"] for limit, sync in zip(limits, bare)
        ),
        "ratio_p99_to_limit": statistics.median(
            put["p99_ms"] / limit["p99_ms"] for put, limit in zip(puts, limits)
        ),
        "ratio_p99": statistics.median(ratios),
        "ratio_p99_under_load": statistics.median(
            put["p99_ms"] / sync["p99_ms"] for put, sync in zip(puts, loaded)
        ),
        "ratio_p99_to_p50": statistics.median(
            put["p99_ms"] / sync["p50_ms"] for put, sync in zip(puts, bare)
        ),
    }


def table(cases, rss):
    yield "| case | server | requests/s | CPU us | p50 ms | p99 ms | ferry's requests/s to it | CPU |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for case, measured in cases.items():
        ours = measured.get(OURS)
        for name, row in measured.items():
            against = ("", "")
            if ours and name != OURS:
                against = (f"{ours['rps'] / row['rps']:.2f}", f"{ours['cpu_us'] / row['cpu_us']:.2f}")
            yield (
                f"| {case} | {name} | {row['rps']:,.0f} | {row['cpu_us']:.1f} | {row['p50_ms']:.2f} "
                f"| {row['p99_ms']:.2f} | {against[0]} | {against[1]} |"
            )
    yield ""
    yield "Resident: " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in rss.items()) + "."


def verdict(is_met):
    return MET if is_met else MISSED


def judged(cases, put):
    for case, name, least_rps, most_cpu in GOALS:
        if name not in cases[case] or OURS not in cases[case]:
            continue
        ours, theirs = cases[case][OURS], cases[case][name]
        ratio = ours["rps"] / theirs["rps"]
        found = verdict(ratio >= least_rps)
        said = f"{case}: {ratio:.2f} times the requests/s of {name}, goal {least_rps}"
        limit = cases[case].get(LIMIT)
        if found == MISSED and limit and limit["rps"] < least_rps * theirs["rps"]:
            share = ours["rps"] / limit["rps"]
            found = LIMITED if share >= LIMIT_SHARE else MISSED
            beyond = limit["rps"] / theirs["rps"]
            said += f"; the limit has {beyond:.2f} times, and ours {share:.2f} of the limit's"
        yield found, said
        if most_cpu:
            ratio = ours["cpu_us"] / theirs["cpu_us"]
            yield verdict(ratio <= most_cpu), f"{case}: {ratio:.2f} of the CPU of {name}, goal {most_cpu}"
    if put:
        found = verdict(put["ratio_p99"] <= PUT_GOAL)
        if found == MISSED and put["limit_ratio_p99"] > PUT_GOAL:
            found = LIMITED
        yield (
            found,
            f"PUT /route at {REGISTERING}: p99 {put['put']['p99_ms']:.2f} ms "
            f"({put['put']['rps']:,.0f}/s), a bare fdatasync p99 {put['fdatasync']['p99_ms']:.2f} ms: "
            f"{put['ratio_p99']:.2f} times, goal {PUT_GOAL}; the limit's p99 is "
            f"{put['limit']['p99_ms']:.2f} ms ({put['limit']['rps']:,.0f}/s), "
            f"{put['limit_ratio_p99']:.2f} times, and ours {put['ratio_p99_to_limit']:.2f} times "
            f"that (p99 to a bare p50 of {put['fdatasync']['p50_ms']:.2f} ms: "
            f"{put['ratio_p99_to_p50']:.2f}; to its p99 of "
            f"{put['fdatasync_under_load']['p99_ms']:.2f} ms beside as many lookups: "
            f"{put['ratio_p99_under_load']:.2f})",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="our server's program")
    parser.add_argument("--compared", required=True, help="folder that install.sh made")
    parser.add_argument("--seconds", type=int, default=4, help="of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help=f"of {PYTHON}, {RUST}, {OURS}, {LIMIT}")
    parser.add_argument("--skip-put", action="store_true", help="lookups only")
    parser.add_argument("--server-args", default="", help="more options of our server")
    parser.add_argument("--folder", help="a folder on the disk that is measured")
    parser.add_argument("--write-to", help="folder for the JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        build_limit(folder)
        with open(f"{folder}/log", "w") as log:
            cases, rss = measure(options, folder, log)
            put = None if options.skip_put else measure_put(options, folder, log)
    print("\n".join(table(cases, rss)) + "\n")
    missed = False
    for found, text in judged(cases, put):
        missed |= found == MISSED
        print(f"{found:8}{text}")
    if options.write_to:
        document = {
            "machine": machine(), "seconds": options.seconds, "rounds": options.rounds,
            "cases": cases, "rss_mib": rss, "put": put,
        }  # fmt: skip
        path = Path(options.write_to) / f"bootstrap-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {path}")
    sys.exit(missed)


if __name__ == "__main__":
    main()
