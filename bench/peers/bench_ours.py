#!/usr/bin/env python3
"""Ferry's io engine: a Rust process for each side (bench/driver), at its defaults."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common

PROGRAM = Path(__file__).parents[2] / "target" / "release" / "bench-driver"


class Engine:
    """One side's process."""

    def __init__(self, args, role):
        program = os.environ.get("BENCH_DRIVER", str(PROGRAM))
        command = [program, "--role", role, "--transport", args.path]
        command += ["--threads", str(args.threads), "--arena-mib", str(args.arena_mib)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.hello = self.answer()

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
        self.engine = Engine(args, args.role)
        self.prepared = []

    def make_arena(self, role):
        pid, fd = self.engine.hello["pid"], self.engine.hello["fd"]
        return common.Arena(self.args.arena_mib * common.MIB, f"/proc/{pid}/fd/{fd}")

    def target_setup(self, arena):
        return {key: self.engine.hello[key] for key in ("engine", "region")}

    def setup(self, arena, info):
        self.engine.ask(op="connect", engine=info["engine"], region=info["region"])

    def prepare(self, count, size, src, dst):
        return {"size": size, "list": {"src": src.tolist(), "dst": dst.tolist()}}

    def learn(self, prepared):
        """Hands the page lists of a case to the engine, once."""
        if self.prepared is not prepared:
            lists = [batch["list"] for batch in prepared]
            self.engine.ask(op="prepare", size=prepared[0]["size"], lists=lists)
            self.prepared = prepared

    def measure(self, prepared, warm, samples):
        self.learn(prepared)
        answer = self.engine.ask(
            op="measure",
            direction="write",
            warm=warm,
            samples=samples,
            budget_s=self.args.budget_s,
        )
        return answer["nanoseconds"]

    def transfer(self, prepared):
        place = next(at for at, batch in enumerate(self.prepared) if batch is prepared)
        self.engine.ask(op="transfer", direction="write", list=place)

    def cpu_s(self):
        return self.engine.ask(op="stat")["cpu_s"]

    def close(self):
        self.engine.close()

    target_close = close


if __name__ == "__main__":
    parser = common.add_args(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--path", required=True, choices=["shm", "cma", "tcp"])
    parser.add_argument("--threads", type=int, default=2, help="copying threads, or streams")
    common.run(Ours, parser.parse_args())
