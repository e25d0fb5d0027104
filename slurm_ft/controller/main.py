"""The controller's process: `python -m slurm_ft.controller.main --run-dir DIR --epoch N ...`."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import dataclasses
import logging
import logging.handlers
import os
import queue
import signal
import sys
import threading

from slurm_ft.channel import Server
from slurm_ft.controller.controller import EXIT_CRASHED, Controller
from slurm_ft.controller.tenure import Tenure
from slurm_ft.errors import SlurmFTError
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.session import Session
from slurm_ft.launch.srun import SrunLauncher
from slurm_ft.lease import Lease
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.spec import RunSpec

LAST_LINES_WITHIN = 2.0
log = logging.getLogger("slurm_ft.controller")


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
    session = Session.read(paths)
    tenure = Tenure(Lease.share(paths.lease, options.epoch))
    allocation = dataclasses.replace(session.allocation, options=tuple(spec.host.srun_args))
    launcher = LocalLauncher() if spec.cluster == "local" else SrunLauncher(allocation)
    server = Server(paths, options.address, tenure.epoch)
    controller = Controller(paths, spec, launcher, server, session.id, tenure)
    code = await controller.run(list(session.hosts), session.job_id, options.host)
    if not tenure.over:
        with contextlib.suppress(BrokenPipeError):  # the head has died
            os.write(options.last_word, str(code).encode())
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run-dir", "host", "address"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--epoch", type=int, required=True, help="the term of office that this controller serves")
    parser.add_argument("--last-word", type=int, required=True, help="the descriptor that takes the run's exit code")
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
