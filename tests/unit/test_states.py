"""Slurm's words: one table, no word of a state is ever taken for running by mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.slurm.reasons import REASONS, wait_words
from slurm_ft.slurm.states import STATES, ExitCode, Phase, State, parse_exit_code, parse_state, reason_words


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
def test_every_state_is_read_by_its_code_and_its_name_in_any_case(state: State) -> None:
    for text in (state.code, state.name, state.name.lower(), f" {state.name} ", f"{state.name}+"):
        assert parse_state(text).state is state
    assert state.words
    assert state.phase is not Phase.UNKNOWN
    assert [state.pending, state.running, state.final].count(True) == (state.phase is not Phase.ENDING)


def test_no_word_stands_for_two_states() -> None:
    words = [word for state in STATES for word in (state.code, state.name)]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("text", "name", "uid"),
    [
        ("CANCELLED by 1000", "CANCELLED", 1000),
        ("CANCELLED by 0", "CANCELLED", 0),
        ("CANCELLED+", "CANCELLED", None),
        ("OUT_OF_ME+", "OUT_OF_MEMORY", None),
        ("RUNNING+", "RUNNING", None),
        ("CA", "CANCELLED", None),
        ("OOM", "OUT_OF_MEMORY", None),
        ("NF", "NODE_FAIL", None),
        ("PR", "PREEMPTED", None),
        ("RQ", "REQUEUED", None),
        ("CG", "COMPLETING", None),
    ],
)
def test_rw01_a_state_field_is_read_by_its_first_word_and_the_user_is_kept(
    text: str, name: str, uid: int | None
) -> None:
    field = parse_state(text)
    assert (field.state.name, field.cancelled_by, field.raw) == (name, uid, text)


def test_rw01_who_cancelled_a_job_is_said() -> None:
    assert parse_state("CANCELLED by 0").words == "cancelled by root"
    assert parse_state("CANCELLED by 1000").words == "cancelled by user 1000"
    assert parse_state("CANCELLED").words == "cancelled"


@pytest.mark.parametrize("text", ["HIBERNATING", "COMPLET+", "R+U", "", "  ", "RUN", "RUNNING,COMPLETING"])
def test_rw01_a_state_that_is_not_in_the_table_is_unknown_and_shown_raw(text: str) -> None:
    field = parse_state(text)
    assert field.state.phase is Phase.UNKNOWN
    assert field.words == f"unknown: {text.strip()}"
    assert not (field.state.pending or field.state.running or field.state.final)


@given(st.text())
def test_no_text_makes_reading_a_state_a_reason_or_an_exit_code_fail(text: str) -> None:
    parse_state(text)
    reason_words(text)
    parse_exit_code(text)


@pytest.mark.parametrize("name", ["PREEMPTED", "COMPLETING", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED"])
def test_rw42_a_state_after_which_the_same_job_may_be_queued_again_is_not_the_end(name: str) -> None:
    assert parse_state(name).state.phase is Phase.ENDING


def test_rw42_a_preempted_job_that_comes_back_is_never_final_on_its_way() -> None:
    seen = [parse_state(text).state for text in ("RUNNING", "COMPLETING", "PREEMPTED", "PENDING", "RUNNING")]
    assert not any(state.final for state in seen)


@pytest.mark.parametrize(
    ("text", "expected", "status", "words"),
    [
        ("0:0", ExitCode(0, 0), 0, "exit code 0"),
        ("1:0", ExitCode(1, 0), 1, "exit code 1"),
        ("0:9", ExitCode(0, 9), 137, "killed by signal 9 (SIGKILL)"),
        ("1:9", ExitCode(1, 9), 137, "killed by signal 9 (SIGKILL)"),
        ("0:125", ExitCode(0, 125), 253, "killed by signal 125"),
        # squeue -O exit_code prints the wait status: seen for `exit 137` and for a script that killed itself
        ("35072", ExitCode(137, 0), 137, "exit code 137"),
        ("9", ExitCode(0, 9), 137, "killed by signal 9 (SIGKILL)"),
    ],
)
def test_an_exit_code_pair_says_code_and_signal(text: str, expected: ExitCode, status: int, words: str) -> None:
    code = parse_exit_code(text)
    assert code == expected
    assert (code.status, code.words) == (status, words)


@pytest.mark.parametrize("text", ["", "N/A", "1:", ":9", "-1", "1:2:3", "one"])
def test_text_that_is_not_an_exit_code_is_none(text: str) -> None:
    assert parse_exit_code(text) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Priority", "jobs with a higher priority go first"),
        ("(Resources)", "waiting for enough free nodes"),
        ("QOSMaxJobsPerUserLimit", "you have reached the limit for each user of this QOS"),
        ("AssocGrpCPUMinutesLimit", "all jobs of your account together have reached its limit"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node4",
            "a node that it needs is down, drained or reserved (UnavailableNodes:node4)",
        ),
        (
            "(ReqNodeNotAvail(Unavailable:node[1-2]))",
            "a node that it needs is down, drained or reserved (Unavailable:node[1-2])",
        ),
        ("launch failed requeued held", "it could not be started, went back into the queue and is held"),
    ],
)
def test_a_pending_reason_is_said_in_plain_words_with_its_details(text: str, words: str) -> None:
    assert reason_words(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("JobHeldUser", "held by its owner; `scontrol release 12` lets it go"),
        ("PartitionTimeLimit", "it asks for more time than its partition allows; see what there is with `sinfo"),
        ("DependencyNeverSatisfied", "it will never start; cancel it with scancel"),
        ("job_requeued_in_held_state", "job_requeued_in_held_state"),
        ("launch_failed_requeued_held", "then `scontrol release 12`"),
        ("BeginTime", "its earliest start is still to come"),
        ("MoonPhase", "MoonPhase"),
    ],
)
def test_a_reason_says_what_the_jobs_owner_can_do(text: str, words: str) -> None:
    assert words in wait_words(text, "12")


def test_every_reason_and_its_advice_are_one_short_phrase() -> None:
    for word, reason in REASONS.items():
        assert reason.words and not reason.words.endswith("."), word
        assert len(wait_words(word, "12")) < 160, word


def test_a_reason_nobody_has_heard_of_comes_back_as_slurm_wrote_it() -> None:
    assert reason_words("MoonPhase (waxing), day 3") == "MoonPhase (waxing), day 3"
