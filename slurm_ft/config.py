"""Settings: what a site, a user and a project have chosen once, so that nobody types it each time.

    flag  >  variable  >  ./slurm-ft.toml  >  the user's file  >  the site's file  >  its profile  >  default

Each file is TOML with the names in KEYS, a table `network` (variables for RCCL, NCCL and libfabric) and a
table `sources` (where a value is documented). A single value of a higher layer replaces that of a lower one;
lists add up, the lowest layer first, since sbatch lets the last of two options win. A name that is unknown is
an error. `profile` names one of the files in slurm_ft/sites to build on.

Flags are click's, to which all that is below them is one thing: its default_map. Everything here
takes the surroundings as an argument; only `read` opens files.
"""

from __future__ import annotations

import difflib
import re
import string
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from slurm_ft import env
from slurm_ft.errors import UsageError

PROJECT_FILE = "slurm-ft.toml"
SITE_FILE = "/etc/slurm-ft/config.toml"


class Key(NamedTuple):
    """One setting. `kind` is text, count or texts; `variables` are looked at in their order."""

    name: str
    kind: str
    meaning: str
    variables: tuple[str, ...] = ()
    default: Any = None


KEYS = (
    Key("partition", "text", "Slurm's partition", (env.PARTITION, "SBATCH_PARTITION")),
    Key("account", "text", "Slurm's account", (env.ACCOUNT, "SBATCH_ACCOUNT")),
    Key("qos", "text", "Slurm's quality of service", (env.QOS, "SBATCH_QOS")),
    Key("time", "text", "the time limit, as sbatch takes it", (env.TIME,)),
    Key("gpus_per_node", "count", "GPUs of each host that a job asks for", (env.GPUS_PER_NODE,)),
    Key("cpus_per_node", "count", "CPUs of each host that a job asks for", (env.CPUS_PER_NODE,)),
    Key("mem", "text", "memory of each host, as sbatch takes it", (env.MEM,)),
    Key("spares", "count", "hosts that `slurm-ft submit` holds back for repairs", (env.SPARES,), 0),
    Key("gpu_cpus", "text", "the CPUs next to each GPU, in the GPUs' order, as `49-55 57-63`", (env.GPU_CPUS,)),
    Key("srun_args", "texts", "more options for the srun of each replica's step, such as GPU binding"),
    Key("scratch", "text", "a folder of each host's own for caches; $NAME and ~ are replaced", (env.SCRATCH_ROOT,)),
    Key("health_check", "text", "a command that fails on a host unfit to train: see health.md", (env.HEALTH_CHECK,)),
    Key("spare_check", "count", "seconds between two checks of a waiting spare", (env.SPARE_CHECK,), 300),
    Key("runs", "text", "the folder that holds run folders; $NAME and ~ are replaced", (env.RUNS,), "runs"),
    Key("setup", "texts", "shell lines that a job runs first, such as module load"),
    Key("sbatch_args", "texts", "more options for sbatch"),
    Key("allowed_sbatch_args", "texts", "the names of options that --sbatch-arg may give; all when there is none"),
)
BY_NAME = {key.name: key for key in KEYS}
TABLES = ("network", "sources")


@dataclass(frozen=True)
class Layer:
    """What one file says, checked. `origin` is how it is called in messages."""

    origin: str
    values: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    profile: str = ""


@dataclass(frozen=True)
class Value:
    """A value, the layer that it comes from, and where it is documented, if the layer says so."""

    value: Any
    origin: str
    source: str = ""


@dataclass(frozen=True)
class Settings:
    """All layers in one. Each list holds single Values, since they may come from several layers."""

    single: Mapping[str, Value]
    lists: Mapping[str, tuple[Value, ...]]
    network: Mapping[str, Value]

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(item.value for item in self.lists[name])

    def variables(self) -> dict[str, str]:
        """The network's variables. They are for where the user's environment has no value."""
        return {name: item.value for name, item in self.network.items()}

    def defaults(self) -> dict[str, Any]:
        """The single values, for click's default_map."""
        return {name: item.value for name, item in self.single.items()}


def settings(surroundings: Mapping[str, str], folder: Path) -> Settings:
    """The settings that hold for these variables in this folder."""
    return combine(list(layers(surroundings, folder)), surroundings)


def layers(surroundings: Mapping[str, str], folder: Path) -> Iterator[Layer]:
    """The layers that there are, the lowest first."""
    found = [read(path) for path in places(surroundings, folder) if path.is_file()]
    name = next((layer.profile for layer in reversed(found) if layer.profile), shipped_name(surroundings))
    if name:
        yield profile(name)
    yield from found


def places(surroundings: Mapping[str, str], folder: Path) -> list[Path]:
    """Where the site's, the user's and the project's file would be. Raises UsageError for a site that is not."""
    home = surroundings.get("HOME", "/")
    user = Path(surroundings.get("XDG_CONFIG_HOME") or f"{home}/.config") / "slurm-ft" / "config.toml"
    return [*_site_place(surroundings), user, folder / PROJECT_FILE]


def _site_place(surroundings: Mapping[str, str]) -> list[Path]:
    chosen = surroundings.get(env.SITE)
    if chosen and not shipped_name(surroundings):
        if not Path(chosen).is_file():
            raise UsageError(f"there is no site file `{chosen}`, which {env.SITE} names", _profiles_hint())
        return [Path(chosen)]
    root = surroundings.get(env.ROOT)
    own = [Path(root) / "etc" / "slurm-ft" / "config.toml"] if root else []
    return [next((place for place in own if place.is_file()), Path(SITE_FILE))]


def shipped_name(surroundings: Mapping[str, str]) -> str:
    """The profile that SLURM_FT_SITE names, when it is a name and not a file."""
    chosen = surroundings.get(env.SITE, "")
    return "" if "/" in chosen or chosen.endswith(".toml") else chosen


def profiles() -> list[str]:
    """The profiles that are shipped."""
    return sorted(item.name.removesuffix(".toml") for item in files("slurm_ft").joinpath("sites").iterdir()
                  if item.name.endswith(".toml"))  # fmt: skip


def profile_text(name: str) -> str:
    """A shipped profile's file. Raises UsageError with the ones that there are."""
    if name not in profiles():
        raise UsageError(f"there is no site profile `{name}`", _profiles_hint())
    return files("slurm_ft").joinpath(f"sites/{name}.toml").read_text(encoding="utf-8")


def profile(name: str) -> Layer:
    return parse(profile_text(name), f"profile {name}")


def _profiles_hint() -> str:
    return f"give a file, or one of the profiles {', '.join(profiles())}"


def read(path: Path) -> Layer:
    """A file's layer. Raises UsageError for one that cannot be read or is wrong."""
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "make it readable, or take it away") from None


def parse(text: str, origin: str) -> Layer:
    """A layer from TOML. Raises UsageError for what is wrong with it."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not TOML: {error}", 'values are written as name = "value"') from None
    known = [*BY_NAME, *TABLES, "profile"]
    for name in data:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"settings: {', '.join(known)}"
            raise UsageError(f"{origin}: there is no setting `{name}`", hint)
    values = {name: _checked(BY_NAME[name], value, origin) for name, value in data.items() if name in BY_NAME}
    network, sources = (_checked_table(data.get(table, {}), table, origin) for table in TABLES)
    chosen = data.get("profile", "")
    if not isinstance(chosen, str):
        raise UsageError(f"{origin}: profile is {chosen!r}", _profiles_hint())
    return Layer(origin, values, network, sources, chosen)


def _checked(key: Key, value: Any, origin: str) -> Any:
    match key.kind, value:
        case "text", str():
            return value
        case "count", int() if not isinstance(value, bool) and value >= 0:
            return value
        case "texts", list() if all(isinstance(item, str) for item in value):
            return value
    wanted = {"text": 'a text, as "value"', "count": "a whole number", "texts": 'a list of texts, as ["a", "b"]'}
    raise UsageError(f"{origin}: {key.name} is {value!r}", f"give {wanted[key.kind]}")


def _checked_table(value: Any, table: str, origin: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise UsageError(f"{origin}: [{table}] holds something other than texts", 'write NAME = "value"')
    if table == "network":
        wrong = [name for name in value if not re.fullmatch(r"[A-Za-z_]\w*", name) or name.startswith("SLURM_")]
        if wrong:
            raise UsageError(
                f"{origin}: [network] cannot set `{wrong[0]}`", "give the name of a variable, none of Slurm's"
            )
    return dict(value)


def combine(found: list[Layer], surroundings: Mapping[str, str]) -> Settings:
    """The layers, lowest first, and the variables above them."""
    single = {key.name: Value(key.default, "default") for key in KEYS if key.default is not None}
    lists: dict[str, tuple[Value, ...]] = {key.name: () for key in KEYS if key.kind == "texts"}
    network: dict[str, Value] = {}
    for layer in found:
        for name, value in layer.values.items():
            source = layer.sources.get(name, "")
            if name in lists:
                lists[name] += tuple(Value(item, layer.origin, source) for item in value)
            else:
                single[name] = Value(value, layer.origin, source)
        for name, text in layer.network.items():
            network[name] = Value(text, layer.origin, layer.sources.get(name, ""))
    single |= dict(_from_variables(surroundings))
    if "runs" in single:
        runs = single["runs"]
        single["runs"] = Value(expanded(runs.value, surroundings), runs.origin, runs.source)
    return Settings(single, lists, network)


def _from_variables(surroundings: Mapping[str, str]) -> Iterator[tuple[str, Value]]:
    for key in KEYS:
        for variable in key.variables:
            if value := surroundings.get(variable):
                yield key.name, Value(_counted(key, value, variable), f"${variable}")
                break


def _counted(key: Key, value: str, variable: str) -> Any:
    if key.kind != "count":
        return value
    if not value.isascii() or not value.isdigit():
        raise UsageError(f"${variable} is `{value}`", "give a whole number")
    return int(value)


def expanded(text: str, surroundings: Mapping[str, str]) -> str:
    """A path with ~ and $NAME replaced; a name that has no value stays."""
    if text.startswith("~/"):
        text = surroundings.get("HOME", "~") + text[1:]
    return string.Template(text).safe_substitute(surroundings)


def sample() -> str:
    """A file with every setting, all of it commented out."""
    shown = {"text": '"..."', "count": "0", "texts": '["..."]'}
    lines = [
        "# Settings of slurm-ft; see `slurm-ft config --show-origin` for what holds now.",
        f'# profile = "..."      # one of {", ".join(profiles())}',
    ]
    lines += [f"# {key.name} = {shown[key.kind]}      # {key.meaning}" for key in KEYS]
    lines += [
        "",
        "# Variables for RCCL, NCCL and libfabric, set where the user's environment has no value.",
        "[network]",
    ]
    return "\n".join(
        [*lines, '# NCCL_SOCKET_IFNAME = "..."', "", "# Where a value is documented, by its name.", "[sources]", ""]
    )
