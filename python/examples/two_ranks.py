"""Two engines of one's own: one sends the state of a request, the other receives it.

Run it without arguments. It starts a bootstrap server and a prefill engine in a process of its own,
and stands for the router and the decode engine itself.
"""

import multiprocessing

import numpy as np

import ferry

LAYERS, PAGES, PAGE_BYTES, SLOTS, SLOT_BYTES, AUX_ROWS, AUX_BYTES = 4, 64, 16 * 1024, 8, 4096, 8, 64
ROOM, TIMEOUT_S = 7, 30


def make_memory(name):
    """Take one pool and lay out K and V of each layer, a mamba state and an aux buffer in it."""
    sizes = [(PAGES, PAGE_BYTES)] * (2 * LAYERS) + [(SLOTS, SLOT_BYTES), (AUX_ROWS, AUX_BYTES)]
    pool = ferry.Pool(sum(items * item_len for items, item_len in sizes), name)
    tensors, offset = [], 0
    for items, item_len in sizes:
        tensors.append(pool.tensor(offset, items, item_len))
        offset += items * item_len
    *kv, mamba, aux = tensors
    states = [ferry.State("mamba", [mamba])]
    layout = ferry.Layout(16, ferry.Kv(kv, head_num=8), aux=[aux], states=states)
    views = map(lambda each, size: pool.numpy(shape=size, offset=each.offset), tensors, sizes)
    return layout, list(views)


def prefill(bootstrap):
    """Be the engine that reads the prompt: fill pages, then send them in two chunks."""
    layout, (*kv, mamba, aux) = make_memory("prefill")
    with ferry.PrefillRank(layout, bootstrap=bootstrap) as rank:
        rank.open(ROOM, aux_index=1)
        for layer, pages in enumerate(kv):
            pages[[5, 9, 2]] = [[layer + 1], [layer + 2], [layer + 3]]
        mamba[4], aux[1] = 77, 88
        rank.wait(ROOM, ferry.RoomStatus.WAITING_FOR_INPUT, TIMEOUT_S)
        rank.send_chunk(ROOM, [5, 9], last=False)
        rank.send_chunk(ROOM, [2], [[4]], last=True)
        rank.wait(ROOM, timeout_s=TIMEOUT_S)


def main():
    """Be the router and the engine that answers."""
    layout, (*kv, mamba, aux) = make_memory("decode")
    with ferry.BootstrapServer() as server, ferry.DecodeRank(layout) as rank:
        spawn = multiprocessing.get_context("spawn")
        other = spawn.Process(target=prefill, args=(server.address,), daemon=True)
        other.start()
        rank.open(ROOM, server.address)
        rank.announce(ROOM, [30, 31, 40], [[6]], aux_index=3)
        rank.wait(ROOM, timeout_s=TIMEOUT_S)
        for layer, pages in enumerate(kv):
            expected = np.zeros_like(pages)
            expected[[30, 31, 40]] = [[layer + 1], [layer + 2], [layer + 3]]
            assert (pages == expected).all(), f"tensor {layer} differs"
        assert (mamba[6] == 77).all() and (aux[3] == 88).all()
        other.join(TIMEOUT_S)
        assert other.exitcode == 0, "the prefill engine failed"
    print("the request's state has moved, and every byte is right")


if __name__ == "__main__":
    main()
