"""Ranks of SGLang's own classes, on memory of this process."""

import inspect
import itertools
import os
import socket
import time

import numpy as np

import sglshim

os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
sglshim.install()

import zmq  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType  # noqa: E402
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer  # noqa: E402
from sglang.srt.disaggregation.mori import conn as mori_conn  # noqa: E402
from sglang.srt.disaggregation.mori.conn import (  # noqa: E402
    MORI_GUARD,
    MoriKVManager,
    MoriKVReceiver,
    MoriKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode  # noqa: E402

BACKEND = os.environ.get("SGLCONF_BACKEND", "mori")
Manager, Sender, Receiver = MoriKVManager, MoriKVSender, MoriKVReceiver
BootstrapServer = CommonKVBootstrapServer
if BACKEND == "mooncake":
    from sglang.srt.disaggregation.mooncake import conn as mooncake_conn
    from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

    Manager, Sender, Receiver, BootstrapServer = (
        getattr(mooncake_conn, f"MooncakeKV{part}")
        for part in ("Manager", "Sender", "Receiver", "BootstrapServer")
    )
if os.environ.get("SGLCONF_PLUGIN"):
    # As SGLang's own processes do: the plugin is found by its entry point, and asked for classes.
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.disaggregation.utils import get_kv_class

    Manager, Sender, Receiver, BootstrapServer = (
        get_kv_class(TransferBackend(BACKEND), KVClassType(part))
        for part in ("manager", "sender", "receiver", "bootstrap_server")
    )

from mori import cpp  # noqa: E402, F401

if "SGLCONF_DEVICE" in os.environ:
    import ferry

POLL_INTERVAL_S = 0.001
_seeds = itertools.count(1)


class DeviceBuffer:
    """Memory of a device, with as much of an array's interface as is used here."""

    def __init__(self, data):
        """Take memory of the device that `SGLCONF_DEVICE` names, and fill it."""
        self._pool = ferry.Pool(data.nbytes, device=os.environ["SGLCONF_DEVICE"])
        self.nbytes = data.nbytes
        self.ctypes = sglshim.Fields(data=self._pool.address)
        self[0 : data.nbytes] = data

    def __getitem__(self, part):
        """Copy bytes out."""
        start, stop, _ = part.indices(self.nbytes)
        return np.frombuffer(self._pool.read(start, stop - start), np.uint8)

    def __setitem__(self, part, data):
        """Copy bytes in."""
        start, stop, _ = part.indices(self.nbytes)
        if stop - start != data.nbytes:
            raise ValueError(f"{data.nbytes} bytes do not fit {start}..{stop}")
        self._pool.write(start, data.tobytes())

    def tobytes(self):
        """Copy all bytes out."""
        return self._pool.read(0, self.nbytes)


def make_buffer(size, is_random, is_host=False):
    """Make memory: a pattern that no other buffer has, or zeros."""
    if is_random:
        data = np.random.default_rng(next(_seeds)).integers(0, 256, size, dtype=np.uint8)
    else:
        data = np.zeros(size, dtype=np.uint8)
    return data if is_host or "SGLCONF_DEVICE" not in os.environ else DeviceBuffer(data)


def _describe(args, name, buffers, item_lens):
    setattr(args, f"{name}_data_ptrs", [buffer.ctypes.data for buffer in buffers])
    setattr(args, f"{name}_data_lens", [buffer.nbytes for buffer in buffers])
    setattr(args, f"{name}_item_lens", item_lens)


class RankManager(Manager):
    """The manager; SGLang's of 0.5.12 takes nested lists of state first, and sends flat ones."""

    def _register_local_buffers(self):
        super()._register_local_buffers()
        if hasattr(mori_conn, "_normalize_state_indices"):
            for name in ("state_item_lens", "state_dim_per_tensor"):
                nested = getattr(self.kv_args, name)
                setattr(self.kv_args, name, list(itertools.chain(*nested)))


def _describe_states(args, states):
    args.state_types = [StateType(state["type"]) for state in states]
    buffers = args.buffers["state"]
    args.state_data_ptrs = [[buffer.ctypes.data for buffer in part] for part in buffers]
    args.state_data_lens = [[buffer.nbytes for buffer in part] for part in buffers]
    args.state_item_lens = [[item_len for _, item_len in state["items"]] for state in states]
    args.state_dim_per_tensor = [list(state.get("dims", [])) for state in states]
    args.state_conv_shard_groups = [list(state.get("conv", [])) for state in states]
    args.state_slice_outer_counts = [list(state.get("outer", [])) for state in states]
    args.state_layer_ids = [list(state.get("layer_ids", [])) for state in states]


def make_args(
    *,
    is_random,
    layers=2,
    is_mla=False,
    is_hybrid_mla=False,
    page_size=16,
    pages=32,
    item_len=None,
    heads=4,
    total_heads=None,
    tp_rank=0,
    pp_rank=0,
    dp_rank=0,
    start_layer=0,
    layer_ids=(),
    states=(),
    aux=((64, 8), (128, 8)),
    dtype="auto",
    num_draft=0,
):
    """Make a rank's memory and its description.

    `item_len` is the bytes of a page of one tensor; `aux` has (bytes of a row, rows) of each
    buffer. A state has its `type`, `items` of (items, bytes of an item), and where they matter
    `dims`, `conv`, `outer` and `layer_ids`, one of each for each tensor.
    """
    is_one_list = is_mla or is_hybrid_mla
    if item_len is None:
        head_bytes = 16
        item_len = page_size * (128 if is_one_list else heads * head_bytes)
    tensors = layers if is_one_list else 2 * layers
    args = KVArgs()
    args.buffers = {
        "kv": [make_buffer(pages * item_len, is_random) for _ in range(tensors)],
        # SGLang's aux rows are in host memory.
        "aux": [make_buffer(row_len * rows, is_random, is_host=True) for row_len, rows in aux],
        "state": [
            [make_buffer(items * state_len, is_random) for items, state_len in state["items"]]
            for state in states
        ],
    }
    _describe(args, "kv", args.buffers["kv"], [item_len] * tensors)
    _describe(args, "aux", args.buffers["aux"], [row_len for row_len, _ in aux])
    _describe_states(args, states)
    args.engine_rank = tp_rank
    args.pp_rank = pp_rank
    args.system_dp_rank = dp_rank
    args.rust_http_port = None
    args.kv_layer_ids = list(layer_ids)
    args.kv_cache_dtype_str = dtype
    args.kv_layout = None
    args.is_hybrid_mla_backend = is_hybrid_mla
    args.swa_kv_cache_layout = "nhd"
    args.ib_device = ""
    args.gpu_id = 0
    args.kv_head_num = heads
    args.total_kv_head_num = total_heads or heads
    args.page_size = page_size
    args.prefill_start_layer = start_layer
    args.prefill_end_layer = start_layer + layers
    args.mla_compression_ratios = None
    args.num_draft_entries = num_draft
    return args


def free_port(host="127.0.0.1"):
    """Return a port that was free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def start_bootstrap_server(host, port, timeout_s=20):
    """Start SGLang's bootstrap server in a thread and wait until it accepts connections."""
    server = BootstrapServer(host, port)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port)).close()
            return server
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_INTERVAL_S)


class Rank:
    """One scheduler rank of SGLang: its context and its manager."""

    def __init__(self, mode, args, bootstrap, is_mla=False, **context):
        """Start a "prefill" or "decode" rank; `bootstrap` is (host, port) of a prefill's server."""
        self.args = args
        self.bootstrap = bootstrap
        host, port = bootstrap
        context = {"host": host, "disaggregation_bootstrap_port": port, **context}
        self.context = sglshim.make_context(**context)
        if BACKEND == "mooncake":
            engine = mooncake_transfer_engine.MooncakeTransferEngine
            self.context.mooncake_engine = engine(os.environ["SGLANG_HOST_IP"])
        mode = DisaggregationMode(mode)
        flags = sglshim.make_server_args(self.context, args.kv_cache_dtype_str)
        self.manager = self.call(RankManager, args, mode, flags, is_mla)

    @property
    def address(self):
        """The bootstrap server as requests name it."""
        host, port = self.bootstrap
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def call(self, function, *arguments, **keywords):
        """Call something as this rank."""
        with sglshim.use(self.context):
            return function(*arguments, **keywords)

    def sender(self, room):
        """Open a room on a prefill rank."""
        arguments = {"dest_tp_ranks": [self.args.engine_rank], "pp_rank": self.args.pp_rank}
        # Releases before 0.5.22 take them, later ones do not.
        known = inspect.signature(Sender.__init__).parameters
        arguments = {name: value for name, value in arguments.items() if name in known}
        return self.call(Sender, self.manager, self.address, room, **arguments)

    def receiver(self, room, dp_rank=0, timeout_s=20):
        """Open a room on a decode rank, once its prefill is complete."""
        deadline = time.monotonic() + timeout_s
        while not self.call(self.manager.try_ensure_parallel_info, self.address):
            if time.monotonic() > deadline:
                raise TimeoutError("the prefill is not complete")
            time.sleep(POLL_INTERVAL_S)
        receiver = self.call(Receiver, self.manager, self.address, room)
        self.call(receiver.init, dp_rank)
        return receiver

    def wait(self, request, wanted, timeout_s=20):
        """Poll a request until it has a status or has ended, as SGLang's scheduler does."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.call(request.poll)
            is_over = status in (wanted, KVPoll.Failed, KVPoll.Success)
            if is_over or time.monotonic() > deadline:
                return status
            time.sleep(POLL_INTERVAL_S)


def kind_of(frames):
    """Name a control message."""
    if frames[0] != MORI_GUARD:
        return frames[0].decode("ascii", errors="replace")
    if frames[1] == b"None":
        return "REGISTER"
    return "STATUS" if len(frames) <= 5 else "TRANSFER_INFO"


class Capture:
    """Keeps every control message that this process sends."""

    def __init__(self):
        """Begin to keep them."""
        self.messages = []
        send = zmq.Socket.send_multipart

        def send_and_keep(to, frames, *arguments, **keywords):
            endpoint = to.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self.messages.append((endpoint, [bytes(frame) for frame in frames]))
            return send(to, frames, *arguments, **keywords)

        zmq.Socket.send_multipart = send_and_keep

    def take(self):
        """Return what was kept, and forget it."""
        messages, self.messages = self.messages, []
        return messages
