"""What can go wrong between a client and the processes of its mesh.

    MeshError                     1
    ├── ActorError                the user's function raised over there; carries its traceback
    │   └── ResultError           it returned, but its result cannot be brought here
    ├── SupervisionError          the process, not the function, failed; carries a MeshFailure
    ├── MeshFailure               a failure that nobody repaired; handed to `on_failure`, raised on next use
    └── CallTimeout               a call was not answered in its time (also a TimeoutError)
    NotPicklable, PayloadTooLarge 2    what was asked cannot be sent (UsageErrors)

The split between ActorError and SupervisionError is Monarch's: the first is a bug to mend, the second a
process to replace.
"""

from __future__ import annotations

from slurm_ft.errors import SlurmFTError, UsageError
from slurm_ft.mesh.extent import Point


class MeshError(SlurmFTError):
    """Anything that a call can give instead of a value. `point` is the place in the called mesh."""

    point: Point | None = None


class ActorError(MeshError):
    """The function raised in a process. `exception` is what it raised, None if that could not be brought here.

    `traceback` is the text of the remote traceback, `host` where the process ran.
    """

    def __init__(self, what: str, point: Point, host: str, exception: BaseException | None, traceback: str) -> None:
        super().__init__(f"{what} at {point} on {host}\n{traceback}".rstrip())
        self.point, self.host, self.exception, self.traceback = point, host, exception, traceback


class ResultError(ActorError):
    """A function returned, but its result could not be pickled there, or not be unpickled here."""


class MeshFailure(MeshError):
    """A process or a host that failed.

    `point` is the place in the whole mesh of the failed process (of the first one of a failed host), and
    `points` are all places concerned. `kind` is "process" or "host". `code` (its exit code) and `signal` are None
    when nobody saw the end of the process.
    """

    def __init__(
        self,
        mesh_name: str,
        points: tuple[Point, ...],
        host: str,
        cause: str,
        *,
        kind: str = "process",
        code: int | None = None,
        signal: int | None = None,
        incarnation: int = 0,
        log: str = "",
    ) -> None:
        self.mesh_name, self.points, self.host, self.cause, self.kind = mesh_name, points, host, cause, kind
        self.code, self.signal, self.incarnation, self.log = code, signal, incarnation, log
        self.why = ""
        super().__init__(cause, "")
        self.point = points[0]

    def report(self) -> str:
        """What happened, in one line."""
        place = f"the process at {self.point} on {self.host}" if self.kind == "process" else f"the host {self.host}"
        why = f" ({self.why})" if self.why else ""
        return f"mesh {self.mesh_name}: {place} failed: {self.cause}{why}"

    def format_message(self) -> str:
        return self.report()

    def __str__(self) -> str:
        return self.report()


class SupervisionError(MeshError):
    """A process was lost before it answered. `failure` says how."""

    def __init__(self, point: Point, failure: MeshFailure) -> None:
        super().__init__(f"no answer from {point}: {failure.report()}", "slices without this process keep working")
        self.point, self.failure = point, failure


class CallTimeout(MeshError, TimeoutError):
    """A process did not answer within the call's time-out."""

    def __init__(self, what: str, point: Point, seconds: float) -> None:
        super().__init__(
            f"{what} was not answered by {point} within {seconds:g} s",
            "the call was cancelled there; `restart()` on that slice makes sure",
        )
        self.point, self.seconds = point, seconds


class NotPicklable(UsageError):
    """A function or its arguments cannot be sent."""


class PayloadTooLarge(UsageError):
    """More than `limit` bytes were about to be sent through the control channel."""
