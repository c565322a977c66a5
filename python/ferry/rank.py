"""Ranks that an engine drives: rooms in, bytes moved.

A prefill rank sends the state of requests, a decode rank receives it. Every request has a room,
whose number both engines got from the router. All calls may come from any thread; those that wait
let other threads of Python run.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

from ferry import _ferry
from ferry.layout import Engine, Layout, Parallel, describe

if TYPE_CHECKING:
    from ferry._ferry import RoomView

TRANSPORTS = ("local", "shm", "cma", "tcp")


class RoomStatus(IntEnum):
    """The status of a room, with SGLang's numbers. It only grows; `FAILED` is an end too."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class RankError(RuntimeError):
    """A call that could not be done; `code` is a word to match on, for example `unknown_room`."""

    def __init__(self, code: str, message: str) -> None:
        """Keep both."""
        super().__init__(message)
        self.code = code

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}"


class RoomFailedError(RuntimeError):
    """A room that was waited for has failed; the text is its first root cause."""


def default_transports() -> Sequence[str]:
    """Return what `FERRY_TRANSPORTS` names, or all."""
    named = os.environ.get("FERRY_TRANSPORTS", "")
    return [name for name in named.split(",") if name] or TRANSPORTS


class _Rank:
    """What both roles have. A rank ends with `stop`, with its `with`, or with the process."""

    _role: str

    def __init__(
        self,
        layout: Layout,
        *,
        parallel: Parallel | None = None,
        engine: Engine | None = None,
        host: str = "127.0.0.1",
        bootstrap: str | None = None,
        transports: Sequence[str] | None = None,
        cma_trust_descriptors: bool = False,
        bootstrap_timeout_s: float = 300,
        waiting_timeout_s: float = 300,
        transfer_timeout_s: float = 300,
        heartbeat_interval_s: float = 5,
        heartbeat_misses: int = 2,
        verify: Literal["off", "sampled", "full"] | None = None,
    ) -> None:
        """Start a rank; a prefill is registered at its bootstrap server (`host:port`) then.

        `host` is the address at which peers reach it. `RankError` says what is wrong with the
        description, or which server did not answer within `bootstrap_timeout_s`. A decode asks its
        prefill ranks every `heartbeat_interval_s`; one that misses `heartbeat_misses` is dead.
        `verify` compares what arrives with checksums before a Success: of one range in 16, of every
        byte, or not at all, which `FERRY_VERIFY` says if it is absent. A decode asks for it.
        """
        parts, pools = describe(layout, parallel or Parallel(), engine or Engine())
        request = parts | {"role": self._role, "bootstrap": bootstrap}
        self._native = _ferry.Rank(
            json.dumps(request),
            [pool._native for pool in pools],
            host=host,
            transports=list(transports or default_transports()),
            cma_trust_descriptors=cma_trust_descriptors,
            bootstrap_timeout_s=bootstrap_timeout_s,
            waiting_timeout_s=waiting_timeout_s,
            transfer_timeout_s=transfer_timeout_s,
            heartbeat_interval_s=heartbeat_interval_s,
            heartbeat_misses=heartbeat_misses,
            verify=verify or os.environ.get("FERRY_VERIFY") or "off",
        )
        self._stop = weakref.finalize(self, self._native.stop, "the engine has ended")

    @property
    def engine_key(self) -> str:
        """The key of its io engine, which its peers know it by."""
        return self._native.engine_key

    @property
    def control(self) -> str:
        """Its control socket, `host:port`."""
        return self._native.control

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._native.is_alive

    def wait(
        self, room: int, status: RoomStatus = RoomStatus.SUCCESS, timeout_s: float = 300
    ) -> RoomView:
        """Wait until a room has this status, and return it.

        `RoomFailedError` if it fails instead, `TimeoutError` if it does neither in time.
        """
        seen = self._native.wait(room, int(status), timeout_s)
        if seen.status is RoomStatus.FAILED and status is not RoomStatus.FAILED:
            raise RoomFailedError(f"room {room}: {seen.reason}")
        if seen.status < status:
            raise TimeoutError(f"room {room} is {seen.status.name} after {timeout_s} s")
        return seen

    def room(self, room: int) -> RoomView:
        """Return a room as it is now."""
        return self._native.wait(room, None, 0)

    def abort(self, room: int, reason: str | None = None) -> RoomView:
        """Give a room up; the peers are told."""
        return self._native.abort(room, reason)

    def clear(self, room: int) -> None:
        """Forget a room, whose pages may be used again; one that has not ended fails."""
        self._native.clear(room)

    def observe(self) -> dict[str, Any]:
        """Return the rank as it is now: its rooms by status, its peers, its sessions."""
        return json.loads(self._native.observe())

    def stop(self) -> None:
        """End the rank: its open rooms fail, their peers are told, writes drain."""
        self._stop()

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.engine_key} at {self.control}>"


class PrefillRank(_Rank):
    """A rank that sends state."""

    _role = "prefill"

    def open(self, room: int, aux_index: int | None = None) -> RoomView:
        """Open a room; `aux_index` is the row of the aux buffers to send."""
        return self._native.open(room, None, None, aux_index)

    def send_chunk(
        self,
        room: int,
        kv_indices: Sequence[int],
        state_indices: Sequence[Sequence[int] | None] = (),
        *,
        last: bool,
        num_kv_tokens: int | None = None,
    ) -> RoomView:
        """Send the next pages of a room; its states and its row of aux go with the last ones.

        It returns at once. The pages must stay as they are until the room has ended.
        `num_kv_tokens`, the tokens of the request so far, is needed where decode ranks share pages.
        """
        states = list(state_indices)
        return self._native.send_chunk(room, kv_indices, states, num_kv_tokens, last)

    def prefill_complete(self, room: int) -> RoomView:
        """Say that the prefill of a room is complete (policy `prefill_complete`)."""
        return self._native.prefill_complete(room)


class DecodeRank(_Rank):
    """A rank that receives state."""

    _role = "decode"

    def open(self, room: int, bootstrap: str, prefill_dp_rank: int | None = None) -> RoomView:
        """Open a room whose prefill is found at a bootstrap server, `host:port`."""
        return self._native.open(room, bootstrap, prefill_dp_rank, None)

    def announce(
        self,
        room: int,
        kv_indices: Sequence[int],
        state_indices: Sequence[Sequence[int] | None] = (),
        *,
        aux_index: int | None = None,
        decode_prefix_len: int | None = None,
    ) -> RoomView:
        """Say where a room's state must land, in the order of the prompt.

        `decode_prefix_len` is how many tokens this side holds already: the pages are those behind
        them.
        """
        states = list(state_indices)
        return self._native.announce(room, kv_indices, aux_index, states, decode_prefix_len)
