"""How calls are made on a mesh: its shape, and the ways to call one thing on all of it.

What process meshes and actor meshes (`slurm_ft.mesh.remote.process_mesh`) have in common.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from slurm_ft.errors import UsageError
from slurm_ft.mesh.extent import Extent, Point, Region
from slurm_ft.mesh.futures import Future
from slurm_ft.mesh.remote.calls import Answer, Call, Raw, one_value, value_mesh
from slurm_ft.mesh.remote.core import Core
from slurm_ft.mesh.remote.loop import Loop
from slurm_ft.mesh.remote.pickling import LIMIT, dump
from slurm_ft.mesh.remote.state import State
from slurm_ft.mesh.values import ValueMesh, log

STOP_GRACE = 2.0
"""Seconds that a busy process has to finish when its mesh is stopped."""
_numbers = itertools.count(1)
_open: set[Shared] = set()
"""The meshes that are to be stopped at exit. Held here also when nobody else holds one: its processes live on."""


def next_number() -> int:
    """A number for a call or an actor; no other in this program has it."""
    return next(_numbers)


@dataclass(frozen=True)
class Options:
    """How one call is made. `timeout` in seconds (None: as long as it takes), `limit` in bytes for what is
    sent and for each result. With `wait` a call waits for a process that is being repaired, at most for
    `timeout`; without, it gets a SupervisionError for it at once."""

    timeout: float | None = None
    limit: int = LIMIT
    wait: bool = True

    def __post_init__(self) -> None:
        if self.timeout is not None and not isinstance(self.timeout, int | float):
            raise UsageError(f"timeout is {self.timeout!r}", "give seconds, as a number")


class Shared:
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
                try:
                    self.loop.start(self.core.stop(grace)).result()
                finally:
                    _open.discard(self)
                    shutil.rmtree(self.folder if self.temporary else self.core.crew.paths.secret, ignore_errors=True)


def _stop_all() -> None:
    for shared in list(_open):
        try:
            shared.stop(STOP_GRACE)
        except UsageError:
            pass
        except Exception:  # at exit threads may be gone already; the other meshes are stopped all the same
            log.exception("a mesh was not stopped in order")


atexit.register(_stop_all)


class Shaped:
    """What process and actor meshes have in common: a region of the whole mesh, and how to cut it."""

    _shared: Shared
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
        call = Call(next_number(), self._region, what, on_answer)
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


class Adverbs:
    """The ways to call one thing: a function (`ProcessMesh`) or an endpoint (`Endpoint`)."""

    def __init__(
        self,
        mesh: Shaped,
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
        return Adverbs(one, self._what, self._header, self._options, self._function).call_one(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        self._mesh._usable()
        shared, payload = self._mesh._shared, self._payload(args, kwargs)
        header = {**self._header, **self._mesh._common(next_number(), self._what, self._options), "quiet": True}
        shared.loop.soon(shared.core.switchboard.broadcast, self._mesh._region, header, payload)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        return Stream(self._mesh, self._what, self._header, self._payload(args, kwargs), self._options)


class Stream:
    """The answers of a call, each as a finished `Arrival` in the order in which they come.

    for arrival in trainer.step.stream(x): arrival.point, arrival.get()
    async for arrival in trainer.step.stream(x): ...
    """

    def __init__(self, mesh: Shaped, what: str, header: dict[str, Any], payload: bytes, options: Options) -> None:
        self._slots: list[concurrent.futures.Future[Raw]] = [concurrent.futures.Future() for _ in range(mesh.size)]
        self._arrived = iter(self._slots)
        self._filling = threading.Lock()
        self._call = mesh._begin(what, header, payload, options, self._answer)
        self._call.raw.add_done_callback(self._end)
        self._cancel = mesh._cancel(self._call)

    def _answer(self, index: int, answer: Answer) -> None:
        self._fill({index: answer})

    def _end(self, _: object) -> None:
        while self._fill({}):  # of places that were taken out, or of a cancelled call
            pass

    def _fill(self, raw: Raw) -> bool:
        """Put what came into the next slot; False when there is none left. A cancelled call is ended in the caller's
        thread, while an answer may still come in the mesh's."""
        with self._filling:
            slot = next(self._arrived, None)
        if slot is not None:
            slot.set_result(raw)
        return slot is not None

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
        for slot in self._slots:
            raw = await asyncio.shield(asyncio.wrap_future(slot))  # who stops waiting cancels no answer
            if raw:
                yield Arrival(self._call, slot, raw)


class Arrival(Future[Any]):
    """One answer of a stream: `point` says whose, `get()` gives the value or raises the error."""

    def __init__(self, call: Call, slot: concurrent.futures.Future[Raw], raw: Raw) -> None:
        super().__init__(slot, partial(one_value, call))
        self.point = call.point(next(iter(raw)))
