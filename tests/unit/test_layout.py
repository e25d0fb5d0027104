"""Layouts: each host has one job, neighbours stay together, and what does not fit is said with both numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.errors import SpecError, UsageError
from slurm_ft.mesh.extent import Extent
from slurm_ft.mesh.layout import Place, assign
from slurm_ft.slurm.hostlist import expand

HOSTS = expand("node[1-9]")
LAYOUT = assign(HOSTS, replicas=4, hosts_per_replica=2, spares=1, ranks_per_host=8)


def problems_of(hosts: list[str], **counts: int) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        assign(hosts, **counts)
    return caught.value.problems


def test_replicas_take_neighbours_in_the_given_order_and_the_rest_are_spares() -> None:
    assert LAYOUT.replicas[0] == LAYOUT.hosts_of(0) == ("node1", "node2")
    assert LAYOUT.hosts_of(3) == ("node7", "node8")
    assert LAYOUT.spares == ("node9",)
    assert LAYOUT.extent == Extent(("replica", "host", "gpu"), (4, 2, 8))
    assert LAYOUT.hostlist_of(3) == "node[7-8]"


def test_hosts_beyond_what_was_asked_are_spares_too() -> None:
    assert assign(HOSTS, 2, 2).spares == tuple(HOSTS[4:])


def test_a_place_says_its_host_and_its_rank_in_the_replica_and_over_all() -> None:
    assert LAYOUT.place_of(3, 1, 5) == Place(replica=3, host_index=1, gpu=5, host="node8", rank=13, index=61)
    for outside in ((4, 0, 0), (0, 2, 0), (0, 0, 8), (-1, 0, 0)):
        with pytest.raises(IndexError):
            LAYOUT.place_of(*outside)
    for replica in (-1, 4):
        with pytest.raises(IndexError):
            LAYOUT.hosts_of(replica)


def test_a_host_knows_its_replica_and_a_spare_has_none() -> None:
    assert LAYOUT.replica_of("node5") == 2
    assert LAYOUT.replica_of("node9") is None
    with pytest.raises(UsageError, match="node77") as caught:
        LAYOUT.replica_of("node77")
    assert "node[1-9]" in caught.value.hint


def test_a_spare_takes_the_place_of_a_bad_host_and_no_other_place_moves() -> None:
    repaired = LAYOUT.without("node3")
    assert repaired.replicas == (("node1", "node2"), ("node9", "node4"), *LAYOUT.replicas[2:])
    assert repaired.spares == ()
    assert repaired.place_of(1, 0, 0).index == LAYOUT.place_of(1, 0, 0).index
    with pytest.raises(UsageError, match="No spare is left to stand in for node4 of replica 1"):
        repaired.without("node4")
    with pytest.raises(UsageError, match="node3 is neither"):
        repaired.without("node3")


def test_a_bad_spare_is_only_taken_out() -> None:
    assert LAYOUT.without("node9").spares == ()
    assert LAYOUT.without("node9").replicas == LAYOUT.replicas


@pytest.mark.parametrize(
    ("counts", "what", "hint"),
    [
        (
            {"replicas": 5, "hosts_per_replica": 2},
            "5 replicas of 2 hosts need 10 hosts, and there are 9",
            "ask Slurm for 10 nodes, or run 4 replicas",
        ),
        (
            {"replicas": 4, "hosts_per_replica": 2, "spares": 2},
            "4 replicas of 2 hosts and 2 spares need 10 hosts, and there are 9",
            "ask Slurm for 10 nodes, or run 3 replicas",
        ),
        (
            {"replicas": 1, "hosts_per_replica": 12},
            "1 replica of 12 hosts needs 12 hosts, and there are 9",
            "ask Slurm for 12 nodes",
        ),
    ],
)
def test_replicas_that_do_not_fit_are_refused_with_both_numbers_and_a_way_out(
    counts: dict[str, int], what: str, hint: str
) -> None:
    assert problems_of(HOSTS, **counts) == [(what, hint)]


def test_all_that_is_wrong_is_listed_at_once() -> None:
    found = problems_of(["a1", "a2", "a1", "a2"], replicas=0, hosts_per_replica=0, spares=-1, ranks_per_host=0)
    assert [what for what, _ in found] == [
        "0 replicas",
        "0 hosts per replica",
        "-1 spares",
        "0 ranks per host",
        "4 hosts but only 2 names: a[1-2] more than once",
    ]
    assert all(hint for _, hint in found)


def test_no_hosts_at_all_are_refused() -> None:
    assert problems_of([], replicas=1, hosts_per_replica=1)[0][0].endswith("needs 1 host, and there are 0")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), st.integers(0, 3))
def test_every_host_has_exactly_one_job_and_every_rank_one_place(
    replicas: int, hosts_per_replica: int, spares: int, ranks: int, more: int
) -> None:
    hosts = [f"h{number}" for number in range(replicas * hosts_per_replica + spares + more)]
    layout = assign(hosts, replicas, hosts_per_replica, spares, ranks)
    assert [host for replica in layout.replicas for host in replica] + list(layout.spares) == hosts
    assert len(layout.spares) == spares + more
    places = [layout.place_of(point["replica"], point["host"], point["gpu"]) for point in layout.extent]
    assert [place.index for place in places] == list(range(replicas * hosts_per_replica * ranks))
    assert all(layout.replica_of(place.host) == place.replica for place in places)
    assert all(place.rank == place.index % layout.ranks_per_replica for place in places)
