"""The rules that every path of the benchmarks keeps: arenas, page lists, timing, verification.

Each bench script is the *initiator*; it starts itself again as the *target* process
(``--role target``), and the two talk over a socket pair with one JSON object for each line. Each
owns an arena; a Driver moves bytes from the one to the other.

* Arenas have 4 KiB pages (``--thp``: huge ones) and are faulted in before anything is timed.
* Each case rotates over ``--variants`` page lists, random on both sides, so that data is out of
  the last-level cache.
* A sample is one blocking batch call of the path's public interface: what that does with its
  descriptors, the bytes, and completion at the initiator. Addresses are prepared before.
* Warm-up samples are thrown away; medians are of the rest.
* Afterwards the receiving arena is zeroed, a batch is repeated, and every byte is compared: what
  was named must have arrived, and nothing else may have changed.
* GB is 1e9 bytes.

A script times its cases once, or (``--serve``) takes its turns from standard input, one JSON object
``{"case", "samples", "warm", "verify"}`` a line; run.py lets several paths take turns so.

Fields of a result, one JSON line: peer, path, tag, op, case, bytes, n_desc, desc_size, samples;
GBps_median/min/max; us_median/p99/min/max; cpu_init, cpu_tgt (CPU-seconds for each second while
timing); init/tgt_cpu_s_per_GB; rss_over_arena_MiB_init/tgt (peak, beyond one arena); noise_cores
(what everybody else on the machine used); verified (null if this turn did not verify).
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

import numpy as np

KIB = 1 << 10
MIB = 1 << 20

# name: (ranges, bytes of each, kind)
CASES = {
    "contig_64MiB": (1, 64 * MIB, "bandwidth"),
    "contig_256MiB": (1, 256 * MIB, "bandwidth"),
    "pages_512x64KiB": (512, 64 * KIB, "bandwidth"),
    "pages_1024x16KiB": (1024, 16 * KIB, "bandwidth"),
    "pages_4096x4KiB": (4096, 4 * KIB, "bandwidth"),
    "lat_4KiB": (1, 4 * KIB, "latency"),
    "lat_64KiB": (1, 64 * KIB, "latency"),
}
LATENCY_VARIANTS = 256
# In a hurry a turn still has so many samples.
FEWEST_SAMPLES = 3


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every bench script has."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=keep_lines)
    made.add_argument("--role", default="initiator", choices=["initiator", "target"])
    made.add_argument("--ctl-fd", type=int, default=-1, help="the target's socket")
    made.add_argument("--serve", action="store_true", help="take turns from standard input")
    made.add_argument("--arena-mib", type=int, default=512)
    made.add_argument("--thp", action="store_true", help="ask for huge pages in both arenas")
    made.add_argument("--op", default="write", choices=["write", "read"])
    made.add_argument("--variants", type=int, default=8, help="page lists of a bandwidth case")
    made.add_argument("--samples", type=int, default=15, help="timed samples of a bandwidth case")
    made.add_argument("--lat-samples", type=int, default=2000)
    made.add_argument("--budget-s", type=float, default=12.0, help="most seconds timing a case")
    made.add_argument("--cases", default=",".join(CASES))
    made.add_argument("--tag", default="", help="copied into the results")
    made.add_argument("--seed", type=int, default=1)
    return made


def build_folder() -> Path:
    """Where what is built for the benchmarks lies."""
    default = Path(__file__).parents[2] / "target" / "peers"
    folder = Path(os.environ.get("BENCH_BUILD_DIR", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pattern(seed: int, offset: int, length: int) -> np.ndarray:
    """Bytes of the source pattern; offset and length are multiples of 8. No word is zero."""
    index = np.arange(offset // 8, (offset + length) // 8, dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = (index + np.uint64(seed * 1000003)) * np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
        words |= np.uint64(1)
    return words.view(np.uint8)


class Arena:
    """A pool of bytes: private, or a file that another process maps too."""

    def __init__(self, size: int, shared_path: str | None = None, thp: bool = False):
        self.size = size
        if shared_path:
            fd = os.open(shared_path, os.O_RDWR | os.O_CREAT, 0o600)
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
            self.map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
            os.close(fd)
        else:
            self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE if thp else mmap.MADV_NOHUGEPAGE)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        # Faults every page in, and changes none that another process has filled.
        self.bytes[::4096] |= 0

    def read(self, offset: int, length: int) -> np.ndarray:
        """Bytes of it."""
        return self.bytes[offset : offset + length]

    def write(self, offset: int, values: np.ndarray):
        """Puts bytes there."""
        self.bytes[offset : offset + len(values)] = values

    def fill(self, seed: int):
        """Writes the source pattern everywhere."""
        for offset, length in mebibytes(self.size):
            self.write(offset, pattern(seed, offset, length))

    def zero(self):
        """Writes zeros everywhere."""
        for offset, length in mebibytes(self.size):
            self.write(offset, np.zeros(length, dtype=np.uint8))

    def changed_words(self) -> int:
        """How many words are not zero."""
        blocks = (self.read(offset, length) for offset, length in mebibytes(self.size))
        return sum(int(np.count_nonzero(block.view(np.uint64))) for block in blocks)

    def mismatches(self, seed: int, src: int, dst: int, length: int) -> int:
        """How many MiB blocks at dst are not the pattern of src."""
        bad = 0
        for offset, step in mebibytes(length):
            here = self.read(dst + offset, step)
            bad += not np.array_equal(here, pattern(seed, src + offset, step))
        return bad


class ForeignArena(Arena):
    """Private memory of a process that this one started."""

    def __init__(self, size: int, pid: int, address: int):
        self.size, self.address = size, address
        self.memory = open(f"/proc/{pid}/mem", "r+b", buffering=0)

    def read(self, offset, length):
        values = os.pread(self.memory.fileno(), length, self.address + offset)
        if len(values) != length:
            raise OSError(f"read {len(values)} of {length} bytes at {offset} of the arena")
        return np.frombuffer(values, dtype=np.uint8)

    def write(self, offset, values):
        written = os.pwrite(self.memory.fileno(), values, self.address + offset)
        if written != len(values):
            raise OSError(f"wrote {written} of {len(values)} bytes at {offset} of the arena")


def mebibytes(length: int):
    """Offset and length of each MiB, the last one shorter."""
    return ((offset, min(MIB, length - offset)) for offset in range(0, length, MIB))


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


def verify(arena: Arena, seed: int, case: str, variant: int) -> dict:
    """Compares what one batch had to move: `bad` blocks, and `stray` words that changed although
    the batch does not name them. Zeroes what it compared."""
    _, size, _ = CASES[case]
    bad = 0
    src = offsets(case, variant, arena.size, seed, "src").tolist()
    dst = offsets(case, variant, arena.size, seed, "dst").tolist()
    for src_offset, dst_offset in zip(src, dst):
        bad += arena.mismatches(seed, src_offset, dst_offset, size)
        arena.write(dst_offset, np.zeros(size, dtype=np.uint8))
    return {"bad": bad, "stray": arena.changed_words()}


def own_cpu_s() -> float:
    """CPU-seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def busy_s() -> float:
    """CPU-seconds of the whole machine, what the hypervisor stole included."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(cores: float, longest_s: float) -> bool:
    """Waits until everybody together uses fewer cores than this for a second."""
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline:
        busy, began = busy_s(), time.monotonic()
        time.sleep(1.0)
        if (busy_s() - busy) / (time.monotonic() - began) < cores:
            return True
    return False


def peak_rss(pid: int) -> int:
    """Peak memory of a process in bytes."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as status:
        peaks = [line.split()[1] for line in status if line.startswith("VmHWM")]
    return int(peaks[0]) * KIB if peaks else 0


def reset_peak_rss(pid: int):
    """Begins the peak anew, where the kernel lets us."""
    try:
        with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as clear_refs:
            clear_refs.write("5")
    except OSError:
        pass


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
    # The arena that is written, if it is not the target's: for copies within the initiator.
    local_destination: Arena | None = None

    def __init__(self, args):
        self.args = args

    def make_arena(self, role: str) -> Arena:
        """The arena of this process; `role` is `initiator` or `target`."""
        return Arena(self.args.arena_mib * MIB, thp=self.args.thp)

    def engine_pid(self) -> int:
        """The process whose CPU and memory are measured."""
        return os.getpid()

    def cpu_s(self) -> float:
        """CPU-seconds of that process so far."""
        return own_cpu_s()

    def target_setup(self, arena: Arena) -> dict:
        """What the initiator is told."""
        return {}

    def target_close(self):
        """Ends the target."""

    def setup(self, arena: Arena, info: dict):
        """Connects the initiator to the target."""

    def prepare(self, count: int, size: int, src: np.ndarray, dst: np.ndarray):
        """Makes what `transfer` takes, from offsets of what is read and what is written."""
        raise NotImplementedError

    def prepare_case(self, case: str, variants: range):
        """Prepares every variant of a case; not timed, and done once for each case."""
        count, size, _ = CASES[case]
        arena, seed = self.args.arena_mib * MIB, self.args.seed
        return [
            self.prepare(
                count,
                size,
                offsets(case, variant, arena, seed, "src"),
                offsets(case, variant, arena, seed, "dst"),
            )
            for variant in variants
        ]

    def transfer(self, prepared):
        """Moves one batch; returns when it is complete, raises when it failed."""
        raise NotImplementedError

    def transfer_variant(self, prepared, variant: int):
        """Moves the batch of one variant of what `prepare_case` made."""
        self.transfer(prepared[variant])

    def measure(self, prepared, warm: int, samples: int) -> list[int]:
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
            if len(nanoseconds) >= FEWEST_SAMPLES and time.perf_counter() > deadline:
                break
        return nanoseconds

    def close(self):
        """Ends the initiator."""


def prepare_arena(arena: Arena, role: str, args):
    """Gives an arena its contents: the pattern where bytes come from, zeros where they go."""
    if (role == "initiator") == (args.op == "write"):
        arena.fill(args.seed)
    else:
        arena.zero()


def target_main(driver: Driver):
    """The target process, until the initiator is gone."""
    control = Control(socket.socket(fileno=driver.args.ctl_fd))
    arena = driver.make_arena("target")
    prepare_arena(arena, "target", driver.args)
    info = driver.target_setup(arena)
    pids = sorted({os.getpid(), driver.engine_pid()})
    control.send(address=arena.address, pid=os.getpid(), pids=pids, info=info)
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
                case "reset":
                    reset_peak_rss(driver.engine_pid())
                    control.send()
                case "stat":
                    control.send(cpu_s=driver.cpu_s(), peak=peak_rss(driver.engine_pid()))
                case "verify":
                    found = verify(arena, driver.args.seed, message["case"], message["variant"])
                    control.send(**found)
                case "exit":
                    driver.target_close()
                    control.send()
                    break
        except Exception as error:  # told to the initiator, which ends the case
            control.send(error=repr(error))
    # Peers' libraries may hold threads that never end.
    os._exit(0)


class Initiator:
    """The initiator process with its target."""

    def __init__(self, driver_class, args):
        self.args = args
        ours, theirs = socket.socketpair()
        command = [sys.executable, *sys.argv, "--role", "target", "--ctl-fd", str(theirs.fileno())]
        self.target = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.control = Control(ours)
        self.driver = driver_class(args)
        self.arena = self.driver.make_arena("initiator")
        prepare_arena(self.arena, "initiator", args)
        hello = self.control.receive()
        info = hello["info"] | {"address": hello["address"], "pid": hello["pid"]}
        self.driver.setup(self.arena, info)
        self.pids = sorted({os.getpid(), self.driver.engine_pid(), *hello["pids"]})
        self.prepared = {}

    def turn(self, case: str, samples: int, warm: int, is_verifying: bool) -> dict:
        """Times a case, and says so if that failed."""
        driver, args = self.driver, self.args
        result = {"peer": driver.peer, "path": driver.path, "tag": args.tag, "op": args.op}
        result["case"] = case
        try:
            result |= self.measure(case, samples, warm)
            result["verified"] = self.is_verified(case) if is_verifying else None
        except Exception as error:  # a path may fail one case and go on
            result |= {"error": repr(error)[:300], "verified": False}
        return result

    def measure(self, case: str, samples: int, warm: int) -> dict:
        """Times a case."""
        count, size, kind = CASES[case]
        driver, control = self.driver, self.control
        if case not in self.prepared:
            variants = LATENCY_VARIANTS if kind == "latency" else self.args.variants
            self.prepared[case] = driver.prepare_case(case, range(variants))
        prepared = self.prepared[case]
        reset_peak_rss(driver.engine_pid())
        control.ask(op="reset")
        target_cpu, busy, cpu = control.ask(op="stat")["cpu_s"], busy_s(), driver.cpu_s()
        began = time.perf_counter()
        nanoseconds = driver.measure(prepared, warm, samples)
        wall = time.perf_counter() - began
        cpu, busy = driver.cpu_s() - cpu, busy_s() - busy
        stat = control.ask(op="stat")
        target_cpu = stat["cpu_s"] - target_cpu
        times = sorted(nanosecond / 1e3 for nanosecond in nanoseconds)
        median = statistics.median(times)
        total = count * size
        moved = total * (len(times) + warm) / 1e9
        over_arena = [
            peak_rss(driver.engine_pid()) - self.arena.size,
            stat["peak"] - self.arena.size,
        ]
        return {
            "bytes": total,
            "n_desc": count,
            "desc_size": size,
            "samples": len(times),
            "GBps_median": total / median / 1e3,
            "GBps_min": total / times[-1] / 1e3,
            "GBps_max": total / times[0] / 1e3,
            "us_median": median,
            "us_p99": times[min(len(times) - 1, int(0.99 * len(times)))],
            "us_min": times[0],
            "us_max": times[-1],
            "cpu_init": cpu / wall,
            "cpu_tgt": target_cpu / wall,
            "init_cpu_s_per_GB": cpu / moved,
            "tgt_cpu_s_per_GB": target_cpu / moved,
            "rss_over_arena_MiB_init": over_arena[0] / MIB,
            "rss_over_arena_MiB_tgt": over_arena[1] / MIB,
            "noise_cores": max(0.0, busy - cpu - target_cpu) / wall,
            "thp": self.args.thp,
        }

    def is_verified(self, case: str) -> bool:
        """Repeats batches of a case into a zeroed arena and compares every byte of it."""
        is_latency = CASES[case][2] == "latency"
        args, control = self.args, self.control
        local = self.arena if args.op == "read" else self.driver.local_destination
        for variant in [0] if is_latency else [0, 1]:
            local.zero() if local else control.ask(op="zero")
            self.driver.transfer_variant(self.prepared[case], variant)
            if local:
                found = verify(local, args.seed, case, variant)
            else:
                found = control.ask(op="verify", case=case, variant=variant)
            if found["bad"] or found["stray"]:
                print(f"{self.driver.path} {case}: {found}", file=sys.stderr)
                return False
        return True

    def close(self):
        """Ends both processes."""
        try:
            self.driver.close()
            self.control.ask(op="exit")
            self.target.wait(10)
        except (EOFError, OSError, RuntimeError, subprocess.TimeoutExpired):
            self.target.kill()


def run(driver_class, args):
    """Runs a bench script, in this process and the target that it starts."""
    if args.role == "target":
        return target_main(driver_class(args))
    initiator = Initiator(driver_class, args)
    is_failed = False

    def say(value: dict):
        print(json.dumps(value), flush=True)

    if args.serve:
        say({"pids": initiator.pids, "path": initiator.driver.path})
        for line in sys.stdin:
            ask = json.loads(line)
            say(initiator.turn(ask["case"], ask["samples"], ask["warm"], ask["verify"]))
    else:
        for case in args.cases.split(","):
            is_latency = CASES[case][2] == "latency"
            samples, warm = (args.lat_samples, 100) if is_latency else (args.samples, 3)
            result = initiator.turn(case, samples, warm, True)
            is_failed |= not result["verified"]
            say(result)
            if initiator.target.poll() is not None:
                break
    initiator.close()
    sys.stdout.flush()
    # Peers' libraries may hold threads that never end.
    os._exit(1 if is_failed else 0)
