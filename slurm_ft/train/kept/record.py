"""The small part of a kept state as bytes and back: JSON with tags for what JSON has not.

Numbers, texts, lists, tuples, dicts, bytes and tensors come back bit for bit. Nothing in it can run code when it is
read, other than with pickle.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

TAG = "~"


class Unkeepable(ValueError):
    """A value that a record cannot hold; the words say which."""


def encode(value: Any) -> bytes:
    """Raises Unkeepable for a value of another kind."""
    return json.dumps(_plain(value, "the state"), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Raises ValueError for damaged data."""
    return _rich(json.loads(data))


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item, place) for item in value]
    if isinstance(value, tuple):
        return {TAG: "tuple", "v": [_plain(item, place) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
        pairs = [[_plain(key, place), _plain(item, f"{place}[{key!r}]")] for key, item in value.items()]
        return {TAG: "dict", "v": pairs}
    if isinstance(value, bytes | bytearray | memoryview):
        return {TAG: "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        name = str(flat.dtype).removeprefix("torch.")
        return {TAG: "tensor", "d": name, "s": list(flat.shape), "v": base64.b64encode(raw).decode()}
    if hasattr(value, "item") and hasattr(value, "dtype"):  # a number of numpy's
        return _plain(value.item(), place)
    raise Unkeepable(f"{place} holds a {type(value).__name__}, which cannot be kept")


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: _rich(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(_rich(item) for item in value["v"])
    if kind == "dict":
        return {_rich(key): _rich(item) for key, item in value["v"]}
    raw = base64.b64decode(value["v"])
    if kind == "bytes":
        return raw
    if kind != "tensor":
        raise ValueError(f"the tag {kind!r} is unknown")
    dtype = dtype_of(value["d"])
    if not raw:
        return torch.empty(value["s"], dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(value["s"])


def dtype_of(name: str) -> torch.dtype:
    """`float32` as torch's. Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {name!r}")
    return dtype
