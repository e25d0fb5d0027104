"""All ranks of a replica go on from the same state: each tells what it has, and the newest that all have is taken.

Pure but for `exchange`, which uses the replica's store, served at MASTER_ADDR:MASTER_PORT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

LIVE, SNAPSHOT, NONE = "live", "snapshot", "none"
WITHIN = timedelta(seconds=120)


class Offer(NamedTuple):
    """One state that a rank could go on from. `mark` tells states of one step apart (see Kept)."""

    source: str
    step: int
    mark: str = ""


def choose(offers: Sequence[Sequence[Offer]], newer_than: int = -1) -> Offer | None:
    """The newest state that every rank has, live before snapshot; None when there is none above `newer_than`.

    Whether it is live or a snapshot may differ between ranks; what is given is the first rank's.
    """
    if not offers:
        return None
    common = set.intersection(*({(offer.step, offer.mark) for offer in rank} for rank in offers))
    able = [offer for offer in offers[0] if (offer.step, offer.mark) in common and offer.step > newer_than]
    return max(able, key=lambda offer: (offer.step, offer.mark, offer.source == LIVE), default=None)


def mine(offers: Sequence[Offer], chosen: Offer) -> Offer:
    """The chosen state as this rank has it, live if it can be."""
    same = [offer for offer in offers if (offer.step, offer.mark) == (chosen.step, chosen.mark)]
    return min(same, key=lambda offer: offer.source != LIVE)


def exchange(offers: Sequence[Offer], environ: Mapping[str, str], name: str = "") -> list[list[Offer]]:
    """The offers of all ranks for the training of this name, this one's among them. Raises what torch's store raises
    when a rank does not come."""
    rank, ranks = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return [list(offers)]
    from torch.distributed import TCPStore

    store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=WITHIN)
    keys = [f"slurm_ft/kept/{name}/{number}" for number in range(ranks)]
    store.set(keys[rank], json.dumps(offers))
    return [[Offer(*offer) for offer in json.loads(store.get(key))] for key in keys]
