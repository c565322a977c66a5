"""Device memory, over the stand-in for its drivers: pools of ours, and tensors of others."""

import ctypes
import gc
import os
import re
import types

import numpy as np
import pytest

import ferry

LIBRARY = os.environ.get("FERRY_STAND_IN_LIBRARY")
NBYTES = 1 << 20

pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="FERRY_STAND_IN_LIBRARY names no stand-in; make test-python does"
)

if LIBRARY is not None:
    # Read when the first device is asked for.
    os.environ.setdefault("FERRY_CUDA_LIBRARY", LIBRARY)
    os.environ.setdefault("FERRY_HIP_LIBRARY", LIBRARY)


def live_allocations():
    """Return how many allocations the stand-in holds in this process."""
    get = ctypes.CDLL(LIBRARY).ferry_stand_in_get
    get.restype = ctypes.c_uint64
    return get(b"live")


def pattern(salt):
    """Return bytes that differ from place to place."""
    return bytes((at * 31 + at // 251 + salt) % 256 for at in range(NBYTES))


@pytest.mark.parametrize(("device", "kind"), [("cuda:1", 2), ("hip:0", 10)])
def test_a_pool_on_a_device_is_read_and_written_and_never_viewed(device, kind):
    pool = ferry.Pool(NBYTES, device=device)
    assert pool.is_on_device
    assert pool.nbytes == NBYTES
    pool.write(0, pattern(1))
    pool.write(4095, b"across")
    wanted = bytearray(pattern(1))
    wanted[4095:4101] = b"across"
    assert pool.read(0, NBYTES) == wanted
    assert pool.__dlpack_device__() == (kind, int(device[-1]))
    for view in (pool.view, pool.numpy):
        with pytest.raises(BufferError, match="device"):
            view()
    with pytest.raises(MemoryError, match="leave device memory"):
        pool.read(NBYTES - 1, 2)


def test_a_device_that_is_not_there_is_an_error_with_the_drivers_words():
    with pytest.raises(MemoryError, match=re.escape("CUDA_ERROR_INVALID_DEVICE (101)")):
        ferry.Pool(4096, device="cuda:7")
    with pytest.raises(ValueError, match="no device"):
        ferry.Pool(4096, device="abacus:0")


def test_a_capsule_says_where_the_bytes_are_and_keeps_them():
    before = live_allocations()
    pool = ferry.Pool(NBYTES, device="cuda:1")
    address = pool.address
    assert live_allocations() == before + 1
    capsule = pool.__dlpack__()
    del pool
    gc.collect()
    assert live_allocations() == before + 1, "the capsule keeps the memory"
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    fields = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_uint64))
    kind, number = fields[1] & 0xFFFFFFFF, fields[1] >> 32
    assert (fields[0], kind, number) == (address, 2, 1)
    # One dimension of unsigned bytes, one lane.
    assert fields[2] & 0xFFFFFFFF == 1
    assert (fields[2] >> 32).to_bytes(4, "little") == bytes([1, 8, 1, 0])
    assert ctypes.cast(fields[3], ctypes.POINTER(ctypes.c_int64))[0] == NBYTES
    # Whoever takes it gives it another name, and calls the deleter when it is done.
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    name = b"used_dltensor"
    assert rename(capsule, name) == 0
    managed = ctypes.addressof(fields.contents)
    delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(fields[7])
    del capsule
    gc.collect()
    assert live_allocations() == before + 1, "its taker keeps the memory"
    delete(managed)
    gc.collect()
    assert live_allocations() == before
    unused = ferry.Pool(NBYTES, device="cuda:0").__dlpack__()
    del unused
    gc.collect()
    assert live_allocations() == before, "a capsule that nobody took lets go by itself"


class Tensor:
    """What a library of tensors shows of one on a device."""

    def __init__(self, pool, index):
        """Show a pool."""
        self.pool = pool
        self.device = types.SimpleNamespace(type="cuda", index=index)
        self.data_ptr = lambda: pool.address
        self.nelement = lambda: pool.nbytes // 2
        self.element_size = lambda: 2
        self.is_contiguous = lambda: True


@pytest.mark.parametrize("runtime", ["cuda", "hip"])
def test_tensors_of_devices_are_registered_and_moved(pair, runtime):
    from ferry.mori_compat.io import MemoryDesc, MemoryLocationType

    initiator, target = pair
    pools = [ferry.Pool(NBYTES, device=f"{runtime}:{number}") for number in (0, 1)]
    pools[0].write(0, pattern(3))
    pools[1].write(0, pattern(4))
    # ROCm's tensors say "cuda", too; the number is left to the driver where there is none.
    local = initiator.register_torch_tensor(Tensor(pools[0], 0))
    remote = target.register_torch_tensor(Tensor(pools[1], None))
    assert remote.loc == MemoryLocationType.GPU
    assert (local.device_id, remote.device_id) == (0, 1)
    remote = MemoryDesc.unpack(remote.pack())
    uid = initiator.allocate_transfer_uid()
    status = initiator.write(local, 100, remote, 7, NBYTES - 4096, uid)
    status.Wait()
    assert status.Succeeded(), status.Message()
    wanted = bytearray(pattern(4))
    wanted[7 : 7 + NBYTES - 4096] = pattern(3)[100 : 100 + NBYTES - 4096]
    assert pools[1].read(0, NBYTES) == wanted
    initiator.deregister_memory(local)
    with pytest.raises(RuntimeError, match="no device's memory"):
        initiator.register_memory(0x1000, 64, 0, MemoryLocationType.GPU)


def test_numpy_is_not_fooled():
    pool = ferry.Pool(4096, device="cuda:0")
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(pool)
