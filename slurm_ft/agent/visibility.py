"""Which GPUs each rank sees. Pure: the surroundings are an argument.

Slurm masks a step's GPUs in the variables below, and with cgroups it also renumbers them from 0. A rank must see all of
its host's share: NCCL and RCCL reach a peer's GPU directly only when that device is visible too. So a rank gets no mask
of its own; it is told its device as an index into what the step sees.

Masks stack on ROCm: `HIP_VISIBLE_DEVICES`, `CUDA_VISIBLE_DEVICES` and `GPU_DEVICE_ORDINAL` count what
`ROCR_VISIBLE_DEVICES` left. Slurm without autodetection writes one list into several of them, and `4,5,6,7` inside
`4,5,6,7` selects nothing. Such copies are removed. A mask that differs was made on purpose, and is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_ft.native.probes import Gpu

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"
ORDINAL = "GPU_DEVICE_ORDINAL"
# The masks that count on each platform, from the outer one to those that are relative to it.
MASKS = {"rocm": (ROCR, HIP, CUDA, ORDINAL), "cuda": (CUDA,)}
# Slurm's words, and the vendors', for "no GPU".
NONE = ("", "NoDevFiles", "-1", "none")


@dataclass(frozen=True)
class Visibility:
    """What a rank gets: variables to remove, its device as an index (None without one), and why."""

    unset: tuple[str, ...]
    device: int | None
    reason: str


def entries(mask: str) -> tuple[str, ...]:
    """The devices of a mask. The runtimes stop at the first entry that is none."""
    kept = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry in NONE:
            break
        kept.append(entry)
    return tuple(kept)


def copies(surroundings: Mapping[str, str], platform: str) -> tuple[str, ...]:
    """The inner masks that only repeat the outer one, and would be applied to what it left."""
    outer, *inner = MASKS.get(platform, ("",))
    if outer not in surroundings:
        return ()
    wanted = entries(surroundings[outer])
    return tuple(name for name in inner if name in surroundings and entries(surroundings[name]) == wanted)


def step_gpus(surroundings: Mapping[str, str], platform: str) -> int | None:
    """How many GPUs the step has on this host; None when no mask says so.

    Only the step's own environment says it: the batch step's mask is that of the head node.
    """
    skipped = copies(surroundings, platform)
    masks = [surroundings[name] for name in MASKS.get(platform, ()) if name in surroundings and name not in skipped]
    return min((len(entries(mask)) for mask in masks), default=None)


def step_mask(surroundings: Mapping[str, str], platform: str) -> tuple[str, ...] | None:
    """The entries of the step's outermost mask; None without one."""
    name = next((name for name in MASKS.get(platform, ()) if name in surroundings), None)
    return entries(surroundings[name]) if name else None


def visibility(surroundings: Mapping[str, str], local_rank: int, ranks_per_host: int, platform: str = "") -> Visibility:
    """What rank `local_rank` gets, from the environment that Slurm made for the step.

    `platform` is that of the host's GPUs, as `slurm_ft.native.probes.gpus` says; '' without any.
    """
    if platform not in MASKS:
        return Visibility((), None, "this host has no GPU")
    unset = copies(surroundings, platform)
    count = step_gpus(surroundings, platform)
    words = ", ".join(
        f"{name}={surroundings[name]}" for name in MASKS[platform] if name in surroundings and name not in unset
    )
    if count is None:
        return Visibility(unset, local_rank, f"no mask: device {local_rank}, all GPUs of the host are visible")
    if count == 0:
        return Visibility(unset, None, f"{words}: the step has no GPU")
    device = local_rank % count
    if count < ranks_per_host:
        return Visibility(unset, device, f"{words}: device {device}, shared: {count} for {ranks_per_host} ranks")
    return Visibility(unset, device, f"{words}: device {device} of {count}, the others stay visible for its peers")


def rank_surroundings(surroundings: Mapping[str, str], seen: Visibility) -> dict[str, str]:
    """The rank's environment: the step's, without the masks that would be applied twice."""
    return {name: value for name, value in surroundings.items() if name not in seen.unset}


def bus_ids(surroundings: Mapping[str, str], gpus: Iterable[Gpu], platform: str) -> list[str]:
    """The devices that the step sees, by bus id, for reports. An entry that is no index (a UUID) stays as it is."""
    found = [gpu.bus_id for gpu in gpus if gpu.platform == platform]
    skipped = copies(surroundings, platform)
    for name in MASKS.get(platform, ()):
        if name not in surroundings or name in skipped:
            continue
        chosen = entries(surroundings[name])
        found = [_at(found, entry) for entry in chosen]
    return found


def _at(found: list[str], entry: str) -> str:
    return found[int(entry)] if entry.isdigit() and int(entry) < len(found) else entry
