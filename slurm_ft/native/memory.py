"""Memory of a device that outlives the process that made it.

Whoever holds a descriptor from `export` keeps the memory alive: the keeper does, and the next attempt of a rank imports
it. On the host it is a memfd; on a GPU an allocation of the virtual memory API. A `Memory` owns its handle: use it in a
`with` block or call `close`. Descriptors that `export` and `dma_buf` give out belong to the caller.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from types import TracebackType
from typing import Any, NamedTuple, Self

from slurm_ft.native.buffers import Region, size_of
from slurm_ft.native.errors import InvalidUse, Status, Unsupported
from slurm_ft.native.library import Library, MemoryInfo

POPULATE = 1


class DmaBuf(NamedTuple):
    """A dma-buf of a whole allocation, and where in it the asked address is: register all, add the offset yourself."""

    fd: int
    offset: int
    bytes: int


class Memory:
    """One allocation. `create` makes it, `adopt` maps one that another process exported."""

    def __init__(self, library: Library, handle: int) -> None:
        self.library = library
        self._handle = handle
        self._closer = weakref.finalize(self, _close, library, handle, os.getpid())
        self._closer.atexit = False
        info = self._info()
        self.address, self.bytes, self.reserved = int(info.address), int(info.bytes), int(info.reserved)
        self.device, self.imported = int(info.device), bool(info.imported)

    @classmethod
    def create(cls, library: Library, size: int, device: int = 0, populate: bool = False) -> Self:
        """`populate` takes all pages of host memory now: a lack of memory is an error here and no signal later."""
        handle = ctypes.c_uint64()
        flags = POPULATE if populate else 0
        library.call("sft_memory_create", device, _unsigned(size), flags, ctypes.byref(handle))
        return cls(library, handle.value)

    @classmethod
    def adopt(cls, library: Library, fd: int, size: int, device: int = 0) -> Self:
        """Map what another process exported. `fd` stays the caller's and may be closed at once."""
        handle = ctypes.c_uint64()
        library.call("sft_memory_import", device, fd, _unsigned(size), ctypes.byref(handle))
        return cls(library, handle.value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closer.alive:
            self.close()

    def close(self) -> None:
        """Unmap it here. It lives on while a descriptor of it is open anywhere. A second close is an error."""
        self._closer.detach()
        self.library.call("sft_memory_close", self._handle)

    def export(self) -> int:
        """A new descriptor of the same memory. The caller closes it."""
        fd = ctypes.c_int()
        self.library.call("sft_memory_export", self._handle, ctypes.byref(fd))
        return fd.value

    def write(self, data: Any, offset: int = 0) -> None:
        """Copy a buffer's bytes in."""
        source = bytes(data)
        self.library.call("sft_memory_write", self._handle, _unsigned(offset), source, len(source))

    def read(self, size: int | None = None, offset: int = 0) -> bytes:
        """Copy bytes out; to the end without a size."""
        count = _unsigned(self.bytes - offset if size is None else size)
        if count > self.bytes:
            raise InvalidUse(f"{count} bytes of a memory of {self.bytes}", Status.INVALID)
        target = ctypes.create_string_buffer(max(count, 1))
        self.library.call("sft_memory_read", self._handle, _unsigned(offset), target, count)
        return target.raw[:count]

    def flag(self, value: int, offset: int = 0, stream: int = 0) -> None:
        """Set an aligned 32-bit word in the order of a stream, such as a mark around `optimizer.step()`."""
        if not 0 <= value < 1 << 32:
            raise InvalidUse(f"a flag of {value}", Status.INVALID)
        self.library.call("sft_memory_flag", self._handle, _unsigned(offset), value, stream)

    def view(self) -> mmap.mmap:
        """Host memory as a writable buffer (`torch.frombuffer` takes it).

        It is a mapping of its own and stays valid after `close` for as long as anything refers to it.
        """
        if self.library.platform != "host":
            raise Unsupported("memory of a GPU has no view on the host: use read and write", Status.UNSUPPORTED)
        fd = self.export()
        try:
            return mmap.mmap(fd, self.bytes)
        finally:
            os.close(fd)

    def region(self, dtype: str, offset: int = 0, count: int | None = None) -> Region:
        """A part of it as elements, for collectives."""
        self._info()
        size = size_of(dtype)
        elements = (self.bytes - offset) // size if count is None else count
        if offset < 0 or elements < 0 or offset % size or offset + elements * size > self.bytes:
            raise InvalidUse(f"{elements} {dtype} at {offset} do not lie in {self.bytes} bytes", Status.INVALID)
        return Region(self.address + offset, elements, dtype, self)

    def dma_buf(self, offset: int = 0, size: int | None = None) -> DmaBuf:
        """For the registration of a part with an RDMA device. The caller closes the descriptor."""
        self._info()
        count = self.bytes - offset if size is None else size
        return dma_buf(self.library, self.address + offset, count, self.device)

    def _info(self) -> MemoryInfo:
        info = MemoryInfo()
        self.library.call("sft_memory_info_of", self._handle, ctypes.byref(info))
        return info


def dma_buf(library: Library, address: int, size: int, device: int = 0) -> DmaBuf:
    """A dma-buf of the whole allocation in which `address` lies, also of one that torch made."""
    fd, offset, whole = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_uint64()
    library.call("sft_dmabuf", device, address, size, ctypes.byref(fd), ctypes.byref(offset), ctypes.byref(whole))
    return DmaBuf(fd.value, offset.value, whole.value)


def _unsigned(value: int) -> int:
    if value < 0 or value >= 1 << 63:
        raise InvalidUse(f"{value} bytes", Status.INVALID)
    return value


def _close(library: Library, handle: int, owner: int) -> None:
    """For an object that nobody closed. In a forked child the handle is not ours to give back."""
    if os.getpid() == owner:
        library.call("sft_memory_close", handle)
