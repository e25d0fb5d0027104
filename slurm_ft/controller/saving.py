"""A save that was asked for: who is to answer, who has, and whether what was written is a whole. Pure.

    SAVE_REQUESTED  the controller asks the agents of all replicas whose ranks run
    SAVE_ASKED      an agent has asked its ranks: those that can answer, and those that got a signal only
    SAVED           a rank has written its part, at this training step, and perhaps where
    SAVE_ENDED      all have answered, or the time is over; `complete` says whether a run can resume from it

A program's ranks can answer when it uses `slurm_ft.train.on_save` or `save_requested`, or is `titan`. One
that knows nothing of slurm-ft may be asked by a signal (`--save-signal`); then nobody knows what it wrote, and
such a save is never complete. When the run is to stop, those that got a signal have time to end by themselves.

A save is complete when its parts are one state: in a torchft run the replicas are equal, so one whole replica
must have written; in other runs each replica has a state of its own, and all must have. A replica is whole
when all its ranks that can save have saved the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_ft.events import Event, Kind

Spot = tuple[int, int]
"""A replica, and the index of a host or the number of a rank in it."""


@dataclass(frozen=True)
class Answer:
    """A rank's word that it has saved. `wrote` is False where another replica writes for all."""

    step: int
    wrote: bool = True
    path: str = ""
    error: str = ""


@dataclass(frozen=True)
class Save:
    """One save. `attempts` are those of the replicas that were asked, `replicas` all that have a part to save: one that
    was being started again has, and cannot be asked. `due` is when to wait no longer."""

    id: str
    due: float
    why: str
    attempts: Mapping[int, int]
    hosts: frozenset[Spot] = frozenset()
    ranks: frozenset[Spot] = frozenset()
    signalled: frozenset[Spot] = frozenset()
    answers: tuple[tuple[Spot, Answer], ...] = ()
    replicas: frozenset[int] = frozenset()

    def asked(self, replica: int, attempt: int) -> bool:
        return self.attempts.get(replica) == attempt


@dataclass(frozen=True)
class Outcome:
    """What a save came to: `step` and `path` of a complete one. Where replicas train each for itself, `parts` has
    what each saved: {replica: (step, path)}."""

    complete: bool
    why: str
    step: int = 0
    path: str = ""
    parts: Mapping[int, tuple[int, str]] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        """The data of a SAVE_ENDED."""
        parts = {str(replica): list(part) for replica, part in self.parts.items()}
        return {"complete": self.complete, "why": self.why, "step": self.step, "path": self.path} | (
            {"parts": parts} if parts else {}
        )


def requested(event: Event) -> Save:
    """The save that a SAVE_REQUESTED begins."""
    data = event.data
    attempts = {int(replica): int(attempt) for replica, attempt in data.get("attempts", {}).items()}
    hosts = frozenset((int(r), index) for r, count in data.get("hosts", {}).items() for index in range(int(count)))
    due = event.t + float(data.get("within", 0.0))
    replicas = frozenset(map(int, data.get("replicas", attempts)))
    return Save(str(data.get("id", "")), due, str(data.get("why", "")), attempts, hosts, replicas=replicas)


def observe(save: Save, event: Event) -> Save:
    """The save after an agent's or a rank's word; news of another save changes nothing."""
    data, replica = event.data, event.replica
    if replica is None or data.get("id") != save.id or not save.asked(replica, int(data.get("attempt", -1))):
        return save
    if event.kind is Kind.SAVE_ASKED:
        answered = {spot for spot, _ in save.answers}
        able = {(replica, int(rank)) for rank in data.get("able", ())} - answered
        signalled = {(replica, int(rank)) for rank in data.get("signalled", ())}
        hosts = save.hosts - {(replica, int(data["index"]))}
        return replace(save, hosts=hosts, ranks=save.ranks | able, signalled=save.signalled | signalled)
    spot = (replica, int(data["rank"]))
    if any(spot == known for known, _ in save.answers):
        return save
    answer = Answer(
        int(data.get("step") or 0), data.get("wrote") is not False, str(data.get("path") or ""),
        str(data.get("error") or ""),
    )  # fmt: skip
    return replace(save, ranks=save.ranks - {spot}, answers=(*save.answers, (spot, answer)))


def waits_for(save: Save, running: Mapping[int, int], now: float, stopping: bool) -> frozenset[Spot]:
    """Whom the save waits for now: nobody when its time is over. `running` are the attempts of the replicas
    whose ranks run; one that is gone is not waited for."""
    if now >= save.due:
        return frozenset()
    spots = save.hosts | save.ranks | (save.signalled if stopping else frozenset())
    return frozenset(spot for spot in spots if spot[0] in running and save.asked(spot[0], running[spot[0]]))


def outcome(save: Save, collective: bool) -> Outcome:
    """What the save came to, when nobody is waited for any more."""
    answers = dict(save.answers)
    if not answers:
        if save.signalled:
            return Outcome(False, "the ranks were asked by a signal, which has no answer")
        return Outcome(False, "no rank has answered in time" if save.ranks or save.hosts else "no rank can save")
    errors = [f"rank {r} of replica {n}: {answer.error}" for (n, r), answer in save.answers if answer.error]
    replicas = sorted(save.replicas)
    whole = {r: steps for r in save.attempts if (steps := _whole(save, r, answers)) is not None}
    writers = [r for r in whole if any(a.wrote for (n, _), a in save.answers if n == r)]
    if collective and writers:
        best = max(writers, key=lambda r: whole[r])
        return Outcome(True, _by(writers), whole[best], _path(save, best))
    if not collective and set(writers) >= set(replicas):
        parts = {r: (whole[r], _path(save, r)) for r in writers}
        return Outcome(True, _by(writers), *min(parts.values()), parts if len(parts) > 1 else {})
    if errors:
        return Outcome(False, errors[0])
    left = [r for r in replicas if r not in whole]
    return Outcome(False, f"not all ranks of replica {left[0]} have saved" if left else "no replica has written")


def _whole(save: Save, replica: int, answers: Mapping[Spot, Answer]) -> int | None:
    """The step that all ranks of a replica have saved, or None."""
    own = [answer for (number, _), answer in answers.items() if number == replica]
    missing = any(number == replica for number, _ in save.ranks | save.hosts)
    if missing or not own or any(answer.error for answer in own) or len({answer.step for answer in own}) != 1:
        return None
    return own[0].step


def _path(save: Save, replica: int) -> str:
    return next((a.path for (number, _), a in save.answers if number == replica and a.path), "")


def _by(writers: Iterable[int]) -> str:
    numbers = [str(number) for number in writers]
    return f"written by replica {numbers[0]}" if len(numbers) == 1 else f"written by replicas {', '.join(numbers)}"


def marker(events: Iterable[Event], kept: int = 10) -> dict[str, Any]:
    """`saved.json`: the newest complete saves of a run's events, the newest last."""
    saves = [
        {"step": e.data.get("step"), "path": e.data.get("path", ""), "t": round(e.t, 3), "id": e.data.get("id")}
        | ({"parts": e.data["parts"]} if e.data.get("parts") else {})
        for e in events
        if e.kind is Kind.SAVE_ENDED and e.data.get("complete")
    ]
    return {"schema": 1, "saves": saves[-kept:]}
