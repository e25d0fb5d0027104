"""The main job on a real Slurm: real jobs, real steps, real torch ranks, real SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_ft import events
from slurm_ft.events import Event, Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until

PROGRAMS = Path(__file__).with_name("programs")
SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
STEPS = "120"
LOSS_TOLERANCE = 0.1
"""As a share of the undisturbed loss. Measured here: 0.3 % with 4 replicas and 3.4 % with 2, one kill each."""


class Job:
    """One `slurm-ft submit` that waits for its run, and the run's events."""

    def __init__(self, cluster: DevCluster, folder: Path, *arguments: str) -> None:
        self.run = folder / "run"
        self.environ = {
            **cluster.environ,
            "PATH": f"{Path(sys.executable).parent}:{cluster.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        options = ("--local-run-dir", "--runs", str(folder / "runs"), "--run-dir", str(self.run), "--time", "10")
        self.process = subprocess.Popen(
            [SLURM_FT, "submit", *options, *arguments],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def events(self, kind: Kind, replica: int | None = None) -> list[Event]:
        found = (event for event in events.read(self.run / "events.jsonl") if event.kind is kind)
        return [event for event in found if replica is None or event.replica == replica]

    def until(self, kind: Kind, replica: int, true: Callable[[Event], object] = bool, seconds: float = 90.0) -> Event:
        def found() -> list[Event]:
            assert self.process.poll() is None or self.events(Kind.RUN_ENDED), self.output()
            return [event for event in self.events(kind, replica) if true(event)]

        wait_until(found, seconds, f"{kind} of replica {replica}")
        return found()[-1]

    def output(self) -> str:
        out, _ = self.process.communicate(timeout=120)
        return out

    def slurm_ft(self, *arguments: str) -> str:
        done = subprocess.run(
            [SLURM_FT, *arguments],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_rank(self, replica: int) -> None:
        self.slurm_ft("inject", str(self.run), "--replica", str(replica), "--kind", "kill")

    def kill_agent(self, replica: int) -> None:
        os.kill(int(self.events(Kind.AGENT_JOINED, replica)[-1].data["agent_pid"]), signal.SIGKILL)

    def finish(self, code: int = 0) -> str:
        out = self.output()
        assert self.process.returncode == code, out
        return out


@pytest.fixture
def submit(devcluster: DevCluster, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Submits runs; afterwards no job and no process of them is left."""
    jobs: list[Job] = []

    def start(*arguments: str, folder: str = "") -> Job:
        place = tmp_path / folder if folder else tmp_path
        place.mkdir(exist_ok=True)
        jobs.append(Job(devcluster, place, *arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            subprocess.run(["scancel", "--full", "--user", "root"], env=job.environ, timeout=30)
            job.process.kill()
            job.process.wait()
    wait_until(lambda: not _queue(devcluster), 30, "the queue is empty")
    wait_until(lambda: not _processes_with(str(tmp_path)), 30, "no process of the run is left")


def _queue(cluster: DevCluster) -> str:
    argv = ["squeue", "--noheader", "--states=all", "--Format=jobid,state"]
    out = subprocess.run(argv, env=cluster.environ, capture_output=True, text=True, timeout=30).stdout
    return "\n".join(line for line in out.splitlines() if any(word in line for word in ("RUNN", "PEND", "COMPLETING")))


def _processes_with(word: str) -> list[str]:
    """Processes that have the run's folder in their command line or environment, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"SLURM_FT_RUN={word}".encode() in text or f"--run-dir={word}".encode() in text:
            found.append(entry.name)
    return found


def _job_ids(job: Job) -> set[str]:
    return {event.data["job_id"] for event in job.events(Kind.RUN_STARTED)}


def _commits_of_peers(job: Job, failed: Event, back: Event) -> list[Event]:
    """What the peers committed from a replica's failure up to the very step in which it is back: a replica
    that is fast enough is back for the next one."""
    commits = [e for e in job.events(Kind.COMMIT) if e.data["committed"] and e.replica != back.replica]
    return [e for e in commits if failed.t < e.t and e.data["step"] <= back.data["step"]]


def test_a_run_whose_replicas_all_end_well_exits_with_0(submit) -> None:
    job = submit("--replicas", "3", "--", "python", str(PROGRAMS / "steps.py"), "20")
    job.finish(0)
    assert len(job.events(Kind.RANK_DONE)) == 3
    assert not job.events(Kind.RANK_FAILED)
    assert "incidents: 0" in job.slurm_ft("report", str(job.run))


def test_titan_survives_the_kill_of_a_rank_and_of_an_agent_in_one_job_while_its_peers_commit(submit) -> None:
    """The issue's main claim, and a loss close to that of the undisturbed run with the same seed."""
    titan = ("--replicas", "3", "--min-replicas", "2", "--", "titan", "--seed", "1", "--steps")
    job = submit(*titan, STEPS)
    job.until(Kind.COMMIT, 2)
    job.kill_rank(2)
    killed = job.until(Kind.RANK_FAILED, 2)
    healed = job.until(Kind.COMMIT, 2, lambda e: e.data["attempt"] == 2 and e.data["committed"])
    # Its own word on that step must be out before its agent is killed.
    job.until(Kind.COMMIT, 1, lambda e: e.data["step"] >= healed.data["step"])
    job.kill_agent(1)
    lost = job.until(Kind.STEP_EXITED, 1)
    again = job.until(Kind.COMMIT, 1, lambda e: e.data["attempt"] == 2 and e.data["committed"])
    job.finish(0)

    assert killed.data["signal"] == "SIGKILL"
    assert job.events(Kind.RANKS_STARTED, 2)[1].data["rung"] == "in place"
    assert [event.data["step"] for event in job.events(Kind.STEP_LAUNCHED, 1)] == [1, 2]
    assert len(job.events(Kind.STEP_LAUNCHED, 2)) == 1
    assert len(_job_ids(job)) == 1
    assert {e.replica for e in _commits_of_peers(job, killed, healed)} == {0, 1}
    assert {e.replica for e in _commits_of_peers(job, lost, again)} == {0, 2}
    assert all(event.data["attempt"] == 1 for event in job.events(Kind.COMMIT, 0))
    report = job.slurm_ft("report", str(job.run))
    assert "incidents: 2" in report and "survivors lost 0 steps" in report

    undisturbed = submit(*titan, STEPS, folder="undisturbed")
    undisturbed.finish(0)
    assert _last_loss(job) == pytest.approx(_last_loss(undisturbed), rel=LOSS_TOLERANCE)


def _last_loss(job: Job) -> float:
    """The mean of the losses that the replicas which were never away, or long back, reported last."""
    losses = [job.events(Kind.PROGRESS, replica)[-1].data["loss"] for replica in (0, 2)]
    return sum(losses) / len(losses)


def test_one_of_two_replicas_is_killed_twice_in_a_row_and_the_run_ends_well(submit) -> None:
    """With a torchft script of a user's own, which knows nothing of slurm-ft."""
    job = submit("--replicas", "2", "--", "python", str(PROGRAMS / "user_localsgd.py"), "60")
    job.until(Kind.COMMIT, 1)
    job.kill_rank(1)
    job.until(Kind.COMMIT, 1, lambda e: e.data["attempt"] == 2 and e.data["committed"])
    job.kill_rank(1)
    job.until(Kind.COMMIT, 1, lambda e: e.data["attempt"] == 3 and e.data["committed"])
    job.finish(0)
    assert {event.data["attempt"] for event in job.events(Kind.RANKS_STARTED, 0)} == {1}
    assert [event.data["rung"] for event in job.events(Kind.RANKS_STARTED, 1)] == ["", "in place", "in place"]


def test_a_program_that_always_crashes_ends_the_run_and_its_first_traceback_is_shown(submit) -> None:
    crash = ("python", str(PROGRAMS / "crash.py"))
    job = submit("--replicas", "1", "--restarts-in-place", "1", "--restarts-by-step", "1", "--", *crash)
    job.finish(93)
    explained = job.slurm_ft("explain", str(job.run))
    assert "FileNotFoundError: no such data set: tokens.bin" in explained
    assert "line 5, in load" in explained
    assert len(job.events(Kind.RANKS_STARTED)) == 3


def test_a_dead_host_is_replaced_by_a_spare_in_the_same_job(devcluster: DevCluster, submit) -> None:
    job = submit("--replicas", "2", "--spares", "1", "--", "python", str(PROGRAMS / "steps.py"), "600")
    job.until(Kind.PROGRESSED, 1)
    job.until(Kind.PROGRESSED, 0)
    dead = job.events(Kind.AGENT_JOINED, 1)[-1].data["host"]
    devcluster.kill_host(dead)
    try:
        replaced = job.until(Kind.HOST_REPLACED, 1)
        job.until(Kind.PROGRESSED, 1, lambda e: e.data["attempt"] == 2)
        job.finish(0)
    finally:
        devcluster.revive_host(dead)
    assert replaced.data == {"bad": dead, "spare": job.events(Kind.RUN_STARTED)[0].data["spares"][0]}
    assert len(job.events(Kind.RANKS_STARTED, 0)) == 1
    assert len(_job_ids(job)) == 1
    assert "(spare)" in job.slurm_ft("report", str(job.run))


def test_a_killed_srun_client_does_not_leave_its_ranks_behind(submit) -> None:
    """RW-19: the step outlives its client; it is cancelled before the next one starts on its host."""
    job = submit("--replicas", "1", "--", "python", str(PROGRAMS / "steps.py"), "400")
    job.until(Kind.PROGRESSED, 0)
    os.kill(int(job.events(Kind.STEP_LAUNCHED, 0)[-1].data["pid"]), signal.SIGKILL)
    job.until(Kind.PROGRESSED, 0, lambda e: e.data["attempt"] == 2)
    assert len([pid for pid in _processes_with(str(job.run)) if _is_rank(pid)]) == 1
    job.slurm_ft("stop", str(job.run))
    job.finish(143)


def _is_rank(pid: str) -> bool:
    return "steps.py" in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[2:3].__str__()


def test_scancel_ends_a_run_in_order_and_leaves_nothing(submit) -> None:
    job = submit("--replicas", "2", "--", "python", str(PROGRAMS / "steps.py"), "2000")
    job.until(Kind.PROGRESSED, 0)
    subprocess.run(["scancel", next(iter(_job_ids(job)))], env=job.environ, check=True, timeout=30)
    job.finish(143)
    assert job.events(Kind.STOP_REQUESTED)


def test_each_replica_has_all_the_gpus_and_cpus_of_its_host(submit) -> None:
    """RW-22: CPUs per task are not inherited; and no GPU comes twice."""
    show = "import os; print(os.environ['ROCR_VISIBLE_DEVICES'], os.environ['SLURM_CPUS_PER_TASK'], flush=True)"
    job = submit("--replicas", "2", "--gpus-per-node", "4", "--ranks-per-node", "2", "--cpus-per-node", "4",
                 "--", "python", "-c", show)  # fmt: skip
    job.finish(0)
    logs = sorted(job.run.glob("replicas/*/attempt_1/*.log"))
    assert [log.read_text().strip() for log in logs] == ["0,1,2,3 4"] * 4


def test_more_replicas_than_nodes_is_one_clear_sentence(submit) -> None:
    job = submit("--replicas", "9", "--", "python", str(PROGRAMS / "steps.py"), "1")
    out = job.finish(2)
    assert "error: Slurm cannot give what was asked: Requested node configuration is not available" in out
    assert "hint: 9 nodes were asked for (9 replicas of 1, 0 spares)" in out
    assert not job.run.exists()


def test_run_in_a_script_of_the_users_own_takes_one_replica_per_node(devcluster: DevCluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -N 3 --no-kill\n"
        f"exec {SLURM_FT} run --run-dir {tmp_path}/run -- {sys.executable} {PROGRAMS}/steps.py 5\n"
    )
    subprocess.run(
        ["sbatch", "--wait", "--output=/dev/null", str(script)],
        env=devcluster.environ, check=True, timeout=90, capture_output=True,
    )  # fmt: skip
    ended = [event for event in events.read(tmp_path / "run" / "events.jsonl") if event.kind is Kind.RUN_ENDED]
    assert ended[-1].data["code"] == 0
    assert "3 of 3 replicas" in ended[-1].data["why"]
