"""A run's description: what to run, on how many hosts, and how to repair it.

Frozen dataclasses, so that two equal descriptions are equal and nothing changes after validation.
`RunSpec.validate` looks at everything before it speaks: one SpecError lists all that is wrong, each with a
hint. `to_json` and `from_json` are the form in `run.json`; a key that is unknown there is an error that
lists the known ones, because a misspelt option that is passed over silently costs a night.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from slurm_ft.env import KEEPER_MODES
from slurm_ft.errors import SpecError
from slurm_ft.hostspec import HostSpec

SCHEMA = 1
CLUSTERS = ("slurm", "local")
SAVE_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGTERM")

LEAST_HEAD_TIMEOUT = 3.0
"""Seconds: three renewals of the lease (slurm_ft/lease.py), and more than a controller takes to start."""

Problem = tuple[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Budget:
    """At most `restarts` repairs of one rung within `seconds`; one more climbs to the next rung."""

    restarts: int
    seconds: float

    def problems(self, name: str) -> list[Problem]:
        found = []
        if self.restarts < 0:
            found.append((f"{name}.restarts is {self.restarts}", "0 turns this rung off"))
        if self.seconds <= 0:
            found.append((f"{name}.seconds is {self.seconds}", "give a time in seconds above 0"))
        return found


@dataclass(frozen=True)
class Lighthouse:
    """torchft's quorum server, times in milliseconds.

    The defaults were measured on 3 and 4 replicas: survivors commit 1.0 s after a kill, and 40 s of an
    overloaded machine gave no false quorum change. `join_timeout_ms` must exceed the time by which
    replicas differ in arriving at a quorum; with 0 the quorum never settles.
    """

    heartbeat_timeout_ms: int = 1000
    join_timeout_ms: int = 5000
    quorum_tick_ms: int = 10

    def problems(self) -> list[Problem]:
        names = (item.name for item in dataclasses.fields(self))
        return [
            (f"lighthouse.{name} is {getattr(self, name)}", "give a whole number of milliseconds above 0")
            for name in names
            if getattr(self, name) <= 0
        ]


@dataclass(frozen=True)
class Policy:
    """How failures are repaired. All times in seconds.

    `in_place` and `step` are the budgets of rungs 1 and 2; `host` is how many failures of attempts on it, of any
    replica, a host may have before a spare takes its place. `same_failures` times the same failure at the same
    step in most replicas end the run; 0 turns that off. The first repair is not delayed; after n failures
    without progress in between, one waits for `backoff` x 2^(n-2), at most `backoff_max`.
    `launches_at_once` is how many steps may be on their way up at the same time (scripts/bench/launch).
    `launch_timeout` bounds the time from starting a step until its agents have reported.
    Ranks that can save have `save_within` for it before a stop. After that, `stop_grace` lies between TERM and
    KILL; `kill_grace` when a broken replica is cleared. An agent that is silent for `agent_timeout` is lost.
    When the first replica has finished, the others have `finish_grace` to finish too.
    Agents that hear no controller for `head_timeout`, and see its lease not renewed for as long, choose a new
    head among them. An agent that finds no controller for `orphan_timeout` ends its ranks and itself, and
    releases the allocation. Other hosts try to bring up a head within seconds, so by then something is wrong that
    none of them can mend; but a shared file system may be away for minutes, and with it whoever writes there, while
    the ranks train on.
    A replica that trained hangs when it has stood still for `hang_after` at least (see controller/pace.py);
    0 turns that off.
    With `requeue` a Slurm job that ends for its time limit or a preemption is put back into the queue.
    """

    min_replicas: int = 1
    in_place: Budget = Budget(3, 600.0)
    step: Budget = Budget(2, 1800.0)
    host: Budget = Budget(4, 1800.0)
    same_failures: int = 3
    backoff: float = 1.0
    backoff_max: float = 30.0
    launches_at_once: int = 16
    launch_timeout: float = 120.0
    kill_grace: float = 5.0
    stop_grace: float = 30.0
    save_within: float = 60.0
    agent_timeout: float = 10.0
    finish_grace: float = 60.0
    head_timeout: float = 10.0
    orphan_timeout: float = 900.0
    hang_after: float = 300.0
    requeue: bool = True
    lighthouse: Lighthouse = Lighthouse()

    def problems(self) -> list[Problem]:
        found = (
            self.in_place.problems("in_place")
            + self.step.problems("step")
            + self.host.problems("host")
            + self.lighthouse.problems()
        )
        for name in (
            "launch_timeout", "kill_grace", "stop_grace", "save_within", "agent_timeout", "finish_grace",
            "orphan_timeout",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                found.append((f"{name} is {getattr(self, name)}", "give a time in seconds above 0"))
        if self.head_timeout < LEAST_HEAD_TIMEOUT:
            found.append((f"head_timeout is {self.head_timeout}", f"{LEAST_HEAD_TIMEOUT:g} s at least: a controller "
                          "that has crashed is started again in less"))  # fmt: skip
        if self.launches_at_once < 1:
            found.append((f"launches_at_once is {self.launches_at_once}", "one at least"))
        if self.hang_after < 0:
            found.append((f"--hang-after is {self.hang_after}", "a time in seconds, or 0 to turn it off"))
        if self.same_failures < 0:
            found.append((f"same_failures is {self.same_failures}", "a number of times, or 0 to turn it off"))
        if not 0 <= self.backoff <= self.backoff_max:
            found.append(
                (f"backoff is {self.backoff} and backoff_max {self.backoff_max}", "0 <= backoff <= backoff_max")
            )
        return found


@dataclass(frozen=True)
class ReplicaSpec:
    """One replica: `hosts` hosts with `ranks_per_host` ranks each, all running `command`.

    `environment` is set in every rank and wins over what the agent would set. `zygote` has ranks forked
    from a process with their imports done, where the command allows it. `save_signal` asks a program that knows
    nothing of slurm-ft to save; '' sends none. `keeper` says what of a rank's state is kept in memory that
    outlives it (see env.KEEPER_MODES); the training script must take part.
    """

    command: tuple[str, ...]
    hosts: int = 1
    ranks_per_host: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    zygote: bool = True
    save_signal: str = ""
    keeper: str = "off"

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def problems(self) -> list[Problem]:
        found = []
        if not self.command:
            found.append(("there is no command to run", "put it after `--`, as in `-- python train.py`"))
        for name, word in (("hosts", "--nodes-per-replica"), ("ranks_per_host", "--ranks-per-node")):
            if getattr(self, name) < 1:
                found.append((f"{word} is {getattr(self, name)}", "at least 1"))
        if self.save_signal and self.save_signal not in SAVE_SIGNALS:
            found.append((f"--save-signal is `{self.save_signal}`", f"one of {', '.join(SAVE_SIGNALS)}"))
        if self.keeper not in KEEPER_MODES:
            found.append((f"--keeper is `{self.keeper}`", f"one of {', '.join(KEEPER_MODES)}"))
        slurm = sorted(name for name in self.environment if name.startswith("SLURM_") and "_FT_" not in name)
        if slurm:
            found.append((f"the environment sets {', '.join(slurm)}", "Slurm's own variables are left to Slurm"))
        return found


@dataclass(frozen=True)
class RunSpec:
    """One training as its owner sees it."""

    name: str
    replica: ReplicaSpec
    replicas: int = 1
    spares: int = 0
    cluster: str = "slurm"
    policy: Policy = Policy()
    host: HostSpec = field(default_factory=HostSpec)

    @property
    def hosts(self) -> int:
        """The hosts that the allocation needs."""
        return self.replicas * self.replica.hosts + self.spares

    def validate(self) -> RunSpec:
        """This spec. Raises SpecError, which lists everything that is wrong with it."""
        problems = self.replica.problems() + self.policy.problems() + self.host.problems()
        if not re.fullmatch(r"[\w.=+-]{1,100}", self.name):
            problems.append((f"the name `{self.name}` is not fit for a folder", "use letters, digits and . _ = + -"))
        if self.replicas < 1:
            problems.append((f"--replicas is {self.replicas}", "at least 1"))
        if self.spares < 0:
            problems.append((f"--spares is {self.spares}", "0 or more"))
        if not 1 <= self.policy.min_replicas <= max(1, self.replicas):
            problems.append(
                (
                    f"--min-replicas is {self.policy.min_replicas} with {self.replicas} replicas",
                    "between 1 and --replicas",
                )
            )
        if self.cluster not in CLUSTERS:
            problems.append((f"the cluster `{self.cluster}` is unknown", f"one of {', '.join(CLUSTERS)}"))
        if problems:
            raise SpecError(problems)
        return self

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RunSpec:
        """The spec in a `run.json`. Raises SpecError for unknown keys, missing keys and wrong values."""
        fields = dict(value)
        schema = fields.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise SpecError([(f"run.json has schema {schema}", f"this slurm-ft reads schema {SCHEMA}")])
        return _build(RunSpec, fields, "run").validate()


def _build(kind: type[T], value: Any, place: str) -> T:
    """An instance of the dataclass `kind` from plain JSON data, with its nested dataclasses."""
    if not isinstance(value, Mapping):
        raise SpecError([(f"{place} is not an object", "see run.json of another run")])
    hints = get_type_hints(kind)
    problems = []
    for name in value:
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"known: {', '.join(sorted(hints))}"
            problems.append((f"{place}.{name} is unknown", hint))
    if problems:
        raise SpecError(problems)
    arguments = {name: _convert(hints[name], item, f"{place}.{name}") for name, item in value.items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        raise SpecError([(f"{place} is incomplete: {error}", "see run.json of another run")]) from None


def _convert(hint: Any, value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, place)
    fits, kind = _PLAIN[hint]
    if isinstance(value, bool) != (hint is bool) or not fits(value):
        raise SpecError([(f"{place} is {value!r}", f"give {kind}")])
    if hint is float:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _all_strings(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: isinstance(value, int), "a whole number"),
    float: (lambda value: isinstance(value, int | float), "a number"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (lambda value: isinstance(value, str), "a text"),
    tuple[str, ...]: (lambda value: isinstance(value, list | tuple) and _all_strings(value), "a list of texts"),
    Mapping[str, str]: (lambda value: isinstance(value, Mapping) and _all_strings(value.values()), "names and texts"),
}
