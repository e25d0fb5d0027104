"""How often a snapshot is taken when the user has not said: so that it costs at most a share of the time."""

from __future__ import annotations

SHARE = 0.02
FIXED = 32
"""Steps, where ranks of one replica must take theirs at the same steps and so cannot each choose."""
MOST = 4096


class Pace:
    """The steps at which snapshots are due: multiples of a power of two that follows what snapshots cost."""

    def __init__(self, every: int | None, ranks: int = 1) -> None:
        self._fixed = every if every is not None else (FIXED if ranks > 1 else None)
        self.alone = ranks == 1
        self._step_seconds = 0.0
        self._last: float | None = None
        self.interval = self._fixed or 1

    def stepped(self, now: float) -> None:
        """A step has ended. Its time is smoothed, so that one that waited for a peer does not count much."""
        if self._last is not None:
            passed = now - self._last
            self._step_seconds = passed if not self._step_seconds else 0.9 * self._step_seconds + 0.1 * passed
        self._last = now

    def cost(self, seconds: float) -> None:
        """A snapshot has taken so many seconds of a processor: the whole of it is counted, though most of it runs
        beside the training."""
        if self._fixed or not self._step_seconds:
            return
        self.interval = 1
        while self.interval < MOST and seconds > SHARE * self._step_seconds * self.interval:
            self.interval *= 2

    def due(self, step: int) -> bool:
        return step % self.interval == 0
