"""The data of `titan`: batches from a small text corpus that depend on the step alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slurm_ft.train.titan_cpu  # noqa: F401 - before anything else of torchtitan

# ruff: isort: split
import torch
from torchtitan.components.dataloader import BaseDataLoader

from slurm_ft.errors import UsageError
from slurm_ft.train.titan_state import State


class TextLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches from a small text corpus, each a function of (seed, batch number, rank).

    `dataset_path` is a file or a folder of .jsonl, .json (a line an object with `text`) or .txt files; all of
    it is read and tokenised in every rank, about 1 s a 10 MB. The tokens are cut into windows of `seq_len`;
    each epoch is a permutation of the windows, dealt out over all ranks of all replicas.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        seed: int = 42

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self._seed, self._rank, self._ranks = config.seed, dp_rank, dp_world_size
        self._batch_size = local_batch_size
        tokens = read_tokens(Path(config.dataset_path or "."), tokenizer)
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            hint = "give more text or a smaller --seq-len"
            raise UsageError(f"{config.dataset_path} has {len(tokens)} tokens, fewer than one window", hint)
        self._inputs = tokens[: count * seq_len].view(count, seq_len)
        self._labels = tokens[1 : count * seq_len + 1].view(count, seq_len)
        self._positions = torch.arange(seq_len).expand(local_batch_size, seq_len)
        self._number = 0
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def seek(self, number: int) -> None:
        """The next batch is the one of this number, counted from 0 over the whole run."""
        self._number = number

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self._inputs))
        if epoch != self._epoch:
            dice = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._inputs), generator=dice)
        return int(self._order[place])

    def batch(self, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        first = (number * self._ranks + self._rank) * self._batch_size
        windows = [self._window(first + row) for row in range(self._batch_size)]
        return {"input": self._inputs[windows], "positions": self._positions.clone()}, self._labels[windows]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            number = self._number
            self._number += 1  # before the yield: what comes after it runs only after the next seek
            yield self.batch(number)

    def state_dict(self) -> State:
        return {"number": self._number}

    def load_state_dict(self, state_dict: State) -> None:
        self._number = int(state_dict.get("number", 0))


def _texts(path: Path) -> Iterator[str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".txt":
            yield file.read_text(encoding="utf-8", errors="replace")
        elif file.suffix == ".jsonl" or (file.suffix == ".json" and not file.name.startswith("tokenizer")):
            with open(file, encoding="utf-8", errors="replace") as lines:
                yield from (json.loads(line)["text"] for line in lines if line.strip())


def read_tokens(path: Path, tokenizer: Any) -> torch.Tensor:
    """All texts under `path`, tokenised, in one row. Raises UsageError when there is no text to read."""
    try:
        tokens = [token for text in _texts(path) for token in tokenizer.encode(text, add_bos=True, add_eos=True)]
    except (OSError, ValueError, KeyError, TypeError) as failure:
        hint = 'a file or folder of .txt, or of .jsonl with one {"text": ...} a line'
        raise UsageError(f"cannot read text from {path}: {failure}", hint) from failure
    return torch.tensor(tokens, dtype=torch.long)
