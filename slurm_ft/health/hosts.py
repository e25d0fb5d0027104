"""The same checks on all hosts of a job, by one srun. Each host answers in lines of JSON; here they are put together.
`answers_in` and `faults_of` are pure: text in, answers out; answers in, faults by host out.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slurm_ft import __version__, env
from slurm_ft.health import ring
from slurm_ft.health.bounded import bounded
from slurm_ft.health.node import Wanted, folder_faults, nearest
from slurm_ft.launch.helper import helper_argv
from slurm_ft.launch.srun import allocation_from, step_environment

SECONDS = 45.0
"""For all of it: some seconds for srun, the checks, the folder and the calls."""
SEARCHED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MODULEPATH")
NOISE = "lacks support for cpu binding"
"""What srun says where the site binds no CPUs, and what is no fault."""
NEEDS_FOLDER = frozenset({"network", "storage"})

Fault = tuple[str, str]


def check_hosts(hosts: Sequence[str], wanted: Wanted, areas: frozenset[str], seconds: float) -> list[Fault]:
    """(host, fault) for each fault of each host. `seconds` bounds the checks of one host."""
    folder = None
    if areas & NEEDS_FOLDER and wanted.shared:
        # Not in this process: a file server that does not answer must not hang it.
        if faults := bounded({"the run folder": partial(folder_faults, wanted.shared, "run")}, seconds):
            return [(os.uname().nodename, fault) for fault in faults]
        folder = nearest(Path(wanted.shared)) / f".slurm-ft-check-{secrets.token_hex(8)}"
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            return [(os.uname().nodename, f"the run folder {wanted.shared} cannot be written: {error.strerror}")]
    order = {
        "areas": sorted(areas),
        "gpus": wanted.gpus,
        # The tasks have our environment by themselves; here is what the settings add to it.
        "environ": {name: text for name, text in wanted.environ.items() if name not in os.environ},
        "shared": wanted.shared,
        "scratch": wanted.scratch,
        "folder": str(folder or ""),
        "hosts": list(hosts),
        "folders": search_folders(os.environ),
        "word": secrets.token_hex(16),
        "seconds": seconds,
    }
    try:
        answers, words = _ask(hosts, order)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    return faults_of(hosts, answers, words)


def search_folders(environ: Mapping[str, str]) -> dict[str, str]:
    """The folders that are here of those in which programs and libraries are looked for, and the variable of each."""
    found: dict[str, str] = {}
    for variable in SEARCHED:
        for folder in environ.get(variable, "").split(":"):
            if folder.startswith("/") and Path(folder).is_dir():
                found.setdefault(folder, variable)
    return found


def command(
    hosts: Sequence[str], order: Mapping[str, Any], surroundings: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The srun command line and its environment. Pure."""
    argv = [sys.executable, "-m", "slurm_ft.health.task"]
    environ = {**step_environment(surroundings, ""), env.CHECK: json.dumps(order)}
    return helper_argv(allocation_from(surroundings), hosts, "sft-check", argv), environ


def _ask(hosts: Sequence[str], order: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    argv, environ = command(hosts, order, os.environ)
    try:
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return [], f"srun cannot be started: {error.strerror}"
    try:
        out, words = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # srun hands it on to its tasks; Slurm ends the step after a minute in any case
        try:
            out, words = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            out, words = process.communicate()
    return answers_in(out), words


def answers_in(text: str) -> list[dict[str, Any]]:
    """The answers of the hosts, whose parts come in order, but for those of other hosts in between. Pure."""
    texts: dict[str, str] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and {"host", "part"} <= value.keys():
                texts[value["host"]] = texts.get(value["host"], "") + value["part"]
    found = []
    for whole in texts.values():
        with contextlib.suppress(ValueError):  # its end has not come
            found.append(json.loads(whole))
    return found


def faults_of(hosts: Sequence[str], answers: Sequence[Mapping[str, Any]], words: str) -> list[Fault]:
    """Put together what the hosts have answered, in the order of `hosts`. `words` are srun's own. Pure."""
    by_host = {str(answer["host"]): answer for answer in answers}
    clocks = ring.clock_faults(hosts, {host: answer["ahead"] for host, answer in by_host.items() if "ahead" in answer})
    found: list[Fault] = []
    for host in hosts:
        answer = by_host.get(host)
        if answer is None:
            found.append((host, f"no answer{_srun_words(words, host)}"))
            continue
        found += [(host, str(fault)) for fault in answer["faults"]]
        if answer["version"] != __version__:
            found.append((host, f"slurm-ft there is {answer['version']}, and here {__version__}"))
        if host in clocks:
            found.append((host, clocks[host]))
    return found


def _srun_words(words: str, host: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip() and NOISE not in line]
    about = [line for line in lines if host in line] or [line for line in lines if "error" in line] or lines
    return f": {about[-1]}" if about else ""
