"""torchft's Lighthouse as a process of its own: `python lighthouse.py --host HOST --address-file FILE ...`.

The address file says where it is; agents read it for each connection. The head has emptied it before it starts a
Lighthouse: nobody may ask the new one before its quorum ids are beyond those of the last one (see quorum_ids.py).

torchft's extension module is loaded by its path, without the package around it: importing `torchft` imports
torch, which costs seconds and hundreds of megabytes that a quorum server does not need.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slurm_ft import env
from slurm_ft.agent.command import is_python
from slurm_ft.controller import quorum_ids
from slurm_ft.paths import write_atomic

EXTENSION = "_torchft"


def extension_path() -> Path | None:
    """torchft's extension module, or None where torchft is not installed. Imports nothing."""
    spec = importlib.util.find_spec("torchft")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"{EXTENSION}.*.so")):
            return path
    return None


def lack(command: Sequence[str], replicas: int, surroundings: Mapping[str, str]) -> str:
    """What to say when a run of Python programs that may want to meet has no Lighthouse, nor one of the user's own;
    '' when there is nothing."""
    if replicas < 2 or not is_python(command[0]) or env.LIGHTHOUSE in surroundings or extension_path() is not None:
        return ""
    return (
        "there is no Lighthouse, because torchft is not installed beside slurm-ft: each replica trains for itself "
        "(pip install --no-deps torchft==0.2.0 there; the Lighthouse needs no torch)"
    )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXTENSION, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(torchft: ModuleType, options: argparse.Namespace, port: int) -> Any:
    return torchft.LighthouseServer(
        bind=f"{options.host}:{port}",
        min_replicas=options.min_replicas,
        join_timeout_ms=options.join_timeout_ms,
        quorum_tick_ms=options.quorum_tick_ms,
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True, help="the address to listen on, which agents connect to")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on, if it can be had")
    parser.add_argument("--address-file", type=Path, required=True)
    parser.add_argument("--events", type=Path, required=True, help="the run's log, which holds the ids that were seen")
    for name in ("min-replicas", "join-timeout-ms", "quorum-tick-ms", "heartbeat-timeout-ms"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    path = extension_path()
    if path is None:
        parser.error("torchft is not installed; install slurm-ft[train]")
    # Blocked before the server starts its threads, so that the signal waits for sigwait and ends no thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    torchft = _load(path)
    try:
        server = _serve(torchft, options, options.port)
    except RuntimeError:
        if not options.port:
            raise
        server = _serve(torchft, options, 0)  # somebody else has the port now
    address = f"http://{options.host}:{server.address().rpartition(':')[2]}"
    seen = quorum_ids.highest_seen(options.events)
    if seen:
        reached = quorum_ids.push(torchft, address, seen + quorum_ids.MARGIN, options.min_replicas)
        print(f"slurm-ft: the Lighthouse counts its quorums on from {reached}; {seen} had been seen", flush=True)
    write_atomic(options.address_file, f"{address}\n", 0o600)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()


if __name__ == "__main__":
    main()
