"""Asks the agents to save, again and again until all have answered: a message may be lost with a connection, and
an agent that is asked twice does it once. The state of the save is in the events (see saving.py)."""

from __future__ import annotations

import secrets
from typing import Any

from slurm_ft.controller.peers import Peers
from slurm_ft.controller.state import FINAL, RunState, State

REPEAT = 2.0


class Asking:
    """Who is asked, and when last (monotonic seconds)."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._asked_at = float("-inf")

    def request(self, state: RunState, why: str, within: float) -> dict[str, Any]:
        """The data of a SAVE_REQUESTED for the replicas whose ranks run now."""
        running = state.running
        return {
            "id": secrets.token_hex(6),
            "why": why,
            "within": within,
            "attempts": {str(replica): attempt for replica, attempt in running.items()},
            "replicas": [r.id for r in state.replicas if r.state not in FINAL | {State.FINISHED}],
            "hosts": {str(replica): len(state.replicas[replica].hosts) for replica in running},
        }

    def remind(self, state: RunState, now: float) -> None:
        """Ask those that have not answered, if it is time. A new save is asked for at once."""
        save = state.save
        if save is None:
            self._asked_at = float("-inf")
            return
        if now - self._asked_at < REPEAT:
            return
        self._asked_at = now
        silent = {replica for replica, _ in save.hosts | save.ranks}
        for replica in silent:
            if save.asked(replica, state.running.get(replica, -1)):
                message = {"type": "save", "id": save.id, "attempt": save.attempts[replica]}
                self._peers.tell(state.replicas[replica], message)
