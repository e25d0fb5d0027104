"""The local twin of `srun`: starts one agent per local host and waits, in a session of its own.

    python localstep.py HOST [HOST ...] -- AGENT-ARGV

As with `srun --kill-on-bad-exit`, the bad end of one agent ends the others. The agents die with this
process, and their ranks with them. Uses the standard library alone and is run by its path, so that it
starts in a moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited "ignore" would hide how agents end
    split = sys.argv.index("--")
    hosts, command = sys.argv[1:split], sys.argv[split + 1 :]
    libc = ctypes.CDLL(None)
    leader = os.getpid()

    def die_with_leader() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != leader:
            os.kill(os.getpid(), signal.SIGKILL)

    agents = [subprocess.Popen([*command, f"--host={host}"], preexec_fn=die_with_leader) for host in hosts]

    def pass_on(number: int, _: object) -> None:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worst, left = 0, {agent.pid for agent in agents}
    while left:
        pid, status = os.wait()
        if pid not in left:
            continue
        left.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code
        worst = max(worst, code)
        if code:
            for other in left:
                os.kill(other, signal.SIGKILL)
    return worst


if __name__ == "__main__":
    sys.exit(main())
