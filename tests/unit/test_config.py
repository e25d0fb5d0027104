"""Settings: their order, their errors, and the profiles that are shipped."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_ft import config
from slurm_ft.cli import cli
from slurm_ft.errors import UsageError

CLEAN = {key: None for item in config.KEYS for key in item.variables} | {"SLURM_FT_ROOT": None, "SLURM_FT_RUN": None}


class Files:
    """A site, a user and a project file, and the variables with which they are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        self.surroundings = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "xdg")}
        (folder / "xdg" / "slurm-ft").mkdir(parents=True)
        self.surroundings["SLURM_FT_SITE"] = str(folder / "site.toml")
        self.write(site="")

    def write(self, **texts: str) -> None:
        places = {
            "site": self.folder / "site.toml",
            "user": self.folder / "xdg" / "slurm-ft" / "config.toml",
            "project": self.project / "slurm-ft.toml",
        }
        for name, text in texts.items():
            places[name].write_text(text, encoding="utf-8")

    def settings(self, **variables: str) -> config.Settings:
        return config.settings(self.surroundings | variables, self.project)

    def call(self, *arguments: str, **variables: str) -> Result:
        environment = CLEAN | self.surroundings | {"PATH": "/nowhere"} | variables
        return CliRunner().invoke(cli, arguments, env=environment, prog_name="slurm-ft")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    made = Files(tmp_path)
    monkeypatch.chdir(made.project)
    return made


def test_a_higher_layer_wins_from_flag_to_profile(files: Files) -> None:
    found = files.settings
    assert found().single.get("partition") is None
    files.write(site='profile = "frontier"')
    assert found().single["partition"].value == "batch"
    for layer in ("site", "user", "project"):
        files.write(**{layer: f'profile = "frontier"\npartition = "{layer}"'})
        assert found().single["partition"].value == layer
    assert found(SBATCH_PARTITION="slurms").single["partition"].value == "slurms"
    both = found(SBATCH_PARTITION="slurms", SLURM_FT_PARTITION="ours")
    assert (both.single["partition"].value, both.single["partition"].origin) == ("ours", "$SLURM_FT_PARTITION")
    script = files.call("submit", "--dry-run", "-p", "flag", "--", "true", SLURM_FT_PARTITION="ours").stdout
    assert "#SBATCH --partition=flag\n" in script
    assert "ours" not in script


def test_lists_add_up_and_the_flags_options_come_last(files: Files) -> None:
    files.write(site='sbatch_args = ["--network=x"]\nsetup = ["module load a"]', user='setup = ["module load b"]')
    script = files.call("submit", "--dry-run", "--setup", "c", "--sbatch-arg=--network=y", "--", "true").stdout
    lines = script.splitlines()
    assert lines.index("#SBATCH --network=x") < lines.index("#SBATCH --network=y")
    assert lines[lines.index("module load a") :][:3] == ["module load a", "module load b", "c"]


def test_a_value_with_blanks_is_one_value_for_sbatch(files: Files) -> None:
    files.write(site='sbatch_args = ["--comment=a b"]')
    script = files.call("submit", "--dry-run", "--sbatch-arg=--mail-user=x y", "--", "true").stdout
    assert '#SBATCH --comment="a b"\n' in script
    assert '#SBATCH --mail-user="x y"\n' in script


def test_variables_of_the_network_are_set_after_the_setup_where_there_is_no_value(files: Files) -> None:
    files.write(site='setup = ["module load rccl"]\n[network]\nNCCL_A = "a b"', user='[network]\nNCCL_B = "1"')
    lines = files.call("submit", "--dry-run", "--", "true").stdout.splitlines()
    assert lines.index("module load rccl") < lines.index("[ \"${NCCL_A+set}\" ] || export NCCL_A='a b'")
    assert '[ "${NCCL_B+set}" ] || export NCCL_B=1' in lines


def test_a_local_run_does_not_take_the_sites_hosts_for_this_machine(files: Files) -> None:
    files.write(site="gpus_per_node = 8\nspares = 2")
    out = files.call("submit", "--cluster", "local", "--dry-run", "--", "true", PATH="/usr/bin:/bin").stdout
    assert len([line for line in out.splitlines() if not line.startswith("#")]) == 1
    script = files.call("submit", "--dry-run", "--", "true").stdout
    assert "--nodes=3" in script and "--gpus-per-node=8" in script


def test_the_runs_folder_holds_for_every_command_and_names_are_replaced_in_it(files: Files) -> None:
    (files.folder / "scratch" / "me" / "train-7").mkdir(parents=True)
    (files.folder / "scratch" / "me" / "train-7" / "run.json").write_text("{}")
    files.write(site='runs = "~/scratch/$USER"')
    assert files.settings(USER="me").single["runs"].value == f"{files.folder}/scratch/me"
    assert "train-7" in files.call("stop", "--dry-run", USER="me").stdout
    assert files.call("stop", "--dry-run", "--runs", "elsewhere", USER="me").exit_code == 2


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ('partiton = "x"', "no setting `partiton`", "did you mean `partition`?"),
        ("colour = 1", "no setting `colour`", "settings: partition"),
        ("gpus_per_node = true", "gpus_per_node is True", "whole number"),
        ("spares = -1", "spares is -1", "whole number"),
        ('setup = "module load x"', "setup is", "list of texts"),
        ("[network]\nA = 1", "[network] holds", "NAME"),
        ('[network]\nSLURM_A = "1"', "cannot set `SLURM_A`", "none of Slurm's"),
        ('[network]\n"A B" = "1"', "cannot set `A B`", "name of a variable"),
        ("partition = x", "is not TOML", "name ="),
        ('profile = "moon"', "no site profile `moon`", "frontier"),
    ],
)
def test_what_is_wrong_in_a_file_is_an_error_with_a_hint(files: Files, text: str, says: str, hint: str) -> None:
    files.write(user=text)
    result = files.call("config")
    assert result.exit_code == 2
    assert says in result.stderr and hint in result.stderr
    assert files.call("submit", "--dry-run", "--", "true").exit_code == 2
    assert files.call("submit", "--help").exit_code == 0
    assert files.call("config", "--profiles").exit_code == 0


def test_a_site_that_is_not_there_and_a_wrong_variable_are_errors(files: Files) -> None:
    with pytest.raises(UsageError, match="no site file"):
        files.settings(SLURM_FT_SITE="/no/such.toml")
    with pytest.raises(UsageError, match="no site profile"):
        files.settings(SLURM_FT_SITE="moon")
    with pytest.raises(UsageError, match="SLURM_FT_SPARES"):
        files.settings(SLURM_FT_SPARES="two")


def test_the_modules_own_site_file_is_found_where_no_site_is_named(files: Files) -> None:
    place = files.folder / "root" / "etc" / "slurm-ft" / "config.toml"
    place.parent.mkdir(parents=True)
    place.write_text('qos = "centre"')
    assert files.settings(SLURM_FT_SITE="", SLURM_FT_ROOT=str(files.folder / "root")).single["qos"].value == "centre"


def test_show_origin_names_the_file_the_source_and_what_stays(files: Files) -> None:
    files.write(user='profile = "frontier"\nqos = "debug"')
    out = files.call("config", "--show-origin", NCCL_CROSS_NIC="0").stdout
    assert f'qos = "debug"                       # {files.folder}/xdg/slurm-ft/config.toml\n' in out
    assert "# profile frontier (OLCF user guide" in out
    assert next(line for line in out.splitlines() if line.endswith("which stays")).startswith("NCCL_CROSS_NIC")
    assert tomllib.loads(files.call("config").stdout)["network"]["NCCL_CROSS_NIC"] == "1"
    shown = json.loads(files.call("config", "--json").stdout)
    assert shown["schema"] == 1
    assert shown["settings"]["qos"] == {
        "value": "debug",
        "origin": f"{files.folder}/xdg/slurm-ft/config.toml",
        "source": "",
    }


def test_options_that_are_not_allowed_are_refused_with_those_that_are(files: Files) -> None:
    files.write(site='allowed_sbatch_args = ["constraint", "--reservation"]')
    assert files.call("submit", "--dry-run", "--sbatch-arg=--constraint=a", "--", "true").exit_code == 0
    result = files.call("submit", "--dry-run", "--sbatch-arg=--exclusive", "--", "true")
    assert result.exit_code == 2
    assert "allowed: constraint, reservation" in result.stderr


@pytest.mark.parametrize("name", config.profiles())
def test_each_value_of_a_shipped_profile_has_a_source(name: str) -> None:
    layer = config.profile(name)
    assert {*layer.values, *layer.network} == set(layer.sources)
    assert layer.network and "gpus_per_node" in layer.values


def test_the_four_profiles_are_shipped_and_the_sample_is_a_file_that_sets_nothing() -> None:
    assert config.profiles() == ["frontier", "h100-infiniband", "lumi-g", "mi300x-infiniband"]
    layer = config.parse(config.sample(), "sample")
    assert not layer.values and not layer.network
    assert all(f"# {key.name} = " in config.sample() for key in config.KEYS)


def test_every_line_of_the_sample_sets_something_once_its_mark_is_taken_away() -> None:
    lines = [line.removeprefix("# ") for line in config.sample().splitlines() if " = " in line]
    assert len(lines) > len(config.KEYS)
    for line in lines:
        tomllib.loads(line)


def test_a_variable_of_sbatchs_does_not_beat_what_the_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from slurm_ft.submit.crossing import submission_environment

    monkeypatch.setenv("SBATCH_PARTITION", "x")
    monkeypatch.setenv("SBATCH_ACCOUNT", "y")
    with submission_environment(("--partition=flag",)):
        assert "SBATCH_PARTITION" not in os.environ
        assert os.environ["SBATCH_ACCOUNT"] == "y"
    assert os.environ["SBATCH_PARTITION"] == "x"


def test_config_says_which_slurm_is_here_and_who_asks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho slurm 21.08.5\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = CliRunner().invoke(cli, ["config", "--slurm"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("Slurm 21.08, asked by commands (pyslurm ")
    assert json.loads(CliRunner().invoke(cli, ["config", "--slurm", "--json"]).output)["slurm"] == "21.08"
