"""The command line and the parts of the torchtitan adapter, without peers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import train_workers as workers

from slurm_ft.train import titan


def test_optimizers_never_serve_a_stale_learning_rate(in_fork):
    in_fork(workers.optimizer_states)


def test_state_goes_from_peer_to_peer_in_place(in_fork):
    in_fork(workers.peer_states)


def test_batches_depend_on_the_step_alone(in_fork, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 30)
    (tmp_path / "b.jsonl").write_text('{"text": "xyz"}\n\n')
    in_fork(workers.loader, str(tmp_path))


def test_the_cpu_stands_in_for_a_gpu(in_fork):
    in_fork(workers.devices)


def test_torchtitans_own_configs_are_taken_over(in_fork):
    in_fork(workers.foreign_config)


def test_replicas_that_begin_again_at_once_count_the_steps_that_they_train(in_fork):
    in_fork(workers.steps_are_counted)


def test_they_synchronise_however_long_a_reduction_may_take(in_fork):
    in_fork(workers.begun_again_with_a_delay)


def test_a_training_goes_on_from_a_checkpoint_that_is_within_an_interval_of_now(in_fork):
    in_fork(workers.disk_steps)


def test_diloco_begins_with_the_weights_that_were_loaded_to_begin_with(in_fork):
    in_fork(workers.disk_weights)


def test_one_that_was_healed_goes_back_to_where_its_donor_does_when_that_was_not_committed(in_fork):
    in_fork(workers.healed_and_not_committed)


def test_one_that_was_healed_in_a_second_try_is_at_the_step_of_its_peers(in_fork):
    in_fork(workers.healed_in_a_second_try)


def test_a_late_replica_looks_for_a_save_until_something_was_committed(in_fork):
    in_fork(workers.late_until_committed)


def test_the_end_of_a_run_is_known(in_fork, tmp_path):
    in_fork(workers.run_ends, str(tmp_path))


def test_a_training_that_is_finished_does_not_fail_because_that_cannot_be_written_down(in_fork, tmp_path):
    in_fork(workers.end_without_a_disk, str(tmp_path))


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["--steps", "25"], "--steps 25 does not end at a synchronisation", "use --steps 30"),
        (["--sync-steps", "5", "--fragments", "2"], "not a multiple of --fragments 2", "use --sync-steps 6"),
        (["--steps", "0"], "'--steps'", "titan -h"),
        (["--mode", "psychic"], "'--mode'", "titan -h"),
        (["--dataset-path", "/no/such"], "'--dataset-path'", "titan -h"),
    ],
)
def test_mistakes_are_named_with_a_hint(words, message, hint, capsys):
    assert titan.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert "hint: " in error and hint in error


def test_per_step_has_no_interval():
    titan.check_schedule(7, 10, 3, "per-step")


@pytest.mark.parametrize("name", ["no_such_module:f", "json:nothing", "os:sep"])
def test_a_config_that_is_not_there(name):
    with pytest.raises(titan.UsageError) as refusal:
        titan.find_config(name)
    assert refusal.value.hint and name in str(refusal.value)


def test_help_has_examples_and_needs_no_torch(tmp_path):
    check = (
        "import sys\nfrom slurm_ft.train import titan\n"
        "assert titan.main(['-h']) == 0\nassert not {'torch', 'torchtitan', 'torchft'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.count("titan --steps") == 2


def test_assets_are_what_the_script_makes():
    script = Path(__file__).resolve().parents[2] / "scripts" / "make_assets"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_that_trained_a_moment_ago_is_not_taken_for_one_that_trains(in_fork):
    in_fork(workers.starts)
