import pytest

from slurm_ft import env
from slurm_ft.agent.environ import Place, rank_environment

PLACE = Place(
    run="/runs/my run",
    replica=2,
    replicas=4,
    min_replicas=3,
    attempt=5,
    rank=9,
    local_rank=1,
    ranks=16,
    ranks_per_host=8,
    first_host="10.0.0.7",
    port=23456,
    socket="@slurm-ft-1",
    lighthouse="http://127.0.0.1:4711",
    error_file="/runs/my run/errors/2-5-9.json",
    scratch="/scratch/me",
)
CONTRACT = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "23456",
    "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:4711",
    "REPLICA_GROUP_ID": "2",
    "NUM_REPLICA_GROUPS": "4",
    "SLURM_FT_RUN": "/runs/my run",
    "SLURM_FT_SCRATCH": "/scratch/me",
    "SLURM_FT_REPLICA": "2",
    "SLURM_FT_ATTEMPT": "5",
    "SLURM_FT_SOCKET": "@slurm-ft-1",
    "SLURM_FT_MIN_REPLICAS": "3",
    "TORCHELASTIC_ERROR_FILE": "/runs/my run/errors/2-5-9.json",
}


def test_a_rank_sees_the_whole_contract() -> None:
    assert rank_environment({}, PLACE, {}).items() >= CONTRACT.items()


def test_what_the_agent_sets_is_what_the_contract_names() -> None:
    named = {variable.name for variable in env.VARIABLES if variable.set_by == "agent"}
    extra = {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "RES_OPTIONS", "RUST_LOG", "THP_MEM_ALLOC_ENABLE", "no_proxy",
             "NO_PROXY"}  # fmt: skip
    assert set(rank_environment({}, PLACE, {})) == named | extra


@pytest.mark.parametrize(
    "name", ["TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS", "OMP_NUM_THREADS", "RUST_LOG",
             "PYTHONUNBUFFERED", "RES_OPTIONS", "THP_MEM_ALLOC_ENABLE"]
)  # fmt: skip
def test_a_value_of_the_users_own_wins_for_torchfts_variables_and_our_defaults(name: str) -> None:
    assert rank_environment({name: "mine"}, PLACE, {})[name] == "mine"
    assert rank_environment({name: ""}, PLACE, {})[name] == ""


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_FT_ATTEMPT", "TORCHELASTIC_ERROR_FILE"])
def test_what_is_left_from_an_outer_launcher_does_not_win_over_the_ranks_own_place(name: str) -> None:
    assert rank_environment({name: "outer"}, PLACE, {})[name] == CONTRACT[name]


def test_what_the_spec_sets_wins_over_everything() -> None:
    surroundings = {"OMP_NUM_THREADS": "2", "A": "outer"}
    result = rank_environment(surroundings, PLACE, {"OMP_NUM_THREADS": "9", "A": "it's $HOME", "RANK": "0"})
    assert (result["OMP_NUM_THREADS"], result["A"], result["RANK"]) == ("9", "it's $HOME", "0")


def test_a_run_without_a_lighthouse_names_none() -> None:
    from dataclasses import replace

    assert env.LIGHTHOUSE not in rank_environment({}, replace(PLACE, lighthouse=""), {})


def test_slurms_own_variables_are_neither_set_nor_changed() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_CONF": "/etc/slurm.conf"}
    result = rank_environment(slurm, PLACE, {})
    ours = {name for name in result if name.startswith("SLURM_") and not name.startswith("SLURM_FT_")}
    assert ours == set(slurm)
    assert result.items() >= slurm.items()


# --- proxies (RW-44) -----------------------------------------------------------------------------------


def no_proxy(surroundings: dict[str, str], *hosts: str) -> list[set[str]]:
    result = rank_environment(surroundings, PLACE, {}, hosts)
    return [set(result[name].split(",")) for name in ("no_proxy", "NO_PROXY")]


def test_the_allocations_hosts_are_never_reached_through_a_web_proxy() -> None:
    found = no_proxy({"http_proxy": "http://dead:1"}, "node1", "node2", "10.0.0.7")
    assert found == [{"localhost", "127.0.0.1", "node1", "node2", "10.0.0.7"}] * 2


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_the_users_own_exceptions_hold_whichever_spelling_a_client_reads(name: str) -> None:
    """Many clients read the small spelling first; setting it must not hide the user's capital one."""
    assert no_proxy({name: "10.0.0.0/8,wandb.site"}, "node1") == [
        {"10.0.0.0/8", "wandb.site", "localhost", "127.0.0.1", "node1"}
    ] * 2  # fmt: skip


def test_a_name_is_listed_once() -> None:
    result = rank_environment({"no_proxy": "node1,localhost"}, PLACE, {}, ["node1", "node1"])
    assert result["no_proxy"].split(",") == ["node1", "localhost", "127.0.0.1"]


def test_exceptions_that_the_spec_sets_are_kept_too() -> None:
    result = rank_environment({}, PLACE, {"no_proxy": "mine"}, ["node1"])
    assert {"mine", "node1"} <= set(result["no_proxy"].split(","))
