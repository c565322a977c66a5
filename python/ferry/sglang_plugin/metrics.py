"""`/metrics` of all ranks of a host behind one port.

Every rank is a process of its own. Each answers on a Unix socket in a folder that only its user can
enter; whichever has bound the port asks all of them, and when it ends another one takes the port.
Samples of a rank carry the label `rank`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ferry import metrics_text

logger = logging.getLogger(__name__)

DEFAULT_PORT = 9477
# How often a rank without the port tries to take it.
RETRY_S = 2.0
# How long the port waits for one rank's answer.
ANSWER_S = 2.0
MAX_ANSWER_BYTES = 16 << 20
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(.*)\})?( .+)$")
_started: list[Endpoint] = []
_lock = threading.Lock()


def serve(args: Any) -> None:
    """Serve the metrics of this process's rank, once, where `FERRY_METRICS_PORT` says."""
    port = int(os.environ.get("FERRY_METRICS_PORT", DEFAULT_PORT))
    with _lock:
        if port == 0 or _started:
            return
        parts = {"dp": "system_dp_rank", "pp": "pp_rank", "tp": "engine_rank"}
        numbers = {name: getattr(args, field, None) or 0 for name, field in parts.items()}
        rank = "-".join(f"{name}{number}" for name, number in numbers.items())
        try:
            _started.append(Endpoint(port, f"{rank}-pid{os.getpid()}"))
        except OSError as error:
            logger.warning("the metrics of this rank are not served: %s", error)


def folder_of(port: int) -> Path:
    """Return the folder of the ranks behind a port; make it if there is none."""
    named = os.environ.get("FERRY_RUNTIME_DIR")
    base = Path(named) if named else Path(tempfile.gettempdir()) / f"ferry-{os.getuid()}"
    folder = base / f"metrics-{port}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set FERRY_RUNTIME_DIR")
    return folder


class Endpoint:
    """One rank: its socket, and the port while it has it."""

    def __init__(self, port: int, rank: str) -> None:
        """Answer on a socket, and take the port as soon as it is free."""
        self.port, self.rank = port, rank
        self.folder = folder_of(port)
        self.path = self.folder / f"{rank}.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path.unlink(missing_ok=True)
        self.listener.bind(str(self.path))
        self.listener.listen(16)
        self.has_ended = threading.Event()
        self.server: ThreadingHTTPServer | None = None
        self._try_to_serve()
        for work in (self._answer, self._take_over):
            threading.Thread(target=work, name="ferry-metrics", daemon=True).start()

    def close(self) -> None:
        """End both; another rank takes the port."""
        self.has_ended.set()
        self.path.unlink(missing_ok=True)
        # Closing alone would leave the other thread in `accept`.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _answer(self) -> None:
        while not self.has_ended.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_S)
                connection.sendall(metrics_text().encode())

    def _take_over(self) -> None:
        while self.server is None and not self.has_ended.wait(RETRY_S):
            self._try_to_serve()

    def _try_to_serve(self) -> None:
        folder = self.folder

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                body = gather(folder).encode() if is_known else b"see /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            # Two ranks must not share the port.
            allow_reuse_port = False

        host = os.environ.get("FERRY_METRICS_HOST", "127.0.0.1")
        try:
            server = Server((host, self.port), Handler)
        except OSError:
            return
        self.server = server
        thread = threading.Thread(target=server.serve_forever, name="ferry-metrics", daemon=True)
        thread.start()


def gather(folder: Path) -> str:
    """Return the metrics of all ranks that answer, each with its name."""
    texts = {}
    for path in sorted(folder.glob("*.sock")):
        try:
            texts[path.stem] = _ask(path)
        except ConnectionRefusedError:
            # Its process has ended without a word.
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("rank %s does not tell its metrics: %s", path.stem, error)
    return merge(texts)


def _ask(path: Path) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(path))
        parts, size = [], 0
        while part := connection.recv(1 << 16):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise OSError(f"more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts).decode()


def merge(texts: dict[str, str]) -> str:
    """Return one text of several ranks': each family once, each sample with its rank."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for rank, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head and len(head) < 2:
                    head.append(line)
            elif found := _SAMPLE.match(line):
                name, _, labels, value = found.groups()
                labels = f'rank="{rank}"' + (f",{labels}" if labels else "")
                samples.setdefault(family, []).append(f"{name}{{{labels}}}{value}")
    lines = []
    for family, head in heads.items():
        lines += head + samples.get(family, [])
    return "\n".join(lines) + "\n" if lines else ""
