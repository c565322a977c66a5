#!/usr/bin/env python3
"""Ferry's io engine through its public interface: a Rust process for each side (bench/driver).

The page lists are made here and handed over before anything is timed; the Rust process times its
own blocking calls. The arenas are filled and verified from here: the memfds that `shm` and `tcp` are
measured with are mapped, the private memory of `cma` is reached by /proc/PID/mem.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common

PROGRAM = Path(__file__).parents[2] / "target" / "release" / "bench-driver"
TRANSPORTS = ["local", "shm", "cma", "tcp"]


class Engine:
    """One side's process."""

    def __init__(self, args, role):
        program = os.environ.get("BENCH_DRIVER", str(PROGRAM))
        command = [program, "--role", role, "--transport", args.path]
        command += ["--threads", str(args.threads), "--streams", str(args.streams or args.threads)]
        command += ["--arena-mib", str(args.arena_mib)]
        command += ["--fault", args.fault] if args.fault and role == "initiator" else []
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.hello = self.answer()
        self.pid = self.process.pid

    def answer(self) -> dict:
        """Reads one answer."""
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("bench-driver went away; its errors stand above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, **question) -> dict:
        """Asks and returns the answer."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def arena(self, key: str, size: int) -> common.Arena:
        """One of the engine's arenas."""
        place = self.hello[key]
        if "fd" in place:
            return common.Arena(size, f"/proc/{self.pid}/fd/{place['fd']}")
        return common.ForeignArena(size, self.pid, place["address"])

    def close(self):
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait(10)


class Ours(common.Driver):
    """Ferry over one transport."""

    peer = "ferry"

    def __init__(self, args):
        super().__init__(args)
        self.path = f"{args.path}-{args.threads}"
        self.size = args.arena_mib * common.MIB
        # Within one process the initiator's engine has a second one beside it.
        self.is_local = args.path == "local"
        self.engine = None
        if not (self.is_local and args.role == "target"):
            self.engine = Engine(args, args.role)

    def make_arena(self, role):
        return self.engine.arena("arena", self.size) if self.engine else super().make_arena(role)

    def engine_pid(self):
        return self.engine.pid if self.engine else super().engine_pid()

    def cpu_s(self):
        return self.engine.ask(op="stat")["cpu_s"] if self.engine else super().cpu_s()

    def target_setup(self, arena):
        return {key: self.engine.hello[key] for key in ("engine", "region")} if self.engine else {}

    def setup(self, arena, info):
        hello = info
        if self.is_local:
            hello = self.engine.hello["local"]
            if self.args.op == "read":
                raise SystemExit("local is only measured writing")
            self.local_destination = self.engine.arena("local_arena", self.size)
        ends = {key: hello[key] for key in ("engine", "region")}
        self.engine.ask(op="connect", direction=self.args.op, **ends)

    def prepare(self, count, size, src, dst):
        return {"src": src.tolist(), "dst": dst.tolist()}

    def prepare_case(self, case, variants):
        lists = super().prepare_case(case, variants)
        self.engine.ask(op="prepare", case=case, size=common.CASES[case][1], lists=lists)
        return case

    def measure(self, prepared, warm, samples):
        counts = {"warm": warm, "samples": samples, "fewest": common.FEWEST_SAMPLES}
        ask = {"case": prepared, "direction": self.args.op, "budget_s": self.args.budget_s}
        return self.engine.ask(op="measure", **ask, **counts)["nanoseconds"]

    def transfer_variant(self, prepared, variant):
        self.engine.ask(op="transfer", case=prepared, direction=self.args.op, list=variant)

    def transfer(self, prepared):
        self.transfer_variant(prepared, 0)

    def close(self):
        if self.engine:
            self.engine.close()

    target_close = close


def add_args(parser):
    """Adds the options that the Rust process has."""
    parser.add_argument("--path", default="shm", choices=TRANSPORTS)
    parser.add_argument("--threads", type=int, default=2, help="copying threads")
    parser.add_argument("--streams", type=int, help="streams of tcp; as many as threads")
    parser.add_argument("--fault", help="KIND:kv[:NTH] makes one batch go wrong, to test the rules")
    return parser


if __name__ == "__main__":
    common.run(Ours, add_args(common.parser(__doc__)).parse_args())
