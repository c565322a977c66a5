"""Real processes for the page to show: bootstrap servers, transfer services, ranks.

Ranks come in two kinds. A `Rank` is attached to a running `transfer-actor serve`, as an engine
does it, and the service registers it. A `Socket` listens and registers itself with PUT /route, as
SGLang's own prefill does; hundreds of those are cheap.
"""

import http.client
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.parse
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

    def report(self, engine, key, report):
        """Sends a rank actor's report."""
        status = self.put(engine, f"/v1/reports/{urllib.parse.quote(key, safe='')}", report)
        assert status == 204, f"PUT /v1/reports: {status}"

    def drain(self, engine, draining):
        status = send(f"{self.url}v1/engines/{engine}/drain", {"draining": draining})
        assert status == 200, f"PUT drain: {status}"


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


def report(
    role, rank, instance, peers, *, version="0.1.0", interval_s=60, failures=(), moved=1 << 30
):
    """The report of a rank actor. `peers` are pairs of a key and a transport."""
    return {
        "version": version,
        "role": role,
        "rank": rank,
        "instance": instance,
        "interval_seconds": interval_s,
        "rooms_open": 2,
        "peers": [{"engine_key": key, "transport": transport} for key, transport in peers],
        # As rank actors do it, the sender counts.
        "components": [{"component": "kv", "bytes": moved, "failures": len(failures)}]
        if role == "prefill"
        else [],
        "failures": [
            {"at": int(time.time()), "room": room, "reason": reason} for room, reason in failures
        ],
    }


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
        self.service, self.role = service, role
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
        assert "attached" in self.reply, self.reply
        self.number = self.reply["attached"]["rank"]

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

    def ask(self, method, path, body=None):
        """Drives the rank over the service's socket, as its engine does."""
        connection = UnixConnection(self.service.api_socket)
        try:
            headers = {"content-type": "application/json"}
            place = f"/v1/ranks/{self.number}/rooms{path}"
            connection.request(method, place, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, f"{method} {path}: {answer.status} {text}"
            return json.loads(text)
        finally:
            connection.close()

    def wait(self, room, status):
        """Waits for a status of a room; every other end fails the test."""
        view = self.ask("GET", f"/{room}?wait_for={status}&timeout_ms={PATIENCE_S // 2 * 1000}")
        assert view["status"] == status, view

    def close(self):
        self.connection.close()


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path):
        super().__init__("ferry", timeout=PATIENCE_S)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def cross(prefills, decodes, room, bootstrap):
    """Takes one request from prefill ranks to as many decode ranks: real bytes move."""
    for decode in decodes:
        decode.ask("POST", "", {"room": room, "bootstrap": bootstrap})
    for prefill in prefills:
        prefill.ask("POST", "", {"room": room, "aux_index": 1})
    for decode in decodes:
        places = {"kv_indices": [3, 5, 7], "aux_index": 3, "state_indices": [[6]]}
        decode.ask("POST", f"/{room}/announce", places)
    for prefill in prefills:
        prefill.wait(room, "waiting_for_input")
        chunk = {"kv_indices": [2, 4, 6], "state_indices": [[1]], "last": True}
        prefill.ask("POST", f"/{room}/chunks", chunk)
    for rank in [*prefills, *decodes]:
        rank.wait(room, "success")
