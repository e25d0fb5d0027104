"""The process of a mesh on one host: `python -m slurm_ft.mesh.remote.host --folder DIR --slot N --incarnation N`.

It forks the host's workers from a zygote, hands messages on between them and the client without looking
into their payloads, and tells of every worker's end. A call to all workers of a host reaches it as one
message, and what they answer at about the same time goes back as one.

It leaves, and its workers with it, when the client says so or cannot be reached any more: the client is
where the mesh lives, and a message lost on a broken connection could be waited for in vain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from slurm_ft import env
from slurm_ft.agent.address import address_towards
from slurm_ft.agent.forker import Forker
from slurm_ft.agent.preload import host_has_gpu
from slurm_ft.agent.ranks import split_cpus
from slurm_ft.agent.visibility import rank_surroundings, visibility
from slurm_ft.channel import HEARTBEAT
from slurm_ft.errors import EXIT_DONE, EXIT_FAILED
from slurm_ft.mesh.remote.framing import Framed, Header, serve_framed
from slurm_ft.mesh.remote.step import mesh_file, worker_log
from slurm_ft.mesh.remote.wire import HostEnd
from slurm_ft.native import probes
from slurm_ft.paths import RunPaths, read_json

WORKER = (sys.executable, "-c", "from slurm_ft.mesh.remote.worker import main; main()")
PRELOAD = ("slurm_ft.mesh.remote.worker",)
FORKS_AT_ONCE = 32
"""Requests that the zygote's socket holds, unless they are long."""
LAST_WORDS = 0.1
"""Seconds for which a dead worker's connection is read on, should a child of the worker keep it open."""
CUT_OFF = 5.0
"""Seconds that a worker has to end once it has closed its connection."""
REACHED_WITHIN = 60.0
KILLED_WITHIN = 2.0


class _Worker:
    """What the host knows of one worker. Its place, `local`, may have another one meanwhile."""

    def __init__(self, local: int, incarnation: int) -> None:
        self.local, self.incarnation = local, incarnation
        self.pid = 0
        self.pidfd = -1
        self.code: int | None = None
        self.data: Framed | None = None
        self.control: Framed | None = None
        self.read_out = False
        self.told = False


class Host:
    def __init__(self, folder: str, slot: int, incarnation: int, host: str) -> None:
        self._paths = RunPaths(folder)
        self._config = read_json(mesh_file(self._paths))
        self._slot, self._incarnation, self._host = slot, incarnation, host
        self._per_host: int = self._config["per_host"]
        self._workers: dict[int, _Worker] = {}
        self._results: list[tuple[Header, bytes]] = []
        self._forked: list[_Worker] = []
        self._forks: deque[_Worker] = deque()
        self._forking = 0
        self._over = asyncio.Event()
        self._grace = 0.0
        self._orphan = False
        self._code = EXIT_DONE

    async def run(self) -> int:
        """Serve until the end; gives the exit code."""
        server, self._socket = await serve_framed(lambda: Framed(self._from_worker, self._worker_ended))
        self._environment, self._cpus = await self._surroundings()
        self._forker = Forker(
            WORKER,
            [*PRELOAD, *self._config["preload"]],
            self._environment,
            self._born,
            self._exited,
            partial(self._leave, "the zygote is gone", EXIT_FAILED),
        )
        identity = f"{self._slot}.{self._incarnation}.{os.getpid()}".encode()
        self._end = HostEnd(self._paths, identity, self._from_client, self._orphaned)
        self._address = address_towards(self._end.endpoint)
        self._end.send({"k": "hello", "slot": self._slot, "incarnation": self._incarnation, "pid": os.getpid()})
        for local in range(self._per_host):
            self._fork(local, self._incarnation)
        beats = asyncio.create_task(self._beat())
        await self._over.wait()
        beats.cancel()
        await self._end_workers()
        server.close()
        self._end.close()
        if self._orphan and self._config["temporary"] and not Path(f"/proc/{self._config['client']}").exists():
            # The client is not there to do it. One that was only stopped comes back, and starts hosts again.
            shutil.rmtree(self._paths.root, ignore_errors=True)
        return self._code

    async def _surroundings(self) -> tuple[dict[str, str], list[frozenset[int]]]:
        platform = ""
        if host_has_gpu():
            found = await asyncio.to_thread(probes.gpus)
            platform = found[0].platform if found else ""
        self._seen = [visibility(os.environ, local, self._per_host, platform) for local in range(self._per_host)]
        defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment = {**defaults, **rank_surroundings(os.environ, self._seen[0]), **self._config["environment"]}
        return environment, split_cpus(sorted(os.sched_getaffinity(0)), self._per_host)

    async def _beat(self) -> None:
        waited = 0.0
        while True:
            await asyncio.sleep(HEARTBEAT)
            waited += HEARTBEAT
            if not self._end.reached and waited > REACHED_WITHIN:
                self._leave(f"the client was not reached within {REACHED_WITHIN:g} s")
            self._end.send({"k": "beat"})

    # Workers.

    def _fork(self, local: int, incarnation: int) -> None:
        self._workers[local] = _Worker(local, incarnation)
        self._forks.append(self._workers[local])
        self._fork_next()

    def _fork_next(self) -> None:
        while self._forks and self._forking < FORKS_AT_ONCE:
            worker = self._forks.popleft()
            self._forking += 1
            # The zygote calls it by a number that no other worker ever has: a place may be filled again
            # before the end of the last one there has been told.
            number = len(self._forked)
            self._forked.append(worker)
            index = self._slot * self._per_host + worker.local
            log = worker_log(self._paths.root, index, worker.incarnation)
            environment, cpus = self._worker_environment(worker, index), sorted(self._cpus[worker.local])
            try:
                self._forker.fork(number, environment, str(log), cpus)
            except BlockingIOError:  # long requests fill the zygote's socket earlier: the next birth makes room
                self._forked.pop()
                self._forks.appendleft(worker)
                self._forking -= 1
                return
            except OSError:
                pass  # the zygote is gone: we are told of that too

    def _worker_environment(self, worker: _Worker, index: int) -> dict[str, str]:
        local = worker.local
        device = self._seen[local].device
        about: dict[str, Any] = {
            **{name: self._config[name] for name in ("labels", "sizes", "name", "sys_path")},
            "socket": self._socket,
            "index": index,
            "local": local,
            "incarnation": worker.incarnation,
            "host": self._host,
            "address": self._address,
            "device": device,
        }
        return {
            **self._environment,
            env.MESH: json.dumps(about),
            "RANK": str(index),
            "WORLD_SIZE": str(self._config["size"]),
            "LOCAL_RANK": str(local if device is None else device),
            "LOCAL_WORLD_SIZE": str(self._per_host),
        }

    def _born(self, number: int, pid: int) -> None:
        worker = self._forked[number]
        worker.pid = pid
        with contextlib.suppress(OSError):  # it has ended already, and we are about to be told
            worker.pidfd = os.pidfd_open(pid)
        self._forking -= 1
        self._fork_next()
        self._tell_up(worker)

    def _from_worker(self, connection: Framed, header: Header, payload: bytes) -> None:
        if header["k"] == "hello":
            self._connected(connection, header)
            return
        local = connection.owner
        if local is None or self._workers[local].data is not connection:
            return
        if not self._results:
            asyncio.get_running_loop().call_soon(self._flush)
        self._results.append(({**header, "local": local}, payload))

    def _connected(self, connection: Framed, header: Header) -> None:
        worker = self._workers.get(header["local"])
        if worker is None or worker.incarnation != header["incarnation"]:
            connection.close()
            return
        if header["role"] == "control":
            worker.control = connection
        else:
            worker.data, connection.owner = connection, header["local"]
        self._tell_up(worker)

    def _tell_up(self, worker: _Worker) -> None:
        if worker.pid and worker.data is not None and worker.control is not None and worker.code is None:
            self._end.send({"k": "up", "local": worker.local, "incarnation": worker.incarnation, "pid": worker.pid})

    def _flush(self) -> None:
        results, self._results = self._results, []
        if results:
            self._end.send({"k": "rs", "rs": [header for header, _ in results]}, [payload for _, payload in results])

    def _worker_ended(self, connection: Framed) -> None:
        local = connection.owner
        if local is not None and self._workers[local].data is connection:
            worker = self._workers[local]
            worker.read_out = True
            self._tell_end(worker)
            if worker.code is None:  # it cannot answer any more, so it must not seem to live
                asyncio.get_running_loop().call_later(CUT_OFF, self._kill, worker)

    def _exited(self, number: int, code: int, at: float) -> None:
        worker = self._forked[number]
        worker.code = code
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
            worker.pidfd = -1
        if worker.data is None:
            worker.read_out = True
        self._tell_end(worker)
        if not worker.told:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._tell_end, worker, True)

    def _tell_end(self, worker: _Worker, now: bool = False) -> None:
        """Tell of a worker's end once, after whatever it had still answered."""
        if worker.told or worker.code is None or not (worker.read_out or now):
            return
        worker.told = True
        self._flush()
        self._end.send({"k": "died", "local": worker.local, "incarnation": worker.incarnation, "code": worker.code})

    # The client.

    def _from_client(self, raw: bytes, header: Header, parts: list[bytes]) -> None:
        kind = header["k"]
        if kind == "fork":
            self._fork(header["local"], header["incarnation"])
        elif kind == "kill":
            self._kill(self._workers[header["local"]])
        elif kind == "stop":
            self._grace = header["grace"]
            self._over.set()
        else:
            payload = parts[0] if parts else b""
            for local in header["to"]:
                worker = self._workers[local]
                connection = worker.control if kind in ("cancel", "met") or header.get("async") else worker.data
                if connection is not None:
                    connection.send(raw, payload)

    def _kill(self, worker: _Worker) -> None:
        """End it at once. The zygote ends what it has forked itself."""
        if worker.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _leave(self, why: str, code: int = EXIT_DONE) -> None:
        if self._over.is_set():  # what comes after the first reason follows from it
            return
        print(f"slurm-ft mesh: {why}", file=sys.stderr, flush=True)
        self._code = code
        self._over.set()

    def _orphaned(self) -> None:
        self._orphan = True
        self._leave("the client is gone")

    async def _end_workers(self) -> None:
        """Close their connections, which ends those that are idle, and kill the others after the grace."""
        for worker in self._forked:
            for connection in (worker.data, worker.control):
                if connection is not None:
                    connection.close()
        await self._until_all_ended(self._grace)
        for worker in self._forked:
            self._kill(worker)
        await self._until_all_ended(KILLED_WITHIN)
        with contextlib.suppress(OSError):
            self._forker.kill()

    async def _until_all_ended(self, seconds: float) -> None:
        give_up = asyncio.get_running_loop().time() + seconds
        while any(worker.pid and worker.code is None for worker in self._forked):
            if asyncio.get_running_loop().time() > give_up:
                return
            await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--slot", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--host", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0])
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(asyncio.run(_run(options)))


async def _run(options: argparse.Namespace) -> int:
    return await Host(options.folder, options.slot, options.incarnation, options.host).run()


if __name__ == "__main__":
    main()
