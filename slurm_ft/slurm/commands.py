"""How Slurm's commands are run: once, in a known environment, with a time-out, decoded with replacement.

LC_ALL=C and without the variables that change what they print or whom they ask; SLURM_CONF is kept, and SLURM_JWT,
which is a credential. Slurm passes bytes of names through as they are, so decoding never fails.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Mapping

from slurm_ft.slurm.views import Unreachable

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]

TIMEOUT = 30.0
"""Seconds for one command. A squeue that cannot reach slurmctld gives up by itself after about 20."""

_KEPT = {"SLURM_CONF", "SLURM_JWT"}
_STRAY = re.compile(r"(?:SLURM|SQUEUE|SCANCEL|SCONTROL|SACCT|SINFO|SBATCH|SRUN|SALLOC)_")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The line that says best what went wrong, for a person: the fatal one, else the first error."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        for sign in ("fatal: ", "error: ", ""):
            for line in lines:
                if sign in line:
                    return line
        return f"exit code {self.code} and no words"

    @property
    def says_unknown(self) -> bool:
        return "invalid job id" in self.err.lower()


@dataclasses.dataclass(frozen=True)
class Commands:
    """Runs Slurm's commands. `run` is called as `subprocess.run` is; `cluster` goes to every command."""

    run: Run = subprocess.run
    cluster: str = ""
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    timeout: float = TIMEOUT

    def ask(
        self, program: str, *arguments: str, clustered: bool = True, extra: Mapping[str, str] | None = None
    ) -> Answer | Unreachable:
        """Run one command; what it did not live to say is Unreachable."""
        cluster = [f"--clusters={self.cluster}"] if clustered and self.cluster else []
        try:
            done = self.run(
                [program, *cluster, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**command_environment(self.environ), **(extra or {})},
                timeout=self.timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Unreachable(f"{program} gave no answer in {self.timeout:g} s")
        except OSError as error:
            return Unreachable(f"{program} could not be run: {error.strerror or error}")
        return Answer(done.returncode, decoded(done.stdout), decoded(done.stderr))


def command_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the environment for Slurm's commands: a known locale, nothing that changes what they print or ask."""
    kept = {name: value for name, value in environ.items() if name in _KEPT or not _STRAY.match(name)}
    return kept | {"LC_ALL": "C"}


def decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
