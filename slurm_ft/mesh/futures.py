"""Futures that threads and coroutines can both wait for, as often as they like.

What arrives is kept as bytes, and turned into values by whoever asks first, in his own thread: no code of
the user's runs in the thread that talks to the mesh, and an import lock held by a waiting thread cannot
stop that thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Future(Generic[R]):
    """A result to come. A time-out of `get` consumes nothing: ask again."""

    def __init__(
        self,
        raw: concurrent.futures.Future[Any],
        convert: Callable[[Any], R],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._raw, self._convert, self._cancel = raw, convert, cancel
        self._lock = threading.Lock()
        self._converted: tuple[R | None, BaseException | None] | None = None

    def get(self, timeout: float | None = None) -> R:
        """The result, at the latest after `timeout` seconds. Raises TimeoutError then, or the call's error."""
        try:
            raw = self._raw.result(timeout)
        except TimeoutError:
            if self._raw.done():
                raise
            raise TimeoutError(f"no result yet after {timeout:g} s; the call goes on") from None
        return self._value(raw)

    result = get

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, None if there is a result. Raises TimeoutError when there is neither after `timeout`."""
        if not self._wait(timeout):
            raise TimeoutError(f"no result yet after {timeout:g} s; the call goes on")
        try:
            self.get(0)
        except BaseException as error:
            return error
        return None

    def done(self) -> bool:
        return self._raw.done()

    def cancelled(self) -> bool:
        return self._raw.cancelled()

    def cancel(self) -> bool:
        """Stop waiting, and have the processes stop too. False if the result was there already.

        What was sent and not begun is not run. An async endpoint is cancelled where it awaits; Python code
        of a sync one is interrupted, a call into C when it returns.
        """
        if self._raw.done() or not self._raw.cancel():
            return False
        self._cancel()
        return True

    def add_done_callback(self, callback: Callable[[Future[R]], object]) -> None:
        """Call it with this future when the result is there, in the mesh's own thread: it must be quick."""
        self._raw.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, R]:
        raw = yield from asyncio.shield(asyncio.wrap_future(self._raw)).__await__()
        return self._value(raw)

    async def as_asyncio(self) -> R:
        """The same as awaiting it, as a coroutine for `asyncio.gather` and `asyncio.wait_for`."""
        return await self

    def _wait(self, timeout: float | None) -> bool:
        return bool(concurrent.futures.wait([self._raw], timeout).done)

    def _value(self, raw: Any) -> R:
        with self._lock:
            if self._converted is None:
                try:
                    self._converted = self._convert(raw), None
                except Exception as error:
                    self._converted = None, error
        value, problem = self._converted
        if problem is not None:
            raise problem
        return value  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        return f"<Future {state}>"
