"""A chain: several jobs for one run, one after the other, in one run folder.

All links are submitted at once, each to begin when the one before it has ended in whatever way
(`--dependency=afterany`). So what ends a link, the loss of its head host too, cannot end the chain, and each
link gathers priority in the queue while its forerunners run. A run that has ended cancels the links that are
left; one that slips through finds the run ended and leaves (controller/comeback.py).
"""

from __future__ import annotations

from collections.abc import Callable

from slurm_ft.errors import SlurmFTError
from slurm_ft.paths import RunPaths, write_json
from slurm_ft.slurm.client import SlurmClient

SubmitLink = Callable[[int, str, tuple[str, ...]], str]
"""Submits link number n (from 1) of the chain whose first job is `first` ('' for that one itself) with these
further options of sbatch's; gives the job's id."""


def submit_links(count: int, submit_link: SubmitLink, cluster: str = "") -> list[str]:
    """Submit all links; gives their ids. When one is refused, those before it are cancelled, on the `cluster` that was
    asked for, and its error raised."""
    ids: list[str] = []
    try:
        for number in range(1, count + 1):
            after = (f"--dependency=afterany:{ids[-1]}",) if ids else ()
            ids.append(submit_link(number, ids[0] if ids else "", after))
    except SlurmFTError:
        client = SlurmClient(cluster=cluster)
        for job_id in reversed(ids):
            client.cancel(job_id)
        raise
    return ids


def record(paths: RunPaths, ids: list[str]) -> None:
    """Let the run know its chain."""
    write_json(paths.chain, {"links": ids})
