"""How a run gets its keepers, what ranks see of them, and what the report says of states. No process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from observe_histories import History

from slurm_ft import env
from slurm_ft.agent.environ import Place, rank_environment
from slurm_ft.agent.observed import Observed
from slurm_ft.agent.preload import modules_for
from slurm_ft.errors import SpecError
from slurm_ft.events import Event, Kind
from slurm_ft.launch.keepers import KeeperRequest, keeper_argv
from slurm_ft.launch.srun import Allocation
from slurm_ft.observe.ledger import Ledger
from slurm_ft.observe.report import incident_json, incident_lines
from slurm_ft.observe.words import Narrator
from slurm_ft.paths import RunPaths
from slurm_ft.spec import ReplicaSpec, RunSpec

PLACE = ("/run", 1, 2, 1, 3, 0, 0, 1, 1, "host", 1, "sock", "http://l", "/e")


def test_keepers_are_one_step_that_outlives_a_host_of_it() -> None:
    request = KeeperRequest.of(RunPaths("/runs/a run"), ["n1", "n2", "n4"], 1, 900.0)
    argv = keeper_argv(request, Allocation("4711", cpus_per_host=72, gpus_per_host=8))
    assert {"--job-name=sft-keeper-1", "--nodelist=n[1-2,4]", "--ntasks=3", "--mem=0", "--overlap"} <= set(argv)
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--gres=none"} <= set(argv)
    assert argv[-3:] == ["slurm_ft.keeper.server", "--run-dir=/runs/a run", "--orphan-timeout=900"]


def test_a_spec_names_the_modes_that_there_are() -> None:
    with pytest.raises(SpecError, match="one of off, live, snapshot, both"):
        RunSpec("r", ReplicaSpec(("true",), keeper="alive")).validate()


def test_a_rank_finds_its_keeper_and_never_one_of_a_run_around_it() -> None:
    outer = {env.KEEPER: "/outer", env.KEEPER_MODE: "live"}
    ours = rank_environment(outer, Place(*PLACE, keeper="/ours", keeper_mode="both"), {})  # type: ignore[arg-type]
    assert (ours[env.KEEPER], ours[env.KEEPER_MODE]) == ("/ours", "both")
    none = rank_environment(outer, Place(*PLACE), {})  # type: ignore[arg-type]
    assert (none[env.KEEPER], none[env.KEEPER_MODE]) == ("", "off")


def test_a_script_that_keeps_its_state_has_that_imported_ahead(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom slurm_ft.train import keep\n")
    assert "slurm_ft.train.kept" in modules_for(("python", str(script)), gpu=False)
    script.write_text("from slurm_ft.train import progress\n")
    assert modules_for(("python", str(script)), gpu=False) == ()


def test_a_second_word_on_where_the_state_came_from_is_passed_on() -> None:
    sent: list[dict[str, Any]] = []
    news = Observed(2, sent.append)
    for source, step in (("live", 16), ("peer", 24)):
        news.packet(0, {"type": "progress", "m": 0.0, "phase": "healed", "source": source, "source_step": step})
    assert [(message["source"], message["source_step"]) for message in sent] == [("live", 16), ("peer", 24)]


def healed_from(*words: tuple[str, int]) -> History:
    h = History(2)
    for replica in range(2):
        h.launch(0.1, replica).ranks(0.5, replica).joins(1.0, replica).commit(2.0, replica, 1).progressed(2.0, replica)
    h.killed(5.0, 1).cleared(5.1, 1).ranks(5.2, 1, 2, "in place")
    for number, (source, step) in enumerate(words):
        data = {"attempt": 2, "rank": 0, "age": 0.0, "phase": "healed", "source": source, "source_step": step}
        h.at(5.5 + number, Kind.PHASE, 1, **data)
    return h.commit(9.0, 1, 4, attempt=2)


def test_the_report_says_where_a_state_came_from_and_the_last_word_counts() -> None:
    (incident,) = Ledger(healed_from(("live", 16), ("peer", 24)).sorted()).incidents.all
    assert "      state from: a peer (step 24)" in incident_lines(incident, survivors=True)
    assert incident_json(incident)["state"] == {"source": "peer", "step": 24}
    (silent,) = Ledger(healed_from().sorted()).incidents.all
    assert not any("state from" in line for line in incident_lines(silent, survivors=True))
    assert incident_json(silent)["state"] is None


def test_what_happens_to_keepers_is_told_in_words() -> None:
    narrator = Narrator()
    told = [
        narrator.line(Event(1.0, Kind.KEEPER, None, data))
        for data in (
            {"what": "started", "hosts": ["n1"], "pid": 5},
            {"what": "ended", "hosts": ["n1"], "why": "the keeper was killed by SIGKILL"},
        )
    ]
    assert told[0] is None and told[1] is not None
    assert told[1].endswith("the keeper on n1 ended: the keeper was killed by SIGKILL")
