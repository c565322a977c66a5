"""Real processes for the page to show: bootstrap servers, transfer services, ranks.

Ranks come in two kinds. A `Rank` is attached to a running `transfer-actor serve`, as an engine
does it, and the service registers it. A `Socket` listens and registers itself with PUT /route, as
SGLang's own prefill does; hundreds of those are cheap.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

PATIENCE_S = 60
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve() / "debug"


def program(name):
    """A program of the workspace, which `cargo build --workspace --bins` makes."""
    path = PROGRAMS / name
    assert path.is_file(), f"{path} is missing: run `cargo build --workspace --bins`"
    return path


def wait_for(what, poll):
    """Waits until `poll` returns something true, with a deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = poll()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not in {PATIENCE_S} s"
        time.sleep(0.02)


class Process:
    """A program that prints `ready ...`; it is killed, by its process id, when the test ends."""

    def __init__(self, command):
        self.child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        readable, _, _ = select.select([self.child.stdout], [], [], PATIENCE_S)
        line = self.child.stdout.readline() if readable else ""
        assert line.startswith("ready "), f"{command[0]} printed no ready line: {line!r}"
        self.ready = line.split()[1:]

    def pause(self):
        """Stops the process: its sockets stay, and nobody answers at them."""
        self.child.send_signal(signal.SIGSTOP)

    def resume(self):
        self.child.send_signal(signal.SIGCONT)

    def kill(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(PATIENCE_S)


class BootstrapServer(Process):
    """A bootstrap server with a port for each of `names`."""

    def __init__(self, *names, admin="127.0.0.1:0", listen=None, options=()):
        command = [program("bootstrap-server"), "--admin-listen", admin]
        for at, name in enumerate(names):
            port = listen[at] if listen else 0
            command += ["--listen", f"127.0.0.1:{port}={name}"]
        if "--data-dir" not in options:
            command += ["--store", "memory"]
        super().__init__([*command, *options])
        addresses = dict(word.split("=") for word in self.ready)
        self.admin = addresses.pop("admin")
        self.engines = addresses
        self.url = f"http://{self.admin}/"

    def json(self, path):
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def put(self, engine, path, body, method="PUT"):
        """Sends a body to an engine's port."""
        return send(f"http://{self.engines[engine]}{path}", body, method)


def send(url, body, method="PUT", headers=None):
    """Sends JSON and returns the status; an error status is returned, not raised."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def route_body(place, sizes, port):
    """PUT /route as SGLang 0.5.23 sends it. `place` and `sizes` go by dp, cp, tp, pp."""
    dp, cp, tp, pp = place
    dp_size, cp_size, tp_size, pp_size = sizes
    return {
        "attn_tp_size": tp_size, "attn_tp_rank": tp, "attn_cp_size": cp_size, "attn_cp_rank": cp,
        "attn_dp_size": dp_size, "attn_dp_rank": dp, "pp_size": pp_size, "pp_rank": pp,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": port,
        "page_size": 64, "kv_cache_dtype": "fp8_e4m3", "kv_layout": None,
        "dsv41_spec_layout": None, "load_balance_method": "round_robin",
        "enable_dsa_cache_layer_split": False, "enable_kv_cache_sharding": False,
        "prefill_http_port": 30000, "decode_allocation_policy": "early",
    }  # fmt: skip


class Socket:
    """A rank that is nothing but a listening socket which registered itself."""

    def __init__(self, server, engine, place, sizes=(1, 1, 1, 1)):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        port = self.listener.getsockname()[1]
        status = server.put(engine, "/route", route_body(place, sizes, port))
        assert status == 200, f"PUT /route: {status}"

    def close(self):
        self.listener.close()


def places(sizes):
    """Every place in an engine of these sizes."""
    dp_size, cp_size, tp_size, pp_size = sizes
    return [
        (dp, cp, tp, pp)
        for dp in range(dp_size)
        for cp in range(cp_size)
        for tp in range(tp_size)
        for pp in range(pp_size)
    ]


class TransferService(Process):
    """`transfer-actor serve`, with its sockets in a folder of its own."""

    def __init__(self, folder):
        self.attach_socket = folder / "attach.sock"
        self.api_socket = folder / "api.sock"
        command = [program("transfer-actor"), "serve", "--attach-socket", self.attach_socket]
        command += ["--api-socket", self.api_socket, "--metrics-listen", "127.0.0.1:0"]
        super().__init__([*command, "--bind", "127.0.0.1", "--transports", "tcp"])


class Rank:
    """A rank attached to a service: it lives as long as this connection."""

    POOL_BYTES = 4 << 20

    def __init__(self, service, role, bootstrap, tp_size=1, tp_rank=0):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(PATIENCE_S)
        self.connection.connect(str(service.attach_socket))
        request = json.dumps(self.request(role, bootstrap, tp_size, tp_rank)).encode()
        pool = os.memfd_create("pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(pool, self.POOL_BYTES)
        framed = struct.pack("<I", len(request)) + request
        sent = socket.send_fds(self.connection, [framed], [pool])
        os.close(pool)
        self.connection.sendall(framed[sent:])
        (length,) = struct.unpack("<I", self.receive(4))
        self.reply = json.loads(self.receive(length))
        assert "refused" not in self.reply, self.reply

    def receive(self, length):
        data = b""
        while len(data) < length:
            piece = self.connection.recv(length - len(data))
            assert piece, "the service closed the connection"
            data += piece
        return data

    def request(self, role, bootstrap, tp_size, tp_rank):
        """A small hybrid model: 16 pages of K and V, 8 mamba slots, 4 aux rows."""
        tensor = lambda offset, size, item: {  # noqa: E731
            "pool": 0, "offset": offset, "bytes": size, "item_len": item,
        }  # fmt: skip
        mib = 1 << 20
        return {
            "role": role,
            "bootstrap": bootstrap,
            "parallel": {"attn_tp_size": tp_size, "attn_tp_rank": tp_rank},
            "engine": {"kv_cache_dtype": "auto"},
            "pools": [self.POOL_BYTES],
            "layout": {
                "page_size": 64,
                "kv": {
                    "tensors": [tensor(0, mib, mib // 16), tensor(mib, mib, mib // 16)],
                    "attention": "mha",
                    "head_num": 1,
                    "total_head_num": tp_size,
                },
                "aux": [tensor(3 * mib, 4096, 1024)],
                "states": [
                    {"type": "mamba", "tensors": [tensor(2 * mib, mib, mib // 8)], "dims": [4]}
                ],
            },
        }

    def close(self):
        self.connection.close()
