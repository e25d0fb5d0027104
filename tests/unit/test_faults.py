"""The list of faults and the plan of a campaign."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import faults
from slurm_ft.errors import UsageError
from slurm_ft.faults import BY_DEFAULT, FAULTS, Strike, Target, aim, parse, schedule

KINDS = st.sampled_from([name for name in FAULTS if name != "exit"] + ["exit:3"])
FRACTION = st.floats(0, 1, exclude_max=True)
STRIKES = st.builds(Strike, st.just(1.0), KINDS, FRACTION, FRACTION)


@pytest.mark.parametrize(
    ("kind", "hint"), [("kil", "`kill`"), ("exit", "`exit`"), ("exit:256", ""), ("", ""), ("gil_deadlock", "`gil-d")]
)
def test_a_kind_that_there_is_not_is_refused_with_a_guess(kind: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(kind)
    assert hint in caught.value.hint


def test_every_default_kind_is_a_kind() -> None:
    assert {parse(kind)[0].target for kind in BY_DEFAULT} == set(Target)


@given(st.integers(), st.floats(0.5, 100), st.floats(0, 1000))
def test_the_same_seed_gives_the_same_plan_in_the_time_it_has(seed: int, every: float, duration: float) -> None:
    first = list(schedule(seed, BY_DEFAULT, every, duration))
    assert first == list(schedule(seed, BY_DEFAULT, every, duration))
    times = [strike.at for strike in first]
    assert times == sorted(times)
    assert all(0 < t <= duration for t in times)
    assert duration / (1.5 * every) - 1 <= len(times) <= duration / (0.5 * every)


@given(STRIKES, st.sets(st.integers(0, 9), max_size=1))
def test_the_last_healthy_replica_is_never_struck(strike: Strike, healthy: set[int]) -> None:
    whom = aim(strike, sorted(healthy), ranks=2, hosts=1)
    assert (whom is None) == (faults.parse(strike.kind)[0].target is not Target.RUN)


@given(STRIKES, st.sets(st.integers(0, 9), min_size=2), st.integers(1, 4), st.integers(1, 4))
def test_a_strike_falls_on_a_rank_or_the_first_rank_of_a_host_of_a_healthy_replica(
    strike: Strike, healthy: set[int], hosts: int, ranks_per_host: int
) -> None:
    whom = aim(strike, sorted(healthy), ranks=hosts * ranks_per_host, hosts=hosts)
    assert whom is not None
    replica, rank = whom
    target = parse(strike.kind)[0].target
    assert target is Target.RUN or replica in healthy
    assert 0 <= rank < hosts * ranks_per_host
    if target is Target.HOST:
        assert rank % ranks_per_host == 0
