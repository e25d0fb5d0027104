"""Errors of the native bridge: one class for each thing a caller can act on.

The tree:

    NativeError            anything; `status` is the number that the library gave
    ├── Unavailable        no library, no driver or no device
    ├── Unsupported        this library, driver or device cannot do it
    ├── InvalidUse         a wrong argument, or a handle that is closed
    ├── OutOfMemory
    ├── TimedOut           not finished in time; it still runs
    ├── PeerLost           a peer died, left or aborted
    └── Aborted            this communicator was aborted or closed here
"""

from __future__ import annotations

from enum import IntEnum

from slurm_ft.errors import SlurmFTError


class Status(IntEnum):
    """The statuses of `slurm_ft_native.h`."""

    OK = 0
    IN_PROGRESS = 1
    INVALID = 2
    BAD_HANDLE = 3
    UNSUPPORTED = 4
    ABSENT = 5
    NO_MEMORY = 6
    TIMEOUT = 7
    REMOTE = 8
    ABORTED = 9
    SYSTEM = 10
    DRIVER = 11
    COLLECTIVE = 12
    INTERNAL = 13


class NativeError(SlurmFTError):
    """A call of the native library failed."""

    def __init__(self, message: str, status: Status = Status.INTERNAL, hint: str = "") -> None:
        super().__init__(message, hint)
        self.status = status


class Unavailable(NativeError):
    """There is no such library, driver or device here."""


class Unsupported(NativeError):
    """This library, driver or device cannot do it."""


class InvalidUse(NativeError):
    """A wrong argument, or something that is closed already."""


class OutOfMemory(NativeError):
    """There is not enough memory."""


class TimedOut(NativeError):
    """Not finished within the time given. It still runs."""


class PeerLost(NativeError):
    """A peer died, left or aborted."""


class Aborted(NativeError):
    """This communicator was aborted or closed here."""


CLASSES: dict[Status, type[NativeError]] = {
    Status.ABSENT: Unavailable,
    Status.UNSUPPORTED: Unsupported,
    Status.INVALID: InvalidUse,
    Status.BAD_HANDLE: InvalidUse,
    Status.NO_MEMORY: OutOfMemory,
    Status.TIMEOUT: TimedOut,
    Status.REMOTE: PeerLost,
    Status.ABORTED: Aborted,
}


def error_of(status: int, text: str) -> NativeError:
    """The error for a status that a library gave."""
    known = Status(status) if status in Status._value2member_map_ else Status.INTERNAL
    return CLASSES.get(known, NativeError)(text, known)
