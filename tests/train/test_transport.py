"""The checkpoint transport: real sockets on loopback, a donor that really dies. Each promise is a function of
transport_workers.py, and runs in a process of its own that has torch."""

from __future__ import annotations

import pytest

PROMISES = [
    "any_state_arrives",
    "rows_are_cut_exactly",
    "written_in_place",
    "nothing_without_the_secret",
    "a_donor_that_repeats_our_proof_is_refused",
    "only_the_step_that_was_asked_for",
    "a_donor_dies_and_another_goes_on",
    "what_was_kept_is_not_taken_for_another_steps",
    "a_broken_connection_goes_on",
    "a_donor_that_is_slow_to_greet_is_asked_again",
    "a_damaged_chunk_is_noticed",
    "the_donor_waits_for_its_readers_but_not_for_ever",
    "a_donor_cannot_run_code_here",
    "damaged_skeletons_are_errors",
    "dtensors_arrive",
]


def _promise(name: str, *arguments: object) -> None:
    import transport_workers  # in the forked process: this one has no torch

    getattr(transport_workers, name)(*arguments)


@pytest.mark.parametrize("promise", PROMISES)
def test_transport(in_fork, promise):
    in_fork(_promise, promise)


@pytest.mark.parametrize("promise", ["secrets_are_read_with_care", "a_manager_commits_nothing_on_a_torn_state"])
def test_transport_in_a_run(in_fork, promise, tmp_path):
    in_fork(_promise, promise, str(tmp_path))
