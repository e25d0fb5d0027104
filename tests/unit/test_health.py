"""The checks of a host over pretended hardware, and that a check which hangs hangs nobody."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft import __version__
from slurm_ft.cli import cli
from slurm_ft.health import fabric, ring, task
from slurm_ft.health.bounded import bounded
from slurm_ft.health.hosts import answers_in, command, faults_of, search_folders
from slurm_ft.health.node import (
    GIB,
    Wanted,
    checks,
    folder_faults,
    gpu_faults,
    limits_too_low,
    process_faults,
    stale_faults,
)
from slurm_ft.health.task import absent, in_parts
from slurm_ft.native import probes


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def gpu_host(root: Path, gpus: int = 2, used: int = 0) -> Path:
    """A machine with AMD GPUs 0000:c1:00.0, 0000:c2:00.0 ... as the kernel shows them."""
    for number in range(gpus):
        node, bus = f"sys/class/kfd/kfd/topology/nodes/{number}", 0xC1 + number
        put(root, **{
            f"{node}/gpu_id": str(100 + number),
            f"{node}/properties": f"location_id {bus << 8}\ndomain 0\n",
            f"sys/bus/pci/devices/0000:{bus:02x}:00.0/mem_info_vram_total": str(64 * GIB),
            f"sys/bus/pci/devices/0000:{bus:02x}:00.0/mem_info_vram_used": str(used),
        })  # fmt: skip
    return root


def process(root: Path, pid: int, parent: int = 7, **environment: str) -> None:
    put(root, **{f"proc/{pid}/stat": f"{pid} (python (x)) S {parent} 0"})
    text = "\0".join(f"{name}={value}" for name, value in environment.items())
    put(root, **{f"proc/{pid}/environ": text})


@pytest.fixture(autouse=True)
def no_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_smi", lambda arguments: "")


# --- GPUs ----------------------------------------------------------------------------------------------


def test_gpus_that_are_there_and_idle_are_no_fault(tmp_path: Path) -> None:
    assert gpu_faults(Wanted(gpus=2, root=gpu_host(tmp_path))) == []
    assert gpu_faults(Wanted(root=gpu_host(tmp_path))) == []


def test_a_cpu_host_is_well_when_no_gpu_is_expected(tmp_path: Path) -> None:
    assert gpu_faults(Wanted(gpus=0, root=tmp_path)) == []


def test_a_missing_gpu_is_a_fault(tmp_path: Path) -> None:
    assert gpu_faults(Wanted(gpus=8, root=gpu_host(tmp_path))) == ["2 of 8 GPUs are there"]


def test_a_stranger_on_a_gpu_is_a_fault_and_a_process_of_this_job_is_none(tmp_path: Path) -> None:
    gpu_host(tmp_path, used=30 * GIB)
    for pid, number in ((50, 100), (51, 101)):
        put(tmp_path, **{f"sys/class/kfd/kfd/proc/{pid}/vram_{number}": str(22 * GIB)})
    process(tmp_path, 50, SLURM_JOB_ID="4")
    process(tmp_path, 51, SLURM_JOB_ID="5")
    wanted = Wanted(gpus=2, environ={"SLURM_JOB_ID": "5"}, root=tmp_path)
    assert gpu_faults(wanted) == ["process 50 holds 22.0 GiB of GPU 0000:c1:00.0"]


def test_memory_that_nobody_is_seen_to_hold_is_a_fault(tmp_path: Path) -> None:
    faults = gpu_faults(Wanted(root=gpu_host(tmp_path, gpus=1, used=3 * GIB)))
    assert faults == ["3.0 GiB of GPU 0000:c1:00.0 are in use, and no process is seen to hold them"]


@pytest.mark.parametrize(("mode", "faults"), [("live", 0), ("both", 0), ("snapshot", 1), ("off", 1), ("odd", 1)])
def test_memory_that_the_runs_own_keeper_may_hold_is_no_fault(tmp_path: Path, mode: str, faults: int) -> None:
    wanted = Wanted(environ={"SLURM_FT_KEEPER_MODE": mode}, root=gpu_host(tmp_path, gpus=1, used=3 * GIB))
    assert len(gpu_faults(wanted)) == faults


def test_a_rank_that_has_outlived_its_agent_is_a_fault(tmp_path: Path) -> None:
    process(tmp_path, 60, parent=1, SLURM_FT_ATTEMPT="2", SLURM_FT_SOCKET="x", SLURM_FT_RUN="/runs/a")
    process(tmp_path, 61, parent=59, SLURM_FT_ATTEMPT="2", SLURM_FT_SOCKET="x", SLURM_FT_RUN="/runs/a")
    (fault,) = process_faults(Wanted(root=tmp_path))
    assert fault == "process 60 is left over from attempt 2 of a replica of /runs/a"


# --- memory and limits ---------------------------------------------------------------------------------


def test_shared_memory_of_ended_programs_is_a_fault_and_what_is_in_use_is_none(tmp_path: Path) -> None:
    for name in ("nccl-dead", "nccl-used", "somebody-elses"):
        put(tmp_path, **{f"dev/shm/{name}": ""})
        os.truncate(tmp_path / "dev/shm" / name, 100 << 20)
    put(tmp_path, **{"proc/9/maps": "7f00-7f01 rw-s 0 00:19 5 /dev/shm/nccl-used\n"})
    (fault,) = stale_faults(Wanted(root=tmp_path))
    assert fault == "1 files of ended programs, such as nccl-dead, hold 100 MiB of /dev/shm"


def test_locked_memory_matters_where_there_is_rdma() -> None:
    assert limits_too_low(8 << 20, 1 << 20, rdma=False) == []
    assert limits_too_low(resource.RLIM_INFINITY, resource.RLIM_INFINITY, rdma=True) == []
    locked, files = limits_too_low(64 << 10, 1024, rdma=True)
    assert locked.startswith("only 64 KiB of memory may be locked")
    assert files.startswith("only 1024 files may be open")


# --- network -------------------------------------------------------------------------------------------


def slingshot(root: Path, down: str = "") -> Path:
    for name in ("hsn0", "hsn1", "nmn0", "lo"):
        put(root, **{f"sys/class/net/{name}/operstate": "down" if name == down else "up"})
    return root


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("hsn", {"hsn": ["hsn0", "hsn1"]}),
        ("hsn0,hsn1", {"hsn0": ["hsn0"], "hsn1": ["hsn1"]}),
        ("=hsn0", {"hsn0": ["hsn0"]}),
        ("=hsn", {"hsn": []}),
        ("^lo,nmn", {"^lo,nmn": ["hsn0", "hsn1"]}),
        ("^=hsn0", {"^hsn0": ["hsn1", "nmn0", "lo"]}),
        ("hsn1:2", {"hsn1:2": ["hsn1"]}),
        ("", {}),
    ],
)
def test_a_pattern_of_nccls_stands_for_these_names(pattern: str, meant: dict[str, list[str]]) -> None:
    assert {item.replace("^=", "^"): names for item, names in
            fabric.matching(pattern, ["hsn0", "hsn1", "nmn0", "lo"]).items()} == meant  # fmt: skip


def test_a_fabric_interface_that_is_missing_or_down_is_a_fault(tmp_path: Path) -> None:
    names = {"NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2", "GLOO_SOCKET_IFNAME": "hsn0"}
    assert fabric.interface_faults(names, slingshot(tmp_path, down="hsn1")) == [
        "the network interface hsn1 is down",
        "there is no network interface `hsn2`, which NCCL_SOCKET_IFNAME names",
    ]
    assert fabric.interface_faults({"NCCL_SOCKET_IFNAME": "^lo"}, slingshot(tmp_path)) == []
    (fault,) = fabric.interface_faults({"GLOO_SOCKET_IFNAME": "^lo,docker"}, slingshot(tmp_path))
    assert fault == "GLOO_SOCKET_IFNAME is `^lo,docker`, and gloo understands whole names alone"
    (fault,) = fabric.interface_faults({"GLOO_SOCKET_IFNAME": "hsn"}, slingshot(tmp_path))
    assert fault == "there is no network interface `hsn`, which GLOO_SOCKET_IFNAME names"


def infiniband(root: Path, port: int = 1, **states: str) -> Path:
    for name, state in states.items():
        put(root, **{f"sys/class/infiniband/{name}/ports/{port}/state": state})
    return root


def test_infiniband_ports_must_be_active_where_they_are_named(tmp_path: Path) -> None:
    infiniband(tmp_path, mlx5_0="4: ACTIVE\n", mlx5_1="1: DOWN\n", mlx5_2="2: INIT\n")
    assert fabric.port_faults({}, tmp_path) == []
    named = {"NCCL_IB_HCA": "mlx5_0:1,mlx5_1,mlx5_7"}
    assert fabric.port_faults(named, tmp_path) == [
        "no port of mlx5_1 is active",
        "there is no InfiniBand device `mlx5_7`, which NCCL_IB_HCA names",
    ]
    infiniband(tmp_path, mlx5_0="1: DOWN\n")
    assert fabric.port_faults({}, tmp_path) == ["no port of any InfiniBand device is active"]
    assert fabric.has_rdma(tmp_path) and not fabric.has_rdma(tmp_path / "nowhere")


@pytest.mark.parametrize("allowed", ["^mlx5_bond_0", "^=mlx5_bond_0", "^mlx5_1:1", "mlx5", "^mlx5_0:1", "mlx5_0:2"])
def test_of_the_infiniband_devices_that_are_allowed_one_active_port_is_enough(tmp_path: Path, allowed: str) -> None:
    infiniband(tmp_path, mlx5_0="4: ACTIVE\n", mlx5_1="1: DOWN\n", mlx5_bond_0="1: DOWN\n")
    infiniband(tmp_path, port=2, mlx5_0="4: ACTIVE\n")
    assert fabric.port_faults({"NCCL_IB_HCA": allowed}, tmp_path) == []


def test_a_host_none_of_whose_allowed_infiniband_ports_is_active_is_unfit_and_one_without_any_is_not(
    tmp_path: Path,
) -> None:
    infiniband(tmp_path, mlx5_0="1: DOWN\n", mlx5_bond_0="4: ACTIVE\n")
    infiniband(tmp_path, port=2, mlx5_0="4: ACTIVE\n")
    fault = ["no port of an InfiniBand device that NCCL_IB_HCA allows is active"]
    assert fabric.port_faults({"NCCL_IB_HCA": "^mlx5_bond_0,mlx5_0:2"}, tmp_path) == fault
    assert fabric.port_faults({"NCCL_IB_HCA": "mlx5_0:1"}, tmp_path) == ["no port of mlx5_0:1 is active"]
    assert fabric.port_faults({"NCCL_IB_HCA": "^mlx5_bond_0"}, tmp_path / "nowhere") == []


def compiled(folder: Path, name: str, symbol: str) -> Path:
    source, library = folder / f"{name}.c", folder / name
    source.write_text(f"int {symbol} = 1;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=30)
    return library


def test_a_network_plugin_must_really_load_and_be_one(tmp_path: Path) -> None:
    good = compiled(tmp_path, "libnccl-net-good.so", "ncclNetPlugin_v8")
    other = compiled(tmp_path, "libother.so", "something_else")
    torn = tmp_path / "libtorn.so"
    torn.write_text("no library")

    def faults(plugin: object) -> list[str]:
        wanted = Wanted(environ={"NCCL_NET_PLUGIN": str(plugin)})
        return bounded({"plugin": checks(wanted, frozenset({"network"}))["the network plugin"]}, 5.0)

    assert faults(good) == [] and faults("none") == []
    assert faults(other) == [f"the network plugin {other} does not load: {other} is no network plugin"]
    assert "file too short" in faults(torn)[0] or "invalid ELF header" in faults(torn)[0]
    assert faults("missing")[0].startswith("the network plugin missing does not load: libnccl-net-missing.so")


def test_a_slingshot_host_without_a_plugin_would_go_over_tcp() -> None:
    assert fabric.plugin_faults({}) == []
    (fault,) = fabric.plugin_faults({"FI_CXI_RX_MATCH_MODE": "hybrid"})
    assert "data would go over TCP" in fault


# --- storage -------------------------------------------------------------------------------------------


def test_a_folder_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    assert folder_faults(str(tmp_path / "runs" / "not yet"), "run") == []
    assert list(tmp_path.iterdir()) == []
    assert folder_faults("/proc", "run")[0].startswith("the run folder /proc cannot be written")


# --- bounds --------------------------------------------------------------------------------------------


def hang() -> list[str]:
    subprocess.run(["sleep", "600"])
    return []


def crash() -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def test_a_check_that_hangs_or_dies_is_a_fault_and_the_others_are_heard() -> None:
    begun = time.monotonic()
    found = bounded({"a": hang, "b": lambda: ["b is wrong"], "c": crash, "d": list, "e": lambda: 1 / 0}, 5.0)  # type: ignore[dict-item,return-value]
    assert found == [
        "the check of a did not answer within 5 s",
        "b is wrong",
        "the check of c crashed",
        "ZeroDivisionError: division by zero",
    ]
    assert time.monotonic() - begun < 60


# --- several hosts -------------------------------------------------------------------------------------


def answer(host: str, *faults: str, **more: object) -> dict[str, object]:
    return {"host": host, "faults": list(faults), "version": __version__, "python": sys.executable, **more}


def test_the_answers_of_the_hosts_are_put_together_one_line_a_fault() -> None:
    answers = [answer("n1"), answer("n3", "GPUs are away", version="0.0"), answer("n4", "x")]
    words = "srun: error: Task launch for StepId=5.4 failed on node n2: Job credential expired\nsrun: done\n"
    assert faults_of(["n1", "n2", "n3", "n4"], answers, words) == [
        ("n2", "no answer: srun: error: Task launch for StepId=5.4 failed on node n2: Job credential expired"),
        ("n3", "GPUs are away"),
        ("n3", f"slurm-ft there is 0.0, and here {__version__}"),
        ("n4", "x"),
    ]


def test_the_host_whose_clock_is_off_is_named_and_not_its_neighbours() -> None:
    hosts = ["n1", "n2", "n3", "n4"]
    answers = [answer("n1", ahead=-300.0), answer("n2", ahead=300.0), answer("n3", ahead=0.0), answer("n4", ahead=0.0)]
    assert faults_of(hosts, answers, "") == [("n2", "its clock is 300.0 s behind the others'")]


def torn(lines: list[str]) -> list[str]:
    """What slurmstepd sends of one task's lines: pieces of 1024 bytes at most."""
    return [line[at : at + 1024] for line in lines for at in range(0, len(line), 1024)]


LONG = st.lists(st.text(max_size=9) | st.sampled_from(["x" * 3000, '"\\\n' * 700, "ä" * 900]), max_size=3)


@given(LONG, LONG)
def test_long_answers_of_several_hosts_are_whole_although_slurm_tears_and_mixes_lines(
    one: list[str], other: list[str]
) -> None:
    first, second = answer("n1", *one), answer("n2", *other)
    lines = [torn(in_parts(each)) for each in (first, second)]
    mixed = [line for both in itertools.zip_longest(*lines, fillvalue="") for line in both]
    assert answers_in("\n".join(["srun: a word of its own", *mixed, "7"])) == [first, second]


def test_an_answer_whose_end_has_not_come_is_none() -> None:
    lines = in_parts(answer("n1", "x" * 2000))
    assert len(lines) > 1 and answers_in("\n".join(lines[:-1])) == []


def test_a_task_answers_in_parts_that_its_asker_joins() -> None:
    order = {"gpus": 64, "environ": {}, "shared": "", "scratch": "", "folder": "", "hosts": ["n1"], "areas": ["node"],
             "word": "w", "folders": {"/no/such" + "x" * 1200: "PATH"}, "seconds": 10.0}  # fmt: skip
    environ = os.environ | {"SLURM_FT_CHECK": json.dumps(order), "SLURMD_NODENAME": "n1"}
    argv = [sys.executable, "-m", "slurm_ft.health.task"]
    out = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
    assert max(map(len, out.splitlines())) < 1024
    (said,) = answers_in(out)
    assert said["host"] == "n1" and any("/no/such" in fault for fault in said["faults"])


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9))
def test_clocks_are_measured_against_most_of_them(offsets: list[float]) -> None:
    hosts = [f"n{number}" for number in range(len(offsets))]
    ahead = {host: after - before for host, before, after in zip(hosts, offsets, offsets[1:], strict=False)}
    middle = sorted(offsets)[len(offsets) // 2]
    for host, offset in ring.clocks(hosts, ahead).items():
        assert offset == pytest.approx(offsets[int(host[1:])] - middle, abs=1e-6)


def test_folders_of_programs_and_libraries_that_are_here_must_be_there_too(tmp_path: Path) -> None:
    (tmp_path / "rocm").mkdir()
    environ = {"PATH": f"/bin:{tmp_path}/none:relative:", "LD_LIBRARY_PATH": f"{tmp_path}/rocm:/bin"}
    folders = search_folders(environ)
    assert folders == {"/bin": "PATH", f"{tmp_path}/rocm": "LD_LIBRARY_PATH"}
    assert absent(folders) == []
    (tmp_path / "rocm").rmdir()
    assert absent(folders) == [f"there is no {tmp_path}/rocm, which LD_LIBRARY_PATH names"]


def test_what_is_asked_of_the_hosts_is_not_among_the_arguments_that_others_can_read() -> None:
    argv, environ = command(["n1"], {"word": "secret"}, {"SLURM_JOB_ID": "5", "TOKEN": "mine", "SLURM_NNODES": "9"})
    assert not any("secret" in word or "mine" in word for word in argv)
    assert json.loads(environ["SLURM_FT_CHECK"]) == {"word": "secret"}
    assert environ["TOKEN"] == "mine" and "SLURM_NNODES" not in environ


def test_a_post_answers_who_knows_the_word_and_nobody_else() -> None:
    post = ring.Post("127.0.0.1", "secret")
    with pytest.raises(ConnectionError):
        ring.call("127.0.0.1", post.port, "guess")
    assert not post.wait(0)
    assert abs(ring.call("127.0.0.1", post.port, "secret")) < 1.0
    assert post.wait(5)


def test_tokens_of_hosts_that_do_not_write_are_missed(tmp_path: Path) -> None:
    ring.write_token(tmp_path, "n1", {"port": 5})
    assert ring.tokens(tmp_path, ["n1"]) == {"n1": {"port": 5}}
    assert ring.tokens(tmp_path, ["n1", "n2"], 0.0) == {"n1": {"port": 5}}


# --- the command ---------------------------------------------------------------------------------------

CLEAN = {"SLURM_FT_SITE": None, "SLURM_FT_RUN": None, "SLURM_JOB_ID": None, "SLURM_GPUS_ON_NODE": None}


def test_the_command_is_silent_on_a_good_host_and_speaks_a_line_for_each_fault(tmp_path: Path) -> None:
    run = CliRunner()
    good = run.invoke(cli, ["check", "--storage", "--shared", str(tmp_path)], env=CLEAN)
    assert (good.exit_code, good.output) == (0, "")
    bad = run.invoke(cli, ["check", "--gpus", "64", "--storage", "--shared", "/proc", "--node"], env=CLEAN)
    assert bad.exit_code == 1
    lines = bad.output.splitlines()
    assert all(line.startswith("ERROR: ") for line in lines)
    assert "ERROR: 0 of 64 GPUs are there" in lines
    assert any(line.startswith("ERROR: the run folder /proc cannot be written") for line in lines)
    value = json.loads(run.invoke(cli, ["check", "--gpus", "64", "--json"], env=CLEAN).output)
    assert value["schema"] == 1 and {"host": "", "fault": "0 of 64 GPUs are there"} in value["faults"]


def test_how_many_gpus_are_expected_is_said_by_the_option_the_job_or_the_site() -> None:
    run = CliRunner()
    site = {**CLEAN, "SLURM_FT_SITE": "lumi-g"}
    assert "0 of 8 GPUs" in run.invoke(cli, ["check"], env=site).output
    assert "GPUs" not in run.invoke(cli, ["check"], env={**site, "SLURM_JOB_ID": "1"}).output
    in_a_job = {**site, "SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "4"}
    assert "0 of 4 GPUs" in run.invoke(cli, ["check"], env=in_a_job).output
    assert "GPUs" not in run.invoke(cli, ["check", "--gpus", "0"], env=in_a_job).output


def test_all_hosts_of_a_job_need_a_job() -> None:
    result = CliRunner().invoke(cli, ["check", "--hosts"], env=CLEAN)
    assert result.exit_code == 2 and "no Slurm job" in result.output


def test_a_host_whose_name_leads_nowhere_says_so_and_is_checked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reachable(name: str, others: list[str]) -> str:
        assert others == ["n2"]
        raise OSError("it stands for 127.0.1.1 here, which no other host reaches")

    monkeypatch.setattr(task, "reachable", reachable)
    order = {"gpus": 0, "environ": {}, "shared": "", "scratch": "", "folder": str(tmp_path), "hosts": ["n1", "n2"],
             "word": "w", "folders": {"/no/such": "PATH"}, "areas": [], "seconds": 10.0}  # fmt: skip
    answer = task.look(order, "n1")
    assert answer["faults"] == [
        "this host has no address that the others reach: it stands for 127.0.1.1 here, which no other host reaches",
        "there is no /no/such, which PATH names",
    ]
