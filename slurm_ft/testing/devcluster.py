"""A real Slurm cluster on this machine, to try slurm-ft on and to test it with.

    python -m slurm_ft.testing.devcluster up --hosts 4 --gpus 4
    eval "$(python -m slurm_ft.testing.devcluster env)"
    srun -N4 hostname
    python -m slurm_ft.testing.devcluster down

Real munged, slurmctld and slurmd, with several slurmds as several hosts, in one folder, on ports that were free,
reachable from this machine and this user only. Nothing is written outside the folder, and `down` leaves no process.

Here are the commands; the work is in the modules beside this one:

    devcluster_config      shape, folder, ports, slurm.conf: no process is started
    devcluster_processes   which processes belong to the cluster, and how they are ended
    devcluster_network     hosts with a network of their own, that can be cut, healed and slowed (`up --netns`)
    devcluster_core        `DevCluster`: up, down, kill_host, revive_host, cut, heal; also for `with` in Python
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

from slurm_ft.errors import UsageError
from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing.devcluster_core import DevCluster, resolve, watch

__all__ = ["DevCluster", "main"]

PROGRAM = "python -m slurm_ft.testing.devcluster"


def examples(*lines: str) -> str:
    """Two lines that can be typed, for the end of a help text."""
    return "\n".join(["\b", "Examples:", *(f"  {PROGRAM} {line}" for line in lines)])


folder_option = click.option(
    "--folder", type=click.Path(path_type=Path), help="Where it lives. [default: $SLURM_FT_DEVCLUSTER, or your own]"
)


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--hosts, --gpus and so on: the fields of Shape."""
    texts = {
        "hosts": "Number of hosts (one slurmd each).",
        "gpus": "Pretended GPUs of each host.",
        "cpus": "CPUs of each host, as Slurm counts them.",
        "memory": "Memory of each host in MB, as Slurm counts it.",
        "node_timeout": "SlurmdTimeout; a dead host is noticed after about 1.7 times this.",
        "kill_wait": "Seconds between SIGTERM and SIGKILL at the end of a job.",
    }
    for name, text in reversed(texts.items()):
        default = getattr(config.Shape, name)
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, type=int, default=default, show_default=True, help=text)(command)
    command = click.option("--netns", is_flag=True, help="Each host has a network of its own (root, iproute2).")(
        command
    )
    command = click.option("--accounting", is_flag=True, help="With slurmdbd and MariaDB, for sacct.")(command)
    return click.option("--slurm-root", default="", metavar="DIR", help="Run the Slurm in DIR/bin, DIR/sbin.")(command)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("up --hosts 4", "run -- srun -N4 hostname"),
)
def main() -> None:
    """A real Slurm cluster on this machine, in a folder of its own."""
    signal.signal(signal.SIGTERM, _exit_on_signal)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends us through `finally`, like Ctrl-C does: what was started gets ended."""
    sys.exit(128 + number)


@main.command(epilog=examples("up --hosts 4 --gpus 4", "up --hosts 2 --folder /tmp/mine --die-with $$"))
@shape_options
@folder_option
@click.option("--die-with", type=int, metavar="PID", help="Take the cluster down when this process ends.")
def up(folder: Path | None, die_with: int | None, **shape: Any) -> None:
    """Start a cluster. Returns when all hosts are idle."""
    cluster = DevCluster(folder=folder, die_with=die_with or 0, **shape)
    cluster.up()
    click.echo(f"{len(cluster.hosts)} hosts are idle. To use them: {_eval_line(folder)}", err=True)


@main.command(epilog=examples("down", "down --keep --folder /tmp/mine"))
@folder_option
@click.option("--keep", is_flag=True, help="Leave the folder with its logs.")
def down(folder: Path | None, keep: bool) -> None:
    """End the cluster and all its jobs, and remove its folder. Right after a crash, too."""
    DevCluster(folder=folder).down(keep=keep)


@main.command(epilog=examples("status", "status --folder /tmp/mine"))
@folder_option
def status(folder: Path | None) -> None:
    """Show the hosts, as Slurm sees them, and what runs on each."""
    cluster = running(folder)
    states = cluster.states()
    click.echo(f"folder {cluster.folder}")
    for role in ("munged", "slurmctld", "watcher"):
        pids = [str(process.pid) for process in cluster.processes(role) if process.role == role]
        click.echo(f"{role} {pids[0] if pids else 'not running'}")
    for host in cluster.hosts:
        found = cluster.processes(host)
        daemon = next((str(process.pid) for process in found if process.role == "slurmd"), "none")
        jobs = sum(process.role == "job" for process in found)
        network = " network=cut" if cluster.is_cut(host) else ""
        click.echo(f"{host} {states.get(host, 'unknown')} slurmd={daemon} job-processes={jobs}{network}")


@main.command(epilog=examples("env", "env --folder /tmp/mine"))
@folder_option
def env(folder: Path | None) -> None:
    """Print the export lines that lead Slurm's commands to this cluster; for `eval "$(... env)"`."""
    for name, value in running(folder).settings.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@main.command("kill-host", epilog=examples("kill-host node3", "kill-host node1 --folder /tmp/mine"))
@click.argument("host")
@folder_option
def kill_host(host: str, folder: Path | None) -> None:
    """A host dies: SIGKILL to its slurmd and to everything that runs on it."""
    killed = running(folder).kill_host(host)
    click.echo(f"{host}: killed {len(killed)} processes", err=True)


@main.command("revive-host", epilog=examples("revive-host node3", "revive-host node1 --folder /tmp/mine"))
@click.argument("host")
@folder_option
def revive_host(host: str, folder: Path | None) -> None:
    """A dead host comes back. Returns when Slurm can use it."""
    running(folder).revive_host(host)


@main.command(epilog=examples("cut node3", "cut node1 --folder /tmp/mine"))
@click.argument("host")
@folder_option
def cut(host: str, folder: Path | None) -> None:
    """A host loses its network and lives on (needs `up --netns`)."""
    running(folder).cut(host)


@main.command(epilog=examples("heal node3", "heal node1 --folder /tmp/mine"))
@click.argument("host")
@folder_option
def heal(host: str, folder: Path | None) -> None:
    """A host that was cut off or slow has its network again."""
    running(folder).heal(host)


@main.command(epilog=examples("slow node3 --delay 50ms", "slow node3 --rate 10mbit"))
@click.argument("host")
@click.option("--delay", default="", help="Of each packet, in each direction: 50ms. The kernel must have netem.")
@click.option("--rate", default="", help="At most so much a second, in each direction: 10mbit.")
@folder_option
def slow(host: str, delay: str, rate: str, folder: Path | None) -> None:
    """A host's network becomes slow (needs `up --netns`)."""
    running(folder).slow(host, delay, rate)


@main.command(
    context_settings={"ignore_unknown_options": True},
    epilog=examples("run -- srun -N4 hostname", "run --hosts 2 -- bash my_test.sh"),
)
@shape_options
@folder_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(folder: Path | None, command: tuple[str, ...], **shape: Any) -> None:
    """Run a command on the cluster; if none is up, on one that lives as long as the command."""
    cluster = DevCluster(folder=folder, **shape)
    if any(process.role == "slurmctld" for process in cluster.processes()):
        sys.exit(_run(command, running(folder)))
    with cluster:
        code = _run(command, cluster)
    sys.exit(code)


@main.command("watch", hidden=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--pidfd", type=int, required=True)
def watch_owner(folder: Path, pidfd: int) -> None:
    """Started by `up`: wait for the end of the owner, then take the cluster down."""
    watch(folder, pidfd)


def running(folder: Path | None) -> DevCluster:
    """The cluster in the folder, which must be up."""
    place = resolve(folder)
    cluster = DevCluster.attach(place)
    if not cluster.processes():
        raise UsageError(f"the devcluster in {place} is not running", hint=f"start it: `{PROGRAM} up`")
    return cluster


def _run(command: tuple[str, ...], cluster: DevCluster) -> int:
    try:
        code = subprocess.run(cluster.command(list(command)), env=cluster.environ, check=False).returncode
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from None
    return code if code >= 0 else 128 - code


def _eval_line(folder: Path | None) -> str:
    where = f" --folder {shlex.quote(str(folder))}" if folder else ""
    return f'eval "$({PROGRAM} env{where})"'


if __name__ == "__main__":
    main(prog_name=PROGRAM)
