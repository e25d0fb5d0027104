"""What single ranks do in the tests of collectives. Imported by their processes; says its results through a pipe."""

import array
import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from slurm_ft.native import Communicator, Library, NativeError
from tests.native.groups import open_library

Pipe = Connection
LONG = 60.0


def in_group(
    rank: int,
    pipe: Pipe,
    place: tuple[str, str],
    group: bytes,
    ranks: int,
    body: Callable[..., Any],
    rest: tuple[Any, ...],
) -> None:
    """Join, then say what `body` gives."""
    library = open_library(*place)
    try:
        with Communicator.create(library, group, rank, ranks) as comm:
            comm.wait(LONG)
            pipe.send(body(library, comm, rank, ranks, pipe, *rest))
            pipe.poll(LONG)  # stay until the test is done with this rank
    except BaseException as error:
        pipe.send(error if isinstance(error, NativeError) else RuntimeError(repr(error)))
        raise


def reductions(_: Library, comm: Communicator, rank: int, ranks: int, __: Pipe, seed: int) -> list[bytes]:
    """Many sizes, types and reductions, one after the other without waiting in between."""
    dice = random.Random(seed)
    results = []
    for _number in range(40):
        count = dice.choice([0, 1, 2, 15, 16, 17, 1000, 65536, 65537, 200_000])
        kind = dice.choice("bBiIqQfd")
        reduction = dice.choice(["sum", "product", "max", "min"])
        data = array.array(kind, [(rank + 1) * (1 + i % 3) for i in range(count)])
        comm.all_reduce(data, reduction=reduction)
        comm.broadcast(data, root=dice.randrange(ranks))
        results.append(data)
    comm.wait(LONG)
    return [data.tobytes() for data in results]


def one_reduction(_: Library, comm: Communicator, rank: int, ranks: int, __: Pipe, count: int) -> list[float]:
    data = array.array("f", [float(rank + 1)] * count)
    comm.all_reduce(data)
    comm.wait(LONG)
    return [data[0], data[-1]]


def caught(comm: Communicator, data: Any) -> tuple[str, str, float]:
    """Reduces until something goes wrong: its class, its words, and when it was seen."""
    try:
        for _ in range(1_000_000):
            comm.all_reduce(data)
            comm.wait(LONG)
    except NativeError as error:
        return type(error).__name__, error.message, time.monotonic()
    return "nothing", "", 0.0


def reduce_until_error(
    _: Library, comm: Communicator, rank: int, ranks: int, pipe: Pipe, idle: tuple[int, ...]
) -> tuple[str, str, float]:
    """Ranks in `idle` only stay; the others reduce, which blocks, and say that they are about to."""
    pipe.send(os.getpid())
    if rank in idle:
        pipe.poll(LONG)
        return "idle", "", 0.0
    return caught(comm, array.array("f", [1.0] * 100_000))


def shrink_after_error(
    library: Library, comm: Communicator, rank: int, ranks: int, pipe: Pipe, lost: int
) -> tuple[str, list[float]]:
    """Lose a peer, go on without it."""
    pipe.send(os.getpid())
    if rank == lost:
        pipe.poll(LONG)
    name, *_ = caught(comm, array.array("f", [1.0] * 1000))
    with comm.shrink([lost]) as smaller:
        smaller.wait(LONG)
        return name, one_reduction(library, smaller, rank, ranks, pipe, 100)


def split_by_parity(library: Library, comm: Communicator, rank: int, ranks: int, pipe: Pipe) -> Any:
    """Even ranks form a group in reverse order, odd ones get none; then the same again, all in one."""
    child = comm.split(-1 if rank % 2 else 7, key=-rank)
    comm.wait(LONG)
    result: list[Any] = [None]
    if child is not None:
        with child:
            child.wait(LONG)
            data = array.array("i", [rank])
            child.broadcast(data, root=0)
            child.wait(LONG)
            result = [data[0]]
    again = comm.split(0, key=rank)
    assert again is not None
    with again:
        again.wait(LONG)
        result += one_reduction(library, again, rank, ranks, pipe, 3)
    return result


def different_calls(_: Library, comm: Communicator, rank: int, ranks: int, pipe: Pipe) -> tuple[str, str, float]:
    data = array.array("f", [1.0] * (10 + rank))
    return caught(comm, data)


def skips_one(_: Library, comm: Communicator, rank: int, ranks: int, pipe: Pipe) -> tuple[str, str, float]:
    data = array.array("f", [1.0] * 10)
    if rank == 0:
        comm.broadcast(array.array("f", [1.0] * 10))
    return caught(comm, data)
