"""Quorum ids that never come twice in a run, though each Lighthouse counts from 1.

torchft's Manager makes a new process group only when the id of its quorum differs from the last one, and the
members of a group meet under a prefix of the store that carries the id. So after a restart of the Lighthouse
a replica whose last id happens to come again keeps its old group while the others wait for it in a new one,
and keys of an earlier group are met. (Seen: of 5 runs one hung and one lost a replica.)

A Lighthouse cannot be told where to begin. But it takes the next id whenever a member reports a failed
commit. So before a restarted one is shown to anybody, members of our own ask it for quorums, each with a
failed commit, until its id is above every id that the run has seen. About 2,000 ids a second were measured.

Our members count as alive for another heartbeat time-out, and so the first quorum of the ranks waits for
that long: by then all of them have been heard of, and none is left behind by a quorum of the first who ask.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

MARGIN = 100
"""Ids above the highest recorded one: for quorums that came last and are not in the events yet."""
ANSWER_WITHIN = timedelta(seconds=30)
BLOCK = 1 << 20
SESSION = b'"event":"run_started"'
FOUND = re.compile(rb'"quorum_id":(\d+)')


def highest_seen(events: Path) -> int:
    """The highest quorum id in the events of the present job; 0 when there is none.

    Ranks of an earlier job of the run are gone, and their ids with them.
    """
    highest = 0
    for line in _lines(events):
        if SESSION in line:
            highest = 0
        for found in FOUND.finditer(line):
            highest = max(highest, int(found.group(1)))
    return highest


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=BLOCK) as file:
            yield from file
    except FileNotFoundError:
        return


def push(torchft: ModuleType, address: str, above: int, members: int) -> int:
    """Bring the Lighthouse at `address`, which nobody knows yet, to an id of at least `above`; gives the id.

    `torchft` is its extension module, `members` how many a quorum needs at least. Raises RuntimeError or
    TimeoutError, as torchft does, when the Lighthouse does not answer.
    """
    name = f"slurm-ft-{uuid.uuid4()}"
    others = [
        threading.Thread(target=_ask, args=(torchft, address, f"{name}-{number}", above), daemon=True)
        for number in range(1, members)
    ]
    for other in others:
        other.start()
    server = torchft.ManagerServer(
        replica_id=f"{name}-0",
        lighthouse_addr=address,
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=ANSWER_WITHIN,
        quorum_retries=0,
    )
    try:
        client = torchft.ManagerClient(server.address(), connect_timeout=ANSWER_WITHIN)
        reached = 0
        while reached < above:
            quorum = client._quorum(
                group_rank=0,
                step=0,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=ANSWER_WITHIN,
                commit_failures=1,
                init_sync=False,
            )
            reached = int(quorum.quorum_id)
    finally:
        server.shutdown()
    for other in others:
        other.join()
    return reached


def _ask(torchft: ModuleType, address: str, name: str, above: int) -> None:
    """One more member, where a quorum needs several."""
    client = torchft.LighthouseClient(address, connect_timeout=ANSWER_WITHIN)
    while int(client.quorum(name, ANSWER_WITHIN).quorum_id) < above:
        pass
