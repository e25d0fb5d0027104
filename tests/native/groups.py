"""Ranks for the tests of collectives: functions that run in processes of their own."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIMIT = 60.0


class Ranks:
    """A process per rank that runs `body(rank, pipe, *arguments)`. At the end of a `with` block none is left."""

    def __init__(self, count: int, body: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=body, args=(rank, theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()

    def hear(self, rank: int) -> Any:
        """The next thing that a rank says; an exception in it is raised here."""
        assert self.pipes[rank].poll(LIMIT), f"rank {rank} says nothing"
        said = self.pipes[rank].recv()
        if isinstance(said, BaseException):
            raise said
        return said

    def hear_all(self) -> list[Any]:
        return [self.hear(rank) for rank in range(len(self.pipes))]

    def tell(self, rank: int, word: Any) -> None:
        self.pipes[rank].send(word)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid


def open_library(folder: str, platform: str = "host") -> Any:
    from slurm_ft.native import load

    return load(platform, {**os.environ, "SLURM_FT_NATIVE_LIB": folder})
