"""A user's own sbatch script, with `#SBATCH` lines and `# SLURM_FT` lines.

The mark is written with a blank: sbatch refuses a script in which a line begins with `#SLURM`, since it takes
that for a misspelt `#SBATCH`. `#SLURM_FT` is understood as well; then a copy with the blank is submitted.

The script is submitted as it is otherwise. What the command line says goes to sbatch as options, which win over lines;
what the `# SLURM_FT` lines and the command line say to `slurm-ft run` goes along in two variables: the lines
stand below the options of the script's own `slurm-ft run`, the command line above them. A script that was
submitted with plain sbatch has no such variables: then `lines_of_job` asks Slurm for the script, once.

Lines are read as sbatch reads its own: from the top to the first line that is neither empty nor a comment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_ft import env
from slurm_ft.errors import LaunchError, TryAgain, UsageError
from slurm_ft.launch.srun import UNANSWERED
from slurm_ft.slurm.client import Submitted, command_environment, read_submission
from slurm_ft.submit.crossing import into_job

SIGNAL_SECONDS = 60
"""How long before the time limit Slurm sends a --signal that does not say when."""

SHORT = {"-A": "account", "-J": "job-name", "-N": "nodes", "-c": "cpus-per-task", "-k": "no-kill", "-p": "partition",
         "-q": "qos", "-t": "time", "-a": "array", "-G": "gpus"}  # fmt: skip
OWN_MARK = re.compile(r"#[ \t]?SLURM_FT(?=[ \t])")
UNBEARABLE = re.compile(r"^#(?=SLURM_FT[ \t])", re.MULTILINE)
OPPOSITES = {"no-requeue": "requeue"}


@dataclass(frozen=True)
class Script:
    """A script's lines: sbatch's options by their long names, and the words for `slurm-ft run`."""

    path: Path
    options: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.options.get("job-name") or self.path.stem


def find(command: Sequence[str]) -> Script | None:
    """The script that a command's first word is, or None: then it is a program for the ranks."""
    path = Path(command[0]) if command else None
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return None
        text = (b"#!" + file.read(1 << 20)).decode(errors="replace")
    script = parse(text, path)
    return script if script.options or script.words else None


def parse(text: str, path: Path) -> Script:
    """A script's lines. Raises UsageError for one whose quotes do not match."""
    options: dict[str, str] = {}
    words: list[str] = []
    for number, line in enumerate(_head(text), 1):
        own = OWN_MARK.match(line)
        if not own and not line.startswith("#SBATCH"):
            continue
        try:
            found = shlex.split(line[own.end() if own else len("#SBATCH") :], comments=True)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}", "quotes come in pairs") from None
        if own:
            words += found
        else:
            options |= _named(found)
    return Script(path, options, tuple(words))


def _head(text: str) -> list[str]:
    lines = text.splitlines()
    end = next((number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    return lines[:end]


def _named(words: Sequence[str]) -> dict[str, str]:
    """sbatch's options by their long names; a word that is no option is the value of the one before it."""
    found: dict[str, str] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word.startswith("-") and len(word) > 1:
            name, value = SHORT.get(word[:2], word[:2]), word[2:].removeprefix("=")
        else:
            found[last] = word
            continue
        last = OPPOSITES.get(name, name)
        found[last] = value
    return found


def always(warning: int) -> tuple[str, ...]:
    """What a job of slurm-ft needs, one that is to be warned so many seconds before its time limit."""
    return ("--ntasks-per-node=1", "--no-kill", "--requeue", "--open-mode=append", f"--signal=B:USR2@{warning}")


def missing(script: Script, warning: int) -> list[str]:
    """What a job needs and the script says nothing about. It gets that."""
    return [option for option in always(warning) if option[2:].partition("=")[0] not in script.options]


def warned_late(script: Script, more: Sequence[str], warning: int) -> str:
    """Why the script's own --signal, or one among `more` options, comes too late for a run that is to be warned so many
    seconds before its time limit; or ''."""
    own = {**script.options, **_named(more)}.get("signal")
    if own is None:
        return ""
    number = own.partition("@")[2]
    seconds = int(number) if number.isdigit() else SIGNAL_SECONDS
    if seconds >= warning:
        return ""
    return f"--signal={own} warns the run {seconds} s before the time limit; to save and to stop it needs {warning} s"


@dataclass(frozen=True)
class Submission:
    """One sbatch call: options that win over the script's, arguments of the script, words for `slurm-ft run`.
    `chain` is the number of the job in its chain, 0 when it is in none."""

    script: Script
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    chain: int = 0

    def argv(self, *extra: str, path: Path | None = None) -> list[str]:
        return ["sbatch", "--parsable", *extra, *self.options, str(path or self.script.path), *self.arguments]

    @property
    def variables(self) -> dict[str, str]:
        chain = {env.CHAIN: str(self.chain)} if self.chain else {}
        return {env.LINES: shlex.join(self.script.words), env.OPTIONS: shlex.join(self.words), **chain}


def link(request: Submission, number: int, run_dir: str, options: tuple[str, ...]) -> Submission:
    """The same call as a link of a chain. The first link makes the run folder, with its own id in the name; the
    next link goes on after a time limit, and not the same job."""
    words = ("--no-requeue", f"--run-dir={run_dir}") if number > 1 else ("--no-requeue",)
    return replace(request, words=request.words + words, options=request.options + options, chain=number)


def submit(request: Submission) -> Submitted:
    """Submit the script; gives the job's id and its cluster. Raises UsageError, TryAgain or LaunchError with Slurm's
    words."""
    dropped = into_job(os.environ, request.options)
    environ = {name: value for name, value in os.environ.items() if name not in dropped} | request.variables
    with _bearable(request.script) as path:
        for extra in (("--test-only",), ()):
            argv = request.argv(*extra, path=path)
            done = subprocess.run(argv, env=environ, capture_output=True, text=True, errors="replace")
            if done.returncode:
                _refused(" ".join(done.stderr.replace("sbatch: error:", "").split()), bool(extra), request)
    return read_submission(done.stdout)


@contextlib.contextmanager
def _bearable(script: Script) -> Iterator[Path]:
    """The script, or a copy for as long as sbatch reads it, without a line that sbatch refuses."""
    content = script.path.read_bytes().decode(errors="surrogateescape")
    mended = UNBEARABLE.sub("# ", content)
    if mended == content:
        yield script.path
        return
    with tempfile.NamedTemporaryFile(prefix="slurm-ft-", suffix=".sbatch") as file:
        file.write(mended.encode(errors="surrogateescape"))
        file.flush()
        yield Path(file.name)


def _refused(words: str, possible: bool, request: Submission) -> None:
    if "contact slurm controller" in words or "timed out" in words:
        raise TryAgain(f"Slurm does not answer: {words}", "try again in a few minutes")
    if possible:
        raise UsageError(
            f"Slurm cannot give what was asked: {words}",
            f"see the #SBATCH lines of {request.script.path}; `sinfo` lists what there is",
        )
    raise LaunchError(f"Slurm refused the job: {words}", "see the call with `slurm-ft submit --dry-run`")


ASK_AGAIN = (0.0, 2.0, 5.0, 10.0)
"""Seconds before each question to a Slurm that does not answer."""


def lines_of_job(surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """The words of the # SLURM_FT lines of the script around us: from `submit`, else from Slurm, else none.

    Raises TryAgain when Slurm does not answer: without its lines the run would be another.
    """
    if env.LINES in surroundings:
        return tuple(shlex.split(surroundings[env.LINES]))
    job_id = surroundings.get("SLURM_JOB_ID")
    if not job_id:
        return ()
    argv = ["scontrol", "write", "batch_script", job_id, "-"]
    words = ""
    for pause in ASK_AGAIN:
        time.sleep(pause)
        try:
            done = subprocess.run(argv, env=command_environment(surroundings), capture_output=True, timeout=30)
        except FileNotFoundError:
            return ()
        except (OSError, subprocess.TimeoutExpired) as error:
            words = str(error)
            continue
        if done.returncode == 0:
            return parse(done.stdout.decode(errors="replace"), Path("the job's script")).words
        words = " ".join(done.stderr.decode(errors="replace").split())
        if not UNANSWERED.search(words):
            return ()  # a job without a script, as of salloc
    raise TryAgain(f"Slurm does not say what script job {job_id} has: {words}", "its # SLURM_FT lines are needed")
