"""The init of one pretended host: starts its daemon and adopts every orphan below it.

A process whose parent has ended gets the nearest "subreaper" above it for a parent. This is one. So whatever a job
does on a pretended host (fork twice, clear its environment, start a session) stays below the host's init, can be
found there, and is reaped when it ends, also in a container whose own init reaps nothing.

The end of the daemon does not end the host: its jobs live on. It is written to the log, where `up` looks for it.

Run as a plain script and with nothing imported from slurm_ft: it starts in a few milliseconds and stays small.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36
ENDED = "devcluster: the daemon has ended with exit code "


def main(command: list[str]) -> None:
    """Run the command, reap all that ends, and end when nothing is left below."""
    # Whoever ends the cluster ends us last. A handler, unlike SIG_IGN, is not inherited by what we start.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    daemon = subprocess.Popen(command, start_new_session=True)
    os.close(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid == daemon.pid:
                daemon.returncode = os.waitstatus_to_exitcode(status)
                print(f"{ENDED}{daemon.returncode}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
