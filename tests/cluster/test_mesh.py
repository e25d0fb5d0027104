"""A Python mesh in a real Slurm job: host steps and hosts killed, a spare taken, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.processes import parent

CLIENT = Path(__file__).with_name("programs") / "mesh_client.py"


def processes_with(words: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and words.encode() in (entry / "environ").read_bytes().replace(b"\0", b"\n"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_mesh_in_a_job_survives_its_steps_and_a_host_and_leaves_nothing(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    told.mkdir()
    log = tmp_path / "job.log"
    environ = {**devcluster.environ, "MESH_TEST": str(told), "SLURM_FT_RUNS": str(tmp_path / "runs")}
    # Two hosts and a spare. The batch host is the first; the test kills the second.
    argv = ["sbatch", "--parsable", "--nodes=3", "--no-kill", "--no-requeue", "--time=5", "--gres=gpu:4"]
    argv += [f"--output={log}", f"--wrap=exec {sys.executable} {CLIENT} {told}"]
    job = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)

    def value(name: str) -> Any:
        wait_until((told / name).exists, 60, f"{name}, see {log}")
        return json.loads((told / name).read_text())

    killed = None
    try:
        _, _, hosts = value("folder")
        first = value("first")
        assert [row[0] for row in first] == [hosts[0]] * 2 + [hosts[1]] * 2 == [row[1] for row in first]
        assert {row[2] for row in first} == {"hello"} and len({row[3] for row in first}) == 4

        value("held")
        os.kill(parent(parent(first[0][3])), signal.SIGKILL)  # the host process: its step ends
        (told / "step-killed").touch()
        ok, failed, error, after = value("step")
        assert (ok, failed) == ([2, 3], [0, 1]) and "srun exited" in error
        assert [row[0] for row in after] == [row[0] for row in first]
        assert [row[3] for row in after][2:] == [row[3] for row in first][2:]
        assert not {row[3] for row in after[:2]} & {row[3] for row in first}

        value("held-again")
        killed = hosts[1]
        devcluster.kill_host(killed)
        (told / "host-killed").touch()
        ok, failed, error, after = value("host")
        assert (ok, failed) == ([0, 1], [2, 3]) and "failed" in error
        assert [row[0] for row in after] == [hosts[0]] * 2 + [hosts[2]] * 2

        (told / "end").write_text("hang")
        client = next(pid for pid in processes_with(f"MESH_TEST={told}") if _is_client(pid))
        os.kill(client, signal.SIGKILL)
        wait_until(lambda: not processes_with(f"MESH_TEST={told}"), 30, "nothing is left of the killed client's mesh")
    finally:
        subprocess.run(["scancel", job.stdout.strip()], env=environ, timeout=30, check=False)
        if killed is not None:
            devcluster.revive_host(killed)


def _is_client(pid: int) -> bool:
    return str(CLIENT) in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
