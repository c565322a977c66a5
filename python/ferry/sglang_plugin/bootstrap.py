"""SGLang's bootstrap server, served by threads of Ferry's in the same process."""

from __future__ import annotations

import os
from pathlib import Path

from ferry import BootstrapServer


class PluginBootstrapServer:
    """Stands where SGLang has its own: the same constructor, the same port, the same protocol.

    What it knows is kept in `FERRY_BOOTSTRAP_DATA_DIR`, in a folder for each port, or in memory if
    that is not set. Its admin API is at `FERRY_BOOTSTRAP_ADMIN` (`127.0.0.1:0`: any free port).
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind and serve; an address that is taken is a `RuntimeError`."""
        self.host, self.port = host, port
        folder = os.environ.get("FERRY_BOOTSTRAP_DATA_DIR")
        if folder:
            folder = Path(folder) / f"port-{port}"
            folder.mkdir(parents=True, exist_ok=True)
        bare = host.strip("[]")
        self.server = BootstrapServer(
            f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}",
            admin_listen=os.environ.get("FERRY_BOOTSTRAP_ADMIN", "127.0.0.1:0"),
            data_dir=str(folder) if folder else None,
        )

    def run(self) -> None:
        """Do nothing: it serves already."""

    def close(self) -> None:
        """End it; requests that have begun are answered."""
        self.server.stop()
