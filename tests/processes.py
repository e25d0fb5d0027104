"""What /proc says of another process, for tests.

After a SIGKILL the kernel needs a moment: wait until a process is gone (`wait_until(lambda: not lives(pid))`), and
assert it at once only where the code under test has waited for that end itself.
"""

from pathlib import Path


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat that follow the program's name; state and parent are the first two."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state(pid: int) -> str:
    """'R', 'S', 'T', 'Z', ... as proc(5) has them."""
    return stat(pid)[0]


def parent(pid: int) -> int:
    return int(stat(pid)[1])


def lives(pid: int) -> bool:
    """Does this process run? One that has ended and is not reaped yet does not."""
    try:
        return state(pid) not in "ZX"
    except OSError:
        return False
