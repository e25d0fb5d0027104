"""Replicas of torchtitan that are killed, over a real Lighthouse: weights, steps and the end of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import replicas
import train_workers as workers

STEPS, SYNC = 24, 6
DILOCO = ("--steps", str(STEPS), "--sync-steps", str(SYNC), "--lr", "2e-3")
# A killed replica loses at most one interval of one replica's work.
LOSS_TOLERANCE = 0.05


def is_report(event):
    """Is this the report of a step that has ended? One that begins is reported too, without a phase, and the phase
    after a checkpoint, without a step."""
    return event["type"] == "progress" and event.get("phase") == "train" and "step" in event


def step_of(replica, step, attempt=None):
    def wanted(event):
        here = is_report(event) and event["replica"] == replica and event["step"] >= step
        return here and attempt in (None, event["attempt"])

    return wanted


def healed(event):
    return event.get("phase") == "healed"


def report_after(run, heal):
    """The report of the step in which a replica healed."""
    later = run.agent.events[run.agent.events.index(heal) :]
    return next(e for e in later if is_report(e) and (e["replica"], e["rank"]) == (heal["replica"], heal["rank"]))


def digests(run):
    """Per (rank, step): the set of all replicas' digests."""
    found = defaultdict(set)
    for event in run.agent.events:
        if event["type"] == "digest":
            found[event["rank"], event["step"]].add(event["value"])
    return found


def assert_equal_replicas(run, after=0):
    found = digests(run)
    assert found
    assert all(len(values) == 1 for (_, step), values in found.items() if step > after), found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The mean final loss of two replicas that nobody kills."""
    run = replicas.Run(tmp_path_factory.mktemp("undisturbed"), 2)
    try:
        for replica in range(2):
            run.start(workers.titan, *DILOCO, replica=replica)
        assert run.join() == [0, 0], run.log(0)
        assert_equal_replicas(run)
        return replicas.mean_final_loss(run.agent.events, 2, STEPS, last=SYNC)
    finally:
        run.close()


def test_diloco_killed_between_synchronisations(start_run, undisturbed):
    run = start_run(2, min_replicas=2)  # the others wait for the victim's return
    [kept] = run.start(workers.titan, *DILOCO, replica=0)
    [victim] = run.start(workers.titan, *DILOCO, replica=1)
    run.agent.wait(step_of(1, SYNC + 2))
    victim.kill()
    victim.join()
    [again] = run.start(workers.titan, *DILOCO, replica=1)
    assert run.join([kept, again]) == [0, 0], run.log(0) + run.log(1)

    [heal] = [event for event in run.agent.events if healed(event)]
    report = report_after(run, heal)
    assert (heal["replica"], report["step"] % SYNC, report["loss"]) == (1, 0, None)
    steps = [event["step"] for event in run.agent.events if step_of(1, 0, attempt=3)(event)]
    # It asks to join after one step, not after an interval that would be thrown away.
    assert [step for step in steps if step < report["step"]] in ([], [1])
    assert steps[-1] == STEPS
    assert_equal_replicas(run)
    loss = replicas.mean_final_loss(run.agent.events, 2, STEPS, last=SYNC)
    assert loss == pytest.approx(undisturbed, rel=LOSS_TOLERANCE)
    assert "Traceback" not in run.log(0)


def test_diloco_killed_in_mid_synchronisation_loses_no_work(start_run):
    run = start_run(3)
    survivors = [run.start(workers.titan, *DILOCO, replica=replica)[0] for replica in range(2)]
    [victim] = run.start(workers.titan_that_dies, 1, *DILOCO, replica=2)
    [death] = run.agent.wait(lambda event: event["type"] == "dying")
    assert run.join([*survivors, victim]) == [0, 0, -9], run.log(0)

    failed = [event for event in run.agent.events if event["type"] == "commit" and not event["committed"]]
    assert failed and all(event["m"] > death["m"] for event in failed)
    for replica in range(2):
        steps = [event["step"] for event in run.agent.events if step_of(replica, 1)(event)]
        assert steps == list(range(1, STEPS + 1))  # nobody went back
    assert_equal_replicas(run, after=SYNC)


@pytest.mark.parametrize("kind", ["stock", "mended"])
def test_a_healed_replica_keeps_the_weights_of_its_peers(start_run, kind):
    work = workers.titan_stock_state if kind == "stock" else workers.titan
    options = ("--mode", "per-step", "--steps", "16", "--seq-len", "16", "--batch-size", "1")
    run = start_run(2, min_replicas=2)  # the others wait for the victim's return
    [kept] = run.start(work, *options, replica=0)
    [victim] = run.start(work, *options, replica=1)
    run.agent.wait(step_of(1, 4))
    victim.kill()
    victim.join()
    [again] = run.start(work, *options, replica=1)
    assert run.join([kept, again]) == [0, 0], run.log(0) + run.log(1)

    assert not any(event["threaded"] for event in run.agent.events if event["type"] == "digest")
    [heal] = [event for event in run.agent.events if healed(event)]
    after = {step: len(values) for (_, step), values in digests(run).items() if step >= report_after(run, heal)["step"]}
    both = [event["step"] for event in run.agent.events if event["type"] == "digest" and event["attempt"] == 3]
    assert both[0] == report_after(run, heal)["step"] and len(both) > 2
    if kind == "stock":
        # Without the mend: the donor's state holds the learning rate of its start.
        assert {after[step] for step in both} == {2}
    else:
        assert set(after.values()) == {1}


def test_below_the_minimum_no_step_is_lost_or_counted(start_run):
    options = ("--steps", "4", "--sync-steps", "2", "--min-replicas", "2", "--seq-len", "16")
    options += ("--", "--fault_tolerance.gather_s", "0")
    run = start_run(2)
    [first] = run.start(workers.titan, *options, replica=0)
    run.agent.wait(lambda event: event["type"] == "commit" and not event["committed"], count=4)
    assert not any(step_of(0, 3)(event) for event in run.agent.events)
    [second] = run.start(workers.titan, *options, replica=1)
    assert run.join([first, second]) == [0, 0], run.log(0)
    assert {step for _, step in digests(run)} == {2, 4}
    assert_equal_replicas(run)


def test_local_sgd_below_the_minimum_waits_and_trains_nothing_twice(start_run):
    """It goes back to nothing, so a second round over the same steps would come on top of the first."""
    options = ("--mode", "local-sgd", "--steps", "4", "--sync-steps", "2", "--min-replicas", "2", "--seq-len", "16")
    run = start_run(2)
    [first] = run.start(workers.titan, *options, "--", "--fault_tolerance.gather_s", "0", replica=0)
    run.agent.wait(lambda event: event["type"] == "commit" and not event["committed"], count=7)
    trained = [event["step"] for event in run.agent.events if is_report(event)]
    assert trained == [1, 2]
    [second] = run.start(workers.titan, *options, "--", "--fault_tolerance.gather_s", "0", replica=1)
    assert run.join([first, second]) == [0, 0], run.log(0) + run.log(1)
    assert [event["step"] for event in run.agent.events if step_of(0, 3)(event)] == [3, 4]
    assert_equal_replicas(run)


@pytest.mark.parametrize("mode", [("--mode", "local-sgd"), ("--fragments", "2")], ids=["local-sgd", "fragments"])
def test_other_ways_to_synchronise_heal_too(start_run, mode):
    options = ("--steps", "16", "--sync-steps", "4", "--seq-len", "16", *mode)
    run = start_run(2, min_replicas=2)  # the others wait for the victim's return
    [kept] = run.start(workers.titan, *options, replica=0)
    [victim] = run.start(workers.titan, *options, replica=1)
    run.agent.wait(step_of(1, 5))
    victim.kill()
    victim.join()
    [again] = run.start(workers.titan, *options, replica=1)
    assert run.join([kept, again]) == [0, 0], run.log(0) + run.log(1)
    [heal] = [event for event in run.agent.events if healed(event)]
    assert report_after(run, heal)["step"] % 2 == 0
    if "local-sgd" in mode:
        assert_equal_replicas(run)


def test_ranks_of_one_replica_heal_from_different_donors(start_run):
    # Three replicas of two ranks: at a heal, rank 0 and rank 1 take their shards from different replicas.
    options = ("--steps", "9", "--sync-steps", "3", "--seq-len", "16", "--batch-size", "1")
    run = start_run(3, min_replicas=3)  # the others wait for the victim's return
    kept = [process for replica in range(2) for process in run.start(workers.titan, *options, replica=replica, ranks=2)]
    victims = run.start(workers.titan, *options, replica=2, ranks=2)
    run.agent.wait(step_of(2, 4), count=2)
    for victim in victims:
        victim.kill()
        victim.join()
    again = run.start(workers.titan, *options, replica=2, ranks=2)
    assert run.join([*kept, *again]) == [0] * 6, run.log(0) + run.log(2)
    assert {event["rank"] for event in run.agent.events if healed(event)} == {0, 1}
    assert_equal_replicas(run)
    donors = {replica for replica in range(3) if "peers need recovery from us" in run.log(replica)}
    assert donors == {0, 1}


def test_whoever_starts_after_the_end_stops_at_once(start_run):
    run = start_run(2)
    options = ("--steps", "2", "--sync-steps", "2", "--seq-len", "16", "--", "--fault_tolerance.gather_s", "0")
    run.start(workers.titan, *options, replica=0)
    assert run.join() == [0], run.log(0)
    run.start(workers.titan, *options, replica=1)
    assert run.join() == [0, 0]
    assert "nothing is left to do" in run.log(1)
    assert not any(step_of(1, 1)(event) for event in run.agent.events)


def test_checkpoints_on_disk_are_written_by_one_and_taken_up(start_run):
    def options(steps):
        return ("--steps", str(steps), "--sync-steps", "2", "--seq-len", "16", "--checkpoint.enable",
                "--checkpoint.interval", "2", "--checkpoint.no-last-save-model-only")  # fmt: skip

    run = start_run(2)
    for replica in range(2):
        run.start(workers.titan, *options(2), replica=replica)
    assert run.join() == [0, 0], run.log(0) + run.log(1)
    assert [path.name for path in (Path(run.folder) / "titan" / "checkpoint").iterdir()] == ["step-2"]
    phases = [(event["attempt"], event["phase"]) for event in run.agent.events if event.get("phase")]
    (writer,) = {attempt for attempt, phase in phases if phase == "checkpoint"}
    assert [phase for attempt, phase in phases if attempt == writer][-2:] == ["checkpoint", "train"]
    later = [run.start(workers.titan, *options(4), replica=replica)[0] for replica in range(2)]
    assert run.join(later) == [0, 0], run.log(0) + run.log(1)
    steps = {event["step"] for event in run.agent.events if event["attempt"] > 2 and is_report(event)}
    assert steps == {3, 4}  # they went on from step 2
    assert_equal_replicas(run)


def test_alone_under_the_bootstrap(tmp_path):
    bootstrap = Path(workers.__file__).parents[2] / "slurm_ft" / "train" / "bootstrap.py"
    environment = {**os.environ, "MASTER_PORT": str(replicas.free_port())}
    words = ["-m", "slurm_ft.train.titan", "--steps", "3", "--sync-steps", "3", "--seq-len", "16",
             "--dataset-path", str(tmp_path), "--", "--training.max_norm", "0.5", "--debug.print_config"]  # fmt: skip
    text = "A healthy host keeps its word. " * 60
    (tmp_path / "own.txt").write_text(text)
    done = subprocess.run(
        [sys.executable, str(bootstrap), *words],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "step:  3" in done.stdout
    assert "Traceback" not in done.stdout
