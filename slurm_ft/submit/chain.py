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
from slurm_ft.slurm.client import SlurmClient, Submitted, Unreachable

SubmitLink = Callable[[int, str, tuple[str, ...]], Submitted]
"""Submits link number n (from 1) of the chain whose first job is `first` ('' for that one itself) with these
further options of sbatch's; gives the job."""


def submit_links(count: int, submit_link: SubmitLink) -> list[Submitted]:
    """Submit all links; gives them. When one is refused, those before it are cancelled, each on its cluster, and the
    error raised, which names those that are still in the queue."""
    links: list[Submitted] = []
    try:
        for number in range(1, count + 1):
            after = (f"--dependency=afterany:{links[-1].job_id}",) if links else ()
            links.append(submit_link(number, links[0].job_id if links else "", after))
    except SlurmFTError as error:
        left = [link.job_id for link in reversed(links) if not _is_cancelled(link)]
        if not left:
            raise
        words = f"{error.message}; could not be cancelled: {', '.join(left)} (`scancel {' '.join(left)}` does it)"
        raise type(error)(words, error.hint) from None
    return links


def _is_cancelled(link: Submitted) -> bool:
    return not isinstance(SlurmClient(cluster=link.cluster).cancel(link.job_id), Unreachable)


def record(paths: RunPaths, links: list[Submitted]) -> None:
    """Let the run know its chain."""
    write_json(paths.chain, {"links": [link.job_id for link in links]})
