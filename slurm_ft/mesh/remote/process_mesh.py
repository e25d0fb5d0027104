"""What a Python program holds: meshes of processes, and of actors in them.

Every slice is a mesh again and shares its processes with the mesh it was cut from. All methods may be used
from any thread; results are `Future`s, which threads `get` and coroutines `await`.
"""

from __future__ import annotations

import html
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slurm_ft.errors import UsageError
from slurm_ft.mesh.actor import Actor, MeshView, endpoints_of
from slurm_ft.mesh.errors import MeshFailure
from slurm_ft.mesh.extent import Region
from slurm_ft.mesh.futures import Future
from slurm_ft.mesh.remote.calling import STOP_GRACE, Adverbs, Options, Shaped, Shared, Stream, next_number
from slurm_ft.mesh.remote.calls import Call, value_mesh
from slurm_ft.mesh.remote.pickling import dump
from slurm_ft.mesh.remote.state import Handler, State
from slurm_ft.mesh.remote.step import worker_log
from slurm_ft.mesh.remote.switchboard import ActorRecord
from slurm_ft.mesh.values import ValueMesh, log

ROWS = 64


class Endpoint:
    """One endpoint of the actors of a mesh: `trainer.step.call(x)`."""

    def __init__(self, actors: ActorMesh, name: str, options: Options) -> None:
        self._actors, self._name, self._options = actors, name, options
        header = {"a": actors._record.number, "m": name, "async": actors._names[name]}
        self._adverbs = Adverbs(actors, f"{actors.name}.{name}", header, options)

    def options(self, **changes: Any) -> Endpoint:
        """The same endpoint, called in another way: `timeout=`, `limit=`, `wait=` (see `Options`)."""
        return Endpoint(self._actors, self._name, replace(self._options, **changes))

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


class ActorMesh(Shaped):
    """The actors that one `spawn` has made. Each endpoint of the class is an attribute (see `Endpoint`)."""

    def __init__(self, shared: Shared, region: Region, record: ActorRecord, name: str, names: dict[str, bool]) -> None:
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


class ProcessMesh(Shaped):
    """Processes on the hosts of an allocation, or a slice of them. Made by `Allocation.processes`."""

    def __init__(self, shared: Shared, region: Region, started: Call, options: Options | None = None) -> None:
        self._shared, self._region, self._started = shared, region, started
        self._options = options or Options()

    def _with(self, region: Region) -> Self:
        return type(self)(self._shared, region, self._started, self._options)

    def options(self, **changes: Any) -> Self:
        """The same processes, called in another way: `timeout=`, `limit=`, `wait=` (see `Options`)."""
        return type(self)(self._shared, self._region, self._started, replace(self._options, **changes))

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

    def _function(self, function: Callable[..., Any]) -> Adverbs:
        if not callable(function):
            raise TypeError(f"the first argument is a function, not {type(function).__name__}")
        what = getattr(function, "__name__", type(function).__name__)
        return Adverbs(self, what, {"async": inspect.iscoroutinefunction(function)}, self._options, function)

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
        number = next_number()
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
        call = Call(next_number(), self._region, "restart")
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
