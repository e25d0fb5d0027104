"""Every error a user can meet, with its exit code.

    SlurmFTError                1    anything that ended the command
    ├── UsageError              2    what was asked cannot be done as asked
    │   ├── SpecError           2    a run's description is wrong; lists all that is wrong
    │   ├── HostlistError       2    a hostlist that Slurm itself would refuse
    │   └── RunFolderError      2    no such run, a folder that cannot be used, a damaged file
    ├── RunFailed               1    the training failed
    ├── TryAgain                75   it may work later: time limit, preemption, a busy Slurm
    ├── Permanent               93   it will fail again in the same way: do not requeue
    └── LaunchError             97   Slurm (or the local launcher) could not start what was asked

A rank or a run that was ended by signal n exits with 128 + n, as shells do.
"""

from __future__ import annotations

from typing import IO, Any

import click

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
EXIT_PERMANENT = 93
EXIT_LAUNCH = 97


class SlurmFTError(click.ClickException):
    """One sentence that says what is wrong and, where there is one, a hint that says what to do."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", err=True, file=file)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True, file=file)


class UsageError(SlurmFTError):
    """What was asked cannot be done as it was asked."""

    exit_code = EXIT_USAGE


class SpecError(UsageError):
    """A run's description is wrong. `problems` holds (what is wrong, what to do) pairs, all of them."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  {what}\n    hint: {hint}" for what, hint in problems]
        super().__init__("\n".join([f"{count} in what was asked:", *lines]))


class HostlistError(UsageError):
    """A hostlist that cannot be parsed."""


class RunFolderError(UsageError):
    """A run folder that is missing, cannot be used, or holds a damaged file."""


class RunFailed(SlurmFTError):
    """The training failed and was not repaired."""


class TryAgain(SlurmFTError):
    """It may work later."""

    exit_code = EXIT_TRY_AGAIN


class Permanent(SlurmFTError):
    """It will fail in the same way again."""

    exit_code = EXIT_PERMANENT


class LaunchError(SlurmFTError):
    """A step, a job or a local process could not be started."""

    exit_code = EXIT_LAUNCH
