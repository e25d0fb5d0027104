"""Where a run happens, read from the surroundings: the allocation of a batch step, or this machine."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence

from slurm_ft import env
from slurm_ft.agent.address import reachable
from slurm_ft.controller.head import Place
from slurm_ft.errors import LaunchError, UsageError
from slurm_ft.launch import local
from slurm_ft.slurm.client import command_environment
from slurm_ft.slurm.hostlist import expand
from slurm_ft.spec import RunSpec

LOOPBACK = "127.0.0.1"


def local_place(spec: RunSpec, job_id: str) -> Place:
    """This machine, as `spec.hosts` hosts."""
    return Place(job_id, tuple(local.hosts(spec.hosts)), socket.gethostname(), LOOPBACK)


def allocation_place(surroundings: Mapping[str, str]) -> Place:
    """The Slurm allocation around us. Raises UsageError where there is none."""
    if "SLURM_JOB_ID" not in surroundings or "SLURM_JOB_NODELIST" not in surroundings:
        raise UsageError(
            "there is no Slurm allocation around this process",
            "call `slurm-ft run` in an sbatch script, use `slurm-ft submit`, or add `--cluster local`",
        )
    hosts = tuple(expand(surroundings["SLURM_JOB_NODELIST"]))
    count = surroundings.get("SLURM_JOB_NUM_NODES")
    if count and int(count) != len(hosts):
        raise LaunchError(
            f"Slurm says that the job has {count} nodes, and its list `{surroundings['SLURM_JOB_NODELIST']}` "
            f"holds {len(hosts)}",
            "please report this hostlist",
        )
    host = surroundings.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    others = [name for name in hosts if name != host]
    return Place(surroundings["SLURM_JOB_ID"], hosts, host, head_address(host, surroundings, others))


def head_address(host: str, surroundings: Mapping[str, str], others: Sequence[str] = ()) -> str:
    """The address of this host that the other hosts reach: what the user says, else Slurm's NodeAddr.

    NodeAddr is what Slurm itself uses between hosts, so it works where a host's own idea of its name does
    not.
    """
    name = surroundings.get(env.ADDRESS) or _node_address(host, surroundings) or socket.gethostname()
    try:
        return reachable(name, others)
    except OSError as error:
        raise LaunchError(
            f"the address of this host, `{name}`, cannot be used: {error}",
            f"set {env.ADDRESS} to an address that the other hosts can reach",
        ) from None


def _node_address(host: str, surroundings: Mapping[str, str]) -> str | None:
    try:
        out = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", host],
            env=command_environment(surroundings),
            capture_output=True,
            timeout=30,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", out)
    return found.group(1) if found else None
