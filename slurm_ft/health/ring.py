"""What a host can only find out together with the others: is the folder shared, are they reached, whose clock is off.

Each host writes a token with its address and port into a folder of the check's own. Who sees all tokens sees the
shared folder. Then each calls the next one of the list, so n hosts make n connections, and both tell their time.
The port is open for some seconds and answers one who knows the check's word with the time, and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SHARED_WITHIN = 10.0
"""Seconds until a file must be seen by the others; NFS keeps what it knows of a folder for 3 s and more."""
CALL_WITHIN = 3.0
SKEW_LIMIT = 2.0
"""Seconds. Slurm's credentials bear minutes, but logs of several hosts cannot be put in order beyond this."""


class Post:
    """A host's port: answers `word` with the time."""

    def __init__(self, address: str, word: str) -> None:
        self._word = word.encode()
        self._socket = socket.create_server((address, 0))
        self._called = threading.Event()
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(CALL_WITHIN)
                    if connection.recv(256) == self._word:
                        connection.sendall(f"{time.time():.6f}".encode())
                        self._called.set()

    def wait(self, seconds: float) -> bool:
        """Until somebody has called."""
        return self._called.wait(seconds)


def call(address: str, port: int, word: str) -> float:
    """How far ahead of ours the clock of the other is, in seconds; half the round trip is the error. Raises OSError."""
    with socket.create_connection((address, port), CALL_WITHIN) as connection:
        connection.settimeout(CALL_WITHIN)
        begun = time.time()
        connection.sendall(word.encode())
        answer = connection.recv(64)
        ended = time.time()
    if not answer:
        raise ConnectionError("it hung up")
    return float(answer) - (begun + ended) / 2


def write_token(folder: Path, host: str, facts: Mapping[str, object]) -> None:
    hidden = folder / f".{host}"
    hidden.write_text(json.dumps(facts), encoding="utf-8")
    hidden.rename(folder / host)


def tokens(folder: Path, hosts: Sequence[str], seconds: float = SHARED_WITHIN) -> dict[str, dict[str, object]]:
    """The tokens of all these hosts, or of those that were seen in time."""
    deadline = time.monotonic() + seconds
    found: dict[str, dict[str, object]] = {}
    while len(found) < len(hosts):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():  # listing makes NFS look again
                if path.name in hosts and path.name not in found:
                    found[path.name] = json.loads(path.read_text(encoding="utf-8"))
        if len(found) == len(hosts) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found


def clocks(hosts: Sequence[str], ahead: Mapping[str, float]) -> dict[str, float]:
    """By how many seconds each host's clock is ahead of most of them. `ahead[h]`: of h's next one against h.

    Pure. A host behind one that could not be asked is left out, since nothing is known of it.
    """
    offsets = {hosts[0]: 0.0} if hosts else {}
    for host, following in itertools.pairwise(hosts):
        if host in offsets and host in ahead:
            offsets[following] = offsets[host] + ahead[host]
    middle = sorted(offsets.values())[len(offsets) // 2] if offsets else 0.0
    return {host: offset - middle for host, offset in offsets.items()}


def clock_faults(hosts: Sequence[str], ahead: Mapping[str, float]) -> dict[str, str]:
    """A sentence for each host whose clock is off. Pure."""
    return {
        host: f"its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the others'"
        for host, offset in clocks(hosts, ahead).items()
        if abs(offset) > SKEW_LIMIT
    }
