"""Memory on the host: it outlives its process, and misuse is an exception."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys

import pytest

from slurm_ft.native import InvalidUse, Library, Memory, OutOfMemory, Unsupported, dma_buf
from slurm_ft.native.errors import Status
from tests.native import workshop

MIB = 1 << 20


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_written_is_read_and_seen_in_another_mapping(host: Library) -> None:
    with Memory.create(host, 3 * MIB) as memory:
        memory.write(b"state of step 7", offset=MIB)
        fd = memory.export()
        with Memory.adopt(host, fd, 3 * MIB) as other:
            os.close(fd)
            assert other.imported and not memory.imported
            assert other.read(15, offset=MIB) == b"state of step 7"
            other.write(b"8", offset=MIB + 14)
        assert memory.read(15, offset=MIB) == b"state of step 8"


def test_its_size_is_kept_and_rounded_for_the_device(host: Library) -> None:
    with Memory.create(host, 5000) as memory:
        assert (memory.bytes, memory.reserved % 4096, memory.device) == (5000, 0, 0)
        assert memory.reserved >= 5000
        assert memory.read() == bytes(5000)


MAKER = """
import os, signal, socket, sys
from slurm_ft.native import Memory, load
channel = socket.socket(fileno=int(sys.argv[1]))
memory = Memory.create(load("host"), 1 << 20)
memory.write(bytes(range(256)) * 4096)
socket.send_fds(channel, [b"x"], [memory.export()])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_outlives_a_process_that_is_killed(host: Library) -> None:
    """The test plays the keeper: it has a descriptor, and the maker is dead by kill -9."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        environ = {**os.environ, "PYTHONPATH": str(workshop.ROOT), "SLURM_FT_NATIVE_LIB": str(host.path.parent)}
        command = [sys.executable, "-c", MAKER, str(theirs.fileno())]
        with subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()]) as maker:
            ours.settimeout(60)
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            assert maker.wait(60) == -signal.SIGKILL
    with Memory.adopt(host, fds[0], MIB) as memory:
        os.close(fds[0])
        assert memory.read() == bytes(range(256)) * 4096


def test_a_view_is_a_buffer_and_stays_valid_after_close(host: Library) -> None:
    memory = Memory.create(host, 4096)
    view = memory.view()
    view[:5] = b"hello"
    assert memory.read(5) == b"hello"
    memory.close()
    assert view[:5] == b"hello"
    view.close()


def test_a_tensor_can_lie_in_it(host: Library) -> None:
    torch = pytest.importorskip("torch")
    with Memory.create(host, 4096) as memory:
        tensor = torch.frombuffer(memory.view(), dtype=torch.float32)
        tensor.fill_(1.5)
        assert memory.read(4) == b"\x00\x00\xc0\x3f"


def test_a_flag_is_a_word(host: Library) -> None:
    with Memory.create(host, 4096) as memory:
        memory.flag(0xDEADBEEF, offset=8)
        assert memory.read(4, offset=8) == 0xDEADBEEF.to_bytes(4, sys.byteorder)
        for value, offset in [(1, 6), (1, 4096), (-1, 0), (1 << 32, 0)]:
            with pytest.raises(InvalidUse):
                memory.flag(value, offset=offset)


def test_use_after_close_and_a_second_close_are_errors(host: Library) -> None:
    memory = Memory.create(host, 4096)
    memory.close()
    uses = (memory.close, memory.export, memory.view, memory.read, lambda: memory.write(b"x"), lambda: memory.flag(1))
    for use in (*uses, lambda: memory.region("float32"), memory.dma_buf):
        with pytest.raises(InvalidUse, match="is closed already") as caught:
            use()
        assert caught.value.status is Status.BAD_HANDLE


def test_closing_inside_a_with_block_is_no_second_close(host: Library) -> None:
    with Memory.create(host, 4096) as memory:
        memory.close()


@pytest.mark.parametrize("size", [0, -1, 1 << 62, 1 << 70])
def test_a_size_that_cannot_be_is_refused(host: Library, size: int) -> None:
    with pytest.raises(InvalidUse):
        Memory.create(host, size)


def test_bytes_outside_of_it_are_refused(host: Library) -> None:
    with Memory.create(host, 100) as memory:
        for offset, size in [(0, 101), (100, 1), (1 << 62, 1), (101, 0), (-1, 1)]:
            with pytest.raises(InvalidUse):
                memory.read(size, offset=offset)
        with pytest.raises(InvalidUse):
            memory.write(bytes(101))
        with pytest.raises(InvalidUse):
            memory.region("float32", offset=2)
        with pytest.raises(InvalidUse):
            memory.region("float32", count=26)
        assert memory.read(0, offset=100) == b""


def test_a_device_that_is_not_there_is_refused(host: Library) -> None:
    with pytest.raises(InvalidUse, match="device 1 of 1"):
        Memory.create(host, 4096, device=1)


def test_a_descriptor_of_something_else_is_refused(host: Library) -> None:
    with open(os.devnull, "rb") as nothing, pytest.raises(InvalidUse):
        Memory.adopt(host, nothing.fileno(), 4096)
    unsealed = os.memfd_create("other")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(InvalidUse, match="no memory of slurm-ft"):
        Memory.adopt(host, unsealed, 4096)
    os.close(unsealed)
    with pytest.raises(InvalidUse):
        Memory.adopt(host, unsealed, 4096)


def test_more_than_was_exported_cannot_be_adopted(host: Library) -> None:
    with Memory.create(host, 4096) as memory:
        fd = memory.export()
        with pytest.raises(InvalidUse, match="has 4096 bytes, 4097 were asked for"):
            Memory.adopt(host, fd, 4097)
        os.close(fd)


def test_a_holder_of_the_descriptor_cannot_cut_it(host: Library) -> None:
    with Memory.create(host, 4096) as memory:
        fd = memory.export()
        with pytest.raises(OSError) as caught:
            os.ftruncate(fd, 0)
        assert caught.value.errno == errno.EPERM
        os.close(fd)


def test_no_room_is_an_error_and_no_signal(host: Library) -> None:
    with pytest.raises(OutOfMemory):
        Memory.create(host, 1 << 47, populate=True)


def test_descriptors_are_given_back(host: Library) -> None:
    before = open_descriptors()
    for _ in range(20):
        with Memory.create(host, 4096, populate=True) as memory:
            fd = memory.export()
            Memory.adopt(host, fd, 4096).close()
            os.close(fd)
    forgotten = Memory.create(host, 4096)
    del forgotten
    gc.collect()
    assert open_descriptors() == before


def test_an_exported_descriptor_is_not_inherited(host: Library) -> None:
    with Memory.create(host, 4096) as memory:
        fd = memory.export()
        assert not os.get_inheritable(fd)
        os.close(fd)


def test_host_memory_has_no_dma_buf_and_says_so(host: Library) -> None:
    with Memory.create(host, 4096) as memory:
        with pytest.raises(Unsupported, match="dma-buf"):
            memory.dma_buf()
        with pytest.raises(Unsupported):
            dma_buf(host, memory.address, 1)
