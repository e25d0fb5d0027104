"""A state as a skeleton of plain JSON and a row of bytes.

The skeleton has dicts, lists, tuples, numbers and strings in place, and a reference where a tensor is. The
tensors' bytes follow one another in the order of the references; `Row` cuts them into chunks, without copying
one. A value that is nothing of this kind is kept as torch.save writes it, and read with weights_only: so a
donor cannot have a receiver run code, and a value that needs code to be read is an error that names it.
"""

from __future__ import annotations

import base64
import ctypes
import io
import math
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_ft.train.transport.wire import TransportError

CHUNK_BYTES = 4 << 20
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Skeleton = dict[str, Any]


def _saved(value: Any) -> str:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _loaded(text: str, path: str) -> Any:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:
        [line] = re.findall(r"WeightsUnpickler error: (.*?)(?:\. Please|$)", str(error), re.MULTILINE)[:1] or [error]
        raise TransportError(
            f"the value at {path} is of a kind that is not read from a peer ({line}); "
            "if you trust its class, allow it with torch.serialization.add_safe_globals"
        ) from None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether shape, dtype and bytes are all there is to this tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
    )


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether bytes can be put into this tensor as they are."""
    plain = _is_plain(tensor) and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.device.type == "cpu" and tensor.is_contiguous()


def take_apart(state: Any) -> tuple[Skeleton, list[torch.Tensor]]:
    """The skeleton of a state and its tensors: contiguous, on the CPU, sharing memory where they can."""
    tensors: list[torch.Tensor] = []

    def reference(tensor: torch.Tensor) -> int:
        tensors.append(tensor.detach().resolve_conj().resolve_neg().contiguous().cpu())
        return len(tensors) - 1

    def walk(value: Any) -> Skeleton:
        if value is None or type(value) in (bool, int, float, str):
            return {"v": value}
        if type(value) is bytes:
            return {"b": base64.b64encode(value).decode()}
        if type(value) in (dict, OrderedDict):
            return {"d" if type(value) is dict else "od": [[walk(key), walk(item)] for key, item in value.items()]}
        if type(value) in (list, tuple):
            return {"l" if type(value) is list else "t": [walk(item) for item in value]}
        if isinstance(value, DTensor):
            local = value.to_local()
            return {"dt": {**describe(local), "spec": _saved(value._spec)}}
        if isinstance(value, torch.Tensor) and _is_plain(value):
            return {"x": describe(value)}
        return {"p": _saved(value)}

    def describe(tensor: torch.Tensor) -> dict[str, Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"n": reference(tensor), "dtype": dtype, "shape": list(tensor.shape)}

    with torch.no_grad():
        return walk(state), tensors


def _new(told: dict[str, Any], own: Any) -> torch.Tensor:
    """A place for a tensor: `own` where it fits, else new memory."""
    dtype, shape = _DTYPES.get(told["dtype"]), tuple(told["shape"])
    if dtype is None or any(not isinstance(size, int) or size < 0 for size in shape):
        raise TransportError(f"the peer sends a tensor of an unknown kind: {told['dtype']} {shape}")
    if isinstance(own, torch.Tensor) and own.dtype == dtype and tuple(own.shape) == shape and _is_writable(own):
        return own.detach()
    return torch.empty(shape, dtype=dtype)


def put_together(skeleton: Skeleton, own: Any = None) -> tuple[Any, list[torch.Tensor]]:
    """The state of this skeleton and its tensors, which are still to be filled.

    A tensor of `own`, the receiver's state, is used in place where path, shape and dtype are the same.
    Raises TransportError for a skeleton that is damaged or has a value that may not be read.
    """
    tensors: dict[int, torch.Tensor] = {}

    def place(told: dict[str, Any], mine: Any) -> torch.Tensor:
        tensor = tensors[told["n"]] = _new(told, mine)
        return tensor

    def walk(node: Skeleton, mine: Any, path: str) -> Any:
        [(kind, told)] = node.items()
        if kind == "v":
            return told
        if kind in ("d", "od"):
            items = ((walk(key, None, path), item) for key, item in told)
            known = mine if isinstance(mine, dict) else {}
            pairs = ((key, walk(item, known.get(key), f"{path}.{key}")) for key, item in items)
            return dict(pairs) if kind == "d" else OrderedDict(pairs)
        if kind in ("l", "t"):
            places = mine if isinstance(mine, (list, tuple)) and len(mine) == len(told) else [None] * len(told)
            row = [walk(item, places[i], f"{path}.{i}") for i, item in enumerate(told)]
            return row if kind == "l" else tuple(row)
        if kind == "b":
            return base64.b64decode(told)
        if kind == "x":
            return place(told, mine)
        if kind == "dt":
            local = place(told, mine.to_local() if isinstance(mine, DTensor) else None)
            # The receiver's own mesh is the right one; a mesh from a peer has the peer's groups.
            spec = mine._spec if isinstance(mine, DTensor) else _loaded(told["spec"], path)
            return DTensor(local, spec, requires_grad=False)
        if kind == "p":
            return _loaded(told, path)
        raise TransportError(f"the peer's state has something unknown at {path}")

    try:
        with torch.no_grad():
            state = walk(skeleton, own, "state")
        return state, [tensors[number] for number in range(len(tensors))]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise TransportError(f"the peer's description of its state is damaged: {error}") from None


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to read and to write. Valid as long as the tensor is."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class Row:
    """The bytes of some tensors one after another, cut into chunks. Holds the tensors."""

    def __init__(self, tensors: list[torch.Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._tensors = tensors
        self._views = [view for tensor in tensors if len(view := byte_view(tensor))]
        self._starts = [0]
        for view in self._views:
            self._starts.append(self._starts[-1] + len(view))
        self.bytes = self._starts[-1]
        self.chunk_bytes = chunk_bytes
        self.chunks = math.ceil(self.bytes / chunk_bytes)

    def pieces(self, chunk: int) -> list[memoryview]:
        """The memory of one chunk, in order. Raises IndexError for a chunk that there is not."""
        if not 0 <= chunk < self.chunks:
            raise IndexError(f"there is no chunk {chunk} in {self.chunks}")
        first, last = chunk * self.chunk_bytes, min((chunk + 1) * self.chunk_bytes, self.bytes)
        return list(self._between(first, last))

    def _between(self, first: int, last: int) -> Iterator[memoryview]:
        place = bisect_right(self._starts, first) - 1
        while first < last:
            start = self._starts[place]
            piece = self._views[place][first - start : last - start]
            yield piece
            first += len(piece)
            place += 1
