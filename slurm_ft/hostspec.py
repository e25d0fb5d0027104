"""What a run is told about its hosts: which CPUs are next to which GPU, how a host is checked, where its scratch is.

Most of it comes from the site's settings. It stands in `run.json`, so every host acts on the same words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Problem = tuple[str, str]


@dataclass(frozen=True)
class HostSpec:
    """`gpu_cpus` as in `parse_cpus`; `srun_args` go to the srun of each replica's step; `scratch` may hold ~ and
    $NAME, replaced on each host. `health_check` is a shell command that fails on a host unfit to train; '' is none.
    A waiting spare is checked every `spare_check` seconds; 0 is never.
    """

    gpu_cpus: str = ""
    srun_args: tuple[str, ...] = ()
    scratch: str = ""
    health_check: str = ""
    spare_check: float = 300.0

    def problems(self) -> list[Problem]:
        found = []
        try:
            parse_cpus(self.gpu_cpus)
        except ValueError as error:
            found.append((f"--gpu-cpus: {error}", "give the CPUs of each GPU in their order, as `0-7,64-71 8-15`"))
        wrong = [word for word in self.srun_args if not word.startswith("-")]
        if wrong:
            found.append((f"srun_args holds `{wrong[0]}`", "write each option as one word, such as --gpu-bind=none"))
        if self.spare_check < 0:
            found.append((f"spare_check is {self.spare_check:g}", "a time in seconds, or 0 to turn it off"))
        return found


def parse_cpus(text: str) -> list[frozenset[int]]:
    """The CPUs of each GPU from `0-7,64-71 8-15,72-79`. Raises ValueError for a part that is no list of CPUs."""
    return [frozenset(number for part in word.split(",") for number in _range(part, word)) for word in text.split()]


def _range(part: str, word: str) -> range:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"`{word}` is no list of CPUs")
    return range(int(match[1]), int(match[2] or match[1]) + 1)
