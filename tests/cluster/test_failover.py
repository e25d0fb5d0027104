"""The head host dies, or is only stopped; nobody can take over; Slurm itself is away. On a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_ft import lease
from slurm_ft.controller.head import open_run
from slurm_ft.events import Event, Kind
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Budget, Policy, ReplicaSpec, RunSpec
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, Job, _job_ids, _processes_with, _queue, submit  # noqa: F401

SECONDS = 60.0
QUICK = Policy(kill_grace=1.0, stop_grace=2.0, head_timeout=8.0, orphan_timeout=60.0, backoff=0.1)
HEAD = ("look_after.py", "slurm_ft.controller.", "slurm_ft.submit.takeover")


class Managed(Job):
    """A run with a policy that no option offers, in a batch script of its own; it trains until `done()`."""

    def __init__(self, cluster: DevCluster, folder: Path, policy: Policy, replicas: int, path: str = "") -> None:
        self.run, self.paths = folder / "run", RunPaths(folder / "run")
        self._finish = folder / "finish"
        command = (sys.executable, str(PROGRAMS / "until.py"), str(self._finish))
        open_run(self.paths, RunSpec("until", ReplicaSpec(command), replicas, policy=policy).validate())
        places = f"{path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {**cluster.environ, "PATH": places, "SLURM_FT_RUN": str(self.run)}
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\nexec {sys.executable} {PROGRAMS}/look_after.py {self.run}\n")
        options = ("--parsable", f"--nodes={replicas}", "--no-kill", "--time=5", f"--output={folder}/out", str(script))
        done = subprocess.run(["sbatch", *options], env=self.environ, capture_output=True, text=True, check=True)
        self.job_id = done.stdout.strip()

    def slurms_word(self) -> str:
        """The job's state and exit code, as Slurm has them."""
        argv = ["scontrol", "--oneliner", "show", "job", self.job_id]
        out = subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=30).stdout
        fields = dict(word.partition("=")[::2] for word in out.split())
        return f"{fields.get('JobState')} {fields.get('ExitCode')}"

    def ended(self) -> int:
        """The run's exit code, as soon as it has ended."""
        wait_until(lambda: self.events(Kind.RUN_ENDED), SECONDS, "the run ends")
        return int(self.events(Kind.RUN_ENDED)[-1].data["code"])

    def until(
        self, kind: Kind, replica: int, true: Callable[[Event], object] = bool, seconds: float = SECONDS
    ) -> Event:
        """Without a look at Slurm, which may be away."""
        wait_until(lambda: [e for e in self.events(kind, replica) if true(e)], seconds, f"{kind} of replica {replica}")
        return [event for event in self.events(kind, replica) if true(event)][-1]

    def done(self) -> None:
        self._finish.touch()

    def trains(self) -> None:
        for replica in range(len(self.events(Kind.STEP_LAUNCHED)) or 1):
            self.until(Kind.PROGRESSED, replica)

    def adopted(self, epoch: int) -> None:
        wait_until(lambda: [e for e in self.events(Kind.ADOPTED) if e.epoch == epoch], SECONDS, f"epoch {epoch}")

    def processes(self, *words: str) -> dict[int, str]:
        """Of the run's processes those with one of these words on their command line."""
        found = {}
        for name in _processes_with(str(self.run)):
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if any(word in line for word in words):
                found[int(name)] = line
        return found

    def ranks(self) -> set[int]:
        return set(self.processes("until.py"))


@pytest.fixture
def managed(devcluster: DevCluster, tmp_path: Path) -> Iterator[Callable[..., Managed]]:
    """Starts a run; afterwards no job and no process of it is left."""
    jobs: list[Managed] = []

    def start(policy: Policy, replicas: int = 3, path: str = "") -> Managed:
        jobs.append(Managed(devcluster, tmp_path, policy, replicas, path))
        wait_until(lambda: len(jobs[-1].events(Kind.STEP_LAUNCHED)) == replicas, SECONDS, "all steps are launched")
        jobs[-1].trains()
        return jobs[-1]

    yield start
    if any(not job.events(Kind.RUN_ENDED) for job in jobs):
        subprocess.run(["scancel", "--full", "--user", "root"], env=devcluster.environ, timeout=30)
    wait_until(lambda: not _queue(devcluster), SECONDS, "the queue is empty")
    wait_until(lambda: not _processes_with(str(tmp_path)), 30, "no process of the run is left")


def _committed(job: Job, replica: int) -> list[Event]:
    return [event for event in job.events(Kind.COMMIT, replica) if event.data["committed"]]


def test_the_head_host_dies_and_its_run_goes_on_in_the_same_job(devcluster: DevCluster, submit) -> None:  # noqa: F811
    """RW-18, but nothing starts from the top: one job, one session, and no healthy rank is restarted."""
    job: Job = submit("--replicas", "3", "--spares", "1",
                      "--", "python", str(PROGRAMS / "user_localsgd.py"), "100")  # fmt: skip
    for replica in range(3):
        job.until(Kind.COMMIT, replica)
    dead = job.events(Kind.RUN_STARTED)[0].data["head_host"]
    devcluster.kill_host(dead)
    try:
        job.until(Kind.RANKS_STARTED, 0, lambda e: e.data["attempt"] == 2, SECONDS)
        out = job.finish(0)
    finally:
        devcluster.revive_host(dead)
    assert [event.epoch for event in job.events(Kind.HEAD_STARTED)] == [1, 2]
    assert len(_job_ids(job)) == 1
    assert job.events(Kind.HOST_REPLACED, 0)[0].data["bad"] == dead
    for replica in (1, 2):  # they were well all the time
        assert len(job.events(Kind.RANKS_STARTED, replica)) == 1
        steps = [event.data["step"] for event in _committed(job, replica)]
        assert all(after == before + 1 for before, after in pairwise(steps)), steps
    report = job.slurm_ft("report", str(job.run))
    print(report)
    line = next(line for line in report.splitlines() if "head head lost  detected" in line)
    assert all(stage in line for stage in ("head ", "controller ", "adopted ", "committed ", "(to node")), line
    assert f"the head on {dead} was not heard for" in out
    assert "DONE:0" in job.slurm_ft("status", str(job.run))


def test_a_head_that_was_only_stopped_finds_itself_deposed_and_harms_nothing(managed, devcluster: DevCluster) -> None:
    """Before that: the controller is killed, and the srun of a step, and nobody loses anything."""
    job: Managed = managed(QUICK)
    ranks = job.ranks()
    os.kill(next(iter(job.processes("slurm_ft.controller.main"))), signal.SIGKILL)
    job.adopted(1)
    clients = job.processes("--job-name=sft-r1-s1 ")
    for pid in sorted(clients, reverse=True):  # the guard first, so that the step itself is left alone
        os.kill(pid, signal.SIGKILL)

    old = job.processes(*HEAD, "srun --jobid")
    for pid in old:
        os.kill(pid, signal.SIGSTOP)
    job.adopted(2)
    for pid in old:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: len(old.keys() & job.processes(*HEAD, "srun --jobid").keys()) == 1, SECONDS, "its children left")
    assert job.ranks() == ranks
    job.slurm_ft("inject", str(job.run), "--replica", "2", "--kind", "kill")
    job.until(Kind.PROGRESSED, 2, lambda e: e.data["attempt"] == 2)
    assert job.slurms_word() == "RUNNING 0:0"
    job.done()
    assert job.ended() == 0
    # Slurm has the run's exit code from the head that waited for it.
    wait_until(lambda: job.slurms_word() == "COMPLETED 0:0", SECONDS, "the job is over")
    assert not job.events(Kind.STEP_EXITED, 1)[0].t < job.events(Kind.RANK_DONE, 1)[0].t
    assert [len(job.events(Kind.RANKS_STARTED, replica)) for replica in range(3)] == [1, 1, 2]
    assert [len(job.events(Kind.STEP_LAUNCHED, replica)) for replica in range(3)] == [1, 1, 1]
    assert [event.epoch for event in job.events(Kind.RUN_ENDED)] == [2]


def test_an_allocation_that_nobody_can_look_after_is_released(managed, devcluster: DevCluster, tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\n[ -e {tmp_path}/broken ] && exit 97\nexec /usr/bin/srun "$@"\n')
    srun.chmod(0o755)
    job: Managed = managed(Policy(kill_grace=1.0, head_timeout=8.0, orphan_timeout=24.0), 3, str(srun.parent))
    dead = job.events(Kind.RUN_STARTED)[0].data["head_host"]
    (tmp_path / "broken").touch()
    devcluster.kill_host(dead)
    try:
        wait_until(lambda: not _queue(devcluster), SECONDS, "the job is gone")
    finally:
        devcluster.revive_host(dead)
    ended = job.events(Kind.RUN_ENDED)
    assert [event.data["code"] for event in ended] == [75]
    assert "no host could take over from the head on node" in ended[0].data["why"]
    claim = lease.newest(job.paths.lease)
    assert claim is not None and claim.ended == 75


def test_slurm_is_away_and_only_what_needs_it_waits(managed, devcluster: DevCluster) -> None:
    """RW-52: no answer is no answer. A rank is restarted meanwhile; a lost step waits, at no cost."""
    job: Managed = managed(Policy(kill_grace=1.0, step=Budget(1, 1800.0), backoff=0.1))
    devcluster.stop_slurmctld()
    try:
        job.slurm_ft("inject", str(job.run), "--replica", "1", "--kind", "kill")
        job.until(Kind.PROGRESSED, 1, lambda e: e.data["attempt"] == 2)
        job.kill_agent(2)
        wait_until(lambda: len(_unanswered(job)) >= 2, SECONDS, "two launches without an answer")
        why = "Slurm does not answer; its step is started in"
        wait_until(lambda: why in job.slurm_ft("explain", str(job.run)), SECONDS, "it is explained")
    finally:
        devcluster.start_slurmctld()
    job.until(Kind.PROGRESSED, 2, lambda e: e.data["attempt"] == 2)
    job.done()
    assert job.ended() == 0
    assert len(job.events(Kind.RANKS_STARTED, 0)) == len(job.events(Kind.STEP_LAUNCHED, 0)) == 1


def _unanswered(job: Job) -> list[Event]:
    return [event for event in job.events(Kind.STEP_EXITED, 2) if event.data.get("unanswered")]
