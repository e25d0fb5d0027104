"""The command line as a user meets it, in this process; and its start-up, in processes of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from observe_histories import T0, failed_run, healed_run, write_run

import slurm_ft
from slurm_ft import lease
from slurm_ft.cli import COMMANDS, cli
from slurm_ft.events import Event
from slurm_ft.observe import requests, status
from slurm_ft.paths import RunPaths, write_json

OWN = [name for name in COMMANDS if name not in ("submit", "run")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "titan-4711", healed_run())
    return tmp_path


def call(folder: Path, *arguments: str, **environment: str) -> Result:
    clean = {"SLURM_FT_RUN": "", "SLURM_JOB_ID": "", "SLURM_FT_RUNS": str(folder), "PATH": "/nowhere"}
    return CliRunner().invoke(cli, arguments, env=clean | environment, prog_name="slurm-ft")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_lists_every_command_with_one_line(folder: Path, flag: str) -> None:
    result = call(folder, flag)
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"  {name}" in result.stdout
        assert line.split()[0] in result.stdout


@pytest.mark.parametrize("name", OWN)
def test_each_help_ends_with_two_examples_of_the_command_itself(folder: Path, name: str) -> None:
    result = call(folder, name, "-h")
    assert result.exit_code == 0
    lines = result.stdout.rstrip().splitlines()
    assert lines[-3].strip() == "Examples:"
    assert all(line.strip().startswith(f"slurm-ft {name}") for line in lines[-2:])


def test_the_version_is_the_packages(folder: Path) -> None:
    assert call(folder, "--version").stdout == f"slurm-ft {slurm_ft.__version__}\n"


def test_a_misspelt_command_is_a_usage_error_with_the_right_one(folder: Path) -> None:
    result = call(folder, "stauts")
    assert result.exit_code == 2
    assert "did you mean `status`?" in result.stderr
    assert "report" in call(folder, "xyz").stderr


def test_status_puts_data_on_stdout_and_words_on_stderr(folder: Path) -> None:
    RunPaths(folder / "titan-4711").state.write_text("{")
    result = call(folder, "status", "--noheader", "--format", "replica,state")
    assert result.exit_code == 0
    assert result.stdout == "0 DONE\n1 DONE\n2 DONE\n"
    assert result.stderr.startswith("warning: ")


def test_status_selects_replicas_by_run_and_selector_or_selector_alone(folder: Path) -> None:
    for arguments in (("4711", "0,2"), ("0,2",)):
        result = call(folder, "status", *arguments, "--noheader", "--format", "REPLICA")
        assert result.stdout == "0\n2\n"
    assert call(folder, "status", "9").exit_code == 2


def test_status_follow_of_an_ended_run_leaves_with_its_exit_code(tmp_path: Path) -> None:
    write_run(tmp_path / "crash-1", failed_run())
    result = call(tmp_path, "status", "-f")
    assert result.exit_code == 1
    assert "run ended with exit code 1" in result.stdout


def test_status_follow_of_a_run_that_everybody_left_says_so(tmp_path: Path) -> None:
    import os

    paths = write_run(tmp_path / "left-1", healed_run()[:30])
    os.utime(paths.events, (T0, T0))
    result = call(tmp_path, "status", "-f")
    assert result.exit_code == 1
    assert "nobody looks after the run" in result.stderr


@pytest.mark.parametrize("name", ["status", "explain", "report", "list"])
def test_json_is_one_object_with_a_schema(folder: Path, name: str) -> None:
    result = call(folder, name, "--json")
    assert json.loads(result.stdout)["schema"] == 1
    assert result.stderr == ""


def test_a_loss_that_is_no_number_any_more_is_null_in_json_and_seen_in_text(tmp_path: Path) -> None:
    state = {"t": time.time(), "started": T0, "replicas": [{"id": 0, "state": "TRAINING", "loss": float("nan")}]}
    write_run(tmp_path / "r", [], state)
    assert json.loads(call(tmp_path, "status", "--json").stdout)["replicas"][0]["loss"] is None
    assert call(tmp_path, "status", "--noheader", "--format", "LOSS").stdout == "nan\n"


@pytest.mark.parametrize("name", ["status", "logs", "explain", "report", "stop", "cancel"])
def test_a_run_that_is_not_there_is_a_usage_error_with_a_hint(folder: Path, name: str) -> None:
    result = call(folder, name, "titen")
    assert result.exit_code == 2
    assert "error: there is no run `titen`" in result.stderr
    assert "hint: " in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("name", ["status", "explain", "report", "list"])
def test_a_reader_gets_on_with_every_file_missing_or_damaged(tmp_path: Path, name: str) -> None:
    contents = (None, b"", b"\x00\xff", b"[]", b"{}", b'{"replicas": 1}')
    for file in ("run.json", "events.jsonl", "state.json", "lock"):
        for number, content in enumerate(contents):
            paths = write_run(tmp_path / f"{file}-{number}" / "r-1", healed_run(), {"t": T0, "replicas": [{}]})
            path = paths.root / file
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
            result = call(paths.root.parent, name)
            assert result.exit_code == 0, (file, content, result.stderr, result.exception)


def test_logs_are_printed_byte_for_byte(folder: Path) -> None:
    path = RunPaths(folder / "titan-4711").rank_log(2, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"d\xe9j\xe0\n")
    assert call(folder, "logs", "2/0").stdout_bytes == b"d\xe9j\xe0\n"
    assert call(folder, "logs", "last", "2", "-n", "0").stdout_bytes == b""
    assert call(folder, "logs", "1").exit_code == 2


def test_logs_follow_ends_with_the_run(folder: Path) -> None:
    path = RunPaths(folder / "titan-4711").rank_log(2, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a\nb\n")
    assert call(folder, "logs", "2/0", "-f", "-n", "1").stdout_bytes == b"b\n"


def test_the_report_tells_a_run_that_has_not_started(tmp_path: Path) -> None:
    write_run(tmp_path / "w-1", [])
    result = call(tmp_path, "report")
    assert result.exit_code == 0
    assert "has not started" in result.stderr
    assert "goodput: not measured" in result.stdout


# --- what changes something ------------------------------------------------------------------------------------


def running(folder: Path, count: int = 30) -> RunPaths:
    """A run that trains, with fresh news."""
    events = healed_run()[:count]
    shift = time.time() - events[-1].t
    moved = [Event(event.t + shift, event.kind, event.replica, event.data) for event in events]
    return write_run(folder / "live-1", moved)


@pytest.mark.parametrize("kind", ["kill", "term", "segv", "stop", "exit:0", "exit:255"])
def test_inject_dry_run_prints_the_request_and_writes_nothing(folder: Path, kind: str) -> None:
    paths = running(folder)
    result = call(folder, "inject", "live-1", "--replica", "2", "--kind", kind, "--dry-run")
    assert result.exit_code == 0
    request = json.loads(result.stdout)
    assert (request["type"], request["replica"], request["rank"], request["kind"]) == ("inject", 2, 0, kind)
    assert list(paths.control.iterdir()) == []


@pytest.mark.parametrize("kind", ["hug", "exit", "exit:", "exit:256", "exit:-1"])
def test_inject_refuses_a_kind_that_there_is_not(folder: Path, kind: str) -> None:
    result = call(folder, "inject", "--replica", "2", "--kind", kind)
    assert result.exit_code == 2
    assert "is no kind of fault" in result.stderr


def test_inject_into_a_run_that_has_ended_fails_with_a_hint(folder: Path) -> None:
    result = call(folder, "inject", "--replica", "2", "--kind", "kill")
    assert result.exit_code == 1
    assert "has ended with exit code 0" in result.stderr


def test_stop_dry_run_and_no_wait(folder: Path) -> None:
    paths = running(folder)
    assert call(folder, "stop", "live-1", "--dry-run").stdout == f"touch {paths.stop}\n"
    assert not paths.stop.exists()
    assert call(folder, "stop", "live-1", "--no-wait").exit_code == 0
    assert paths.stop.exists()


def test_stop_and_cancel_of_an_ended_run_change_nothing(folder: Path) -> None:
    for name in ("stop", "cancel"):
        result = call(folder, name)
        assert result.exit_code == 0
        assert "has ended already, with exit code 0" in result.stderr
    assert not RunPaths(folder / "titan-4711").stop.exists()


@pytest.mark.parametrize("name", ["stop", "cancel"])
def test_stop_and_cancel_do_not_take_the_end_of_a_session_for_that_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its head is still there: it puts the job back, or a new one begins."""
    monkeypatch.setattr(requests, "SETTLES_WITHIN", 0.0)
    monkeypatch.setattr(requests, "SETTLES_FOR_CANCEL", 0.0)
    paths = running(folder)
    ended = {"t": time.time(), "started": T0, "job_id": "815", "cluster": "slurm", "ended": 75, "replicas": []}
    write_json(paths.state, ended)
    lease.take(paths.lease, lease.Claim(1, "here", "another machine", 1, "815"))
    result = call(folder, name, "live-1", "--no-wait" if name == "stop" else "--dry-run")
    assert "has ended" not in result.output
    assert paths.stop.exists() if name == "stop" else result.stdout == "scancel 815\n"


def test_stop_of_a_run_that_everybody_left_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "left-1", healed_run()[:30])
    result = call(tmp_path, "stop")
    assert result.exit_code == 1
    assert "nobody looks after" in result.stderr


def test_cancel_dry_run_prints_the_command_without_slurm(folder: Path) -> None:
    paths = running(folder)
    write_json(paths.state, {"t": time.time(), "started": T0, "job_id": "815", "cluster": "slurm", "replicas": []})
    result = call(folder, "cancel", "live-1", "--dry-run", PATH="/nowhere")
    assert result.stdout == "scancel 815\n"


# --- start-up --------------------------------------------------------------------------------------------------


def python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def test_help_imports_no_command_and_no_reader_imports_torch_or_the_launchers() -> None:
    code = "import sys, slurm_ft.cli\nprint([m for m in sys.modules if m.startswith('slurm_ft.cli.')])"
    assert python("-c", code).strip() == "[]"
    modules = ", ".join(COMMANDS[name][0] for name in OWN)
    heavy = "('torch', 'numpy', 'submitit', 'jinja2', 'zmq', 'asyncio')"
    code = f"import sys, {modules}\nprint([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code).strip() == "[]"


HELP = """
import time
begin = time.process_time()
import click
yardstick = time.process_time() - begin
import slurm_ft.cli
slurm_ft.cli.cli(["--help"], standalone_mode=False)
print(yardstick, time.process_time() - begin)
"""
CLICKS = 6
"""A third of a second on a machine that needs 50 ms to import click."""


def test_help_costs_no_more_than_a_few_imports_of_click() -> None:
    """Work that is done, and not time that passes: a loaded machine is slow. Each has its best of five."""
    costs = [tuple(map(float, python("-c", HELP).splitlines()[-1].split())) for _ in range(5)]
    yardstick, answer = (min(cost) for cost in zip(*costs, strict=True))
    assert answer < CLICKS * yardstick


def test_a_reader_that_went_away_is_no_error(folder: Path) -> None:
    path = RunPaths(folder / "titan-4711").rank_log(0, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 79 + b"\n" + b"y\n" * 200_000)
    argv = [sys.executable, "-c", "from slurm_ft.cli import main; main()", "logs", str(folder / "titan-4711"), "0/0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"x" * 79 + b"\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10) == 141


def test_a_terminal_that_cannot_show_a_name_gets_a_replacement(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "r", [], {"t": T0, "name": "学l", "started": T0, "ended": 0})
    argv = [sys.executable, "-c", "from slurm_ft.cli import main; main()", "status", str(paths.root)]
    done = subprocess.run(argv, env={"PYTHONIOENCODING": "latin-1", "PATH": ""}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"?l  DONE:0")


def test_states_keep_their_words_without_colour() -> None:
    assert status.colour("FAILED:1") == "bad"
    assert status.colour("TRAINING") == "good"
