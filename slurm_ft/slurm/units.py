"""Times and memory as people and Slurm write them, to seconds and MiB and back.

Times. sbatch reads six forms: `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`,
`days-hours:minutes`, `days-hours:minutes:seconds`. So `30:00` is half an hour and `2-12:30` is two and a half days
and half an hour. Zero, UNLIMITED and INFINITE ask for no limit. What is asked and what Slurm prints are read
by two functions, because they differ: in an answer 0:00 means that no time is left, and words stand for
"unknown".

Memory. K, M, G and T, alone or with iB, count in 1024; with B they count in 1000, as frameworks do; a bare number
is MiB. (Slurm 22.05 itself takes 24GB for 24G, and refuses 24GiB and 2.5G.) Slurm wants whole numbers, so a request
is rounded up and a limit handed to a worker is rounded down. 0 is kept: to Slurm it means all of the node.
"""

from __future__ import annotations

import enum
import fractions
import math
import re

from slurm_ft.errors import UsageError


class NoTime(enum.Enum):
    """What Slurm prints where a time would stand."""

    UNLIMITED = "no limit"
    PARTITION_LIMIT = "the partition's limit"
    UNKNOWN = "unknown"


_ANSWERS = {
    "UNLIMITED": NoTime.UNLIMITED,
    "INFINITE": NoTime.UNLIMITED,
    "PARTITION_LIMIT": NoTime.PARTITION_LIMIT,
    "NOT_SET": NoTime.UNKNOWN,
    "INVALID": NoTime.UNKNOWN,
    "N/A": NoTime.UNKNOWN,
    "": NoTime.UNKNOWN,
}

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
# Slurm counts minutes in 32 bits and keeps the topmost numbers as marks.
_MAX_SECONDS = (2**32 - 3) * _MINUTE
_TIME = re.compile(r"(?:([0-9]{1,10})-)?([0-9]{1,10})(?::([0-9]{1,10}))?(?::([0-9]{1,10}))?")
_TIME_HINT = "write minutes, h:mm:ss or d-hh:mm:ss, for example 90, 1:30:00 or 2-12:00:00"

_MEMORY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(I?B)?", re.IGNORECASE)
_MEMORY_HINT = "write a number and K, M, G or T, for example 4096M or 2.5G"
_MIB = 1024**2
_ANSWERED = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGTPE]?)[nc]?\??", re.IGNORECASE)


def parse_time(text: str) -> int | None:
    """Read a time limit that somebody asks for, in seconds; None stands for no limit.

    Raises UsageError for anything that sbatch would not read as a limit.
    """
    asked = text.strip()
    if _ANSWERS.get(asked.upper()) is NoTime.UNLIMITED:
        return None
    seconds = _seconds(asked)
    if seconds is None:
        raise UsageError(f"{text!r} is not a time limit.", _TIME_HINT)
    if seconds > _MAX_SECONDS:
        raise UsageError(f"The time limit {asked} is longer than Slurm can count.", "UNLIMITED means no limit")
    return seconds or None


def read_time(text: str) -> int | NoTime:
    """Read a limit, an elapsed or a remaining time out of Slurm's answer, in seconds.

    Text that is none of Slurm's is UNKNOWN: it is never taken for zero or for no limit.
    """
    answer = text.strip()
    word = _ANSWERS.get(answer.upper())
    if word is not None:
        return word
    seconds = _seconds(answer)
    return NoTime.UNKNOWN if seconds is None else seconds


def format_time(seconds: int | None) -> str:
    """Write a limit as h:mm:ss or d-hh:mm:ss; None becomes UNLIMITED. Slurm itself rounds up to whole
    minutes.

    Raises UsageError for zero and less, because Slurm reads 0 as no limit.
    """
    if seconds is None:
        return "UNLIMITED"
    if seconds <= 0:
        raise UsageError(f"A time limit of {seconds} seconds leaves no time.", "ask for a minute or more")
    days, rest = divmod(seconds, _DAY)
    hours, minutes = rest // _HOUR, rest % _HOUR // _MINUTE
    clock = f"{minutes:02d}:{rest % _MINUTE:02d}"
    return f"{days}-{hours:02d}:{clock}" if days else f"{hours}:{clock}"


def parse_memory(text: str, *, round_up: bool = True) -> int:
    """Read an amount of memory, in MiB. Rounds up as a request should, or down as a limit should.

    Raises UsageError for text that is not an amount, and for an amount that rounds down to 0, which would
    mean all of the node.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{text!r} is not an amount of memory.", _MEMORY_HINT)
    amount, letter, ending = fractions.Fraction(match[1]), match[2].upper() or "M", match[3] or ""
    base = 1000 if ending.upper() == "B" else 1024
    exact = amount * fractions.Fraction(base ** ("KMGT".index(letter) + 1), _MIB)
    whole = math.ceil(exact) if round_up else math.floor(exact)
    if exact and not whole:
        raise UsageError(f"{text.strip()} is less than 1 MiB.", _MEMORY_HINT)
    return whole


def read_memory(text: str) -> int | None:
    """Read an amount of memory out of Slurm's answer, in MiB, rounded up: `4000M`, `1.50G`, `532K`, `0`.

    A bare number is bytes in sacct's MaxRSS. `4Gn` and `2Gc` (for each node, for each CPU) are from before 21.08, and a
    trailing `?` marks what Slurm was not told. None for no amount: nothing is taken for zero but 0.
    """
    match = _ANSWERED.fullmatch(text.strip())
    if match is None:
        return None
    power = " KMGTPE".index(match[2].upper() or " ")
    return math.ceil(fractions.Fraction(match[1]) * fractions.Fraction(1024**power, _MIB))


def format_memory(mib: int) -> str:
    """Write MiB as a whole number that Slurm accepts; 0 stays 0. Raises UsageError for less."""
    if mib < 0:
        raise UsageError(f"{mib} MiB is not an amount of memory.", _MEMORY_HINT)
    return f"{mib}M" if mib else "0"


def _seconds(text: str) -> int | None:
    """Add up one of the six forms; None if it is none of them."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, *fields = match.groups()
    numbers = [int(field) for field in fields if field is not None]
    if days is not None:
        units = [_HOUR, _MINUTE, 1]
    else:
        units = [[_MINUTE], [_MINUTE, 1], [_HOUR, _MINUTE, 1]][len(numbers) - 1]
    return int(days or 0) * _DAY + sum(number * unit for number, unit in zip(numbers, units, strict=False))
