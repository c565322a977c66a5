"""The rules that every path of the benchmarks keeps: arenas, page lists, timing, verification.

Each bench script is the *initiator*; it starts itself again as the *target* process
(``--role target``), and the two talk over a socket pair with one JSON object for each line. The
target owns a destination arena, the initiator a source arena; a Driver moves bytes between them.

* Arenas have 4 KiB pages and are faulted in before anything is timed.
* Each case rotates over ``--variants`` page lists, random on both sides, so that data is out of
  the last-level cache.
* A sample is one blocking batch call of the path's public interface, from its beginning to
  completion at the initiator. Addresses are prepared before.
* Warm-up samples are thrown away; medians are of the rest.
* Afterwards the target zeroes its arena, a batch is repeated, and every byte is compared: what was
  named must have arrived, nothing else may have changed.
* GB is 1e9 bytes.

A result is one JSON line; ``init_cpu_s_per_GB`` and ``tgt_cpu_s_per_GB`` are CPU-seconds of the two
processes for each GB moved, ``noise_cores`` what everybody else used meanwhile.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
import zlib

import numpy as np

KIB = 1 << 10
MIB = 1 << 20

# name: (ranges, bytes of each, kind)
CASES = {
    "contig_64MiB": (1, 64 * MIB, "bandwidth"),
    "contig_256MiB": (1, 256 * MIB, "bandwidth"),
    "pages_1024x16KiB": (1024, 16 * KIB, "bandwidth"),
    "pages_4096x4KiB": (4096, 4 * KIB, "bandwidth"),
    "pages_512x64KiB": (512, 64 * KIB, "bandwidth"),
    "lat_4KiB": (1, 4 * KIB, "latency"),
    "lat_64KiB": (1, 64 * KIB, "latency"),
}


def add_args(parser):
    """Adds the options that every bench script has."""
    parser.add_argument("--role", default="initiator", choices=["initiator", "target"])
    parser.add_argument("--ctl-fd", type=int, default=-1)
    parser.add_argument("--arena-mib", type=int, default=512)
    parser.add_argument("--variants", type=int, default=8, help="page lists of a bandwidth case")
    parser.add_argument("--samples", type=int, default=15, help="timed samples of a bandwidth case")
    parser.add_argument("--lat-samples", type=int, default=2000)
    parser.add_argument("--budget-s", type=float, default=12.0, help="most seconds of timing a case")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tag", default="", help="copied into the results")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def pattern(seed: int, offset: int, length: int) -> np.ndarray:
    """Bytes of the source pattern; offset and length are multiples of 8. Never zero words."""
    index = np.arange(offset // 8, (offset + length) // 8, dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = (index + np.uint64(seed * 1000003)) * np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
        words |= np.uint64(1)
    return words.view(np.uint8)


class Arena:
    """A pool of bytes: private, or a file that another process maps too."""

    def __init__(self, size: int, shared_path: str | None = None):
        self.size = size
        if shared_path:
            fd = os.open(shared_path, os.O_RDWR | os.O_CREAT, 0o600)
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
            self.map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
            os.close(fd)
        else:
            self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_NOHUGEPAGE)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.bytes[::4096] = 0

    def fill(self, seed: int):
        """Writes the source pattern everywhere."""
        for offset in range(0, self.size, MIB):
            length = min(MIB, self.size - offset)
            self.bytes[offset : offset + length] = pattern(seed, offset, length)

    def zero(self):
        """Writes zeros everywhere."""
        self.bytes.fill(0)

    def changed_words(self) -> int:
        """Words that are not zero."""
        blocks = range(0, self.size, MIB)
        words = (self.bytes[block : block + MIB].view(np.uint64) for block in blocks)
        return sum(int(np.count_nonzero(block)) for block in words)

    def mismatches(self, seed: int, src: int, dst: int, length: int) -> int:
        """MiB blocks at dst that are not the pattern of src."""
        bad = 0
        for offset in range(0, length, MIB):
            step = min(MIB, length - offset)
            here = self.bytes[dst + offset : dst + offset + step]
            bad += not np.array_equal(here, pattern(seed, src + offset, step))
        return bad


def offsets(case: str, variant: int, arena: int, seed: int, side: str) -> np.ndarray:
    """Byte offsets of a case's ranges on one side, `src` or `dst`."""
    count, size, kind = CASES[case]
    slots = arena // size
    if count > slots:
        raise ValueError(f"{case} does not fit the arena")
    if count == 1 and kind == "bandwidth":
        shift = slots // 2 if side == "dst" else 0
        return np.array([(variant + shift) % slots * size], dtype=np.int64)
    digest = zlib.crc32(f"{case}/{variant}/{side}/{seed}".encode())
    return np.random.default_rng(digest).permutation(slots)[:count].astype(np.int64) * size


def own_cpu_s() -> float:
    """CPU-seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def busy_s() -> float:
    """CPU-seconds of the whole machine, what the hypervisor stole included."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


class Control:
    """The socket between the two processes."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.buffer = b""

    def send(self, **message):
        """Sends one object."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict:
        """Receives one object."""
        while b"\n" not in self.buffer:
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError("the other process went away")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, **message) -> dict:
        """Sends one object and returns the answer."""
        self.send(**message)
        answer = self.receive()
        if "error" in answer:
            raise RuntimeError("target: " + answer["error"])
        return answer


class Driver:
    """One path. Methods that begin with `target_` run in the target process."""

    peer = "base"
    path = "base"

    def __init__(self, args):
        self.args = args

    def make_arena(self, role: str) -> Arena:
        """The arena of this process; `role` is `initiator` or `target`."""
        return Arena(self.args.arena_mib * MIB)

    def target_setup(self, arena: Arena) -> dict:
        """What the initiator is told."""
        return {}

    def target_close(self):
        """Ends the target."""

    def setup(self, arena: Arena, info: dict):
        """Connects the initiator to the target."""

    def prepare(self, count: int, size: int, src: np.ndarray, dst: np.ndarray):
        """Makes what `transfer` takes, from offsets on both sides. Not timed."""
        raise NotImplementedError

    def transfer(self, prepared):
        """Moves one batch; returns when it is complete, raises when it failed."""
        raise NotImplementedError

    def measure(self, prepared: list, warm: int, samples: int) -> list[int]:
        """Nanoseconds of each timed batch."""
        for sample in range(warm):
            self.transfer(prepared[sample % len(prepared)])
        nanoseconds = []
        deadline = time.perf_counter() + self.args.budget_s
        while len(nanoseconds) < samples:
            batch = prepared[(len(nanoseconds) + warm) % len(prepared)]
            began = time.perf_counter_ns()
            self.transfer(batch)
            nanoseconds.append(time.perf_counter_ns() - began)
            if len(nanoseconds) >= 5 and time.perf_counter() > deadline:
                break
        return nanoseconds

    def cpu_s(self) -> float:
        """CPU-seconds of this side so far."""
        return own_cpu_s()

    def close(self):
        """Ends the initiator."""


def verify(arena: Arena, seed: int, case: str, variant: int) -> dict:
    """Compares what one batch had to move; whatever else is not zero is stray."""
    _, size, _ = CASES[case]
    bad = 0
    src = offsets(case, variant, arena.size, seed, "src").tolist()
    dst = offsets(case, variant, arena.size, seed, "dst").tolist()
    for src_offset, dst_offset in zip(src, dst):
        bad += arena.mismatches(seed, src_offset, dst_offset, size)
        arena.bytes[dst_offset : dst_offset + size] = 0
    return {"bad": bad, "stray": arena.changed_words()}


def target_main(driver: Driver):
    """The target process, until the initiator is gone."""
    control = Control(socket.socket(fileno=driver.args.ctl_fd))
    arena = driver.make_arena("target")
    arena.zero()
    info = driver.target_setup(arena)
    control.send(address=arena.address, pid=os.getpid(), info=info)
    while True:
        try:
            message = control.receive()
        except EOFError:
            break
        try:
            match message["op"]:
                case "zero":
                    arena.zero()
                    control.send()
                case "stat":
                    control.send(cpu_s=driver.cpu_s())
                case "verify":
                    found = verify(arena, driver.args.seed, message["case"], message["variant"])
                    control.send(**found)
                case "exit":
                    driver.target_close()
                    control.send()
                    break
        except Exception as error:  # told to the initiator, which ends the case
            control.send(error=repr(error))
    os._exit(0)


def run(driver_class, args):
    """Runs every case of a bench script, in this process and the target that it starts."""
    if args.role == "target":
        return target_main(driver_class(args))
    ours, theirs = socket.socketpair()
    command = [sys.executable, *sys.argv, "--role", "target", "--ctl-fd", str(theirs.fileno())]
    target = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    control = Control(ours)
    driver = driver_class(args)
    arena = driver.make_arena("initiator")
    arena.fill(args.seed)
    hello = control.receive()
    driver.setup(arena, hello["info"] | {"address": hello["address"], "pid": hello["pid"]})
    failed = False
    for case in args.cases.split(","):
        result = {"peer": driver.peer, "path": driver.path, "tag": args.tag, "case": case}
        try:
            result |= one_case(driver, args, case, arena, control)
        except Exception as error:  # a path may fail one case and go on
            result["error"] = repr(error)[:300]
        failed |= not result.get("verified", False)
        print(json.dumps(result), flush=True)
        if target.poll() is not None:
            break
    try:
        driver.close()
        control.ask(op="exit")
        target.wait(10)
    except (EOFError, OSError, subprocess.TimeoutExpired):
        target.kill()
    sys.stdout.flush()
    # Peers' libraries may hold threads that never end.
    os._exit(1 if failed else 0)


def one_case(driver, args, case, arena, control) -> dict:
    """Times and verifies one case."""
    count, size, kind = CASES[case]
    total = count * size
    is_latency = kind == "latency"
    variants = range(256 if is_latency else args.variants)
    prepared = [
        driver.prepare(
            count,
            size,
            offsets(case, variant, arena.size, args.seed, "src"),
            offsets(case, variant, arena.size, args.seed, "dst"),
        )
        for variant in variants
    ]
    samples, warm = (args.lat_samples, 100) if is_latency else (args.samples, 3)
    target_cpu, busy, cpu = control.ask(op="stat")["cpu_s"], busy_s(), driver.cpu_s()
    began = time.perf_counter()
    nanoseconds = driver.measure(prepared, warm, samples)
    wall = time.perf_counter() - began
    cpu, busy = driver.cpu_s() - cpu, busy_s() - busy
    target_cpu = control.ask(op="stat")["cpu_s"] - target_cpu
    verified = True
    for variant in [0] if is_latency else [0, 1]:
        control.ask(op="zero")
        driver.transfer(prepared[variant])
        found = control.ask(op="verify", case=case, variant=variant)
        verified &= found["bad"] == 0 and found["stray"] == 0
    times = sorted(nanosecond / 1e3 for nanosecond in nanoseconds)
    median = statistics.median(times)
    moved = total * (len(times) + warm) / 1e9
    return {
        "bytes": total,
        "ranges": count,
        "samples": len(times),
        "GBps_median": total / median / 1e3,
        "GBps_best": total / times[0] / 1e3,
        "us_median": median,
        "us_p99": times[min(len(times) - 1, int(0.99 * len(times)))],
        "init_cpu_s_per_GB": cpu / moved,
        "tgt_cpu_s_per_GB": target_cpu / moved,
        "noise_cores": max(0.0, busy - cpu - target_cpu) / wall,
        "verified": verified,
    }
