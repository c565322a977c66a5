#!/usr/bin/env python3
"""NIXL between two processes' host memory.

  --mode prepped  descriptor lists of all slots made once, indices for each batch: as SGLang does
  --mode init     a new transfer of arrays for each batch
  --mode repost   one transfer posted again and again: what NIXL cannot be faster than
  --backend POSIX writes pages of a tmpfs file that the target has mapped

UCX takes cross-process copies on one host; UCX_TLS=tcp makes it take TCP.
"""

import base64
import importlib
import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
os.environ.setdefault("UCX_LOG_LEVEL", "error")
sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common


def load():
    """NIXL's Python interface, under whichever name its wheel has."""
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            return importlib.import_module(name + "._api")
        except ImportError:
            continue
    raise SystemExit("no nixl module; README.md says how it is installed")


class Nixl(common.Driver):
    """One agent for each side."""

    peer = "nixl"

    def __init__(self, args):
        super().__init__(args)
        api = load()
        tls = f" tls={os.environ['UCX_TLS']}" if "UCX_TLS" in os.environ else ""
        progress = not (args.no_progress_thread and args.role == "initiator")
        self.path = f"{args.backend}{tls} {args.mode}"
        self.path += f" threads={args.num_threads}" if args.num_threads else ""
        self.path += "" if progress else " no-progress-thread"
        self.path += " notify" if args.notify else ""
        config = api.nixl_agent_config(
            backends=[],
            enable_prog_thread=progress,
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self.agent = api.nixl_agent(f"{args.role}-{os.getpid()}", config)
        self.op, self.notification = args.op.upper(), b"end" if args.notify else b""
        parameters = {"num_threads": str(args.num_threads)} if args.num_threads else {}
        self.agent.create_backend(args.backend, parameters)
        self.is_file = args.backend == "POSIX"
        self.file = f"/dev/shm/ferry-bench-nixl-{os.getuid()}-{args.tag}"
        self.slots = {}

    def make_arena(self, role):
        if self.is_file and role == "target":
            return common.Arena(self.args.arena_mib * common.MIB, self.file, self.args.thp)
        return super().make_arena(role)

    def target_setup(self, arena):
        if self.is_file:
            return {}
        self.agent.register_memory([(arena.address, arena.size, 0, "")], "DRAM")
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata}

    def setup(self, arena, info):
        self.here, self.there = arena.address, info["address"]
        self.agent.register_memory([(arena.address, arena.size, 0, "")], "DRAM")
        self.remote_kind, self.remote_device = "DRAM", 0
        if self.is_file:
            self.remote_kind, self.remote = "FILE", self.agent.name
            self.there, self.remote_device = 0, os.open(self.file, os.O_RDWR)
            self.agent.register_memory([(0, arena.size, self.remote_device, "")], "FILE")
            return
        remote = self.agent.add_remote_agent(base64.b64decode(info["metadata"]))
        self.remote = remote.decode() if isinstance(remote, bytes) else remote
        self.agent.make_connection(self.remote)

    @staticmethod
    def rows(base, offsets, size, device):
        """Descriptors as NIXL takes them: address, length, device."""
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
        rows[:, 1] = size
        rows[:, 2] = device
        return rows

    def prepare(self, count, size, src, dst):
        here, there = (src, dst) if self.args.op == "write" else (dst, src)
        if self.args.mode == "prepped":
            if size not in self.slots:
                every = np.arange(self.args.arena_mib * common.MIB // size, dtype=np.int64) * size
                local = self.rows(self.here, every, size, 0)
                remote = self.rows(self.there, every, size, self.remote_device)
                self.slots[size] = (
                    self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM"),
                    self.agent.prep_xfer_dlist(self.remote, remote, self.remote_kind),
                )
            indices = [(side // size).astype(np.int32) for side in (here, there)]
            return self.slots[size], *indices
        local = self.rows(self.here, here, size, 0)
        remote = self.rows(self.there, there, size, self.remote_device)
        return (local, remote) if self.args.mode == "init" else self.handle(local, remote)

    def handle(self, here, there):
        """A new transfer."""
        local = self.agent.get_xfer_descs(here, "DRAM")
        remote = self.agent.get_xfer_descs(there, self.remote_kind)
        return self.agent.initialize_xfer(self.op, local, remote, self.remote, self.notification)

    def transfer(self, prepared):
        match self.args.mode:
            case "init":
                handle = self.handle(*prepared)
            case "prepped":
                (local, remote), here, there = prepared
                make, end = self.agent.make_prepped_xfer, self.notification
                handle = make(self.op, local, here, remote, there, end)
            case _:
                handle = prepared
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(state)
        if self.args.mode != "repost":
            self.agent.release_xfer_handle(handle)

    def close(self):
        if self.is_file:
            os.unlink(self.file)


def add_args(parser):
    """Adds NIXL's options."""
    parser.add_argument("--backend", default="UCX", choices=["UCX", "POSIX"])
    parser.add_argument("--mode", default="prepped", choices=["init", "prepped", "repost"])
    parser.add_argument("--num-threads", type=int, default=0, help="UCX's; SGLang's prefill has 8")
    parser.add_argument("--notify", action="store_true", help="tell the target of each end")
    parser.add_argument("--no-progress-thread", action="store_true", help="in the initiator")
    return parser


if __name__ == "__main__":
    common.run(Nixl, add_args(common.parser(__doc__)).parse_args())
