"""What the processes of the tests do. Each function runs in a process of its own; see replicas.py."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from slurm_ft.train.progress import channel


def send(kind: str, **fields: Any) -> None:
    here = channel()
    assert here is not None
    here.send(kind, **fields)


def digest(parts: Any) -> str:
    from slurm_ft.train import titan_state

    total = hashlib.sha256()
    for state in titan_state.model_state(list(parts)):
        for name, tensor in sorted(state.items()):
            total.update(name.encode())
            total.update(tensor.contiguous().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def titan(*arguments: str) -> None:
    """The command `titan`, which also tells a digest of its weights after each committed synchronisation."""
    from slurm_ft.train import titan as command
    from slurm_ft.train import titan_ft

    settle = titan_ft.Trainer._settle

    def settle_and_tell(trainer: Any, late: bool) -> bool:
        synced = settle(trainer, late)
        if synced and trainer.manager.committed:
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            send(
                "digest", step=trainer.step, value=digest(trainer.model_parts), lr=rates[0],
                threaded=trainer.manager._use_async_quorum,
            )  # fmt: skip
        return synced

    titan_ft.Trainer._settle = settle_and_tell  # type: ignore[method-assign]
    sys.exit(command.main(list(arguments)))


def titan_that_dies(manager_step: int, *arguments: str) -> None:
    """`titan`, killed in the middle of the synchronisation at this Manager step."""
    from slurm_ft.train import ft

    reduce, done = ft.Manager.allreduce, 0

    def allreduce(manager: Any, tensor: Any, *rest: Any, **named: Any) -> Any:
        nonlocal done
        if manager.current_step() == manager_step:
            done += 1
            if done == 3:
                send("dying")
                os.kill(os.getpid(), signal.SIGKILL)
        return reduce(manager, tensor, *rest, **named)

    ft.Manager.allreduce = allreduce  # type: ignore[method-assign]
    titan(*arguments)


# -- torchft alone


def _manager(kind: str, pg_seconds: float = 10.0, **named: Any) -> Any:
    """A Manager, `stock` or `mended`, with its own store, as replica REPLICA_GROUP_ID."""
    import torchft
    from torch.distributed import TCPStore

    from slurm_ft.train import ft

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept.append(store)
    manager_class = ft.Manager if kind == "mended" else torchft.Manager
    limit = timedelta(seconds=30)
    settings = {"use_async_quorum": False, "state_dict": dict, "load_state_dict": len, "init_sync": False}
    return manager_class(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=pg_seconds)),
        min_replica_size=1, timeout=limit, quorum_timeout=limit, connect_timeout=limit,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}",
        checkpoint_transport=ft.PeerTransport(limit, host="127.0.0.1"),
        **{**settings, **named},
    )  # fmt: skip


kept: list[Any] = []


def _real_group(manager: Any) -> Any:
    """torch's own group in torchft's."""
    group = manager._pg
    while hasattr(group, "_pg"):
        group = group._pg
    return group


def _gather(count: int) -> None:
    """Return when the Lighthouse has heard of `count` replicas: a quorum after that waits for them all."""
    from slurm_ft.train import ft

    while not (view := ft.view_lighthouse(ft.lighthouse_url())) or len(view.replicas) < count:
        pass


def ddp(kind: str, victim: bool) -> None:
    """Trains by DDP. The victim dies when its second backward pass begins to reduce."""
    import torch
    import torchft

    from slurm_ft.train import ft

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    manager = _manager("mended")  # early abort in both cases: only the hook differs
    wrapper = ft.DistributedDataParallel if kind == "mended" else torchft.DistributedDataParallel
    net = wrapper(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    _gather(2)
    for _ in range(6):
        optimizer.zero_grad()
        if victim and manager.current_step() == 1:
            manager.wait_quorum()
            send("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    send("trained", step=manager.current_step())
    manager.shutdown(wait=False)


DILOCO_SYNCS, DILOCO_EVERY = 4, 5


def diloco(kind: str, victim: bool) -> None:
    """Trains by DiLoCo with two peers. The victim dies where the second synchronisation begins to reduce."""
    import torch
    import torchft.local_sgd

    from slurm_ft.train import local_sgd

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    manager = _manager("mended")  # early abort in both cases: only the context differs
    reduce = manager.allreduce

    def allreduce(*tensors: Any, **named: Any) -> Any:
        if victim and manager.current_step() == 1:
            send("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce(*tensors, **named)

    manager.allreduce = allreduce
    made = local_sgd.DiLoCo if kind == "mended" else torchft.local_sgd.DiLoCo
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    _gather(3)
    steps = 0
    with made(manager, [model], inner, outer, DILOCO_EVERY):
        while manager.current_step() < DILOCO_SYNCS:
            inner.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            inner.step()
            steps += 1
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    send("trained", steps=steps, digest=hashlib.sha256(weights).hexdigest())
    manager.shutdown(wait=False)


def diloco_half(role: str, folder: str) -> None:
    """Trains by DiLoCo with two peers. In the second synchronisation one `dies`, one `fails` and one `commits`; the
    latter goes on only after the one that failed has tried again with the one that is `back`. As where all train
    equally fast, these are not ahead of it then: they wait for its next synchronisation."""
    import torch

    from slurm_ft.train import local_sgd

    committed_it, tried, asks = Path(folder, "committed"), Path(folder, "tried"), Path(folder, "asks")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    manager = _manager("mended", state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    vote = manager.should_commit

    def should_commit(*given: Any, **named: Any) -> bool:
        second = manager.current_step() == 1
        if second and role == "dies":
            send("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        if second and role == "fails" and not manager.not_without:
            while not committed_it.exists():
                time.sleep(0.01)
            manager.report_error(RuntimeError("a chunk of the dead one is missing"))
        committed = bool(vote(*given, **named))
        if second and role == "commits":
            assert committed, "it had all it needed"
            committed_it.touch()
        if second and role == "fails" and manager.not_without:
            tried.touch()
        return committed

    manager.should_commit = should_commit
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    if role != "back":
        _gather(3)
    number = int(os.environ["REPLICA_GROUP_ID"])
    with local_sgd.DiLoCo(manager, [model], inner, outer, DILOCO_EVERY) as sync:
        while manager.current_step() < DILOCO_SYNCS:
            inner.zero_grad()
            model(torch.full((2, 8), 1.0 + number)).sum().backward()
            inner.step()
            ahead = manager.current_step() == 2
            while ahead and not (tried if role == "commits" else asks).exists():
                time.sleep(0.01)
            if ahead and role == "commits" and sync._local_step == DILOCO_EVERY - 1:
                asks.touch()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    send("trained", digest=hashlib.sha256(weights).hexdigest())
    manager.shutdown(wait=False)


def ring(kind: str, victim: bool, seconds: float) -> None:
    """One reduction among all replicas, which the victim never enters. Its time-out is `seconds`."""
    import torch

    manager = _manager(kind, pg_seconds=30.0)  # to make the group may take longer on a loaded machine
    manager.start_quorum()
    assert manager.errored() is None, "no group was made"
    _real_group(manager)._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))
    send("entering", world=manager.num_participants())
    if victim:
        threading.Event().wait()
    begin = time.monotonic()
    manager.allreduce(torch.ones(1_000_000)).wait()
    send("left", seconds=time.monotonic() - begin, failed=manager.errored() is not None)
    threading.Event().wait()  # the next quorum waits for all that are alive, so nobody goes on


def late_store() -> None:
    """torchft's client of a store that is served only after the client was asked for."""
    from concurrent.futures import ThreadPoolExecutor

    from torch.distributed import TCPStore
    from torchft import process_group

    from slurm_ft.train import survivors

    survivors.install_store(process_group)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    limit = timedelta(seconds=30)
    with ThreadPoolExecutor() as pool:
        client = pool.submit(process_group.create_store_client, f"127.0.0.1:{port}/some/prefix", limit)
        served = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        client.result().set("word", "said")
        assert client.result().timeout == limit
    assert served.get("some/prefix/word") == b"said"


def donor(use_async_quorum: bool) -> None:
    """One step at which all replicas but one heal. Tells whether the state was read during `forward`."""
    import torch

    forward, served = threading.Event(), threading.Event()
    seen: list[bool] = []

    def state() -> dict[str, int]:
        seen.append(forward.is_set())
        served.set()
        return {"weights": 1}

    manager = _manager(
        "mended", state_dict=state, load_state_dict=len, init_sync=True, use_async_quorum=use_async_quorum
    )
    if use_async_quorum:
        forward.set()  # the call returns at once, and this thread goes on to the forward pass
    manager.start_quorum()
    forward.set()
    if manager.participating_rank() == 0 or not use_async_quorum:
        served.wait(0 if not use_async_quorum else 20)
    manager.allreduce(torch.ones(1)).wait()  # a donor leaves no step before the one it heals
    committed = manager.should_commit()
    send("donor", read_in_forward=seen, heals=manager.heals, committed=committed)
    manager.shutdown(wait=False)


def view() -> None:
    """The Lighthouse's page, read before and after a quorum."""
    from slurm_ft.train import ft

    manager = _manager("mended")
    url = ft.lighthouse_url()
    while not (before := ft.view_lighthouse(url)) or not before.replicas:
        pass
    manager.start_quorum()
    manager.should_commit()
    after = ft.view_lighthouse(url)
    assert after is not None
    steps = {name.split(":")[0]: step for name, step in after.members.items()}
    send("view", before=[len(before.training), sorted(before.replicas)], after=steps)
    assert after.training == set(after.members)
    assert ft.view_lighthouse("http://127.0.0.1:1") is None
    manager.shutdown(wait=False)


# -- torchtitan, put back to its stock classes


def titan_stock_state(*arguments: str) -> None:
    """`titan` whose peers heal from torchtitan's own optimizers and checkpoint manager."""
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
    from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

    from slurm_ft.train import titan as command
    from slurm_ft.train import titan_ft

    build = command.build_config

    def build_stock(options: Any, rest: Any) -> Any:
        config = build(options, rest)
        config.optimizer = titan_ft._as(TorchFTOptimizersContainer.Config, config.optimizer)
        config.checkpoint = TorchFTCheckpointManager.Config(enable=True, interval=1000, last_save_model_only=False)
        config.dump_folder = os.path.join(config.dump_folder, os.environ["SLURM_FT_ATTEMPT"])
        return config

    command.build_config = build_stock
    titan(*arguments)


# -- checks that need torch but no peers


def optimizer_states() -> None:
    """torchtitan's optimizers serve the learning rate of the start, ours the one of now."""
    import torch
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

    from slurm_ft.train import titan_ft, titan_parts

    class Holder:
        enabled, manager, use_async_quorum = True, None, False

    rates = {}
    for kind in (TorchFTOptimizersContainer, titan_parts.Optimizers):
        config = titan_ft._as(kind.Config, default_adamw(lr=1.0), implementation="for-loop")
        optimizers = kind(config, model_parts=[torch.nn.Linear(2, 2)], ft_manager=Holder())
        optimizers.init_cache_state_dict()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.5
        rates[kind.__name__] = optimizers.state_dict()["param_groups.weight.lr"]
    assert rates == {"TorchFTOptimizersContainer": 1.0, "Optimizers": 0.5}, rates


def peer_states() -> None:
    """Model and optimizer state: sent without copies, loaded in place, refused when it is another model's."""
    import torch

    from slurm_ft.train import titan_state

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        for _ in range(seed):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    (donor_model, donor_optimizer), (model, optimizer) = made(3), made(1)
    state = titan_state.model_state([donor_model])
    assert state[0]["0.weight"].data_ptr() == donor_model[0].weight.data_ptr()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    titan_state.load_model_state([model], state)
    titan_state.load_optimizer_state(optimizer, titan_state.optimizer_state(donor_optimizer))
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert digest([model]) == digest([donor_model])
    assert "1.running_mean" in state[0]
    assert optimizer.param_groups[0]["lr"] == donor_optimizer.param_groups[0]["lr"]
    step = optimizer.state[model[0].weight]["step"]
    assert step == 3 and step is not donor_optimizer.state[donor_model[0].weight]["step"]
    try:
        titan_state.load_model_state([torch.nn.Linear(3, 3)], state)
    except ValueError as refusal:
        assert "another model" in str(refusal)
    else:
        raise AssertionError("a state of another model was loaded")


def loader(folder: str) -> None:
    """Batches depend on (seed, number, rank) only; ranks share an epoch without overlap."""
    import torch

    from slurm_ft.errors import UsageError
    from slurm_ft.train import titan_text

    class Letters:
        def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
            return [ord(letter) for letter in text]

    def made(rank: int, seed: int = 1, path: str = folder, seq_len: int = 8) -> Any:
        config = titan_text.TextLoader.Config(dataset_path=path, seed=seed)
        return config.build(dp_world_size=2, dp_rank=rank, tokenizer=Letters(), seq_len=seq_len, local_batch_size=2)

    one, again, other, reseeded = made(0), made(0), made(1), made(0, seed=2)
    first = [next(iter_) for iter_ in [iter(one)] for _ in range(5)]
    again.seek(3)
    batches = iter(again)
    inputs, labels = next(batches)
    again.seek(1)  # in the middle of an iteration too the next batch is the one of that number
    assert torch.equal(next(batches)[0]["input"], first[1][0]["input"])
    assert torch.equal(inputs["input"], first[3][0]["input"]) and torch.equal(labels, first[3][1])
    assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
    assert not torch.equal(next(iter(reseeded))[0]["input"], first[0][0]["input"])
    windows = len(one._inputs)
    seen = [
        loader._window((number * 2 + loader._rank) * 2 + row)
        for loader in (one, other)
        for number in range(windows // 4)
        for row in range(2)
    ]
    assert len(set(seen)) == len(seen)
    for bad in ({"path": folder + "/absent"}, {"seq_len": 10_000}):
        try:
            made(0, **bad)  # type: ignore[arg-type]
        except UsageError as refusal:
            assert refusal.hint
        else:
            raise AssertionError(f"{bad} was taken")


def devices() -> None:
    """The CPU stands in for a GPU, and only where there is none."""
    import torch
    import torch.distributed
    from torchtitan.tools import utils

    from slurm_ft.train import titan_cpu

    assert utils.device_type == "cpu" and isinstance(utils.device_module, titan_cpu.CpuDevice)
    assert utils.device_module.get_device_properties().total_memory > 0
    assert utils.device_module.is_available() == torch.cpu.is_available()
    assert hasattr(torch.distributed, "set_timeout")
    before = utils.device_module
    titan_cpu.has_accelerator = lambda: True
    utils.device_type, utils.device_module = "cuda", None
    titan_cpu.install()
    assert utils.device_type == "cuda" and utils.device_module is None
    utils.device_module = before


def foreign_config() -> None:
    """A config of torchtitan's own is taken over; one with an optimizer class of its own is refused."""
    import dataclasses

    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from slurm_ft.errors import UsageError
    from slurm_ft.train import titan_ft, titan_place

    place = titan_place.Place(fault_tolerant=True, replica=1, replicas=3, min_replicas=2, ranks=2)
    config = titan_ft.fault_tolerant(llama3_debugmodel(), place)
    assert isinstance(config, titan_ft.Trainer.Config)
    tolerance = config.fault_tolerance
    assert (tolerance.enable, tolerance.replica_id, tolerance.group_size) == (True, 1, 3)
    assert tolerance.min_replica_size == 2 and tolerance.process_group == "gloo"
    assert config.parallelism.spmd_backend == "partial_dtensor"
    assert config.model_spec.fragment_fn is not None
    assert not hasattr(config.loss, "loss_fn")

    class Own(OptimizersContainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):
            pass

    config.optimizer = Own.Config()
    try:
        titan_ft.fault_tolerant(config, place)
    except UsageError as refusal:
        assert "Own" in str(refusal)
    else:
        raise AssertionError("a foreign optimizer was taken")


def run_ends(folder: str) -> None:
    """The end of a run counts for those with as many steps, and not for a later session in the same folder."""
    from pathlib import Path

    from slurm_ft.train import titan_place

    place = titan_place.Place(fault_tolerant=True, run=Path(folder))
    assert not titan_place.is_over(place, 10)
    session = Path(folder) / "session.json"
    titan_place.mark_end(place, 10)
    assert titan_place.is_over(place, 10)  # a folder without a session, of a rank that was started by hand
    session.write_text('{"id": "first"}')
    titan_place.mark_end(place, 10)
    assert titan_place.is_over(place, 10) and not titan_place.is_over(place, 11)
    session.write_text('{"id": "second"}')
    assert not titan_place.is_over(place, 10)
    titan_place.mark_end(titan_place.Place(), 10)  # no run folder: nothing happens


def end_without_a_disk(folder: str) -> None:
    """The run folder's `titan` cannot be made. One warning says so, and nothing is raised."""
    import logging

    from slurm_ft.train import titan_place

    place = titan_place.Place(fault_tolerant=True, run=Path(folder))
    (Path(folder) / "titan").touch()
    told: list[logging.LogRecord] = []
    titan_place.logger.addFilter(lambda record: told.append(record) or False)
    titan_place.mark_end(place, 10)
    [warning] = told
    assert warning.levelname == "WARNING" and "finished.json: File exists" in warning.getMessage()
    assert not titan_place.is_over(place, 10)


def steps_are_counted() -> None:
    """After all replicas have begun again at once, and for one that came late into the first interval of others."""
    from types import SimpleNamespace

    from slurm_ft.train.titan_ft import Trainer

    def trainer(step: int, synchronised: int, first: int) -> Any:
        manager = SimpleNamespace(current_step=lambda: synchronised, num_participants=lambda: 2)
        known = {"_sync": object(), "interval": 6, "_first_step": first, "_heals": lambda: 0, "_heals_before_sync": 0}
        return SimpleNamespace(manager=manager, step=step, _boundary=step - step % 6, **known)

    again = trainer(step=1, synchronised=1, first=0)
    Trainer._align(again, begun_again=True)
    assert again.step == 1  # and not 6: nobody has trained an interval
    after = trainer(step=6, synchronised=2, first=again._first_step)
    Trainer._align(after, begun_again=False)
    assert after.step == 6
    late = trainer(step=1, synchronised=1, first=0)
    Trainer._align(late, begun_again=False)
    assert late.step == 6


class Vote(NamedTuple):
    """How a synchronisation of a `scripted` trainer goes. It takes the state of a donor, if of one, where its reduction
    begins, or with `again` in a second try."""

    committed: bool
    donor: tuple[int, int] | None = None
    """Its step and its Manager's."""
    again: bool = False


def scripted(votes: list[Vote], interval: int = 6, delay: int = 0, kind: str = "diloco") -> Any:
    """A trainer in its loop, without a model. `trained` are its steps, `told` is where it stands after each vote: its
    step and that of its learning rate."""
    from types import SimpleNamespace

    from slurm_ft.train.titan_ft import Trainer
    from slurm_ft.train.titan_place import Place

    class Scripted(Trainer):
        manager: Any = None

        def __init__(self) -> None:
            self.votes, self.trained, self.told, self.rate, self.resumed = list(votes), [], [], 0, 0
            self.reducing = False
            self.manager = SimpleNamespace(syncs=0, committed=False, heals=0, step=0, num_participants=lambda: 2)
            self.manager.current_step = lambda: self.manager.step
            fragment = SimpleNamespace(save_parameters=lambda: self.trained.append("saved"))
            sync = SimpleNamespace(
                _sync_every=interval, _fragment_sync_delay=delay, _local_step=0, _fragments=[fragment]
            )
            self._sync = sync if kind == "diloco" else None
            self._keeping = SimpleNamespace(pending=False, settled=lambda: None)
            self.gc_handler = SimpleNamespace(run=lambda step: None)
            self.place, self.dataloader, self.batch_generator = Place(), None, lambda _: None
            self.step = self._committed_step = self._first_step = self._heals_before_sync = self._syncs_seen = 0
            self._peers_were_at, self._found_nobody = 9, False

        def run(self, start: str) -> None:
            if start == "late":
                self._join_at_next_sync()
            self._loop(start, SimpleNamespace(step=lambda: None))

        def should_continue_training(self) -> bool:
            return bool(self.votes)

        def train_step(self, _: Any) -> None:
            self.trained.append(self.step)
            place = 1 if self._sync is None else self._sync._local_step + 1
            every = interval if self._sync is not None else 1
            if place == every - delay:
                self.reducing = True
                self.heal(again=False)
            if self._sync is not None:
                self._sync._local_step = place % every
            if place == every:
                assert self.reducing, "nothing was reduced"
                self.reducing = False
                self.heal(again=True)
                self.vote(self.votes.pop(0).committed)

        def heal(self, again: bool) -> None:
            vote = self.votes[0]
            if vote.donor is not None and vote.again == again:
                self.step, self.manager.step = vote.donor
                self.rate, self.manager.heals = self.step, self.manager.heals + 1

        def vote(self, committed: bool) -> None:
            manager = self.manager
            manager.syncs, manager.committed, manager.step = manager.syncs + 1, committed, manager.step + committed

        def _settle(self, late: bool) -> bool:
            synced = super()._settle(late)
            if synced:
                self.told.append((self.step, self.rate))
            return synced

        def _set_schedules(self, step: int) -> None:
            self.rate = step

        def _resume(self) -> bool:
            self.resumed += 1
            return False

        def _left_behind(self) -> bool:
            return False

        def _tell_checksum(self) -> None: ...
        def _keep(self) -> None: ...
        def _save_if_asked(self) -> None: ...

    return Scripted()


def healed_and_not_committed() -> None:
    """It goes back to where its donor does, with the same learning rate; and again when the next vote fails."""
    for delay in range(6):
        fails = [Vote(False, donor=(18 - delay, 2)), Vote(False), Vote(False), Vote(True), Vote(True)]
        trainer = scripted(fails, 6, delay)
        trainer.run("late")
        assert trainer.told == [(12, 12)] * 3 + [(18, 18), (24, 24)], (delay, trainer.told)
    trainer = scripted([Vote(False, donor=(8, 7)), Vote(False), Vote(True)], 1, kind="per-step")
    trainer.run("late")
    assert trainer.told == [(7, 7), (7, 7), (8, 8)], trainer.told


def healed_in_a_second_try() -> None:
    """The donor's state is that of where its reduction began, and the commit is that of the boundary after it."""
    for delay in range(6):
        trainer = scripted([Vote(True), Vote(True, donor=(18 - delay, 2), again=True), Vote(True)], 6, delay)
        trainer.run("together")
        assert trainer.told == [(6, 6), (18, 18), (24, 24)], (delay, trainer.told)
        trainer = scripted([Vote(True), Vote(False, donor=(18 - delay, 2), again=True), Vote(True)], 6, delay)
        trainer.run("together")
        assert trainer.told == [(6, 6), (12, 12), (18, 18)], (delay, trainer.told)


def late_until_committed() -> None:
    """A vote that failed says nothing of peers: the one after it looks for a save, and those after a commit do not."""
    trainer = scripted([Vote(False), Vote(False), Vote(True), Vote(True)])
    trainer.run("late")
    assert trainer.resumed == 1 and trainer.told[-2:] == [(6, 6), (12, 12)], trainer.told
    healed = scripted([Vote(False, donor=(18, 2)), Vote(True)])
    healed.run("late")
    assert healed.resumed == 0


def begun_again_with_a_delay() -> None:
    """However long a reduction may take: all have begun again at once, and each synchronisation has a reduction."""
    for interval in range(1, 8):
        for delay in range(interval):
            trainer = scripted([Vote(True)] * 3, interval, delay)
            trainer.run("late")
            first, *later = (step for step, _ in trainer.told)
            boundary = first // interval * interval
            assert first in (0, delay + 1) and later == [boundary + interval, boundary + 2 * interval], trainer.told
            assert all(step == rate for step, rate in trainer.told), trainer.told
            assert trainer.trained[delay + 1] == first + 1


def disk_weights() -> None:
    """DiLoCo goes back to what was loaded to begin with at its first synchronisation, and not to the random start."""
    from types import SimpleNamespace

    from slurm_ft.train.titan_keep import Keeping

    for loaded in (True, False):
        trainer = scripted([])
        trainer.checkpointer = SimpleNamespace(load=lambda step, loaded=loaded: loaded)
        Keeping._load_from_disk(SimpleNamespace(_trainer=trainer), -1)
        assert trainer.trained == (["saved"] if loaded else [])


def disk_steps() -> None:
    """A checkpoint of a step that is no boundary any more, since the interval or the delay was changed."""
    from types import SimpleNamespace

    from slurm_ft.train.titan_keep import Keeping

    for loaded, ends in ((12, 8), (10, 10), (16, 16)):
        trainer = scripted([Vote(True)], interval=8, delay=4)

        def load(step: int, trainer: Any = trainer) -> bool:
            trainer.step = step
            return True

        trainer.checkpointer = SimpleNamespace(load=load)
        Keeping._load_from_disk(SimpleNamespace(_trainer=trainer), loaded)
        assert (trainer.step, trainer._committed_step, trainer._first_step) == (ends, ends, ends // 8 * 8)
        trainer.run("together")


def commits() -> None:
    """Commits steps for ever, with whoever is there."""
    import torch

    manager = _manager("mended", 5.0, state_dict=lambda: {"x": torch.ones(3)}, load_state_dict=len)
    while True:
        manager.start_quorum()
        manager.allreduce(torch.ones(3)).wait()
        if manager.should_commit():
            send("committed", pid=os.getpid(), world=manager.num_participants(), quorum=manager._quorum_id)
        time.sleep(0.02)


def addresses() -> None:
    """The first host of a replica is known by MASTER_ADDR; another one by the way it would go there."""
    import socket

    from slurm_ft.train import ft

    assert ft.own_address({"MASTER_ADDR": "node7", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}) == "node7"
    away = {"RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    assert ft.own_address({"MASTER_ADDR": "127.0.0.1", **away}) == "127.0.0.1"
    assert ft.own_address({"MASTER_ADDR": "no.such.host.invalid", **away}) == socket.gethostname()
    assert ft.own_address({}) == socket.gethostname()
    assert ft.read_status("<html>something else</html>") == ft.LighthouseView()


def places() -> None:
    from slurm_ft.errors import UsageError
    from slurm_ft.train.titan_place import Place

    alone = Place.of({})
    assert not alone.fault_tolerant and str(alone.folder) == "outputs"
    full = {"TORCHFT_LIGHTHOUSE": "http://x", "REPLICA_GROUP_ID": "2", "NUM_REPLICA_GROUPS": "4", "RANK": "1"}
    place = Place.of({**full, "SLURM_FT_RUN": "/r", "SLURM_FT_MIN_REPLICAS": "3", "WORLD_SIZE": "8"})
    assert (place.replica, place.replicas, place.min_replicas, place.rank, place.ranks) == (2, 4, 3, 1, 8)
    assert place.fault_tolerant and str(place.folder) == "/r/titan"
    try:
        Place.of({"REPLICA_GROUP_ID": "two"})
    except UsageError as refusal:
        assert "REPLICA_GROUP_ID" in str(refusal)
    else:
        raise AssertionError("a word was taken for a number")


def starts() -> None:
    """A member of the last quorum counts as training once it is heard while we look, not for what it was."""
    from types import SimpleNamespace

    from slurm_ft.train import ft, titan_ft, titan_place

    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    titan_ft.time = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    config = SimpleNamespace(
        training=SimpleNamespace(steps=9), fault_tolerance=SimpleNamespace(gather_s=20.0)
    )  # fmt: skip
    place = titan_place.Place.of({"REPLICA_GROUP_ID": "0", "NUM_REPLICA_GROUPS": "2"})

    def start(last_heard: Callable[[], float]) -> tuple[str, float]:
        nonlocal now
        now = 0.0
        beats = {"replica_0:new": 0.0, "replica_1:new": 0.0}
        ft.view_lighthouse = lambda url: ft.LighthouseView(
            {"replica_1:old": 3}, {**beats, "replica_1:old": now - last_heard()}
        )
        return titan_ft.Trainer._look_around(SimpleNamespace(place=place, config=config)), now

    dead = start(lambda: -0.01)
    assert dead[0] == "together" and dead[1] < ft.FRESH_SECONDS + titan_ft.POLL_SECONDS
    alive = start(lambda: now - 0.03)
    assert alive[0] == "late 3" and alive[1] <= titan_ft.POLL_SECONDS
    assert start(lambda: -5.0) == ("together", 0.0)
