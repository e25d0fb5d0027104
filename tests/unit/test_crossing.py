"""Which variables reach a job. On a real Slurm: tests/cluster/test_hostile_environment.py."""

import json
import os

import pytest
from click.testing import CliRunner

from slurm_ft import env
from slurm_ft.agent.environ import Place, rank_environment
from slurm_ft.cli.env import command
from slurm_ft.launch.srun import step_environment
from slurm_ft.submit.crossing import into_job, submission_environment

JOB = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "4000", "SLURM_ARRAY_JOB_ID": "6", "SLURM_EXPORT_ENV": "NONE",
       "SLURM_CONF": "/cm/slurm.conf", "SLURMD_NODENAME": "n1", "SRUN_CPUS_PER_TASK": "2",
       "SLURM_TRES_PER_TASK": "cpu:1", "SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "1", "SBATCH_ACCOUNT": "a",
       "SLURM_JWT": "j"}  # fmt: skip
OWN = {"http_proxy": "http://p:1", "CONDA_PROMPT_MODIFIER": "(a b) ", "A B": "x", "NAÏVE": "é", "QUOTES": "'\"`$(x)\n"}


def test_what_an_outer_job_left_is_dropped_and_where_slurm_is_stays() -> None:
    dropped = into_job(JOB | OWN)
    assert set(JOB) - set(dropped) == {"SLURM_CONF", "SLURM_JWT", "SBATCH_ACCOUNT"}
    assert not set(OWN) & set(dropped)
    assert all(dropped.values())


def test_an_option_of_the_script_drops_sbatchs_variable_for_it() -> None:
    surroundings = {"SBATCH_ACCOUNT": "a", "SBATCH_PARTITION": "p"}
    assert into_job(surroundings, ("--account=b",)) == {"SBATCH_ACCOUNT": "the option wins"}


def test_gpus_and_mpi_of_a_job_around_us_are_dropped_and_those_of_a_plain_shell_stay() -> None:
    chosen = {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1", "PMI_RANK": "0"}
    assert into_job(chosen) == {}
    assert set(into_job({**chosen, "SLURM_JOB_ID": "1"})) == {*chosen, "SLURM_JOB_ID"}


def test_a_rank_that_submits_does_not_hand_on_who_it_is() -> None:
    place = Place("/run", 1, 2, 1, 3, 0, 0, 1, 1, "host", 1, "sock", "http://l", "/e", scratch="/scratch")
    around = rank_environment({}, place, {})
    names = {item.name for item in env.VARIABLES if item.set_by == "agent"}
    assert names <= set(into_job(around)) | {env.STEP}
    assert into_job({"RANK": "0", "MASTER_ADDR": "x", env.LIGHTHOUSE: "mine", env.RUNS: "r"}) == {}
    assert "TORCHELASTIC_RUN_ID" in into_job({"TORCHELASTIC_RUN_ID": "none"})


def test_the_environment_is_as_before_after_a_submission_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    before = dict(os.environ)
    with pytest.raises(KeyError), submission_environment():
        assert "SLURM_MEM_PER_CPU" not in os.environ
        raise KeyError
    assert dict(os.environ) == before


def test_env_lists_what_the_deciding_functions_do_and_no_value() -> None:
    secret = {"SLURM_MEM_PER_CPU": "s3cret", "MY_TOKEN": "s3cret", "SLURM_JOB_ID": "7"}
    result = CliRunner().invoke(command, ["--json"], env=secret)
    assert result.exit_code == 0, result.output
    assert "s3cret" not in result.stdout and "MY_TOKEN" not in result.stdout
    rows = json.loads(result.stdout)["variables"]
    found = {(row["into"], row["variable"]): row["what"] for row in rows}
    assert found["job", "SLURM_MEM_PER_CPU"] == "dropped"
    assert found["step", "SLURM_MEM_PER_CPU"] == "dropped"
    assert ("step", "SLURM_JOB_ID") not in found and "SLURM_JOB_ID" in step_environment(secret, "")
    assert found["rank", "RANK"] == "set"
    assert found["rank", env.LIGHTHOUSE] == "set-if-unset"
    assert found["rank", "no_proxy"] == "extended"
    assert all(row["why"] not in ("", "-") for row in rows)


def test_env_of_a_plain_shell_names_the_rule_and_can_be_narrowed() -> None:
    result = CliRunner().invoke(command, ["--into", "step"], env={"SLURM_JOB_ID": None})
    assert [line.split()[1] for line in result.stdout.splitlines()[1:4]] == ["SLURM_*", "SRUN_*", "SBATCH_*"]
    assert " rank " not in result.stdout
