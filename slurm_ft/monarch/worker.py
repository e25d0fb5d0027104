"""The process of a slot: `python -m slurm_ft.monarch.worker --run-dir DIR --slot N --incarnation N --host NAME`.

Monarch's worker loop in the main thread, and in another thread our connection to the job: it says where the loop
listens, then that it lives. When the job says nothing for ORPHAN_SECONDS, or says `leave`, the process ends at once,
and Monarch's processes below it end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import threading
import time

from slurm_ft.agent.address import address_towards
from slurm_ft.channel import HEARTBEAT, Client
from slurm_ft.errors import EXIT_TRY_AGAIN
from slurm_ft.monarch import tls
from slurm_ft.paths import RunPaths

ORPHAN_SECONDS = 10.0
BEAT = HEARTBEAT / 2


def free_port(address: str) -> int:
    """A port that is free now; each incarnation has a new one, since a loop cannot come back under an old address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


async def _talk(client: Client, hello: dict[str, object]) -> None:
    heard = time.monotonic()
    client.send(hello)

    async def beat() -> None:
        while time.monotonic() - heard < ORPHAN_SECONDS:
            await asyncio.sleep(BEAT)
            client.send({"type": "alive"})
        os._exit(EXIT_TRY_AGAIN)

    beating = asyncio.ensure_future(beat())
    while not beating.done():
        message = await client.receive()
        heard = time.monotonic()
        if message is not None and message["type"] == "leave":
            os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--host", default="", help="the name of this host; Slurm's by default")
    options = parser.parse_args()
    paths = RunPaths(options.run_dir)
    address = address_towards(paths.endpoint.read_text())
    name = f"{options.slot}.{options.incarnation}"
    tls.use_certificate(paths.secret, [address], f"worker-{name}")

    from monarch.actor import run_worker_loop_forever
    from monarch.job import new_service_proc_id, service_proc_addr

    where = f"[{address}]" if ":" in address else address
    listens = service_proc_addr(f"tls://{where}:{free_port(address)}", new_service_proc_id())
    hello = {
        "type": "hello",
        "slot": options.slot,
        "incarnation": options.incarnation,
        "host": options.host or os.environ.get("SLURMD_NODENAME", ""),
        "address": listens,
        "pid": os.getpid(),
    }

    def talk() -> None:
        async def within_a_loop() -> None:
            await _talk(Client(paths, name.encode()), hello)

        asyncio.run(within_a_loop())
        os._exit(EXIT_TRY_AGAIN)

    threading.Thread(target=talk, name="slurm-ft", daemon=True).start()
    # Who may attach is decided by the certificates; this argument of Monarch's has no other value yet.
    run_worker_loop_forever(address=listens, ca="trust_all_connections")


if __name__ == "__main__":
    main()
