"""The client's record of calls under way: who was asked, who has answered, when to give up.

Used in the mesh's loop only. A call is over when nobody is waited for; its answers are kept as they came
and made into values by whoever asks for them (see `slurm_ft.mesh.futures`).
"""

from __future__ import annotations

import concurrent.futures
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from slurm_ft.mesh.errors import ActorError, MeshError, MeshFailure, ResultError
from slurm_ft.mesh.extent import Point, Region
from slurm_ft.mesh.values import ValueMesh


@dataclass(frozen=True)
class Answer:
    """What one process answered, or, as `error`, why it did not. Not unpickled yet."""

    payload: bytes = b""
    refusal: dict[str, Any] | None = None
    host: str = ""
    error: MeshError | None = None

    def value(self, what: str, point: Point) -> Any:
        """The value. Raises the error that there is instead."""
        if self.error is not None:
            raise self.error
        if self.refusal is not None:
            kind = ResultError if self.refusal.get("unsendable") else ActorError
            words = f"{what}: {self.refusal['error']}"
            raise kind(words, point, self.host, self._exception(), self.refusal["trace"])
        try:
            return pickle.loads(self.payload)
        except Exception as error:
            words = f"the result of {what} cannot be unpickled here: {type(error).__name__}: {error}"
            raise ResultError(words, point, self.host, error, "") from error.with_traceback(None)

    def _exception(self) -> BaseException | None:
        try:
            found = pickle.loads(self.payload) if self.payload else None
        except Exception:  # its class exists only there, or wants other arguments
            return None
        return found if isinstance(found, BaseException) else None


Raw = dict[int, Answer]
"""Answers by the number of the place in the whole mesh."""


class Call:
    """One call to the places of a region. `on_answer` hears of each answer as it comes."""

    def __init__(
        self,
        number: int,
        region: Region,
        what: str,
        on_answer: Callable[[int, Answer], None] | None = None,
    ) -> None:
        self.number, self.region, self.what = number, region, what
        self.points = list(region)
        self.places = {index: rank for rank, index in enumerate(self.points)}
        self.waiting = set(self.points)
        self.raw: concurrent.futures.Future[Raw] = concurrent.futures.Future()
        self.cancelled = False
        self.lost: dict[int, MeshFailure] = {}
        self.timer: Callable[[], None] | None = None
        self._answers: Raw = {}
        self._on_answer = on_answer

    def point(self, index: int) -> Point:
        """The place within the called region."""
        return self.region.extent.point(self.places[index])

    def answer(self, index: int, answer: Answer) -> None:
        """Take the answer of one process; late and second ones change nothing."""
        if index in self.waiting:
            self.waiting.discard(index)
            self._answers[index] = answer
            if self._on_answer is not None:
                self._on_answer(index, answer)
            self.settle()

    def fail(self, index: int, error: MeshError) -> None:
        self.answer(index, Answer(error=error))

    def leave_out(self, index: int) -> None:
        """The place has been taken out of the mesh: nothing comes from there."""
        self.waiting.discard(index)
        self.settle()

    @property
    def over(self) -> bool:
        return self.raw.done()

    def settle(self) -> None:
        """End the call if nobody is waited for."""
        if not self.waiting and not self.raw.done():
            if self.timer is not None:
                self.timer()
            if self.raw.set_running_or_notify_cancel():
                self.raw.set_result(self._answers)


def value_mesh(call: Call, raw: Raw) -> ValueMesh[Any]:
    """All answers as values and errors."""
    values: dict[int, Any] = {}
    errors: dict[int, MeshError] = {}
    for index, answer in raw.items():
        rank = call.places[index]
        try:
            values[rank] = answer.value(call.what, call.point(index))
        except MeshError as error:
            # Its frames would keep everything above alive: the remote traceback is what tells.
            errors[rank] = error.with_traceback(None)
    return ValueMesh(call.region.extent, values, errors, call.what)


def one_value(call: Call, raw: Raw) -> Any:
    """The only answer. Raises its error, KeyError when the place was taken out of the mesh."""
    for index, answer in raw.items():
        return answer.value(call.what, call.point(index))
    raise KeyError(f"{call.region.extent} was taken out of the mesh")


def numbers(indices: Iterable[int], per_host: int) -> dict[int, list[int]]:
    """Places by host: {slot: [local numbers]}."""
    found: dict[int, list[int]] = {}
    for index in indices:
        found.setdefault(index // per_host, []).append(index % per_host)
    return found
