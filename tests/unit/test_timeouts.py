"""The ladder of time-outs: in order for every policy, and a warning for what breaks it (RW-28)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import timeouts
from slurm_ft.spec import Lighthouse, Policy
from slurm_ft.train import survivors

IN_A_JOB = Policy()
NAMES = ["heartbeat", "join", "connect", "process group", "vote", "hang", "quorum", "step"]


def test_the_default_policy_is_in_order() -> None:
    rungs = timeouts.ladder(IN_A_JOB)
    assert [rung.name for rung in rungs] == NAMES
    assert [rung.seconds for rung in rungs] == [1, 5, 10, 60, 90, 300, 600, 900]
    assert timeouts.troubles(rungs) == []


@given(hang=st.floats(30, 1e5), launch=st.floats(1, 1e4))
def test_what_is_computed_from_a_policy_is_in_order_up_to_the_quorum(hang: float, launch: float) -> None:
    policy = Policy(hang_after=hang, launch_timeout=launch, orphan_timeout=1e9, lighthouse=Lighthouse(100, 900))
    rungs = timeouts.ladder(policy)
    assert timeouts.troubles(rungs) == []
    assert all(value == int(value) for value in timeouts.torchft_defaults(policy).values()), "torchft wants integers"


def test_without_hang_detection_the_other_rungs_are_as_before() -> None:
    rungs = timeouts.ladder(replace(IN_A_JOB, hang_after=0))
    assert [rung.name for rung in rungs] == [name for name in NAMES if name != "hang"]
    assert timeouts.troubles(rungs) == []


WRONG = {
    # RW-28: the first situation. A vote that ends before the process group's time-out kills healthy ranks.
    "process group": ({"process_group": 150, "timeout": 90}, "process group (the process group's timeout) is 150 s"),
    # RW-28: the second situation, all too long: the hang detection strikes before torchft has done its part.
    "manager": (
        {"timeout": 2400, "quorum_timeout": 4800, "connect_timeout": 1500},
        "connect (connect_timeout) is 1500",
    ),
    # torchft's own defaults.
    "torchft": ({"process_group": 60, "timeout": 60, "quorum_timeout": 60}, "the first must be shorter"),
    "quorum": ({"quorum_timeout": 60}, "a healthy rank dies while it waits for a peer that hangs or is repaired"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_the_users_own_that_breaks_the_order_is_named_with_what_it_leads_to(name: str) -> None:
    own, words = WRONG[name]
    troubles = timeouts.troubles(timeouts.ladder(IN_A_JOB, own))
    assert any(words in trouble for trouble in troubles), troubles


@given(own=st.dictionaries(st.sampled_from(sorted(timeouts.torchft_defaults(IN_A_JOB))), st.floats(0.1, 1e4)))
def test_there_is_no_warning_exactly_when_the_order_is_kept(own: dict[str, float]) -> None:
    seconds = [rung.seconds for rung in timeouts.ladder(IN_A_JOB, own)]
    assert (timeouts.troubles(timeouts.ladder(IN_A_JOB, own)) == []) == (seconds == sorted(set(seconds)))


def test_the_bootstrap_reads_what_the_agent_writes_and_both_know_the_same_variables() -> None:
    defaults = timeouts.torchft_defaults(IN_A_JOB)
    assert json.loads(timeouts.encode(defaults)) == defaults
    assert survivors.VARIABLES == timeouts.VARIABLES
    assert set(survivors.VARIABLES) < set(defaults)
