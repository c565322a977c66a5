"""The plugin of SGLang, without SGLang: what it chooses, and metrics behind one port."""

import multiprocessing
import os
import time
import urllib.error
import urllib.request
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from conftest import free_port
from ferry import sglang_plugin
from ferry.mori_compat import io
from ferry.sglang_plugin import labels, metrics

DEADLINE_S = 30


class Theirs:
    """Stands for a class of SGLang's."""

    def __init__(self, args):
        """Note what its memory is called."""
        self.label = io.label_of(args.kv_data_ptrs[0])


def choose(part, backend="mori"):
    return sglang_plugin.choose_class(
        lambda _backend, _part: Theirs, SimpleNamespace(value=backend), SimpleNamespace(value=part)
    )


def test_sglang_finds_it():
    (found,) = entry_points(group="sglang.srt.plugins", name="ferry")
    assert found.load() is sglang_plugin.register


def test_each_part_can_be_switched_off(monkeypatch):
    assert choose("bootstrap_server").__name__ == "PluginBootstrapServer"
    assert choose("bootstrap_server", "mooncake").__name__ == "PluginBootstrapServer"
    assert choose("bootstrap_server", "nixl") is Theirs
    assert choose("sender") is Theirs
    assert issubclass(choose("manager"), Theirs)
    monkeypatch.setenv("FERRY_BOOTSTRAP", "0")
    assert choose("bootstrap_server") is Theirs
    # Without the plugin nothing of SGLang's is touched, which here would be an ImportError.
    monkeypatch.setenv("FERRY_PLUGIN", "0")
    sglang_plugin.register()


@pytest.mark.parametrize("switch, label", [("1", "kv"), ("0", "memory")])
def test_memory_has_the_name_of_its_component(monkeypatch, switch, label):
    monkeypatch.setenv("FERRY_LABELS", switch)
    monkeypatch.setenv("FERRY_METRICS_PORT", "0")
    args = SimpleNamespace(
        kv_data_ptrs=[16],
        aux_data_ptrs=[32],
        state_types=[SimpleNamespace(value="mamba"), SimpleNamespace(value="swa")],
        state_data_ptrs=[[48, 64], [80]],
    )
    assert choose("manager")(args).label == label
    assert io.label_of(16) == "memory"
    names = {16: "kv", 32: "aux", 48: "mamba", 64: "mamba", 80: "swa"}
    assert labels.names_of(args) == names


def test_a_bootstrap_server_at_sglangs_place(monkeypatch, tmp_path):
    from ferry.sglang_plugin.bootstrap import PluginBootstrapServer

    monkeypatch.setenv("FERRY_BOOTSTRAP_DATA_DIR", str(tmp_path))
    port = free_port()
    # The second finds the folder free, since the first has ended when `close` returns.
    for _ in range(2):
        server = PluginBootstrapServer("127.0.0.1", port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            assert answer.status == 200
        server.close()
    assert [folder.name for folder in tmp_path.iterdir()] == [f"port-{port}"]


def test_families_stand_once_and_samples_have_their_rank():
    text = '# HELP a_total things\n# TYPE a_total counter\na_total{kind="x"} 1\na_total 2\n'
    merged = metrics.merge({"tp0": text, "tp1": text})
    assert merged.splitlines() == [
        "# HELP a_total things",
        "# TYPE a_total counter",
        'a_total{rank="tp0",kind="x"} 1',
        'a_total{rank="tp0"} 2',
        'a_total{rank="tp1",kind="x"} 1',
        'a_total{rank="tp1"} 2',
    ]


def be_rank(port, folder, number, pipe):
    os.environ |= {"FERRY_METRICS_PORT": str(port), "FERRY_RUNTIME_DIR": folder}
    metrics.serve(SimpleNamespace(engine_rank=number))
    # Something to count.
    engine = io.IOEngine(f"rank-{number}", io.IOEngineConfig("127.0.0.1", 0))
    engine.create_backend(io.BackendType.RDMA)
    memory = engine.register_memory(bytearray(8))
    engine.register_remote_engine(engine.get_engine_desc())
    status = engine.write(memory, 0, memory, 4, 4, 0)
    status.Wait()
    assert status.Succeeded(), status.Message()
    pipe.send("up")
    pipe.recv()


def ranks_behind(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, ConnectionError):
        return set()
    moved = [line for line in lines if line.startswith("ferry_transfer_bytes_total{")]
    return {line.split('rank="')[1].split("-pid")[0] for line in moved if line.endswith(" 4")}


def wait_for_ranks(port, wanted):
    deadline = time.monotonic() + DEADLINE_S
    while (found := ranks_behind(port)) != wanted:
        assert time.monotonic() < deadline, found


def test_all_ranks_behind_one_port_also_when_its_holder_dies(tmp_path):
    port, spawn = free_port(), multiprocessing.get_context("spawn")
    ranks = []
    for number in range(3):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(
            target=be_rank, args=(port, str(tmp_path), number, theirs), daemon=True
        )
        process.start()
        assert ours.poll(DEADLINE_S)
        assert ours.recv() == "up"
        ranks.append((process, ours))
    wait_for_ranks(port, {"dp0-pp0-tp0", "dp0-pp0-tp1", "dp0-pp0-tp2"})
    # The first has bound the port.
    ranks[0][0].kill()
    ranks[0][0].join()
    wait_for_ranks(port, {"dp0-pp0-tp1", "dp0-pp0-tp2"})
    for process, _ in ranks:
        process.kill()
