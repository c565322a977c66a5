"""Engines and a second process for the tests."""

import multiprocessing
import socket
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import far_engine  # noqa: E402
from ferry.mori_compat.io import BackendType, IOEngine, IOEngineConfig  # noqa: E402

DEADLINE_S = 20


def make_engine(key, host="127.0.0.1", config=None):
    """Make an engine with a backend."""
    engine = IOEngine(key, IOEngineConfig(host=host, port=0))
    engine.create_backend(BackendType.RDMA, config)
    return engine


def until(condition):
    """Return what a condition returns once that is true."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


@pytest.fixture
def pair():
    """Make two engines of this process that know each other."""
    initiator, target = make_engine("initiator"), make_engine("target")
    initiator.register_remote_engine(target.get_engine_desc())
    target.register_remote_engine(initiator.get_engine_desc())
    return initiator, target


class FarEngine:
    """An engine in another process, with one memory."""

    def __init__(self, size, environment=None):
        """Start it and wait until its memory is registered."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, size, environment or {})
        self.process = spawn.Process(target=far_engine.serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.engine_desc, self.memory_desc = self._answer()

    def _answer(self):
        assert self.pipe.poll(DEADLINE_S), "the other process did not answer"
        return self.pipe.recv()

    def ask(self, *question):
        """Ask it something."""
        self.pipe.send(question)
        return self._answer()

    def kill(self):
        """End its process as a crash does."""
        self.process.kill()
        self.process.join(DEADLINE_S)


@pytest.fixture
def far():
    """Start engines in other processes."""
    started = []

    def start(size=1 << 20, environment=None):
        started.append(FarEngine(size, environment))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


def free_port():
    """Return a port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
