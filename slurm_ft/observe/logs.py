"""Finds the logs of a run and prints or follows them, as bytes.

A rank writes what it likes: bytes that are no UTF-8, lines without end, nothing for hours. So nothing is
decoded here. Text is cut at newlines only, a line of one rank is never woven into one of another, and the
part of a line that is still being written waits until it is whole, or until the log is done. Where several
logs are shown, each line is labelled `2/0 |` with its replica and rank.

Following looks for new attempts too: their logs are in new folders.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slurm_ft.errors import RunFolderError, UsageError
from slurm_ft.observe.text import selected
from slurm_ft.paths import RunPaths

TARGET = re.compile(r"(?P<replicas>[\d,-]+)(?:/(?P<rank>\d{1,6}))?")
POLL_SECONDS = 0.2
BLOCK = 1 << 16
LONGEST_LINE = 1 << 20
"""A line longer than this is shown in pieces: a progress bar may never end its line."""


@dataclass(frozen=True)
class Target:
    """Which logs: of these replicas (None: all), of this rank (None: all), of this attempt (None: the last)."""

    replicas: frozenset[int] | None = None
    rank: int | None = None
    attempt: int | None = None

    @staticmethod
    def parse(text: str | None, attempt: int | None = None) -> Target:
        """The target in `2`, `2/0`, `1,3-5` or `1-3/0`. Raises UsageError."""
        if text is None:
            return Target(attempt=attempt)
        match = TARGET.fullmatch(text)
        if match is None:
            raise UsageError(f"`{text}` names no replica and rank", "write it like 2, 2/0 or 1,3-5/0")
        rank = match["rank"]
        return Target(selected(match["replicas"]), None if rank is None else int(rank), attempt)


@dataclass(frozen=True, order=True)
class Log:
    """One rank's log of one attempt."""

    replica: int
    attempt: int
    rank: int
    path: Path

    @property
    def label(self) -> bytes:
        return f"{self.replica}/{self.rank} | ".encode()


def available(paths: RunPaths) -> list[Log]:
    """All rank logs of a run."""
    found = []
    for path in (paths.root / "replicas").glob("*/attempt_*/*.log"):
        replica, attempt, rank = path.parent.parent.name, path.parent.name.removeprefix("attempt_"), path.stem
        if replica.isdigit() and attempt.isdigit() and rank.isdigit():
            found.append(Log(int(replica), int(attempt), int(rank), path))
    return sorted(found)


def choose(logs: list[Log], target: Target) -> list[Log]:
    """The logs of a target: of each replica its last attempt, unless the target names one."""
    wanted = [
        log
        for log in logs
        if (target.replicas is None or log.replica in target.replicas)
        and (target.rank is None or log.rank == target.rank)
    ]
    if target.attempt is not None:
        return [log for log in wanted if log.attempt == target.attempt]
    newest: dict[int, int] = {}
    for log in wanted:
        newest[log.replica] = max(log.attempt, newest.get(log.replica, 0))
    return [log for log in wanted if log.attempt == newest[log.replica]]


def find(paths: RunPaths, target: Target) -> list[Log]:
    """The logs of a target. Raises RunFolderError, saying what there is, when there are none."""
    logs = available(paths)
    chosen = choose(logs, target)
    if not chosen:
        raise RunFolderError(f"there is no log of {_target_words(target)} in `{paths.root}`", _what_there_is(logs))
    return chosen


def _target_words(target: Target) -> str:
    words = "any replica" if target.replicas is None else f"replica {','.join(map(str, sorted(target.replicas)))}"
    if target.rank is not None:
        words += f", rank {target.rank}"
    return words + (f", attempt {target.attempt}" if target.attempt is not None else "")


def _what_there_is(logs: list[Log]) -> str:
    if not logs:
        return "no rank has started yet; see `slurm-ft explain`"
    attempts = {log.replica: log.attempt for log in logs}
    listed = ", ".join(f"{replica} (attempt 1 to {last})" for replica, last in list(attempts.items())[:8])
    return f"there are logs of replica {listed}" + (" and more" if len(attempts) > 8 else "")


# --- reading -------------------------------------------------------------------------------------------------


def tail_position(file: BinaryIO, lines: int | None) -> int:
    """Where the last `lines` lines of a file begin; 0 for all of them."""
    if lines is None:
        return 0
    position = end = file.seek(0, 2)
    if lines <= 0:
        return end
    left = lines
    while position > 0:
        start = max(0, position - BLOCK)
        file.seek(start)
        block = file.read(position - start)
        at = len(block) - 1 if position == end and block.endswith(b"\n") else len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            left -= 1
            if left == 0:
                return start + at + 1
        position = start
    return 0


class Reader:
    """Reads the whole lines that were added to one log since the last look."""

    def __init__(self, log: Log, lines: int | None = None) -> None:
        self.log = log
        self._lines = lines
        self._position: int | None = None
        self._rest = b""

    def news(self, last: bool = False) -> Iterator[bytes]:
        """New lines, each with its newline. With `last`, also what stands after the last newline."""
        try:
            with open(self.log.path, "rb") as file:
                if self._position is None:
                    self._position = tail_position(file, self._lines)
                elif file.seek(0, 2) < self._position:  # the file was cut or replaced: begin again
                    self._position, self._rest = 0, b""
                file.seek(self._position)
                while block := file.read(BLOCK):
                    self._position += len(block)
                    yield from self._whole_lines(block)
        except OSError:
            pass
        if last and self._rest:
            yield self._rest + b"\n"
            self._rest = b""

    def _whole_lines(self, block: bytes) -> Iterator[bytes]:
        *whole, self._rest = (self._rest + block).split(b"\n")
        for line in whole:
            yield line + b"\n"
        if len(self._rest) > LONGEST_LINE:
            yield self._rest + b"\n"
            self._rest = b""


def show(logs: list[Log], out: BinaryIO, lines: int | None = None) -> None:
    """Print logs one after the other, each line labelled where there are several."""
    for log in logs:
        for line in Reader(log, lines).news(last=True):
            out.write((log.label if len(logs) > 1 else b"") + line)
    out.flush()


def follow(
    paths: RunPaths,
    target: Target,
    out: BinaryIO,
    until: Callable[[], bool],
    *,
    lines: int | None = None,
    wait: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda words: None,
) -> None:
    """Print what is added to the logs of a target until `until` says so, new attempts included.

    `lines` bounds what is shown of logs that are there already. Lines are labelled from the start, since a
    log that comes later could not be told from the first.
    """
    readers: dict[Path, Reader] = {}
    labelled = target.rank is None or target.replicas is None or len(target.replicas) != 1
    first = True
    while True:
        last = until()
        chosen = choose(available(paths), target)
        for log in chosen:
            if log.path not in readers:
                readers[log.path] = Reader(log, lines if first else None)
                say(f"following replica {log.replica} rank {log.rank}, attempt {log.attempt}")
        current = {log.path for log in chosen}
        for reader in list(readers.values()):
            over = reader.log.path not in current  # a newer attempt has begun
            for line in reader.news(last or over):
                out.write((reader.log.label if labelled else b"") + line)
            if over:
                del readers[reader.log.path]
        out.flush()
        first = False
        if last:
            return
        wait(POLL_SECONDS)
