"""The benchmarks run: a smoke test on real processes. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from slurm_ft.errors import LaunchError
from slurm_ft.testing.bench.ways import start_lighthouse
from slurm_ft.testing.devcluster_config import find_programs
from tests.waiting import wait_until

BENCH = Path(__file__).parents[2] / "scripts" / "bench"

needs_torchft = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs slurm-ft[train]")


def run(name: str, *arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, BENCH / name, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@needs_torchft
def test_recovery_measures_a_kill_and_says_what_it_left_out(tmp_path):
    figures, plot = tmp_path / "out.json", tmp_path / "out.svg"
    ways = ("--only", "slurm-ft in place, peer", "--only", "slurm-ft spare (host killed)")
    out, words = run("recovery", "--quick", *ways, "--json", str(figures), "--plot", str(plot))
    assert "skipped: slurm-ft spare (host killed): --local" in words
    [one] = json.loads(figures.read_text())["recovery"]["slurm-ft in place, peer"]
    assert one["detected"] >= 0 and 0 <= one["relaunched"] < one["joined"] < one["committed"]
    assert "slurm-ft in place, peer" in out and plot.read_text().startswith("<svg")


def test_recovery_that_measured_nothing_exits_with_1():
    argv = [sys.executable, BENCH / "recovery", "--quick", "--only", "slurm-ft spare (host killed)"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "error: nothing was measured" in done.stderr


@needs_torchft
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_recovery_that_was_cut_short_prints_what_there_is_and_says_so_by_its_exit_code(number, code):
    bench = subprocess.Popen(
        [sys.executable, BENCH / "recovery", "--quick"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: any(children(child) for child in children(bench.pid)), 60, "the first run is under way")
        bench.send_signal(number)
        out, words = bench.communicate(timeout=120)
    finally:
        bench.terminate()
        bench.wait(60)
    assert bench.returncode == code, words
    assert "--quick: only 'slurm-ft in place, peer' is measured; --only names others" in words
    assert "cut short; what there is so far:" in words
    assert "slurm-ft in place, peer" in out


@needs_torchft
def test_a_quick_look_at_whole_runs_is_quick(tmp_path):
    figures = tmp_path / "out.json"
    run("recovery", "--quick", "--goodput", "--json", str(figures))
    found = json.loads(figures.read_text())
    assert set(found["goodput"]["slurm-ft in place, peer"]) == {"0.0", "6.0"}
    assert found["setting"]["replicas"] == 2 and found["setting"]["steps"] * found["setting"]["pace"] < 30


@needs_torchft
def test_rivals_that_need_a_lighthouse_get_one(tmp_path):
    process, address = start_lighthouse(tmp_path)
    try:
        assert process.poll() is None and address.startswith("http://127.0.0.1:")
    finally:
        process.kill()
        process.wait()


@needs_torchft
def test_transport_measures_every_way(tmp_path):
    figures = tmp_path / "out.json"
    out, _ = run("transport", "--quick", "--json", str(figures))
    times = json.loads(figures.read_text())["seconds"]
    assert len(times) == 5 and all(len(seconds) == 1 for seconds in times.values())
    assert all(way in out for way in times)


@needs_torchft
def test_the_floor_of_this_machine_is_measured(tmp_path):
    figures = tmp_path / "out.json"
    out, _ = run("floor", "--mib", "1", "--repeat", "2", "--json", str(figures))
    seconds = json.loads(figures.read_text())["seconds"]
    assert set(seconds) == {"fork", "map", "touch", "quorum"} and all(min(times) > 0 for times in seconds.values())
    assert "fork + map + quorum" in out


def test_launching_many_steps_is_measured_on_a_real_slurm(tmp_path):
    try:
        find_programs()
    except LaunchError as error:
        pytest.skip(f"{error.message} ({error.hint})")
    figures = tmp_path / "out.json"
    run("launch", "--quick", "--json", str(figures))
    found = json.loads(figures.read_text())["figures"]
    assert set(found) == {"an srun each, 4 at once", "one srun for all"}
    assert all(one["all"] > 0 and one["again"] > 0 for [one] in found.values())
