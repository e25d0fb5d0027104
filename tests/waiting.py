"""Waiting in tests: for a condition, with a deadline, in short pieces; never for a fixed time."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def wait_until(condition: Callable[[], T], seconds: float = 10.0, what: str = "") -> T:
    """What `condition()` gives as soon as it is true; the test fails when that takes longer than `seconds`."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > give_up:
            pytest.fail(f"not within {seconds:g} s: {what or condition}")
        time.sleep(0.01)
    return value


async def until(condition: Callable[[], T], seconds: float = 10.0, what: str = "") -> T:
    """The same inside an event loop."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > give_up:
            pytest.fail(f"not within {seconds:g} s: {what or condition}")
        await asyncio.sleep(0.005)
    return value
