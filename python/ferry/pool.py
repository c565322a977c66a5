"""Memory that peers of one host can map."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from ferry import _ferry
from ferry.layout import Tensor

if TYPE_CHECKING:
    import numpy as np


class Pool:
    """A pool of bytes in shared memory, zero at first, or in a device's memory.

    Views of it keep it: it is given back when neither a view nor a rank nor a transfer needs it.
    What a peer writes appears in the views at any moment, so look only where a room has ended.
    """

    def __init__(self, nbytes: int, name: str = "ferry", *, device: str | None = None) -> None:
        """Take memory of the host, or of a device (`cuda:0`, `hip:1`), which is not zeroed.

        `MemoryError` if there is not enough, or no driver of the device.
        """
        if device is None or device == "cpu":
            self._native = _ferry.Pool(nbytes, name)
        else:
            self._native = _ferry.DevicePool(nbytes, device)

    @classmethod
    def from_fd(cls, fd: int, nbytes: int) -> Pool:
        """Map the pool of another process, whose descriptor stays the caller's."""
        pool = cls.__new__(cls)
        pool._native = _ferry.Pool.from_fd(fd, nbytes)
        return pool

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self._native.nbytes

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are in a device's memory, which the processor cannot read."""
        return isinstance(self._native, _ferry.DevicePool)

    @property
    def address(self) -> int:
        """Where the first byte is: in this process, or to the device."""
        return self._native.address

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out, wherever they are."""
        if self.is_on_device:
            return self._native.read(offset, nbytes)
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} leave a pool of {self.nbytes} bytes")
        return bytes(self.view()[offset : offset + nbytes])

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes in, wherever they are to be."""
        if self.is_on_device:
            self._native.write(offset, data)
        else:
            self.view()[offset : offset + len(data)] = data

    def fileno(self) -> int:
        """Return the descriptor of the memory, to hand to another process."""
        return self._native.fileno()

    def view(self) -> memoryview:
        """Return the bytes, to read and write; `BufferError` if they are a device's."""
        if self.is_on_device:
            raise BufferError("a device's memory cannot be viewed by the processor: read it")
        array_type = ctypes.c_ubyte * self.nbytes
        array = array_type.from_address(self._native.address)
        # The array does not know whose memory it shows.
        array.pool = self._native
        return memoryview(array).cast("B")

    def numpy(
        self, dtype: Any = "uint8", shape: tuple[int, ...] | None = None, offset: int = 0
    ) -> np.ndarray:
        """Return an array over the pool, or over a part of it; nothing is copied."""
        import numpy as np

        dtype = np.dtype(dtype)
        count = -1 if shape is None else math.prod(shape)
        flat = np.frombuffer(self.view(), dtype, count, offset)
        return flat if shape is None else flat.reshape(shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None and not copy else array.astype(dtype or array.dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Hand the bytes to another library, as its `from_dlpack` asks for."""
        if self.is_on_device:
            return self._native.__dlpack__()
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Say where it is."""
        if self.is_on_device:
            return self._native.__dlpack_device__()
        return self.numpy().__dlpack_device__()

    def tensor(self, offset: int, items: int, item_len: int) -> Tensor:
        """Describe `items` items (pages, slots or rows) of `item_len` bytes from `offset` on."""
        return Tensor(self, offset, items * item_len, item_len)

    def __repr__(self) -> str:
        return f"<Pool of {self.nbytes} bytes>"
