"""A Monarch program in the form of Monarch's own documentation: it is given hosts and knows nothing of slurm-ft.

python monarch_program.py             on this machine, as Monarch itself offers it
python monarch_program.py N SPARES    on a slurm-ft allocation; a worker loop and a host are lost on the way
"""

import os
import signal
import socket
import sys
import time

if len(sys.argv) > 1:
    from slurm_ft.monarch import SlotLost, SlurmFTJob

from monarch.actor import Actor, current_rank, endpoint, this_host


class Counter(Actor):
    def __init__(self, start: int) -> None:
        self.value = start

    @endpoint
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @endpoint
    def where(self) -> tuple[int, str]:
        return current_rank().rank, os.environ.get("SLURMD_NODENAME", socket.gethostname())


def program(hosts) -> list[tuple[int, str]]:
    """Spawn, call all, call one, slice, collect."""
    processes = hosts.spawn_procs(per_host={"gpus": 2})
    counters = processes.spawn("counter", Counter, 10)
    assert set(counters.add.call(1).get().values()) == {11}
    counters.slice(gpus=0).add.call(5).get()
    values = [value for _, value in counters.add.call(0).get().items()]
    assert values == [16, 11] * (len(values) // 2), values
    return [value for _, value in counters.where.call().get().items()]


def main() -> None:
    if len(sys.argv) == 1:
        print(program(this_host()))
        return
    with SlurmFTJob({"trainers": int(sys.argv[1])}, spares=int(sys.argv[2])) as job:
        print("all placed", sorted({host for _, host in program(job.state().trainers)}), flush=True)
        slot = job.slots[1]
        alone = slot.host_mesh.spawn_procs(per_host={"gpus": 1}).spawn("alone", Counter, 0)
        assert list(slot.race(alone.add.call(1)).values()) == [1]
        if sys.argv[3:] == ["wait"]:  # for somebody who kills the host
            print("kill the host", slot.host, flush=True)
        else:
            os.kill(slot.pid, signal.SIGKILL)
        began = time.monotonic()
        try:
            while True:
                slot.race(alone.add.call(1))
                time.sleep(0.05)
        except SlotLost as error:
            print("lost", error, flush=True)
        new = job.replacement(slot)
        print(f"replaced on {new.host} after {time.monotonic() - began:.1f} s", flush=True)
        print("all placed", sorted({host for _, host in program(job.state().trainers)}), flush=True)


if __name__ == "__main__":
    main()
