"""What the tests of this folder share: an installation as a centre makes it, and the two module systems."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.debian import unpacked

ROOT = Path(__file__).resolve().parents[2]
BASIC = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
SECONDS, INSTALL_SECONDS = 300.0, 900.0
"""No single command may take longer; an installation fetches packages."""


def run(
    *argv: str, folder: Path, code: int = 0, seconds: float = SECONDS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run in `folder` with the plainest environment; only what pip needs to find its packages is handed on."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    environ = {**BASIC, "HOME": str(folder), **pip, **environment}
    done = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation into a folder with a blank in its name, moved after it was made."""
    folder = tmp_path_factory.mktemp("centre")
    made, moved = folder / "made", folder / "moved here" / "0.1"
    try:
        install = (str(ROOT / "scripts" / "install_centre"), "--prefix", str(made))
        run(*install, folder=folder, seconds=INSTALL_SECONDS)
    except AssertionError as error:
        if "No matching distribution" in str(error) or "ensurepip" in str(error):
            pytest.skip(f"pip cannot install here: {str(error)[-200:]}")
        raise
    moved.parent.mkdir()
    made.rename(moved)
    run(str(ROOT / "scripts" / "build_modulefile"), str(moved), folder=folder)
    return moved


@dataclass(frozen=True)
class ModuleSystem:
    """A shell in which `module` is defined, without anything of the machine's own module system."""

    name: str
    function: str

    def shell(self, lines: str, modules: Path, folder: Path, **environment: str) -> str:
        script = f'{self.function}\nexport MODULEPATH="{modules}"\nset -e\n{lines}\n'
        return run("bash", "--norc", "-c", script, folder=folder, LMOD_DIR="", **environment).stdout


@pytest.fixture(scope="session", params=["Environment Modules", "Lmod"])
def module_system(request: pytest.FixtureRequest) -> ModuleSystem:
    return environment_modules() if request.param == "Environment Modules" else lmod()


def environment_modules() -> ModuleSystem:
    root = unpacked("environment-modules", "tcl8.6", "libtcl8.6")
    command = next(root.glob("usr/lib/*/modulecmd.tcl"))
    libraries = next(root.glob("usr/lib/*/libtcl8.6.so")).parent
    tcl = f'LD_LIBRARY_PATH="{libraries}" TCL_LIBRARY="{root}/usr/share/tcltk/tcl8.6" "{root}/usr/bin/tclsh8.6"'
    return ModuleSystem("Environment Modules", f'module() {{ eval "$({tcl} "{command}" bash "$@")"; }}')


def lmod() -> ModuleSystem:
    root = unpacked("lmod", "lua5.3", "lua-filesystem", "lua-json", "lua-posix", "lua-term", "lua-lpeg")
    program = next(root.glob("usr/share/lmod/*/libexec/lmod"))
    here = program.with_name("lmod-here")
    # Debian's Lmod looks for Lua's own modules below /usr alone.
    text = program.read_text(encoding="utf-8").replace('"/usr/local/share/lua', f'"{root}/usr/local/share/lua')
    text = text.replace(";/usr/", f";{root}/usr/").replace('"/usr/local/lib', f'"{root}/usr/local/lib')
    here.write_text(text, encoding="utf-8")
    lua = f'"{root}/usr/bin/lua5.3" "{here}"'
    return ModuleSystem("Lmod", f'export LMOD_CMD="{here}"; module() {{ eval "$({lua} bash "$@")"; }}')
