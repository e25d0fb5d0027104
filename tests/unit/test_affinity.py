"""Which CPUs a rank gets: those next to its GPU, of those that the step was given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import config
from slurm_ft.agent.affinity import gpu_numbers, rank_cpus
from slurm_ft.errors import SpecError
from slurm_ft.hostspec import HostSpec, parse_cpus
from slurm_ft.spec import ReplicaSpec, RunSpec

LUMI = parse_cpus(config.profile("lumi-g").values["gpu_cpus"])
FRONTIER = parse_cpus(config.profile("frontier").values["gpu_cpus"])
GIVEN = [cpu for cpu in range(64) if cpu % 8]  # low-noise mode: the first core of each L3 region is the system's


@pytest.mark.parametrize("cpus_of_gpu", [LUMI, FRONTIER], ids=["lumi-g", "frontier"])
def test_on_an_mi250x_host_each_rank_gets_the_l3_region_next_to_its_gpu(cpus_of_gpu: list[frozenset[int]]) -> None:
    found = rank_cpus(GIVEN, list(range(8)), cpus_of_gpu, list(range(8)))
    assert [min(cpus) for cpus in found] == [49, 57, 17, 25, 1, 9, 33, 41]
    assert all(len(cpus) == 7 for cpus in found)
    assert frozenset().union(*found) == frozenset(GIVEN)


def test_hardware_threads_that_the_step_has_are_used_and_the_systems_core_when_it_is_given() -> None:
    everything = list(range(128))
    assert rank_cpus(everything, [0], FRONTIER, list(range(8)))[0] == {*range(48, 56), *range(112, 120)}


def test_ranks_that_share_a_gpu_share_its_cpus() -> None:
    found = rank_cpus(list(range(8)), [0, 1, 0, 1], parse_cpus("0-3 4-7"), [0, 1])
    assert found == [{0, 1}, {4, 5}, {2, 3}, {6, 7}]


def test_a_step_with_some_of_the_gpus_uses_their_cpus() -> None:
    assert rank_cpus(GIVEN, [0, 1], LUMI, [4, 5]) == [set(range(1, 8)), set(range(9, 16))]


@pytest.mark.parametrize(
    ("given_cpus", "devices", "cpus_of_gpu", "numbers"),
    [
        (range(8), [0, 1], [], [0, 1]),  # the site says nothing
        (range(8), [0, 1], parse_cpus("0-3 4-7"), None),  # nobody knows which GPUs these are
        (range(4), [0, 1], parse_cpus("0-3 4-7"), [0, 1]),  # the second GPU's CPUs were not given to the step
        (range(8), [None, None], parse_cpus("0-3 4-7"), [0, 1]),  # no GPU
        (range(8), [0, 5], parse_cpus("0-3 4-7"), [0, 1]),  # a device that the site does not know
        (range(8), [0, 1], parse_cpus("0-3 4-7"), [0, 7]),
    ],
)
def test_where_the_map_does_not_fit_the_cpus_are_split_evenly(given_cpus, devices, cpus_of_gpu, numbers) -> None:  # type: ignore[no-untyped-def]
    found = rank_cpus(list(given_cpus), devices, cpus_of_gpu, numbers)
    half = len(given_cpus) // 2
    assert found == [set(range(half)), set(range(half, 2 * half))]


@given(st.sets(st.integers(0, 127), min_size=1), st.integers(1, 16), st.permutations(range(8)))
def test_no_rank_is_ever_without_a_cpu_or_on_one_that_the_step_has_not(
    cpus: set[int], ranks: int, order: list[int]
) -> None:
    found = rank_cpus(sorted(cpus), [rank % 8 for rank in range(ranks)], FRONTIER, order)
    assert len(found) == ranks
    assert all(share and share <= cpus for share in found)


@pytest.mark.parametrize(
    ("mask", "on_host", "mapped", "numbers"),
    [
        (None, 8, 8, list(range(8))),  # no mask: all are seen
        (None, 4, 8, None),
        (("0", "1", "2", "3"), 8, 8, [0, 1, 2, 3]),  # the kernel shows all: the mask counts on the host
        (("0", "1"), 2, 8, None),  # cgroups: counted from 0, and nothing tells which they are
        (("6", "7"), 2, 8, [6, 7]),  # too high to have been counted from 0
        (("GPU-5a", "GPU-5b"), 2, 2, [0, 1]),
        (("GPU-5a",), 2, 2, None),
    ],
)
def test_which_gpus_of_the_host_a_step_sees(mask, on_host, mapped, numbers) -> None:  # type: ignore[no-untyped-def]
    assert gpu_numbers(mask, on_host, mapped) == numbers


def test_a_wrong_map_or_flag_is_an_error_with_a_hint() -> None:
    wrong = HostSpec(gpu_cpus="0-7 9-8", srun_args=("--gpu-bind", "none"), spare_check=-1.0)
    with pytest.raises(SpecError) as caught:
        RunSpec("x", ReplicaSpec(("true",)), host=wrong).validate()
    words = [what for what, _ in caught.value.problems]
    assert words == ["--gpu-cpus: `9-8` is no list of CPUs", "srun_args holds `none`", "spare_check is -1"]
