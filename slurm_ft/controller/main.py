"""The controller's process: `python -m slurm_ft.controller.main --run-dir DIR --session ID ...`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys

from slurm_ft.channel import Server
from slurm_ft.controller.controller import EXIT_CRASHED, Controller
from slurm_ft.errors import SlurmFTError
from slurm_ft.launch import Launcher
from slurm_ft.launch.local import LocalLauncher
from slurm_ft.launch.srun import SrunLauncher, allocation_from
from slurm_ft.paths import RunPaths, read_json
from slurm_ft.slurm.hostlist import expand
from slurm_ft.spec import RunSpec

log = logging.getLogger("slurm_ft.controller")


def _launcher(spec: RunSpec) -> Launcher:
    return LocalLauncher() if spec.cluster == "local" else SrunLauncher(allocation_from(os.environ))


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
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
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
