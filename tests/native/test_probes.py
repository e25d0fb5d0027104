"""Probes on made-up machines: a sysfs tree with AMD GPUs, the output of nvidia-smi, and logs of NCCL."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_ft.native import probes
from slurm_ft.native import report as look
from slurm_ft.native.probes import Gpu, Holder
from tests.native import workshop

GIB = 1 << 30


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two CPUs (nodes without a GPU) and two GPUs; process 77 is on both, 78 holds nothing."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for cpu in (0, 1):
        put(nodes / str(cpu) / "gpu_id", 0)
        put(nodes / str(cpu) / "properties", "cpu_cores_count 64\nlocation_id 0")
    for node, number, location, domain in ((2, 4100, 0xC100, 0), (10, 4200, 0x0A08, 1)):
        put(nodes / str(node) / "gpu_id", number)
        put(nodes / str(node) / "name", "gfx942")
        put(nodes / str(node) / "properties", f"simd_count 304\nlocation_id {location}\ndomain {domain}\nodd")
    for place, used in (("0000:c1:00.0", 3 * GIB), ("0001:0a:01.0", 0)):
        put(tmp_path / "sys/bus/pci/devices" / place / "mem_info_vram_total", 192 * GIB)
        put(tmp_path / "sys/bus/pci/devices" / place / "mem_info_vram_used", used)
    put(tmp_path / "sys/class/kfd/kfd/proc/77/vram_4100", 2 * GIB)
    put(tmp_path / "sys/class/kfd/kfd/proc/77/vram_4200", GIB)
    put(tmp_path / "sys/class/kfd/kfd/proc/78/vram_4100", 0)
    return tmp_path


def test_amd_gpus_by_bus_id(machine: Path) -> None:
    assert probes.amd_gpus(machine) == [
        Gpu("0000:c1:00.0", "gfx942", 192 * GIB, 3 * GIB, "rocm"),
        Gpu("0001:0a:01.0", "gfx942", 192 * GIB, 0, "rocm"),
    ]
    assert probes.amd_gpus(machine)[0].free == 189 * GIB


def test_processes_that_hold_amd_memory(machine: Path) -> None:
    found = probes.amd_holders(machine)
    assert found == [Holder(77, "0000:c1:00.0", 2 * GIB), Holder(77, "0001:0a:01.0", GIB)]
    assert probes.leftovers(found, wanted=[77]) == []
    assert probes.leftovers(found, wanted=[1]) == found


def test_a_gpu_that_a_cgroup_hides_is_not_there(machine: Path) -> None:
    (machine / "sys/class/kfd/kfd/topology/nodes/2/gpu_id").unlink()
    assert [gpu.bus_id for gpu in probes.amd_gpus(machine)] == ["0001:0a:01.0"]
    assert [holder.bus_id for holder in probes.amd_holders(machine)] == ["0001:0a:01.0"]


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert probes.amd_gpus(tmp_path) == [] and probes.amd_holders(tmp_path) == []


def test_nvidia_smi_is_parsed() -> None:
    text = "00000000:C1:00.0, NVIDIA H100 80GB HBM3, 81559, 1024\nNo devices were found\n0001:0A:00.0, GB10, [N/A], 0\n"
    assert probes.nvidia_gpus(text) == [Gpu("0000:c1:00.0", "NVIDIA H100 80GB HBM3", 81559 << 20, 1 << 30, "cuda")]
    text = "4711, 00000000:C1:00.0, 512\n4712, 00000000:C1:00.0, [N/A]\n"
    assert probes.nvidia_holders(text) == [
        Holder(4711, "0000:c1:00.0", 512 << 20),
        Holder(4712, "0000:c1:00.0", 0),
    ]


def fake_smi(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = 'case "$1" in *gpu=*) echo "0000:01:00.0, H100, 100, 1";; *) echo "5, 0000:01:00.0, 7";; esac'
    fake_smi(tmp_path, answer, monkeypatch)
    assert probes.gpus(tmp_path) == [Gpu("0000:01:00.0", "H100", 100 << 20, 1 << 20, "cuda")]
    assert probes.holders(tmp_path) == [Holder(5, "0000:01:00.0", 7 << 20)]


@pytest.mark.parametrize("body", ["exit 9", "echo rubbish", "exec sleep 600"])
def test_a_broken_nvidia_smi_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    fake_smi(tmp_path, body, monkeypatch)
    monkeypatch.setattr(probes, "SMI_SECONDS", 0.2)
    begin = time.monotonic()
    assert probes.gpus(tmp_path) == []
    assert time.monotonic() - begin < 30


def test_bus_ids_have_one_spelling() -> None:
    assert probes.bus_id("00000000:C1:00.0") == probes.bus_id("c1:00.0") == "0000:c1:00.0"
    for wrong in ("", "gpu0", "0000:c1:00.8", "0000:c1:00.0.1"):
        with pytest.raises(ValueError, match="no bus id"):
            probes.bus_id(wrong)


def test_network_plugins_are_looked_for_as_the_libraries_do(tmp_path: Path) -> None:
    put(tmp_path / "libnccl-net.so", "")
    put(tmp_path / "libnccl-net-ofi.so", "")
    plain = {"LD_LIBRARY_PATH": f":{tmp_path}"}
    found = probes.network_plugins(plain, folders=())
    assert [(plugin.name, bool(plugin.path)) for plugin in found] == [
        ("librccl-net.so", False),
        ("libnccl-net.so", True),
    ]
    assert probes.network_plugins({**plain, "NCCL_NET_PLUGIN": "ofi"}, ())[0].path == str(
        tmp_path / "libnccl-net-ofi.so"
    )
    full = str(tmp_path / "libnccl-net-ofi.so")
    assert probes.network_plugins({"NCCL_NET_PLUGIN": full}, ())[0].path == full
    assert probes.network_plugins({"NCCL_NET_PLUGIN": "none"}, ()) == []


@pytest.mark.parametrize(
    ("log", "chosen"),
    [
        ("n1:1:2 [0] NCCL INFO Using network Socket\n", "Socket"),
        (
            "NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)\nNCCL INFO Using network AWS Libfabric\n",
            "AWS Libfabric (cxi)",
        ),
        ("nothing of the kind", ""),
    ],
)
def test_the_network_that_was_chosen_is_read_from_a_log(log: str, chosen: str) -> None:
    assert probes.network_chosen(log) == chosen


def test_the_report_on_this_machine_names_each_platform() -> None:
    lib = str(workshop.library("host").parent)
    found = look({"SLURM_FT_NATIVE_LIB": lib, "GPU_PLATFORM": "host"})
    assert found.chosen == "host"
    assert [platform.name for platform in found.platforms] == ["rocm", "cuda", "host"]
    assert "native platform: host" in found.lines()
    assert any(line.startswith("host: memory, collectives, split, shrink") for line in found.lines())


def test_the_report_without_any_library_says_so(tmp_path: Path) -> None:
    found = look({"SLURM_FT_NATIVE_LIB": str(tmp_path)})
    assert found.chosen == ""
    assert {platform.missing for platform in found.platforms} == {"not built"}
    assert "rocm: not built" in found.lines()


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_the_report_on_fake_devices(platform: str) -> None:
    program = "from slurm_ft.native import report; print('\\n'.join(report().lines()))"
    environ = {
        **os.environ,
        "PYTHONPATH": str(workshop.ROOT),
        **workshop.fake_environ(platform),
        "GPU_PLATFORM": platform,
    }
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    lines = workshop.said(done).splitlines()
    assert lines[0] == f"native platform: {platform}"
    assert f"{platform} device 1 at 0000:c1:00.0: Fake GPU 1, 16.0 GiB, memory, dmabuf" in lines


def test_the_face_is_there_without_a_library_and_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys, slurm_ft.native as n\n"
        "try: n.load()\n"
        "except n.Unavailable as error: print(error.message)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(workshop.ROOT), "SLURM_FT_NATIVE_LIB": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert "host: its library was not built" in workshop.said(done)
