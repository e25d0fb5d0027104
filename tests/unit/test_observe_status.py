import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_histories import T0, golden, healed_run

from slurm_ft.errors import UsageError
from slurm_ft.observe import status
from slurm_ft.observe.ledger import Ledger

STATE: dict[str, Any] = {
    "schema": 1, "t": T0 + 30, "session": "a", "name": "Versuch_für_Öl", "job_id": "4711", "cluster": "slurm",
    "head_host": "node1", "started": T0, "ended": None, "stop": "",
    "replicas": [
        {"id": 0, "state": "TRAINING", "hosts": ["node1", "node2", "node3"], "step": 20, "attempt": 1, "restarts": 0,
         "committed": 20, "loss": 3.25, "tokens": 20480, "phase": "train", "since": T0 + 5, "quorum_id": 2,
         "reason": "it trains since 25 s"},
        {"id": 1, "state": "READY", "hosts": ["node4"], "step": None, "attempt": 2, "restarts": 1, "committed": 3,
         "loss": None, "tokens": None, "phase": None, "since": T0 + 29, "quorum_id": None,
         "reason": "rank 0 was killed by SIGKILL; restarted in place"},
    ],
}  # fmt: skip


def test_the_status_of_a_run_as_text_and_json() -> None:
    snapshot = status.from_state(STATE)
    now = T0 + 31
    lines = [status.headline(snapshot, now), *status.table(snapshot.replicas, now)]
    golden("status.txt", "\n".join(lines) + "\n")
    value = status.to_json(snapshot, now, None, "/runs/x")
    golden("status.json", json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def test_events_and_state_give_the_same_columns() -> None:
    snapshot = status.from_ledger(Ledger(healed_run()), T0 + 40)
    assert snapshot.state() == "DONE:0"
    assert snapshot.elapsed(T0 + 1000) == pytest.approx(26.5)
    assert status.values(snapshot.replicas[2])["RESTARTS"] == "1"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


STATES = st.dictionaries(st.sampled_from([*STATE, "x"]), JSON)
ROWS = st.dictionaries(st.sampled_from(list(STATE["replicas"][0])), JSON)


@given(STATES, ROWS)
def test_a_state_may_hold_anything_and_lack_anything(state: dict[str, Any], row: dict[str, Any]) -> None:
    for value in (state, state | {"replicas": [row, None, 3]}):
        snapshot = status.from_state(value)
        status.headline(snapshot, T0)
        status.table(snapshot.replicas, T0)
        json.dumps(status.to_json(snapshot, T0), allow_nan=False)


def test_old_news_of_a_run_that_goes_on_are_told() -> None:
    snapshot = status.from_state(STATE)
    assert "no news for 42 s" in status.headline(snapshot, T0 + 72)
    assert "no news" not in status.headline(snapshot, T0 + 32)
    assert "no news" not in status.headline(status.from_state(STATE | {"ended": 0}), T0 + 72)


@pytest.mark.parametrize(
    ("change", "alive", "word"),
    [
        ({}, None, "RUNNING"),
        ({"stop": "asked"}, None, "STOPPING"),
        ({}, False, "DEAD"),
        ({"started": None}, False, "WAITING"),
        ({"ended": 0}, None, "DONE:0"),
        ({"ended": 93}, None, "FAILED:93"),
        ({"ended": 143, "stop": "asked"}, None, "STOPPED:143"),
    ],
)
def test_the_state_of_a_run_is_one_word(change: dict[str, Any], alive: bool | None, word: str) -> None:
    assert status.from_state(STATE | change).state(alive) == word


def test_format_and_noheader_choose_what_is_shown() -> None:
    rows = status.from_state(STATE).replicas
    assert status.table(rows, T0, ["REPLICA", "QUORUM"], header=False) == ["0 2", "1 -"]


def test_selecting_replicas_keeps_the_others_out_and_a_wrong_number_is_told() -> None:
    snapshot = status.from_state(STATE)
    assert [row.id for row in status.select(snapshot, "1").replicas] == [1]
    with pytest.raises(UsageError) as caught:
        status.select(snapshot, "0-4")
    assert "no replica 2" in caught.value.message
