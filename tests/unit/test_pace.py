"""Who hangs, by progress alone."""

import pytest

from slurm_ft.controller.pace import FACTOR, Pace, hanging, patience, stuck_at_start


def pace(*moves: float) -> Pace:
    """A replica that has moved at these times."""
    result = Pace(moves[0])
    for t in moves[1:]:
        result.moved(t)
    return result


NOBODY = frozenset[int]()
STEADY = tuple(float(t) for t in range(11))


def test_a_replica_that_stands_still_while_its_peers_move_hangs() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY, *range(11, 50))}
    assert hanging(paces, frozenset({0, 1}), NOBODY, False, 50.0, hang_after=30.0) == {0: 40.0}


def test_it_does_not_hang_before_its_patience_is_over() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY, *range(11, 40))}
    assert not hanging(paces, frozenset({0, 1}), NOBODY, False, 39.0, hang_after=30.0)


def test_slow_steps_have_more_patience_than_the_setting_says() -> None:
    slow = pace(0.0, 100.0, 200.0, 300.0)
    assert patience(slow, [], 30.0) == 100.0 * FACTOR


def test_when_all_stand_still_nobody_hangs() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY)}
    assert not hanging(paces, frozenset({0, 1}), NOBODY, False, 500.0, hang_after=30.0)


def test_peers_that_stopped_a_moment_later_wait_like_it_and_are_not_restarted() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY), 2: pace(*STEADY, 10.5)}
    assert not hanging(paces, frozenset({0, 1, 2}), NOBODY, False, 40.2, hang_after=30.0)


@pytest.mark.parametrize("behind", [STEADY, (*STEADY, 10.5)])
def test_of_replicas_that_have_all_waited_one_resumes_first_and_the_others_do_not_hang(
    behind: tuple[float, ...],
) -> None:
    """It tells at once that it has committed, and that its next step has begun."""
    paces = {0: pace(*STEADY), 1: pace(*STEADY), 2: pace(*behind, 70.0, 70.001, 70.5)}
    assert not hanging(paces, frozenset({0, 1, 2}), NOBODY, False, 70.5, hang_after=30.0)


def test_peers_that_wait_for_one_that_is_repaired_do_not_hang_when_it_moves_before_them() -> None:
    paces = {0: pace(*STEADY), 1: pace(69.5, 70.0)}
    assert not hanging(paces, frozenset({0, 1}), NOBODY, False, 70.0, hang_after=30.0)


def test_one_that_does_not_resume_with_the_others_hangs() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY, *range(70, 126, 5))}
    assert not hanging(paces, frozenset({0, 1}), NOBODY, False, 125.0, hang_after=30.0)
    for t in range(130, 200, 5):
        paces[1].moved(t)
    assert hanging(paces, frozenset({0, 1}), NOBODY, False, 199.0, hang_after=30.0) == {0: 189.0}


def test_a_replica_whose_only_peer_is_being_repaired_may_wait_for_it() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY)}
    assert not hanging(paces, frozenset({0}), NOBODY, False, 500.0, hang_after=30.0)


def test_a_replica_that_is_left_alone_has_only_its_own_pace() -> None:
    paces = {0: pace(*STEADY)}
    assert not hanging(paces, frozenset({0}), NOBODY, True, 309.0, hang_after=30.0)  # it may be saving
    assert hanging(paces, frozenset({0}), NOBODY, True, 311.0, hang_after=30.0) == {0: 301.0}


def test_one_that_says_that_it_writes_a_checkpoint_has_as_much_time_as_one_that_is_alone() -> None:
    writer, peer = pace(*STEADY), pace(*STEADY, *range(11, 400))
    both, one = frozenset({0, 1}), frozenset({0})
    assert not hanging({0: writer, 1: peer}, both, one, False, 309.0, hang_after=30.0)
    assert hanging({0: writer, 1: peer}, both, one, False, 400.0, hang_after=30.0) == {0: 390.0}
    slow = pace(0.0, 100.0, 200.0, 300.0)
    assert not hanging({0: slow, 1: peer}, both, one, False, 300.0 + 100.0 * FACTOR, hang_after=30.0)


def test_peers_that_wait_for_one_that_writes_a_checkpoint_do_not_hang() -> None:
    paces = {0: pace(*STEADY), 1: pace(*STEADY, 10.5), 2: pace(*STEADY, 11.0)}
    assert not hanging(paces, frozenset({0, 1, 2}), frozenset({0}), False, 200.0, hang_after=30.0)


def test_one_that_hangs_after_its_first_step_is_judged_by_its_peers_pace() -> None:
    paces = {0: pace(0.0, 1.0), 1: pace(*STEADY, *range(11, 50))}
    assert hanging(paces, frozenset({0, 1}), NOBODY, False, 50.0, hang_after=30.0) == {0: 49.0}


def test_start_up_is_not_a_step_and_a_replica_of_unknown_pace_has_more_patience() -> None:
    paces = {0: pace(0.0, 1.0)}
    assert not hanging(paces, frozenset({0}), NOBODY, True, 300.0, hang_after=30.0)
    assert hanging(paces, frozenset({0}), NOBODY, True, 302.0, hang_after=30.0) == {0: 301.0}


def test_a_replica_that_is_being_repaired_is_not_judged_and_0_turns_it_off() -> None:
    paces = {0: pace(*STEADY)}
    assert not hanging(paces, frozenset(), NOBODY, True, 1e6, hang_after=30.0)
    assert not hanging(paces, frozenset({0}), NOBODY, True, 1e6, hang_after=0.0)


@pytest.mark.parametrize(
    ("started", "joined", "peers_train", "hang_after", "stuck"),
    [
        (0.0, (), True, 300.0, True),
        (500.0, (), True, 300.0, False),  # for 500 s only: it has twice --hang-after
        (900.0, (), True, 1.0, False),  # for 100 s only: imports and data may take two minutes
        (0.0, (3,), True, 300.0, False),  # it waits for its peers' next synchronisation
        (0.0, (), False, 300.0, False),  # nobody trains: they may all wait for the same thing
        (0.0, (), True, 0.0, False),
    ],
)
def test_one_that_never_begins_while_its_peers_train_hangs(
    started: float, joined: tuple[int, ...], peers_train: bool, hang_after: float, stuck: bool
) -> None:
    found = stuck_at_start({3: started}, joined, peers_train, 1000.0, hang_after)
    assert found == ({3: 1000.0 - started} if stuck else {})
