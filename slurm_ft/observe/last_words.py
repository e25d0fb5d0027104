"""What a run that failed says at its end, so that nobody has to look for it: why, and the first failure of
each replica that was given up, with its traceback.
"""

from __future__ import annotations

from slurm_ft import events
from slurm_ft.controller.state import State
from slurm_ft.observe.explain import failure_lines
from slurm_ft.observe.ledger import Ledger
from slurm_ft.paths import RunPaths

MOST_REPLICAS = 3
LOG_LINES = 12


def last_words(paths: RunPaths, code: int) -> list[str]:
    """The lines to show for a run that ended with this exit code. From the events; from the controller's log
    when the run did not get as far."""
    if not code:
        return []
    ledger = Ledger(events.read(paths.events))
    if ledger.state.ended is None:
        return [f"the run ended without a last word; the end of {paths.controller_log}:", *_tail(paths)]
    lines = [f"run ended with exit code {ledger.state.ended}: {ledger.end_reason}"]
    failed = [r for r in ledger.state.replicas if r.state is State.FAILED and r.first_failure is not None]
    for replica in failed[:MOST_REPLICAS]:
        if replica.first_failure is not None:
            lines += ["", *failure_lines(replica.id, replica.first_failure)]
    if len(failed) > MOST_REPLICAS:
        lines.append(f"... and {len(failed) - MOST_REPLICAS} more replicas; see `slurm-ft report`")
    return lines


def _tail(paths: RunPaths) -> list[str]:
    try:
        return paths.controller_log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    except OSError as error:
        return [str(error)]
