"""What a rank sees in its environment. Pure: the surroundings are an argument.

Three layers, later ones win: defaults where the surroundings have no value; torchrun's names and ours,
which must be right; what the run's spec sets. torchft's own variables count as defaults, so a value that
the user exported wins. Nothing here sets a SLURM_* variable of Slurm's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_ft import env
from slurm_ft.agent.command import BOOTSTRAP


@dataclass(frozen=True)
class Place:
    """One rank's place in the run. `first_host` is the address of the replica's first host."""

    run: str
    replica: int
    replicas: int
    min_replicas: int
    attempt: int
    rank: int
    local_rank: int
    ranks: int
    ranks_per_host: int
    first_host: str
    port: int
    socket: str
    lighthouse: str
    error_file: str
    host: str = ""
    timeouts: str = ""
    quorum_retries: int = 0
    scratch: str = ""
    keeper: str = ""
    keeper_mode: str = "off"


def rank_environment(
    surroundings: Mapping[str, str], place: Place, chosen: Mapping[str, str], hosts: Iterable[str] = ()
) -> dict[str, str]:
    """The environment of one rank; `hosts` are names and addresses that no web proxy may be asked for."""
    result = _defaults(place) | dict(surroundings) | _certain(place) | dict(chosen)
    return result | _no_proxy(result, hosts)


def _defaults(place: Place) -> dict[str, str]:
    defaults = {
        # torchrun's default too: ranks that share cores slow each other down with more.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # torch asks a nameserver for the name of each address that it connects to, at every quorum change; one
        # lost question costs 5 s by default.
        "RES_OPTIONS": "timeout:1 attempts:3",
        # torch asks the kernel for large pages: it then takes back the memory of a rank that died 2 to 6 times as
        # fast, and until it has, nobody knows of the death (docs/performance.md).
        "THP_MEM_ALLOC_ENABLE": "1",
        # torchft's Rust half logs five lines a step at its default level.
        "RUST_LOG": "warn",
        env.REPLICA_GROUP_ID: str(place.replica),
        env.NUM_REPLICA_GROUPS: str(place.replicas),
    }
    if place.scratch:
        defaults[env.SCRATCH] = place.scratch
    if place.lighthouse:
        defaults[env.LIGHTHOUSE] = place.lighthouse
        # With torchft's default of 0, each rank dies when the Lighthouse is away for a moment.
        defaults[env.QUORUM_RETRIES] = str(place.quorum_retries)
    return defaults


def _certain(place: Place) -> dict[str, str]:
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(place.ranks_per_host),
        "MASTER_ADDR": place.first_host,
        "MASTER_PORT": str(place.port),
        env.RUN: place.run,
        env.REPLICA: str(place.replica),
        env.ATTEMPT: str(place.attempt),
        env.HOST: place.host,
        env.MIN_REPLICAS: str(place.min_replicas),
        env.SOCKET: place.socket,
        env.BOOTSTRAP: BOOTSTRAP,
        env.TIMEOUTS: place.timeouts,
        env.ERROR_FILE: place.error_file,
        # Also without a keeper: a run within a run must not find the outer one's.
        env.KEEPER: place.keeper,
        env.KEEPER_MODE: place.keeper_mode,
    }


def _no_proxy(result: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """torchft speaks HTTP between hosts; a site's web proxy must not get in between.

    Exact names only: not every client understands address ranges here. Both spellings get all: a client that
    reads the small one first must not miss what the user has in the capital one.
    """
    both = f"{result.get('no_proxy', '')},{result.get('NO_PROXY', '')}"
    present = [item.strip() for item in both.split(",") if item.strip()]
    names = ",".join(dict.fromkeys([*present, "localhost", "127.0.0.1", *hosts]))
    return {"no_proxy": names, "NO_PROXY": names}
