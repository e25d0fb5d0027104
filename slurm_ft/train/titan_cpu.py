"""Lets torchtitan 0.3.0 run on a machine without an accelerator, and on torch before 2.14.

torchtitan asks `torch.cuda` for its device when it finds no accelerator, and other modules of its copy that
answer while they are imported. So this module must be imported before anything else of torchtitan; it puts
an object in that place which answers on a CPU what torchtitan asks of a GPU. Where an accelerator exists
nothing is changed. `torch.distributed.set_timeout`, which torchtitan calls after its first step, is filled in
where torch lacks it, GPU or not.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d


class CpuDevice:
    """What torchtitan wants to know of a device, answered for the CPU; the rest goes to `torch.cpu`."""

    memory = SimpleNamespace(_record_memory_history=lambda *_, **__: None, _snapshot=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: object) -> None:
        """There is one."""

    def synchronize(self, device: object = None) -> None:
        """CPU operations are done when they return."""

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Nothing is counted."""

    def empty_cache(self) -> None:
        """There is none."""

    def get_rng_state(self, device: object = None) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


def has_accelerator() -> bool:
    return bool(torch.accelerator.is_available())


def _set_timeout(timeout: timedelta, group: Any = None) -> None:
    # A mesh dimension of size 1 has a stand-in group that knows no time-out.
    with contextlib.suppress(Exception):
        distributed_c10d._set_pg_timeout(timeout, group)


def install() -> None:
    """Idempotent. Called once below: to import this module is enough."""
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = _set_timeout
    if has_accelerator():
        return
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", CpuDevice()


install()
