"""A rank that hangs is found by its progress, leaves its stacks in its log, and is restarted in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slurm_ft import events
from slurm_ft.events import Event, Kind
from slurm_ft.spec import Policy
from tests.local.running import a_run
from tests.waiting import wait_until

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
PROGRAM = """
import sys, time
from pathlib import Path
from slurm_ft.train.progress import report

def one_step():
    time.sleep(0.05)

step = 0
while not Path(sys.argv[1]).exists():
    step += 1
    one_step()
    report(step)
"""


FINISHES = """
import os, threading
from slurm_ft.train.progress import channel

here = channel()
here.send("quorum", step=0, quorum_id=1)
for step in range(1, 4):
    here.send("commit", step=step, committed=True, quorum_id=1)
if os.environ["SLURM_FT_REPLICA"] == "1":
    threading.Event().wait()
"""
"""As torchft tells of itself. Replica 1 has a part in all steps, and never ends."""


def test_one_that_hangs_when_the_training_is_finished_does_not_hold_the_run_up_for_ever(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        run.program.write_text(FINISHES)
        run.start_with(Policy(hang_after=0.2, kill_grace=0.3, stop_grace=0.3), replicas=2)
        assert run.finished() == 0
        assert run.until(Kind.RANK_FAILED, 1).data["hung"] is True
        assert run.events(Kind.STEP_ENDING, 1)[-1].data["why"] == "the training was finished by its peers"


def test_a_stopped_rank_is_found_and_restarted_and_its_stacks_are_kept(tmp_path: Path) -> None:
    program, run, end = tmp_path / "program.py", tmp_path / "run", tmp_path / "end"
    program.write_text(PROGRAM)
    argv = [SLURM_FT, "run", "--cluster", "local", "--replicas", "2", "--hang-after", "1", "--run-dir", str(run)]
    head = subprocess.Popen([*argv, "--", sys.executable, str(program), str(end)], stdin=subprocess.DEVNULL)

    def found(kind: Kind, replica: int) -> list[Event]:
        return [e for e in events.read(run / "events.jsonl") if e.kind is kind and e.replica == replica]

    try:
        wait_until(lambda: found(Kind.PROGRESSED, 1), 60)
        subprocess.run([SLURM_FT, "inject", str(run), "--replica", "1", "--kind", "stop"], check=True, timeout=30)
        wait_until(lambda: found(Kind.RANKS_STARTED, 1)[1:], 60, "replica 1 is restarted")
        wait_until(lambda: found(Kind.PROGRESSED, 1)[1:], 60, "replica 1 trains again")
        end.touch()
        assert head.wait(60) == 0
    finally:
        head.terminate()
        head.wait(30)
    (failure,) = found(Kind.RANK_FAILED, 1)
    assert failure.data["hung"] is True
    assert failure.data["what"].startswith("it has stood still for")
    assert failure.data["what"].endswith(f"at step {failure.data['train_step']}")  # another step is another failure
    assert 'program.py", line' in (run / "replicas" / "1" / "attempt_1" / "0.log").read_text()
    assert not found(Kind.RANK_FAILED, 0)
