"""Transfers between two engines of one process: every call, every form of list, every refusal."""

import array
import gc
import warnings
import weakref

import numpy as np
import pytest

from conftest import make_engine, until
from ferry.mori_compat.cpp import TransferStatus
from ferry.mori_compat.io import (
    BackendType,
    FabricBackendConfig,
    IOEngine,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    RdmaBackendConfig,
    StatusCode,
    XgmiBackendConfig,
)

SIZES = (8, 8192)
COUNTS = (1, 64)


class Memories:
    """A memory of random bytes and one of other bytes, registered with a pair of engines."""

    def __init__(self, pair, size):
        """Register them."""
        self.initiator, self.target = pair
        random = np.random.default_rng(7)
        self.local = random.integers(0, 256, size, dtype=np.uint8)
        self.remote = random.integers(0, 256, size, dtype=np.uint8)
        self.local_desc = self.initiator.register_memory(self.local)
        remote_desc = self.target.register_memory(self.remote)
        self.remote_desc = MemoryDesc.unpack(remote_desc.pack())


def operations(memories, through_session):
    """Return what reads and writes: a session, or the engine with its memories."""
    if through_session:
        session = memories.initiator.create_session(memories.local_desc, memories.remote_desc)
        assert session.alive()
        return session

    class Engine:
        allocate_transfer_uid = memories.initiator.allocate_transfer_uid

        @staticmethod
        def _one(call, local, remote, size, uid):
            return call(memories.local_desc, local, memories.remote_desc, remote, size, uid)

        @staticmethod
        def _many(call, local, remote, sizes, uid):
            statuses = call(
                [memories.local_desc], [local], [memories.remote_desc], [remote], [sizes], [uid]
            )
            assert len(statuses) == 1
            return statuses[0]

        def read(self, *ranges):
            return self._one(memories.initiator.read, *ranges)

        def write(self, *ranges):
            return self._one(memories.initiator.write, *ranges)

        def batch_read(self, *ranges):
            return self._many(memories.initiator.batch_read, *ranges)

        def batch_write(self, *ranges):
            return self._many(memories.initiator.batch_write, *ranges)

    return Engine()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("is_batch", [True, False])
@pytest.mark.parametrize("through_session", [True, False])
def test_bytes_move_and_both_sides_learn_it(
    pair, through_session, is_batch, operation, count, size
):
    memories = Memories(pair, count * size)
    wanted = (memories.remote if operation == "read" else memories.local).copy()
    way = operations(memories, through_session)
    offsets, sizes = [size * at for at in range(count)], [size] * count
    transfers = []
    if is_batch:
        uid = way.allocate_transfer_uid()
        move = way.batch_read if operation == "read" else way.batch_write
        transfers.append((uid, move(offsets, offsets, sizes, uid)))
    else:
        move = way.read if operation == "read" else way.write
        for offset in offsets:
            uid = way.allocate_transfer_uid()
            transfers.append((uid, move(offset, offset, size, uid)))
    for uid, status in transfers:
        status.Wait()
        assert (status.Code(), status.Message()) == (StatusCode.SUCCESS, "success")
        told = until(lambda uid=uid: pair[1].pop_inbound_transfer_status("initiator", uid))
        assert told.Succeeded()
        again = pair[1].pop_inbound_transfer_status("initiator", uid)
        assert again is not None, "asking takes nothing away"
    assert (memories.local == wanted).all()
    assert (memories.remote == wanted).all()


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda numbers: np.array(numbers, np.int64),
        lambda numbers: np.array(numbers, np.int32),
        lambda numbers: np.array(numbers, np.uint16),
        lambda numbers: np.repeat(np.array(numbers), 2)[::2],
        lambda numbers: [np.int64(number) for number in numbers],
        lambda numbers: array.array("Q", numbers),
        lambda numbers: memoryview(array.array("l", numbers)),
        lambda numbers: range(numbers[0], numbers[-1] + 1, numbers[1] - numbers[0]),
    ],
)
def test_lists_may_have_every_form(pair, form):
    memories = Memories(pair, 4000)
    wanted = memories.remote.copy()
    for source, destination in ((0, 2000), (1000, 2500), (2000, 3000)):
        wanted[destination : destination + 10] = memories.local[source : source + 10]
    sizes = [10] * 3 if form([0, 1, 2]).__class__ is range else form([10, 10, 10])
    status = operations(memories, True).batch_write(
        form([0, 1000, 2000]), form([2000, 2500, 3000]), sizes, 0
    )
    status.Wait()
    assert status.Succeeded(), status.Message()
    assert (memories.remote == wanted).all()


@pytest.mark.parametrize(
    "wrong",
    [
        [-1],
        ["0"],
        [0.5],
        [None],
        [1 << 64],
        [0] * 100 + [-1],
        [0] * 100 + [1 << 64],
        [0] * 100 + [0.5],
        0,
        None,
        np.array([-1]),
        np.array([0.0]),
        np.array([[0]]),
        np.array([0], ">i8"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_offsets_is_a_type_error_and_moves_nothing(pair, wrong):
    memories = Memories(pair, 100)
    before = memories.remote.copy()
    for way in (operations(memories, True), operations(memories, False)):
        for lists in ((wrong, [0], [10]), ([0], wrong, [10]), ([0], [0], wrong)):
            with pytest.raises(TypeError):
                way.batch_write(*lists, 0)
        with pytest.raises(TypeError):
            way.write(-1, 0, 1, 0)
    assert (memories.remote == before).all()


@pytest.mark.parametrize("through_session", [True, False])
def test_ranges_outside_are_refused_and_nothing_moves(pair, through_session):
    memories = Memories(pair, 64)
    before = memories.remote.copy()
    way = operations(memories, through_session)
    for ranges in (
        ((0, 32), (0, 32), (32, 33)),
        ((0, 33), (0, 32), (32, 32)),
        ((0, 65), (0, 0), (1, 1)),
        ((0, (1 << 64) - 1), (0, 0), (1, 1)),
    ):
        for move in (way.batch_write, way.batch_read):
            status = move(*ranges, way.allocate_transfer_uid())
            status.Wait()
            assert status.Failed()
            assert status.Code() is StatusCode.ERR_INVALID_ARGS
            assert "length out of range" in status.Message()
    assert (memories.remote == before).all()


@pytest.mark.parametrize("through_session", [True, False])
def test_lists_of_unequal_length_fail_the_transfer(pair, through_session):
    memories = Memories(pair, 64)
    way = operations(memories, through_session)
    for lists in (([0, 8], [0], [8]), ([0], [0, 8], [8]), ([0], [0], [8, 8])):
        status = way.batch_write(*lists, 0)
        assert status.Code() is StatusCode.ERR_INVALID_ARGS
        expected = "lengths of local offsets, remote offsets or sizes mismatch"
        assert status.Message() == expected


def test_unequal_outer_lists_raise(pair):
    memories = Memories(pair, 64)
    near, far = memories.local_desc, memories.remote_desc
    whole = ([near], [[0]], [far], [[0]], [[8]], [0])
    for place in range(len(whole)):
        lists = list(whole)
        lists[place] = lists[place] * 2
        with pytest.raises(ValueError, match="equally long"):
            pair[0].batch_write(*lists)
    assert pair[0].batch_write([], [], [], [], [], []) == []


def test_an_empty_batch_succeeds_and_nobody_is_told(pair):
    memories = Memories(pair, 64)
    for way in (operations(memories, True), operations(memories, False)):
        uid = way.allocate_transfer_uid()
        assert way.batch_write([], [], [], uid).Succeeded()
        assert pair[1].pop_inbound_transfer_status("initiator", uid) is None


def test_each_pair_of_memories_has_a_status(pair):
    memories = [Memories(pair, 1000) for _ in range(3)]
    wanted = [each.local[100:200].copy() for each in memories]
    statuses = pair[0].batch_write(
        [each.local_desc for each in memories],
        [[100]] * 3,
        [each.remote_desc for each in memories],
        [[0], [50], [2000]],
        [[100]] * 3,
        [pair[0].allocate_transfer_uid() for _ in range(3)],
    )
    assert pair[0].wait_all(statuses) is StatusCode.ERR_INVALID_ARGS
    assert [status.Succeeded() for status in statuses] == [True, True, False]
    assert (memories[0].remote[:100] == wanted[0]).all()
    assert (memories[1].remote[50:150] == wanted[1]).all()


def test_numbers_of_transfers_count_from_zero_for_engine_and_sessions(pair):
    memories = Memories(pair, 64)
    session = pair[0].create_session(memories.local_desc, memories.remote_desc)
    one, other = pair[0].allocate_transfer_uid, session.allocate_transfer_uid
    assert [one(), other(), one()] == [0, 1, 2]


def test_without_a_backend_or_a_known_peer_there_is_no_way(pair):
    memories = Memories(pair, 64)
    message = "No available backend found, create backend first"

    def refused(engine, near):
        status = engine.write(near, 0, memories.remote_desc, 0, 8, 0)
        assert (status.Code(), status.Message()) == (StatusCode.ERR_BAD_STATE, message)
        assert engine.create_session(near, memories.remote_desc) is None

    bare = IOEngine("bare", IOEngineConfig("127.0.0.1", 0))
    memory = np.zeros(64, np.uint8)
    near = bare.register_memory(memory)
    bare.register_remote_engine(pair[1].get_engine_desc())
    refused(bare, near)
    bare.create_backend(BackendType.RDMA)
    status = bare.write(near, 0, memories.remote_desc, 0, 8, 0)
    status.Wait()
    assert status.Succeeded()
    bare.deregister_remote_engine(pair[1].get_engine_desc())
    refused(bare, near)
    bare.register_remote_engine(pair[1].get_engine_desc())
    bare.remove_backend(BackendType.RDMA)
    refused(bare, near)


def test_backends_need_no_device_and_unknown_ones_are_refused():
    engine = IOEngine("backends", IOEngineConfig("127.0.0.1", 0))
    engine.create_backend(BackendType.RDMA, RdmaBackendConfig(enable_notification=False))
    with pytest.warns(UserWarning, match="exists already"):
        engine.create_backend(BackendType.RDMA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.create_backend(BackendType.XGMI, XgmiBackendConfig())
        engine.create_backend(BackendType.FABRIC, FabricBackendConfig())
    for unknown in (BackendType.TCP, BackendType.Unknown):
        for config in (None, RdmaBackendConfig()):
            with pytest.raises(NotImplementedError):
                engine.create_backend(unknown, config)
    with pytest.raises(TypeError):
        engine.create_backend(2, RdmaBackendConfig())


@pytest.mark.parametrize(
    "config",
    [
        RdmaBackendConfig(notif_per_qp=0),
        RdmaBackendConfig(enable_transfer_chunking=True, chunk_bytes=4095),
    ],
)
def test_configurations_that_the_original_refuses_are_refused(config):
    engine = IOEngine("refused", IOEngineConfig("127.0.0.1", 0))
    with pytest.raises(RuntimeError):
        engine.create_backend(BackendType.RDMA, config)


def test_an_engine_that_wants_no_notifications_gets_none():
    quiet = RdmaBackendConfig(enable_notification=False)
    initiator, target = make_engine("initiator"), make_engine("target", config=quiet)
    initiator.register_remote_engine(target.get_engine_desc())
    memories = Memories((initiator, target), 64)
    status = initiator.write(memories.local_desc, 0, memories.remote_desc, 0, 64, 5)
    status.Wait()
    assert status.Succeeded()
    assert target.pop_inbound_transfer_status("initiator", 5) is None


def test_the_engine_says_its_real_port_and_a_taken_one_raises():
    engine = IOEngine(key="first", config=IOEngineConfig(host="127.0.0.1", port=0))
    desc = engine.get_engine_desc()
    assert (desc.key, desc.host) == ("first", "127.0.0.1")
    assert desc.port > 0
    with pytest.raises(RuntimeError, match="in use"):
        IOEngine("second", IOEngineConfig("127.0.0.1", desc.port))
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1|assign"):
        IOEngine("third", IOEngineConfig("192.0.2.1", 0))


def test_ipv6_and_names_are_hosts_too():
    for host in ("::1", "localhost"):
        one, other = make_engine("one", host), make_engine("other", host)
        one.register_remote_engine(other.get_engine_desc())
        memories = Memories((one, other), 64)
        uid = one.allocate_transfer_uid()
        status = one.write(memories.local_desc, 0, memories.remote_desc, 0, 64, uid)
        status.Wait()
        assert status.Succeeded()
        assert (memories.local == memories.remote).all()
        assert until(lambda: other.pop_inbound_transfer_status("one", uid))  # noqa: B023


def test_a_status_may_be_dropped_while_its_transfer_runs(pair):
    memories = Memories(pair, 32 << 20)
    offsets, sizes = np.arange(0, 32 << 20, 4096), np.full(8192, 4096)
    uid = pair[0].allocate_transfer_uid()
    pair[0].batch_write(
        [memories.local_desc], [offsets], [memories.remote_desc], [offsets], [sizes], [uid]
    )
    assert until(lambda: pair[1].pop_inbound_transfer_status("initiator", uid)).Succeeded()
    assert (memories.local == memories.remote).all()


def test_memory_is_kept_while_it_is_registered_and_no_longer(pair):
    class Kept(np.ndarray):
        """An array that can be watched."""

    memory = np.zeros(1 << 16, np.uint8).view(Kept)
    watched = weakref.ref(memory)
    desc = pair[0].register_memory(memory)
    del memory
    gc.collect()
    assert watched() is not None
    pair[0].deregister_memory(desc)
    gc.collect()
    assert watched() is None
    pair[0].deregister_memory(desc)


def test_deregistered_memory_is_neither_read_nor_written(pair):
    memories = Memories(pair, 64)
    before = memories.remote.copy()
    pair[1].deregister_memory(memories.remote_desc)
    status = pair[0].write(memories.local_desc, 0, memories.remote_desc, 0, 64, 0)
    status.Wait()
    assert status.Code() is StatusCode.ERR_NOT_FOUND
    pair[0].deregister_memory(memories.local_desc)
    status = pair[0].write(memories.local_desc, 0, memories.remote_desc, 0, 64, 0)
    assert status.Code() is StatusCode.ERR_NOT_FOUND
    assert (memories.remote == before).all()


def test_forged_descriptors_move_nothing(pair):
    memories = Memories(pair, 64)
    before = memories.remote.copy()
    packed = bytearray(memories.remote_desc.pack())
    # The first byte of the key: 16 bytes, the last that are no text.
    packed[packed.rindex(b"\xc4\x10") + 2] ^= 1
    forged = MemoryDesc.unpack(bytes(packed))
    status = pair[0].write(memories.local_desc, 0, forged, 0, 64, 0)
    status.Wait()
    assert status.Failed()
    assert (memories.remote == before).all()


class Tensor:
    """What is asked of a tensor of torch, on memory of numpy."""

    def __init__(self, memory, device="cpu", index=None):
        """Take an array for the tensor's data."""
        self.memory = memory
        self.device = type("device", (), {"type": device, "index": index})
        self.data_ptr = lambda: memory.ctypes.data
        self.nelement = lambda: memory.size
        self.element_size = lambda: memory.itemsize
        self.is_contiguous = lambda: memory.flags.c_contiguous


def test_tensors_register_as_their_own_kind():
    engine = make_engine("tensors")
    memory = np.ones((1, 2, 34, 56), np.float32)
    desc = engine.register_torch_tensor(Tensor(memory))
    assert (desc.engine_key, desc.device_id) == ("tensors", -1)
    assert (desc.data, desc.size) == (memory.ctypes.data, memory.nbytes)
    assert desc.loc is MemoryLocationType.CPU
    assert MemoryDesc.unpack(desc.pack()) == desc
    assert engine.register_memory(Tensor(memory)).size == memory.nbytes
    device = engine.register_torch_tensor(Tensor(memory, "cuda", 3))
    assert (device.device_id, device.loc) == (3, MemoryLocationType.GPU)
    for wrong in (Tensor(memory[..., ::2]), Tensor(memory, "xpu", 0)):
        with pytest.raises(RuntimeError):
            engine.register_torch_tensor(wrong)


def test_memory_that_cannot_be_registered_raises():
    engine = make_engine("memory")
    cpu = MemoryLocationType.CPU
    memory = np.zeros(64, np.uint8)
    assert engine.register_memory(bytearray(10)).size == 10
    assert engine.register_memory(memory, 32).size == 32
    for wrong, error in (
        ((0, 8, -1, cpu), RuntimeError),
        ((memory.ctypes.data, 0, -1, cpu), RuntimeError),
        ((0xDEAD_BEEF_0000, 4096, 0, MemoryLocationType.GPU), RuntimeError),
        ((memory.ctypes.data, 1 << 46, -1, cpu), RuntimeError),
        ((-1, 8, -1, cpu), TypeError),
        ((memory.ctypes.data, -8, -1, cpu), TypeError),
        ((memory.ctypes.data, 8, -1, 1), TypeError),
        ((memory.ctypes.data,), TypeError),
        ((memory, 65), ValueError),
        ((b"constant",), TypeError),
        ((memory[::2],), TypeError),
        ((np.zeros(0, np.uint8),), RuntimeError),
        (("text",), TypeError),
    ):
        with pytest.raises(error):
            engine.register_memory(*wrong)
    unknown = TransferStatus()
    assert unknown.Init()


@pytest.mark.parametrize("count", [31, 32, 5000])
@pytest.mark.parametrize("form", [list, np.array])
def test_long_lists_are_read_whole_and_in_order(pair, form, count):
    memories = Memories(pair, count * 2)
    wanted = memories.remote.copy()
    order = np.random.default_rng(count).permutation(count)
    wanted[order * 2] = memories.local[np.arange(count) * 2]
    sources, targets = (np.arange(count) * 2).tolist(), (order * 2).tolist()
    way = operations(memories, True)
    status = way.batch_write(form(sources), form(targets), form([1] * count), 0)
    status.Wait()
    assert status.Succeeded(), status.Message()
    assert (memories.remote == wanted).all()
