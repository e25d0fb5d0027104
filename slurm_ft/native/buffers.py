"""What a collective works on: the address, number and type of the elements of some object, without importing torch.

An object is taken when it is a `Region` (a part of a `Memory`), when it looks like a tensor (`data_ptr`, `numel`,
`dtype`, `is_contiguous`), or when it has a writable, contiguous buffer with a format that is known here.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from slurm_ft.native.errors import InvalidUse, Status

# Numbers and sizes of `sft_type`.
TYPES = {
    "int8": (0, 1),
    "uint8": (1, 1),
    "int32": (2, 4),
    "uint32": (3, 4),
    "int64": (4, 8),
    "uint64": (5, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "float64": (8, 8),
    "bfloat16": (9, 2),
}
REDUCTIONS = {"sum": 0, "product": 1, "max": 2, "min": 3}

_FORMATS = {"b": "int8", "B": "uint8", "c": "uint8", "i": "int32", "I": "uint32", "e": "float16", "f": "float32"}
_FORMATS |= {"d": "float64", "q": "int64", "Q": "uint64", "l": "int64", "L": "uint64"}


class Region(NamedTuple):
    """Elements at an address. `owner` keeps what is there alive."""

    address: int
    length: int
    dtype: str
    owner: Any


def size_of(dtype: str) -> int:
    if dtype not in TYPES:
        raise InvalidUse(f"no element type {dtype}; there are {', '.join(TYPES)}", Status.INVALID)
    return TYPES[dtype][1]


def region_of(data: Any) -> Region:
    """Where the elements of `data` are."""
    if isinstance(data, Region):
        size_of(data.dtype)
        return data
    if hasattr(data, "data_ptr"):
        return _tensor(data)
    return _buffer(data)


def _tensor(data: Any) -> Region:
    if not data.is_contiguous():
        raise InvalidUse("the tensor is not contiguous", Status.INVALID)
    dtype = str(data.dtype).rpartition(".")[2]
    size_of(dtype)
    return Region(int(data.data_ptr()), int(data.numel()), dtype, data)


def _buffer(data: Any) -> Region:
    try:
        view = memoryview(data)
    except TypeError as error:
        raise InvalidUse(f"{type(data).__name__} is no buffer", Status.INVALID) from error
    dtype = _FORMATS.get(view.format.lstrip("@=<"))
    if dtype is None or view.readonly or not view.c_contiguous or size_of(dtype) != view.itemsize:
        raise InvalidUse("a collective needs a writable, contiguous buffer of a known type", Status.INVALID)
    if view.nbytes == 0:
        return Region(0, 0, dtype, view)
    # The export that from_buffer takes keeps the memory from being moved or freed.
    flat = view.cast("B")
    raw = (ctypes.c_ubyte * view.nbytes).from_buffer(flat)
    return Region(ctypes.addressof(raw), view.nbytes // view.itemsize, dtype, raw)
