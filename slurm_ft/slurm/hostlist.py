"""Hostlists: `node[001-003],login` to names and back.

The text is cut at the commas and blanks that stand outside brackets, and each part is expanded by itself, so
plain and bracketed names mix freely. A part is text and bracket groups in turn; several groups mean their
product, the left group slowest. A number is padded to the width of its range's lower bound.

`expand` reads a little more than Slurm 22.05 does: text after the last bracket (`r[0-1]-ib`), and three
groups in the stated order (Slurm's own order is odd there). It refuses what Slurm silently reads as something
else: a bracket that is never closed, a range without an end, a blank inside brackets. `compress` writes only
what Slurm reads back as the same names in the same order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from slurm_ft.errors import HostlistError

MAX_HOSTS = 65_536
"""A list of more names than this is taken for a typing error. Slurm has the same limit for one range."""

_SEPARATORS = ", \t\r\n"
_HINT_FORM = "write it as Slurm does, for example node[001-004,007],login1"
# Slurm counts in 64 bits; 18 digits are always safe.
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)
_UNWRITABLE = re.compile(r"[][, \t\r\n]")


def expand(text: str) -> list[str]:
    """Give the names in a hostlist, in the order written; a name written twice comes twice.

    Blank text gives []. Raises HostlistError for text that is not a hostlist or that stands for more than
    MAX_HOSTS names.
    """
    names: list[str] = []
    for start, part in _parts(text):
        names.extend("".join(pieces) for pieces in itertools.product(*_groups(text, start, part)))
        _check_size(text, start, len(names))
    return names


def compress(hosts: Sequence[str]) -> str:
    """Write names as a hostlist in Slurm's bracket form; the order and repeated names are kept.

    Only neighbours are joined: sort first for the shortest text. Raises HostlistError for a name that a
    hostlist cannot hold: an empty one, or one with a comma, a blank or a bracket in it.
    """
    for position, host in enumerate(hosts, 1):
        if not host or _UNWRITABLE.search(host):
            raise HostlistError(
                f"Name {position} of {len(hosts)}, {host!r}, cannot stand in a hostlist.",
                "a host name is not empty and has no comma, blank or bracket in it",
            )
    pairs = itertools.groupby(map(_split_number, hosts), key=lambda pair: (pair[0], bool(pair[1])))
    return ",".join(_written(prefix, [number for _, number in run]) for (prefix, _), run in pairs)


def _error(text: str, position: int, what: str, hint: str = _HINT_FORM) -> HostlistError:
    shown = text if len(text) <= 120 else text[:117] + "..."
    return HostlistError(f"Hostlist {shown!r} is wrong at character {position + 1}: {what}.", hint)


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Give (position, part) for each part between the separators that stand outside brackets."""
    start, opened = 0, -1
    for position, char in enumerate(text):
        if char == "[":
            if opened >= 0:
                raise _error(text, position, "a bracket inside brackets")
            opened = position
        elif char == "]":
            if opened < 0:
                raise _error(text, position, "a closing bracket that was never opened")
            opened = -1
        elif opened < 0 and char in _SEPARATORS:
            if position > start:
                yield start, text[start:position]
            start = position + 1
    if opened >= 0:
        raise _error(text, opened, "a bracket that is never closed")
    if start < len(text):
        yield start, text[start:]


def _groups(text: str, start: int, part: str) -> Iterator[Sequence[str]]:
    """Give the choices of each piece of a part: one for plain text, many for a bracket group."""
    position, size = start, 1
    # Brackets are balanced and flat by now, so the odd pieces are the insides of the groups.
    for number, piece in enumerate(re.split(r"[][]", part)):
        if number % 2:
            numbers = _numbers(text, position, piece)
            size *= len(numbers)
            _check_size(text, start, size)
            yield numbers
        elif piece:
            yield (piece,)
        position += len(piece) + 1


def _numbers(text: str, position: int, group: str) -> list[str]:
    """Give the padded numbers of the inside of one bracket group."""
    numbers: list[str] = []
    for item in group.split(","):
        low, high = _bounds(text, position, item)
        _check_size(text, position, len(numbers) + int(high) - int(low) + 1)
        numbers.extend(f"{value:0{len(low)}d}" for value in range(int(low), int(high) + 1))
        position += len(item) + 1
    return numbers


def _bounds(text: str, position: int, item: str) -> tuple[str, str]:
    match = _RANGE.fullmatch(item)
    if match is None:
        what = f"{item!r} is neither a number nor a range" if item else "a number is missing"
        raise _error(text, position, what)
    low, high = match[1], match[2] or match[1]
    if int(low) > int(high):
        raise _error(text, position, f"the range {item} runs down", f"write {high}-{low}")
    return low, high


def _check_size(text: str, position: int, size: int) -> None:
    if size > MAX_HOSTS:
        raise _error(text, position, f"it stands for {size:,} hosts or more and the limit is {MAX_HOSTS:,}")


def _split_number(host: str) -> tuple[str, str]:
    """Cut a name before its last digits. The number is empty if the name does not end in digits."""
    match = _NUMBERED.fullmatch(host)
    return (match[1], match[2]) if match else (host, "")


def _written(prefix: str, numbers: Sequence[str]) -> str:
    """Write neighbours that share a prefix: as they are, or as one bracketed name."""
    if len(numbers) == 1 or not numbers[0]:
        return ",".join(prefix + number for number in numbers)
    return f"{prefix}[{','.join(_ranges(numbers))}]"


def _ranges(numbers: Sequence[str]) -> Iterator[str]:
    """Join numbers into ranges; a range must give every number back as it was written."""
    start = 0
    for end in range(1, len(numbers) + 1):
        low = numbers[start]
        if end < len(numbers) and numbers[end] == f"{int(low) + end - start:0{len(low)}d}":
            continue
        yield low if end - start == 1 else f"{low}-{numbers[end - 1]}"
        start = end
