"""Who looks after a run: a lease in the run folder, whose epoch fences off those who have lost it.

`lease/<epoch>` is one term of office. It is claimed by making the file, which one process alone can do
(O_EXCL), on NFS and Lustre as on a local disk; no lock is needed. Its holder, the head, writes a counter into
it every RENEW seconds as long as it can do its job. The highest epoch is the one that counts: whoever finds a
higher one than its own has been deposed, and leaves. Terms are never taken away, so an epoch is never given
twice.

A lease has gone stale when it has not *changed* for a while by the observer's own monotonic clock (`Watch`).
Clocks of two hosts are never compared; the times in a claim are for people.

A term file is rewritten in place, at the same length each time, and closed: on NFS that is what the next
`open` on another host sees, where a renamed file may hide behind a cached folder. Whoever reads half of a
rewrite sees a change, which is true.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_ft.errors import UsageError

RENEW = 1.0
"""Seconds between two renewals."""
STALE = 5.0
"""Seconds without a renewal after which a head that is started anew takes the lease of another machine."""
SIZE = 1024
"""Bytes of a term file: more than any claim needs, and less than a block."""


@dataclass(frozen=True)
class Claim:
    """A term of office, as its file tells it.

    `at` is when it was claimed (seconds since 1970, by the claimant's clock), `silence` for how many seconds
    nobody had been heard then, `before` whose host was followed, `up` when its head was there. `ended` is the
    run's exit code once the run is over.
    """

    epoch: int
    host: str = ""
    machine: str = ""
    pid: int = 0
    job_id: str = ""
    at: float = 0.0
    silence: float = 0.0
    before: str = ""
    up: float = 0.0
    beat: int = 0
    ended: int | None = None

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode().ljust(SIZE - 1) + b"\n"


def machine() -> str:
    """What a process number is unique in: this boot of this kernel, and the namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def newest(folder: Path) -> Claim | None:
    """The claim that counts, or None where there is none yet. Raises OSError when the folder cannot be read."""
    epoch = newest_epoch(folder)
    return read(folder, epoch) if epoch else None


def newest_epoch(folder: Path) -> int:
    """The highest epoch that was claimed; 0 before the first. Raises OSError."""
    try:
        return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
    except FileNotFoundError:
        return 0


def read(folder: Path, epoch: int) -> Claim:
    """The claim of an epoch; one of nobody where its maker died before it had written it. Raises OSError."""
    known = {field.name for field in dataclasses.fields(Claim)}
    try:
        value = json.loads((folder / str(epoch)).read_bytes())
        return Claim(**{name: item for name, item in value.items() if name in known})
    except (ValueError, TypeError, AttributeError):
        return Claim(epoch)


def take(folder: Path, claim: Claim) -> bool:
    """Claim an epoch; False when somebody else was faster. Raises OSError when nothing can be written."""
    folder.mkdir(exist_ok=True)
    try:
        descriptor = os.open(folder / str(claim.epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, claim.to_bytes())
    finally:
        os.close(descriptor)
    return True


FAR = 1_000_000
"""Between the beats of a head and those of its controller: neither is ever taken for one of the other's."""


class Deposed(Exception):
    """Another head has begun a higher epoch."""


class Watch:
    """For how long a lease has not changed, by the observer's clock."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = 0.0

    def unchanged(self, now: float, seen: object) -> float:
        """Seconds since what is seen differed from what was seen before; 0 at the first look and whenever
        nothing can be seen (None)."""
        if seen is None or seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since


class Lease:
    """The holder's end of a term. Its writes reach no other term's file, also when it has lost the lease."""

    def __init__(self, folder: Path, claim: Claim) -> None:
        self.folder, self.claim = folder, claim
        self._path = folder / str(claim.epoch)
        # Held open for as long as we live: that tells which process is the head (see `held_by_process`).
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    @staticmethod
    def resume(folder: Path, epoch: int) -> Lease:
        """The term that another process has claimed for us: this process is its holder from now on."""
        claim = dataclasses.replace(read(folder, epoch), pid=os.getpid(), machine=machine(), up=time.time())
        lease = Lease(folder, claim)
        lease.renew()
        return lease

    @staticmethod
    def share(folder: Path, epoch: int) -> Lease:
        """The term that our head holds, for its controller: it renews it for the head. The head does so itself until it
        sees that we do. Raises OSError."""
        claim = read(folder, epoch)
        return Lease(folder, dataclasses.replace(claim, beat=claim.beat + FAR))

    @property
    def epoch(self) -> int:
        return self.claim.epoch

    def deposed_by(self) -> int:
        """The epoch that has ended this one, or 0. Raises OSError when that cannot be told."""
        epoch = newest_epoch(self.folder)
        return epoch if epoch > self.epoch else 0

    def renew(self) -> None:
        """Show that we are here. Raises OSError."""
        self._write(dataclasses.replace(self.claim, beat=self.claim.beat + 1))

    def release(self, code: int) -> None:
        """The run is over, with this exit code: nobody need take over. Raises OSError."""
        self._write(dataclasses.replace(self.claim, beat=self.claim.beat + 1, ended=code))

    def _write(self, claim: Claim) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, claim.to_bytes(), 0)
        finally:
            os.close(descriptor)
        self.claim = claim

    def close(self) -> None:
        os.close(self._descriptor)


def acquire(
    folder: Path,
    host: str,
    job_id: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Become the head of a run that nobody looks after.

    Another machine's lease that its holder did not give back is watched for STALE seconds first. Raises
    UsageError when somebody looks after the run, OSError when nothing can be written.
    """
    seen: Claim | None = None
    since = 0.0
    while True:
        there = newest(folder)
        if there is not None and not _is_free(folder, there):
            if there.machine == machine() or (
                seen is not None and (there.epoch, there.beat) != (seen.epoch, seen.beat)
            ):
                raise _held(there)
            if seen is None:
                seen, since = there, clock()
            if clock() - since < STALE:
                sleep(RENEW / 4)
                continue
        epoch, before = (there.epoch + 1, there.host) if there is not None else (1, "")
        now = time.time()
        claim = Claim(epoch, host, machine(), os.getpid(), job_id, at=now, before=before, up=now)
        if take(folder, claim):
            return Lease(folder, claim)


def _is_free(folder: Path, claim: Claim) -> bool:
    """Can we know at once that nobody holds this claim?"""
    died = claim.machine == machine() and not held_here(folder, claim)
    return claim.ended is not None or not claim.pid or died


def _held(claim: Claim) -> UsageError:
    return UsageError(
        f"the run is looked after already, by process {claim.pid} on {claim.host} (job {claim.job_id})",
        "see it with `slurm-ft status`, end it with `slurm-ft stop`",
    )


def held_by_process(folder: Path, claim: Claim, proc: Path = Path("/proc")) -> bool:
    """Does the process of this claim, on this machine, hold it? It must have the term's file open: a number
    alone may belong to somebody else by now."""
    try:
        term = os.stat(folder / str(claim.epoch))
        descriptors = list((proc / str(claim.pid) / "fd").iterdir())
    except OSError:
        return False
    return any(_is_same(descriptor, term) for descriptor in descriptors)


def held_here(folder: Path, claim: Claim, proc: Path = Path("/proc")) -> bool:
    """Does any process of this machine hold this claim? A controller whose head was killed ends its run in order,
    and until then the run is looked after."""
    pids = (int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())
    return any(held_by_process(folder, dataclasses.replace(claim, pid=pid), proc) for pid in pids)


def _is_same(descriptor: Path, file: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(descriptor), file)
    return False
