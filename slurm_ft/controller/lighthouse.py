"""torchft's Lighthouse as a process of its own: `python lighthouse.py --bind HOST:PORT --address-file FILE ...`.

torchft's extension module is loaded by its path, without the package around it: importing `torchft` imports
torch, which costs seconds and hundreds of megabytes that a quorum server does not need.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
from pathlib import Path
from types import ModuleType

from slurm_ft.paths import write_atomic

EXTENSION = "_torchft"


def extension_path() -> Path | None:
    """torchft's extension module, or None where torchft is not installed. Imports nothing."""
    spec = importlib.util.find_spec("torchft")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob(f"{EXTENSION}.*.so")):
            return path
    return None


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXTENSION, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--advertise", required=True, help="the host name or address that agents connect to")
    parser.add_argument("--address-file", type=Path, required=True)
    for name in ("min-replicas", "join-timeout-ms", "quorum-tick-ms", "heartbeat-timeout-ms"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    path = extension_path()
    if path is None:
        parser.error("torchft is not installed; install slurm-ft[train]")
    # Blocked before the server starts its threads, so that the signal waits for sigwait and ends no thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = _load(path).LighthouseServer(
        bind=options.bind,
        min_replicas=options.min_replicas,
        join_timeout_ms=options.join_timeout_ms,
        quorum_tick_ms=options.quorum_tick_ms,
        heartbeat_timeout_ms=options.heartbeat_timeout_ms,
    )
    port = server.address().rpartition(":")[2]
    write_atomic(options.address_file, f"http://{options.advertise}:{port}\n", 0o600)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()


if __name__ == "__main__":
    main()
