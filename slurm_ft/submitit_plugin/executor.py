"""`submitit.AutoExecutor(folder, cluster="slurm_ft")`: submitit's Slurm executor, with runs of slurm-ft as jobs.

All parameters of submitit's Slurm executor mean what they mean there, under `slurm_` or without a prefix. Those in
OWN are ours, as `slurm_ft_spares=1`. By default every node is a replica and every task of it a rank.

AutoExecutor takes the part of a parameter before its first underscore for the executor's name, so it would refuse
`slurm_ft_spares` and drop `slurm_partition` when the cluster is `slurm_ft`. `_teach_prefixes` has it hand both to
us; it changes nothing for other clusters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from submitit import AutoExecutor
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor, SlurmJob, _make_sbatch_string

from slurm_ft.api.run import Run
from slurm_ft.errors import SlurmFTError
from slurm_ft.spec import Budget, Policy, ReplicaSpec, RunSpec
from slurm_ft.submit.slurm_job import SLACK_SECONDS, WARNING_SECONDS, JobWatch
from slurm_ft.submitit_plugin.batch import run_folder
from slurm_ft.submitit_plugin.environment import NAME, SlurmFTJobEnvironment

_POLICY = Policy()
OWN: Mapping[str, Any] = {
    "nodes_per_replica": 1,
    "min_replicas": 1,
    "spares": 0,
    "restarts_in_place": _POLICY.in_place.restarts,
    "restarts_by_step": _POLICY.step.restarts,
    "hang_after": _POLICY.hang_after,
}
"""Our own parameters, and what they are when nothing is said."""
DELAY = WARNING_SECONDS
"""Seconds from Slurm's warning to the time limit, when nothing is said."""


class SlurmFTJob(SlurmJob):  # type: ignore[misc]  # submitit's types are not read here
    """A job that is a run. `run` gives its status, incidents and report."""

    @property
    def run(self) -> Run:
        return Run(run_folder(self.paths.folder, self.job_id), self.job_id)

    @property
    def state(self) -> str:
        """What the run says of itself, and what Slurm says before it has begun."""
        try:
            found = self.run.status()
        except SlurmFTError:
            return str(super().state)
        return str(super().state) if found.started is None else found.state()

    def done(self, force_check: bool = False) -> bool:
        if self._sub_jobs:
            return all(job.done(force_check) for job in self._sub_jobs)
        if self.paths.result_pickle.exists():
            return True
        if not hasattr(self, "_watch"):
            self._watch = JobWatch(self.run.paths, self.job_id, lambda words: None)
        return self._watch()

    def _register_in_watcher(self) -> None:
        """submitit's watcher asks sacct, which many clusters have not."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_watch"}


class SlurmFTExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's Slurm executor, whose jobs repair themselves."""

    job_class = SlurmFTJob

    @classmethod
    def name(cls) -> str:
        return NAME

    @classmethod
    def affinity(cls) -> int:
        """Below submitit's own: it is used when it is asked for."""
        return min(1, int(super().affinity()))

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(super()._valid_parameters()) | set(OWN)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name) for name in OWN if name in kwargs}
        super()._internal_update_parameters(**kwargs)
        self.parameters.update(own)
        self._spec().validate()

    def _spec(self) -> RunSpec:
        asked = {**OWN, **self.parameters}
        nodes, each = asked.get("nodes", 1), asked["nodes_per_replica"]
        replicas = max(1, (nodes - asked["spares"]) // max(1, each))
        policy = Policy(
            requeue=False,  # batch.py decides, since a task may say that it has had its time
            min_replicas=asked["min_replicas"],
            in_place=Budget(asked["restarts_in_place"], _POLICY.in_place.seconds),
            step=Budget(asked["restarts_by_step"], _POLICY.step.seconds),
            hang_after=asked["hang_after"],
            save_within=max(1.0, asked.get("signal_delay_s", DELAY) - _POLICY.stop_grace - SLACK_SECONDS),
        )
        command = (*shlex.split(self.python), "-u", "-m", "slurm_ft.submitit_plugin.task", str(self.folder))
        ranks = max(1, asked.get("ntasks_per_node") or 1)
        name = str(asked.get("job_name", "submitit"))
        # submitit's own signal: task 0 calls `checkpoint` and writes what the next session is to begin with.
        replica = ReplicaSpec(command, each, ranks, save_signal=f"SIG{SlurmFTJobEnvironment.USR_SIG}")
        return RunSpec(name, replica, replicas, asked["spares"], policy=policy)

    def _num_tasks(self) -> int:
        spec = self._spec()
        return spec.replicas * spec.replica.ranks

    @property
    def _submitit_command_str(self) -> str:
        words = ["-u", "-m", "slurm_ft.submitit_plugin.batch", str(self.folder), json.dumps(self._spec().to_json())]
        return f"{self.python} {shlex.join(words)}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        asked = {name: value for name, value in self.parameters.items() if name not in OWN}
        delay = asked.get("signal_delay_s", DELAY)
        needed = {"no-kill": True, "signal": f"B:USR2@{delay}", "requeue": True}
        asked["additional_parameters"] = needed | dict(asked.get("additional_parameters") or {})
        teardown = asked.pop("teardown", None)
        setup = [*(asked.pop("setup", None) or []), f"export SUBMITIT_EXECUTOR={NAME}"]
        asked |= {"use_srun": False, "setup": setup}
        text = _make_sbatch_string(command=_kept(command, teardown or []), folder=self.folder, **asked)
        # submitit names itself as the executor, between our set-up and our command.
        return (
            str(text).replace("export SUBMITIT_EXECUTOR=slurm\n", "").replace("/%j_0_log.out", "/%j_batch_log.out")
        )  # the name %j_0_log.out is task 0's

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        """Each one a job of its own: a run is no member of an array."""
        single = super()._internal_process_submissions
        return [job for delayed in delayed_submissions for job in single([delayed])]


def _kept(command: str, teardown: list[str]) -> str:
    """The command so that Slurm's warning, which goes to the batch shell, reaches it: exec'ed, or with a trap where
    something is to run afterwards. bash runs no trap while it waits for a program in the foreground."""
    if not teardown:
        return f"exec {command}"
    lines = [
        f"{command} &",
        "run=$!",
        "trap 'kill -USR2 $run' USR2; trap 'kill -TERM $run' TERM",
        "while kill -0 $run 2>/dev/null; do wait $run; done",
        "wait $run; code=$?",
        *teardown,
        "exit $code",
    ]
    return "\n".join(lines)


def _teach_prefixes() -> None:
    original: Callable[..., None] = AutoExecutor._internal_update_parameters

    def update(self: AutoExecutor, **kwargs: Any) -> None:
        if self.cluster != NAME:
            original(self, **kwargs)
            return
        own: dict[str, Any] = {}
        for prefix in (f"{NAME}_", "slurm_"):
            for name in [name for name in kwargs if name.startswith(prefix)]:
                own.setdefault(name.removeprefix(prefix), kwargs.pop(name))
        original(self, **kwargs)
        shared = {name: own.pop(name) for name in list(own) if name in self._executor._equivalence_dict()}
        self._executor._internal_update_parameters(**self._executor._convert_parameters(shared), **own)

    AutoExecutor._internal_update_parameters = update


_teach_prefixes()
