"""torchft's DiLoCo and LocalSGD, which try a synchronisation that failed again.

    from slurm_ft.train.ft import Manager
    from slurm_ft.train.local_sgd import DiLoCo

A synchronisation fails when a peer dies in the middle of it. torchft's DiLoCo then goes back to the last one, and
every survivor throws the steps of a whole interval away. Here it asks for a new quorum at once and synchronises with
whoever is left, and with the work of this interval; where the synchronisation is delayed (`fragment_sync_delay`), also
with what was learnt since its reduction began. After TRIES failures it does what torchft does.

Both are subclasses and take torchft's own arguments, with our Manager, which tells how a vote has ended. What was
made by torchft's own classes gets the same by `synchronise_again`, before it is entered. Field names are those of
torchft 0.2.0.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torchft.local_sgd

from slurm_ft.train.ft import Manager
from slurm_ft.train.kept.state import local
from slurm_ft.train.kept.torchft_sync import fragments
from slurm_ft.train.progress import report_again

logger = logging.getLogger(__name__)

TRIES = 3


def synchronise_again(sync: Any) -> None:
    """Have this DiLoCo or LocalSGD, not yet entered, try a failed synchronisation again.

    Raises TypeError when its Manager is not ours.
    """
    if not isinstance(sync._manager, Manager):
        raise TypeError(f"{type(sync).__name__} needs a slurm_ft.train.ft.Manager, not {type(sync._manager)!r}")
    sync._step_post_hook = _Again(sync).step_post_hook


class DiLoCo(torchft.local_sgd.DiLoCo):  # type: ignore[misc]
    """torchft's DiLoCo that keeps an interval's work for another try."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        synchronise_again(self)


class LocalSGD(torchft.local_sgd.LocalSGD):  # type: ignore[misc]
    """torchft's LocalSGD that averages after all when a first try failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        synchronise_again(self)


class _Again:
    """What a DiLoCo or LocalSGD does after each step of its inner optimizer, tried again where it fails."""

    def __init__(self, sync: Any) -> None:
        self._sync, self._manager = sync, sync._manager
        self._hook = sync._step_post_hook
        self._aside: tuple[Any, dict[str, torch.Tensor]] | None = None
        for fragment in fragments(sync):
            fragment._clear_local_parameters = partial(self._put_aside, fragment)

    def step_post_hook(self, *step: Any) -> None:
        before = self._manager.syncs
        self._hook(*step)
        for _ in range(TRIES - 1):
            if self._manager.syncs == before or self._manager.committed:
                break
            logger.warning("a synchronisation failed; trying again")
            report_again()
            self._synchronise(*step)
        self._aside = None

    def _put_aside(self, fragment: Any) -> None:
        """In place of DiLoCo's own clearing: what was learnt locally is dropped only after a commit."""
        self._aside = None if self._manager.committed else (fragment, fragment._local_parameters)
        fragment._local_parameters = {}

    def _synchronise(self, *step: Any) -> None:
        if self._aside is None:
            self._sync.sync()
            return
        fragment, work = self._aside
        with torch.no_grad():
            for name, parameter in fragment._model_fragment.named_parameters():
                local(parameter.detach()).copy_(work[name])
        delay = int(self._sync._fragment_sync_delay)
        self._sync._local_step = self._sync._sync_every - delay - 1
        for _ in range(delay + 1):  # from where the reduction begins to where it is waited for
            self._hook(*step)
