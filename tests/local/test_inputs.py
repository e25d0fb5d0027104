"""What goes into a run: commands, folders, damaged files; and the exit code that comes out of it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from slurm_ft.events import Kind
from tests.local.running import CRASHES, PYTHON, SECONDS, Run
from tests.waiting import wait_until

SHOW = "import os, sys; print(sys.argv[1:]); print(os.environ['NOTE'])"


def words_of(run: Run, *arguments: str) -> str:
    """What a command prints, both kinds."""
    out = run.call(*arguments)
    return out.stdout + out.stderr


# --- commands ----------------------------------------------------------------------------------------------------


def test_blanks_quotes_and_dollars_reach_the_program_as_they_were_given(run: Run) -> None:
    words = ["it's 50% done", "$HOME", "`id`", "a;b", "", "*", 'say "no"', "--dry-run", "-h"]
    run.start("--env", "NOTE=$HOME's = (v2)", command=(PYTHON, "-c", SHOW, *words))
    assert run.ended()[0] == 0
    assert run.log(0, 1) == f"{words}\n$HOME's = (v2)\n"


def test_each_rank_sees_its_place(run: Run) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE REPLICA_GROUP_ID NUM_REPLICA_GROUPS MASTER_ADDR MASTER_PORT"
    script = f"for name in {names} SLURM_FT_ATTEMPT; do eval echo $name=\\$$name; done"
    run.start("--replicas=2", "--nodes-per-replica=2", "--ranks-per-node=2", command=("sh", "-c", script))
    assert run.ended()[0] == 0
    seen = {}
    for replica in (0, 1):
        for rank in range(4):
            seen[replica, rank] = dict(line.split("=") for line in run.log(replica, 1, rank).splitlines())
    for (replica, rank), place in seen.items():
        expected = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2,
                    "REPLICA_GROUP_ID": replica, "NUM_REPLICA_GROUPS": 2, "SLURM_FT_ATTEMPT": 1}  # fmt: skip
        assert place.items() >= {name: str(value) for name, value in expected.items()}.items()
    ports = [{seen[replica, rank]["MASTER_PORT"] for rank in range(4)} for replica in (0, 1)]
    assert [len(port) for port in ports] == [1, 1]
    assert ports[0] != ports[1]


def test_a_program_that_a_shell_script_starts_is_observed_if_that_puts_our_bootstrap_in_front(run: Run) -> None:
    script = f'exec {PYTHON} "$SLURM_FT_BOOTSTRAP" -c "1 / 0"'
    run.start("--restarts-in-place=0", "--restarts-by-step=0", command=("sh", "-c", script))
    assert run.ended()[0] == 93
    assert run.until(Kind.RANK_FAILED).data["traceback"].endswith("ZeroDivisionError: division by zero\n")


def test_a_program_that_always_crashes_ends_with_93_and_its_traceback_is_shown(run: Run) -> None:
    run.program.write_text(CRASHES)
    run.start("--restarts-in-place=1", "--restarts-by-step=0")
    assert run.ended()[0] == 93
    assert [number for number, _ in run.attempts(0)] == [1, 2]
    failed = run.until(Kind.RANK_FAILED).data
    assert failed["what"] == "rank 0 exited with code 1: ValueError: no such data: corpus"
    for command in ("explain", "report"):
        words = words_of(run, command, str(run.paths.root))
        assert "ValueError: no such data: corpus" in words, command
        assert "train it's.py" in words, command


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 93), ("kill -SEGV $$", 93)])
def test_the_exit_code_of_the_run(run: Run, script: str, code: int) -> None:
    run.start("--restarts-in-place=0", "--restarts-by-step=0", command=("sh", "-c", script))
    assert run.ended()[0] == code
    assert run.until(Kind.RUN_ENDED).data["code"] == code


def test_it_had_trained_when_it_broke_for_good(run: Run) -> None:
    run.start("--restarts-in-place=0", "--restarts-by-step=0")
    run.trains(0)
    run.inject(0, "exit:5")
    assert run.ended()[0] == 1


def test_a_program_that_is_not_there(run: Run) -> None:
    run.start(command=("no-such-trainer", "x"))
    code, words = run.ended()
    assert code == 2
    assert words.startswith("error: there is no program `no-such-trainer` here\nhint: ")
    run.start(command=(PYTHON, "no such script.py"))
    code, words = run.ended()
    assert (code, words.splitlines()[0]) == (2, "error: there is no script `no such script.py`")
    assert not run.paths.root.exists()


def test_a_program_that_is_not_there_for_the_ranks(run: Run) -> None:
    run.start("--restarts-in-place=0", "--restarts-by-step=0", "--env", "PATH=/nowhere", command=("sleep", "1"))
    assert run.ended()[0] == 93
    assert "cannot start `sleep`: No such file or directory" in run.log(0, 1)
    assert "exited with code 127" in run.until(Kind.RANK_FAILED).data["what"]


def test_all_that_is_wrong_is_said_at_once(run: Run) -> None:
    run.start("--replicas=0", "--ranks-per-node=0", "--spares=-1", "--min-replicas=3", "--name=a b")
    code, words = run.ended()
    assert code == 2
    for word in ("--replicas is 0", "--ranks-per-node is 0", "--spares is -1", "--min-replicas is 3", "`a b`"):
        assert word in words
    assert not run.paths.root.exists()


def test_no_command_and_an_unknown_option(run: Run) -> None:
    out = run.call("run", "--cluster=local")
    assert (out.returncode, "there is no command to run" in out.stderr) == (2, True)
    out = run.call("run", "--cluster=local", "--replica=2", "--", "true")
    assert out.returncode == 2
    assert "--replicas" in out.stderr


def test_without_slurm_and_without_cluster_local(run: Run) -> None:
    out = run.call("run", "--", "true")
    assert out.returncode == 2
    assert "no Slurm allocation" in out.stderr
    assert "--cluster local" in out.stderr


def test_a_dry_run_shows_the_argv_and_touches_nothing(run: Run) -> None:
    out = run.call(*run.argv("--dry-run", "--replicas=2")[1:])
    assert out.returncode == 0
    assert out.stdout.count("slurm_ft.agent.main") == 2
    assert not run.paths.root.exists()


# --- the run folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file/run", "/proc/self/run", "/dev/null/run"])
def test_a_run_folder_that_cannot_be_made(run: Run, place: str) -> None:
    (run.folder / "file").write_text("mine")
    out = run.call("run", "--cluster=local", f"--run-dir={place}", "--", "true")
    assert out.returncode == 2
    assert re.match(r"error: the run folder `.*run` cannot be written: .+\nhint: .*--run-dir", out.stderr)
    assert (run.folder / "file").read_text() == "mine"


def test_a_second_head_on_the_same_folder_is_refused_and_the_first_goes_on(run: Run) -> None:
    run.start()
    pid = run.trains(0)
    events = run.paths.events.stat().st_ino
    first = run.head
    second = run.start().ended()
    run._heads.pop()
    assert second[0] == 2
    assert f"is looked after already, by process {first.pid}" in second[1]
    assert "hint: see it with `slurm-ft status`" in second[1]
    assert run.trains(0) == pid
    assert run.paths.events.stat().st_ino == events
    assert run.finished() == 0
    assert len(run.events(Kind.RUN_STARTED)) == 1


def test_the_folder_is_taken_as_long_as_the_controller_lives_even_without_its_head(run: Run) -> None:
    run.start(command=(PYTHON, str(run.program), "stubborn"))
    run.trains(0)
    run.head.kill()
    run.head.wait()
    code, words = run.start(command=(PYTHON, str(run.program), "stubborn")).ended()
    assert code == 2
    assert "is looked after already" in words
    os.kill(run.trains(0), 9)
    run.all_gone()


@pytest.mark.parametrize("options", [("--replicas=2",), ("--name=other",), ("--env", "A=1")])
def test_a_folder_that_holds_another_run_is_refused_and_left_alone(run: Run, options: tuple[str, ...]) -> None:
    run.start(command=("true",))
    assert run.ended()[0] == 0
    before = {path: path.read_bytes() for path in run.paths.root.rglob("*") if path.is_file()}
    code, words = run.start(*options, command=("true",)).ended()
    assert code == 2
    assert "holds another run" in words
    assert {path: path.read_bytes() for path in run.paths.root.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema": 1, "nmae": "x"}', '{"schema": 99}'])
def test_a_damaged_run_json_is_one_sentence(run: Run, damage: str) -> None:
    run.paths.create()
    run.paths.spec.write_text(damage)
    code, words = run.start(command=("true",)).ended()
    assert code == 2
    assert words.startswith("error: ")
    assert "Traceback" not in words
    assert run.paths.spec.read_text() == damage


def test_a_run_goes_on_in_its_folder_whatever_was_damaged_there_and_overwrites_nothing(run: Run) -> None:
    script = ("sh", "-c", "echo attempt $SLURM_FT_ATTEMPT")
    run.start(command=script)
    assert run.ended()[0] == 0
    run.paths.state.write_text('{"half": ')
    with run.paths.events.open("a") as file:
        file.write('{"t":1795996111.54,"event":"rank_fai')
    before = run.paths.events.read_bytes()
    host, port = run.paths.endpoint.read_text().removeprefix("tcp://").split(":")
    with socket.socket() as stranger:  # and the channel's port is somebody else's now
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind((host, int(port)))
        stranger.listen()
        run.start(command=script)
        assert run.ended()[0] == 0
    assert run.paths.events.read_bytes().startswith(before)
    assert not run.paths.endpoint.read_text().endswith(f":{port}")
    assert run.state()["ended"] == 0
    assert [run.log(0, attempt) for attempt in (1, 2)] == ["attempt 1\n", "attempt 2\n"]
    assert [event.data["step"] for event in run.events(Kind.STEP_LAUNCHED)] == [1, 2]
    assert len({event.data["session"] for event in run.events(Kind.RUN_STARTED)}) == 2


@pytest.mark.parametrize("damage", [b'{"half": ', b"\xff\xfe\0"])
def test_a_damaged_state_json_is_replaced_and_readers_do_without_it(run: Run, damage: bytes) -> None:
    run.start()
    run.trains(0)
    wait_until(run.paths.state.exists)
    run.paths.state.write_bytes(damage)
    out = run.call("status", str(run.paths.root), "--json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)
    wait_until(lambda: run.paths.state.read_bytes() != damage)
    assert run.state()["replicas"][0]["state"] == "TRAINING"
    assert run.finished() == 0


def test_requests_that_are_nonsense_are_noted_and_taken_away(run: Run) -> None:
    run.start()
    run.trains(0)
    requests = ("{", "[]", '{"id": "x"}', '{"id":"x","replica":"y","kind":"kill"}')
    for number, text in enumerate(requests):
        (run.paths.control / f"{number}.json").write_text(text)

    def complaints() -> int:
        """A disk that was slow for a while is noted too."""
        return sum("waited in memory" not in event.data["text"] for event in run.events(Kind.NOTE))

    wait_until(lambda: complaints() == len(requests))
    assert list(run.paths.control.iterdir()) == []
    (run.paths.control / "e.json").write_text('{"id":"x","replica":9,"kind":"kill"}')
    assert run.until(Kind.INJECTED).data["error"] == "there is no replica 9"
    assert run.finished() == 0


def test_nothing_of_ours_but_the_run_folder_is_written(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    run.environment |= {"HOME": str(home), "TMPDIR": str(home)}
    run.start(command=("true",))
    assert run.ended()[0] == 0
    assert list(home.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"home", run.paths.root.name, run.program.name}


def test_the_head_needs_no_terminal_and_says_where_the_folder_is(run: Run) -> None:
    out = subprocess.run(
        run.argv(command=("true",)),
        env=run.environment,
        cwd=run.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (out.returncode, out.stdout) == (0, "")
    assert f"run folder: {run.paths.root}" in out.stderr
