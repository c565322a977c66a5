"""A rank of SGLang as a process of its own: `peer.py CONFIGURATION`.

The configuration and every line of standard input and output is a JSON object. Configuration:
`mode` ("prefill" or "decode"), `host` and `port` of the prefill's bootstrap server,
`serve_bootstrap`, `args` (of `harness.make_args`), `context` (of `sglshim.make_context`), `is_mla`,
`log` (a level). The first line of output says that the rank is up. Each line of input is
{"op": NAME, ...}; the methods of `Peer` say what there is. The answer has "ok", or "error". The
process ends with its standard input. SGLang reads more from the environment.
"""

import hashlib
import inspect
import json
import logging
import os
import sys
import threading
import traceback


def take_streams():
    """Return where questions come from and answers go: SGLang's modules print."""
    streams = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return streams


# They do so while they are imported, too.
STREAMS = take_streams() if __name__ == "__main__" else None

import numpy as np  # noqa: E402

import harness  # noqa: E402


def _indices(numbers):
    return np.array(numbers, dtype=np.int32)


def _state_indices(components):
    if components is None:
        return None
    return [None if numbers is None else _indices(numbers) for numbers in components]


class Peer:
    """What can be asked of the rank; `room` is the request's number."""

    def __init__(self, configuration):
        """Start the rank, and its bootstrap server if it is to have one."""
        self.is_prefill = configuration["mode"] == "prefill"
        bootstrap = (configuration["host"], configuration["port"])
        if configuration.get("serve_bootstrap"):
            self.server = harness.start_bootstrap_server(*bootstrap)
        self.capture = harness.Capture()
        self.args = harness.make_args(is_random=self.is_prefill, **configuration.get("args", {}))
        self.rank = harness.Rank(
            configuration["mode"],
            self.args,
            bootstrap,
            configuration.get("is_mla", False),
            **configuration.get("context", {}),
        )
        self.requests = {}

    def up(self):
        """Return what the test is told first."""
        manager = self.rank.manager
        # That of our plugin has no descriptor of its own, Mooncake's has none at all.
        key = getattr(manager, "engine_key", None)
        if key is None and hasattr(manager, "engine_desc"):
            key = manager.engine_desc.key
        return {"pid": os.getpid(), "control_port": manager.rank_port, "engine_key": key}

    def _buffer(self, name):
        place = self.args.buffers
        for part in name.split("."):
            place = place[int(part) if part.isdigit() else part]
        return place

    def open(self, room, dp_rank=0):
        """Open a room; a decode waits until its prefill is complete."""
        if self.is_prefill:
            self.requests[room] = self.rank.sender(room)
        else:
            self.requests[room] = self.rank.receiver(room, dp_rank)
        return {}

    def announce(self, room, kv, aux=None, state=None, prefix=None):
        """Say where the state must land (decode)."""
        announce = self.requests[room].send_metadata
        # Early releases know no prefix.
        prefix = {"decode_prefix_len": prefix} if prefix else {}
        self.rank.call(announce, _indices(kv), aux, _state_indices(state), **prefix)
        return {}

    def init(self, room, pages, aux=None):
        """Say how many pages there will be, and the row of aux (prefill)."""
        self.rank.call(self.requests[room].init, pages, aux)
        return {}

    def send(self, room, kv, state=None, tokens=None):
        """Send the next pages (prefill); the last ones come with the state."""
        send = self.requests[room].send
        # Releases that re-split pages by token are told how many there are.
        takes_tokens = "num_kv_tokens" in inspect.signature(send).parameters
        tokens = {"num_kv_tokens": tokens} if takes_tokens else {}
        self.rank.call(send, _indices(kv), _state_indices(state), **tokens)
        return {}

    def mark(self, room):
        """Say that the prefill is complete (policy `prefill_complete`)."""
        self.rank.call(self.requests[room].mark_prefill_complete)
        return {}

    def prefix(self, room):
        """Take the prefix that the decode holds already (prefill)."""
        return {"prefix": self.requests[room].pop_decode_prefix_len()}

    def poll(self, room):
        """Return the status now."""
        return {"status": int(self.rank.call(self.requests[room].poll))}

    def wait(self, room, status, timeout_s=20):
        """Return the status once it is this one, or an end, or the time is over."""
        return {"status": int(self.rank.wait(self.requests[room], status, timeout_s))}

    def abort(self, room):
        """Give the room up."""
        self.rank.call(self.requests[room].abort)
        return {}

    def clear(self, room):
        """Forget the room."""
        self.rank.call(self.requests.pop(room).clear)
        return {}

    def failure(self, room):
        """Return why the room failed."""
        try:
            self.rank.call(self.requests[room].failure_exception)
        except Exception as error:
            return {"reason": getattr(error, "failure_reason", str(error))}
        return {}

    def release_safe(self, room, ranks=1):
        """Say whether so many prefill ranks have acknowledged the abort (decode)."""
        return {"safe": self.rank.manager.is_abort_release_safe(room, ranks)}

    def read(self, buffer, offset=0, length=None):
        """Return bytes of a buffer: `kv.0`, `aux.1`, `state.0.1`."""
        data = self._buffer(buffer)
        end = data.nbytes if length is None else offset + length
        return {"hex": data[offset:end].tobytes().hex()}

    def fill(self, buffer, offset, hex):
        """Write bytes into a buffer."""
        data = bytes.fromhex(hex)
        self._buffer(buffer)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return {}

    def digest(self, buffer):
        """Return the SHA-256 of a buffer."""
        return {"sha256": hashlib.sha256(self._buffer(buffer).tobytes()).hexdigest()}

    def info(self):
        """Return what the manager knows."""
        manager = self.rank.manager
        status = {str(room): int(status) for room, status in dict(manager.request_status).items()}
        peers = list(getattr(manager, "decode_kv_args_table", {}))
        return {"status": status, "peers": peers}

    def frames(self):
        """Return the control messages sent since the last call."""
        messages = [
            {"kind": harness.kind_of(frames), "to": to, "frames": [frame.hex() for frame in frames]}
            for to, frames in self.capture.take()
        ]
        return {"messages": messages}

    def hold_writes(self):
        """Let writes wait until `release_writes`; the double of MoRI only."""
        harness.cpp.Hooks.hold_opt = threading.Event()
        return {}

    def release_writes(self):
        """Let writes that were held go on."""
        held, harness.cpp.Hooks.hold_opt = harness.cpp.Hooks.hold_opt, None
        held.set()
        return {}

    def fail_writes(self, reason):
        """Let every write fail; the double of MoRI only."""
        harness.cpp.Hooks.fail_opt = lambda _direction, _local, _remote: reason
        return {}

    def mend_writes(self):
        """Let writes succeed again."""
        harness.cpp.Hooks.fail_opt = None
        return {}

    def answer(self, line):
        """Do what a line asks for."""
        question = json.loads(line)
        try:
            return {"ok": True, **getattr(self, question.pop("op"))(**question)}
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def serve(configuration, streams):
    """Start the rank and answer until the questions end; does not return."""
    questions, answers = streams

    def say(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    logging.basicConfig(level=configuration.get("log", "ERROR"))
    try:
        peer = Peer(configuration)
        say({"ok": True, **peer.up()})
    except Exception as error:
        say({"ok": False, "error": f"{type(error).__name__}: {error}"})
        traceback.print_exc()
        # What it has started may not end by itself.
        os._exit(1)
    for line in questions:
        say(peer.answer(line))
    # SGLang's threads never end by themselves.
    os._exit(0)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), STREAMS)
