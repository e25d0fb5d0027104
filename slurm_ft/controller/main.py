"""The controller's process: `python -m slurm_ft.controller.main --run-dir DIR --session ID ...`."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading

from slurm_ft.channel import Server
from slurm_ft.controller.controller import EXIT_CRASHED, Controller
from slurm_ft.errors import SlurmFTError
from slurm_ft.launch import Launcher
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.srun import SrunLauncher, allocation_from
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.hostlist import expand
from slurm_ft.spec import RunSpec

LAST_LINES_WITHIN = 2.0
log = logging.getLogger("slurm_ft.controller")


def _launcher(spec: RunSpec) -> Launcher:
    if spec.cluster == "local":
        return LocalLauncher()
    return SrunLauncher(allocation_from(os.environ, spec.host.srun_args))


def _log_in_a_thread() -> None:
    """Have log lines written by a thread: the log is in the run folder, whose file system may stall. At exit the
    thread has a moment to write what is left."""
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    listener = logging.handlers.QueueListener(lines, handler)
    listener.start()
    logging.basicConfig(level=logging.INFO, handlers=[logging.handlers.QueueHandler(lines)])

    def stop() -> None:
        stopper = threading.Thread(target=listener.stop, daemon=True)
        stopper.start()
        stopper.join(LAST_LINES_WITHIN)

    atexit.register(stop)


async def _main(options: argparse.Namespace) -> int:
    paths = RunPaths(options.run_dir)
    spec = RunSpec.from_json(read_json(paths.spec))
    server = Server(paths, options.address)
    controller = Controller(paths, spec, _launcher(spec), server, options.session)
    return await controller.run(expand(options.hosts), options.job_id, options.host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run-dir", "session", "hosts", "job-id", "host", "address"):
        parser.add_argument(f"--{name}", required=True)
    _log_in_a_thread()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how children end
    try:
        sys.exit(asyncio.run(_main(parser.parse_args())))
    except SlurmFTError as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception:
        log.exception("the controller failed")
        sys.exit(EXIT_CRASHED)


if __name__ == "__main__":
    main()
