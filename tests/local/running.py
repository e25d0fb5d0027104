"""Real runs on this machine for the tests of this folder, with a program that trains nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_ft.agent.process import die_with_parent
from slurm_ft.controller.head import open_run
from slurm_ft.events import Event, Kind, read
from slurm_ft.launch import local
from slurm_ft.paths import RunPaths
from slurm_ft.spec import Policy, ReplicaSpec, RunSpec
from tests.processes import lives
from tests.waiting import wait_until

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
PYTHON = sys.executable
SECONDS = 60.0
"""No single thing of a test may take longer."""

TRAINS = """
import os, signal, sys, time
from pathlib import Path
from slurm_ft.train.progress import report

folder, replica, attempt, rank = (os.environ[n] for n in ("RUN_TEST", "SLURM_FT_REPLICA", "SLURM_FT_ATTEMPT", "RANK"))
if "stubborn" in sys.argv[1:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(folder, f"pid-{replica}-{attempt}-{rank}.new").write_text(str(os.getpid()))
os.rename(f"{folder}/pid-{replica}-{attempt}-{rank}.new", f"{folder}/pid-{replica}-{attempt}-{rank}")
step = 0
while not Path(folder, "finish").exists():
    step += 1
    report(step=step, loss=1 / step, tokens=100 * step)
    time.sleep(0.02)
"""

CRASHES = """
def load(name):
    raise ValueError(f"no such data: {name}")

load("corpus")
"""


def environment() -> dict[str, str]:
    """Ours without what a surrounding run or job would have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHFT_"))}


class Run:
    """A run whose program trains until `finish` is called. `folder` is the test's, `paths` the run's."""

    def __init__(self, folder: Path, name: str = "my run (v2)") -> None:
        self.folder = folder
        self.paths = RunPaths(folder / name)
        self.program = folder / "train it's.py"
        self.program.write_text(TRAINS)
        self.environment = environment() | {"RUN_TEST": str(folder)}
        self._heads: list[subprocess.Popen[str]] = []

    # --- starting and ending -------------------------------------------------------------------------------

    def argv(self, *options: str, command: Sequence[str] = ()) -> list[str]:
        command = command or (PYTHON, str(self.program))
        return [SLURM_FT, "run", "--cluster", "local", f"--run-dir={self.paths.root}", *options, "--", *command]

    def start(self, *options: str, command: Sequence[str] = ()) -> Run:
        """Begin it with `slurm-ft run`."""
        return self._begin(self.argv(*options, command=command))

    def start_with(
        self, policy: Policy, replicas: int = 1, ranks: int = 1, command: Sequence[str] = (), keeper: str = "off"
    ) -> Run:
        """Begin it with a policy that the command line does not offer."""
        command = tuple(command) or (PYTHON, str(self.program))
        spec = RunSpec("train", ReplicaSpec(command, 1, ranks, keeper=keeper), replicas, cluster="local", policy=policy)
        open_run(self.paths, spec.validate())
        return self._begin([PYTHON, "-m", "slurm_ft.submit.local_run", str(self.paths.root), "L1"])

    def _begin(self, argv: list[str]) -> Run:
        head = subprocess.Popen(
            argv,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid(), signal.SIGTERM),  # a test process that is killed leaves no run
        )
        self._heads.append(head)
        return self

    @property
    def head(self) -> subprocess.Popen[str]:
        return self._heads[-1]

    def finish(self) -> None:
        """Let the program end well."""
        (self.folder / "finish").touch()

    def ended(self) -> tuple[int, str]:
        """The head's exit code and words, when it has ended."""
        _, words = self.head.communicate(timeout=SECONDS)
        return self.head.returncode, words

    def finished(self) -> int:
        self.finish()
        return self.ended()[0]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A slurm-ft command in another shell."""
        return subprocess.run(
            [SLURM_FT, *arguments],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def inject(self, replica: int, kind: str, rank: int = 0) -> None:
        out = self.call("inject", str(self.paths.root), f"--replica={replica}", f"--rank={rank}", f"--kind={kind}")
        assert out.returncode == 0, out.stderr

    # --- what there is -------------------------------------------------------------------------------------

    def events(self, kind: Kind, replica: int | None = None) -> list[Event]:
        found = [event for event in read(self.paths.events) if event.kind is kind]
        return found if replica is None else [event for event in found if event.replica == replica]

    def until(self, kind: Kind, replica: int | None = None, count: int = 1) -> Event:
        """The `count`-th event of this kind, as soon as there is one."""

        def there() -> list[Event]:
            assert self.head.poll() is None or self.events(Kind.RUN_ENDED), self._words()
            found = self.events(kind, replica)
            return found if len(found) >= count else []

        return wait_until(there, SECONDS, f"{count} {kind} of replica {replica}")[count - 1]

    def noted(self, *words: str) -> str:
        """A note with all these words, as soon as there is one; others may stand beside it."""

        def there() -> str:
            texts = (event.data["text"] for event in self.events(Kind.NOTE))
            return next((text for text in texts if all(word in text for word in words)), "")

        return wait_until(there, SECONDS, f"a note with {words}")

    def _words(self) -> str:
        log = self.paths.controller_log
        return f"{self.ended()} {log.read_text() if log.exists() else ''}"

    def attempts(self, replica: int) -> list[tuple[int, str]]:
        """The starts of a replica's ranks: number and rung."""
        starts = self.events(Kind.RANKS_STARTED, replica)
        return [(event.data["attempt"], event.data["rung"]) for event in starts]

    def trains(self, replica: int, attempt: int = 1, rank: int = 0) -> int:
        """The number of a rank's process, as soon as its replica trains."""
        wait_until(
            lambda: [e for e in self.events(Kind.PROGRESSED, replica) if e.data["attempt"] == attempt],
            SECONDS,
            f"attempt {attempt} of replica {replica} trains",
        )
        file = self.folder / f"pid-{replica}-{attempt}-{rank}"
        return int(wait_until(lambda: file.exists() and file.read_text(), SECONDS))

    def agent(self, replica: int) -> int:
        return int(self.until(Kind.AGENT_JOINED, replica).data["agent_pid"])

    def controller(self) -> int:
        return int(self.until(Kind.CONTROLLER_STARTED).data["pid"])

    def lighthouse(self) -> int:
        return wait_until(lambda: [pid for pid, words in self.ours() if "slurm_ft.controller.lighthouse" in words])[0]

    def state(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.paths.state.read_text())
        return value

    def log(self, replica: int, attempt: int, rank: int = 0) -> str:
        return self.paths.rank_log(replica, attempt, rank).read_text()

    def ours(self) -> list[tuple[int, str]]:
        """Head, controller and Lighthouse of this run: those with its folder on their command line; and all
        that bears the mark of one of its steps."""
        found = [(member.pid, member.mark) for member in local.members(f"{self.paths.root}#")]
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                words = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if lives(int(name)) and any(str(self.paths.root) in word for word in words):
                found.append((int(name), " ".join(words)))
        return found

    def all_gone(self, seconds: float = SECONDS) -> bool:
        """True as soon as no process of the run is left."""
        wait_until(lambda: not self.ours(), seconds, "no process of the run is left")
        return True

    def close(self) -> list[tuple[int, str]]:
        """End what is left; gives what that was."""
        left = self.ours()
        for head in self._heads:
            if head.poll() is None:
                head.kill()
            head.communicate()
        for pid, _ in self.ours():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.all_gone()
        return left


@contextmanager
def a_run(folder: Path) -> Iterator[Run]:
    """A run of which nothing may be left when the test is over."""
    run = Run(folder)
    try:
        yield run
        for head in run._heads:
            head.communicate(timeout=5.0)
        assert run.all_gone(5.0)
    finally:
        run.close()
        shutil.rmtree(run.paths.root, ignore_errors=True)
