"""From objects to the bytes that travel, with a limit: the control channel is not for tensors."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle

from slurm_ft.mesh.errors import NotPicklable, PayloadTooLarge

LIMIT = 16 * 2**20
"""Bytes of one call's arguments, or of one process's result, unless the call says otherwise."""


class _TooMuch(Exception):
    pass


class _Bounded(io.BytesIO):
    """Refuses to grow beyond the limit, so that an oversized object is not copied as a whole first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, data: Any) -> int:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self._left -= size
        if self._left < 0:
            raise _TooMuch
        return super().write(data)


def dump(value: Any, limit: int, what: str) -> bytes:
    """Pickle by cloudpickle. `what` names the value in errors, as in "the arguments of step".

    Raises NotPicklable and PayloadTooLarge.
    """
    buffer = _Bounded(limit)
    try:
        cloudpickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except _TooMuch:
        raise PayloadTooLarge(
            f"{what}: more than the limit of {limit / 2**20:g} MiB that one message of the control channel may have",
            "have the processes load or make large data themselves, or exchange it with torch.distributed; "
            "`options(limit=bytes)` raises the limit of one call",
        ) from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotPicklable(
            f"{what} cannot be pickled: {reason}",
            "locks, open files, sockets and generators cannot travel: make them inside the function",
        ) from error
    return buffer.getvalue()
