"""When an agent shall try to become the next head's host. Pure; times are seconds on one monotonic clock.

Two signs are needed: the agent has heard no controller for `head_timeout`, and the lease in the run folder, which
is renewed every second, has not been for half of that (three renewals at least). An agent that is cut off itself
sees the lease renewed, or cannot see it; one that cannot read the folder hears the controller.

Then the agents take turns, STAGGER seconds apart, by their place in the run, the dead head's own host last: one
alone wins the claim (slurm_ft/lease.py), and the turns only keep the others from trying at the same moment. A new
claim is a renewal: when its owner brings no head up, the lease goes stale once more, and the next agent has its
turn. An agent that has failed MOST_TRIES times leaves it to the others.
"""

from __future__ import annotations

from slurm_ft.lease import RENEW, Claim, Watch

STAGGER = 0.5
MOST_STAGGER = 10.0
"""Seconds that nobody waits longer for his turn, in a run of any size."""
MOST_TRIES = 2


def stale_after(head_timeout: float) -> float:
    """Seconds without a renewal after which nobody holds the lease any more, for an agent of the run."""
    return max(head_timeout / 2, 3 * RENEW)


class Election:
    """One agent's part in it. `place` is its place in the run, from 0; `host` its host."""

    def __init__(self, place: int, host: str, head_timeout: float) -> None:
        self._place, self._host, self._head_timeout = place, host, head_timeout
        self._watch = Watch()
        self.tries = 0

    def stands(self, now: float, silence: float, seen: Claim | None) -> bool:
        """Shall we claim the epoch after `seen` now? `silence` is since when no controller has been heard;
        `seen` is None when the lease cannot be read."""
        unchanged = self._watch.unchanged(now, seen)
        if seen is None or seen.ended is not None or self.tries >= MOST_TRIES:
            return False
        turn = min(self._place * STAGGER, MOST_STAGGER) + (MOST_STAGGER if seen.host == self._host else 0.0)
        return silence >= self._head_timeout + turn and unchanged >= stale_after(self._head_timeout) + turn
