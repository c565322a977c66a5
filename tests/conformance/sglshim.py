"""Imports SGLang's own modules for disaggregation, unmodified, on a machine without torch or a GPU.

These files of the wheel run as they are: `srt/environ.py`, `srt/utils/network.py`, the connections
of `srt/disaggregation` (`base`, `common`, `mori`, `mooncake`, `utils`), and a few functions out of
`srt/utils/common.py`. What they import beside those is replaced in `sys.modules`:

* torch and triton, of which only names and decorators are used;
* the packages' `__init__`, which load language APIs, image libraries and the like;
* the command line's `ServerArgs`, of which only flags are read;
* the engine's runtime context and process groups: each rank of a test has a context of its own.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import logging
import math
import os
import socket
import sys
import threading
import types
import typing
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The package of an unpacked wheel; fetch.sh puts one there.
SGLANG = Path(os.environ.get("SGLCONF_SGLANG", HERE.parents[1] / "target/sglang/0.5.23/sglang"))
# The folder of the `mori` package to import; `installed` takes the one that Python finds itself.
MORI = os.environ.get("SGLCONF_MORI", str(HERE / "double"))

LIFTED = ("ceil_div", "ceil_align", "run_with_deadline", "get_int_env_var")


class _AnyMeta(type):
    """Every attribute of the class is the class again."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Any(metaclass=_AnyMeta):
    """Stands for whatever is only named, in annotations for instance."""

    def __init__(self, *_arguments, **_keywords):
        """Accept anything."""


class _AnyModule(types.ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


class Fields(types.SimpleNamespace):
    """A part of a rank's context."""


def _replace(name, path=None, module_class=types.ModuleType, **attributes):
    """Put a module into `sys.modules`; one with a path is a package with real submodules."""
    module = module_class(name)
    if path is not None:
        module.__path__ = [str(part) for part in path]
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], leaf, module)
    return module


def _replace_if_missing(name, **keywords):
    """Put a module into `sys.modules` unless the machine has it."""
    if importlib.util.find_spec(name) is None:
        _replace(name, **keywords)


def _lift_functions(path, names):
    """Take functions out of a file as they are written there, without what it imports.

    Only their lines are compiled: the file is long, and every rank of every test does this.
    """
    scope = {
        "threading": threading,
        "socket": socket,
        "os": os,
        "math": math,
        "Callable": typing.Callable,
        "Any": typing.Any,
        "Optional": typing.Optional,
    }
    lines = path.read_text().splitlines(keepends=True)
    # Where something begins that is not inside a function; a signature may end there.
    starts = [at for at, line in enumerate(lines) if not line[0].isspace() and line[0] != ")"]
    for at, behind in itertools.pairwise([*starts, len(lines)]):
        if lines[at].startswith(tuple(f"def {name}(" for name in names)):
            exec(compile("".join(lines[at:behind]), path, "exec"), scope)
    return {name: scope[name] for name in names if name in scope}


_of_thread = threading.local()
_of_process = []


def make_context(**changes):
    """Make one rank's view of its engine; a keyword changes the field of that name."""
    pipeline = Fields(is_last_rank=True, is_first_rank=True, rank_in_group=0)
    context = Fields(
        parallel=Fields(
            dist_init_addr=None,
            nnodes=1,
            attn_tp_size=1,
            attn_tp_rank=0,
            attn_cp_size=1,
            attn_cp_rank=0,
            attn_dcp_size=1,
            attn_dcp_rank=0,
            attn_dp_size=1,
            attn_dp_rank=0,
            dp_size=1,
            num_dp_ranks=1,
            pp_size=1,
            pp_group=pipeline,
            world_group=None,
            load_balance_method="round_robin",
            enable_kv_cache_sharding=False,
            enable_dsa_cache_layer_split=False,
            enable_cp_tp_group_sharing=False,
            enable_dp_attention=False,
            tp_size=1,
        ),
        disagg=Fields(
            disaggregation_bootstrap_port=8998,
            disaggregation_decode_allocation_policy="early",
            disaggregation_transfer_backend="mori",
        ),
        serving=Fields(host="127.0.0.1", port=30000),
        observability=Fields(enable_trace=False),
        spec=Fields(speculative_algorithm=None, speculative_num_draft_tokens=0),
        schedule=Fields(
            max_prefill_tokens=16384, chunked_prefill_size=8192, enable_dynamic_chunking=False
        ),
        device=Fields(device="cuda"),
        memory=Fields(enable_unified_memory=False),
        shard_group=Fields(rank_in_group=0, world_size=1),
    )
    for name, value in changes.items():
        owners = [fields for fields in vars(context).values() if hasattr(fields, name)]
        if not owners:
            raise KeyError(name)
        setattr(owners[0], name, value)
    if "tp_size" not in changes:
        context.parallel.tp_size = context.parallel.attn_tp_size
    return context


def current():
    """Return the context of the rank that this thread acts for.

    A thread that SGLang has started acts for the process's rank, as in its own processes.
    """
    return getattr(_of_thread, "context", None) or _of_process[-1]


@contextmanager
def use(context):
    """Act for a rank."""
    if context not in _of_process:
        _of_process.append(context)
    before = getattr(_of_thread, "context", None)
    _of_thread.context = context
    try:
        yield
    finally:
        _of_thread.context = before


@dataclasses.dataclass
class ServerArgs:
    """The flags of the command line that the connections read; early releases read most here."""

    host: str
    disaggregation_bootstrap_port: int
    dist_init_addr: str | None
    nnodes: int
    dp_size: int
    pp_size: int
    load_balance_method: str
    enable_dp_attention: bool
    kv_cache_dtype: str
    enable_pd_role_switch: bool = False


def make_server_args(context, kv_cache_dtype):
    """Make the flags of one rank."""
    parallel = context.parallel
    return ServerArgs(
        host=context.serving.host,
        disaggregation_bootstrap_port=context.disagg.disaggregation_bootstrap_port,
        dist_init_addr=parallel.dist_init_addr,
        nnodes=parallel.nnodes,
        dp_size=parallel.dp_size,
        pp_size=parallel.pp_size,
        load_balance_method=parallel.load_balance_method,
        enable_dp_attention=parallel.enable_dp_attention,
        kv_cache_dtype=kv_cache_dtype,
    )


class _NullTrace:
    """Tracing that is switched off."""

    tracing_enable = False

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_keywords: None

    def copy_for_thread(self):
        return self


def _decorate(function=None, **_options):
    """Stand for a decorator with or without options."""
    return function if function is not None else _decorate


def _decorate_with(_stage):
    """Stand for a decorator that takes what it is for."""
    return _decorate


def _replace_libraries():
    _replace_if_missing("torch", path=[], module_class=_AnyModule)
    if isinstance(sys.modules.get("torch"), _AnyModule):
        off = {"is_available": lambda: False, "is_initialized": lambda: False}
        _replace("torch.distributed", path=[], module_class=_AnyModule, **off)
        _replace("torch.cuda", path=[], module_class=_AnyModule)
        _replace("torch.nn", path=[], module_class=_AnyModule)
    decorators = {"jit": _decorate, "autotune": _decorate}
    _replace("triton", path=[], module_class=_AnyModule, **decorators)
    _replace("triton.language", module_class=_AnyModule)


def _replace_engine():
    def state_tp_size():
        parallel = current().parallel
        is_shared = parallel.enable_cp_tp_group_sharing
        return parallel.tp_size if is_shared else parallel.attn_tp_size

    parts = ["parallel", "disagg", "serving", "observability", "spec", "schedule", "device"]
    parts += ["memory", "exec"]
    getters = {f"get_{part}": lambda part=part: getattr(current(), part) for part in parts}
    _replace(
        "sglang.srt.runtime_context",
        get_resources=Fields,
        linear_attn_tp_size=state_tp_size,
        max_prefill_buffer_tokens=lambda: 0,
        **getters,
    )
    _replace("sglang.srt.server_args", ServerArgs=ServerArgs)
    groups = {
        "get_pp_group": lambda: current().parallel.pp_group,
        "get_world_group": lambda: current().parallel.world_group,
    }
    _replace("sglang.srt.distributed", path=[SGLANG / "srt/distributed"], **groups)
    _replace(
        "sglang.srt.distributed.parallel_state",
        GroupCoordinator=_Any,
        get_mooncake_transfer_engine=lambda: current().mooncake_engine,
    )
    _replace("sglang.srt.configs", path=[SGLANG / "srt/configs"])
    _replace(
        "sglang.srt.configs.model_config",
        get_dsa_index_topk=lambda _config: 0,
        get_dsa_mtp_topk_width=lambda _config: 0,
        is_deepseek_dsa=lambda _config: False,
    )
    sizes = [f"attn_{group}_{what}" for group in ("tp", "cp", "dp") for what in ("size", "rank")]
    _replace("sglang.srt.layers", path=[])
    _replace(
        "sglang.srt.layers.dp_attention",
        **{
            f"get_{name.replace('attn', 'attention')}": lambda name=name: getattr(
                current().parallel, name
            )
            for name in sizes
        },
    )
    shard_group = {"get_kv_shard_group": lambda _is_mla: current().shard_group}
    _replace("sglang.srt.mem_cache.page_interleave", **shard_group)
    traces = {"TraceNullContext": _NullTrace, "TraceReqContext": _NullTrace}
    _replace("sglang.srt.observability", path=[])
    _replace(
        "sglang.srt.observability.trace", trace_set_thread_info=lambda *_arguments: None, **traces
    )
    _replace(
        "sglang.srt.observability.mooncake_trace",
        MooncakeRequestStage=_Any,
        mooncake_trace_func=_decorate_with,
        mooncake_trace_slice=lambda *_arguments, **_keywords: None,
    )
    _replace_if_missing("prometheus_client", module_class=_AnyModule)
    for package in ("sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.memory"):
        _replace(package, path=[])
    _replace("sglang.kernels.ops.memory.ptr_table", make_ptr_table=None)


_warned = set()


def _warning_once(logger, message, *arguments, **keywords):
    """SGLang adds this to loggers where it sets logging up."""
    if (logger.name, message) not in _warned:
        _warned.add((logger.name, message))
        logger.warning(message, *arguments, **keywords)


def install():
    """Make `sglang.srt.disaggregation` importable."""
    if "sglang" in sys.modules:
        return
    if not (SGLANG / "srt/disaggregation/mori/conn.py").is_file():
        raise SystemExit(f"no SGLang at {SGLANG}: run tests/conformance/fetch.sh, or `make python`")
    if MORI != "installed":
        sys.path.insert(0, MORI)
    logging.Logger.warning_once = _warning_once
    _replace_libraries()
    _replace("sglang", path=[SGLANG])
    importlib.import_module("sglang.srt.environ")
    lifted = _lift_functions(SGLANG / "srt/utils/common.py", LIFTED)
    names = ("create_device_event", "create_device_stream", "device_stream_context")
    streams = dict.fromkeys(names)
    devices = {"is_npu": lambda: False, "is_hip": lambda: False}
    _replace("sglang.srt.utils", path=[SGLANG / "srt/utils"], **devices, **streams, **lifted)
    _replace("sglang.srt.utils.common", **lifted)
    _replace_engine()
