"""Runs a rank's Python program as if Python had been started on it, and observes it.

    python bootstrap.py script.py ARGS | -m module ARGS | -c code ARGS

The agent puts this file in front of the program of a rank whose command is a Python. It
  1. listens to torchft's own structured loggers, so that an unmodified torchft script is observed;
  2. leaves the traceback of an uncaught exception in torch elastic's error file, as `@record` would;
  3. turns on faulthandler, so that a segmentation fault leaves a stack in the rank's log, and so does a
     rank that hangs before it is ended;
  4. serves the replica's TCPStore at MASTER_ADDR:MASTER_PORT from rank 0, as torchrun's agent does:
     torchft's Manager expects it there, and the process groups of the replica use it too;
  5. has torchft's Manager leave a replica that the controller knows to be gone, and gives it time-outs that
     are in order where the program sets none (survivors.py);
  6. has `import slurm_ft` find the package that this file belongs to, where the program's Python has none:
     slurm_ft.train stands on the standard library, and on the program's own torch and torchft;
  7. runs the program in the real `__main__`, with its own sys.argv and sys.path.

It uses the standard library alone and is run by its path: the program's Python needs no slurm-ft.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import pkgutil
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any


def _load(name: str, file: str) -> ModuleType:
    """Load a file of this folder as the module `name`."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), file)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}
"""Files whose frames stand above the program's own in a traceback, and are cut from it."""


class _TorchftHandler(logging.Handler):
    """Sends torchft's structured records to the agent. Field names are those of torchft 0.2.0."""

    KINDS = ("torchft_quorums", "torchft_commits", "torchft_errors")

    def __init__(self, channel: Any) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        fields = record.__dict__
        common = {"quorum_id": fields.get("quorum_id"), "torchft_id": fields.get("replica_id")}
        if record.name == "torchft_quorums":
            self._channel.send("quorum", step=fields.get("step"), **common)
        elif record.name == "torchft_commits":
            committed = bool(fields.get("commit_result"))
            self._channel.send("commit", step=fields.get("step"), committed=committed, **common)
        else:
            self._channel.send("torchft_error", error=str(fields.get("error", ""))[:500], **common)


def _observe_torchft(channel: Any) -> None:
    handler = _TorchftHandler(channel)
    for name in handler.KINDS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        # The records have an empty message: without this they would print blank lines in the user's log.
        logger.propagate = False


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls `then(module)` right after the program has imported a module, so that a program without it pays
    nothing."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


def _after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    imported = sys.modules.get(name)
    if imported is not None:  # by the zygote
        then(imported)
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


_stores: list[Any] = []
"""Kept here, the store serves as long as this process lives; each attempt has a port of its own."""


def _serve_store() -> None:
    """Have the replica's store served, and its ranks use it, by the switch that torchrun sets for that."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if os.environ["RANK"] == "0":
        _after_import("torch.distributed", _serve)


def _serve(module: ModuleType) -> None:
    if module.is_available():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _stores.append(module.TCPStore(address, port, is_master=True, wait_for_workers=False))


def _watch_torchft(channel: Any) -> None:
    """Have this rank leave a replica that is gone when its agent says so (see survivors.py)."""
    survivors = _own_module("survivors")
    _own_module("progress").COMMANDS["abort"] = lambda order: survivors.leave(str(order.get("member")))
    _after_import("torchft.process_group", survivors.install_store)
    _after_import("torchft.manager", lambda module: survivors.install(module, survivors.defaults(), channel.send))


def _own_frames_cut(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy, as the user's program would show it."""
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    return trace


def _leave_error_file(value: BaseException, text: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):  # `@record` was there first and knows more
        return
    message = {
        "message": f"{type(value).__name__}: {value}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
    }
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    trace = _own_frames_cut(trace)
    text = "".join(traceback.format_exception(kind, value, trace))
    sys.stderr.write(text)
    if not issubclass(kind, KeyboardInterrupt):
        _leave_error_file(value, text)


def enter_folder(arguments: list[str]) -> None:
    """Put the place that this program may import its own modules from in front, as Python itself would."""
    if getattr(sys.flags, "safe_path", sys.flags.isolated):  # python -P or -I: there is none
        return
    first = arguments[0]
    if first == "-m":
        sys.path[0] = os.getcwd()
    elif first == "-c":
        sys.path[0] = ""
    else:
        sys.path[0] = _absolute(first) if _has_main(first) else os.path.dirname(os.path.realpath(first))


def _has_main(path: str) -> bool:
    """Is this a folder or a zip file with a `__main__.py`, rather than a script?"""
    return pkgutil.get_importer(path) is not None


def _absolute(path: str) -> str:
    return os.path.join(os.getcwd(), path)


def _run(arguments: list[str]) -> None:
    first = arguments[0]
    enter_folder(arguments)
    sys.argv = ["-c", *arguments[2:]] if first == "-c" else arguments[first == "-m" :]
    if first == "-m" or (first != "-c" and _has_main(first)):
        name = arguments[1] if first == "-m" else "__main__"
        runpy._run_module_as_main(name, alter_argv=first == "-m")  # type: ignore[attr-defined]
        return
    main = sys.modules["__main__"].__dict__
    names = {"__name__": "__main__", "__builtins__": builtins, "__doc__": None, "__package__": None}
    if first == "-c":
        source, file = arguments[1].encode(), "<string>"
    else:
        with open(first, "rb") as script:
            source, file = script.read(), _absolute(first)
        names["__file__"] = file
    code = compile(source, file, "exec", dont_inherit=True)  # or our `from __future__` would be the program's
    main.clear()
    main.update(names, __spec__=None, __loader__=None)
    exec(code, main)


class _OwnPackage(importlib.abc.MetaPathFinder):
    """Finds the package `slurm_ft` that this file belongs to; asked last, so one of the program's Python wins."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != "slurm_ft":
            return None
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        file = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[folder])


def _own_module(name: str) -> ModuleType:
    """A module beside this file under its full name: a program that imports it gets the same one, so the rank
    has one channel. By its path where the program's Python is too old for the package around it."""
    full = f"slurm_ft.train.{name}"
    try:
        return importlib.import_module(full)
    except (ImportError, SyntaxError):
        return _load(full, f"{name}.py")


def main() -> None:
    faulthandler.enable()
    sys.meta_path.append(_OwnPackage())
    progress = _own_module("progress")
    channel = progress.channel()
    if channel is not None:
        faulthandler.register(progress.STACKS_SIGNAL, all_threads=True)
        _observe_torchft(channel)
        _watch_torchft(channel)
        _serve_store()
    sys.excepthook = _excepthook
    _run(sys.argv[1:])


if __name__ == "__main__":
    # The program takes over this very namespace, so what outlives it must live in another.
    _load("_slurm_ft_bootstrap", "bootstrap.py").main()
