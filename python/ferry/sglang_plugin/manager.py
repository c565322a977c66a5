"""SGLang's manager, sender and receiver over Ferry's rank actor.

Python says which pages and where; control messages, plans, transfers, heartbeats and timeouts are
the actor's. The wire is the same, so the other side may be SGLang's own classes.
"""

from __future__ import annotations

import logging
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
from sglang.srt.utils.network import NetworkAddress

from ferry import _ferry
from ferry.layout import Engine, Kv, Layout, Parallel, State, Tensor
from ferry.rank import DecodeRank, PrefillRank
from ferry.sglang_plugin import is_on, metrics

logger = logging.getLogger(__name__)

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# What SGLang says of a room that its engine gave up.
ABORTED = "Aborted by AbortReq."


class _Buffer:
    """A buffer of SGLang's in a pool's place."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._native = _ferry.Borrowed(address, nbytes)
        self.nbytes = nbytes


def _tensors(addresses: list, lengths: list, item_lens: list) -> list[Tensor]:
    tensors = []
    for address, length, item_len in zip(addresses, lengths, item_lens, strict=True):
        # Elided buffers have no memory; no pool is looked up for them.
        pool = _Buffer(address, length) if length else None
        tensors.append(Tensor(pool, 0, length, item_len if length else 0))
    return tensors


def _each(args: Any, name: str, position: int) -> list:
    parts = getattr(args, name, None) or []
    return list(parts[position]) if position < len(parts) and parts[position] else []


def layout_of(args: Any, is_mla: bool) -> Layout:
    """Return the layout that SGLang's `KVArgs` describe."""
    is_hybrid = bool(getattr(args, "is_hybrid_mla_backend", False))
    kv = Kv(
        tensors=_tensors(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
        attention="hybrid_mla" if is_hybrid else "mla" if is_mla else "mha",
        head_num=max(1, args.kv_head_num),
        total_head_num=max(1, getattr(args, "total_kv_head_num", 0) or args.kv_head_num),
        layer_ids=getattr(args, "kv_layer_ids", None) or (),
        start_layer=args.prefill_start_layer or 0,
        num_draft_entries=getattr(args, "num_draft_entries", 0),
    )
    states = []
    for at, kind in enumerate(getattr(args, "state_types", None) or []):
        parts = (args.state_data_ptrs[at], args.state_data_lens[at], args.state_item_lens[at])
        states.append(
            State(
                type=str(getattr(kind, "value", kind)),
                tensors=_tensors(*parts),
                dims=_each(args, "state_dim_per_tensor", at),
                outer_counts=_each(args, "state_slice_outer_counts", at),
                conv_shard_groups=_each(args, "state_conv_shard_groups", at),
                layer_ids=_each(args, "state_layer_ids", at),
            )
        )
    aux = _tensors(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
    return Layout(page_size=args.page_size, kv=kv, aux=aux, states=states)


class FerryKVManager(CommonKVManager):
    """A rank of Ferry's with the interface that SGLang's scheduler expects."""

    supports_role_switch = True
    supports_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        """Start the rank; a prefill is registered at its bootstrap server then."""
        self._rank = None
        self._early = None
        # Receivers that have asked for the proof that nobody writes into their pages.
        self._aborted: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        metrics.serve(args)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        # The rank has a control socket of its own.
        self.server_socket.close(linger=0)
        self._zmq_ctx.destroy(linger=0)
        # The rank keeps rooms of the policy `prefill_complete` itself.
        self.deferred_bootstrap = None
        if self._rank is None:
            self._start(None)

    def register_to_bootstrap(self) -> None:
        """Start the rank, which registers itself and goes on trying; SGLang calls it."""
        if self.dist_init_addr:
            host = NetworkAddress.parse(self.dist_init_addr).resolved().host
        else:
            host = WILDCARDS.get(self.bootstrap_host, self.bootstrap_host)
        self._start(NetworkAddress(host, self.bootstrap_port).to_host_port_str())

    def _start(self, bootstrap: str | None) -> None:
        parallel = get_parallel()
        for flag in ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split"):
            if getattr(parallel, flag, False):
                raise RuntimeError(f"FERRY_MANAGER=1 does not know {flag}; unset FERRY_MANAGER")
        is_prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        sizes = Parallel(
            attn_tp_size=self.attn_tp_size,
            attn_tp_rank=self.attn_tp_rank,
            attn_dp_size=self.attn_dp_size,
            attn_dp_rank=self.attn_dp_rank,
            pp_size=self.pp_size,
            pp_rank=self.pp_rank,
            system_dp_size=self.system_dp_size,
            system_dp_rank=self.system_dp_rank,
            dcp_size=getattr(self, "dcp_size", 1),
            dcp_rank=getattr(self, "dcp_rank", 0),
        )
        engine = Engine(
            kv_cache_dtype=self.kv_cache_dtype_str,
            kv_layout=getattr(self, "kv_layout", None),
            load_balance_method=parallel.load_balance_method,
            decode_allocation_policy=get_disagg().disaggregation_decode_allocation_policy,
            prefill_http_port=get_serving().port,
        )
        timeouts = {
            "bootstrap_timeout_s": envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get(),
            "waiting_timeout_s": envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
            "heartbeat_interval_s": envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.get(),
            "heartbeat_misses": max(1, envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.get()),
        }
        role = PrefillRank if is_prefill else DecodeRank
        self._rank = role(
            layout_of(self.kv_args, self.is_mla_backend),
            parallel=sizes,
            engine=engine,
            host=self.local_ip,
            bootstrap=bootstrap,
            cma_trust_descriptors=is_on("FERRY_CMA_TRUST_DESCRIPTORS", default=False),
            **timeouts,
        )
        self.engine_key = self._rank.engine_key
        self.rank_port = int(self._rank.control.rpartition(":")[2])

    def open_room(
        self, room: int, bootstrap: str | None = None, prefill_dp_rank: int | None = None
    ) -> _ferry.Room:
        """Open a room and follow it."""
        return self._rank._native.follow(room, bootstrap, prefill_dp_rank)

    def early(self) -> ThreadPoolExecutor:
        """Return the thread on which chunks wait for the device."""
        if self._early is None:
            self._early = ThreadPoolExecutor(1, thread_name_prefix="ferry-early-send")
        return self._early

    def update_status(self, bootstrap_room: int, status: int) -> None:
        """Keep what only Python has decided: that a room fails before the rank knows it."""
        if status == KVPoll.Failed:
            self.request_status[bootstrap_room] = status

    def check_status(self, bootstrap_room: int) -> int:
        """Return what Python has decided."""
        return self.request_status.get(bootstrap_room, KVPoll.Bootstrapping)

    def forget(self, bootstrap_room: int) -> str | None:
        """Forget what was decided of a room; return why it failed."""
        self.request_status.pop(bootstrap_room, None)
        with self.failure_lock:
            return self.failure_records.pop(bootstrap_room, None)

    def note_aborted(self, receiver: FerryKVReceiver) -> None:
        """Keep a receiver findable that has given its room up."""
        self._aborted[receiver.bootstrap_room] = receiver

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return whether every prefill rank has proved that it writes no more."""
        receiver = self._aborted.get(bootstrap_room)
        return receiver is not None and receiver.is_abort_release_safe()

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Forget a receiver that had given its room up."""
        self._aborted.pop(bootstrap_room, None)

    def teardown(self) -> None:
        """End the rank: its open rooms fail, their peers are told, writes drain."""
        if self._early is not None:
            self._early.shutdown(wait=False, cancel_futures=True)
        self._rank.stop()


class _Request:
    """What a sender and a receiver have in common."""

    _room: _ferry.Room | None = None

    def _poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        status = self._room.status
        if status in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = status
        return status

    def poll(self) -> int:
        """Return the status; no other thread is asked."""
        return self._poll()

    def _refused(self) -> bool:
        """Return whether Python has found a reason not to open the room."""
        if self.kv_mgr.request_status.get(self.bootstrap_room) != KVPoll.Failed:
            return False
        self._reason = self.kv_mgr.forget(self.bootstrap_room)
        self.conclude_state = KVPoll.Failed
        return True

    def wait(self, status: int, timeout_s: float) -> int:
        """Return the status once it is this one, or an end, or the time is over; Ferry's own."""
        return self._room.wait(int(status), timeout_s) if self._room else self.conclude_state

    def failure_exception(self) -> None:
        """Raise why the room failed."""
        self.conclude_state = KVPoll.Failed
        reason = self._reason or (self._room.reason if self._room else None)
        raise KVTransferError(
            self.bootstrap_room,
            reason or "Failed due to an unknown reason from another rank",
            reason is None,
        )

    def clear(self) -> None:
        """Forget the room, whose number may be used again."""
        if self.conclude_state is None:
            is_over = self._room.status == KVPoll.Success
            self.conclude_state = KVPoll.Success if is_over else KVPoll.Failed
        if self._room is not None:
            self._room.clear()

    def abort(self) -> None:
        """Give the room up; the peers are told."""
        if self.conclude_state != KVPoll.Failed:
            self._reason = ABORTED
        if self._room is not None:
            self._room.abort(ABORTED)
        self.conclude_state = KVPoll.Failed


def _plain(states: list | None) -> list:
    """Return state indices as flat arrays."""
    return [None if part is None else np.asarray(part, np.int32).ravel() for part in states or ()]


class FerryKVSender(_Request, CommonKVSender):
    """A room of a prefill."""

    def __init__(self, mgr: FerryKVManager, bootstrap_addr: str, bootstrap_room: int, **options):
        """Open the room."""
        self._reason = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room, **options)
        self._is_early = False
        if not self._refused():
            self._room = mgr.open_room(bootstrap_room)

    def send(
        self,
        kv_indices: Any,
        state_indices: list | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        """Hand over the next pages; states and aux go with the last ones."""
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed):
            return
        self.curr_idx += len(kv_indices)
        is_last = self.curr_idx == self.num_kv_indices
        states = _plain(state_indices) if is_last else []
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        self._record_transfer_indices(kv_indices, states)
        aux = self.aux_index if is_last else None
        chunk = (kv_indices, aux, states, num_kv_tokens, is_last)
        events = [event for event in (self._early_send_wait_event, indices_event) if event]
        self._early_send_wait_event = None
        if events or self._is_early:
            # Later chunks stay behind the one that waits for the device.
            self._is_early = True
            self.kv_mgr.early().submit(self._send_after, events, chunk)
        else:
            self._room.send_chunk(*chunk)

    def _send_after(self, events: list, chunk: tuple) -> None:
        try:
            for event in events:
                event.synchronize()
            self._room.send_chunk(np.asarray(chunk[0]), *chunk[1:])
        except Exception as error:
            logger.exception("a chunk of room %s could not be sent", self.bootstrap_room)
            self._room.abort(f"the device failed: {error}")

    def poll_pp_consensus(self) -> int:
        """Return the status; pipeline stages need no agreement, each tells the decode itself."""
        return self._poll()

    def mark_prefill_complete(self) -> None:
        """Say that the prefill is complete (policy `prefill_complete`)."""
        if self._room is not None:
            self._room.prefill_complete()

    def pop_decode_prefix_len(self) -> int:
        """Return how many tokens the decode holds already."""
        return (self._room.decode_prefix_len if self._room else None) or 0

    def get_max_transfer_tokens(self) -> int | None:
        """Return no limit: nothing is packed first."""
        return None

    def failure_exception(self) -> None:
        """Raise why the room failed, and forget it."""
        try:
            super().failure_exception()
        finally:
            self.clear()


class FerryKVReceiver(_Request, CommonKVReceiver):
    """A room of a decode."""

    def __init__(
        self, mgr: FerryKVManager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        """Note where the prefill is found; the room is opened by `init`."""
        self.kv_mgr = mgr
        self.bootstrap_addr, self.bootstrap_room = bootstrap_addr, bootstrap_room
        self.conclude_state = self.init_time = self._reason = None
        self.require_staging = self.abort_notified = False
        # Only counted, for the acknowledgements that the rank waits for itself.
        self.bootstrap_infos: list | None = None

    def init(self, prefill_dp_rank: int | None) -> None:
        """Open the room; its prefill ranks are found and told of this rank meanwhile."""
        self._room = self.kv_mgr.open_room(
            self.bootstrap_room, self.bootstrap_addr, prefill_dp_rank
        )
        self.bootstrap_infos = [{}]

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = None,
        device_kv_indices: Any = None,
    ) -> None:
        """Say where the state must land."""
        if getattr(destination, "value", "device") != "device":
            raise NotImplementedError("Host KV destinations are not supported")
        if self._room is None:
            return
        pages = np.asarray(kv_indices, np.int32)
        self._room.announce(pages, aux_index, _plain(state_indices), decode_prefix_len or None)
        self.init_time = time.time()

    def _poll(self) -> int:
        status = (
            super()._poll()
            if self._room or self.conclude_state is not None
            else KVPoll.Bootstrapping
        )
        if status == KVPoll.Failed:
            # The prefill may have been replaced: the next request asks for it again.
            self.kv_mgr.prefill_info_table.pop(self.bootstrap_addr, None)
        return status

    def abort(self) -> None:
        """Give the room up."""
        super().abort()
        self.abort_notified = True
        self.kv_mgr.note_aborted(self)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Ask the prefill ranks to prove that they write no more."""
        if self._room is not None and not self.abort_notified:
            self._room.abort(ABORTED)
            self.abort_notified = True
            self.kv_mgr.note_aborted(self)

    def is_abort_release_safe(self) -> bool:
        """Return whether they have proved it, as far as is known now."""
        return self._room is None or self._room.is_release_safe()
