import sys
from pathlib import Path

import pytest

from slurm_ft.errors import EXIT_LAUNCH
from slurm_ft.launch.base import StepRequest, exit_words
from slurm_ft.launch.srun import Allocation, allocation_from, step_argv, step_environment
from slurm_ft.paths import RunPaths

REQUEST = StepRequest(RunPaths("/runs/my run (v2)"), 3, 2, ("node01", "node02", "node04"))
ALLOCATION = Allocation("4711", cpus_per_host=72, gpus_per_host=8)

GOLDEN = [
    "srun",
    "--jobid=4711",
    "--job-name=sft-r3-s2",
    "--nodelist=node[01-02,04]",
    "--nodes=3",
    "--ntasks=3",
    "--ntasks-per-node=1",
    "--cpus-per-task=72",
    "--mem=0",
    "--gres=gpu:8",
    "--overlap",
    "--exact",
    "--cpu-bind=none",
    "--mpi=none",
    "--kill-on-bad-exit=1",
    "--wait=60",
    "--unbuffered",
    "--input=none",
    "--export=ALL",
    sys.executable,
    "-m",
    "slurm_ft.agent.main",
    "--run-dir=/runs/my run (v2)",
    "--replica=3",
    "--step=2",
    "--hosts=node[01-02,04]",
]

HOSTILE = {
    # RW-17: left from an outer interactive job
    "SLURM_MEM_PER_CPU": "4000", "SLURM_MEM_PER_NODE": "9", "SLURM_MEM_PER_GPU": "1", "SLURM_ARRAY_JOB_ID": "1",
    # RW-22: two variables that contradict --cpus-per-task, so that srun refuses
    "SLURM_CPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "cpu:1", "SLURM_NTASKS_PER_GPU": "1",
    # options of srun that a site or a user may have exported
    "SLURM_WAIT": "30", "SLURM_KILL_BAD_EXIT": "0", "SLURM_NO_KILL": "1", "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXCLUSIVE": "1", "SLURM_CPU_BIND": "cores", "SLURM_GPUS": "1", "SLURM_GRES": "gpu:1", "SLURM_THREADS": "1",
    "SLURM_UNBUFFEREDIO": "0", "SLURM_EXPORT_ENV": "NONE", "SLURM_EXIT_ERROR": "1", "SLURM_STEP_ID": "0",
    "SLURM_HINT": "nomultithread", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node9",
    "SLURM_WORKING_DIR": "/", "SLURM_TIMELIMIT": "1", "SLURM_LABELIO": "1", "SRUN_CONTAINER": "x",
    "SBATCH_EXPORT": "NONE", "SRUN_CPUS_PER_TASK": "3",
}  # fmt: skip
KEPT = {"SLURM_CONF": "/cm/slurm.conf", "SLURM_JOB_ID": "4711", "SLURM_CLUSTERS": "a", "PATH": "/bin", "LANG": "C"}


def test_the_command_line_of_a_step() -> None:
    assert step_argv(REQUEST, ALLOCATION) == GOLDEN


def test_a_step_without_gpus_asks_for_none() -> None:
    assert [word for word in step_argv(REQUEST, Allocation("4711", 72)) if "gpu" in word] == []


@pytest.mark.parametrize(
    "option",
    ["--wait=", "--kill-on-bad-exit=", "--cpus-per-task=", "--mem=", "--ntasks=", "--ntasks-per-node=", "--nodes=",
     "--nodelist=", "--cpu-bind=", "--mpi=", "--export=", "--input=", "--unbuffered", "--overlap", "--exact"],
)  # fmt: skip
def test_what_a_site_could_have_set_otherwise_is_written_out_once(option: str) -> None:
    assert len([word for word in step_argv(REQUEST, ALLOCATION) if word.startswith(option)]) == 1


def test_a_step_may_die_with_its_host() -> None:
    assert not any("no-kill" in word for word in step_argv(REQUEST, ALLOCATION))


def test_srun_sees_no_option_of_an_outer_job_but_finds_slurm() -> None:
    result = step_environment({**HOSTILE, **KEPT, "SLURM_FT_ADDRESS": "10.0.0.1"}, "/runs/x")
    slurm = {name: value for name, value in result.items() if name.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    assert slurm == {
        "SLURM_CONF": "/cm/slurm.conf",
        "SLURM_JOB_ID": "4711",
        "SLURM_CLUSTERS": "a",
        "SLURM_FT_ADDRESS": "10.0.0.1",
        "SLURM_FT_RUN": "/runs/x",
        "SLURM_EXIT_ERROR": str(EXIT_LAUNCH),
    }
    assert (result["PATH"], result["LANG"]) == ("/bin", "C")


def test_no_two_steps_of_a_job_have_the_same_name() -> None:
    paths = RunPaths("/x")
    names = {StepRequest(paths, r, s, ("a",)).name for r in range(12) for s in range(12)}
    assert len(names) == 144


@pytest.mark.parametrize(
    ("surroundings", "cpus", "gpus"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "72(x2),36", "SLURM_GPUS_ON_NODE": "4"}, 36, 4),
        ({"SLURM_JOB_CPUS_PER_NODE": "8"}, 8, 0),
        ({"SLURM_CPUS_ON_NODE": "6", "SLURM_GPUS_ON_NODE": ""}, 6, 0),
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x3)", "SLURM_CPUS_ON_NODE": "4"}, 16, 0),
        ({}, 1, 0),
    ],
)
def test_a_step_asks_for_what_every_host_can_give(surroundings: dict[str, str], cpus: int, gpus: int) -> None:
    assert allocation_from({"SLURM_JOB_ID": "1", **surroundings}) == Allocation("1", cpus, gpus)


def test_the_words_of_a_step_are_in_the_replicas_folder() -> None:
    assert Path("/runs/my run (v2)/replicas/3/step_2.log") == REQUEST.log


@pytest.mark.parametrize(
    ("code", "words"), [(None, "ended"), (0, "exited with code 0"), (3, "exited with code 3"),
                        (-9, "was killed by SIGKILL"), (-40, "was killed by signal 40")]
)  # fmt: skip
def test_how_a_process_ended_in_words(code: int | None, words: str) -> None:
    assert exit_words(code) == words
