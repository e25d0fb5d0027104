"""torchtitan configs of slurm-ft; torchtitan finds them by `--module slurm_ft.train --config NAME`.

Each function returns a config that trains on a CPU and on a GPU, needs no network and joins the run that the
environment speaks of. `slurm_ft.train.titan` is the command with short options for them; without a GPU it is
the only way, since `python -m torchtitan.train` has chosen its device before it reads a config.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from slurm_ft.train import titan_cpu, titan_ft, titan_place, titan_text

# ruff: isort: split
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
from torchtitan.models.common.attention import ScaledDotProductAttention

ASSETS = Path(__file__).resolve().parent / "assets"
SEED = 42


def for_cpu(config: Any) -> Any:
    """Take out of a config what needs a GPU or is slow without one: flex attention has no backward pass on a
    CPU, and bfloat16 and recomputation cost time and save nothing that is scarce."""
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint = None
    config.comm.trace_buf_size = 0
    return config


def llama3_debugmodel() -> titan_ft.Trainer.Config:
    """Llama 3 with 6 layers of width 256, on the project's own text: made for trying out failures."""
    config = llama3_torchft_debugmodel()
    config.hf_assets_path = str(ASSETS)
    config.dataloader = titan_text.TextLoader.Config(dataset_path=str(ASSETS), seed=SEED)
    config.training.seq_len, config.training.local_batch_size = 64, 2
    config.training.disable_cuda_graphs = True
    config.debug.seed = SEED
    config.profiler.enable_profiling = False
    config.validator.enable = False
    config.fault_tolerance.num_fragments = 1
    config.comm.train_timeout_seconds = 60
    if not titan_cpu.has_accelerator():
        config = for_cpu(config)
    return titan_ft.fault_tolerant(config, titan_place.Place.of(os.environ))
