"""torchft's DiLoCo and LocalSGD, which try a synchronisation that failed again, and begin again with one.

    from slurm_ft.train.ft import Manager
    from slurm_ft.train.local_sgd import DiLoCo

A synchronisation fails when a peer dies in the middle of it. torchft's DiLoCo then goes back to the last one, and
every survivor throws the steps of a whole interval away. Here it asks for a new quorum at once and synchronises with
whoever is left, and with the work of this interval; where the synchronisation is delayed (`fragment_sync_delay`), also
with what was learnt since its reduction began. After TRIES failures it does what torchft does.

A peer may have committed what failed here: it had all it needed when the other died. It is a step ahead then, and who
committed that step without it would differ from it for good and not know it. So until something is committed no
try succeeds without those who were in one before and live; who is behind is healed when all meet again. (LocalSGD with
an asynchronous quorum does not look: it averages whole weights, and differs from nobody for long.)

A replica that was started again and has no state synchronises after one step, and is healed then. With torchft's
classes it first trains an interval, which is thrown away when it is healed; and as its Manager lives, its peers wait
at their next synchronisation until it is done.

Both are subclasses and take torchft's own arguments, with our Manager, which tells how a vote has ended. What was
made by torchft's own classes tries again by `synchronise_again`, before it is entered. Field names are those of
torchft 0.2.0.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import torch
import torchft.local_sgd

from slurm_ft import env
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


def _begin_with_a_synchronisation(sync: Any) -> None:
    """Have this DiLoCo or LocalSGD, not yet entered, synchronise after its first step if its replica was started again
    and has neither restored nor loaded anything by then. That is the same for all ranks of a replica."""
    if int(os.environ.get(env.ATTEMPT) or 1) == 1:
        return
    hook, fresh = sync._step_post_hook, True

    def first_alone(*step: Any) -> None:
        nonlocal fresh
        if fresh and sync._local_step == 0 and sync._manager.current_step() == 0:
            sync._local_step = sync._sync_every - int(getattr(sync, "_fragment_sync_delay", 0)) - 1
        fresh = False
        hook(*step)

    sync._step_post_hook = first_alone


class DiLoCo(torchft.local_sgd.DiLoCo):  # type: ignore[misc]
    """torchft's DiLoCo that keeps an interval's work for another try."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        synchronise_again(self)
        _begin_with_a_synchronisation(self)


class LocalSGD(torchft.local_sgd.LocalSGD):  # type: ignore[misc]
    """torchft's LocalSGD that averages after all when a first try failed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        synchronise_again(self)
        _begin_with_a_synchronisation(self)


class _Again:
    """What a DiLoCo or LocalSGD does after each step of its inner optimizer, tried again where it fails."""

    def __init__(self, sync: Any) -> None:
        self._sync, self._manager = sync, sync._manager
        self._hook = sync._step_post_hook
        self._aside: tuple[Any, dict[str, torch.Tensor]] | None = None
        for fragment in fragments(sync):
            fragment._clear_local_parameters = partial(self._put_aside, fragment)

    def step_post_hook(self, *step: Any) -> None:
        manager, before = self._manager, self._manager.syncs
        self._hook(*step)
        failures, limit = manager._commit_failures, manager._max_retries
        try:
            for _ in range(TRIES - 1):
                if manager.syncs == before or manager.committed:
                    break
                logger.warning("a synchronisation failed; trying again")
                report_again()
                manager.not_without |= manager.members
                manager._max_retries = None  # it counts synchronisations, not tries
                self._synchronise(*step)
        finally:
            self._aside, manager._max_retries = None, limit
        if manager.committed:
            manager.not_without = frozenset()
        elif manager.syncs > before:
            manager.not_without |= manager.members
            manager._commit_failures = failures

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
