"""A user's own sbatch script and the templates, without Slurm. On a real one: tests/cluster/test_templates.py."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_ft import __version__, env
from slurm_ft.cli import cli, templates
from slurm_ft.config import KEYS
from slurm_ft.errors import TryAgain, UsageError
from slurm_ft.submit import script

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CLEAN = {name: None for key in KEYS for name in key.variables} | {"SLURM_JOB_ID": None, env.LINES: None}


def call(*arguments: str, **variables: str) -> Result:
    environment = CLEAN | {"PATH": "/nowhere", "HOME": "/nowhere", "SLURM_FT_SITE": ""} | variables
    return CliRunner().invoke(cli, arguments, env=environment, prog_name="slurm-ft")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def golden(name: str, got: str) -> None:
    """Compare with a golden file; with UPDATE_GOLDEN in the environment, write it."""
    path = GOLDEN / name
    if "UPDATE_GOLDEN" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(got)
    assert got == path.read_text(), f"see {path}; UPDATE_GOLDEN=1 writes it"


@pytest.mark.parametrize("name", templates.names())
def test_what_is_submitted_for_a_template_is_the_golden_call(folder: Path, name: str) -> None:
    assert call("templates", "copy", name).exit_code == 0
    result = call("submit", "--dry-run", f"{name}.sbatch")
    assert result.exit_code == 0, result.stderr
    golden(f"templates/{name}.txt", result.stdout.replace(str(folder), "FOLDER"))


def test_what_submit_renders_is_the_golden_script(folder: Path) -> None:
    arguments = ("--name", "train", "--replicas", "3", "--spares", "1", "--setup", "module load rocm", "--time", "1:00")
    out = call("submit", "--dry-run", *arguments, "--", "python", "train.py", SLURM_FT_SITE="frontier").stdout
    shown = out.replace(str(folder), "FOLDER").replace(sys.executable, "PYTHON").replace(__version__, "VERSION")
    golden("templates/submit.txt", shown)


def test_templates_and_what_submit_renders_agree_on_what_every_job_needs(folder: Path) -> None:
    rendered = script.parse(call("submit", "--dry-run", "--", "true").stdout.split("\n", 1)[1], Path("s")).options
    wanted = dict(option[2:].partition("=")[::2] for option in script.always(120))
    assert wanted.items() <= rendered.items()
    for name in templates.names():
        assert wanted.items() <= script.parse(templates.text(name), Path(name)).options.items()


def test_list_show_and_copy(folder: Path) -> None:
    listed = call("templates", "list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == templates.names()
    assert call("templates", "show", "chain").stdout == (ROOT / "sbatch_templates" / "chain.sbatch").read_text()
    assert call("templates", "copy", "chain", "mine.sbatch", "--dry-run").exit_code == 0
    assert not list(folder.iterdir())
    assert call("templates", "copy", "chain", "mine.sbatch").exit_code == 0
    again = call("templates", "copy", "chain", "mine.sbatch")
    assert (again.exit_code, "is there already" in again.stderr) == (2, True)
    wrong = call("templates", "show", "chains")
    assert (wrong.exit_code, "did you mean `chain`?" in wrong.stderr) == (2, True)


# --- scripts of one's own --------------------------------------------------------------------------------------

MINE = """#!/bin/bash
#SBATCH -N 4 --gpus-per-node=8 -p gpu  # a comment
#SBATCH --job-name "my job" --no-requeue
# SLURM_FT --replicas=4 --env "A=b c"
#SLURM_FT --min-replicas 2

#SBATCH -t 10
module load x
#SBATCH --nodes=99
# SLURM_FT --spares=99
exec slurm-ft run -- python train.py
"""


def test_lines_are_read_as_sbatch_reads_them() -> None:
    found = script.parse(MINE, Path("mine.sbatch"))
    assert found.options == {"nodes": "4", "gpus-per-node": "8", "partition": "gpu", "job-name": "my job",
                             "requeue": "", "time": "10"}  # fmt: skip
    assert found.words == ("--replicas=4", "--env", "A=b c", "--min-replicas", "2")
    assert [option.partition("=")[0] for option in script.missing(found, 120)] == [
        "--ntasks-per-node", "--no-kill", "--open-mode", "--signal",
    ]  # fmt: skip


def test_a_program_without_such_lines_is_a_command_and_not_a_script(folder: Path) -> None:
    (folder / "train.sh").write_text("#!/bin/bash\n# SLURM_FTX --no\npython train.py\n")
    (folder / "data").write_bytes(b"\x7fELF#SBATCH --nodes=1\n")
    for command in ("train.sh", "data", "nowhere"):
        assert script.find([command]) is None
    assert script.find([]) is None


def words(result: Result, name: str) -> str:
    found = re.search(rf"{name}='?(.*?)'? \\$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    return found[1]


def test_options_of_the_command_line_win_over_lines_and_settings_do_not(folder: Path) -> None:
    (folder / "mine.sbatch").write_text(MINE)
    (folder / "slurm-ft.toml").write_text('partition = "site"\naccount = "site"\nspares = 3')
    result = call("submit", "--dry-run", "mine.sbatch")
    assert "--account=site" in result.stdout
    assert "--partition" not in result.stdout and "--nodes" not in result.stdout and "--spares" not in result.stdout
    result = call("submit", "--dry-run", "-p", "typed", "--spares", "1", "--zygote", "--", "mine.sbatch", "--x", "y z")
    assert "--partition=typed" in result.stdout and "--nodes=5" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("mine.sbatch --x 'y z'")
    assert words(result, env.OPTIONS) == f"--spares=1 --zygote --run-dir={folder}/runs/my-job-%j"


def test_a_setting_is_not_laid_over_what_a_script_asks_for_in_other_words(folder: Path) -> None:
    (folder / "mine.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --gres=gpu:a100:4 --mem-per-cpu=4G\nslurm-ft run -- true\n"
    )
    (folder / "slurm-ft.toml").write_text('gpus_per_node = 8\nmem = "480G"\ncpus_per_node = 7\n')
    out = call("submit", "--dry-run", "mine.sbatch").stdout
    assert "--gpus-per-node" not in out and "--mem=" not in out and "--cpus-per-task=7" in out
    assert "--gpus-per-node=2" in call("submit", "--dry-run", "--gpus-per-node", "2", "mine.sbatch").stdout


def test_what_is_given_for_sbatch_wins_over_what_every_job_needs(folder: Path) -> None:
    arguments = ("--sbatch-arg=--no-requeue", "--sbatch-arg=--signal=B:USR2@600")
    lines = call("submit", "--dry-run", *arguments, "--", "true").stdout.splitlines()
    assert lines.index("#SBATCH --no-requeue") > lines.index("#SBATCH --requeue")
    assert lines.index("#SBATCH --signal=B:USR2@600") > lines.index("#SBATCH --signal=B:USR2@120")


@pytest.mark.parametrize(
    ("words", "answered"),
    [("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False), ("no batch script", True)],
)
def test_a_slurm_that_does_not_answer_is_not_a_job_without_a_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, answered: bool
) -> None:
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\necho {shlex.quote(words)} >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(script, "ASK_AGAIN", (0.0, 0.0))
    surroundings = {"SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    if answered:
        assert script.lines_of_job(surroundings) == ()
    else:
        with pytest.raises(TryAgain, match="does not say what script job 7 has"):
            script.lines_of_job(surroundings)


PLAIN = "#!/bin/bash\n#SBATCH -N 1\n{line}\nslurm-ft run -- true\n"


@pytest.mark.parametrize(
    ("line", "typed", "signal"),
    [("", (), "B:USR2@120"), ("", ("--save-within=600",), "B:USR2@660"),
     ("# SLURM_FT --save-within=600", (), "B:USR2@660"),
     ("# SLURM_FT --save-within=600", ("--save-within=300",), "B:USR2@360")],
)  # fmt: skip
def test_a_script_that_says_nothing_of_a_warning_is_warned_early_enough_to_save(
    folder: Path, line: str, typed: tuple[str, ...], signal: str
) -> None:
    (folder / "mine.sbatch").write_text(PLAIN.format(line=line))
    result = call("submit", "--dry-run", *typed, "mine.sbatch")
    assert f"--signal={signal} " in result.stdout
    assert "warning" not in result.stderr


@pytest.mark.parametrize(
    ("signal", "typed", "says"),
    [("B:USR2@120", (), ""), ("B:USR2@120", ("--save-within=600",), "120 s before the time limit"),
     ("B:USR2", (), "60 s before the time limit"), ("B:USR2@660", ("--save-within=600",), ""),
     ("B:USR2@120", ("--save-within=600", "--sbatch-arg=--signal=B:USR2@700"), "")],
)  # fmt: skip
def test_a_warning_of_the_scripts_own_that_comes_too_late_to_save_is_told(
    folder: Path, signal: str, typed: tuple[str, ...], says: str
) -> None:
    (folder / "mine.sbatch").write_text(PLAIN.format(line=f"#SBATCH --signal={signal}"))
    result = call("submit", "--dry-run", *typed, "mine.sbatch")
    assert result.exit_code == 0
    assert ("warning" in result.stderr) is bool(says) and says in result.stderr


def test_the_run_folder_is_named_by_the_command_line_the_lines_or_the_job(folder: Path) -> None:
    (folder / "mine.sbatch").write_text("#!/bin/bash\n#SBATCH -N 1\nslurm-ft run -- true\n")
    assert f"--run-dir={folder}/runs/mine-%j" in call("submit", "--dry-run", "mine.sbatch").stdout
    assert "--job-name=mine" in call("submit", "--dry-run", "mine.sbatch").stdout
    (folder / "mine.sbatch").write_text("#!/bin/bash\n# SLURM_FT --name=lines --runs=there\nslurm-ft run -- true\n")
    assert f"--run-dir={folder}/there/lines-%j" in call("submit", "--dry-run", "mine.sbatch").stdout
    assert f"--run-dir={folder}/there/typed-%j" in call("submit", "--dry-run", "--name", "typed", "mine.sbatch").stdout
    assert f"--run-dir={folder}/x" in call("submit", "--dry-run", "--run-dir", "x", "mine.sbatch").stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("# SLURM_FT --replica=4", "No such option"),
        ("# SLURM_FT --replicas=four", "not a valid integer"),
        ("# SLURM_FT --replicas=4 --nodes-per-replica=2", "need 8"),
        ("#SBATCH --comment='a", "No closing quotation"),
    ],
)
def test_lines_that_are_wrong_are_found_before_anything_is_submitted(folder: Path, line: str, says: str) -> None:
    (folder / "mine.sbatch").write_text(f"#!/bin/bash\n#SBATCH --nodes=4\n{line}\nexec slurm-ft run -- true\n")
    result = call("submit", "--dry-run", "mine.sbatch")
    assert result.exit_code == 2
    assert says in result.stderr and "hint: " in result.stderr


def test_setup_lines_belong_into_the_script(folder: Path) -> None:
    (folder / "mine.sbatch").write_text(MINE)
    result = call("submit", "--dry-run", "--setup", "module load y", "mine.sbatch")
    assert (result.exit_code, "put the line into" in result.stderr) == (2, True)


def test_run_takes_the_lines_below_its_own_options_and_the_command_lines_above(folder: Path) -> None:
    variables = {env.LINES: "--name lines --replicas 3 --env A=1", env.OPTIONS: "--replicas 4 --run-dir there-%j"}
    argv = ("run", "--cluster", "local", "--name", "own", "--env", "B=2", "--dry-run", "--", "/bin/true")
    out = call(*argv, **variables, SLURM_JOB_ID="77").stdout
    assert out.splitlines()[0].endswith("/there-77")
    assert len(out.splitlines()) == 2 + 4
    assert len(call(*argv, **{env.LINES: variables[env.LINES]}).stdout.splitlines()) == 2 + 3


def test_lines_that_run_does_not_know_are_an_error(folder: Path) -> None:
    result = call("run", "--cluster", "local", "--dry-run", "--", "/bin/true", **{env.LINES: "--nonsense"})
    assert (result.exit_code, "SLURM_FT lines: No such option" in result.stderr) == (2, True)


def test_only_the_mark_that_sbatch_refuses_is_mended(folder: Path) -> None:
    path = folder / "s.sbatch"
    path.write_text("#!/bin/bash\n#SLURM_FT --spares=1\n# SLURM_FT --name=x\necho '#SLURM_FT'\n")
    with script._bearable(script.parse(path.read_text(), path)) as copy:
        assert copy.read_text() == path.read_text().replace("\n#SLURM_FT ", "\n# SLURM_FT ")
    assert not copy.exists()


def test_unmatched_quotes_name_the_line() -> None:
    with pytest.raises(UsageError, match="line 2"):
        script.parse("#!/bin/bash\n#SBATCH --x='\n", Path("s"))
