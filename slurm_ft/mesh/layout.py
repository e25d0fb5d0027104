"""Which hosts carry which replica: cut the allocation's hosts into replicas and spares, in the given order.

A replica takes neighbours, because Slurm lists neighbours of the network next to each other. Every host
beyond the replicas is a spare; asking for spares only makes too few of them an error. A layout never changes:
taking a spare gives a new layout in which the spare stands at the bad host's place, so coordinates outlive a
repair.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from slurm_ft.errors import SpecError, UsageError
from slurm_ft.mesh.extent import Extent
from slurm_ft.slurm import hostlist

DIMENSIONS = ("replica", "host", "gpu")


@dataclasses.dataclass(frozen=True)
class Place:
    """One rank's place. `rank` counts within the replica, `index` over all ranks of all replicas."""

    replica: int
    host_index: int
    gpu: int
    host: str
    rank: int
    index: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The hosts of each replica, and the spares. Build it with `assign`."""

    replicas: tuple[tuple[str, ...], ...]
    spares: tuple[str, ...]
    ranks_per_host: int

    @property
    def extent(self) -> Extent:
        """The dimensions replica, host and gpu over all ranks. A gpu is a rank's place on its host."""
        return Extent(DIMENSIONS, (len(self.replicas), len(self.replicas[0]), self.ranks_per_host))

    @property
    def ranks_per_replica(self) -> int:
        return len(self.replicas[0]) * self.ranks_per_host

    def hosts_of(self, replica: int) -> tuple[str, ...]:
        """Give the hosts of a replica in rank order. Raises IndexError if there is no such replica."""
        if not 0 <= replica < len(self.replicas):
            raise IndexError(f"replica {replica} is outside 0 to {len(self.replicas) - 1}")
        return self.replicas[replica]

    def hostlist_of(self, replica: int) -> str:
        """Give the hosts of a replica in Slurm's bracket form."""
        return hostlist.compress(self.hosts_of(replica))

    def place_of(self, replica: int, host_index: int, gpu: int) -> Place:
        """Give the place at these coordinates. Raises IndexError if there is none."""
        index = self.extent.index(replica=replica, host=host_index, gpu=gpu)
        host = self.hosts_of(replica)[host_index]
        return Place(replica, host_index, gpu, host, index % self.ranks_per_replica, index)

    def replica_of(self, host: str) -> int | None:
        """Give the replica that a host carries, None for a spare. Raises UsageError for any other host."""
        for replica, hosts in enumerate(self.replicas):
            if host in hosts:
                return replica
        if host in self.spares:
            return None
        known = [*itertools.chain.from_iterable(self.replicas), *self.spares]
        raise UsageError(
            f"Host {host} is neither in a replica nor a spare.",
            f"the hosts are {hostlist.compress(known)}",
        )

    def without(self, host: str) -> Layout:
        """Take a bad host out: the first spare stands in for it, or, if it is a spare itself, nothing does.

        Raises UsageError if the host is not in the layout or if a spare is needed and none is left.
        """
        replica = self.replica_of(host)
        if replica is None:
            return dataclasses.replace(self, spares=tuple(spare for spare in self.spares if spare != host))
        if not self.spares:
            raise UsageError(
                f"No spare is left to stand in for {host} of replica {replica}.",
                "ask for more spares, or let the run go on with fewer replicas",
            )
        hosts = tuple(self.spares[0] if name == host else name for name in self.replicas[replica])
        replicas = (*self.replicas[:replica], hosts, *self.replicas[replica + 1 :])
        return dataclasses.replace(self, replicas=replicas, spares=self.spares[1:])


def assign(
    hosts: Sequence[str],
    replicas: int,
    hosts_per_replica: int,
    spares: int = 0,
    ranks_per_host: int = 1,
) -> Layout:
    """Lay replicas over hosts in the given order.

    `spares` is the least number of hosts that must be left over. Raises SpecError that lists all that is wrong.
    """
    problems = [*_count_problems(replicas, hosts_per_replica, spares, ranks_per_host), *_name_problems(hosts)]
    if not problems:
        problems = _fit_problems(len(hosts), replicas, hosts_per_replica, spares)
    if problems:
        raise SpecError(problems)
    used = replicas * hosts_per_replica
    cut = [tuple(hosts[start : start + hosts_per_replica]) for start in range(0, used, hosts_per_replica)]
    return Layout(tuple(cut), tuple(hosts[used:]), ranks_per_host)


def _count_problems(replicas: int, hosts_per_replica: int, spares: int, ranks_per_host: int) -> list[tuple[str, str]]:
    counts = [
        ("replicas", replicas, 1),
        ("hosts per replica", hosts_per_replica, 1),
        ("spares", spares, 0),
        ("ranks per host", ranks_per_host, 1),
    ]
    return [(f"{value} {what}", f"give {least} or more") for what, value, least in counts if value < least]


def _name_problems(hosts: Sequence[str]) -> list[tuple[str, str]]:
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for host in hosts:
        if host in seen:
            twice[host] = None
        seen.add(host)
    if not twice:
        return []
    named = hostlist.compress(list(twice))
    return [(f"{len(hosts)} hosts but only {len(seen)} names: {named} more than once", "name each host once")]


def _fit_problems(hosts: int, replicas: int, hosts_per_replica: int, spares: int) -> list[tuple[str, str]]:
    needed = replicas * hosts_per_replica + spares
    if needed <= hosts:
        return []
    what = f"{_counted(replicas, 'replica')} of {_counted(hosts_per_replica, 'host')}"
    if spares:
        what += f" and {_counted(spares, 'spare')}"
    verb = "needs" if replicas == 1 and not spares else "need"
    have = f"there {'is' if hosts == 1 else 'are'} {hosts}"
    hint = f"ask Slurm for {_counted(needed, 'node')}"
    fitting = max(0, hosts - spares) // hosts_per_replica
    if fitting:
        hint += f", or run {_counted(fitting, 'replica')}"
    return [(f"{what} {verb} {_counted(needed, 'host')}, and {have}", hint)]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
