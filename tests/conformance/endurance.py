"""Many requests through the plugin in one process: memory, threads, descriptors stay as they are.

A prefill and a decode rank with the plugin's manager (`FERRY_MANAGER=1`) and its bootstrap server
serve request after request; one in a hundred is given up instead. After a tenth of them everything
that is kept for reuse has been made; from there to the end nothing may grow. A rank keeps a
tombstone of each room until it has 65,536: a longer run compares from when they are all there.
"""

import argparse
import gc
import os
import time
from pathlib import Path

os.environ |= {
    "SGLCONF_MORI": "installed",
    "SGLCONF_PLUGIN": "1",
    "FERRY_MANAGER": "1",
    "FERRY_METRICS_PORT": "0",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "true",
}

import numpy as np  # noqa: E402

import harness  # noqa: E402

WAITING_FOR_INPUT, SUCCESS, TIMEOUT_S = 2, 4, 20
PAGES, GIVEN_UP_EACH = 4, 100
# What the allocator's arenas and Python's own caches may move by.
SLACK_BYTES = 8 << 20
# Connections of heartbeats that come and go.
SLACK_DESCRIPTORS = 8
TOMBSTONES_ARE_FULL = 70_000


def seen():
    """Return the bytes, threads and descriptors of this process."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    descriptors = len(os.listdir("/proc/self/fd"))
    return int(fields["VmRSS"].split()[0]) << 10, int(fields["Threads"]), descriptors


def reach(request, status):
    """Wait for a status, and insist."""
    came = request.wait(status, TIMEOUT_S)
    if came not in (status, SUCCESS):
        raise RuntimeError(f"room {request.bootstrap_room} is {came}, not {status}")


def check(source, target, there):
    """Compare the pages of a request."""
    item_len = source.kv_item_lens[0]
    for sent, landed in zip(source.buffers["kv"], target.buffers["kv"], strict=True):
        if (sent.reshape(-1, item_len)[:PAGES] != landed.reshape(-1, item_len)[there]).any():
            raise RuntimeError("a page differs")
        # So that the next request cannot pass by what this one left.
        landed[:] = 0


def main():
    """Serve the requests and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    count = parser.parse_args().requests
    port = harness.free_port()
    server = harness.start_bootstrap_server("127.0.0.1", port)
    states = [{"type": "mamba", "items": [[8, 512]], "dims": [64], "conv": [None], "outer": [1]}]
    ranks = {}
    for mode in ("prefill", "decode"):
        args = harness.make_args(is_random=mode == "prefill", states=states)
        ranks[mode] = harness.Rank(mode, args, ("127.0.0.1", port))
    prefill, decode = ranks["prefill"], ranks["decode"]
    pages = np.arange(PAGES, dtype=np.int32)
    begun, first = time.monotonic(), None
    compares_from = count // 10 if count <= TOMBSTONES_ARE_FULL else TOMBSTONES_ARE_FULL
    for room in range(count):
        sender, receiver = prefill.sender(room), decode.receiver(room)
        reach(receiver, WAITING_FOR_INPUT)
        there = pages + room % 16
        slot = np.array([room % 8], np.int32)
        decode.call(receiver.send_metadata, there, room % 8, [slot])
        reach(sender, WAITING_FOR_INPUT)
        if room % GIVEN_UP_EACH == GIVEN_UP_EACH - 1:
            decode.call(receiver.abort)
        else:
            prefill.call(sender.init, PAGES, room % 8)
            prefill.call(sender.send, pages, [slot])
            reach(receiver, SUCCESS)
            reach(sender, SUCCESS)
            check(prefill.args, decode.args, there)
        decode.call(receiver.clear)
        prefill.call(sender.clear)
        if room == compares_from:
            first = seen()
    last = seen()
    seconds = time.monotonic() - begun
    grown = [now - before for now, before in zip(last, first, strict=True)]
    print(
        f"{count} requests in {seconds:.1f} s: from {first[0] >> 10} to {last[0] >> 10} KiB,"
        f" {first[1]} to {last[1]} threads, {first[2]} to {last[2]} descriptors"
    )
    if grown[0] > SLACK_BYTES or grown[1] > 0 or grown[2] > SLACK_DESCRIPTORS:
        raise SystemExit(f"grown by {grown} bytes, threads and descriptors")
    server.close()
    # The ranks' threads never end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
