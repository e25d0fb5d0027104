"""The command `titan`: torchtitan with torchft as one rank of a slurm-ft replica.

    slurm-ft run --replicas 4 -- titan --steps 200
    python -m slurm_ft.train.titan --steps 20          one process, without fault tolerance

What stands here is only the command: options, the environment that must be set before torch is imported, and
the order start, train, end. The training itself is in titan_ft.py. Nothing of torch is imported before the
options are known to be right, so `-h` and mistakes answer at once.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from slurm_ft.errors import EXIT_USAGE, SlurmFTError, UsageError

MODES = {"diloco": "diloco", "local-sgd": "local_sgd", "per-step": None}

# What a process may import ahead that is to be forked into ranks of this command. The rest, in this order, asks
# for a GPU while it is imported, which must not happen before a fork: it is for hosts without one.
PRELOAD = ("torch", "torch._dynamo", "torchft.local_sgd", "slurm_ft.train.kept", "datasets", "tokenizers")
PRELOAD_WITHOUT_GPU = (*PRELOAD, "slurm_ft.train.titan_cpu", "slurm_ft.train.config_registry")

EPILOG = """
\b
Examples:
  titan --steps 200 --sync-steps 20
  titan --steps 60 --mode per-step -- --training.max_norm 0.5 --optimizer.implementation foreach
"""


def prepare_environment() -> None:
    """What must be set before torch, torchft and datasets are imported. What the user set is left alone."""
    run = os.environ.get("SLURM_FT_RUN")
    if run:
        # Each replica has its own cache: four that build one cache at once destroy each other's files.
        cache = Path(run) / "titan" / "hf" / os.environ.get("REPLICA_GROUP_ID", "0")
        os.environ.setdefault("HF_HOME", str(cache))
        datasets = sys.modules.get("datasets")
        if datasets is not None:  # imported before this process was forked: it has read HF_HOME already
            datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_HOME"]) / "datasets"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("RUST_LOG", "warn")  # torchft's servers write several lines a step otherwise
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: ranks share the cores of a host
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        for name, value in alone.items():
            os.environ.setdefault(name, value)


def find_config(name: str) -> Callable[[], Any]:
    """The config function NAME of our registry, or `module:function`. Raises UsageError."""
    module_name, colon, function_name = name.partition(":")
    if not colon:
        module_name, function_name = "slurm_ft.train.config_registry", name
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as failure:
        hint = "is it installed, and is the virtual environment the one of the training?"
        raise UsageError(f"--config {name}: cannot import {failure.name}", hint) from failure
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--config {name}: {module_name} has no function {function_name}", _known(module))
    return function  # type: ignore[no-any-return]


def _known(module: Any) -> str:
    names = [name for name in vars(module) if name.startswith(("llama", "qwen", "deepseek", "gpt"))]
    return f"it has {', '.join(sorted(names))}" if names else "give it as module:function"


def check_schedule(steps: int, sync_steps: int, fragments: int, mode: str) -> None:
    """Raises UsageError for a schedule that would leave its last steps uncommitted, or cannot be kept."""
    if mode == "per-step":
        return
    if mode == "diloco" and sync_steps % fragments:
        raise UsageError(
            f"--sync-steps {sync_steps} is not a multiple of --fragments {fragments}",
            f"use --sync-steps {(sync_steps // fragments + 1) * fragments}",
        )
    interval = sync_steps // fragments if mode == "diloco" else sync_steps
    if steps % interval:
        raise UsageError(
            f"--steps {steps} does not end at a synchronisation: there is one every {interval} steps",
            f"use --steps {(steps // interval + 1) * interval}",
        )


def build_config(options: dict[str, Any], rest: tuple[str, ...]) -> Any:
    """The torchtitan config for these options; `rest` is torchtitan's own command line and wins."""
    from torchtitan.config import ConfigManager

    from slurm_ft.train import titan_ft, titan_place

    place = titan_place.Place.of(os.environ)
    config = find_config(options["config"])()
    if not isinstance(config, titan_ft.Trainer.Config):
        config = titan_ft.fault_tolerant(config, place)
    _apply(config, options)

    class Given(ConfigManager):  # type: ignore[misc]
        """torchtitan's parser, with a config that is already there."""

        def _load_config(self, args: list[str]) -> tuple[object, list[str]]:
            return config, args

    return Given().parse_args(list(rest))


def _apply(config: Any, options: dict[str, Any]) -> None:
    training, tolerance = config.training, config.fault_tolerance
    training.steps = options["steps"]
    tolerance.semi_sync_method = MODES[options["mode"]]
    tolerance.sync_steps, tolerance.num_fragments = options["sync_steps"], options["fragments"]
    given = {name: value for name, value in options.items() if value is not None}
    training.seq_len = given.get("seq_len", training.seq_len)
    training.local_batch_size = given.get("batch_size", training.local_batch_size)
    tolerance.min_replica_size = given.get("min_replicas", tolerance.min_replica_size)
    tolerance.quorum_timeout_s = given.get("quorum_timeout", tolerance.quorum_timeout_s)
    config.hf_assets_path = given.get("tokenizer_path", config.hf_assets_path)
    config.dataloader.dataset_path = given.get("dataset_path", config.dataloader.dataset_path)
    config.debug.seed = given.get("seed", config.debug.seed)
    if hasattr(config.dataloader, "seed") and config.debug.seed is not None:
        config.dataloader.seed = config.debug.seed
    # Equal seeds make equal weights. Without one, all replicas take the weights of the first.
    tolerance.init_sync = config.debug.seed is None
    if "lr" in given:
        for group in config.optimizer.param_groups:
            group.optimizer_kwargs["lr"] = given["lr"]


class _ShortLog(logging.Filter):
    """Cuts torchtitan's dump of the whole model to its first line, and drops what is said of features that are
    not in use."""

    NOISE = (
        "Error running lspci",
        "Peak flops undefined",
        "initial_load_model_only=True has no effect",
        "model.safetensors.index.json not found",
        "Unable to reset NCCL flight recorder",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno == logging.INFO and "\n" in text:
            record.msg, record.args = text.partition("\n")[0] + " ...", ()
        return not any(noise in text for noise in self.NOISE)


def run(options: dict[str, Any], rest: tuple[str, ...]) -> None:
    """Train as this process's rank, to the end."""
    check_schedule(options["steps"], options["sync_steps"], options["fragments"], options["mode"])
    prepare_environment()
    from torchtitan.tools.logging import init_logger, logger

    from slurm_ft.train import titan_ft, titan_place
    from slurm_ft.train.progress import report_phase

    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    init_logger()
    for handler in logger.handlers:
        handler.addFilter(_ShortLog())
    report_phase("imported")
    place = titan_place.Place.of(os.environ)
    config = build_config(options, rest)
    # Ranks of one replica must agree on it, and do so when they have met: Trainer.train.
    if place.ranks == 1 and titan_place.is_over(place, config.training.steps):
        logger.info("another replica has finished the run; nothing is left to do")
        return
    config.metrics.disable_color_printing |= not sys.stdout.isatty()
    trainer = None
    try:
        trainer = titan_ft.Trainer(config)
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    titan_ft.close_process_groups()


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.option("--steps", type=click.IntRange(1), default=60, show_default=True, help="Train this many steps.")
@click.option(
    "--mode", type=click.Choice(list(MODES)), default="diloco", show_default=True,
    help="How replicas share what they learn: outer steps, averaged weights, or every gradient.",
)  # fmt: skip
@click.option(
    "--sync-steps", type=click.IntRange(1), default=10, show_default=True,
    help="Steps between synchronisations of the whole model. Not for per-step.",
)  # fmt: skip
@click.option(
    "--fragments", type=click.IntRange(1), default=1, show_default=True,
    help="DiLoCo: synchronise the model in this many parts, in turn.",
)  # fmt: skip
@click.option(
    "--min-replicas", type=click.IntRange(1), help="Commit only with this many. [default: the run's policy, or 1]"
)
@click.option("--config", default="llama3_debugmodel", show_default=True, help="Config, or module:function.")
@click.option("--seed", type=click.IntRange(0), help="Seed of weights and data. [default: the config's, 42]")
@click.option("--seq-len", type=click.IntRange(2), help="Tokens in a sequence. [default: the config's, 64]")
@click.option("--batch-size", type=click.IntRange(1), help="Sequences a step and rank. [default: the config's, 2]")
@click.option("--lr", type=click.FloatRange(0, min_open=True), help="Learning rate. [default: the config's]")
@click.option("--dataset-path", type=click.Path(exists=True), help="Text to train on. [default: our own]")
@click.option("--tokenizer-path", type=click.Path(exists=True, file_okay=False), help="Folder of tokenizer.json.")
@click.option(
    "--quorum-timeout", type=click.FloatRange(0, min_open=True),
    help="Seconds to wait for a quorum; longer than an interval. [default: the run's, 600]",
)  # fmt: skip
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[-- TORCHTITAN OPTIONS]")
def command(rest: tuple[str, ...], **options: Any) -> None:
    """Train with torchtitan and torchft as one rank of a replica.

    Options that are not listed here go to torchtitan unchanged. Without TORCHFT_LIGHTHOUSE and
    REPLICA_GROUP_ID it trains alone.
    """
    run(options, rest)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        command.main(args=arguments, prog_name="titan", standalone_mode=False)
    except SlurmFTError as failure:
        failure.show()
        return failure.exit_code
    except click.ClickException as failure:
        UsageError(failure.format_message(), "titan -h lists the options").show()
        return EXIT_USAGE
    return 0


def leave(code: int) -> NoReturn:
    """End the process as sys.exit would, without the second in which Python takes torch apart."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
