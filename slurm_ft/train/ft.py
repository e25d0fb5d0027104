"""torchft 0.2.0 with two faults mended, for any training script.

    from slurm_ft.train.ft import DistributedDataParallel, Manager

Both are subclasses and take torchft's own arguments.

Manager: when an operation fails, it leaves the group of replicas at once, and with it lets go of everything
that keeps gloo's sockets open. torchft waits for the next quorum to do so; until then a survivor that is not
a ring neighbour of the dead one keeps waiting for data from a healthy peer that has given up, up to the
group's time-out. Closed sockets carry the news round the ring in milliseconds.

A rank that an agent starts again takes up the name it had in the quorum (see `Manager`), so nobody waits for
the heartbeat of the dead one to grow old.

DistributedDataParallel: torchft's hook asks a failed reduction for a future that was never made, and the
survivor dies of an AssertionError. Here the hook hands back the bucket, whatever it holds: the Manager knows
of the error and lets no optimizer step on it.

Also here: `PeerTransport`, a checkpoint transport that is fast and asks for the run's secret; and a reader of
the Lighthouse's status page.
"""

# Annotations are not postponed here: DistributedDataParallel checks those of its hook.
import contextlib
import os
import re
import socket
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torchft
import torchft.manager

from slurm_ft import env
from slurm_ft.train import survivors
from slurm_ft.train.progress import report_phase
from slurm_ft.train.transport import PeerTransport as PeerTransport

FRESH_SECONDS = 0.8  # heartbeats come every 0.1 s; a rank forked anew is back after about a second


def own_address(environ: Mapping[str, str]) -> str:
    """The name or address under which other hosts reach this rank.

    MASTER_ADDR is one for the ranks of the replica's first host, since the peers already use it for the
    replica's store. Another host takes the address from which it would talk to MASTER_ADDR, and its own name
    when that cannot be told.
    """
    master = environ.get("MASTER_ADDR") or socket.gethostname()
    rank, local = int(environ.get("RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if rank < max(local, 1):
        return master
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


@contextlib.contextmanager
def _own_name(agent: str) -> Iterator[None]:
    """Within, what torchft takes for a new UUID is the same for all starts by this agent."""
    if not agent:
        yield
        return
    whole = torchft.manager.uuid
    same = uuid.uuid5(uuid.NAMESPACE_OID, agent)
    torchft.manager.uuid = SimpleNamespace(uuid4=lambda: same)
    try:
        yield
    finally:
        torchft.manager.uuid = whole


class _FirstErrorLogger(torchft.manager._ManagerLogger):  # type: ignore[misc]
    """One dead peer fails one operation per parameter: the first traceback of a step says it all."""

    def exception(self, msg: str) -> None:
        if self._manager.errored() is None:
            super().exception(msg)


class _Client:
    """torchft's client of the replica's own server, which remembers the last quorum."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.quorum: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *args: Any, **kwargs: Any) -> Any:
        self.quorum = self._client._quorum(*args, **kwargs)
        return self.quorum


class Manager(torchft.Manager):  # type: ignore[misc]
    """torchft's Manager that leaves the group on the first error of a step, and keeps its name.

    torchft gives each start of a replica a new name. The Lighthouse then holds the next quorum back until the
    heartbeat of the old name is too old: a second by default. An agent starts a rank again only when the old
    process has ended, so all starts by one agent can have one name: with it the quorum is complete at once.
    The first request of a start says that a step was not committed, which has the Lighthouse give a new
    quorum id: without it the others would keep the group in which the dead process is.

    `heals` counts the states loaded from a peer, `syncs` the votes on a commit, `committed` tells how the
    last vote ended, `members` are the ids in the last quorum. `not_without` are ids of earlier quorums without which,
    if they live, a new quorum commits nothing: they may have committed what was not committed here (see local_sgd.py).
    """

    _logger: Any
    _client: Any
    not_without: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.heals = 0
        self.syncs = 0
        self.committed = False
        self._left: object = None
        self._may_heal = True
        name_is_kept = os.environ.get(env.SOCKET, "")
        with _own_name(name_is_kept):
            super().__init__(*args, **kwargs)
        self._borrowed_failures = 1 if name_is_kept else 0
        self._commit_failures = self._borrowed_failures
        self._client = _Client(self._client)
        name = self._logger._replica_id
        self._logger = _FirstErrorLogger(manager=self, replica_id=name, group_rank=self._group_rank)

    def receive_in_place(self) -> None:
        """Have our PeerTransport write a peer's state over this rank's own, where it fits. Call it once, before
        the first step."""
        self._checkpoint_transport.into = self._manager_state_dict

    def report_error(self, e: Exception) -> None:
        first = self.errored() is None
        super().report_error(e)  # has taken down the traceback as text
        # gloo closes its sockets when the last operation is forgotten. The frames of the traceback hold one.
        e.__traceback__ = None
        if first:
            self._leave()

    def _leave(self) -> None:
        if isinstance(threading.current_thread(), threading._DummyThread):
            # A thread of the group itself reports. The group's end waits for its threads, so the end must
            # come in another one: at the next quorum.
            self._left = getattr(self._pg, "_pg", None)
        try:
            self._pg.abort()
        except Exception as failure:
            self._logger.warn(f"could not leave the group at once: {failure}")

    @property
    def members(self) -> frozenset[str]:
        quorum = self._client.quorum
        return frozenset(quorum.replica_ids if quorum is not None else ())

    def start_quorum(self, allow_heal: bool = True, *args: Any, **kwargs: Any) -> None:
        self._left = None
        self._may_heal = allow_heal
        super().start_quorum(allow_heal, *args, **kwargs)
        if not self._use_async_quorum and (absent := self._absent()):
            # Before anything is reduced: so nobody in this quorum can commit anything.
            why = f"{', '.join(absent)} may have committed, and is not in this quorum"
            self._logger.warn(why)
            self.report_error(RuntimeError(why))

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """As torchft's. Raises RuntimeError when this rank has to start again: its state is half a peer's and there is
        no peer to mend it, or peers want it from here; or the other ranks of its replica were healed and it was not."""
        transport = self._checkpoint_transport
        asked = getattr(transport, "asked_while_torn", False)
        if getattr(transport, "torn", False) and (asked or self.errored() is None):
            raise RuntimeError("a transfer broke, the state here is half the peer's, and no peer has it any more")
        self._check_step()
        # So far no step failed: what was said to the Lighthouse at the start does not count against max_retries.
        self._commit_failures -= self._borrowed_failures
        self._borrowed_failures = 0
        self.committed = bool(super().should_commit(timeout=timeout))
        self.syncs += 1
        return self.committed

    def _check_step(self) -> None:
        """torchft asks for a quorum with the step of one rank of the replica, whichever asks last. When one rank was
        healed and another was not, and the first asks last, nobody heals the other."""
        if self._quorum_future is not None:
            self.wait_quorum()
        quorum, asked = self._client.quorum, self._may_heal
        self._may_heal = False  # looked at once for each quorum: a vote moves the step
        if quorum is None or not asked or self.errored() is not None:
            return
        if self.current_step() != quorum.max_step:
            here, there = self.current_step(), quorum.max_step
            raise RuntimeError(f"this rank is at step {here}, its replica was healed to {there}")

    def _absent(self) -> list[str]:
        """Who must be in this quorum, lives and is not in it. When nobody can say who lives, it is all of whom we were
        not told that they are gone."""
        missing = sorted(self.not_without - self.members)
        asked = time.monotonic()
        view = view_lighthouse(lighthouse_url()) if missing else LighthouseView()
        if view is None:
            return [name for name in missing if name not in survivors.gone]
        # One that came back has its old name. A heartbeat since we were told tells it from one that has just died.
        ages = {name: view.heartbeats.get(name, inf) for name in missing}
        return [name for name in missing if ages[name] < min(FRESH_SECONDS, asked - survivors.gone.get(name, -inf))]

    def _apply_pending_state_dict(self) -> None:
        arrived = self._pending_state_dict is not None
        super()._apply_pending_state_dict()
        self.heals += arrived
        if arrived:
            report_phase("healed", source="peer", step=self.current_step())


class DistributedDataParallel(torchft.DistributedDataParallel):  # type: ignore[misc]
    """torchft's DistributedDataParallel whose hook survives a peer that dies in mid-reduction."""

    @staticmethod
    def _comm_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()  # never raises: an error goes to the manager
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


@dataclass(frozen=True)
class LighthouseView:
    """What a Lighthouse's status page says. An id is `replica_N:uuid`; each start of a replica has a new one."""

    members: Mapping[str, int] = field(default_factory=dict)
    """The last quorum: id and Manager step."""
    heartbeats: Mapping[str, float] = field(default_factory=dict)
    """All ids ever seen, and the age of their last heartbeat in seconds."""

    @property
    def training(self) -> set[str]:
        """Ids of the last quorum that are alive, or were a moment ago."""
        return self.heard(FRESH_SECONDS)

    def heard(self, seconds: float) -> set[str]:
        """Ids of the last quorum whose last heartbeat came within so many seconds."""
        return {name for name in self.members if self.heartbeats.get(name, seconds) < seconds}

    @property
    def replicas(self) -> set[str]:
        """Names (`replica_N`) of all that are alive."""
        return {name.split(":")[0] for name, age in self.heartbeats.items() if age < FRESH_SECONDS}


def read_status(page: str) -> LighthouseView:
    """Read the HTML of `GET /status` (torchft 0.2.0). What is not understood is left out."""
    members = re.findall(r"<b>\s*(\S+?)\s*</b>.*?Step:\s*(\d+)", page, re.DOTALL)
    heartbeats = re.findall(r"([^\s>]+): seen ([\d.]+(?:e-?\d+)?)s ago", page)
    return LighthouseView({name: int(step) for name, step in members}, {name: float(age) for name, age in heartbeats})


def view_lighthouse(url: str, timeout: float = 2.0) -> LighthouseView | None:
    """Ask the Lighthouse at `url` who is there; None when it does not answer within `timeout` seconds."""
    # A proxy meant for the internet must not catch the cluster's own requests.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/status", timeout=timeout) as answer:
            return read_status(answer.read().decode(errors="replace"))
    except (OSError, ValueError):
        return None


def lighthouse_url(environ: Mapping[str, str] = os.environ) -> str:
    """TORCHFT_LIGHTHOUSE, or an empty string."""
    return environ.get("TORCHFT_LIGHTHOUSE", "")
