"""Snapshots: two slots in one held memory; the one that is not committed is filled, checked and then committed.

The copy runs in a thread, beside the forward and backward passes, which do not write what is copied. Whoever is
about to write (an optimizer step) calls `wait_copied` first. Checksum, record and commit come after the copy and
hold nobody up.

Memory: two times the state. A torn slot is never seen: its record is struck out before the first byte of it
changes and is written again when all of it is there; the commit word is last.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from slurm_ft.train.kept.checksum import checksum, is_right
from slurm_ft.train.kept.layout import Layout
from slurm_ft.train.kept.memory import SNAPSHOT, Damaged, Maker, Memory
from slurm_ft.train.kept.record import Unkeepable, decode, encode

logger = logging.getLogger(__name__)

SLOTS = 2


class Snapshots:
    """The writer's side of one memory with two slots."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.seconds = 0.0
        """How long the last copy and its checksum took."""
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._failed: Exception | None = None

    @classmethod
    def create(cls, maker: Maker, layout: Layout, capacity: int) -> Snapshots:
        return cls(Memory.create(maker, SNAPSHOT, layout, capacity, SLOTS, SLOTS))

    def take(self, tensors: Mapping[str, torch.Tensor], record: dict[str, Any], wait: bool = False) -> None:
        """Begin a snapshot of these tensors; with `wait` it is committed on return.

        The tensors must not be written until `wait_copied` has returned. A snapshot that is still under way is
        waited for first. Raises what went wrong in the last one.
        """
        self.finish()
        fixed = decode(encode(record))  # its parts belong to the training, which goes on meanwhile
        self._copied.clear()
        ready = _ready(tensors)
        self._thread = threading.Thread(
            target=self._run, args=(dict(tensors), fixed, ready), name="slurm-ft snapshot", daemon=True
        )
        self._thread.start()
        if wait:
            self.finish()

    def wait_copied(self) -> None:
        """Until the tensors of the snapshot under way may be written again."""
        self._copied.wait()

    def finish(self) -> None:
        """Until the snapshot under way is committed. Raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _run(self, tensors: dict[str, torch.Tensor], record: dict[str, Any], ready: Any) -> None:
        begin = time.monotonic()
        try:
            self._write(tensors, record, ready)
        except (OSError, Damaged, Unkeepable) as error:
            self._failed = error
        except Exception as error:
            self._failed = Damaged(f"a snapshot failed: {error!r}")
        finally:
            self.seconds = time.monotonic() - begin
            self._copied.set()

    def _write(self, tensors: dict[str, torch.Tensor], record: dict[str, Any], ready: Any) -> None:
        number = self.memory.word + 1
        slot = number % SLOTS
        self.memory.forget_record(number)
        with _beside(ready):
            for entry in self.memory.layout.entries:
                copy(self.memory.view(entry, slot), tensors[entry.name])
        self._copied.set()
        data = encode(record | {"checksum": checksum(self.memory.slot(slot))})
        if not self.memory.fits(len(data)):
            raise Damaged(f"a record of {len(data)} bytes has no room")
        self.memory.write_record(number, data)
        self.memory.word = number


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy; within host memory with other threads running meanwhile."""
    on_host = source.device.type == target.device.type == "cpu"
    if on_host and source.is_contiguous() and source.stride() == target.stride() and source.dtype == target.dtype:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    else:
        with torch.no_grad():
            target.copy_(source.detach())


def _ready(tensors: Mapping[str, torch.Tensor]) -> Any:
    """On a GPU: a mark in the stream that writes the tensors, behind their last write. Unproven on hardware."""
    device = next((tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return device, event


class _beside:
    """On a GPU: copy in a stream of our own, behind the mark; leave when the copies are done."""

    def __init__(self, ready: Any) -> None:
        self._ready = ready

    def __enter__(self) -> None:
        if self._ready is not None:
            device, event = self._ready
            self._stream = torch.cuda.Stream(device)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
            self._stream.wait_event(event)

    def __exit__(self, *error: Any) -> None:
        if self._ready is not None:
            self._stream.synchronize()
            self._context.__exit__(*error)


class Kept:
    """One valid snapshot that was found: its record, and its tensors as views of the held memory."""

    def __init__(self, memory: Memory, number: int) -> None:
        """Raises Damaged when it is not whole. Does not check the tensors; `check` does."""
        self.memory, self.number = memory, number
        self.record: dict[str, Any] = memory.read_record(number)

    def check(self) -> None:
        """Raises Damaged when the tensors are not what was written."""
        if not is_right(self.memory.slot(self.number % SLOTS), str(self.record.get("checksum"))):
            raise Damaged(f"the tensors of snapshot {self.number} are damaged")

    def tensors(self) -> dict[str, torch.Tensor]:
        return {entry.name: self.memory.view(entry, self.number % SLOTS) for entry in self.memory.layout.entries}


def readable(memory: Memory, newest_only: bool = False) -> list[Kept]:
    """The whole snapshots in a memory, newest first: the committed one, and the one before it if it was not
    begun to be written over. Tensors are checked, which takes as long as reading them: with `newest_only` the
    older one is looked at only when the newer one is damaged."""
    found = []
    for number in (memory.word, memory.word - 1):
        try:
            kept = Kept(memory, number)
            kept.check()
        except Damaged as error:
            logger.info("%s", error)
        else:
            found.append(kept)
            if newest_only:
                break
    return found
