"""What the native bridge finds on this machine, as data and as lines: for `slurm-ft check` and for `scripts/gpu_check`.

Looking never fails: what cannot be had is said in words. A library is opened, which initialises the driver, but no
context is created and no memory is taken on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_ft.native import probes
from slurm_ft.native.errors import NativeError
from slurm_ft.native.library import PLATFORMS, DeviceInfo, Feature, Library, allowed, built, load

GIB = 1 << 30
NOTHING = Feature(0)


@dataclass(frozen=True)
class Device:
    """One device as its library sees it, so after the masks of this process."""

    name: str
    bus_id: str
    bytes: int
    granularity: int
    features: Feature


@dataclass(frozen=True)
class Platform:
    """One library: `missing` says why it cannot be used, and is empty when it can."""

    name: str
    missing: str = ""
    features: Feature = NOTHING
    driver: int = 0
    collectives: int = 0
    parts: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Report:
    """All of it."""

    chosen: str
    platforms: tuple[Platform, ...]
    gpus: tuple[probes.Gpu, ...] = ()
    holders: tuple[probes.Holder, ...] = ()
    plugins: tuple[probes.Plugin, ...] = field(default=())

    def lines(self) -> list[str]:
        """One fact a line."""
        lines = [f"native platform: {self.chosen or 'none'}"]
        for platform in self.platforms:
            lines += _platform_lines(platform)
        lines += [f"GPU {gpu.bus_id}: {gpu.name}, {_size(gpu.free)} of {_size(gpu.bytes)} free" for gpu in self.gpus]
        lines += [f"GPU {item.bus_id}: process {item.pid} holds {_size(item.bytes)}" for item in self.holders]
        return lines + [f"network plugin {item.name}: {item.path or 'not found'}" for item in self.plugins]


def faults(found: Report) -> list[str]:
    """What a user should mend, one sentence each; none on a host that is well."""
    missing = {platform.name: platform.missing for platform in found.platforms if platform.missing}
    lines = [f"the native library for {name} cannot be used: {why}" for name, why in missing.items() if name == "host"]
    for name in sorted({gpu.platform for gpu in found.gpus} & set(missing)):
        lines.append(f"there are {name} GPUs and their native library cannot be used: {missing[name]}")
    for item in found.holders:
        lines.append(f"process {item.pid} holds {_size(item.bytes)} of GPU {item.bus_id}")
    return lines


def report(environ: Mapping[str, str] = os.environ) -> Report:
    """Look at everything."""
    platforms = tuple(_platform(name, environ) for name in PLATFORMS)
    try:
        permitted = allowed(environ)
    except NativeError:
        permitted = ()
    usable = (item.name for item in platforms if not item.missing and item.devices and item.name in permitted)
    plugins = probes.network_plugins(environ)
    gpus, holders = tuple(probes.gpus()), tuple(probes.holders())
    return Report(next(usable, ""), platforms, gpus, holders, tuple(plugins) if gpus else ())


def device_info(library: Library, number: int) -> Device:
    """What a library says about one of its devices."""
    info = DeviceInfo()
    library.call("sft_device", number, ctypes.byref(info))
    bus = info.bus_id.decode(errors="replace")
    name = info.name.decode(errors="replace")
    return Device(name, probes.bus_id(bus) if bus else "", info.bytes, info.granularity, Feature(info.features))


def _platform(name: str, environ: Mapping[str, str]) -> Platform:
    if name not in built(environ):
        return Platform(name, "not built")
    try:
        library = load(name, environ)
        devices = tuple(device_info(library, number) for number in range(library.device_count()))
        driver, collectives = library.versions
        parts = tuple(library.describe())
        return Platform(name, "", library.features, driver, collectives, parts, devices)
    except NativeError as error:
        return Platform(name, error.message.removeprefix(f"{name}: "))


def _platform_lines(platform: Platform) -> list[str]:
    if platform.missing:
        return [f"{platform.name}: {platform.missing}"]
    features = ", ".join(item.name.lower() for item in Feature if item in platform.features and item.name)
    numbers = f" (driver {platform.driver}, collectives {platform.collectives})" if platform.driver else ""
    lines = [f"{platform.name}: {features}{numbers}", *(f"{platform.name} {part}" for part in platform.parts)]
    for number, device in enumerate(platform.devices):
        what = ", ".join(item.name.lower() for item in Feature if item in device.features and item.name) or "nothing"
        place = f" at {device.bus_id}" if device.bus_id else ""
        lines.append(f"{platform.name} device {number}{place}: {device.name}, {_size(device.bytes)}, {what}")
    return lines


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
