"""What a Python program holds: meshes of processes, and of actors in them.

Every slice is a mesh again and shares its processes with the mesh it was cut from. All methods may be used
from any thread; results are `Future`s, which threads `get` and coroutines `await`.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import html
import inspect
import itertools
import random
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slurm_ft.errors import UsageError
from slurm_ft.mesh.actor import Actor, MeshView, endpoints_of
from slurm_ft.mesh.errors import MeshFailure
from slurm_ft.mesh.extent import Extent, Point, Region
from slurm_ft.mesh.futures import Future
from slurm_ft.mesh.remote.calls import Answer, Call, Raw, one_value, value_mesh
from slurm_ft.mesh.remote.core import Core
from slurm_ft.mesh.remote.loop import Loop
from slurm_ft.mesh.remote.pickling import LIMIT, dump
from slurm_ft.mesh.remote.state import Handler, State
from slurm_ft.mesh.remote.step import worker_log
from slurm_ft.mesh.remote.switchboard import ActorRecord
from slurm_ft.mesh.values import ValueMesh, log

ROWS = 64
STOP_GRACE = 2.0
_numbers = itertools.count(1)
_open: weakref.WeakSet[_Shared] = weakref.WeakSet()


@dataclass(frozen=True)
class Options:
    """How one call is made. `timeout` in seconds (None: as long as it takes), `limit` in bytes for what is
    sent and for each result. With `wait` a call waits for a process that is being repaired, at most for
    `timeout`; without, it gets a SupervisionError for it at once."""

    timeout: float | None = None
    limit: int = LIMIT
    wait: bool = True


class _Shared:
    """What a mesh and all its slices have in common."""

    def __init__(self, core: Core, loop: Loop, folder: Path, temporary: bool) -> None:
        self.core, self.loop, self.folder, self.temporary = core, loop, folder, temporary
        self._stopping = threading.Lock()
        self.stopped = False
        _open.add(self)

    def check(self) -> None:
        self.loop.check()
        if self.stopped:
            raise UsageError(f"the mesh {self.core.crew.name} was stopped", "make another with `processes`")

    def stop(self, grace: float) -> None:
        self.loop.check()
        with self._stopping:
            if not self.stopped:
                self.stopped = True
                self.loop.start(self.core.stop(grace)).result()
                shutil.rmtree(self.folder if self.temporary else self.core.crew.paths.secret, ignore_errors=True)


def _stop_all() -> None:
    for shared in list(_open):
        with contextlib.suppress(UsageError):
            shared.stop(STOP_GRACE)


atexit.register(_stop_all)


class _Shaped:
    """What process and actor meshes have in common: a region of the whole mesh, and how to cut it."""

    _shared: _Shared
    _region: Region

    def _with(self, region: Region) -> Self:
        raise NotImplementedError

    @property
    def extent(self) -> Extent:
        return self._region.extent

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._region.size

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dimension."""
        return dict(zip(self._region.labels, self._region.sizes, strict=True))

    def __len__(self) -> int:
        return self._region.size

    def slice(self, **selection: int | slice) -> Self:
        """A part: a number picks a coordinate and removes the dimension, a slice keeps it.

        Raises TypeError for an unknown dimension, IndexError for a place outside.
        """
        return self._with(self._region.slice(**selection))

    def flatten(self, name: str) -> Self:
        """The same processes along one dimension. Raises ValueError for a slice with gaps."""
        return self._with(self._region.flatten(name))

    def split(self, **parts: tuple[str, ...] | int) -> Self:
        """Cut dimensions into several: `split(gpu=("dp", "tp"), tp=2)`. Raises ValueError, TypeError."""
        return self._with(self._region.split(**parts))

    def rename(self, **names: str) -> Self:
        """Other names for dimensions: `rename(host="node")`."""
        return self._with(self._region.rename(**names))

    def point(self, rank: int) -> Point:
        """The coordinates of a rank, counted within this mesh. Raises IndexError."""
        return self._region.extent.point(rank)

    def rank(self, **coordinates: int) -> int:
        """The rank at coordinates, counted within this mesh. All dimensions must be given."""
        return self._region.extent.index(**coordinates)

    # Calls.

    def _begin(
        self, what: str, header: dict[str, Any], payload: bytes, options: Options, on_answer: Any = None
    ) -> Call:
        self._usable()
        call = Call(next(_numbers), self._region, what, on_answer)
        full = {**header, **self._common(call.number, what, options)}
        core = self._shared.core
        self._shared.loop.soon(core.switchboard.submit, call, full, payload, options.timeout, options.wait)
        return call

    def _common(self, number: int, what: str, options: Options) -> dict[str, Any]:
        region = self._region
        place = (region.labels, region.sizes, region.strides, region.offset)
        return {"k": "call", "i": number, "what": what, "region": place, "limit": options.limit}

    def _usable(self) -> None:
        """Raises UsageError for a stopped mesh, and the MeshFailure of a process that nobody repaired."""
        self._shared.check()
        failed = self._shared.core.crew.failed
        if failed:
            for index in self._region:
                if index in failed:
                    raise failed[index]

    def _cancel(self, call: Call) -> Callable[[], None]:
        return lambda: self._shared.loop.soon(self._shared.core.switchboard.cancel, call)


class _Adverbs:
    """The ways to call one thing: a function (`ProcessMesh`) or an endpoint (`Endpoint`)."""

    def __init__(
        self,
        mesh: _Shaped,
        what: str,
        header: dict[str, Any],
        options: Options,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self._mesh, self._what, self._header, self._options, self._function = mesh, what, header, options, function

    def _payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        limit = self._options.limit
        if self._function is None:
            return dump((args, kwargs), limit, f"the arguments of {self._what}")
        # The function travels with its arguments, in one pickle: they may share objects.
        return dump((self._function, args, kwargs), limit, f"{self._what}() or its arguments")

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        call = self._mesh._begin(self._what, self._header, self._payload(args, kwargs), self._options)
        return Future(call.raw, partial(value_mesh, call), self._mesh._cancel(call))

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._mesh.size != 1:
            raise UsageError(
                f"call_one is for a mesh of one process, and this has {self._mesh.size}",
                "cut one out with slice(), or use call() or choose()",
            )
        call = self._mesh._begin(self._what, self._header, self._payload(args, kwargs), self._options)
        return Future(call.raw, partial(one_value, call), self._mesh._cancel(call))

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self._mesh._shared.check()
        processes = self._mesh._shared.core.crew.processes
        places = list(self._mesh._region)
        up = [index for index in places if processes[index].state is State.UP]
        wanted = [index for index in places if processes[index].state in (State.STARTING, State.REPAIRING)]
        if not up and not wanted:
            self._mesh._usable()
            raise UsageError("no process of this mesh is left", "restart() it, or make another with `processes`")
        index = random.choice(up or wanted)
        one = self._mesh._with(Region((), (), (), index))
        return _Adverbs(one, self._what, self._header, self._options, self._function).call_one(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        self._mesh._usable()
        shared, payload = self._mesh._shared, self._payload(args, kwargs)
        header = {**self._header, **self._mesh._common(next(_numbers), self._what, self._options), "quiet": True}
        shared.loop.soon(shared.core.switchboard.broadcast, self._mesh._region, header, payload)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        return Stream(self._mesh, self._what, self._header, self._payload(args, kwargs), self._options)


class Stream:
    """The answers of a call, each as a finished `Arrival` in the order in which they come.

    for arrival in trainer.step.stream(x): arrival.point, arrival.get()
    async for arrival in trainer.step.stream(x): ...
    """

    def __init__(self, mesh: _Shaped, what: str, header: dict[str, Any], payload: bytes, options: Options) -> None:
        self._slots: list[concurrent.futures.Future[Raw]] = [concurrent.futures.Future() for _ in range(mesh.size)]
        self._arrived = iter(self._slots)
        self._call = mesh._begin(what, header, payload, options, self._answer)
        self._call.raw.add_done_callback(self._end)
        self._cancel = mesh._cancel(self._call)

    def _answer(self, index: int, answer: Answer) -> None:
        next(self._arrived).set_result({index: answer})

    def _end(self, _: object) -> None:
        for left in self._arrived:  # of places that were taken out, or of a cancelled call
            left.set_result({})

    def cancel(self) -> None:
        """Stop waiting for the answers that are still to come."""
        if self._call.raw.cancel():
            self._cancel()

    def __iter__(self) -> Iterator[Arrival]:
        for slot in self._slots:
            raw = slot.result()
            if raw:
                yield Arrival(self._call, slot, raw)

    async def __aiter__(self) -> AsyncIterator[Arrival]:
        import asyncio

        for slot in self._slots:
            raw = await asyncio.wrap_future(slot)
            if raw:
                yield Arrival(self._call, slot, raw)


class Arrival(Future[Any]):
    """One answer of a stream: `point` says whose, `get()` gives the value or raises the error."""

    def __init__(self, call: Call, slot: concurrent.futures.Future[Raw], raw: Raw) -> None:
        super().__init__(slot, partial(one_value, call))
        self.point = call.point(next(iter(raw)))


class Endpoint:
    """One endpoint of the actors of a mesh: `trainer.step.call(x)`."""

    def __init__(self, actors: ActorMesh, name: str, options: Options) -> None:
        self._actors, self._name, self._options = actors, name, options
        header = {"a": actors._record.number, "m": name, "async": actors._names[name]}
        self._adverbs = _Adverbs(actors, f"{actors.name}.{name}", header, options)

    def options(self, timeout: float | None = None, limit: int = LIMIT, wait: bool = True) -> Endpoint:
        """The same endpoint, called in another way; see `Options`."""
        return Endpoint(self._actors, self._name, Options(timeout, limit, wait))

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Call all actors. The result has a value or an error for each; it comes even if processes are lost."""
        return self._adverbs.call(*args, **kwargs)

    def call_one(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the only actor of the mesh: the result is its value. Raises UsageError if there are more."""
        return self._adverbs.call_one(*args, **kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call any one of the actors whose process is up."""
        return self._adverbs.choose(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Call all actors and wait for nothing. What one raises is logged, there and here."""
        self._adverbs.broadcast(*args, **kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Call all actors and give the answers as they come."""
        return self._adverbs.stream(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self._name} runs in other processes: say how to call it, as in "
            f"{self._actors.name}.{self._name}.call(...), or call_one, choose, broadcast, stream"
        )


class ActorMesh(_Shaped):
    """The actors that one `spawn` has made. Each endpoint of the class is an attribute (see `Endpoint`)."""

    def __init__(self, shared: _Shared, region: Region, record: ActorRecord, name: str, names: dict[str, bool]) -> None:
        self._shared, self._region, self._record, self.name, self._names = shared, region, record, name, names

    def _with(self, region: Region) -> Self:
        return type(self)(self._shared, region, self._record, self.name, self._names)

    def __getattr__(self, name: str) -> Endpoint:
        if name in self.__dict__.get("_names", ()):
            return Endpoint(self, name, Options())
        known = ", ".join(sorted(self.__dict__.get("_names", ()))) or "none"
        raise AttributeError(f"{name!r} is no endpoint; the endpoints are: {known}")

    @property
    def initialized(self) -> Future[ValueMesh[None]]:
        """Done when the constructors have run; holds what they raised."""
        made = self._record.made
        return Future(made.raw, partial(value_mesh, made))

    def stop(self) -> None:
        """Forget the actors, here and in the processes."""
        self._shared.check()
        self._shared.loop.soon(self._shared.core.switchboard.drop, self._record.number)

    def __reduce__(self) -> Any:
        raise TypeError("an actor mesh stays in the program that made it")

    def __repr__(self) -> str:
        return f"<ActorMesh {self.name} {self._region.extent}, endpoints: {', '.join(sorted(self._names))}>"


class ProcessMesh(_Shaped):
    """Processes on the hosts of an allocation, or a slice of them. Made by `Allocation.processes`."""

    def __init__(self, shared: _Shared, region: Region, started: Call, options: Options | None = None) -> None:
        self._shared, self._region, self._started = shared, region, started
        self._options = options or Options()

    def _with(self, region: Region) -> Self:
        return type(self)(self._shared, region, self._started, self._options)

    def options(self, timeout: float | None = None, limit: int = LIMIT, wait: bool = True) -> Self:
        """The same processes, called in another way; see `Options`."""
        return type(self)(self._shared, self._region, self._started, Options(timeout, limit, wait))

    @property
    def name(self) -> str:
        return self._shared.core.crew.name

    @property
    def folder(self) -> Path:
        """Where the logs of its processes are."""
        return self._shared.folder

    @property
    def generation(self) -> int:
        """The number of repairs so far. Coordinates outlive them, state in the processes does not."""
        return self._shared.core.crew.generation

    @property
    def initialized(self) -> Future[ValueMesh[None]]:
        """Done when all processes of the whole mesh have come up for the first time."""
        return Future(self._started.raw, partial(value_mesh, self._started))

    # Functions.

    def _function(self, function: Callable[..., Any]) -> _Adverbs:
        if not callable(function):
            raise TypeError(f"the first argument is a function, not {type(function).__name__}")
        what = getattr(function, "__name__", type(function).__name__)
        return _Adverbs(self, what, {"async": inspect.iscoroutinefunction(function)}, self._options, function)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Run a function in every process. The result has a value or an error for each, whatever happens.

        Raises NotPicklable or PayloadTooLarge when it cannot be sent, and a process's MeshFailure when it
        was lost before and nobody repaired it.
        """
        return self._function(function).call(*args, **kwargs)

    def call_one(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in the only process of the mesh. Raises UsageError if there are more."""
        return self._function(function).call_one(*args, **kwargs)

    def choose(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in any one process that is up."""
        return self._function(function).choose(*args, **kwargs)

    def broadcast(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a function in every process and wait for nothing."""
        self._function(function).broadcast(*args, **kwargs)

    def stream(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Stream:
        """Run a function in every process and give the answers as they come."""
        return self._function(function).stream(*args, **kwargs)

    # Actors.

    def spawn(self, name: str, cls: type[Actor], *args: Any, **kwargs: Any) -> ActorMesh:
        """Make an actor of this class in every process, and again in a process that was repaired.

        Returns at once; a call before it is made waits. Raises TypeError for a class that is no Actor.
        """
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            raise TypeError(f"{getattr(cls, '__name__', cls)} is no subclass of slurm_ft.Actor")
        self._usable()
        payload = dump((cls, args, kwargs), self._options.limit, f"{cls.__name__} or its arguments")
        number = next(_numbers)
        made = Call(number, self._region, f"{name} ({cls.__name__})")
        header = {**self._common(number, made.what, self._options), "k": "spawn", "a": number}
        record = ActorRecord(number, header, payload, made)
        self._shared.loop.soon(self._shared.core.switchboard.spawn, record)
        return ActorMesh(self._shared, self._region, record, name, endpoints_of(cls))

    # Supervision.

    def on_failure(self, handler: Handler) -> Handler:
        """Have `handler(failure)` asked what to do about a lost process or host; usable as a decorator.

        It answers with an `Action`, with another truthy value if it has seen to it itself, or with a falsy
        one to leave it to the handlers before it, the owner's `__supervise__`, and then to the ladder. It runs
        in a thread of its own, for 60 s at most, and may use the mesh. The handlers are those of the whole mesh.
        """
        self._shared.check()
        self._shared.core.repairs.handlers.append(handler)
        return handler

    def restart(self) -> Future[ValueMesh[None]]:
        """End these processes and start them again, also those that were given up. Done when they are up."""
        self._shared.check()
        call = Call(next(_numbers), self._region, "restart")
        self._shared.loop.soon(self._shared.core.restart, self._region, call)
        return Future(call.raw, partial(value_mesh, call), self._cancel(call))

    def states(self) -> ValueMesh[str]:
        """What each process is doing: starting, up, repairing, failed, ..."""
        processes = self._shared.core.crew.processes
        states = {rank: processes[index].state.value for rank, index in enumerate(self._region)}
        return ValueMesh(self.extent, states, {}, "states")

    def logs(self) -> ValueMesh[Path]:
        """The log of each process as it is now: what it has printed."""
        processes = self._shared.core.crew.processes
        files = {
            rank: worker_log(self._shared.folder, index, processes[index].incarnation)
            for rank, index in enumerate(self._region)
        }
        return ValueMesh(self.extent, files, {}, "logs")

    def hosts(self) -> list[str]:
        """The names of the hosts that carry these processes now."""
        core = self._shared.core
        return list(dict.fromkeys(core.crew.slots[index // core.crew.per_host].host for index in self._region))

    def torch_device_mesh(self) -> Any:
        """Only inside the processes: send this mesh to them, or use `slurm_ft.mesh.current_mesh()` there."""
        raise UsageError(
            "torch_device_mesh is for the processes of the mesh, and this is their client",
            "call it in a function: `mesh.call(lambda m: m.torch_device_mesh(), mesh)`, or on current_mesh() there",
        )

    # End.

    def stop(self, grace: float = STOP_GRACE) -> None:
        """End all processes of the whole mesh: idle ones at once, busy ones after `grace` seconds."""
        self._shared.stop(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        await asyncio.to_thread(self.stop)

    def __reduce__(self) -> Any:
        return MeshView, (self.name, self._region)

    def __repr__(self) -> str:
        states = [self._shared.core.crew.processes[index].state for index in self._region]
        counts = ", ".join(f"{states.count(state)} {state}" for state in State if state in states)
        stopped = "stopped" if self._shared.stopped else counts
        return f"<ProcessMesh {self.name} {self.extent} on {len(self.hosts())} hosts: {stopped}>"

    def _repr_html_(self) -> str:
        core, rows = self._shared.core, []
        for rank, index in itertools.islice(enumerate(self._region), ROWS):
            process, place = core.crew.processes[index], self.extent.point(rank).values()
            host = core.crew.slots[index // core.crew.per_host].host
            cells = [*place, host, process.pid or "", process.state.value, process.incarnation]
            rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
        names = [*self.extent.labels, "on", "pid", "state", "incarnation"]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        return f"<table><caption>{html.escape(repr(self))}</caption><tr>{head}</tr>{''.join(rows)}</table>"


def default_fault_hook(failure: MeshFailure) -> None:
    """What is done about a failure that nobody repairs, besides raising it on next use: it is logged."""
    log.error("nobody repairs it: %s", failure.report())
