"""Saves and stops of real runs: who is asked, who answers, and who gets which signal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from slurm_ft.events import Kind
from slurm_ft.spec import Policy
from tests.local.running import PYTHON, Run
from tests.waiting import wait_until

SAVES = """
import os, sys, time
from pathlib import Path
from slurm_ft.train import last_save, on_save, report

folder, replica = Path(os.environ["RUN_TEST"]), os.environ["SLURM_FT_REPLICA"]

def save(step):
    time.sleep(float(sys.argv[1]))
    path = folder / f"ckpt-{replica}-{step}"
    path.write_text(str(step))
    return path

on_save(save)
last = last_save()
step = last.step if last else 0
print("starts at", step, flush=True)
while not (folder / "finish").exists():
    step += 1
    report(step=step)
    time.sleep(0.02)
"""

KNOWS_NOTHING = """
import os, signal, sys, time
from pathlib import Path

folder = Path(os.environ["RUN_TEST"])
note = lambda text: (folder / text).touch()

if os.fork() == 0:  # a data loader's worker
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: note(f"worker-got-{n}"))
    note("worker-is-there")
    while True:
        time.sleep(0.05)

asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
while not asked:
    time.sleep(0.02)
note("saved")
"""


def program(run: Run, text: str, *arguments: str) -> tuple[str, ...]:
    run.program.write_text(text)
    return (PYTHON, str(run.program), *arguments)


def test_a_save_is_asked_for_written_marked_and_resumed_from(run: Run) -> None:
    run.start_with(Policy(hang_after=0.0), replicas=2, command=program(run, SAVES, "0"))
    for replica in (0, 1):
        run.until(Kind.PROGRESSED, replica)
    out = run.call("save", str(run.paths.root))
    assert out.returncode == 0, out.stderr
    ended = run.events(Kind.SAVE_ENDED)[-1]
    assert ended.data["complete"] and ended.data["why"] == "written by replicas 0, 1"
    assert len(run.events(Kind.SAVED)) == 2
    assert len(run.events(Kind.RANKS_STARTED)) == 2  # nobody was disturbed
    wait_until(run.paths.saved.exists)
    saved = json.loads(run.paths.saved.read_text())["saves"]
    assert [item["step"] for item in saved] == [ended.data["step"]]
    run.inject(1, "kill")
    run.until(Kind.PROGRESSED, 1, 2)
    wait_until(lambda: f"starts at {ended.data['parts']['1'][0]}" in run.log(1, 2))  # what it saved itself
    assert run.finished() == 0


def test_a_stop_waits_for_a_save_that_takes_longer_than_any_signal_would_leave(run: Run) -> None:
    """RW-25: the grace of a stop is not the time for a checkpoint."""
    policy = Policy(stop_grace=0.3, save_within=10.0)
    run.start_with(policy, command=program(run, SAVES, "1.0"))
    run.until(Kind.PROGRESSED, 0)
    assert run.call("stop", str(run.paths.root)).returncode == 0
    code, words = run.ended()
    assert code == 143, words
    kinds = [e.kind for e in (*run.events(Kind.STOP_REQUESTED), *run.events(Kind.SAVE_ENDED))]
    assert kinds == [Kind.STOP_REQUESTED, Kind.SAVE_ENDED]
    saved = run.events(Kind.SAVE_ENDED)[0]
    assert saved.data["complete"] and (run.folder / f"ckpt-0-{saved.data['step']}").exists()
    assert run.events(Kind.STEP_ENDING)[0].t > saved.t
    assert not run.events(Kind.RANK_FAILED)


def test_a_save_that_does_not_end_in_time_does_not_keep_the_run_from_stopping(run: Run) -> None:
    policy = Policy(stop_grace=0.3, save_within=0.5)
    run.start_with(policy, command=program(run, SAVES, "60"))
    run.until(Kind.PROGRESSED, 0)
    assert run.call("stop", str(run.paths.root)).returncode == 0
    assert run.ended()[0] == 143
    assert run.events(Kind.SAVE_ENDED)[0].data["why"] == "no rank has answered in time"
    assert not run.paths.saved.exists()


def test_before_the_time_limit_a_rank_gets_the_save_signal_and_its_workers_get_none(run: Run) -> None:
    """RW-25, RW-57: the rank saves and leaves by itself; nothing was sent to its data loader's worker."""
    run.start("--save-signal=usr1", command=program(run, KNOWS_NOTHING))
    run.until(Kind.RANKS_STARTED, 0)
    wait_until((run.folder / "worker-is-there").exists)
    wait_until(lambda: _has_handler(run))
    run.head.send_signal(signal.SIGUSR2)
    assert run.ended()[0] == 75
    assert (run.folder / "saved").exists()
    assert not list(run.folder.glob("worker-got-*"))
    assert run.events(Kind.SAVE_ENDED)[0].data["complete"] is False
    assert run.events(Kind.RANK_DONE)  # it ended well, and yet the run has not finished: code 75


def _has_handler(run: Run) -> bool:
    """Does the rank catch SIGUSR1 by now?"""
    ranks = [pid for pid, words in run.ours() if "RUN_TEST" not in words and _is_rank(pid, run)]
    return bool(ranks) and all(_catches(pid, signal.SIGUSR1) for pid in ranks)


def _is_rank(pid: int, run: Run) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return str(run.program).encode() in words and b"SLURM_FT_ATTEMPT=1" in variables and b"bootstrap.py" in words[1]


def _catches(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


def test_a_save_file_of_a_script_that_cannot_save_says_so_and_changes_nothing(run: Run) -> None:
    run.start()
    run.trains(0)
    os.close(os.open(run.paths.save, os.O_CREAT))
    ended = run.until(Kind.SAVE_ENDED)
    assert ended.data["why"] == "no rank can save"
    assert run.call("save", str(run.paths.root)).returncode == 1
    assert run.finished() == 0


def test_ranks_of_one_replica_on_a_real_store_save_the_same_step(run: Run) -> None:
    """Through torch's own TCPStore, which the bootstrap serves."""
    text = (
        SAVES.replace("import os, sys, time", "import os, sys, time, torch.distributed")
        .replace('f"ckpt-{replica}-{step}"', "f\"ckpt-{os.environ['RANK']}-{step}\"")
        .replace(
            "    report(step=step)\n    time.sleep(0.02)", "    torch.distributed.barrier()\n    report(step=step)"
        )
    )
    text = text.replace("on_save(save)", "torch.distributed.init_process_group('gloo')\non_save(save)").replace(
        'while not (folder / "finish").exists():', "while True:"
    )
    run.start_with(Policy(hang_after=0.0, stop_grace=0.5), ranks=2, command=program(run, text, "0"))
    wait_until(lambda: run.events(Kind.PROGRESSED, 0), 60)
    out = run.call("save", str(run.paths.root))
    assert out.returncode == 0, out.stderr
    answers = run.events(Kind.SAVED, 0)
    assert {e.data["rank"] for e in answers} == {0, 1} and len({e.data["step"] for e in answers}) == 1
    run.call("stop", str(run.paths.root))
    assert run.ended()[0] == 143
    assert len(run.events(Kind.RANKS_STARTED)) == 1
