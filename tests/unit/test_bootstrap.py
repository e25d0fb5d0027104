"""What the bootstrap does to a program: nothing that it could notice. With real Pythons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import slurm_ft.train
from slurm_ft.agent.command import rank_argv
from slurm_ft.agent.ends import read_error

OURS = ("SLURM_FT", "TORCHELASTIC", "PYTHON")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, code: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))


def call(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=CLEAN | environment, capture_output=True, text=True, timeout=30)


def as_rank(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return call(list(rank_argv([sys.executable, *arguments], sys.executable)), **environment)


def same(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the program does as a rank; it must be the same as without the bootstrap."""
    plain, rank = call([sys.executable, *arguments]), as_rank(*arguments)
    assert (rank.returncode, rank.stdout, rank.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    return rank


PROGRAMS = {
    "arguments and places": """
        import sys
        print(sys.argv, sys.path, sys.flags, __name__, __file__, __package__, __spec__, __doc__)
    """,
    "the main module is the program": """
        import sys, __main__
        x = 3
        print(__main__.x, sys.modules["__main__"].__dict__ is globals(), type(__builtins__))
    """,
    "annotations are values and not texts": """
        import dataclasses, typing
        y: int = 3
        @dataclasses.dataclass
        class Config:
            steps: int = 3
        def f(x: list[int]) -> "str": ...
        print(f.__annotations__, __annotations__, [field.type for field in dataclasses.fields(Config)])
    """,
    "pickling of what the program defines": """
        import pickle
        class Thing:
            pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, pickle.dumps(Thing()))
    """,
    "worker processes that are spawned": """
        import multiprocessing
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2, 3]))
    """,
    "worker processes that are forked": """
        import multiprocessing
        def double(x):
            return 2 * x
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.map(double, [1, 2, 3]))
    """,
    "its own modules beside it": "import helper; print(helper.__file__)",
    "its own source": """
        import inspect
        def f(): return 1
        print(inspect.getsource(f))
    """,
    "warnings of its own": "import warnings; warnings.warn('old', DeprecationWarning)",
    "an exit code": "import sys; sys.exit(77)",
    "words at the exit": "import sys; sys.exit('that is it')",
    "a traceback": """
        def f(x):
            return 1 / x
        f(0)
    """,
    "a traceback with a cause": """
        try:
            {}["x"]
        except KeyError as error:
            raise RuntimeError("no x") from error
    """,
    "a traceback of a group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "a syntax error": "x = (",
    "an exception without words": "assert False",
    "its own excepthook": "import sys; sys.excepthook = lambda *a: print('mine'); 1 / 0",
    "what is done at the exit": "import atexit; atexit.register(print, 'bye'); raise SystemExit(3)",
    "threads that go on": """
        import threading, time
        done = threading.Event()
        threading.Thread(target=lambda: (done.wait(5), print('thread'))).start()
        done.set()
    """,
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "a keyboard interrupt": "raise KeyboardInterrupt",
    "the empty program": "",
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script_does_what_it_does_by_itself(folder: Path, name: str) -> None:
    write(folder / "my code" / "train it's.py", PROGRAMS[name])
    write(folder / "my code" / "helper.py", "")
    same("my code/train it's.py", "a b", "$HOME", "-m", "")


@pytest.mark.parametrize(
    "source",
    [b"# -*- coding: latin-1 -*-\nprint('\xfc')\n", b"\xef\xbb\xbfprint('bom')\n", b"print('a')\r\nprint('b')\r\n",
     b"print('no newline')", b"#!/usr/bin/python\nprint('shebang')\n", b"print('\xff')\n"],
)  # fmt: skip
def test_a_script_is_read_as_python_reads_it(folder: Path, source: bytes) -> None:
    (folder / "x.py").write_bytes(source)
    plain, rank = call([sys.executable, "x.py"]), as_rank("x.py")
    assert (rank.returncode, rank.stdout) == (plain.returncode, plain.stdout)


PLACES = "import sys; print(sys.argv, sys.path, __name__, __package__, __spec__ and __spec__.name)"


@pytest.mark.parametrize("flags", [(), ("-u",), ("-P",), ("-I",), ("-B", "-O"), ("-W", "error"), ("-X", "utf8")])
def test_flags_of_python_hold(folder: Path, flags: tuple[str, ...]) -> None:
    write(folder / "code" / "x.py", PLACES + "; print(sys.flags, sys.warnoptions)")
    same(*flags, "code/x.py", "a")
    same(*flags, "-c", PLACES, "a")


def test_code_in_the_command_line(folder: Path) -> None:
    assert same("-c", PLACES, "-m", "a b").stdout.startswith("['-c', '-m', 'a b']")
    same("-c", "def f():\n    1 / 0\nf()")
    same("-c", "import nothing_like_this")


def test_a_module(folder: Path) -> None:
    write(folder / "pkg" / "__init__.py", "")
    write(folder / "pkg" / "mod.py", PLACES)
    write(folder / "pkg" / "__main__.py", "from . import mod\nprint('main')\n" + PLACES)
    write(folder / "pkg" / "bad.py", "def f():\n    1 / 0\nf()\n")
    same("-m", "pkg.mod", "-c", "a b")
    same("-m", "pkg", "a")
    assert as_rank("-m", "pkg.bad").stderr.count("File") == 2  # the program's own, without runpy's


def test_a_module_that_is_not_there(folder: Path) -> None:
    out = as_rank("-m", "nothing.like.this")
    assert out.returncode == 1
    assert "nothing" in out.stderr


def test_workers_that_are_spawned_from_a_module(folder: Path) -> None:
    code = PROGRAMS["worker processes that are spawned"]
    write(folder / "pkg" / "mod.py", code)
    assert same("-m", "pkg.mod").stdout == "[2, 4, 6]\n"


def test_a_folder_and_a_zip_file_with_a_main(folder: Path) -> None:
    write(folder / "app" / "__main__.py", "import part\n" + PLACES)
    write(folder / "app" / "part.py", "print('part')")
    with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
        for name in ("__main__.py", "part.py"):
            archive.write(folder / "app" / name, name)
    same("app", "a")
    same("app.pyz", "a")


def test_a_segmentation_fault_leaves_a_stack_in_the_log(folder: Path) -> None:
    write(folder / "x.py", "import os, signal\ndef here():\n    os.kill(os.getpid(), signal.SIGSEGV)\nhere()\n")
    out = as_rank("x.py")
    assert out.returncode == -11
    assert "Segmentation fault" in out.stderr
    assert 'x.py", line 3 in here' in out.stderr


# --- the error file ----------------------------------------------------------------------------------------------


def fail(folder: Path, code: str, *flags: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    write(folder / "x.py", code)
    error = folder / "error.json"
    return as_rank(*flags, "x.py", TORCHELASTIC_ERROR_FILE=str(error)), error


def test_an_uncaught_exception_is_in_torch_elastics_error_file(folder: Path) -> None:
    out, file = fail(folder, "def f():\n    raise ValueError('no such data')\nf()\n")
    message, traceback = read_error(file)
    assert message == "ValueError: no such data"
    assert traceback == out.stderr
    assert traceback.count("File") == 2  # the program's own frames and none of ours
    assert int(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"]) > 0


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "raise KeyboardInterrupt", "import os; os._exit(3)", "pass"])
def test_an_end_that_is_no_exception_leaves_no_error_file(folder: Path, code: str) -> None:
    _, file = fail(folder, code)
    assert not file.exists()


def test_a_syntax_error_is_in_the_error_file(folder: Path) -> None:
    _, file = fail(folder, "x = (")
    assert read_error(file)[0].startswith("SyntaxError")


def test_an_error_file_that_record_has_made_is_kept(folder: Path) -> None:
    code = """
        import json, os
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": {"message": "from record", "extraInfo": {"py_callstack": "stack"}}}, file)
        raise ValueError("the same again")
    """
    _, file = fail(folder, code)
    assert read_error(file) == ("from record", "stack")


def test_an_error_file_that_cannot_be_written_changes_nothing(folder: Path) -> None:
    write(folder / "x.py", "1 / 0")
    out = as_rank("x.py", TORCHELASTIC_ERROR_FILE="/no/such/folder/e.json")
    assert out.returncode == 1
    assert out.stderr.strip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("text", "found"),
    [('{"message": "plain words"}', ("plain words", "")), ('{"message": {"message": "m"}}', ("m", "")), ("{", ("", "")),
     ('{"message": null}', ("", "")), ("[]", ("", "")), ('{"message": {"message": "m", "extraInfo": null}}', ("m", "")),
     ('{"message": {"message": "m", "extraInfo": {"py_callstack": "abc"}}}', ("m", "abc"))],
)  # fmt: skip
def test_any_error_file_can_be_read(tmp_path: Path, text: str, found: tuple[str, str]) -> None:
    (tmp_path / "e.json").write_text(text)
    assert read_error(tmp_path / "e.json") == found


# --- what is observed --------------------------------------------------------------------------------------------


def observed(
    folder: Path, code: str, *arguments: str, rank: int = 1, **environment: str
) -> tuple[list[dict[str, Any]], str]:
    """The packets that a rank sends, and its output."""
    import socket

    write(folder / "x.py", code)
    name = f"@slurm-ft-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind("\0" + name[1:])
        server.listen()
        server.settimeout(20)
        process = subprocess.Popen(
            rank_argv([sys.executable, *(arguments or ["x.py"])], sys.executable),
            env={
                **CLEAN,
                "SLURM_FT_SOCKET": name,
                "RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        connection, _ = server.accept()
        with connection, process:
            packets = []
            while packet := connection.recv(60_000):
                packets.append(json.loads(packet))
            out, _ = process.communicate(timeout=20)
    return packets, out


TORCHFT = """
    import logging
    logging.basicConfig(level=logging.INFO)
    more = {"job_id": "j", "replica_id": "r0:uuid", "rank": 0, "quorum_id": 7, "step": 3}
    logging.getLogger("torchft_quorums").info("", extra=more)
    logging.getLogger("torchft_commits").info("", extra={**more, "commit_result": True})
    logging.getLogger("torchft_commits").info("", extra={**more, "step": 4, "commit_result": False})
    logging.getLogger("torchft_errors").info("", extra={**more, "error": ValueError("gone")})
    logging.getLogger("mine").info("words of the program")
"""


def test_torchfts_own_records_are_seen_and_not_printed(folder: Path) -> None:
    packets, out = observed(folder, TORCHFT)
    common = {"quorum_id": 7, "torchft_id": "r0:uuid"}
    for packet in packets:
        assert packet.pop("m") > 0
    hello, *news = packets
    assert (hello["type"], hello["rank"]) == ("hello", 1)
    assert news == [
        {"type": "quorum", "step": 3, **common},
        {"type": "commit", "step": 3, "committed": True, **common},
        {"type": "commit", "step": 4, "committed": False, **common},
        {"type": "torchft_error", "error": "gone", **common},
    ]
    assert out == "INFO:mine:words of the program\n"


@pytest.mark.parametrize(
    "words",
    [
        "from slurm_ft.train.progress import report; report(step=3, loss=1.5)",
        "from slurm_ft.train import progress; progress.report(step=3, loss=1.5)",
        "import slurm_ft.train.progress; slurm_ft.train.progress.report(step=3, loss=1.5)",
        "import slurm_ft.train.progress as p; p.report(step=3, loss=1.5)",
    ],
)
def test_a_program_that_reports_does_so_on_the_ranks_one_connection(folder: Path, words: str) -> None:
    packets, out = observed(folder, words)
    assert out == ""
    assert [packet["type"] for packet in packets] == ["hello", "progress"]
    assert (packets[1]["step"], packets[1]["loss"]) == (3, 1.5)


def test_a_python_without_slurm_ft_is_observed_and_can_import_ours(folder: Path) -> None:
    code = "import slurm_ft.train as ours; ours.report(step=1); print(ours.__file__)\n" + textwrap.dedent(TORCHFT)
    packets, out = observed(folder, code, "-S", "-E", "x.py")
    assert [packet["type"] for packet in packets][:2] == ["hello", "progress"], out
    assert len(packets) == 6
    assert slurm_ft.train.__file__ in out.splitlines()


def test_all_that_a_script_needs_of_ours_stands_on_torch_and_torchft_alone(folder: Path) -> None:
    code = "from slurm_ft.train import ft, kept, local_sgd, transport; print(ft.__file__)"
    packages = os.path.dirname(os.path.dirname(torch.__file__))  # without what `site` adds: no slurm_ft
    _, out = observed(folder, code, "-S", "-W", "ignore", "x.py", PYTHONPATH=packages)
    assert out.splitlines()[-1:] == [str(Path(slurm_ft.train.__file__).with_name("ft.py"))], out


def test_a_slurm_ft_of_the_programs_own_python_wins(folder: Path) -> None:
    write(folder / "theirs" / "slurm_ft" / "__init__.py", "")
    code = "import slurm_ft; from slurm_ft.train.progress import report; report(step=1); print(slurm_ft.__file__)"
    packets, out = observed(folder, code, "-S", "x.py", PYTHONPATH=f"{folder}/theirs")
    assert [packet["type"] for packet in packets] == ["hello", "progress"], out
    assert out == f"{folder}/theirs/slurm_ft/__init__.py\n"


def test_a_python_that_is_too_old_for_our_package_is_observed_all_the_same(folder: Path) -> None:
    write(folder / "old" / "sitecustomize.py", "import dataclasses; del dataclasses.dataclass")
    code = "import sys; assert 'slurm_ft.train.save' not in sys.modules\n" + textwrap.dedent(TORCHFT)
    packets, out = observed(folder, code, PYTHONPATH=f"{folder}/old")
    assert len(packets) == 5, out


def test_a_program_that_imports_no_torch_pays_for_none(folder: Path) -> None:
    packets, out = observed(folder, "import sys; print([name for name in sys.modules if 'torch' in name])", rank=0)
    assert (out, len(packets)) == ("[]\n", 1)
