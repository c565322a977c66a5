"""`mooncake.engine`: the transfer engine."""

from __future__ import annotations

from collections.abc import Sequence

from ferry._ferry import MooncakeEngine
from ferry.mori_compat.io import label_of

__all__ = ["TransferEngine"]


class TransferEngine:
    """Writes between registered memory of two processes, by addresses.

    Results are 0, or negative where something failed; the reason is logged. `FERRY_TRANSPORTS`
    names the transports, if not all are to be used.
    """

    def __init__(self) -> None:
        """Make an engine that does nothing yet."""
        self._engine = MooncakeEngine()

    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        """Start; peers reach this engine at `local_hostname`.

        There is no metadata server (`P2PHANDSHAKE`): others are refused. Which way the bytes take
        is found out with each peer, whatever protocol and devices are named.
        """
        if metadata_server != "P2PHANDSHAKE":
            raise ValueError(
                f"metadata server {metadata_server!r}: Ferry has none, use P2PHANDSHAKE"
            )
        return self._engine.start(local_hostname)

    def get_rpc_port(self) -> int:
        """Return the port behind the host in this engine's session."""
        return self._engine.get_rpc_port()

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Register memory, which must stay until it is unregistered."""
        return self._engine.register_memory(buffer_addr, capacity, label_of(buffer_addr))

    def unregister_memory(self, buffer_addr: int) -> int:
        """End a registration; nobody writes there after it has returned 0."""
        return self._engine.unregister_memory(buffer_addr)

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        """Register many; either all or none."""
        done = []
        for address, capacity in zip(buffer_addrs, capacities, strict=True):
            result = self.register_memory(address, capacity)
            if result != 0:
                self.batch_unregister_memory(done)
                return result
            done.append(address)
        return 0

    def batch_unregister_memory(self, buffer_addrs: Sequence[int]) -> int:
        """End many registrations; the first failure, if there is one."""
        results = [self.unregister_memory(address) for address in buffer_addrs]
        return next((result for result in results if result != 0), 0)

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int
    ) -> int:
        """Write one range into a peer and wait until it is there."""
        return self._engine.write(target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write many ranges into a peer and wait until they are there; the lists may be arrays."""
        return self._engine.write(target_hostname, buffers, peer_buffer_addresses, lengths)

    def send_probe(self, target_hostname: str) -> int:
        """Return 0 if a peer answers."""
        return self._engine.send_probe(target_hostname)

    def get_engine(self) -> TransferEngine:
        """Return the engine itself: there is no other object behind it."""
        return self
