#!/usr/bin/env python3
"""What the machine itself can do, without an engine, checks or a protocol: ceilings.

--path memcpy  copies within the initiator, private to private
--path shm     copies into a mapping that the target shares
--path cma     process_vm_writev (or readv) in batches
--path tcp     a vectored send for each stream over loopback, received straight into place, and
               one answer
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common

SOURCE = Path(__file__).parent / "limits.c"
# One range below this size is not worth a second thread.
SPLIT_BYTES = 64 * common.KIB


def load():
    """Builds the C library, if it is older than its source, and declares what is used of it."""
    library = common.build_folder() / "liblimits.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        # Several processes may build at once; each puts a whole file in place.
        fresh = library.with_suffix(f".{os.getpid()}")
        build = ["gcc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(fresh), str(SOURCE)]
        subprocess.check_call(build)
        fresh.rename(library)
    loaded = ctypes.CDLL(str(library))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    lists = [pointer, pointer, size, size]
    loaded.limit_memcpy.argtypes = [pointer, pointer, *lists, integer, integer]
    loaded.limit_cma.argtypes = [pointer, pointer, *lists, integer, integer, integer]
    loaded.limit_tcp_server.argtypes = [pointer]
    loaded.limit_tcp_connect.argtypes = [integer, ctypes.c_char_p]
    loaded.limit_tcp_write.argtypes = [pointer, pointer, *lists, integer]
    return loaded


class Limits(common.Driver):
    """One of the bare ways."""

    peer = "limit"

    def __init__(self, args):
        super().__init__(args)
        self.library = load()
        self.path = f"{args.path}-{args.threads}" + ("-streaming" if args.streaming else "")
        self.path += "-shared" if args.shared else ""
        self.file = f"/dev/shm/ferry-bench-limit-{os.getuid()}-{args.tag}"
        self.is_read = args.op == "read"
        if self.is_read and args.path == "tcp":
            raise SystemExit("the bare TCP only writes")

    def make_arena(self, role):
        size = self.args.arena_mib * common.MIB
        is_target = role == "target"
        if self.args.path == "shm" and is_target:
            return common.Arena(size, self.new_file(role), self.args.thp)
        if self.args.shared:
            return common.Arena(size, self.new_file(role), self.args.thp)
        return super().make_arena(role)

    def new_file(self, role):
        """A file of this run, without what an earlier one may have left."""
        file = f"{self.file}-{role}"
        if os.path.exists(file):
            os.unlink(file)
        return file

    def target_setup(self, arena):
        if self.args.path == "tcp":
            return {"port": self.library.limit_tcp_server(arena.address)}
        return {}

    def setup(self, arena, info):
        self.pid, remote = info["pid"], info["address"]
        if self.args.path == "memcpy":
            self.local_destination = common.Arena(arena.size, thp=self.args.thp)
            remote = self.local_destination.address
        if self.args.path == "shm":
            self.mapped = common.Arena(arena.size, f"{self.file}-target", self.args.thp)
            remote = self.mapped.address
        for role in ("initiator", "target"):
            if os.path.exists(f"{self.file}-{role}"):
                os.unlink(f"{self.file}-{role}")
        ends = (remote, arena.address)
        self.destination, self.source = reversed(ends) if self.is_read else ends
        if self.args.path == "tcp":
            connect, congestion = self.library.limit_tcp_connect, self.args.congestion.encode()
            streams = [connect(info["port"], congestion) for _ in range(self.args.threads)]
            self.streams = np.array(streams, dtype=np.int32)

    def prepare(self, count, size, src, dst):
        src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
        threads = 1 if count == 1 and size < SPLIT_BYTES else self.args.threads
        # The arrays stay alive beside their addresses.
        return (dst.ctypes.data, src.ctypes.data, count, size, threads), (src, dst)

    def transfer(self, prepared):
        lists, _ = prepared
        match self.args.path:
            case "memcpy" | "shm":
                copy = self.library.limit_memcpy
                code = copy(self.destination, self.source, *lists, self.args.streaming)
            case "cma":
                copy = self.library.limit_cma
                code = copy(self.destination, self.source, *lists, self.pid, self.is_read)
            case _:
                streams = self.streams.ctypes.data
                code = self.library.limit_tcp_write(streams, self.source, *lists)
        if code:
            raise RuntimeError(f"{self.args.path}: {code}")


def add_args(parser):
    """Adds the limits' options."""
    parser.add_argument("--path", default="shm", choices=["memcpy", "shm", "cma", "tcp"])
    parser.add_argument("--threads", type=int, default=2, help="copying threads, or streams")
    parser.add_argument(
        "--streaming", action="store_true", help="copy with streaming stores (AVX2)"
    )
    parser.add_argument("--shared", action="store_true", help="both arenas in shared files")
    parser.add_argument("--congestion", default="", help="TCP congestion control (system's)")
    return parser


if __name__ == "__main__":
    common.run(Limits, add_args(common.parser(__doc__)).parse_args())
