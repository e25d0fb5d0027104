"""One thread for calls that may block for as long as a shared file system is away.

An event loop must not wait for a file system, and neither may the end of a process: the thread is a daemon and
does its calls in order. Who awaits a call that hangs waits with it; the loop and all else go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """A daemon thread named `name`. Nothing of it is awaited at exit unless `drain` is called."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._began: float | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._began = time.monotonic()
            try:
                call()
            except Exception:  # the calls behind it are to be done all the same
                traceback.print_exc()
            self._began = None

    @property
    def busy_for(self) -> float:
        """Seconds for which the present call has been going on; 0 when there is none."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    async def do(self, call: Callable[[], T]) -> T:
        """The result of the call, or its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result, failure = call(), None
            except BaseException as error:
                result, failure = None, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, result, failure)

        self._calls.put(work)
        return await future

    def post(self, call: Callable[[], object], on_error: Callable[[OSError], object] = lambda error: None) -> None:
        """Have the call done some time; an OSError of it goes to `on_error`, in the thread."""

        def work() -> None:
            try:
                call()
            except OSError as error:
                on_error(error)

        self._calls.put(work)

    def drain(self, seconds: float) -> bool:
        """Wait until all calls so far are done, so long at most; says whether they are."""
        done = threading.Event()
        self._calls.put(done.set)
        return done.wait(seconds)

    def close(self) -> None:
        """There will be no more calls: the thread ends after those so far. This does not wait for it."""
        self._calls.put(None)


def _settle(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)
