"""One Slurm job for one run, through submitit.

submitit pickles `LookAfter`, submits our script and starts it again in the job's batch step; the script is
rendered from `sbatch_templates/`, so what `--dry-run` shows is what is submitted. The run folder's name
holds the job's id, which is known only afterwards: the job makes the folder when it starts, and so does
`submit` as soon as it knows the id, whichever is first.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from slurm_ft import __version__
from slurm_ft.errors import LaunchError, RunFolderError, TryAgain, UsageError
from slurm_ft.observe.runs import Gone
from slurm_ft.paths import RunPaths
from slurm_ft.slurm.client import JobView, SlurmClient, Submitted, Unknown, read_submission
from slurm_ft.slurm.reasons import wait_words
from slurm_ft.slurm.units import parse_time
from slurm_ft.spec import Policy, RunSpec
from slurm_ft.submit.crossing import submission_environment

WARNING_SECONDS = 120
"""How long before the time limit Slurm warns the run, at least: more than KillWait, and time to save."""
SLACK_SECONDS = 30
"""Slurm sends the warning up to a minute early and looks at limits every 30 s; and the head has to leave."""


def warning_seconds(policy: Policy) -> int:
    """How long before the time limit a run with this policy is to be warned: to save, to stop, and some slack."""
    return max(WARNING_SECONDS, math.ceil(policy.save_within + policy.stop_grace + SLACK_SECONDS))


def too_short(time_limit: str | None, policy: Policy) -> str:
    """Why this limit leaves no time to train, or ''. Raises UsageError for what sbatch would not read as a limit."""
    seconds, warning = parse_time(time_limit) if time_limit else None, warning_seconds(policy)
    if seconds is None or seconds > warning:
        return ""
    return (
        f"the time limit is {seconds} s and the run is warned {warning} s before it, to save and to stop: "
        "it has to end as soon as it has begun"
    )


@dataclass(frozen=True)
class JobRequest:
    """What to submit: the run, its folder (`%j` stands for the job's id), and sbatch's own options.

    `network` holds variables that the job sets where its environment has no value. `chain` is the number of the
    job in its chain, 0 when it is in none.
    """

    spec: RunSpec
    run_dir: str
    folder: Path
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    network: tuple[tuple[str, str], ...] = ()
    chain: int = 0


@dataclass(frozen=True)
class LookAfter:
    """What the job runs, on its first host. Leaves with the run's exit code, which is then the job's."""

    spec: dict[str, Any]
    run_dir: str

    def __call__(self) -> None:
        from slurm_ft.controller.comeback import is_over
        from slurm_ft.controller.head import look_after, open_run
        from slurm_ft.errors import SlurmFTError
        from slurm_ft.observe.last_words import last_words
        from slurm_ft.submit.place import allocation_place

        try:
            place = allocation_place(os.environ)
            paths = RunPaths(self.run_dir.replace("%j", place.job_id))
            over = is_over(paths, os.environ)
            if over:
                print(over, file=sys.stderr)
                return
            open_run(paths, RunSpec.from_json(self.spec))
            code = look_after(paths, place)
            print(*last_words(paths, code), sep="\n", file=sys.stderr)
        except SlurmFTError as error:
            error.show()
            code = error.exit_code
        if code:
            # Not an exception for submitit: its traceback would hide the report of what really failed.
            raise SystemExit(code)


def directive(value: str) -> str:
    """A value for an #SBATCH line, which sbatch reads with quoting rules of its own: double quotes hold
    everything but themselves and the backslash. Raises UsageError for a line break, which nothing holds."""
    if "\n" in value or "\r" in value:
        raise UsageError(f"`{value!r}` has a line break in it", "an #SBATCH line cannot hold one")
    if re.fullmatch(r"[\w@%+=:,./-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _oneline(value: str) -> str:
    return " ".join(value.split())


def render(request: JobRequest, command: str) -> str:
    """The complete sbatch script."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(directive=directive, oneline=_oneline, quote=shlex.quote)
    template = files("slurm_ft").joinpath("sbatch_templates/submit.sbatch.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        version=__version__,
        name=request.spec.name,
        nodes=request.spec.hosts,
        options=request.options,
        setup=request.setup,
        network=request.network,
        folder=str(request.folder),
        run_dir=request.run_dir,
        warning_seconds=warning_seconds(request.spec.policy),
        chain=request.chain,
        command=command,
    )


def batch_command(folder: Path) -> str:
    """What the script ends with: submitit, which unpickles LookAfter and calls it."""
    return shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(folder)])


def submit(request: JobRequest) -> Submitted:
    """Submit the job; gives its id and its cluster. Raises LaunchError with Slurm's own words when it is refused."""
    import submitit
    from submitit.slurm.slurm import SlurmExecutor

    told: list[Submitted] = []

    class Executor(SlurmExecutor):  # type: ignore[misc]  # submitit's types are not read here
        """submitit's own, with our script, and an ear for the cluster that sbatch names."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return render(request, batch_command(request.folder))

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            told.append(read_submission(string if isinstance(string, str) else string.decode(errors="replace")))
            return told[-1].job_id

    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        if request.folder.stat().st_uid == os.getuid():
            request.folder.chmod(0o700)  # the pickles hold what was given with --env
        elif not os.access(request.folder, os.W_OK):
            raise PermissionError(errno.EACCES, f"{request.folder} is somebody else's")
    except OSError as error:
        raise RunFolderError(
            f"the runs folder `{request.folder.parent}` cannot be written: {error.strerror}",
            "choose another with --runs",
        ) from None
    with submission_environment(request.options):
        ask_whether_possible(request)
        try:
            executor = Executor(folder=request.folder, max_num_timeout=0)
            executor.update_parameters(nodes=request.spec.hosts, use_srun=False)
            executor.submit(LookAfter(request.spec.to_json(), request.run_dir))
        except submitit.core.utils.FailedJobError as error:
            raise LaunchError(
                f"Slurm refused the job: {_refusal(str(error))}", "see the script with `slurm-ft submit --dry-run`"
            ) from None
    return told[-1]


def ask_whether_possible(request: JobRequest) -> None:
    """Ask Slurm, before anything is queued: a job that can never start would wait for ever.

    Raises UsageError with Slurm's reason, TryAgain when Slurm does not answer.
    """
    script = render(request, "true")
    asked = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True, errors="replace")
    if asked.returncode == 0:
        return
    words = _oneline(asked.stderr.replace("sbatch: error:", "").replace("allocation failure:", ""))
    if "contact slurm controller" in words or "timed out" in words:
        raise TryAgain(f"Slurm does not answer: {words}", "try again in a few minutes")
    spec = request.spec
    raise UsageError(
        f"Slurm cannot give what was asked: {words}",
        f"{spec.hosts} nodes were asked for ({spec.replicas} replicas of {spec.replica.hosts}, {spec.spares} spares)"
        f"{', with ' + ' '.join(request.options) if request.options else ''}; `sinfo` lists what there is",
    )


def _refusal(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(("sbatch:", "error:"))]
    return "; ".join(lines) or _oneline(text)


class JobWatch:
    """Callable for the live view's `until`: has the job left Slurm without the run's last word?

    As long as the run gives no news, Slurm is asked: after FIRST_ASK seconds, then every ASK_INTERVAL. Why a
    job waits is told when it changes. No answer from Slurm is no answer, and changes nothing.
    """

    FIRST_ASK = 3.0
    ASK_INTERVAL = 60.0

    def __init__(
        self,
        paths: RunPaths,
        job_id: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        cluster: str = "",
    ) -> None:
        self._slurm = SlurmClient(cluster=cluster)
        self._paths, self._job_id, self._say, self._clock = paths, job_id, say, clock
        self._gone = Gone(paths)
        self._ask_at = clock() + self.FIRST_ASK
        self._said = ""

    def __call__(self) -> bool:
        if (self._paths.events.exists() and not self._gone()) or self._clock() < self._ask_at:
            return False
        self._ask_at = self._clock() + self.ASK_INTERVAL
        match self._slurm.job(self._job_id):
            case JobView(state=field, reason=reason):
                if field.state.pending and reason != self._said:
                    self._said = reason
                    self._say(f"job {self._job_id} waits: {wait_words(reason, self._job_id)}")
                return field.state.final
            case Unknown():
                return True
        return False


def check_shared(run_dir: Path, hosts: int) -> None:
    """Raises UsageError for a run folder that other hosts cannot see."""
    local = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    resolved = str(run_dir.resolve())
    if hosts > 1 and any(resolved == place or resolved.startswith(f"{place}/") for place in local):
        raise UsageError(
            f"the run folder `{run_dir}` is on this host's own disk, which the job's other hosts do not see",
            "choose one on a shared file system with --run-dir or --runs (or say --local-run-dir if it is shared)",
        )


def sbatch_options(chosen: dict[str, str | int | None], extra: Sequence[str]) -> tuple[str, ...]:
    """sbatch's options as they stand in the script, the user's own last, so that they win."""
    named = [f"--{name}={directive(str(value))}" for name, value in chosen.items() if value not in (None, "")]
    return (*named, *map(_argument, extra))


def _argument(text: str) -> str:
    """`--name=value` as it stands in the script; anything else as it is."""
    name, equals, value = text.partition("=")
    return f"{name}={directive(value)}" if equals and name.startswith("--") else text
