"""From a RunSpec and a few choices to a run that was submitted: what `slurm-ft submit` and the Python API share.

`prepare` turns choices into a JobRequest and looks at nothing but its arguments; `to_slurm` and `to_local` submit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_ft.config import Settings
from slurm_ft.controller.head import open_run
from slurm_ft.errors import RunFolderError, SlurmFTError, UsageError
from slurm_ft.observe.requests import forget_stop
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.client import Submitted as Job
from slurm_ft.spec import RunSpec
from slurm_ft.submit import chain, local_run, slurm_job


@dataclass(frozen=True)
class Submitted:
    """A run on its way: the id of its job (`L<n>` on this machine), its folder, and the job's cluster on a site with
    several."""

    job_id: str
    paths: RunPaths
    cluster: str = ""


def prepare(
    spec: RunSpec,
    runs: Path,
    run_dir: str | None,
    named: Mapping[str, str | int | None],
    extra: Sequence[str],
    setup: Sequence[str],
    settings: Settings,
) -> slurm_job.JobRequest:
    """The job of a run. `named` holds sbatch's options by name and `extra` whole ones, which win, and which the
    site may have restricted: raises UsageError for one that is not allowed."""
    check_allowed(extra, settings.texts("allowed_sbatch_args"))
    folder = runs.absolute()
    return slurm_job.JobRequest(
        spec=spec,
        run_dir=str(Path(run_dir).absolute()) if run_dir else f"{folder}/{spec.name}-%j",
        folder=folder / ".submitit",
        options=slurm_job.sbatch_options({}, settings.texts("sbatch_args"))
        + slurm_job.sbatch_options(dict(named), extra),
        setup=(*settings.texts("setup"), *setup),
        network=tuple(settings.variables().items()),
    )


def check_allowed(arguments: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises UsageError for an option that the settings do not allow."""
    names = {name.lstrip("-") for name in allowed}
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0].partition(" ")[0]
        if names and name not in names:
            raise UsageError(f"--sbatch-arg `{argument}` is not allowed here", f"allowed: {', '.join(sorted(names))}")


def to_slurm(request: slurm_job.JobRequest, shared: bool = False) -> Submitted:
    """Submit the job of a run. `shared` says that its folder is shared although its place looks local.

    Raises UsageError, TryAgain or LaunchError with Slurm's words, RunFolderError for a folder of another run.
    """
    with _folder(request, shared):
        job = slurm_job.submit(request)
    paths = RunPaths(request.run_dir.replace("%j", job.job_id))
    with after_submission([job.job_id]):
        open_run(paths, request.spec)
    return Submitted(job.job_id, paths, job.cluster)


@contextlib.contextmanager
def after_submission(jobs: Sequence[str]) -> Iterator[None]:
    """What fails meanwhile is told with the jobs, which are in the queue already. Raises RunFolderError."""
    try:
        yield
    except (SlurmFTError, OSError) as error:
        what = error.message if isinstance(error, SlurmFTError) else str(error)
        names = f"job {jobs[0]} is" if len(jobs) == 1 else f"jobs {', '.join(jobs)} are"
        raise RunFolderError(
            f"{what}; {names} submitted already", f"`scancel {' '.join(jobs)}` takes back what was submitted"
        ) from None


def _folder(request: slurm_job.JobRequest, shared: bool) -> contextlib.AbstractContextManager[None]:
    if not shared:
        slurm_job.check_shared(Path(request.run_dir), request.spec.hosts)
    return folder_for(request.run_dir, request.spec)


@contextlib.contextmanager
def folder_for(run_dir: str, spec: RunSpec | None = None) -> Iterator[None]:
    """While a job is submitted: its run folder, where its name is known by then, can be written and, where the spec is
    known, holds no other run. What the run is, is not written down yet: Slurm may refuse it, and then a folder that
    was made for it goes again. Raises RunFolderError."""
    if "%j" in run_dir:
        yield
        return
    paths = RunPaths(run_dir)
    is_new = not paths.root.exists()
    paths.create()
    if spec is not None and paths.spec.exists():
        open_run(paths, spec)
    forget_stop(paths)
    try:
        yield
    except BaseException:
        if is_new:
            paths.remove_empty()
        raise


def to_chain(request: slurm_job.JobRequest, count: int, shared: bool = False) -> Submitted:
    """Submit a chain of jobs for one run; gives its first. Raises as `to_slurm` does, and then leaves none
    queued that Slurm would cancel."""

    def link(number: int, first: str, after: tuple[str, ...]) -> Job:
        run_dir = request.run_dir.replace("%j", first) if first else request.run_dir
        return slurm_job.submit(replace(request, run_dir=run_dir, options=request.options + after, chain=number))

    with _folder(request, shared):
        links = chain.submit_links(count, link)
    paths = RunPaths(request.run_dir.replace("%j", links[0].job_id))
    with after_submission([link.job_id for link in links]):
        open_run(paths, request.spec)
        chain.record(paths, links)
    return Submitted(links[0].job_id, paths, links[0].cluster)


def local_paths(spec: RunSpec, runs: Path, run_dir: str | None) -> Submitted:
    """The number and the folder that a run on this machine is to have."""
    job_id = local_run.new_job_id(runs, spec.name)
    return Submitted(job_id, RunPaths(run_dir or runs / f"{spec.name}-{job_id}"))


def to_local(spec: RunSpec, place: Submitted) -> Submitted:
    """Start a run in the background of this machine. Raises LaunchError when it does not start."""
    forget_stop(place.paths)
    head = local_run.start(place.paths, spec, place.job_id)
    # It outlives us; as long as we are there, its end leaves no zombie.
    threading.Thread(target=head.wait, name="slurm-ft head", daemon=True).start()
    return place
