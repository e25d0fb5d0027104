"""Live tensors in GPU memory that outlives its process. Unproven on hardware: it was run on the host library only.

The rank allocates with the GPU's virtual memory API (slurm_ft.native.memory) and the keeper holds the exported
descriptor; it opens no GPU itself. A word at the start of the memory says what the tensors hold, as the commit word
on the host does, but it is set in the order of the stream: the host runs ahead of the GPU, and what the GPU had
done when the rank died is what counts. The host's records are kept for the last `RING` steps, and the word says
which of them is the one of these tensors.

Tensors that an optimizer has on the host beside (Adam's step counters) go into the record: they would be ahead.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from slurm_ft.native import Library, Memory
from slurm_ft.train.kept.layout import PAGE, Entry, Layout
from slurm_ft.train.kept.record import dtype_of

RING = 8
WORD = 1 << 32


class Span:
    """Bytes of a GPU, as what torch takes without a copy. Keeps the memory alive."""

    def __init__(self, memory: Memory, address: int, size: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DeviceMemory:
    """One allocation: a page with the word, then tensors."""

    def __init__(self, memory: Memory, layout: Layout) -> None:
        self.memory, self.layout = memory, layout

    @classmethod
    def create(cls, library: Library, layout: Layout, device: int) -> DeviceMemory:
        """Raises NativeError when the GPU has no room."""
        made = cls(Memory.create(library, PAGE + max(layout.size, PAGE), device), layout)
        made.mark(1, 0)
        return made

    @classmethod
    def adopt(cls, library: Library, descriptor: int, layout: Layout, device: int) -> DeviceMemory:
        """Map what another process has made; the descriptor stays the caller's. Raises NativeError."""
        return cls(Memory.adopt(library, descriptor, PAGE + max(layout.size, PAGE), device), layout)

    def mark(self, value: int, stream: int) -> None:
        """Set the word, behind everything that is in the stream."""
        self.memory.flag(value % WORD, 0, stream)

    @property
    def word(self) -> int:
        return int.from_bytes(self.memory.read(4), "little")

    def view(self, entry: Entry) -> torch.Tensor:
        """A tensor that is this part of the memory."""
        dtype = dtype_of(entry.dtype)
        if not entry.numel:
            return torch.empty(entry.shape, dtype=dtype, device=self._torch_device)
        address = self.memory.address + PAGE + entry.offset
        if self.memory.library.platform == "host":
            raw = (ctypes.c_ubyte * entry.size).from_address(address)
            raw.owner = self.memory  # type: ignore[attr-defined]
            flat: Any = torch.frombuffer(raw, dtype=torch.uint8)
        else:
            flat = torch.as_tensor(Span(self.memory, address, entry.size), device=self._torch_device)
        view: torch.Tensor = flat.view(dtype).as_strided(entry.shape, entry.stride)
        return view

    @property
    def _torch_device(self) -> str:
        # torch calls ROCm's devices "cuda" too.
        return "cpu" if self.memory.library.platform == "host" else f"cuda:{self.memory.device}"
