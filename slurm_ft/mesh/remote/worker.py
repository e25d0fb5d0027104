"""One process of a mesh. Forked from its host's zygote; runs what it is sent, one message after the other.

The main thread reads the data connection and runs sync functions and endpoints. A second thread has an
asyncio loop: it runs async ones, and reads the control connection, so that a cancellation, or an answer
that a running function waits for, comes through while the main thread is busy. A sync call is interrupted
by a signal to the main thread whose handler raises, as Ctrl-C does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from typing import Any

from slurm_ft import env
from slurm_ft.errors import UsageError
from slurm_ft.mesh.actor import Context, MeshView, enter
from slurm_ft.mesh.errors import MeshError
from slurm_ft.mesh.extent import Extent, Region
from slurm_ft.mesh.remote.framing import Framed, Header, Stream
from slurm_ft.mesh.remote.pickling import LIMIT, dump

INTERRUPT = signal.SIGRTMIN + 5
"""The signal to the main thread; the C library keeps the first few real-time signals to itself."""


class _Cancelled(BaseException):
    """Raised in a sync call that was cancelled. No Exception, so that user code does not swallow it."""


class _Broken:
    """In the place of an actor whose constructor raised."""

    def __init__(self, header: Header, payload: bytes) -> None:
        self.header, self.payload = header, payload


class Worker:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._actors: dict[int, Any] = {}
        self._dropped: set[int] = set()
        self._early: dict[int, list[tuple[Header, bytes]]] = {}
        self._cancelled: set[int] = set()
        self._running: int | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._met: dict[str, tuple[threading.Event, list[Header]]] = {}
        self._sending = threading.Lock()
        self._main = threading.get_ident()
        self._loop = asyncio.new_event_loop()
        self._extent = Extent(tuple(config["labels"]), tuple(config["sizes"]))

    def run(self) -> None:
        """Serve until the host process closes the connection."""
        signal.signal(INTERRUPT, self._interrupted)
        connected = threading.Event()
        threading.Thread(target=self._serve_loop, args=(connected,), name="slurm-ft-mesh", daemon=True).start()
        if not connected.wait(30):
            sys.exit("error: the host process does not answer")
        self._data = Stream(self._config["socket"])
        self._data.send({"k": "hello", "role": "data", **self._who()})
        try:
            while (message := self._data.receive()) is not None:
                self._handle(*message)
        finally:
            self._data.close()  # tells the host process at once, also where a thread of the user's goes on

    def _who(self) -> Header:
        return {"local": self._config["local"], "incarnation": self._config["incarnation"]}

    # The second thread.

    def _serve_loop(self, connected: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        path = "\0" + self._config["socket"][1:]
        framed = Framed(self._control, lambda _: None)
        self._loop.run_until_complete(self._loop.create_unix_connection(lambda: framed, path))
        framed.send(json.dumps({"k": "hello", "role": "control", **self._who()}).encode())
        connected.set()
        self._loop.run_forever()

    def _control(self, _: Framed, header: Header, payload: bytes) -> None:
        if header["k"] == "met" and header["key"] in self._met:
            event, answer = self._met[header["key"]]
            answer.append(header)
            event.set()
        elif header["k"] == "call":
            self._call_async(header, payload)
        elif header["k"] == "cancel":
            call = header["i"]
            if len(self._cancelled) > 4096:  # of calls that had ended before they were cancelled
                self._cancelled.clear()
            self._cancelled.add(call)
            if call in self._tasks:
                self._tasks[call].cancel()
            elif self._running == call:
                signal.pthread_kill(self._main, INTERRUPT)

    def _call_async(self, header: Header, payload: bytes) -> None:
        """Begin an async call. One whose actor is still being made in the main thread waits for it."""
        number = header.get("a")
        if number is not None and number not in self._actors and number not in self._dropped:
            self._early.setdefault(number, []).append((header, payload))
            return
        self._start_task(contextvars.copy_context(), header, self._called(header, payload))

    async def _called(self, header: Header, payload: bytes) -> Any:
        enter(self._context(header))
        return await self._call(header, payload)

    def _made(self, number: int) -> None:
        for header, payload in self._early.pop(number, []):
            self._call_async(header, payload)

    def _interrupted(self, number: int, frame: object) -> None:
        if self._running is not None and self._running in self._cancelled:
            raise _Cancelled

    # The main thread.

    def _handle(self, header: Header, payload: bytes) -> None:
        call: int = header["i"]
        if header["k"] == "drop":
            self._dropped.add(header["a"])
            self._actors.pop(header["a"], None)
            return
        try:
            self._running = call
            try:
                if call in self._cancelled:
                    raise _Cancelled
                enter(self._context(header))
                task = (self._spawn if header["k"] == "spawn" else self._call)(header, payload)
            finally:
                self._running = None  # an answer is sent whole, or what comes after it could not be read
        except _Cancelled:
            self._cancelled.discard(call)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._refuse(header, error)
        else:
            if inspect.iscoroutine(task):
                self._loop.call_soon_threadsafe(self._start_task, contextvars.copy_context(), header, task)
            else:
                self._answer(header, task)

    def _context(self, header: Header) -> Context:
        labels, sizes, strides, offset = header["region"]
        view = MeshView(self._config["name"], Region(tuple(labels), tuple(sizes), tuple(strides), offset))
        config = self._config
        return Context(
            rank=self._extent.point(config["index"]),
            mesh=view,
            host=config["host"],
            address=config["address"],
            local_rank=config["local"],
            incarnation=config["incarnation"],
            call=header["i"],
            meet=self._meet,
        )

    def _spawn(self, header: Header, payload: bytes) -> Any:
        try:
            cls, args, kwargs = pickle.loads(payload)
            self._actors[header["a"]] = cls(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, _Cancelled):
            raise
        except BaseException as error:
            self._actors[header["a"]] = _Broken(*_refusal(header, error, "its constructor raised"))
            raise
        finally:
            self._loop.call_soon_threadsafe(self._made, header["a"])

    def _call(self, header: Header, payload: bytes) -> Any:
        if "a" not in header:
            function, args, kwargs = pickle.loads(payload)
            return function(*args, **kwargs)
        actor = self._actors.get(header["a"])
        if isinstance(actor, _Broken):
            raise _ActorBroken(actor)
        if actor is None:
            raise UsageError(f"the actor of {header['what']} was stopped")
        args, kwargs = pickle.loads(payload)
        return getattr(actor, header["m"])(*args, **kwargs)

    def _start_task(self, context: contextvars.Context, header: Header, coroutine: Any) -> None:
        call: int = header["i"]
        task = self._loop.create_task(self._await(header, coroutine), context=context)
        self._tasks[call] = task
        task.add_done_callback(lambda _: self._tasks.pop(call, None))
        if call in self._cancelled:
            task.cancel()

    async def _await(self, header: Header, coroutine: Any) -> None:
        try:
            self._answer(header, await coroutine)
        except asyncio.CancelledError as error:
            if header["i"] not in self._cancelled:  # not by the caller, who waits
                self._refuse(header, error)
            self._cancelled.discard(header["i"])
        except (SystemExit, KeyboardInterrupt) as error:
            # Ends a thread only, and not this process, if it is left to asyncio.
            code = error.code if isinstance(error, SystemExit) else 1
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)
        except BaseException as error:
            self._refuse(header, error)

    def _answer(self, header: Header, value: Any) -> None:
        if header.get("quiet"):
            return
        try:
            payload = dump(value, header.get("limit", LIMIT), f"the result of {header['what']}")
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # pickling runs code of the value's
            self._refuse(header, error, unsendable=True)
            return
        self._send({"k": "r", "i": header["i"]}, payload)

    def _refuse(self, header: Header, error: BaseException, unsendable: bool = False) -> None:
        if isinstance(error, _ActorBroken):
            refusal, payload = error.broken.header, error.broken.payload
        else:
            refusal, payload = _refusal(header, error, "")
        refusal = {**refusal, "i": header["i"], "unsendable": unsendable, "quiet": bool(header.get("quiet"))}
        if refusal["quiet"]:
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                print(f"{header['what']} (broadcast) raised\n{refusal['trace']}", file=sys.stderr, flush=True)
        self._send(refusal, payload)

    def _send(self, header: Header, payload: bytes = b"") -> None:
        with self._sending:
            self._data.send(header, payload)

    def _send_whole(self, header: Header) -> None:
        """Send from within a sync call. A cancellation that comes meanwhile waits."""
        call, self._running = self._running, None
        try:
            self._send(header)
        finally:
            self._running = call
        if call in self._cancelled:
            raise _Cancelled

    def _meet(self, key: str, of: list[int], value: str | None, timeout: float) -> str:
        """Wait until the processes `of` of the call have all come here, and get the value that one brings."""
        if threading.get_ident() != self._main:
            raise UsageError("processes can only meet in a sync function", "make this endpoint a `def`")
        event, answer = self._met.setdefault(key, (threading.Event(), []))
        try:
            self._send_whole({"k": "meet", "key": key, "i": self._running, "of": of, "v": value})
            if not event.wait(timeout):
                raise TimeoutError(f"the other processes of the call did not all come within {timeout:g} s")
        finally:
            del self._met[key]
        if "error" in answer[0]:
            raise MeshError(answer[0]["error"])
        return str(answer[0]["v"])


class _ActorBroken(Exception):
    def __init__(self, broken: _Broken) -> None:
        self.broken = broken


def _refusal(header: Header, error: BaseException, prefix: str) -> tuple[Header, bytes]:
    """An error as a message: its text always, the exception itself when it can be pickled."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    try:
        payload = dump(error.with_traceback(None), LIMIT, "the exception")
    except Exception:
        payload = b""
    words = f"{prefix}: " if prefix else ""
    words += type(error).__name__
    with contextlib.suppress(Exception):  # its own text may raise
        words += f": {error}"
    return {"k": "r", "i": header["i"], "error": words[:2000], "trace": text[-20_000:]}, payload


def main() -> None:
    config = json.loads(os.environ.pop(env.MESH))
    sys.path.extend(path for path in config["sys_path"] if path not in sys.path)
    Worker(config).run()
