"""Frees a rank from a collective with a replica that is gone; for any program that uses torchft's Manager.

When a process dies, the kernel closes its connections and its peers know at once. When a host dies or is cut
off, nobody closes anything: a survivor waits in its collective until the process group's time-out. The
controller knows of the loss earlier. It tells the other agents, they tell their ranks, and this module does
in each of them what the kernel of the lost host could not do.

`install` has torchft's Manager watched from its construction on:

- the ids of the members of each quorum are kept as they come. They hold a part that is new with each start of
  a replica, or of its agent where the script uses our Manager. The order goes out when the attempt has ended and
  before the next one is started, so it meets a quorum with the old attempt, or none with this member;
- the connections that a process group opens while it is configured are kept by their inode.

`leave(member)` shuts down the connections of a group whose present quorum has this member, and does nothing
otherwise. gloo sees closed connections and lets go of every operation at once. (`abort` of a gloo group would
wait for the very operations that hang: it was seen not to return before their time-out.) Other kinds of
groups have an `abort` that works, which is called. What follows is torchft's own way: the step is not
committed, and the next quorum makes a new group.

No operation need be running; a group that is just being configured is freed too; a second order for the same
member does nothing. A new quorum that arrives meanwhile waits for the order to be carried out, so the next
group is never hit.

A group is made through the store of one of its replicas, which may be the one that is gone. torch's client tries
a dead store again and again, beyond its own time-out (2 s become up to 7 s), and cannot be told to stop. So
`install_store` has the client made in short tries: none is made once the rank was told to leave, or before
something listens at the store's address.

Like bootstrap.py this uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

VARIABLES = {
    "timeout": "TORCHFT_TIMEOUT_SEC",
    "quorum_timeout": "TORCHFT_QUORUM_TIMEOUT_SEC",
    "connect_timeout": "TORCHFT_CONNECT_TIMEOUT_SEC",
}
AGAIN = 0.05
"""Seconds between two looks at a group that is being configured with a member that is gone."""

TRY = 2.0
"""Seconds that torch's client of a store is given at a time; it takes up to three times as long."""

TIMEOUTS = "SLURM_FT_TIMEOUTS"

Report = Callable[..., None]


def defaults(environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """The run's time-outs in seconds for who sets none, by the names of torchft's arguments; {} outside a run."""
    return dict(json.loads(environ.get(TIMEOUTS) or "{}"))


def open_connections() -> dict[str, int]:
    """The sockets of this process: inode as the kernel writes it -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def shut(inodes: Iterable[str]) -> int:
    """Shut these TCP connections down, in both directions; gives how many. A listening socket is left alone:
    it holds nobody up, and gloo's would end the process."""
    wanted, count = set(inodes), 0
    for inode, descriptor in open_connections().items():
        if inode not in wanted:
            continue
        with contextlib.suppress(OSError):
            copy = os.dup(descriptor)
            try:
                if os.readlink(f"/proc/self/fd/{copy}") == inode:  # or the number has been used again meanwhile
                    count += _shut(copy)
            finally:
                os.close(copy)
    return count


def _shut(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if not tcp or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


class Watched:
    """One Manager: who is in its quorum, and which connections its process group has."""

    def __init__(self, group: Any) -> None:
        self.members: frozenset[str] = frozenset()
        self.left = False  # the present quorum has a member that is gone: no group can be made of it
        self._group = group
        self._lock = threading.Lock()
        self._before: frozenset[str] | None = None  # the connections that were there, while a group is configured
        self._connections: frozenset[str] = frozenset()

    def quorum(self, members: Iterable[str]) -> None:
        """A quorum has come. Waits while an order for the last one is carried out."""
        with self._lock:
            self.members, self.left = frozenset(members), False
            for member in self.members:
                gone.pop(member, None)

    def configure(self, configure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Configure the group, and keep what connections that makes."""
        with self._lock:
            self._before, self._connections = frozenset(open_connections()), frozenset()
        _configuring.watched = self
        try:
            return configure(*args, **kwargs)
        finally:
            _configuring.watched = None
            with self._lock:
                self._connections, self._before = frozenset(open_connections()) - self._before, None

    def leave(self, member: str) -> bool:
        """Free this rank from a group with this member. False when it is in no quorum with it."""
        with self._lock:
            if member not in self.members:
                return False
            self.members -= {member}
            self.left = True
            quorum = self.members
            self._free()
        while True:  # a group that is being configured opens more connections, and may wait for more
            with self._lock:
                if self._before is None or self.members is not quorum:
                    return True
                shut(frozenset(open_connections()) - self._before)
            threading.Event().wait(AGAIN)

    def cut_off(self) -> None:
        """Free this rank from its group as it is now, whoever is in it."""
        with self._lock:
            self._free()

    def _free(self) -> None:
        if self._before is None:
            shut(self._connections)
            if not is_gloo(self._group):
                self._group.abort()


def is_gloo(group: Any) -> bool:
    """Is this torchft's gloo group in this process, perhaps in a wrapper of torchft's?"""
    while group is not None:
        if any(kind.__name__ == "ProcessGroupGloo" for kind in type(group).__mro__):
            return True
        group = getattr(group, "_pg", None)
    return False


class _Client:
    """torchft's ManagerClient, whose quorums are seen before the Manager sees them."""

    def __init__(self, client: Any, watched: Watched) -> None:
        self._client, self._watched = client, watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *args: Any, **kwargs: Any) -> Any:
        quorum = self._client._quorum(*args, **kwargs)
        self._watched.quorum(quorum.replica_ids)
        return quorum


_configuring = threading.local()
"""`watched`: whose group this thread configures, if any."""

_managers: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()

gone: dict[str, float] = {}
"""Members that we were told are gone, and when by time.monotonic(), until a quorum has them again."""


def leave(member: str) -> int:
    """Free all Managers of this process from this member; gives how many were in a quorum with it."""
    gone[member] = time.monotonic()
    return sum(watched.leave(member) for watched in list(_managers.values()))


def cut_off() -> int:
    """Free all Managers of this process from their groups (a fault on purpose); gives how many there are."""
    watched = list(_managers.values())
    for item in watched:
        item.cut_off()
    return len(watched)


def install(module: Any, given_out: Mapping[str, float], report: Report) -> None:
    """Watch every Manager that `module` (torchft.manager) makes from now on.

    `given_out` are time-outs in seconds for arguments that a program leaves out; an argument that it gives and
    torchft's variables win. `report(kind, **fields)` is told how the Lighthouse will know this replica, and
    what the Manager's time-outs are.
    """
    original = module.Manager.__init__
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        for name, variable in VARIABLES.items():
            known = name in given_out and name in signature.parameters
            if known and name not in given and variable not in os.environ:
                kwargs[name] = timedelta(seconds=given_out[name])
        original(self, *args, **kwargs)
        # What torchft does with these is its own affair: without them a rank trains on, unwatched.
        with contextlib.suppress(AttributeError, TypeError):
            watch(self, report)

    module.Manager.__init__ = __init__


def install_store(module: Any) -> None:
    """Have the groups of `module` (torchft.process_group) make the client of their store in short tries."""
    original = module.create_store_client
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_store_client(store_addr: str, timeout: timedelta) -> Any:
        watched = getattr(_configuring, "watched", None)
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            _wait_for_listener(store_addr, deadline, watched)
            left = max(deadline - time.monotonic(), AGAIN)
            try:
                store = original(store_addr, timeout=timedelta(seconds=min(TRY, left)))
            except RuntimeError:  # torch's errors of the network are such
                if time.monotonic() >= deadline:
                    raise
            else:
                store.set_timeout(timeout)
                return store

    module.create_store_client = create_store_client


def _wait_for_listener(address: str, deadline: float, watched: Watched | None) -> None:
    """Return when something listens at `host:port/prefix`.

    Raises:
        ConnectionAbortedError: this rank was told to leave the group for which the store is.
        OSError: nobody listens there until `deadline` (time.monotonic()).
    """
    host, _, port = address.partition("/")[0].rpartition(":")
    while True:
        if watched is not None and watched.left:
            raise ConnectionAbortedError("a member of this quorum is gone")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=TRY).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            threading.Event().wait(AGAIN)
        else:
            return


def watch(manager: Any, report: Report) -> None:
    """Watch a Manager that has just been made."""
    watched = Watched(manager._pg)
    configure = manager._pg.configure
    manager._pg.configure = functools.partial(watched.configure, configure)
    manager._client = _Client(manager._client, watched)
    _managers[manager] = watched
    report("member", id=manager._logger._replica_id, timeouts=timeouts(manager))


def timeouts(manager: Any) -> dict[str, float]:
    """A Manager's time-outs in seconds, by the names of their arguments, and its group's."""
    values = {name: getattr(manager, f"_{name}", None) for name in VARIABLES}
    values["process_group"] = getattr(manager._pg, "_timeout", None)
    return {name: value.total_seconds() for name, value in values.items() if isinstance(value, timedelta)}
