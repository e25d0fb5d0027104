"""The live view of a run: events as they come in, and on a terminal a table below them.

    code = follow(paths, sys.stdout, sys.stdout.isatty(), until=None)

The log is read every `POLL_SECONDS` from where the last look stopped, so following costs a run nothing. Off a
terminal each event is one plain line and nothing else is written. On a terminal the table is the last thing
on the screen: to print events, it is erased (the cursor goes up as many lines as it has), the events take its
place, and it is drawn again below them. Every line is cut to the terminal's width, since a wrapped line would
spoil the count.

`wait`, `now` and `size` are arguments, so that a test neither sleeps nor needs a terminal.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TextIO

from slurm_ft.errors import RunFolderError
from slurm_ft.events import Event, Follower
from slurm_ft.observe import text
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.status import COLUMNS, ReplicaRow, Snapshot, colour, from_ledger, from_state, headline, table
from slurm_ft.observe.words import Narrator
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.spec import Policy

POLL_SECONDS = 0.2
REDRAW_SECONDS = 1.0
UP_AND_CLEAR = "\x1b[{}A\x1b[J"

CALM = ("TRAINING", "RUNNING", "DONE")


def follow(
    paths: RunPaths,
    out: TextIO,
    is_tty: bool,
    until: Callable[[], bool] | None = None,
    *,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
    size: Callable[[], os.terminal_size] = shutil.get_terminal_size,
    history: int | None = None,
    policy: Policy | None = None,
    since: int = 0,
) -> int | None:
    """Show a run until it ends and return its exit code, or None once `until` says so.

    A log that does not exist yet is waited for. `history` bounds how many of the events that are already
    there are told; None tells them all. What stands before the byte `since` is of earlier sessions: it is passed over.
    """
    view = View(out, is_tty, now, size, policy, lambda: measured(paths))
    source = Follower(paths.events, since)
    first = True
    while True:
        # Asked before reading: what was written up to the moment it said yes is still shown.
        last = until is not None and until()
        view.show(source.news(), history if first else None)
        first = False
        if view.ended is not None or last:
            return view.ended
        wait(POLL_SECONDS)


class View:
    """What is on the screen: the events told so far and, on a terminal, the table below them."""

    def __init__(
        self,
        out: TextIO,
        is_tty: bool,
        now: Callable[[], float],
        size: Callable[[], os.terminal_size],
        policy: Policy | None,
        measured: Callable[[], Snapshot | None],
    ) -> None:
        self._out = out
        self._is_tty = is_tty
        self._colour = is_tty and not os.environ.get("NO_COLOR")
        self._now, self._size, self._policy, self._measured = now, size, policy, measured
        self._ledger = Ledger()
        self._narrator = Narrator()
        self._drawn = 0
        self._drawn_at = float("-inf")

    @property
    def ended(self) -> int | None:
        return self._ledger.state.ended

    def show(self, events: Sequence[Event], history: int | None = None) -> None:
        """Tell these events, and draw the table again when there is something new or a second has passed."""
        lines = []
        for event in events:
            self._ledger.add(event)
            line = self._narrator.line(event)
            if line is not None:
                lines.append(line)
        if history is not None:
            lines = lines[-history:] if history else []
        if self._is_tty:
            self._redraw(lines, bool(events))
        elif lines:
            self._out.write("\n".join(lines) + "\n")
            self._out.flush()

    def _redraw(self, lines: list[str], news: bool) -> None:
        now = self._now()
        if not news and now - self._drawn_at < REDRAW_SECONDS:
            return
        self._drawn_at = now
        columns, rows = self._size()
        drawing = self._table(now, columns, rows)
        erase = UP_AND_CLEAR.format(self._drawn) if self._drawn else ""
        body = [text.fit(line, columns - 1) for line in lines] + drawing
        self._out.write(erase + "".join(line + "\n" for line in body))
        self._out.flush()
        self._drawn = len(drawing)

    def _table(self, now: float, columns: int, rows: int) -> list[str]:
        """A blank line, the headline and as many replicas as there is room for."""
        snapshot = with_measured(from_ledger(self._ledger, now, self._policy), self._measured())
        if not snapshot.replicas:
            return [text.fit("waiting for the run to start", columns - 1)]
        shown = choose(snapshot, max(1, rows - 5))
        lines = table(shown, now, COLUMNS)
        top = text.paint(text.fit(headline(snapshot, now), columns - 1), colour(snapshot.state()), self._colour)
        body = [
            text.paint(text.fit(line, columns - 1), "" if row is None else colour(row.state), self._colour)
            for line, row in zip(lines, [None, *shown], strict=True)
        ]
        hidden = len(snapshot.replicas) - len(shown)
        return ["", top, *body] + ([text.fit(_rest(snapshot, hidden), columns - 1)] if hidden else [])


def measured(paths: RunPaths) -> Snapshot | None:
    """What `state.json` holds. Its figures are newer than those in the events, which are samples."""
    try:
        return from_state(read_json(paths.state))
    except RunFolderError:
        return None


def with_measured(snapshot: Snapshot, state: Snapshot | None) -> Snapshot:
    """The snapshot with the state's figures where they are of the same attempt and not older. What happened, such
    as a replica's state, stays as the events tell it."""
    rows = {row.id: row for row in state.replicas} if state is not None else {}
    return replace(snapshot, replicas=tuple(_newer(row, rows.get(row.id)) for row in snapshot.replicas))


def _newer(row: ReplicaRow, other: ReplicaRow | None) -> ReplicaRow:
    if other is None or other.attempt != row.attempt or other.step is None or other.step < (row.step or 0):
        return row
    return replace(row, step=other.step, loss=other.loss, tokens=other.tokens)


def choose(snapshot: Snapshot, room: int) -> list[ReplicaRow]:
    """As many replicas as fit, those in trouble first to be kept, in the order of their numbers."""
    ranked = sorted(snapshot.replicas, key=lambda row: (row.state in CALM, row.id))
    return sorted(ranked[:room], key=lambda row: row.id)


def _rest(snapshot: Snapshot, hidden: int) -> str:
    counts = Counter(row.state for row in snapshot.replicas)
    return f"and {hidden} more; in all " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
