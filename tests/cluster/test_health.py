"""Health on a real Slurm: unfit hosts are replaced, unfit spares are not taken, and all hosts of a job are checked."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from slurm_ft.events import Kind
from slurm_ft.testing.devcluster import DevCluster
from tests.cluster.conftest import wait_until
from tests.cluster.test_training import PROGRAMS, SLURM_FT, submit
from tests.processes import lives

__all__ = ["submit"]
SAMPLES = Path(__file__).resolve().parents[2] / "scripts" / "centre"


def test_unfit_hosts_are_replaced_by_spares_that_are_fit(submit, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A host that fails its check before the first attempt, a spare that fails it and is well again, and a host that
    fails it when a broken replica is to start again there: one run."""
    ill = tmp_path / "ill"
    ill.mkdir()
    for host in ("node2", "node3"):
        (ill / host).touch()
    check = f"test ! -e {ill}/$SLURMD_NODENAME || {{ echo ERROR: $SLURMD_NODENAME is ill; exit 1; }}"
    monkeypatch.setenv("SLURM_FT_SPARE_CHECK", "1")
    job = submit("--replicas", "2", "--spares", "2", "--health-check", check, "--",
                 "python", str(PROGRAMS / "steps.py"), "4000")  # fmt: skip
    unfit = job.until(Kind.HOST_UNFIT, 1)
    job.until(Kind.PROGRESSED, 1)
    job.until(Kind.PROGRESSED, 0)
    assert (unfit.data["host"], unfit.data["what"]) == ("node2", "node2 is ill")
    assert job.events(Kind.HOST_REPLACED, 1)[-1].data == {"bad": "node2", "spare": "node4"}
    assert [e.data["host"] for e in job.events(Kind.HOST_UNFIT) if e.replica is None] == ["node3"]

    (ill / "node3").unlink()
    job.until(Kind.HOST_FIT, None)
    (ill / "node1").touch()
    job.kill_rank(0)
    job.until(Kind.PROGRESSED, 0, lambda e: e.data["attempt"] == 2)
    assert job.events(Kind.HOST_REPLACED, 0)[-1].data == {"bad": "node1", "spare": "node3"}
    assert len(job.events(Kind.RANKS_STARTED, 1)) == 1
    drain = "scontrol update NodeName=node1 State=DRAIN Reason='slurm-ft: node1 is ill'"
    assert drain in job.slurm_ft("explain", str(job.run), "0")
    assert "node2 failed its check: node2 is ill" in job.slurm_ft("explain", str(job.run), "1")
    assert drain in job.slurm_ft("report", str(job.run))
    job.slurm_ft("stop", str(job.run))
    job.finish(143)


def check(cluster: DevCluster, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`slurm-ft check --hosts` in a job of three hosts."""
    environ = {**cluster.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
    argv = ["salloc", "-Q", "-N3", "-w", "node[1-3]", SLURM_FT, "check", "--hosts", "--shared", str(folder), *options]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=90)


def test_all_hosts_of_a_job_are_checked_by_one_step_with_a_line_for_each_fault(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    well = check(devcluster, tmp_path, "--network", "--storage")
    assert (well.stdout, well.stderr, well.returncode) == ("", "", 0)
    bad = check(devcluster, tmp_path, "--network", "--node", "--gpus", "64", NCCL_SOCKET_IFNAME="hsn7")
    words = ("0 of 64 GPUs are there", "there is no network interface `hsn7`, which NCCL_SOCKET_IFNAME names")
    expected = [f"ERROR: node{number}: {word}" for number in (1, 2, 3) for word in words]
    assert [line for line in bad.stdout.splitlines() if "left over" not in line] == expected
    assert bad.returncode == 1
    assert list(tmp_path.iterdir()) == []


def samples(folder: Path) -> Path:
    """The centre's samples below a prefix, with a log of their own; the host is unfit while `folder/ill` is there."""
    share = folder / "share" / "slurm-ft"
    share.mkdir(parents=True, exist_ok=True)
    for name in ("prolog.sh", "epilog.sh"):
        text = (SAMPLES / name).read_text()
        assert text.count("logger -t slurm-ft --") == 1
        # Other clusters of this machine have a job of this number and a node of this name too.
        own = f"printf '%s\\n' \"$facts\" | grep -qx 'SFT_TEST={folder}' || continue\n  say \"job"
        text = text.replace('say "job $SLURM_JOB_ID has', f"{own} $SLURM_JOB_ID has")
        text = text.replace("logger -t slurm-ft --", f"printf '%s\\n' >>{folder}/log")
        (share / name).write_text(text)
        (share / name).chmod(0o755)
    program = folder / "bin" / "slurm-ft"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\necho \"$@\" >>{folder}/calls\ntest -e {folder}/ill || exit 0\n"
                       "echo \"ERROR: 3 of 4 GPU's are there\"; exit 1\n")  # fmt: skip
    program.chmod(0o755)
    return share


def test_the_sample_prolog_and_epilog_log_what_is_wrong_and_end_what_a_job_has_left(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    conf = devcluster.folder / "slurm.conf"
    before = conf.read_text()
    share = samples(tmp_path)
    environ = {**devcluster.environ, "SFT_TEST": str(tmp_path)}
    run = partial(subprocess.run, env=environ, capture_output=True, text=True, timeout=60)
    log = tmp_path / "log"
    log.touch()
    left_over = f"setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! >{tmp_path}/pid; disown"
    try:
        conf.write_text(f"{before}Prolog={share}/prolog.sh\nEpilog={share}/epilog.sh\n")
        run(["scontrol", "reconfigure"], check=True)
        srun = ["srun", "-N1", "-w", "node1", "--gres=gpu:3", "bash", "-c"]
        assert run([*srun, left_over]).returncode == 0
        wait_until(lambda: "has left process" in log.read_text(), 20, "the epilog has seen the process")
        assert log.read_text().split("process ")[1].split(";")[0] == (tmp_path / "pid").read_text().strip()
        wait_until(lambda: not lives(int((tmp_path / "pid").read_text())), 10, "the process is gone")
        wait_until(lambda: len((tmp_path / "calls").read_text().splitlines()) == 2, 20, "the epilog is over")
        assert (tmp_path / "calls").read_text() == "check --node --gpus 3\ncheck --node\n"
        log.write_text("")

        (tmp_path / "ill").touch()
        assert run([*srun, "true"]).returncode == 0
        wait_until(lambda: len(log.read_text().splitlines()) == 4, 20, "prolog and epilog have spoken")
        drain = "to drain: scontrol update NodeName=node1 State=DRAIN Reason='slurm-ft: 3 of 4 GPUs are there'"
        assert log.read_text().splitlines()[1::2] == [drain, drain]
        prolog = share / "prolog.sh"
        prolog.write_text(prolog.read_text().replace("\nrefuse=no\n", "\nrefuse=yes\n"))
        assert subprocess.run([prolog], env={"SLURM_JOB_GPUS": "0,1"}, timeout=30).returncode == 1
        assert "drain" not in run(["sinfo", "-h", "-o", "%T"]).stdout
    finally:
        conf.write_text(before)
        run(["scontrol", "reconfigure"], check=True)
