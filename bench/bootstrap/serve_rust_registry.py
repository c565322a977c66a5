"""Serves the Rust registry that SGLang 0.5.23's wheel carries on 127.0.0.1:
serve_rust_registry.py WHEEL_FOLDER PORT

It is the wheel's API server in prefill mode without a tokenizer, as SGLANG_RUST_SERVER=1 starts
it; the bootstrap routes are part of it. The arguments below are those that it insists on.
"""

import importlib.util
import sys
import time
from pathlib import Path


def load(wheel):
    (library,) = (wheel / "sglang/srt/rust_extensions").glob("_server.cpython-311-*.so")
    spec = importlib.util.spec_from_file_location("_server", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(module, port):
    return module.ServerArgs(
        host="127.0.0.1",
        port=port,
        grpc_port=None,
        disaggregation_mode=module.DisaggregationMode.Prefill,
        model_config=module.ModelConfig(
            context_len=2048,
            vocab_size=1000,
            is_multimodal=False,
            default_sampling_params=module.DefaultSamplingParams(),
            model_type=None,
        ),
        model_path="none",
        served_model_name="none",
        tokenizer_path="none",
        revision=None,
        load_format="dummy",
        weight_version="default",
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None,
        hicache_storage_prefetch_policy="best_effort",
        hicache_write_policy="write_through",
        log_level="error",
        log_level_http="error",
        chat_template=None,
        default_chat_template_kwargs="{}",
        tool_call_parser=None,
        reasoning_parser=None,
        stream_response_default_include_usage=False,
        tokenizer_worker_num=1,
        detokenizer_worker_num=1,
        skip_tokenizer_init=True,
        skip_server_warmup=True,
        health_generate_headers={},
        default_priority_value=None,
        enable_request_header_overrides=False,
        incremental_streaming_output=False,
        preferred_sampling_params=None,
        default_max_new_tokens=None,
        lora_ids={},
        enable_strict_thinking=False,
        limit_mm_data_per_request=[],
        allow_auto_truncate=False,
        enable_return_hidden_states=False,
        num_reserved_tokens=0,
        tokenizer_model_max_length=2048,
        version="0.5.23",
        max_total_num_tokens=1000,
        deployment_info="{}",
        launch_server_info="{}",
        load_snapshot_path=None,
        load_snapshot_dp_size=0,
        load_snapshot_dp_rank=0,
        accelerator=None,
        num_accelerators=0,
        metrics=None,
    )


def main():
    wheel, port = Path(sys.argv[1]), int(sys.argv[2])
    module = load(wheel)
    server = module.Server(arguments(module, port))
    while server is not None:
        time.sleep(1)


if __name__ == "__main__":
    main()
