"""What crosses from the shell that submits into the job: everything, but what RULES drop.

An outer job, an outer rank or an outer torchrun leaves variables behind that would speak of the new job and
be wrong. sbatch hands its environment on, so what is dropped here is dropped from the job. The first rule
that a name fits decides; a name that fits none crosses as it is, byte for byte.

`into_job` is pure; `submission_environment` lets it act on this process for the time of one submission. What
crosses from the batch step into a replica's step, and from there into a rank, is decided by
`launch.srun.step_environment` and `agent.environ.rank_environment`; `slurm-ft env` shows all three.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slurm_ft import env


class Rule(NamedTuple):
    """Names that fit `pattern` are kept or dropped, always or only `beside` a variable that tells where we are."""

    pattern: str
    drop: bool
    why: str
    beside: str = ""


AGENT_SET = "|".join(item.name for item in env.VARIABLES if item.set_by in ("agent", "launcher"))

RULES = (
    Rule(r"SLURM_(CONF|CONF_SERVER|CLUSTERS|TIME_FORMAT|JWT)", False, "says where Slurm is"),
    Rule(AGENT_SET, True, "of the rank around this shell", env.SOCKET),
    Rule("|".join(item.name for item in env.VARIABLES if item.set_by == "submit"), True, "of the script around us"),
    Rule(r"TORCHELASTIC_.*|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)", True, "of a torchrun around this shell"),
    Rule(r"SLURM_FT_.*", False, "slurm-ft's own"),
    Rule(r"SBATCH_(ACCOUNT|PARTITION|QOS|CONSTRAINT|RESERVATION|CLUSTERS|WCKEY)", False, "your choice for sbatch"),
    Rule(r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC)_.*", True, "of Slurm, about another job or against the options"),
    Rule(r"(CUDA|HIP|ROCR|ZE)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK", True,
         "the GPUs of the job around this shell", "SLURM_JOB_ID"),
    Rule(r"(PMI|PMI2|PMIX|PALS|OMPI)_.*", True, "of the MPI step around this shell", "SLURM_JOB_ID"),
)  # fmt: skip


def into_job(surroundings: Mapping[str, str], options: Sequence[str] = ()) -> dict[str, str]:
    """The names that do not cross, each with the reason.

    `options` are those of the script. sbatch believes a variable of its own more than the script, so such a
    variable is dropped when the script has the option.
    """
    decided = {"SBATCH_" + option.lstrip("-").partition("=")[0].upper().replace("-", "_") for option in options}
    dropped = {name: "the option wins" for name in surroundings if name in decided}
    for name in surroundings:
        rule = next((rule for rule in RULES if _fits(rule, name, surroundings)), None)
        if rule is not None and rule.drop:
            dropped.setdefault(name, rule.why)
    return dropped


def _fits(rule: Rule, name: str, surroundings: Mapping[str, str]) -> bool:
    return (not rule.beside or rule.beside in surroundings) and re.fullmatch(rule.pattern, name) is not None


@contextlib.contextmanager
def submission_environment(options: Sequence[str] = ()) -> Iterator[None]:
    """For the time of a submission, the environment of this process without what must not cross."""
    stray = {name: os.environ[name] for name in into_job(os.environ, options)}
    try:
        for name in stray:
            del os.environ[name]
        yield
    finally:
        os.environ.update(stray)
