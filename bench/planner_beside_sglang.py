#!/usr/bin/env python3
"""Times SGLang's own planning functions and ours on the same lists of pages, in turns, in one run.

SGLang's modules are run as they are, through a folder with `sglshim.py` that makes them importable
without a GPU (`--conformance`); nothing of them is part of this project. Needs numpy, msgspec and
pyzmq. Three things are compared, for K and V of so many layers with pages in random order:

* group: runs of pages that follow each other (`group_concurrent_contiguous` and `index_runs`);
* consumed: the same, every offset list of every tensor built, and every range of every tensor
  looked at (`send_kvcache` on an engine that adds up its lists in C; `plan_kv` and each range);
* heads: the plan for a decode of TP 2 behind a prefill of TP 1, built and not consumed.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import types

GOALS = {"group": 100, "consumed": 8}
TOKEN_BYTES = 8 * 128 * 2  # K, or V, of one token of one layer: 8 heads of 128 in bfloat16


class SummingEngine:
    """Takes batches as an engine does, and looks at each number once, in C."""

    def allocate_transfer_uid(self):
        return 1

    def batch_write(self, src, local, dst, remote, sizes, uids):
        for lists in (local, remote, sizes):
            for numbers in lists:
                sum(numbers)
        return []


def sglang_sender(conn, layers, page_size):
    """SGLang's manager with what its planning reads, without sockets or threads."""
    manager = object.__new__(conn.MoriKVManager)
    page_bytes = page_size * TOKEN_BYTES
    manager.kv_args = types.SimpleNamespace(
        kv_item_lens=[page_bytes] * (2 * layers), page_size=page_size, total_kv_head_num=8,
        kv_head_num=8, engine_rank=0, kv_layer_ids=[], prefill_start_layer=0)
    manager.is_mla_backend = manager.is_hybrid_mla_backend = False
    manager.attn_tp_size = 1
    manager.engine = SummingEngine()
    manager.kv_mem_descs = [object() for _ in range(2 * layers)]
    manager._submission_local = threading.local()
    manager._submission_local.statuses = None
    return manager


def peer_info(layers, page_size, decode_tp):
    return types.SimpleNamespace(
        dst_kv_mem_descs=[object() for _ in range(2 * layers)], dst_kv_layer_ids=[],
        decode_tp_size=decode_tp, decode_tp_rank=0,
        dst_kv_item_len=page_size * TOKEN_BYTES // decode_tp)


def timed(act, budget):
    """Median seconds of one call."""
    samples, begun = [], time.perf_counter()
    while len(samples) < 3 or time.perf_counter() - begun < budget:
        start = time.perf_counter()
        act()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conformance", required=True, help="folder with sglshim.py")
    parser.add_argument("--program", default="target/release/bench-workloads")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pages", default="64,256,1024,4096")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--budget", type=float, default=0.05, help="seconds for each figure of a turn")
    parser.add_argument("--json", help="where results are written")
    args = parser.parse_args()

    sys.path.insert(0, os.path.abspath(args.conformance))
    import sglshim
    sglshim.install()
    import numpy as np
    from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous
    from sglang.srt.disaggregation.mori import conn

    ours = subprocess.Popen([args.program, "planner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(**case):
        ours.stdin.write(json.dumps(case) + "\n")
        ours.stdin.flush()
        return json.loads(ours.stdout.readline())

    random = np.random.default_rng(1)
    rows = []
    for pages in (int(word) for word in args.pages.split(",")):
        src = random.permutation(4 * pages)[:pages].astype(np.int32)
        dst = random.permutation(4 * pages)[:pages].astype(np.int32)
        case = dict(page_size=args.page_size, page_bytes=args.page_size * TOKEN_BYTES, heads=8,
                    src=src.tolist(), dst=dst.tolist(), budget_ns=int(args.budget * 1e9))
        manager = sglang_sender(conn, args.layers, args.page_size)
        equal, sliced = (peer_info(args.layers, args.page_size, tp) for tp in (1, 2))
        theirs = {
            "group": lambda: group_concurrent_contiguous(src, dst),
            "consumed": lambda: manager.send_kvcache(equal, src, dst),
            "heads": lambda: manager._build_tp_slice_transfer_plan(src, dst, manager._build_tp_slice_config(sliced)),
        }
        samples = {name: ([], []) for name in theirs}
        for _ in range(args.rounds):
            for name, act in theirs.items():
                samples[name][0].append(timed(act, args.budget))
            plain = ask(layers=args.layers, decode_tp=1, **case)
            heads = ask(layers=args.layers, decode_tp=2, **case)
            samples["group"][1].append(plain["group_ns"] / 1e9)
            samples["consumed"][1].append(plain["plan_and_consume_ns"] / 1e9)
            samples["heads"][1].append(heads["plan_ns"] / 1e9)
        for name, (sglang, own) in samples.items():
            rows.append(dict(
                what=name, pages=pages, layers=args.layers, page_size=args.page_size,
                sglang_us=statistics.median(sglang) * 1e6, ours_us=statistics.median(own) * 1e6,
                ratio=statistics.median(a / b for a, b in zip(sglang, own)), goal=GOALS.get(name)))
        memory = {layers: ask(layers=layers, decode_tp=1, **case) for layers in (args.layers, 2 * args.layers)}
        rows.append(dict(what="memory", pages=pages, bytes={
            layers: plan["heap_bytes"] for layers, plan in memory.items()}))

    print(f"{'what':<9} {'pages':>6} {'sglang':>12} {'ours':>10} {'ratio':>8} {'goal':>5}")
    for row in rows:
        if row["what"] == "memory":
            sizes = ", ".join(f"{layers} layers {size} B" for layers, size in row["bytes"].items())
            print(f"{'memory':<9} {row['pages']:>6} of our plan: {sizes}")
        else:
            print(f"{row['what']:<9} {row['pages']:>6} {row['sglang_us']:>9.1f} us {row['ours_us']:>7.2f} us "
                  f"{row['ratio']:>8.1f} {row['goal'] or '':>5}")
    ours.stdin.close()
    if args.json:
        with open(args.json, "w") as out:
            json.dump(dict(benchmark="planner_beside_sglang", rows=rows), out, indent=1)


if __name__ == "__main__":
    main()
