"""Shared memory and its views."""

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import ferry


def test_all_views_show_the_same_bytes():
    pool = ferry.Pool(4096, "views")
    assert pool.nbytes == 4096
    view, array = pool.view(), pool.numpy()
    assert not array.any()
    view[10:13] = b"abc"
    assert array[10:13].tobytes() == b"abc"
    wide = pool.numpy(np.int32, (4, 8), offset=128)
    wide[1, 2] = 77
    assert int.from_bytes(view[128 + 4 * 10 : 132 + 4 * 10], "little") == 77
    through_dlpack = np.from_dlpack(pool)
    through_dlpack[0] = 9
    assert view[0] == 9
    assert np.asarray(pool)[0] == 9
    assert pool.__dlpack_device__()[0] == 1
    with pytest.raises(ValueError):
        pool.numpy(np.int32, (1025,))


def test_views_keep_the_memory():
    pool = ferry.Pool(1 << 20, "kept-by-views")

    def is_mapped():
        return "kept-by-views" in Path("/proc/self/maps").read_text()

    view = pool.numpy(np.float32, (4, 4))
    del pool
    gc.collect()
    view[:] = 2.5
    assert view.sum() == 40
    assert is_mapped()
    del view
    gc.collect()
    assert not is_mapped()


def test_a_pool_is_shared_by_its_descriptor():
    pool = ferry.Pool(8192)
    same = ferry.Pool.from_fd(pool.fileno(), 8192)
    os.fstat(pool.fileno())
    pool.view()[5] = 1
    assert same.view()[5] == 1
    with mmap.mmap(pool.fileno(), 8192) as mapped:
        mapped[6] = 2
    assert same.view()[6] == 2
    with pytest.raises(MemoryError, match="8192"):
        ferry.Pool.from_fd(pool.fileno(), 1 << 20)
    with pytest.raises(OSError, match="descriptor"):
        ferry.Pool.from_fd(1 << 20, 8192)


def test_memory_that_does_not_exist_is_a_memory_error():
    with pytest.raises(MemoryError, match="available"):
        ferry.Pool(1 << 50)
    with pytest.raises(MemoryError):
        ferry.Pool(0)
    with pytest.raises(OverflowError):
        ferry.Pool(-1)
