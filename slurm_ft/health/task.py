"""One host's part of a check of all hosts: `python -m slurm_ft.health.task`, started by srun on each.

What is asked of it is in a variable and not among its arguments, which other users of the host could read.

Prints its answer as JSON, in parts (see `in_parts`): the host, its faults, how far ahead the clock of the next host
is, and which slurm-ft and Python it is that answers.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slurm_ft import __version__, env
from slurm_ft.agent.address import reachable
from slurm_ft.health import fabric, ring
from slurm_ft.health.bounded import Check, bounded
from slurm_ft.health.node import Wanted, checks

PART = 400
"""Characters of an answer in one line. Slurm tears lines of more than 1024 bytes, and those of other hosts come in
between; a quote or a backslash in a part takes two."""


def look(order: Mapping[str, Any], host: str) -> dict[str, Any]:
    """Do what the order says, as this host."""
    begun = time.monotonic()
    answer: dict[str, Any] = {"host": host, "version": __version__, "python": sys.executable}
    wanted = Wanted(order["gpus"], order["environ"] | dict(os.environ), order["shared"], order["scratch"])
    post, faults = None, []
    folder, hosts = Path(order["folder"]), list(order["hosts"])
    # Before the processes of the checks are forked: the others wait for it. A fork does not mind the one thread.
    if order["folder"]:
        try:
            address = _address(wanted, [name for name in hosts if name != host])
        except OSError as error:
            address = ""
            faults.append(f"this host has no address that the others reach: {error}")
        try:
            post = ring.Post(address, order["word"]) if address else None
            if post is not None:
                ring.write_token(folder, host, {"address": address, "port": post.port})
        except OSError as error:
            faults.append(f"{folder.parent} cannot be written: {error}")
    looks: dict[str, Check] = {"programs and libraries": partial(absent, order["folders"])}
    faults += bounded(looks | checks(wanted, frozenset(order["areas"])), order["seconds"])
    if post is not None:
        found = ring.tokens(folder, hosts)
        faults += [f"{folder.parent} is not shared: what {other} writes is not seen" for other in hosts
                   if other not in found]  # fmt: skip
        following = hosts[(hosts.index(host) + 1) % len(hosts)]
        if "network" in order["areas"] and following in found:
            token = found[following]
            try:
                answer["ahead"] = ring.call(str(token["address"]), int(str(token["port"])), order["word"])
            except OSError as error:
                faults.append(f"{following} is not reached at {token['address']}: {error}")
            # The one before us calls when its checks have ended, one of which may hang, and it has seen all tokens.
            patience = order["seconds"] + ring.SHARED_WITHIN + ring.CALL_WITHIN
            post.wait(max(0.0, begun + patience - time.monotonic()))
    return answer | {"faults": faults}


def absent(folders: Mapping[str, str]) -> list[str]:
    """Folders that are on the host which asks and not here: a module or a mount that is missing."""
    return [f"there is no {folder}, which {variable} names" for folder, variable in folders.items()
            if not Path(folder).is_dir()]  # fmt: skip


def _address(wanted: Wanted, others: Sequence[str]) -> str:
    """Where the others reach us: on the fabric; without one at what our name stands for. Raises OSError."""
    return fabric.address(wanted.environ) or reachable(socket.gethostname(), others)


def in_parts(answer: Mapping[str, Any]) -> list[str]:
    """The answer as lines of JSON that say whose they are. `slurm_ft.health.hosts.answers_in` joins them. Pure."""
    text = json.dumps(answer)
    return [json.dumps({"host": answer["host"], "part": text[at : at + PART]}) for at in range(0, len(text), PART)]


def main() -> None:
    order = json.loads(os.environ[env.CHECK])
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    print("\n".join(in_parts(look(order, host))), flush=True)


if __name__ == "__main__":
    main()
