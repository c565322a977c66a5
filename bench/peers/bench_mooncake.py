#!/usr/bin/env python3
"""Mooncake's TransferEngine over TCP, driven as SGLang does: one batch_transfer_sync call.

Mooncake reads its settings from the environment:
  MC_TCP_ENABLE_CONNECTION_POOL=1   keeps lanes open; 0 connects for each range
  MC_TCP_LANES_PER_PEER             1 to 16; 4 if nothing is said
  MC_TCP_SLICE_SIZE=65536           bytes that a lane carries at once
  MC_TCP_PROTO=1                    the older, unacknowledged protocol
  MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=1024, MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER=1024,
  MC_TCP_ADMISSION_TIMEOUT_MS=1000  what a batch may queue
The best ones found are 16 lanes with the pool and a queue of 65535. With the queue as installed,
batches of over about 2,100 ranges are refused, and every later one too.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("MC_FORCE_TCP", "1")
os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
os.environ.setdefault("GLOG_minloglevel", "1")
sys.path.insert(0, str(Path(__file__).parent))
import bench_common as common


class Mooncake(common.Driver):
    """One transfer engine for each side."""

    peer = "mooncake"

    def __init__(self, args):
        super().__init__(args)
        from mooncake.engine import TransferEngine

        settings = ("CONNECTION_POOL", "LANES_PER_PEER", "SLICE_SIZE", "MAX_QUEUED_TRANSFERS")
        names = [name for name in os.environ if any(setting in name for setting in settings)]
        self.path = " ".join(["tcp", *(f"{name}={os.environ[name]}" for name in sorted(names))])
        self.engine = TransferEngine()
        if code := self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"initialize: {code}")

    def register(self, arena):
        """Registers the whole arena."""
        if code := self.engine.register_memory(arena.address, arena.size):
            raise RuntimeError(f"register_memory: {code}")

    def target_setup(self, arena):
        self.register(arena)
        return {"session": f"127.0.0.1:{self.engine.get_rpc_port()}"}

    def setup(self, arena, info):
        self.register(arena)
        self.here, self.there = arena.address, info["address"]
        self.session = info["session"]
        is_write = self.args.op == "write"
        engine = self.engine
        self.move = (
            engine.batch_transfer_sync_write if is_write else engine.batch_transfer_sync_read
        )

    def prepare(self, count, size, src, dst):
        here, there = (src, dst) if self.args.op == "write" else (dst, src)
        return (here + self.here).tolist(), (there + self.there).tolist(), [size] * count

    def transfer(self, prepared):
        if code := self.move(self.session, *prepared):
            raise RuntimeError(f"batch_transfer_sync: {code}")


def add_args(parser):
    """Mooncake's options are in the environment."""
    return parser


if __name__ == "__main__":
    common.run(Mooncake, add_args(common.parser(__doc__)).parse_args())
