"""The other process of a test: an engine with one memory, asked over a pipe."""

import os


def serve(pipe, size, environment):
    """Register a memory of 0xEE, tell of it, and answer until the pipe ends."""
    os.environ.update(environment)
    import numpy as np

    from ferry.mori_compat.io import BackendType, EngineDesc, IOEngine, IOEngineConfig

    engine = IOEngine(f"far-{os.getpid()}", IOEngineConfig("127.0.0.1", 0))
    engine.create_backend(BackendType.RDMA)
    memory = np.full(size, 0xEE, dtype=np.uint8)
    desc = engine.register_memory(memory)
    pipe.send((engine.get_engine_desc().pack(), desc.pack()))
    while True:
        try:
            question, *arguments = pipe.recv()
        except EOFError:
            return
        if question == "read":
            pipe.send(memory.tobytes())
        elif question == "fill":
            memory[:] = arguments[0]
            pipe.send(None)
        elif question == "know":
            engine.register_remote_engine(EngineDesc.unpack(arguments[0]))
            pipe.send(None)
        elif question == "has_ended":
            pipe.send(engine.pop_inbound_transfer_status(*arguments) is not None)
        elif question == "deregister":
            engine.deregister_memory(desc)
            memory[:] = 0x55
            pipe.send(None)
