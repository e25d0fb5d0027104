"""The network between hosts, as one host sees it: interfaces, InfiniBand ports, RCCL's or NCCL's plugin.

The names come from the ranks' environment. NCCL_SOCKET_IFNAME and NCCL_IB_HCA hold beginnings of names, `=` before
the list means whole names and `^` means all but these; a device may be followed by one port (`mlx5_0:1`).
GLOO_SOCKET_IFNAME holds whole names and nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_ft.native import probes

SOCKET = "NCCL_SOCKET_IFNAME"
GLOO = "GLOO_SOCKET_IFNAME"
HCA = "NCCL_IB_HCA"
PLUGIN_SYMBOLS = tuple(f"ncclNetPlugin_v{number}" for number in range(12, 3, -1))
"""What a network plugin exports, by the version of its interface (NCCL's ext-net)."""


ASK_ADDRESS = 0x8915
"""SIOCGIFADDR of <linux/sockios.h>: an interface's IPv4 address."""


def has_rdma(root: Path = Path("/")) -> bool:
    """Is there a network here that locks memory: InfiniBand, RoCE or Slingshot?"""
    return any(any((root / "sys/class" / name).glob("*")) for name in ("infiniband", "cxi", "cxi_user"))


def matching(pattern: str, names: Sequence[str]) -> dict[str, list[str]]:
    """For each item of a list like NCCL_SOCKET_IFNAME's, the names that it stands for; `^` makes one item of all.
    A name may be DEVICE:PORT. Pure."""
    exclude, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    exact, pattern = pattern.startswith("="), pattern.removeprefix("=")
    items = [item.strip() for item in pattern.split(",") if item.strip()]

    def fits(item: str, name: str) -> bool:
        wanted, _, number = item.partition(":")
        device, _, port = name.partition(":")
        return (device == wanted if exact else device.startswith(wanted)) and (not number or port in ("", number))

    if exclude:
        return {f"^{pattern}": [name for name in names if not any(fits(item, name) for item in items)]}
    return {item: [name for name in names if fits(item, name)] for item in items}


def interfaces(root: Path = Path("/")) -> dict[str, bool]:
    """The network interfaces, and whether each is up."""
    found = {}
    for path in sorted((root / "sys/class/net").glob("*")):
        if not (path / "operstate").exists():
            continue  # a file such as bonding_masters
        state, carrier = _text(path / "operstate"), _text(path / "carrier")
        found[path.name] = state == "up" or (state == "unknown" and carrier != "0")
    return found


def interface_faults(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Interfaces that the environment names and that are missing or down."""
    found = interfaces(root)
    faults = []
    for variable in (SOCKET, GLOO):
        text = environ.get(variable, "")
        if variable == GLOO and text.startswith(("^", "=")):
            faults.append(f"{GLOO} is `{text}`, and gloo understands whole names alone")
            continue
        for item, names in matching(text and f"={text}" if variable == GLOO else text, list(found)).items():
            down = [name for name in names if not found[name]]
            if not names:
                faults.append(f"there is no network interface `{item}`, which {variable} names")
            elif item.startswith("^"):
                faults += [] if len(down) < len(names) else [f"no interface that {variable} allows is up"]
            else:
                faults += [f"the network interface {name} is down" for name in down]
    return list(dict.fromkeys(faults))


def ports(root: Path = Path("/")) -> dict[str, bool]:
    """The ports of the InfiniBand devices, as DEVICE:PORT, and whether each is active."""
    return {
        f"{port.parent.parent.name}:{port.name}": _text(port / "state").partition(":")[2].strip() == "ACTIVE"
        for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    }


def port_faults(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """InfiniBand without an active port. NCCL takes the active ones of those that it may use: a host is unfit when
    there are some and none is active, and also when none is of a device that NCCL_IB_HCA names."""
    found = ports(root)
    if HCA not in environ:
        return ["no port of any InfiniBand device is active"] if found and not any(found.values()) else []
    faults = []
    for item, names in matching(environ[HCA], list(found)).items():
        if any(found[name] for name in names):
            continue
        if item.startswith("^"):
            faults += [f"no port of an InfiniBand device that {HCA} allows is active"] if found else []
        elif not names:
            faults.append(f"there is no InfiniBand device `{item}`, which {HCA} names")
        else:
            faults.append(f"no port of {item} is active")
    return faults


def plugin_faults(environ: Mapping[str, str], load: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """A network plugin that is wanted and does not load. It is really loaded: call this in a process of its own,
    which must have had LD_LIBRARY_PATH from its start."""
    chosen = environ.get("NCCL_NET_PLUGIN", "")
    if chosen == "none":
        return []
    tried = probes.network_plugins(environ)
    # Who names one wants that one; otherwise NCCL and RCCL take the first that there is.
    tried = tried[:1] if chosen else [plugin for plugin in tried if plugin.path]
    if not tried and any(name.startswith("FI_CXI_") for name in environ):
        return ["no network plugin of RCCL or NCCL is found: data would go over TCP (is the site's module loaded?)"]
    reasons = [_plugin_fault(plugin.path or plugin.name, load) for plugin in tried]
    if not reasons or "" in reasons:
        return []
    return [f"the network plugin {chosen or tried[0].name} does not load: {reasons[0]}"]


def _plugin_fault(name: str, load: Callable[[str], object]) -> str:
    try:
        library = load(name)
    except OSError as error:
        return str(error)
    return "" if any(hasattr(library, symbol) for symbol in PLUGIN_SYMBOLS) else f"{name} is no network plugin"


def address(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """The IPv4 address of the first fabric interface that is up; '' without one."""
    names = [name for names in matching(environ.get(SOCKET, ""), list(interfaces(root))).values() for name in names]
    return next((text for name in names if interfaces(root)[name] and (text := _ipv4(name))), "")


def _ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, ASK_ADDRESS, struct.pack("256s", os.fsencode(name)[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
