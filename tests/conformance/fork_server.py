"""Ranks of SGLang by fork: `fork_server.py COMMAND...` runs a command that can ask for them.

A new interpreter takes seconds to import SGLang, a fork of one that has done so takes none. Who
connects to the socket named by `FERRY_RANKS` in the command's environment sends one line of JSON:

* `{"env": {...}, "configuration": {...}}` is answered as `peer.py` answers, by a new rank whose
  standard input and output the connection is from then on. Its standard error is the client's.
* `{"check": PROGRAM}` is answered {"ok": true} if that line of Python runs without an error.

There are three kinds of process. The root has imported what is nobody's in particular. It forks a
branch for each environment that is asked for, which imports SGLang under it, as a new interpreter
would; variables that are read by an import need no list. A branch forks a rank for each connection.
A rank ends with its connection, all of them end with the root, and the root with the command.
"""

import ctypes
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

# What SGLang imports of others, whatever its environment is.
import aiohttp  # noqa: F401
import aiohttp.web  # noqa: F401
import msgpack  # noqa: F401
import msgspec  # noqa: F401
import numpy as np
import requests  # noqa: F401
import zmq  # noqa: F401

SOCKET_VARIABLE = "FERRY_RANKS"
PR_SET_PDEATHSIG = 1
# A client sends its line as soon as it has connected.
LINE_TIMEOUT_S = 20
CREDENTIALS = struct.Struct("3i")


def end_with_parent():
    """Let the kernel kill this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before that.
    if parent == 1:
        os._exit(1)


def say(connection, answer):
    """Write one line; who is gone needs none."""
    with suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def error_of(error):
    """Describe what went wrong as an answer."""
    return {"ok": False, "error": f"{type(error).__name__}: {error}"}


def read_line(connection):
    """Read a client's line; nothing comes behind it before it has been answered."""
    connection.settimeout(LINE_TIMEOUT_S)
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise EOFError("the line has no end")
        line += part
    connection.settimeout(None)
    return json.loads(line)


def take_stderr(connection):
    """Write errors where the client does, if that can be opened."""
    size = CREDENTIALS.size
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    client, _, _ = CREDENTIALS.unpack(raw)
    try:
        stderr = os.open(f"/proc/{client}/fd/2", os.O_WRONLY | os.O_APPEND)
    except OSError:
        return
    os.dup2(stderr, 2)
    os.close(stderr)


def become_rank(connection, configuration):
    """Serve a connection as a rank; does not return."""
    import peer

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent()
    # Forks would all draw the same numbers.
    random.seed()
    np.random.seed()
    take_stderr(connection)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    peer.serve(configuration, peer.take_streams())


def become_branch(channel, environment):
    """Import SGLang under an environment, then fork ranks until the root closes the channel."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    failure = None
    try:
        import peer  # noqa: F401
    except BaseException as error:
        failure = error_of(error)
    # The kernel is to bury its ranks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 1)
        if not message:
            os._exit(0)
        with socket.socket(fileno=descriptors[0]) as connection:
            if failure is not None:
                say(connection, failure)
            else:
                fork(partial(become_rank, connection, json.loads(message)), forget=[channel])


def fork(become, forget):
    """Do something in a process of its own, which lacks what this one has opened for itself."""
    pid = os.fork()
    if pid > 0:
        return pid
    # Nothing of what this process has begun is the other's to end.
    try:
        for resource in forget:
            resource.close()
        become()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Root:
    """Hands connections to the branches."""

    def __init__(self, listener):
        """Serve the connections of a listening socket."""
        self.listener = listener
        # The channel to the branch of each environment.
        self.branches = {}
        # The answer to each check, which is the same for as long as the root lives.
        self.checks = {}

    def _branch(self, environment):
        key = json.dumps(environment, sort_keys=True)
        if key not in self.branches:
            # Keeps each message whole.
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            forget = [self.listener, ours, *self.branches.values()]
            fork(partial(become_branch, theirs, environment), forget)
            theirs.close()
            self.branches[key] = ours
        return self.branches[key]

    def _check(self, program):
        if program not in self.checks:
            pid = fork(partial(exec, program, {}), forget=[self.listener])
            _, status = os.waitpid(pid, 0)
            self.checks[program] = {"ok": status == 0}
        return self.checks[program]

    def serve_one(self):
        """Take the next connection and pass it on."""
        connection, _ = self.listener.accept()
        with connection:
            try:
                line = read_line(connection)
                if "check" in line:
                    say(connection, self._check(line["check"]))
                    return
                configuration = json.dumps(line["configuration"]).encode()
                branch = self._branch(line["env"])
                socket.send_fds(branch, [configuration], [connection.fileno()])
            except Exception as error:
                say(connection, error_of(error))


def main():
    """Serve ranks for as long as the command runs, and end as it does."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if "FERRY_SGLANG" in os.environ:
        # Compiled once, and not beside the unpacked wheels.
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(Path(os.environ["FERRY_SGLANG"]).with_name("pycache"))
    with tempfile.TemporaryDirectory(prefix="ferry-ranks-") as folder:
        path = str(Path(folder) / "socket")
        with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
            listener.bind(path)
            listener.listen(128)
            command = subprocess.Popen(sys.argv[1:], env={**os.environ, SOCKET_VARIABLE: path})
            # A terminal sends it to both; the command decides what it means.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: command.terminate())
            end = os.pidfd_open(command.pid)
            selector.register(listener, selectors.EVENT_READ)
            selector.register(end, selectors.EVENT_READ)
            root = Root(listener)
            while end not in {key.fd for key, _ in selector.select()}:
                root.serve_one()
    code = command.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
