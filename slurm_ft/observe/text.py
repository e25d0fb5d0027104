"""Text for terminals: columns, times, hostlists, and cutting to a width.

Widths are counted in terminal cells, not characters: a CJK character takes two, a combining mark none.
Nothing that came from a file reaches the terminal with its control characters: `clean` shows them as `?`, so
that a host name or a traceback can neither move the cursor nor break a table.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from slurm_ft.errors import HostlistError, UsageError

NOTHING = "-"
ELLIPSIS = "…"
COLOURS = {"good": "\x1b[32m", "warn": "\x1b[33m", "bad": "\x1b[31m", "dim": "\x1b[2m"}
RESET = "\x1b[0m"


def clean(text: object) -> str:
    """`text` on one line, without control characters."""
    words = re.sub(r"[\t\r\n]+", " ", str(text))
    return "".join("?" if unicodedata.category(char) in ("Cc", "Cs") else char for char in words)


def width(text: str) -> int:
    """How many terminal cells `text` takes."""
    return sum(_cells(char) for char in text)


def _cells(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def fit(text: str, cells: int) -> str:
    """`text`, cut with an ellipsis so that it takes at most `cells`."""
    if width(text) <= cells:
        return text
    kept, used = [], 0
    for char in text:
        used += _cells(char)
        if used > cells - 1:
            break
        kept.append(char)
    return "".join(kept) + ELLIPSIS if cells > 0 else ""


def pad(text: str, cells: int, right: bool = False) -> str:
    blanks = " " * max(0, cells - width(text))
    return blanks + text if right else text + blanks


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[str] = (), header: bool = True
) -> list[str]:
    """Lines of a table like squeue's: the names on top, one blank between columns, no frame.

    The last column is not padded. Columns named in `right` are set to the right.
    """
    body = [[clean(cell) for cell in row] for row in rows]
    lines = ([list(columns)] if header else []) + body
    widths = [max((width(line[i]) for line in lines), default=0) for i in range(len(columns))]
    numeric = set(right)
    return [
        " ".join(pad(cell, cells, name in numeric) for cell, cells, name in zip(line, widths, columns, strict=True))
        .rstrip()
        for line in lines
    ]  # fmt: skip


def paint(text: str, colour: str, on: bool) -> str:
    return f"{COLOURS[colour]}{text}{RESET}" if on and colour in COLOURS else text


def plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def finite(value: float | None) -> float | None:
    """A number as JSON can hold it: NaN and infinity become null."""
    return value if value is not None and math.isfinite(value) else None


def rounded(value: float | None) -> float | None:
    """Seconds and percents in JSON: to the thousandth."""
    return None if finite(value) is None or value is None else round(value, 3)


def short(seconds: float) -> str:
    """A span for people who compare recoveries: `0.4ms`, `0.02s`, `1.4s`, `95s`."""
    if seconds < 0.01:
        return f"{1000 * seconds:.1f}ms"
    if seconds < 0.1:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 60 else f"{seconds:.0f}s"


def elapsed(seconds: float | None) -> str:
    """A span as squeue writes it: `1:05`, `2:00:00`, `1-02:00:00`."""
    if seconds is None:
        return NOTHING
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def iso(t: float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond."""
    if t is None:
        return None
    try:
        return datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None


def hostlist(hosts: Sequence[str]) -> str:
    """Hosts in Slurm's bracket form, or as they are where that form cannot hold them."""
    from slurm_ft.slurm.hostlist import compress

    try:
        return compress([str(host) for host in hosts]) or NOTHING
    except HostlistError:
        return ",".join(map(str, hosts)) or NOTHING


SELECTOR = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def selected(selector: str) -> frozenset[int]:
    """The numbers in a selector such as `1,3,5-8`. Raises UsageError for anything else."""
    if not SELECTOR.fullmatch(selector):
        raise UsageError(f"`{selector}` does not select replicas", "write it like 2 or 1,3,5-8")
    chosen: set[int] = set()
    for part in selector.split(","):
        first, _, last = part.partition("-")
        chosen.update(range(int(first), int(last or first) + 1))
    return frozenset(chosen)


def pick(columns: Sequence[str], wanted: str | None) -> list[str]:
    """The columns of `--format`: `A,B` chooses, `+A` adds to the usual ones. Raises UsageError."""
    if not wanted:
        return list(columns)
    names = [name.strip().upper() for name in wanted.removeprefix("+").split(",") if name.strip()]
    return [*columns, *names] if wanted.startswith("+") else names


def cells(columns: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """A row with these columns. Raises UsageError, with the known ones, for a column there is not."""
    unknown = [name for name in columns if name not in values]
    if unknown:
        raise UsageError(f"there is no column `{unknown[0]}`", f"columns: {', '.join(values)}")
    return [values[name] for name in columns]
