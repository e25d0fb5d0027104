"""Rungs of the ladder that need a trick to reach: a step that never starts, one that srun refuses, and the kernel
that kills for lack of memory. On a real Slurm."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_ft.events import Kind
from slurm_ft.spec import Policy
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.test_failover import Managed, managed  # noqa: F401
from tests.cluster.test_training import PROGRAMS, Job, submit  # noqa: F401

SRUN = """#!/bin/sh
# The first step of replica 1 never starts, and Slurm's own srun refuses the second.
case "$*" in
*--replica=1*)
  echo x >>{here}/tries
  case $(wc -l <{here}/tries) in
  1) exec sleep 600 ;;
  2) exec /usr/bin/srun --no-such-option "$@" ;;
  esac ;;
esac
exec /usr/bin/srun "$@"
"""
LIMIT = 400 << 20


def test_a_step_that_never_starts_and_one_that_srun_refuses_are_not_the_programs_failures(managed, tmp_path) -> None:  # noqa: F811
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(here=tmp_path))
    srun.chmod(0o755)
    job: Managed = managed(Policy(kill_grace=1.0, launch_timeout=20.0, backoff=0.1), 2, str(srun.parent))
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    late, refused = (event.data for event in job.events(Kind.STEP_EXITED, 1))
    told = [event.data for kind in (Kind.STEP_ENDING, Kind.STEP_EXITED) for event in job.events(kind, 1)]
    assert "agents did not report within 20 s" in str(told), told
    assert "srun" in str(refused) and "rank" not in str((late, refused))
    job.done()
    assert job.ended() == 0
    assert not job.events(Kind.RANK_FAILED)
    assert [event.data["attempt"] for event in job.events(Kind.RANKS_STARTED, 1)] == [1], "no attempt was spent"
    assert len(job.events(Kind.STEP_LAUNCHED, 0)) == len(job.events(Kind.RANKS_STARTED, 0)) == 1


def test_a_crash_at_the_same_step_again_and_again_ends_the_run_before_the_night_is_over(submit) -> None:  # noqa: F811
    budgets = ("--restarts-in-place", "1000", "--restarts-by-step", "1000")
    job: Job = submit("--replicas", "2", *budgets, "--", "python", str(PROGRAMS / "crash_at.py"), "4")
    out = job.finish(93)
    assert "ValueError: the data is broken at step 4" in out
    assert "the same failure at step 4 3 times" in job.events(Kind.RUN_ENDED)[-1].data["why"]
    assert job.events(Kind.PROGRESSED, 0), "it had trained"


@pytest.fixture
def scarce(devcluster: DevCluster) -> Iterator[None]:
    """All hosts' slurmds, and what they start, are in one control group that has little memory."""
    base = next(path for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if path.is_dir())
    group = base / f"slurm-ft-test-{uuid.uuid4().hex[:8]}"
    pids = [p.pid for host in devcluster.states() for p in devcluster.processes(host) if p.role == "slurmd"]
    try:
        group.mkdir()
        limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        limit.write_text(str(LIMIT))
    except (OSError, StopIteration) as error:
        pytest.skip(f"no control group for memory can be made here: {error!r}")
    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    yield
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (base / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()


def test_a_rank_that_the_kernel_killed_for_lack_of_memory_is_told_apart(scarce, submit, tmp_path) -> None:  # noqa: F811
    finish, eat = tmp_path / "finish", tmp_path / "eat"
    job: Job = submit("--replicas", "2", "--", "python", str(PROGRAMS / "hungry.py"), str(finish), str(eat))
    for replica in range(2):
        job.until(Kind.PROGRESSED, replica)
    eat.touch()
    failed = job.until(Kind.RANK_FAILED, 1).data
    assert failed["oom"] is True and failed["signal"] == "SIGKILL"
    assert "killed for lack of memory (the limit is 400" in failed["what"]
    job.until(Kind.PROGRESSED, 1, lambda e: e.data["attempt"] == 2)
    finish.touch()
    job.finish(0)
    assert len(job.events(Kind.RANKS_STARTED, 0)) == 1
    assert "out of memory" in job.slurm_ft("report", str(job.run))
