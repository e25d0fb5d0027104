import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.errors import SpecError
from slurm_ft.spec import CLUSTERS, Budget, Lighthouse, Policy, ReplicaSpec, RunSpec

COMMAND = ("python", "train.py")
GOOD = RunSpec("titan", ReplicaSpec(COMMAND, hosts=2, ranks_per_host=4), replicas=3, spares=1)


def problems(spec: RunSpec) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        spec.validate()
    return dict(caught.value.problems)


def test_a_good_spec_validates_to_itself() -> None:
    assert GOOD.validate() is GOOD


def test_the_hosts_of_a_run_are_those_of_its_replicas_and_the_spares() -> None:
    assert GOOD.hosts == 7
    assert GOOD.replica.ranks == 8


def test_one_error_names_everything_that_is_wrong_each_with_a_hint() -> None:
    wrong = RunSpec(
        "my run",
        ReplicaSpec((), hosts=0, ranks_per_host=-1, environment={"SLURM_JOB_ID": "1", "SLURM_FT_X": "fine"}),
        replicas=0,
        spares=-1,
        cluster="pbs",
        policy=Policy(
            min_replicas=0,
            in_place=Budget(-1, 0.0),
            step=Budget(0, -1.0),
            backoff=5.0,
            backoff_max=1.0,
            kill_grace=0.0,
            lighthouse=Lighthouse(quorum_tick_ms=0),
        ),
    )
    found = problems(wrong)
    for word in (
        "no command", "--nodes-per-replica is 0", "--ranks-per-node is -1", "sets SLURM_JOB_ID", "in_place.restarts",
        "in_place.seconds", "step.seconds", "backoff is 5.0", "kill_grace is 0.0", "lighthouse.quorum_tick_ms is 0",
        "`my run`", "--replicas is 0", "--spares is -1", "--min-replicas is 0", "`pbs`",
    ):  # fmt: skip
        assert any(word in what for what in found), word
    assert len(found) == 15
    assert all(found.values())


def test_the_message_counts_the_problems_and_shows_each_hint_below_its_problem() -> None:
    with pytest.raises(SpecError) as caught:
        dataclasses.replace(GOOD, replicas=0, spares=-1).validate()
    lines = caught.value.message.splitlines()
    assert lines[0] == "2 problems in what was asked:"
    assert lines[3:] == ["  --spares is -1", "    hint: 0 or more"]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("fewest", [0, -1, 4])
def test_the_fewest_replicas_lie_between_one_and_all(fewest: int) -> None:
    found = problems(dataclasses.replace(GOOD, policy=Policy(min_replicas=fewest)))
    assert list(found) == [f"--min-replicas is {fewest} with 3 replicas"]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 101, "lr=3e-4;bs#1", "a\n"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    assert any("not fit for a folder" in what for what in problems(dataclasses.replace(GOOD, name=name)))


@pytest.mark.parametrize("restarts", [0, 1, 100])
def test_a_rung_may_be_turned_off(restarts: int) -> None:
    dataclasses.replace(GOOD, policy=Policy(in_place=Budget(restarts, 1.0))).validate()


# --- run.json ------------------------------------------------------------------------------------------


def changed(*path: str, to: Any) -> dict[str, Any]:
    value = json.loads(json.dumps(GOOD.to_json()))
    place = value
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return value


times = st.floats(0.001, 1e6)
counts = st.integers(0, 1000)
budgets = st.builds(Budget, counts, times)
words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
policies = st.builds(
    Policy,
    min_replicas=st.just(1),
    in_place=budgets,
    step=budgets,
    backoff=st.floats(0, 1),
    backoff_max=st.floats(1, 100),
    launch_timeout=times,
    kill_grace=times,
    lighthouse=st.builds(Lighthouse, *[st.integers(1, 10**6)] * 3),
)
specs = st.builds(
    RunSpec,
    name=st.text("abcXYZ019._=+-", min_size=1, max_size=100),
    replica=st.builds(
        ReplicaSpec,
        command=st.lists(words, min_size=1).map(tuple),
        hosts=st.integers(1, 1000),
        ranks_per_host=st.integers(1, 16),
        environment=st.dictionaries(st.text("ABC_", min_size=1), words),
    ),
    replicas=st.integers(1, 1000),
    spares=counts,
    cluster=st.sampled_from(CLUSTERS),
    policy=policies,
)


@given(specs)
def test_a_spec_comes_back_from_json_as_it_was(spec: RunSpec) -> None:
    assert RunSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (changed("replcas", to=3), ["run.replcas is unknown", "did you mean `replicas`?"]),
        (changed("zzz", to=3), ["run.zzz is unknown", "known: cluster, host, name, policy, replica, replicas, spares"]),
        (changed("policy", "kill_grase", to=3), ["run.policy.kill_grase is unknown", "`kill_grace`"]),
        (changed("policy", "in_place", "seconds", to="10"), ["run.policy.in_place.seconds is '10'", "give a number"]),
        (changed("replicas", to="three"), ["run.replicas is 'three'", "give a whole number"]),
        (changed("replicas", to=True), ["run.replicas is True"]),
        (changed("replicas", to=None), ["run.replicas is None"]),
        (changed("replicas", to=[3]), ["run.replicas is [3]"]),
        (changed("replicas", to=0), ["--replicas is 0"]),
        (changed("name", to=["a"]), ["run.name is ['a']"]),
        (changed("policy", to=[]), ["run.policy is not an object"]),
        (changed("schema", to=2), ["schema 2", "reads schema 1"]),
        (changed("replica", "command", to="python train.py"), ["run.replica.command is 'python train.py'"]),
        (changed("replica", "command", to=["python", 3]), ["run.replica.command is ['python', 3]"]),
        (changed("replica", "environment", to={"A": 1}), ["run.replica.environment is {'A': 1}"]),
        (changed("replica", "environment", to=["A=1"]), ["run.replica.environment is ['A=1']"]),
        ({"name": "x"}, ["run is incomplete", "replica"]),
        ({}, ["run is incomplete"]),
    ],
)
def test_a_wrong_run_json_is_a_spec_error_that_says_where(value: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.from_json(value)
    for word in words:
        assert word in caught.value.message


def test_an_integer_is_taken_for_a_time() -> None:
    assert RunSpec.from_json(changed("policy", "backoff_max", to=60)).policy.backoff_max == 60.0


def test_what_run_json_does_not_say_has_its_default() -> None:
    value = {"name": "x", "replica": {"command": ["true"]}}
    assert RunSpec.from_json(value) == RunSpec("x", ReplicaSpec(("true",)))
