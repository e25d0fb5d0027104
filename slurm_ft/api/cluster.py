"""Where runs are submitted from Python: a Slurm cluster, or this machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from slurm_ft import config
from slurm_ft.api.run import Run
from slurm_ft.errors import UsageError
from slurm_ft.events import written
from slurm_ft.paths import RunPaths
from slurm_ft.spec import RunSpec
from slurm_ft.submit import request

KINDS = ("auto", "slurm", "local")
FROM_SETTINGS = ("time", "partition", "account", "qos", "gpus_per_node", "cpus_per_node", "mem")
ALIASES = {"cpus_per_node": "cpus_per_task"}


class Cluster:
    """Submits runs.

    `kind` is `slurm`, `local` (this machine, no Slurm) or `auto` (Slurm where sbatch is found). Whatever else is
    given by name is an option of sbatch's, with underscores (`partition="gpu"`, `gpus_per_node=8`,
    `time="8:00:00"`, `exclusive=True`); settings of the site, the user and the project stand below it, as they do
    below the options of `slurm-ft submit`. A `local` cluster takes none and passes them over, so that one line
    changes where a program runs.

    As a context manager it waits at the end of the block for the runs that were submitted in it, and stops
    those that still run when the block is left by an exception. Without `with`, runs are left to themselves.
    """

    def __init__(
        self,
        kind: str = "auto",
        *,
        runs: str | Path = "runs",
        setup: tuple[str, ...] = (),
        shared: bool = False,
        **options: str | int | bool | None,
    ) -> None:
        """`runs` is the folder for run folders; `setup` are shell lines for the job; `shared` says that a run
        folder whose place looks local is shared. Raises UsageError for a kind that there is not, and where sbatch
        is missing."""
        if kind not in KINDS:
            raise UsageError(f"`{kind}` is no kind of cluster", f"one of {', '.join(KINDS)}")
        found = shutil.which("sbatch") is not None
        if kind == "slurm" and not found:
            raise UsageError("there is no sbatch here", 'log in to a cluster, or use Cluster("local")')
        self.kind = ("slurm" if found else "local") if kind == "auto" else kind
        self._runs, self._setup, self._shared = Path(runs), setup, shared
        self._options = options
        self._submitted: list[Run] = []

    def submit(self, spec: RunSpec, run_dir: str | Path | None = None) -> Run:
        """Submit a run; returns as soon as it is queued, or has started on this machine.

        Raises SpecError with all that is wrong with the spec, UsageError, TryAgain or LaunchError with Slurm's
        words, RunFolderError when `run_dir` holds another run.
        """
        spec = replace(spec, cluster=self.kind).validate()
        folder = None if run_dir is None else str(run_dir)
        since = written(RunPaths(folder).events) if folder and "%j" not in folder else 0
        if self.kind == "local":
            submitted = request.to_local(spec, request.local_paths(spec, self._runs, folder))
        else:
            settings = config.settings(os.environ, Path.cwd())
            below = {name: value for name, value in settings.defaults().items() if name in FROM_SETTINGS}
            named, flags = _sbatch_words({**below, **self._options})
            job = request.prepare(spec, self._runs, folder, named, flags, self._setup, settings)
            submitted = request.to_slurm(job, self._shared)
        run = Run(submitted.paths.root, submitted.job_id, since, submitted.cluster)
        self._submitted.append(run)
        return run

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [run for run in self._submitted if run.exit_code is None]
        if error is not None:
            for run in left:
                run.stop()
        for run in left:
            run.wait()

    def __repr__(self) -> str:
        return f"<Cluster {self.kind}: {len(self._submitted)} runs submitted>"


def _sbatch_words(options: dict[str, str | int | bool | None]) -> tuple[dict[str, str | int | None], list[str]]:
    """sbatch's options that have a value, by name, and the flags."""
    named: dict[str, str | int | None] = {}
    flags = []
    for name, value in options.items():
        word = ALIASES.get(name, name).replace("_", "-")
        if value is True:
            flags.append(f"--{word}")
        elif value is not None and value is not False:  # 0 is a value
            named[word] = value
    return named, flags
