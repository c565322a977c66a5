#!/usr/bin/env python3
"""Tests that the harness's verification fails when it must: python test_harness.py.

Batches go wrong on purpose, in a driver of a few lines and in Ferry's own engine (through its fault
injection), and each must be reported as not verified, and the same batches without a fault as
verified.
"""

import json
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common

HERE = Path(__file__).parent
FAULTS = ["none", "flipped", "missing", "elsewhere", "stray", "failing"]
ARENA_MIB = 128
CASE = "pages_512x64KiB"


class Sabotage(common.Driver):
    """Copies within the initiator, and does one thing wrong."""

    peer = "sabotage"

    def setup(self, arena, info):
        self.source = arena.bytes
        self.local_destination = common.Arena(arena.size)
        self.path = self.args.sabotage

    def prepare(self, count, size, src, dst):
        return list(zip(src.tolist(), dst.tolist())), size

    def transfer(self, prepared):
        places, size = prepared
        fault, target = self.args.sabotage, self.local_destination.bytes
        if fault == "failing":
            raise RuntimeError("on purpose")
        if fault == "missing":
            places = places[:-1]
        for src, dst in places:
            target[dst : dst + size] = self.source[src : src + size]
        dst = places[-1][1]
        if fault == "flipped":
            target[dst + size - 1] ^= 1
        if fault == "elsewhere":
            first, second = (slice(at, at + size) for _, at in places[:2])
            target[first], target[second] = target[second].copy(), target[first].copy()
        if fault == "stray":
            named = {at // size for _, at in places}
            free = next(at for at in range(len(target) // size) if at not in named)
            target[free * size + 4095] = 1


def results(script: str, *options: str) -> dict:
    """The result of one case of a script."""
    command = [sys.executable, str(HERE / script), "--arena-mib", str(ARENA_MIB), "--cases", CASE]
    command += ["--samples", "3", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, ended.stderr
    assert (ended.returncode == 0) == bool(lines[0]["verified"]), "the exit code must say it too"
    return lines[0]


class Verification(unittest.TestCase):
    """What must be noticed."""

    def test_faults_of_a_driver(self):
        for fault in FAULTS:
            with self.subTest(fault):
                result = results("test_harness.py", "--sabotage", fault)
                self.assertEqual(result["verified"], fault == "none", result)
                self.assertEqual("error" in result, fault == "failing", result)

    def test_faults_of_our_engine(self):
        # Batches before the verifying ones: the whole arena once, 3 to warm up, 3 samples.
        for fault, is_noticed in (
            ("drop-write:kv:7", True),
            ("misdirect:kv:8", True),
            (None, False),
        ):
            with self.subTest(fault):
                options = ["--path", "shm", *(["--fault", fault] if fault else [])]
                result = results("bench_ours.py", *options)
                self.assertEqual(result["verified"], not is_noticed, result)

    def test_a_read_is_verified(self):
        for script in ("bench_ours.py", "bench_limits.py"):
            with self.subTest(script):
                result = results(script, "--path", "cma", "--op", "read")
                self.assertTrue(result["verified"], result)


if __name__ == "__main__":
    if "--sabotage" in sys.argv:
        options = common.parser(__doc__)
        options.add_argument("--sabotage", choices=FAULTS)
        common.run(Sabotage, options.parse_args())
    unittest.main()
