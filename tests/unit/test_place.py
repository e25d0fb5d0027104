import os
import socket
import stat
from pathlib import Path

import pytest

from slurm_ft.agent import address
from slurm_ft.errors import LaunchError, UsageError
from slurm_ft.launch.session import Session
from slurm_ft.launch.srun import allocation_from
from slurm_ft.spec import ReplicaSpec, RunSpec
from slurm_ft.submit.place import allocation_place, head_address, local_place

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[1-3]", "SLURMD_NODENAME": "node1"}


@pytest.fixture
def no_slurm(tmp_path: Path) -> dict[str, str]:
    return {"PATH": str(tmp_path)}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Slurm that knows where node1 is."""
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\necho "NodeName=$4 Arch=x86_64 NodeAddr=127.0.0.9 NodeHostName=elsewhere"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    return {"PATH": path}


def test_a_local_place_has_as_many_hosts_as_the_run_needs() -> None:
    place = local_place(RunSpec("x", ReplicaSpec(("true",), hosts=2), replicas=2, spares=1, cluster="local"), "L1")
    assert place.hosts == ("local0", "local1", "local2", "local3", "local4")
    assert (place.job_id, place.address) == ("L1", "127.0.0.1")


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_without_an_allocation_it_says_what_to_do(missing: str) -> None:
    with pytest.raises(UsageError, match="no Slurm allocation") as caught:
        allocation_place({name: value for name, value in JOB.items() if name != missing})
    assert "--cluster local" in caught.value.hint


def test_the_place_of_a_job_is_slurms_word(scontrol: dict[str, str]) -> None:
    place = allocation_place({**JOB, **scontrol, "SLURM_JOB_NUM_NODES": "3"})
    assert place.hosts == ("node1", "node2", "node3")
    assert (place.job_id, place.host, place.address) == ("4711", "node1", "127.0.0.9")


def test_a_hostlist_that_does_not_hold_as_many_hosts_as_slurm_says_is_not_believed(scontrol: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="says that the job has 4 nodes") as caught:
        allocation_place({**JOB, **scontrol, "SLURM_JOB_NUM_NODES": "4"})
    assert "holds 3" in caught.value.message


def test_a_hostlist_that_cannot_be_parsed_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        allocation_place({**JOB, "SLURM_JOB_NODELIST": "node[1-"})


def test_the_users_address_comes_first(scontrol: dict[str, str]) -> None:
    assert head_address("node1", {**scontrol, "SLURM_FT_ADDRESS": "127.0.0.5"}) == "127.0.0.5"


def test_an_address_that_cannot_be_resolved_says_what_to_set() -> None:
    with pytest.raises(LaunchError, match="cannot be used") as caught:
        head_address("node1", {"SLURM_FT_ADDRESS": "no such host.invalid"})
    assert "SLURM_FT_ADDRESS" in caught.value.hint


def test_without_scontrol_this_hosts_own_name_is_used(
    no_slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", no_slurm["PATH"])
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.7")
    assert head_address("node1", no_slurm) == "127.0.0.7"


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names as on Debian: a host's own stands for 127.0.1.1."""
    names = {"node1": "127.0.1.1", "node2": "127.0.0.2", "node3": "169.254.7.7"}

    def getaddrinfo(name: str, port: object, **_: object) -> list[tuple[object, ...]]:
        if name not in names and not name[0].isdigit():
            raise OSError("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names.get(name, name), 0))]

    monkeypatch.setattr(address.socket, "getaddrinfo", getaddrinfo)
    return names


def test_the_address_of_a_name_that_stands_for_loopback_is_that_towards_another_host(
    debian: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "address_towards", lambda endpoint: {"udp://127.0.0.2:9": "10.1.0.1"}[endpoint])
    assert head_address("node1", {"SLURM_FT_ADDRESS": "node1"}, ["node2"]) == "10.1.0.1"
    assert head_address("node1", {"SLURM_FT_ADDRESS": "node1"}) == "127.0.1.1"  # nobody else need reach it
    assert head_address("node1", {"SLURM_FT_ADDRESS": "127.0.0.5"}, ["node2"]) == "127.0.0.5"  # said so in figures


@pytest.mark.parametrize("name", ["node1", "node3"])
def test_an_address_that_no_other_host_reaches_is_refused(debian: dict[str, str], name: str) -> None:
    with pytest.raises(LaunchError, match=f"stands for {debian[name]} here") as caught:
        head_address(name, {"SLURM_FT_ADDRESS": name}, ["node2", "not known"])
    assert "SLURM_FT_ADDRESS" in caught.value.hint


def test_a_task_of_an_array_is_called_so_in_orders_and_by_its_number_in_srun() -> None:
    found = allocation_from({"SLURM_JOB_ID": "100", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "1"})
    assert (found.job_id, found.ordered) == ("100", "100_1")
    assert allocation_from({"SLURM_JOB_ID": "7"}).ordered == "7"
    assert Session("s", "100", ("a",), task="100_1").allocation.ordered == "100_1"
