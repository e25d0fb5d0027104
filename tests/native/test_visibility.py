"""Each rank's device, from what Slurm wrote into the step's environment."""

import hypothesis
import hypothesis.strategies as st
import pytest

from slurm_ft.agent.visibility import MASKS, bus_ids, copies, entries, rank_surroundings, step_gpus, visibility
from slurm_ft.native.probes import Gpu

ROCR, HIP, CUDA, ORDINAL = MASKS["rocm"]


def test_each_rank_gets_its_own_device_and_no_mask_is_narrowed() -> None:
    surroundings = {ROCR: "4,5,6,7", "PATH": "/bin"}
    found = [visibility(surroundings, rank, 4, "rocm") for rank in range(4)]
    assert [item.device for item in found] == [0, 1, 2, 3]
    assert all(rank_surroundings(surroundings, item) == surroundings for item in found)
    assert found[2].reason == "ROCR_VISIBLE_DEVICES=4,5,6,7: device 2 of 4, the others stay visible for its peers"


def test_copies_of_the_mask_are_removed_on_rocm() -> None:
    """Slurm without autodetection: one list in several variables, of which each would be applied to the last."""
    surroundings = dict.fromkeys((ROCR, HIP, CUDA, ORDINAL), "4,5")
    seen = visibility(surroundings, 1, 2, "rocm")
    assert (seen.device, set(seen.unset)) == (1, {HIP, CUDA, ORDINAL})
    assert rank_surroundings(surroundings, seen) == {ROCR: "4,5"}


def test_nothing_is_removed_on_cuda() -> None:
    surroundings = {ROCR: "4,5", CUDA: "4,5"}
    seen = visibility(surroundings, 1, 2, "cuda")
    assert (seen.device, seen.unset) == (1, ())


def test_a_mask_made_on_purpose_counts_and_stays() -> None:
    surroundings = {ROCR: "4,5,6,7", HIP: "0,1"}
    assert copies(surroundings, "rocm") == ()
    assert step_gpus(surroundings, "rocm") == 2


def test_without_rocrs_mask_hips_is_the_outer_one() -> None:
    surroundings = {HIP: "2,3"}
    assert visibility(surroundings, 1, 2, "rocm").device == 1
    assert visibility(surroundings, 1, 2, "rocm").unset == ()


def test_a_bound_task_sees_its_gpu_as_device_0() -> None:
    assert visibility({ROCR: "0"}, 0, 1, "rocm").device == 0


@pytest.mark.parametrize("mask", ["", "NoDevFiles", "-1", "-1,0"])
def test_a_mask_may_hide_all(mask: str) -> None:
    seen = visibility({CUDA: mask}, 0, 1, "cuda")
    assert seen.device is None and "has no GPU" in seen.reason


def test_no_mask_and_no_gpu() -> None:
    assert visibility({}, 3, 4, "rocm").device == 3
    assert visibility({CUDA: "0"}, 0, 1, "").device is None


def test_more_ranks_than_gpus_share() -> None:
    found = [visibility({CUDA: "0,1"}, rank, 3, "cuda") for rank in range(3)]
    assert [item.device for item in found] == [0, 1, 0]
    assert "shared: 2 for 3 ranks" in found[2].reason


def test_reports_name_the_bus() -> None:
    gpus = [Gpu(f"0000:c{i}:00.0", "MI300X", 1, 0, "rocm") for i in range(8)]
    assert bus_ids({ROCR: "4,5,6,7", HIP: "0,3"}, gpus, "rocm") == ["0000:c4:00.0", "0000:c7:00.0"]
    assert bus_ids({ROCR: "4,5", CUDA: "4,5"}, gpus, "rocm") == ["0000:c4:00.0", "0000:c5:00.0"]
    assert bus_ids({ROCR: "GPU-1a2b,1"}, gpus, "rocm") == ["GPU-1a2b", "0000:c1:00.0"]
    assert bus_ids({}, gpus, "cuda") == []


masks = st.dictionaries(st.sampled_from((ROCR, HIP, CUDA, ORDINAL)), st.text("0123456789,-GPUx ", max_size=12))


@hypothesis.given(masks, st.integers(1, 8), st.sampled_from(["rocm", "cuda"]))
def test_whatever_the_masks_a_device_is_one_of_those_seen(
    surroundings: dict[str, str], ranks: int, platform: str
) -> None:
    for rank in range(ranks):
        seen = visibility(surroundings, rank, ranks, platform)
        left = rank_surroundings(surroundings, seen)
        count = step_gpus(surroundings, platform)
        assert seen.device is None if count == 0 else seen.device is not None
        assert count is None or seen.device is None or 0 <= seen.device < count
        assert step_gpus(left, platform) == count
        assert copies(left, platform) == () and set(left) <= set(surroundings)


@hypothesis.given(st.text(max_size=20))
def test_entries_are_never_empty(mask: str) -> None:
    assert "" not in entries(mask)


def test_a_host_without_gpus_has_none_to_name() -> None:
    assert bus_ids({"CUDA_VISIBLE_DEVICES": "0,1"}, [], "") == []
