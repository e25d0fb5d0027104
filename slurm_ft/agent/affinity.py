"""Which CPUs each rank of a host may use: those next to its GPU, of those that the step was given. Pure.

The site says which CPUs are next to which GPU, by the GPU's number on the host. A step that sees all of them
numbers them in the same way; with cgroups, one that sees some of them numbers these from 0, and nothing tells
which they are. Then, and where a GPU's CPUs were not given to the step, the host's CPUs are split evenly: a rank
that is bound to the wrong CPUs is worse off than one that is bound to any.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_ft.agent.ranks import split_cpus


def rank_cpus(
    given: Sequence[int],
    devices: Sequence[int | None],
    cpus_of_gpu: Sequence[frozenset[int]],
    numbers: Sequence[int] | None = None,
) -> list[frozenset[int]]:
    """The CPUs of each rank. `given`: the step's; `devices`: the rank's device as an index into what the step sees;
    `numbers`: what the step sees, by the numbers that the GPUs have on the host, None when that is unknown."""
    even = split_cpus(given, len(devices))
    if not cpus_of_gpu or numbers is None:
        return even
    own: list[int] = []
    for device in devices:
        if device is None or device >= len(numbers) or numbers[device] >= len(cpus_of_gpu):
            return even
        own.append(numbers[device])
    result = []
    for rank, gpu in enumerate(own):
        near = sorted(cpus_of_gpu[gpu] & frozenset(given))
        if not near:
            return even
        sharers = [other for other, its in enumerate(own) if its == gpu]
        result.append(split_cpus(near, len(sharers))[sharers.index(rank)])
    return result


def gpu_numbers(mask: Sequence[str] | None, on_host: int, mapped: int) -> list[int] | None:
    """The numbers on the host of the GPUs that the step sees. `mask`: the entries of the step's mask, None without
    one; `on_host`: the GPUs that the kernel shows; `mapped`: those that the site speaks of. None when it is unknown.
    """
    if mask is None:
        return list(range(mapped)) if on_host == mapped else None
    if not all(entry.isdigit() for entry in mask):
        return list(range(mapped)) if len(mask) == mapped else None
    numbers = [int(entry) for entry in mask]
    # All are seen, or the kernel hides none, or the numbers are too high to have been counted from 0.
    if len(numbers) == mapped or on_host == mapped or (numbers and max(numbers) >= len(numbers)):
        return numbers
    return None
