"""The thread in which all meshes of a process live, so that notebooks, scripts and asyncio programs can
use them alike. Started with the first mesh; a forked child has none and is told so."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slurm_ft.errors import UsageError

R = TypeVar("R")


class Loop:
    """One event loop in a daemon thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="slurm-ft-mesh", daemon=True).start()

    def check(self) -> None:
        """Raises UsageError in a forked child."""
        if os.getpid() != self._pid:
            raise UsageError(
                f"this mesh belongs to process {self._pid}, and a forked child cannot use it",
                "use it in the parent, or start the child with the `spawn` method and a mesh of its own",
            )

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have it run in the loop, from any thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def start(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run a coroutine in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, function: Callable[..., R], *arguments: Any) -> R:
        """Run it in the loop and give its result, or raise what it raises."""

        async def body() -> R:
            return function(*arguments)

        return self.start(body()).result()


_shared: Loop | None = None
_lock = threading.Lock()


def shared() -> Loop:
    """The process's one loop."""
    global _shared
    with _lock:
        if _shared is None or _shared._pid != os.getpid():
            _shared = Loop()
        return _shared
