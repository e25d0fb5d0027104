"""What the tests of the GPU libraries run in processes of their own, on fake devices."""

import contextlib
import ctypes
import os
import signal
import socket
import sys

from slurm_ft.native import Feature, InvalidUse, Memory, NativeError, Unsupported, dma_buf, load
from slurm_ft.native.library import DeviceInfo

SIZE = 100_000
PATTERN = bytes(range(250)) * 400


def live() -> tuple[int, int, int]:
    """What the fake driver says is allocated, reserved and mapped; it also forgets its counts of calls."""
    name = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so.7"}[sys.argv[1]]
    found = (ctypes.c_int * 3)()
    ctypes.CDLL(name).fake_gpu_live(found)
    return found[0], found[1], found[2]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def whole_life(platform: str) -> None:
    """Everything that memory can do, once, on the second device."""
    library = load(platform)
    assert library.platform == platform
    assert library.device_count() == 2
    assert Feature.MEMORY | Feature.DMABUF | Feature.SPLIT | Feature.SHRINK in library.features
    memory = Memory.create(library, SIZE, device=1)
    assert (memory.bytes, memory.reserved, memory.device) == (SIZE, 131072, 1)
    memory.write(PATTERN)
    assert memory.read() == PATTERN
    # Two exports, the first one closed: the kind of use that some releases break.
    os.close(memory.export())
    fd = memory.export()
    other = Memory.adopt(library, fd, SIZE, device=1)
    os.close(fd)
    assert other.imported and other.read() == PATTERN
    fd = other.export()
    with Memory.adopt(library, fd, SIZE, device=0) as third:
        os.close(fd)
        third.write(b"abcd", offset=8)
    other.flag(0x04030201, offset=4)
    assert memory.read(12) == PATTERN[:4] + b"\x01\x02\x03\x04abcd"
    with contextlib.suppress(Unsupported):
        memory.view()
        raise AssertionError("a view of GPU memory")
    piece = memory.dma_buf(offset=8, size=4)
    assert (piece.offset, piece.bytes) == (8, 131072)
    assert os.pread(piece.fd, 4, piece.offset) == b"abcd"
    os.close(piece.fd)
    for wrong in (lambda: dma_buf(library, memory.address, 131073), lambda: Memory.adopt(library, 0, SIZE)):
        try:
            wrong()
        except NativeError:
            continue
        raise AssertionError("a wrong use was not noticed")
    # A failed call leaves nothing behind that the next one would report.
    assert memory.read(4) == PATTERN[:4]
    other.close()
    memory.close()
    try:
        memory.close()
    except InvalidUse:
        assert live() == (0, 0, 0)
        print("fine")


def make_and_die(platform: str, channel: str) -> None:
    """Fill memory, hand its descriptor to whoever holds the other end, and be killed."""
    end = socket.socket(fileno=int(channel))
    memory = Memory.create(load(platform), SIZE)
    memory.write(PATTERN)
    socket.send_fds(end, [b"x"], [memory.export()])
    os.kill(os.getpid(), signal.SIGKILL)


def find_again(platform: str, fd: str) -> None:
    with Memory.adopt(load(platform), int(fd), SIZE) as memory:
        os.close(int(fd))
        assert memory.read() == PATTERN
    print("fine")


# Calls that give something back: made to fail, they lose it, and that is the driver's loss.
UNDOING = {"memUnmap", "memUnreserve", "memRelease", "deviceGet", "streamDestroy"}
UNDOING |= {"currentDevice", "useDevice", "contextRetain", "contextCurrent", "contextUse"}


def use_everything(platform: str) -> None:
    library = load(platform)
    with Memory.create(library, SIZE) as memory:
        memory.write(b"x")
        assert memory.read(1) == b"x"
        memory.flag(1, offset=4)
        os.close(memory.dma_buf().fd)
        fd = memory.export()
        try:
            Memory.adopt(library, fd, SIZE).close()
        finally:
            os.close(fd)
    free, whole = ctypes.c_uint64(), ctypes.c_uint64()
    library.call("sft_device_free", 0, ctypes.byref(free), ctypes.byref(whole))
    library.call("sft_device", 0, ctypes.byref(DeviceInfo()))


def each_call_fails(platform: str, *names: str) -> None:
    """Each call of the driver fails in turn, at its first and its second use: an error or not, but nothing is lost."""
    use_everything(platform)
    failed = set()
    for name, nth in [(name, nth) for name in names for nth in (1, 2)]:
        before = (live(), descriptors())
        os.environ["FAKE_FAIL"] = f"{name}:{nth}"
        try:
            use_everything(platform)
        except NativeError as error:
            assert "made to fail" in error.message, error.message
            failed.add(name)
        del os.environ["FAKE_FAIL"]
        after = (live(), descriptors())
        assert after == before or name in UNDOING, f"{name}:{nth}: {before} became {after}"
    use_everything(platform)
    print(" ".join(sorted(failed)))


if __name__ == "__main__":
    globals()[sys.argv[2]](sys.argv[1], *sys.argv[3:])
