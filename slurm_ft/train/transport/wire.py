"""The bytes between a donor and a receiver: who is there, small messages, chunks.

    donor      HELLO, nonce of the donor
    receiver   nonce of the receiver, proof = HMAC-SHA256(key, "receiver", both nonces)
    donor      proof = HMAC-SHA256(key, "donor", both nonces)
    receiver   {"step": N, "seconds": T}         both ends now know that the other holds the run's key
    donor      {"ok": true, "skeleton": ...}     or {"ok": false, "why": "..."}
    receiver   GET (chunk, digest of what it has of it, or zeros), any number, without waiting for answers
    donor      CHUNK (same or sent, bytes, digest) and the bytes, in the order of the GETs

Whoever cannot prove the key gets a random number and nothing else: the receiver proves itself first, and
neither end parses a word of the other before its proof. Only JSON and lengths are parsed after it. The bytes
are not encrypted, and one who can alter packets on their way could alter these.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

HELLO = b"slurm-ft transport 1\n"
NONCE = 32
PROOF = hashlib.sha256().digest_size
GET = struct.Struct("<Q16s")
CHUNK = struct.Struct("<BQ16s")
SAME, SENT = 0, 1
NOTHING = bytes(16)
LENGTH = struct.Struct("<Q")
TIMEVAL = struct.Struct("@ll")
MESSAGE_LIMIT = 1 << 28
"""Bytes of a message. The largest is the skeleton of a state: about 100 bytes a tensor."""
PIECES = 512
"""Buffers in one system call; Linux allows 1024."""
HANDSHAKE_SECONDS = 5.0


class TransportError(RuntimeError):
    """A state could not be given or got."""


class PeerGone(TransportError):
    """The connection broke. Another one may do."""


class Refused(TransportError):
    """The peer does not hold the run's key, or has no such step. Another try ends in the same way."""


class Connection:
    """A stream whose every wait ends at `deadline` (time.monotonic) or after `stall` seconds without a byte.

    Raises TimeoutError at the deadline and PeerGone for a peer that is silent or gone.

    The kernel keeps the time (SO_RCVTIMEO), so a whole chunk is one system call. Python's own time-outs would
    make it hundreds, each of which waits for the interpreter's lock and, on a busy host, for a processor.
    """

    def __init__(self, stream: socket.socket, deadline: float, stall: float) -> None:
        self.stream, self.deadline, self.stall = stream, deadline, stall
        stream.settimeout(None)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no time is left for this transfer")
        seconds, fraction = divmod(max(min(left, self.stall), 0.001), 1.0)
        limit = TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _broken(self, error: OSError) -> Exception:
        if isinstance(error, BlockingIOError):  # the kernel's word for a time-out
            if time.monotonic() >= self.deadline:
                return TimeoutError("the transfer did not end in time")
            return PeerGone(f"the peer was silent for {self.stall:g} s")
        return PeerGone(f"the connection broke: {error}")

    def send(self, pieces: Sequence[Any]) -> None:
        """Send all pieces (bytes or memoryviews) in order."""
        left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        while left:
            self._arm()
            try:
                sent = self.stream.sendmsg(left[:PIECES], [], socket.MSG_NOSIGNAL)
            except OSError as error:
                raise self._broken(error) from None
            left = _after(left, sent)

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill all pieces in order, straight from the kernel."""
        left = [piece for piece in pieces if len(piece)]
        while left:
            self._arm()
            try:
                got, _, _, _ = self.stream.recvmsg_into(left[:PIECES], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._broken(error) from None
            if not got:
                raise PeerGone("the peer closed the connection")
            left = _after(left, got)

    def receive(self, count: int) -> bytes:
        buffer = bytearray(count)
        self.receive_into([memoryview(buffer)])
        return bytes(buffer)

    def send_message(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.send([LENGTH.pack(len(body)), body])

    def receive_message(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(self.receive(LENGTH.size))
        if length > MESSAGE_LIMIT:
            raise Refused(f"the peer announces a message of {length} bytes")
        try:
            message = json.loads(self.receive(length))
        except ValueError:
            raise Refused("the peer's message is not understood") from None
        if not isinstance(message, dict):
            raise Refused("the peer's message is not understood")
        return message

    def close(self) -> None:
        self.stream.close()


def _after(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the pieces after their first `count` bytes."""
    for place, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[place + 1 :]]
        count -= len(piece)
    return []


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, HELLO + role + nonces, hashlib.sha256).digest()


def admit(connection: Connection, key: bytes) -> None:
    """The donor's half of the handshake. Raises Refused for a peer without the key."""
    mine = secrets.token_bytes(NONCE)
    connection.send([HELLO, mine])
    theirs, proof = connection.receive(NONCE), connection.receive(PROOF)
    if not hmac.compare_digest(proof, _proof(key, b"receiver", mine + theirs)):
        raise Refused("a peer without the run's key asked for the weights")
    connection.send([_proof(key, b"donor", mine + theirs)])


def introduce(connection: Connection, key: bytes) -> None:
    """The receiver's half. Raises Refused when the donor does not hold the key, or does not accept ours."""
    if connection.receive(len(HELLO)) != HELLO:
        raise Refused("the peer is no donor of this kind")
    theirs, mine = connection.receive(NONCE), secrets.token_bytes(NONCE)
    connection.send([mine, _proof(key, b"receiver", theirs + mine)])
    try:
        proof = connection.receive(PROOF)
    except PeerGone as error:
        raise PeerGone(f"{error} in the handshake: it is ending, or it has another secret") from None
    if not hmac.compare_digest(proof, _proof(key, b"donor", theirs + mine)):
        raise Refused("the peer does not hold the run's key")
