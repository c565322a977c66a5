#!/usr/bin/env python3
"""What the machine itself can do, without an engine, checks or a protocol.

shm: memcpy into a mapping that the target shares; cma: process_vm_writev in batches; tcp: one
vectored send for each stream over loopback, received straight into place, and one answer.
"""

import argparse
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common

SOURCE = Path(__file__).parent / "limits.c"


def load():
    """Builds the C library, if it is older than its source, and declares what is used of it."""
    folder = Path(os.environ.get("BENCH_BUILD_DIR", Path(__file__).parents[2] / "target" / "peers"))
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "liblimits.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        build = ["gcc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(SOURCE)]
        subprocess.check_call(build)
    loaded = ctypes.CDLL(str(library))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    lists = [pointer, pointer, pointer, size, size]
    loaded.raw_memcpy.argtypes = [pointer, *lists, integer]
    loaded.raw_cma.argtypes = [integer, ctypes.c_uint64, *lists, integer, integer]
    loaded.raw_tcp_server.argtypes = [pointer]
    loaded.raw_tcp_connect.argtypes = [integer, ctypes.c_char_p]
    loaded.raw_tcp_write.argtypes = [pointer, integer, *lists]
    return loaded


class Limits(common.Driver):
    """One of the bare ways."""

    peer = "limit"

    def __init__(self, args):
        super().__init__(args)
        self.library = load()
        self.path = f"{args.path}-{args.threads}"
        self.file = f"/dev/shm/ferry-bench-limit-{os.getuid()}"

    def make_arena(self, role):
        if self.args.path == "shm" and role == "target":
            if os.path.exists(self.file):
                os.unlink(self.file)
            return common.Arena(self.args.arena_mib * common.MIB, self.file)
        return super().make_arena(role)

    def target_setup(self, arena):
        if self.args.path == "tcp":
            return {"port": self.library.raw_tcp_server(arena.address)}
        return {}

    def setup(self, arena, info):
        self.source, self.info, self.destination = arena.address, info, info["address"]
        if self.args.path == "shm":
            self.shared = common.Arena(arena.size, self.file)
            self.destination = self.shared.address
            os.unlink(self.file)
        if self.args.path == "tcp":
            connect = self.library.raw_tcp_connect
            streams = [connect(info["port"], b"") for _ in range(self.args.threads)]
            self.streams = np.array(streams, dtype=np.int32)

    def prepare(self, count, size, src, dst):
        src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
        return src, dst, count, size

    def transfer(self, prepared):
        src, dst, count, size = prepared
        lists = (self.source, dst.ctypes.data, src.ctypes.data, count, size)
        is_small = count == 1 and size < 64 * common.KIB
        threads = 1 if is_small else self.args.threads
        match self.args.path:
            case "shm":
                code = self.library.raw_memcpy(self.destination, *lists, threads)
            case "cma":
                pid = self.info["pid"]
                code = self.library.raw_cma(pid, self.destination, *lists, threads, 0)
            case _:
                code = self.library.raw_tcp_write(self.streams.ctypes.data, threads, *lists)
        if code:
            raise RuntimeError(f"{self.args.path}: {code}")


if __name__ == "__main__":
    parser = common.add_args(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--path", required=True, choices=["shm", "cma", "tcp"])
    parser.add_argument("--threads", type=int, default=2, help="copying threads, or streams")
    common.run(Limits, parser.parse_args())
