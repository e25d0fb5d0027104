"""Single ranks on fake devices, in a process of their own. Each ends badly or says what the test wants to hear."""

import sys
import threading
from collections.abc import Callable

from slurm_ft.native import (
    Aborted,
    Communicator,
    Feature,
    InvalidUse,
    Library,
    Memory,
    NativeError,
    TimedOut,
    Unsupported,
    load,
    unique_id,
)


def raises(kind: type[NativeError], call: Callable[[], object], words: str = "") -> None:
    try:
        call()
    except kind as error:
        assert words in error.message, error.message
        return
    raise AssertionError(f"no {kind.__name__}")


def alone(library: Library) -> Communicator:
    comm = Communicator.create(library, unique_id(library), 0, 1)
    comm.wait()
    return comm


def print_id(library: Library) -> None:
    print(unique_id(library).hex())


def pair(library: Library) -> tuple[Communicator, Communicator]:
    group = unique_id(library)
    one, two = Communicator.create(library, group, 0, 2), Communicator.create(library, group, 1, 2)
    one.wait()
    two.wait()
    return one, two


def stuck_operation(library: Library) -> None:
    """A peer that never comes: a time-out, then an abort from another thread while one waits."""
    one, two = pair(library)
    data = bytearray(64)
    one.all_reduce(data)
    raises(TimedOut, lambda: one.wait(0.02))
    assert not one.ready()
    threading.Timer(0.01, one.abort).start()
    raises(Aborted, lambda: one.wait(30))
    raises(Aborted, lambda: one.all_reduce(data))
    one.close()
    two.close(0)
    print("fine")


def stuck_set_up(library: Library) -> None:
    comm = Communicator.create(library, unique_id(library), 1, 2)
    raises(InvalidUse, lambda: comm.all_reduce(bytearray(4)), "still being set up")
    raises(TimedOut, lambda: comm.wait(0.02))
    comm.abort()
    raises(Aborted, comm.wait)
    comm.close()
    print("fine")


def wrong_calls(library: Library) -> None:
    with alone(library) as comm:
        raises(InvalidUse, lambda: comm.shrink([0]))
        raises(InvalidUse, lambda: comm.broadcast(bytearray(4), root=1))
        child = comm.split(-1)
        assert child is None
    raises(InvalidUse, comm.ready, "closed already")
    raises(InvalidUse, comm.close, "closed already")
    raises(InvalidUse, lambda: Communicator.create(library, unique_id(library), 0, 1, device=2))
    print("fine")


def several_streams(library: Library) -> None:
    """Memory of the device, and a stream of the caller's."""
    with Memory.create(library, 4096) as memory, alone(library) as comm:
        memory.write(b"\x01\x00\x00\x00" * 1024)
        comm.all_reduce(memory.region("int32"), stream=0)
        comm.broadcast(memory.region("int32", offset=8, count=4))
        comm.wait()
        assert memory.read(4) == b"\x01\x00\x00\x00"
    print("fine")


def abort_hangs(library: Library) -> None:
    comm = alone(library)
    raises(TimedOut, lambda: comm.abort(0.05), "this process has to end")
    print("fine", flush=True)


def whole_life(library: Library) -> None:
    try:
        comm = Communicator.create(library, unique_id(library), 0, 1)
        comm.wait()
        comm.all_reduce(bytearray(4))
        comm.wait()
        comm.close()
        print("fine")
    except NativeError as error:
        assert "nccl" in error.message or "destroy" in error.message, error.message
        print(type(error).__name__)


def old_library(library: Library) -> None:
    assert Feature.COLLECTIVES in library.features
    assert not library.features & (Feature.SPLIT | Feature.SHRINK)
    one, two = pair(library)
    with one, two:
        raises(Unsupported, lambda: one.split(0), "ncclCommSplit")
        raises(Unsupported, lambda: one.shrink([1]), "ncclCommShrink")
        one.all_reduce(bytearray(4))
        two.all_reduce(bytearray(4))
        one.wait()
        two.wait()
    print("fine")


def no_library(library: Library) -> None:
    if Feature.COLLECTIVES in library.features:
        print("there is one")
        return
    assert any(line.startswith("collectives: absent: lib") for line in library.describe()), library.describe()
    raises(Unsupported, lambda: unique_id(library), "no collectives")
    with Memory.create(library, 4096) as memory:
        memory.write(b"x")
    print("fine")


if __name__ == "__main__":
    globals()[sys.argv[2]](load(sys.argv[1]))
