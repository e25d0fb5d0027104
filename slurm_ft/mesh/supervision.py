"""What to do when a process or a host of a mesh is lost: pure functions, time is an argument.

The same ladder as the command line's (`slurm_ft.controller.supervise`), for processes that are called
instead of run: restart the process in place, start its host's step again, take a spare host, else tell the
caller. Each rung has a budget; a handler of the user's may choose a rung itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from slurm_ft.spec import Budget, Policy

STREAK = 60.0
"""Seconds within which repairs of the same thing count as one trouble, and are spaced out."""


class Action(StrEnum):
    """What a handler can answer, besides a truthy value (handled) and a falsy one (not handled)."""

    RESTART = "restart"
    """Start the process again in place; for a lost host, its step on the same host."""
    RESTART_HOST = "restart host"
    """End the host's step and start it again, with all its processes."""
    REPLACE = "replace"
    """Take a spare host for the failed one; its coordinates stay."""
    SHRINK = "shrink"
    """Go on without the failed one's replica (its host, or itself, where the mesh has only one)."""
    PROPAGATE = "propagate"
    """Repair nothing: whoever uses the process next gets the MeshFailure."""
    LEAVE = "leave"
    """Repair nothing: calls get a SupervisionError for the process and values from the others."""


@dataclass(frozen=True)
class Loss:
    """What was lost: one process of the host at place `slot`, or (index None) the whole host.

    `silent` means that the host was not heard of, rather than seen to end.
    """

    slot: int
    index: int | None = None
    silent: bool = False


@dataclass(frozen=True)
class Repair:
    """A repair that was begun at `t`."""

    t: float
    action: Action
    slot: int
    index: int | None = None


@dataclass(frozen=True)
class Decision:
    """What to do, after how many seconds, and why."""

    action: Action
    delay: float
    why: str


def decide(now: float, loss: Loss, repairs: Iterable[Repair], policy: Policy, spares: int) -> Decision:
    """The lowest rung that has budget left."""
    past = [repair for repair in repairs if repair.slot == loss.slot]
    delay = _delay(now, loss, past, policy)
    if loss.index is not None:
        own = [repair.t for repair in past if repair.action is Action.RESTART and repair.index == loss.index]
        if (n := _used(now, own, policy.in_place)) < policy.in_place.restarts:
            return Decision(Action.RESTART, delay, f"restart in place, {n + 1} of {_words(policy.in_place)}")
    if loss.silent and spares:
        return Decision(Action.REPLACE, 0.0, "the host fell silent, and there is a spare")
    steps = [repair.t for repair in past if repair.action is Action.RESTART_HOST]
    if (n := _used(now, steps, policy.step)) < policy.step.restarts:
        return Decision(Action.RESTART_HOST, delay, f"start the host's step again, {n + 1} of {_words(policy.step)}")
    if spares:
        return Decision(Action.REPLACE, 0.0, "all restarts are used up, and there is a spare")
    return Decision(Action.PROPAGATE, 0.0, "all restarts are used up, and there is no spare")


def follow(
    answer: object, now: float, loss: Loss, repairs: Iterable[Repair], policy: Policy, spares: int
) -> Decision | None:
    """What a handler's answer means; None when it leaves the failure to the next one, and at last to `decide`."""
    if not answer:
        return None
    if not isinstance(answer, Action):
        return Decision(Action.LEAVE, 0.0, "handled by the mesh's owner")
    if answer is Action.REPLACE and not spares:
        return None
    chosen = Action.RESTART_HOST if answer is Action.RESTART and loss.index is None else answer
    restarts = chosen in (Action.RESTART, Action.RESTART_HOST)
    past = [repair for repair in repairs if repair.slot == loss.slot]
    return Decision(chosen, _delay(now, loss, past, policy) if restarts else 0.0, f"the mesh's owner says: {answer}")


def _used(now: float, times: Iterable[float], budget: Budget) -> int:
    return sum(now - t < budget.seconds for t in times)


def _words(budget: Budget) -> str:
    return f"{budget.restarts} in {budget.seconds:g} s"


def _delay(now: float, loss: Loss, past: Iterable[Repair], policy: Policy) -> float:
    """None before the first repair; a thing that fails again and again waits 1, 2, 4 ... times the back-off."""
    recent = sum(now - repair.t < STREAK and repair.index in (loss.index, None) for repair in past)
    return min(policy.backoff * 2 ** (recent - 1), policy.backoff_max) if recent else 0.0
