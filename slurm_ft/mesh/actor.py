"""What code inside a process of a mesh uses: actors, their endpoints, and where it is.

    class Trainer(Actor):
        def __init__(self, config): ...
        @endpoint
        def step(self, x): ...          # one at a time, in the process's main thread
        @endpoint
        async def status(self): ...     # several at a time, on the process's event loop

A sync endpoint runs in the main thread, where signal handlers and torch expect to be, and holds up the sync
calls behind it; an async one does not, and answers while a sync one is busy. One actor may have both.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slurm_ft.errors import UsageError
from slurm_ft.mesh.extent import Extent, Point, Region
from slurm_ft.mesh.values import part_of

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__slurm_ft_endpoint__"


class Actor:
    """The base of classes that `mesh.spawn` puts into processes. State lives as long as its process does:
    after a repair the actor is made anew with the same arguments, and restores what it needs itself."""


def endpoint(method: F) -> F:
    """Mark a method of an actor as one that can be called from outside."""
    setattr(method, _MARK, True)
    return method


def endpoints_of(cls: type) -> dict[str, bool]:
    """The names of a class's endpoints, and whether each is async."""
    found = ((name, getattr(cls, name, None)) for name in sorted(dir(cls)))
    return {name: inspect.iscoroutinefunction(method) for name, method in found if getattr(method, _MARK, False)}


@dataclass(frozen=True)
class MeshView:
    """A mesh as seen from inside one of its processes: its shape and a way to torch, no calls.

    A ProcessMesh that is sent to a process arrives as one of these.
    """

    name: str
    region: Region

    @property
    def extent(self) -> Extent:
        return self.region.extent

    @property
    def size(self) -> int:
        return self.region.size

    def slice(self, **selection: int | slice) -> MeshView:
        """A part of it."""
        return MeshView(self.name, self.region.slice(**selection))

    def split(self, **parts: tuple[str, ...] | int) -> MeshView:
        return MeshView(self.name, self.region.split(**parts))

    def flatten(self, name: str) -> MeshView:
        return MeshView(self.name, self.region.flatten(name))

    def rename(self, **names: str) -> MeshView:
        return MeshView(self.name, self.region.rename(**names))

    @property
    def point(self) -> Point:
        """Our own place in it. Raises KeyError when we are not in it."""
        return part_of(self.region, context().rank.index)

    def torch_device_mesh(self, backend: str = "", timeout: float = 60.0) -> Any:
        """Start torch.distributed over these processes and give the DeviceMesh with their dimensions.

        Every process of the mesh calls it within one call, as a collective. Each time a new store is made,
        so that it works again after a repair; a process group from before is left first. `backend` is
        gloo, and nccl (RCCL too) beside it where there are GPUs. `timeout` in seconds bounds the meeting.
        Raises MeshError when another of the processes is lost before all have met, TimeoutError when it does
        not come, ImportError without torch.
        """
        from slurm_ft.mesh.remote.torch_mesh import device_mesh

        return device_mesh(self, context(), backend, timeout)


@dataclass(frozen=True)
class Context:
    """Where the running code is.

    `rank` is the process's place in the whole mesh, which never changes; `mesh` is what was called: the
    mesh or a slice of it. `incarnation` grows when the process is started again.
    """

    rank: Point
    mesh: MeshView
    host: str
    address: str
    local_rank: int
    incarnation: int
    call: int = 0
    meet: Callable[[str, list[int], str | None, float], str] | None = field(default=None, repr=False, compare=False)

    @property
    def message_rank(self) -> Point:
        """Our place within what was called, counted from 0 in a slice too: Monarch's `current_rank()`."""
        return self.mesh.point


_context: contextvars.ContextVar[Context] = contextvars.ContextVar("slurm_ft_mesh_context")


def enter(value: Context) -> None:
    """Set the context of the code that runs next; for the process's own main loop."""
    _context.set(value)


def context() -> Context:
    """Where we are. Raises UsageError outside of a mesh's process."""
    try:
        return _context.get()
    except LookupError:
        raise UsageError(
            "this is not a process of a mesh, or a thread that the mesh does not know",
            "call it in a function that `mesh.call` runs, or in an actor",
        ) from None


def current_rank() -> Point:
    """Our place within what was called, as in Monarch."""
    return context().message_rank


def current_mesh() -> MeshView:
    """What was called: the mesh or the slice of it."""
    return context().mesh
