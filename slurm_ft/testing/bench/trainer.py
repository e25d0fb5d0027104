"""The training program of the recovery benchmark: the same model, data and steps for every way to run it.

    python trainer.py torchft|static --out FILE --size SIZE --algorithm ddp|diloco --steps N ...

`torchft`: one replica of a torchft training, with torchft's own classes or, by `--ours`, with slurm-ft's.
`static`: one rank of a plain torch.distributed training over all replicas, which ends when a peer dies and
goes on from its checkpoint when it is started again.

Both write the same lines to one log, each a JSON object in a single append: `t` (CLOCK_MONOTONIC in seconds,
one clock for the whole machine), `pid`, `replica`, `what` and `step`. `born` is the start of the process by
the kernel's account, `step` a step whose work is done, `commit` a step that counts: all replicas have agreed
on it (ddp), or have averaged what they learnt since the last one (diloco); `met`: the replica has its state
and is in a group with its peers (torchft with ddp); `restored`: it goes on from what a keeper held, after that step.

The model is a stack of linear layers on random data, each batch a function of (seed, replica, step). `--pace`
gives each step a least duration, spent asleep: it stands for the work of a GPU, for which this machine has
no cores. Uses top-level imports that a zygote can see.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchft  # noqa: E402
from torch import nn  # noqa: E402
from torchft.checkpointing import HTTPTransport  # noqa: E402
from torchft.local_sgd import DiLoCo  # noqa: E402

SIZES = {"tiny": (128, 4), "small": (512, 8), "full": (2048, 12)}
"""Width and number of layers: 66 thousand, 2.1 million and 50 million parameters."""
SEED = 1234
BATCH = 4
START = "BENCH_START"
"""The variable in which a rival's runner says how often it has started this replica, from 1."""
LIMIT = timedelta(seconds=60)
GROUP_LIMIT = timedelta(seconds=20)


def born() -> float:
    """When the kernel started this process, on the monotonic clock; 10 ms coarse."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    boot_offset = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") - boot_offset


class Log:
    def __init__(self, path: str, replica: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._replica = replica

    def __call__(self, what: str, step: int = 0, at: float | None = None) -> None:
        t = time.monotonic() if at is None else at
        line = {"t": t, "pid": os.getpid(), "replica": self._replica, "what": what, "step": step}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Model(nn.Module):  # type: ignore[misc]
    """Linear layers. Their values are anything until `start`, which a process that has a state to go on from can
    do without."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, layers = SIZES[size]
        self._bound = width**-0.5
        self.layers = nn.ModuleList(nn.utils.skip_init(nn.Linear, width, width, bias=False) for _ in range(layers))

    def start(self) -> None:
        """Random values, alike everywhere."""
        torch.manual_seed(SEED)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-self._bound, self._bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Work:
    """Model, optimizer and the training of one step."""

    def __init__(self, options: argparse.Namespace, replica: int) -> None:
        torch.set_num_threads(1)
        self._options, self._replica = options, replica
        self._width = SIZES[options.size][0]
        self.model = Model(options.size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._due = time.monotonic()

    def backward(self, step: int) -> None:
        dice = torch.Generator().manual_seed(SEED + 1000 * step + self._replica)
        x = torch.randn(BATCH, self._width, generator=dice)
        nn.functional.mse_loss(self.model(x), x.roll(1, 1)).backward()

    def pace(self) -> None:
        """Sleep for what is left of this step's least duration."""
        time.sleep(max(self._due + self._options.pace - time.monotonic(), 0.0))
        self._due = time.monotonic()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


# --- torchft: a replica that its peers can do without ------------------------------------------------------


def make_manager(options: argparse.Namespace, replica: int, work: Work, step: dict[str, int]) -> torchft.Manager:
    def state() -> dict[str, Any]:
        return {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict(), "step": dict(step)}

    def load(sent: dict[str, Any]) -> None:
        work.model.load_state_dict(sent["model"])
        work.optimizer.load_state_dict(sent["optimizer"])
        step.update(sent["step"])

    settings: dict[str, Any] = {
        "pg": torchft.ProcessGroupGloo(timeout=GROUP_LIMIT),
        "min_replica_size": 1,
        "use_async_quorum": False,
        "init_sync": False,
        "replica_id": f"replica_{replica}",
        "state_dict": state,
        "load_state_dict": load,
        "timeout": LIMIT,
        "quorum_timeout": LIMIT,
        "hostname": "127.0.0.1",
        "rank": 0,
        "world_size": 1,
    }
    if options.ours:
        from slurm_ft.train import ft

        manager = ft.Manager(checkpoint_transport=ft.PeerTransport(LIMIT, host="127.0.0.1"), **settings)
        manager.receive_in_place()
        return manager
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    transport = HTTPTransport(timeout=LIMIT, num_chunks=0)
    transport.address = lambda: f"http://127.0.0.1:{transport._server.socket.getsockname()[1]}/checkpoint/"
    manager = torchft.Manager(checkpoint_transport=transport, store_addr="127.0.0.1", store_port=store.port, **settings)
    manager._kept_store = store
    return manager


class Counter:
    """The step as a part of what a keeper holds."""

    def __init__(self, step: dict[str, int]) -> None:
        self._step = step

    def state_dict(self) -> dict[str, int]:
        return dict(self._step)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step.update(state)


def keeping(work: Work, manager: torchft.Manager, step: dict[str, int], sync: Any = None) -> tuple[Any, bool]:
    """A context for each optimizer step, which keeps the state in memory that outlives this process; where the
    run has no keeper it does nothing. And whether this process goes on from what the one before has left."""
    if not os.environ.get("SLURM_FT_KEEPER"):
        return contextlib.nullcontext, False
    keep = importlib.import_module("slurm_ft.train").keep
    kept = keep(work.model, work.optimizer, extra={"step": Counter(step)}, manager=manager, sync=sync)
    return kept.step, kept.restore().source != "none"


def run_torchft(options: argparse.Namespace, log: Log, replica: int) -> None:
    work = Work(options, replica)
    step = {"step": 0}
    manager = make_manager(options, replica, work, step)
    log("joined")
    train = train_ddp if options.algorithm == "ddp" else train_diloco
    train(options, log, work, manager, step)
    log("end", step["step"])
    manager.shutdown(wait=False)


def train_ddp(options: Any, log: Log, work: Work, manager: torchft.Manager, step: dict[str, int]) -> None:
    """Every step is averaged and voted on."""
    kept_step, restored = keeping(work, manager, step)
    if restored:
        log("restored", step["step"])
    fresh = True
    while step["step"] < options.steps:
        manager.start_quorum()
        log("met", step["step"])
        if fresh and step["step"] == 0:  # neither this host nor a peer had a state
            work.model.start()
        fresh = False
        number = step["step"] + 1
        work.optimizer.zero_grad()
        work.backward(number)
        work.pace()
        flat = torch.cat([gradient.view(-1) for gradient in work.gradients()])
        manager.allreduce(flat).wait()
        log("step", number)
        if not manager.should_commit():
            continue
        place = 0
        for gradient in work.gradients():
            gradient.copy_(flat[place : place + gradient.numel()].view_as(gradient))
            place += gradient.numel()
        with kept_step():
            work.optimizer.step()
            step["step"] = number
        log("commit", number)


def train_diloco(options: Any, log: Log, work: Work, manager: torchft.Manager, step: dict[str, int]) -> None:
    """Steps by itself; every `sync` of them what was learnt is averaged and voted on."""
    work.model.start()
    outer = torch.optim.SGD(work.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    inner = work.optimizer
    diloco = importlib.import_module("slurm_ft.train.local_sgd").DiLoCo if options.ours else DiLoCo
    with diloco(manager, [work.model], inner, outer, options.sync, pin_memory=False) as context:
        kept_step, restored = keeping(work, manager, step, context)
        step["step"] = manager.current_step() * options.sync + context._local_step
        if restored:
            log("restored", step["step"])
        if int(os.environ.get(START, "1")) > 1:
            # For rivals, what slurm_ft.train.local_sgd does by itself: one that starts again asks for the state after
            # one step, not after an interval that is thrown away.
            context._local_step = options.sync - 1
        while step["step"] < options.steps:
            before, number = manager.current_step(), step["step"] + 1
            inner.zero_grad()
            work.backward(number)
            work.pace()
            log("step", number)
            with kept_step():
                inner.step()
            # One that was healed within `step` has taken its peers' place in the data.
            step["step"] = manager.current_step() * options.sync + context._local_step
            if manager.current_step() > before:
                log("commit", step["step"])


# --- static: all or nothing --------------------------------------------------------------------------------


def run_static(options: argparse.Namespace, log: Log) -> None:
    dist.init_process_group("gloo", timeout=GROUP_LIMIT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    log("joined")
    work = Work(options, rank)
    diloco = options.algorithm == "diloco"
    outer = torch.optim.SGD(work.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    step, file = 0, Path(options.checkpoint)
    if file.exists():
        kept = torch.load(file, weights_only=True)
        work.model.load_state_dict(kept["model"])
        work.optimizer.load_state_dict(kept["optimizer"])
        outer.load_state_dict(kept["outer"])
        step = kept["step"]
        del kept
    else:
        work.model.start()
    log("healed", step)
    anchor = [parameter.detach().clone() for parameter in work.model.parameters()] if diloco else []
    while step < options.steps:
        step += 1
        work.optimizer.zero_grad()
        work.backward(step)
        work.pace()
        if not diloco:
            average(work.gradients(), ranks)
        log("step", step)
        work.optimizer.step()
        if diloco and step % options.sync:
            continue
        if diloco:
            with torch.no_grad():
                for parameter, old in zip(work.model.parameters(), anchor, strict=True):
                    parameter.grad = old - parameter
                    parameter.copy_(old)
            average(work.gradients(), ranks)
            outer.step()
            anchor = [parameter.detach().clone() for parameter in work.model.parameters()]
        log("commit", step)
        if rank == 0 and step % options.sync == 0:
            save(file, {"model": work.model, "optimizer": work.optimizer, "outer": outer}, step)
    log("end", step)
    dist.destroy_process_group()


def average(tensors: list[torch.Tensor], ranks: int) -> None:
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.all_reduce(flat)
    flat /= ranks
    place = 0
    for tensor in tensors:
        tensor.copy_(flat[place : place + tensor.numel()].view_as(tensor))
        place += tensor.numel()


def save(file: Path, parts: dict[str, Any], step: int) -> None:
    fresh = file.with_suffix(".new")
    torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, fresh)
    fresh.replace(file)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["torchft", "static"])
    parser.add_argument("--out", required=True, help="the log")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--algorithm", choices=["ddp", "diloco"], default="ddp")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sync", type=int, default=20, help="steps between averages (diloco) and checkpoints (static)")
    parser.add_argument("--pace", type=float, default=0.0, help="the least seconds of a step")
    parser.add_argument("--ours", action="store_true", help="slurm-ft's Manager and transport")
    parser.add_argument("--checkpoint", default="", help="static: the file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None, started: Callable[[], float] = born) -> None:
    options = parse(arguments)
    environ = os.environ
    replica = int(environ.get("REPLICA_GROUP_ID") or environ.get("RANK", "0"))
    log = Log(options.out, replica)
    log("born", at=started())
    log("imported")
    if options.kind == "torchft":
        run_torchft(options, log, replica)
    else:
        run_static(options, log)


if __name__ == "__main__":
    main()
