#!/usr/bin/env python3
"""Mooncake's TransferEngine over TCP, driven as SGLang does: batch_transfer_sync_write.

Mooncake reads its settings from the environment; the best ones found are MC_TCP_LANES_PER_PEER=16,
MC_TCP_ENABLE_CONNECTION_POOL=1 and MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=65535 (without the last,
batches of over about 2,100 ranges are refused, and every later one too).
"""

import argparse
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

        self.path = f"tcp lanes={os.environ.get('MC_TCP_LANES_PER_PEER', 'default')}"
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
        self.source, self.destination = arena.address, info["address"]
        self.session = info["session"]

    def prepare(self, count, size, src, dst):
        return (src + self.source).tolist(), (dst + self.destination).tolist(), [size] * count

    def transfer(self, prepared):
        if code := self.engine.batch_transfer_sync_write(self.session, *prepared):
            raise RuntimeError(f"batch_transfer_sync_write: {code}")


if __name__ == "__main__":
    parser = common.add_args(argparse.ArgumentParser(description=__doc__))
    common.run(Mooncake, parser.parse_args())
