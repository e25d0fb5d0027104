"""The devcluster on real daemons: what it starts, what it kills, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_ft.errors import LaunchError, UsageError
from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing import devcluster_processes as processes
from slurm_ft.testing.devcluster import DevCluster, main
from tests.cluster.conftest import wait_until
from tests.processes import lives

PROGRAM = [sys.executable, "-m", "slurm_ft.testing.devcluster"]

# A job whose processes try to get away: other sessions, double forks, cleared environments, a client on the head.
# The fraction tells our sleepers from those of the same test in another process.
OURS = f".{os.getpid()}"
JOB = f"""#!/bin/bash
#SBATCH --nodes=4 --no-kill --exclusive --output=/dev/null
srun --overlap --exact -N1 -n1 -w node3 --mem=0 sleep 1001{OURS} &
srun --overlap --exact -N1 -n1 -w node3 --mem=0 bash -c '(env -i setsid sleep 1002{OURS} &); exec sleep 1003{OURS}' &
env -i setsid sleep 1004{OURS} &
wait
"""


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def slurm(cluster: DevCluster, *command: str, text: str | None = None) -> str:
    done = subprocess.run(
        command, env=cluster.environ, input=text, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def sleepers() -> dict[str, int]:
    """Pids of the sleep processes of JOB, by their argument; found without the code under test."""
    found = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"sleep") and words[1].endswith(OURS.encode()):
                found[words[1].decode().removesuffix(OURS)] = int(place.name)
    return found


@pytest.fixture
def job(devcluster: DevCluster) -> Iterator[str]:
    """JOB, with all its processes alive."""
    number = slurm(devcluster, "sbatch", "--parsable", text=JOB).strip()
    wait_until(lambda: len(sleepers()) == 4, what="four sleepers")
    yield number
    slurm(devcluster, "scancel", number)
    for pid in sleepers().values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: set(devcluster.states().values()) == {"idle"}, 30, "all hosts idle again")


# -- commands


def test_up_run_down(short_folder: Path) -> None:
    assert invoke("up", "--hosts", "2", "--gpus", "2", "--folder", short_folder).exit_code == 0
    assert short_folder.stat().st_mode & 0o777 == 0o700
    again = invoke("up", "--folder", short_folder)
    assert again.exit_code == 2 and "already up" in again.output and "down" in again.output

    exports = invoke("env", "--folder", short_folder).stdout
    shell = f"{exports}\nsrun -N2 --gpus-per-node=2 bash -c 'echo $SLURMD_NODENAME $ROCR_VISIBLE_DEVICES'"
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=30, check=True).stdout
    assert sorted(said.splitlines()) == ["node1 0,1", "node2 0,1"]
    assert "node2 idle" in invoke("status", "--folder", short_folder).stdout
    assert invoke("run", "--folder", short_folder, "--", "sh", "-c", "exit 7").exit_code == 7

    found = DevCluster(folder=short_folder).processes()
    assert {"munged", "slurmctld", "slurmd", "init"} <= {process.role for process in found}
    assert invoke("down", "--folder", short_folder).exit_code == 0
    assert not any(lives(process.pid) for process in found)
    assert not short_folder.exists()
    assert invoke("down", "--folder", short_folder).exit_code == 0  # nothing to end is no error


def test_run_without_a_cluster_brings_its_own(short_folder: Path) -> None:
    command = ["--hosts", "1", "--folder", short_folder, "--", "srun", "sh", "-c", "kill -9 $$"]
    assert invoke("run", *command).exit_code == 128 + signal.SIGKILL
    assert not short_folder.exists()


def test_status_without_a_cluster(short_folder: Path) -> None:
    answer = invoke("status", "--folder", short_folder)
    assert answer.exit_code == 2 and "no devcluster" in answer.output


def test_help_shows_examples() -> None:
    for command in ([], ["up"], ["down"], ["status"], ["env"], ["run"], ["kill-host"], ["revive-host"]):
        text = invoke(*command, "-h").output
        assert text.count("python -m slurm_ft.testing.devcluster") >= 2, command


# -- hosts


def test_a_killed_host_loses_all_its_processes_and_comes_back(devcluster: DevCluster, job: str) -> None:
    before = sleepers()
    killed = devcluster.kill_host("node3")
    assert sorted(sleepers()) == ["1004"]  # what escaped on node3 is dead, what escaped on node1 lives
    assert {before["1001"], before["1002"], before["1003"]} < {process.pid for process in killed}
    assert {"slurmd", "slurmstepd", "init"} <= {process.role for process in killed}
    assert devcluster.processes("node3") == []

    wait_until(lambda: devcluster.states().get("node3", "").startswith("down"), 20, "node3 down")
    assert slurm(devcluster, "squeue", "--noheader", "--job", job, "--format=%T %N").split() == [
        "RUNNING",
        "node[1-2,4]",
    ]
    devcluster.revive_host("node3")
    wait_until(lambda: devcluster.states().get("node3", "") == "idle", what="node3 idle")
    assert slurm(devcluster, "srun", "-w", "node3", "printenv", "SLURMD_NODENAME") == "node3\n"


def test_a_killed_head_host_takes_its_clients_along(devcluster: DevCluster, job: str) -> None:
    killed = devcluster.kill_host("node1")
    assert {"srun", "slurm_script"} <= {process.name for process in killed}
    assert sorted(sleepers()) == ["1001", "1002", "1003"]
    devcluster.revive_host("node1")


def test_a_host_that_was_set_down_is_resumed(devcluster: DevCluster) -> None:
    devcluster.kill_host("node2")
    slurm(devcluster, "scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    devcluster.revive_host("node2")
    wait_until(lambda: devcluster.states().get("node2", "") == "idle", what="node2 idle")


def test_hosts_that_cannot_be_killed_or_revived(devcluster: DevCluster) -> None:
    with pytest.raises(UsageError, match="no host 'node9'"):
        devcluster.kill_host("node9")
    with pytest.raises(UsageError, match="node4 is alive"):
        devcluster.revive_host("node4")


def test_a_shell_with_the_environment_is_not_the_clusters(devcluster: DevCluster) -> None:
    with subprocess.Popen(["sleep", "100"], env=devcluster.environ) as shell:
        assert shell.pid not in {process.pid for process in devcluster.processes()}
        shell.kill()


# -- crashes


def test_down_ends_all_jobs_and_what_escaped(short_folder: Path) -> None:
    cluster = DevCluster(folder=short_folder)
    cluster.up()
    slurm(cluster, "sbatch", text=JOB)
    wait_until(lambda: len(sleepers()) == 4, what="four sleepers")
    cluster.down(grace=1)
    assert sleepers() == {}
    assert cluster.processes() == []


def test_down_after_the_daemons_were_killed(short_folder: Path) -> None:
    cluster = DevCluster(folder=short_folder)
    cluster.up()
    slurm(cluster, "sbatch", text=JOB)
    wait_until(lambda: len(sleepers()) == 4, what="four sleepers")
    for process in cluster.processes():
        if process.role in ("munged", "slurmctld", "slurmd"):
            os.kill(process.pid, signal.SIGKILL)
    cluster.down(grace=1)
    assert sleepers() == {}
    assert not short_folder.exists()


def test_the_cluster_ends_with_its_owner(short_folder: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as owner:
        up = [*PROGRAM, "up", "--hosts", "2", "--folder", str(short_folder), "--die-with", str(owner.pid)]
        subprocess.run(up, check=True, timeout=30, capture_output=True)
        cluster = DevCluster.attach(short_folder)
        assert any(process.role == "watcher" for process in cluster.processes())
        owner.kill()
    wait_until(lambda: not short_folder.exists(), what="folder removed")
    wait_until(lambda: not cluster.processes(), what="no process left")


def test_up_that_was_killed_half_way(short_folder: Path) -> None:
    with subprocess.Popen([*PROGRAM, "up", "--hosts", "2", "--folder", str(short_folder)]) as up:
        cluster = DevCluster(folder=short_folder)
        wait_until(lambda: any(process.role == "munged" for process in cluster.processes()))
        up.kill()
    cluster.down()
    assert cluster.processes() == []
    assert not short_folder.exists()


def test_a_stale_folder_is_used_again(short_folder: Path) -> None:
    cluster = DevCluster(hosts=1, folder=short_folder)
    cluster.up()
    processes.end(cluster.processes, 1e12)
    with cluster:
        assert cluster.states() == {"node1": "idle"}


# -- refusals


def test_a_taken_port_is_replaced(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        real: Callable[[int], list[int]] = config.choose_ports
        answers = [[taken.getsockname()[1], *real(1)], [*real(1), taken.getsockname()[1]], real(2)]
        monkeypatch.setattr(config, "choose_ports", lambda count: answers.pop(0))
        with DevCluster(hosts=1, folder=short_folder) as cluster:
            assert cluster.states() == {"node1": "idle"}
    assert answers == []


def test_missing_programs_are_named(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    answer = invoke("up", "--folder", short_folder)
    assert answer.exit_code == 97
    assert "not installed on this machine: munged, slurmctld" in answer.output
    assert "apt-get install slurmctld" in answer.output


def test_a_daemon_that_fails_is_quoted(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "slurm_conf", lambda *_: "ClusterName=broken\n")
    cluster = DevCluster(folder=short_folder)
    with pytest.raises(LaunchError, match=r"(slurmctld|node.) ended while") as caught:
        cluster.up()
    assert "SlurmctldHost" in caught.value.message
    assert cluster.processes() == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: (path.mkdir(), (path / "thesis.tex").touch()), "something else"),
        (lambda path: path.touch(), "not a folder"),
        (lambda path: path.symlink_to("/tmp"), "not a folder"),
        (lambda path: None, "too long"),
    ],
)
def test_folders_that_are_refused(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    folder = tmp_path / ("x" * 90 if words == "too long" else "x")
    make(folder)
    for command in ("up", "down"):
        answer = invoke(command, "--folder", folder)
        assert answer.exit_code == 2 and words in answer.output and "--folder" in answer.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that belongs to somebody else")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    os.chown(tmp_path / "x", 65534, 65534)
    answer = invoke("up", "--folder", tmp_path / "x")
    assert answer.exit_code == 2 and "belongs to user 65534" in answer.output


def test_a_shape_that_makes_no_sense() -> None:
    answer = invoke("up", "--hosts", "0")
    assert answer.exit_code == 2 and "--hosts 0 is too small" in answer.output
