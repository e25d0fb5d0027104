"""Modulefiles for an installation: `module load slurm-ft` under Environment Modules (Tcl) and Lmod (Lua).

Both come from one list of settings, so they cannot differ. Only what slurm-ft needs is set: PATH, MANPATH,
SLURM_FT_ROOT, and XDG_DATA_DIRS, where bash-completion and fish look; no library path and no Python path, so
a user's own Python stays as it is. zsh has no variable that is safe to extend from outside (FPATH is not
exported), so zsh users run `slurm-ft completion zsh`.

Files are laid out as `slurm-ft/VERSION` and `slurm-ft/VERSION.lua`. Each module system passes over the
other's, so one folder serves both.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slurm_ft import __version__
from slurm_ft.errors import UsageError

NAME = "slurm-ft"
WHATIS = "keeps a distributed PyTorch training alive inside one Slurm allocation"
HELP = (
    "slurm-ft runs a training as replicas and starts a broken one again, in the same job.",
    "First steps: slurm-ft --help, man slurm-ft.",
    "In an sbatch script: exec slurm-ft run -- python train.py",
)
XDG_DEFAULT = "/usr/local/share:/usr/share"
"""What an unset XDG_DATA_DIRS means (XDG Base Directory Specification); setting it must not hide these."""


def tcl(prefix: str, version: str = __version__) -> str:
    """The modulefile for Environment Modules, which Lmod reads too."""
    lines = [
        "#%Module1.0",
        f"# Written by slurm-ft {version}.",
        *(f"module-whatis {tcl_word(line)}" for line in _whatis(version)),
        "proc ModulesHelp { } {",
        *(f"    puts stderr {tcl_word(line)}" for line in HELP),
        "}",
        f"conflict {NAME}",
        f"set root {tcl_word(_checked(prefix))}",
        "setenv SLURM_FT_ROOT $root",
        "prepend-path PATH $root/bin",
        "# The empty entry at the end stands for the system's own pages.",
        "prepend-path MANPATH $root/share/man",
        "append-path MANPATH {}",
        "prepend-path XDG_DATA_DIRS $root/share",
        f"append-path XDG_DATA_DIRS {XDG_DEFAULT}",
    ]
    return "\n".join(lines) + "\n"


def lua(prefix: str, version: str = __version__) -> str:
    """The modulefile for Lmod."""
    words = "\\n".join(HELP)
    lines = [
        f"-- Written by slurm-ft {version}.",
        *(f"whatis({lua_word(line)})" for line in _whatis(version)),
        f'help("{words}")',
        f'conflict("{NAME}")',
        f"local root = {lua_word(_checked(prefix))}",
        'setenv("SLURM_FT_ROOT", root)',
        'prepend_path("PATH", root .. "/bin")',
        "-- The empty entry at the end stands for the system's own pages.",
        'prepend_path("MANPATH", root .. "/share/man")',
        'append_path("MANPATH", "")',
        'prepend_path("XDG_DATA_DIRS", root .. "/share")',
        f'append_path("XDG_DATA_DIRS", "{XDG_DEFAULT}")',
    ]
    return "\n".join(lines) + "\n"


FORMATS = {"tcl": tcl, "lua": lua}


def write(folder: Path, prefix: str, version: str = __version__) -> list[Path]:
    """Write both below `folder`, which is then fit for MODULEPATH; gives their paths."""
    texts = {folder / NAME / version: tcl(prefix, version), folder / NAME / f"{version}.lua": lua(prefix, version)}
    (folder / NAME).mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def own_prefix() -> str:
    """The installation that this process belongs to: what scripts/install_centre made, or our environment."""
    environment = Path(sys.prefix)
    centre = environment.parent
    return str(centre if (centre / "bin" / "slurm-ft").exists() else environment)


def _whatis(version: str) -> tuple[str, str, str]:
    return f"Name: {NAME}", f"Version: {version}", f"Description: {WHATIS}"


def _checked(prefix: str) -> str:
    """The prefix as it may stand in a search path. Raises UsageError for one that may not."""
    if not prefix.startswith("/"):
        raise UsageError(f"the prefix `{prefix}` is not an absolute path", "give the whole path of the installation")
    if ":" in prefix or "\n" in prefix:
        raise UsageError(f"the prefix {prefix!r} cannot stand in a search path", "install it under another name")
    return prefix.rstrip("/") or "/"


def tcl_word(text: str) -> str:
    """A word that Tcl takes literally."""
    return '"' + re.sub(r'([\\"$\[\]{}])', r"\\\1", text) + '"'


def lua_word(text: str) -> str:
    """A string that Lua takes literally."""
    return '"' + re.sub(r'([\\"])', r"\\\1", text) + '"'
