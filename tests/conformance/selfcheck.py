"""Two ranks of SGLang, each a process of its own, finish one hybrid request.

Without `SGLCONF_MORI` they move bytes by the double of MoRI beside this file; with it, by the
package in that folder. Every byte is compared, those that must not change too;
ends with 0 when all are right.
"""

import json
import subprocess
import sys
from pathlib import Path

import harness

HERE = Path(__file__).resolve().parent
WAITING_FOR_INPUT, SUCCESS = 2, 4


class PeerProcess:
    """A `peer.py` and the questions that it is asked."""

    def __init__(self, **configuration):
        """Start the process and wait until its rank is up."""
        command = [sys.executable, str(HERE / "peer.py"), json.dumps(configuration)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"ok": False, "error": "it has ended"}
        if not answer.pop("ok"):
            raise RuntimeError(f"peer: {answer['error']}")
        return answer

    def __call__(self, op, **arguments):
        """Ask, and return the answer."""
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def read(self, buffer):
        """Return the whole of a buffer."""
        return bytes.fromhex(self("read", buffer=buffer)["hex"])

    def stop(self):
        """End the process."""
        self.process.stdin.close()
        self.process.wait(timeout=20)


def expected(source, item_len, pairs):
    """Return a destination of zeros with these (source, destination) items in it."""
    landed = bytearray(len(source))
    for src, dst in pairs:
        item = source[src * item_len : (src + 1) * item_len]
        landed[dst * item_len : (dst + 1) * item_len] = item
    return bytes(landed)


def main():
    """Run one request of attention with a mamba and a sliding-window state."""
    layers, page_bytes = 2, 16 * 4 * 16
    states = [
        {"type": "mamba", "items": [[8, 4096]], "dims": [64], "conv": [None], "outer": [1]},
        {"type": "swa", "items": [[20, 512], [20, 512]]},
    ]
    common = {
        "host": "127.0.0.1",
        "port": harness.free_port(),
        "args": {"layers": layers, "states": states},
    }
    prefill = PeerProcess(mode="prefill", serve_bootstrap=True, **common)
    decode = PeerProcess(mode="decode", **common)
    room = (1 << 63) - 7
    prefill("open", room=room)
    decode("open", room=room)
    decode("announce", room=room, kv=[9, 3, 4], aux=2, state=[[5], [1, 2]])
    assert prefill("wait", room=room, status=WAITING_FOR_INPUT)["status"] == WAITING_FOR_INPUT
    prefill("init", room=room, pages=3, aux=1)
    prefill("send", room=room, kv=[0, 7, 8], state=[[1], [3, 4]])
    for side in (prefill, decode):
        assert side("wait", room=room, status=SUCCESS)["status"] == SUCCESS
    moved = {f"kv.{tensor}": (page_bytes, [(0, 9), (7, 3), (8, 4)]) for tensor in range(2 * layers)}
    moved |= {
        "state.0.0": (4096, [(1, 5)]),
        "state.1.0": (512, [(3, 1), (4, 2)]),
        "state.1.1": (512, [(3, 1), (4, 2)]),
        "aux.0": (64, [(1, 2)]),
        "aux.1": (128, [(1, 2)]),
    }
    for buffer, (item_len, pairs) in moved.items():
        wanted = expected(prefill.read(buffer), item_len, pairs)
        assert decode.read(buffer) == wanted, f"{buffer} differs"
    decode.stop()
    prefill.stop()
    print("two ranks of SGLang moved a hybrid request; every byte is right")


if __name__ == "__main__":
    main()
