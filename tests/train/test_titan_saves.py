"""`titan` saves when it is asked to, and the run goes on from there in another session."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slurm_ft.events import Event, Kind, read

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))


def start(folder: Path, *titan: str) -> subprocess.Popen[bytes]:
    argv = [SLURM_FT, "run", "--cluster=local", f"--run-dir={folder}", "--replicas=2", "--min-replicas=2"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHFT_"))}
    return subprocess.Popen([*argv, "--", "titan", *titan], env=environ, stderr=subprocess.DEVNULL)


def events(folder: Path, kind: Kind) -> list[Event]:
    return [event for event in read(folder / "events.jsonl") if event.kind is kind]


def until(true: Any, process: subprocess.Popen[bytes], seconds: float = 90.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert process.poll() is None and time.monotonic() < deadline, process.poll()
        time.sleep(0.05)
    return found


def test_a_run_that_is_warned_goes_on_from_its_save_with_the_same_weights(tmp_path: Path) -> None:
    folder, titan = tmp_path / "run", ("--steps", "600", "--sync-steps", "6")
    first = start(folder, *titan)
    try:
        until(lambda: [e for e in events(folder, Kind.COMMIT) if e.data["committed"] and e.data["step"] > 2], first)
        first.send_signal(signal.SIGUSR2)
        assert first.wait(60) == 75
    finally:
        first.kill()
    [ended] = events(folder, Kind.SAVE_ENDED)
    assert ended.data["complete"], ended.data
    step, path = ended.data["step"], Path(ended.data["path"])
    assert path.name == f"step-{step}" and (path / "rank-0.pt").exists()
    assert json.loads((folder / "saved.json").read_text())["saves"][0]["step"] == step
    (folder / "titan" / "saves" / "step-9999").mkdir()  # begun and never finished: not to be taken

    second = start(folder, *titan)
    try:
        after = len(events(folder, Kind.COMMIT))
        until(lambda: [e for e in events(folder, Kind.COMMIT)[after:] if e.data["committed"]], second)
        (folder / "stop").touch()
        assert second.wait(60) == 143
    finally:
        second.kill()
    commits = [e for e in events(folder, Kind.COMMIT) if e.data["attempt"] == 2]
    assert min(e.data["train_step"] for e in commits) > step
    logs = "".join(path.read_text() for path in folder.glob("replicas/*/attempt_2/0.log"))
    assert logs.count(f"resumed from the save of step {step}") == 2
    assert "healed" not in logs
    sums = [line.partition("sum of weights ")[2] for line in logs.splitlines() if "sum of weights" in line]
    assert len(sums) == 2 and len(set(sums)) == 1


def test_replicas_that_all_die_at_once_before_any_save_count_no_step_that_they_did_not_train(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, "--steps", "60000", "--sync-steps", "6")
    try:
        until(lambda: [e for e in events(folder, Kind.COMMIT) if e.data["committed"] and e.data["step"] > 2], run)
        argv = [SLURM_FT, "inject", str(folder), "--kind", "kill", "--replica"]
        for kill in [subprocess.Popen([*argv, str(replica)], stdout=subprocess.DEVNULL) for replica in range(2)]:
            assert kill.wait(30) == 0

        def later(replica: int) -> list[int]:
            commits = [e.data for e in events(folder, Kind.COMMIT) if e.replica == replica]
            return [data["train_step"] for data in commits if data["committed"] and data["attempt"] == 2]

        until(lambda: min(len(later(0)), len(later(1))) > 3, run)
        (folder / "stop").touch()
        assert run.wait(60) == 143
    finally:
        run.kill()
    for steps in map(later, range(2)):
        assert max(b - a for a, b in itertools.pairwise(steps)) <= 6, steps


def test_replicas_that_all_die_at_once_go_on_from_the_last_save_and_not_from_nothing(tmp_path: Path) -> None:
    """Each is back while the other's former self is still in the last quorum, under the name that both keep."""
    folder = tmp_path / "run"
    run = start(folder, "--steps", "60000", "--sync-steps", "6")
    try:
        until(lambda: [e for e in events(folder, Kind.COMMIT) if e.data["committed"] and e.data["step"] > 5], run)
        (folder / "save").touch()
        [saved] = until(lambda: events(folder, Kind.SAVE_ENDED), run)
        step = saved.data["step"]
        assert saved.data["complete"] and step > 0
        argv = [SLURM_FT, "inject", str(folder), "--kind", "kill", "--replica"]
        for kill in [subprocess.Popen([*argv, str(replica)], stdout=subprocess.DEVNULL) for replica in range(2)]:
            assert kill.wait(30) == 0

        def later(replica: int) -> list[Event]:
            commits = [e for e in events(folder, Kind.COMMIT) if e.replica == replica and e.data["committed"]]
            return [e for e in commits if e.data["attempt"] == 2 and e.data["train_step"] > step + 6]

        until(lambda: later(0) and later(1), run)
        (folder / "stop").touch()
        assert run.wait(60) == 143
    finally:
        run.kill()
    logs = [path.read_text() for path in folder.glob("replicas/*/attempt_2/0.log")]
    assert len(logs) == 2 and all(f"resumed from the save of step {step}" in log for log in logs), logs


def test_a_full_disk_is_an_error_of_the_disk_and_is_not_filled_further(tmp_path: Path) -> None:
    """torch closes its archive when a write has failed, and that raises in words of its own."""
    program = f"""
import resource, signal
import torch
from pathlib import Path
from slurm_ft.train import titan_save
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    titan_save.write(Path({str(tmp_path)!r}), 0, 1, {{"weights": torch.zeros(1_000_000)}})
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "File too large\n", done.stderr
    assert list(tmp_path.iterdir()) == []
