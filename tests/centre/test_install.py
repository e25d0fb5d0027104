"""scripts/install_centre: what it makes works where it stands, and its removal leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import slurm_ft
from tests.centre.conftest import ROOT, ModuleSystem, run

INSTALL = str(ROOT / "scripts" / "install_centre")
VERSION = f"slurm-ft {slurm_ft.__version__}\n"


def test_the_moved_installation_runs_and_finds_its_template(centre: Path, tmp_path: Path) -> None:
    program = str(centre / "bin" / "slurm-ft")
    assert run(program, "--version", folder=tmp_path).stdout == VERSION
    assert "any_script" in run(program, "templates", "list", folder=tmp_path).stdout
    assert "lumi-g" in run(program, "config", "--profiles", folder=tmp_path).stdout
    script = run(program, "submit", "--dry-run", "--replicas", "2", "--", "true", folder=tmp_path).stdout
    assert "#SBATCH --nodes=2" in script
    assert str(centre / "venv" / "bin" / "python") in script


def test_it_has_a_lighthouse_and_no_torch(centre: Path, tmp_path: Path) -> None:
    python = str(centre / "venv" / "bin" / "python")
    code = "from slurm_ft.controller import lighthouse as l; print(l._load(l.extension_path()).LighthouseServer)"
    assert "LighthouseServer" in run(python, "-c", code, folder=tmp_path).stdout
    assert "No module named 'torch'" in run(python, "-c", "import torch", folder=tmp_path, code=1).stderr


def test_the_sample_of_the_sites_settings_becomes_the_sites_file(
    centre: Path, module_system: ModuleSystem, tmp_path: Path
) -> None:
    sample = centre / "etc" / "slurm-ft" / "config.toml.sample"
    site = sample.with_suffix("")
    site.write_text(f'qos = "centre"\n{sample.read_text()}')
    lines = "module load slurm-ft; slurm-ft config --show-origin"
    out = module_system.shell(lines, centre / "share" / "modulefiles", tmp_path)
    site.unlink()
    assert f"# {site}\n" in next(line + "\n" for line in out.splitlines() if line.startswith('qos = "centre"'))


def test_the_samples_find_the_installation_that_they_are_part_of(centre: Path, tmp_path: Path) -> None:
    share = centre / "share" / "slurm-ft"
    assert sorted(path.name for path in share.iterdir()) == ["epilog.sh", "prolog.sh", "slurm-ft.nhc"]
    prolog = tmp_path / "prolog.sh"
    prolog.symlink_to(share / "prolog.sh")
    text = (share / "prolog.sh").read_text()
    refusing = share / "refusing.sh"
    refusing.write_text(text.replace("\nrefuse=no\n", "\nrefuse=yes\n").replace("logger -t slurm-ft --", "echo"))
    run("sh", str(prolog), folder=tmp_path, SLURM_JOB_GPUS="")
    out = run("sh", str(refusing), folder=tmp_path, code=1, SLURM_JOB_GPUS="0," * 99, SLURMD_NODENAME="n1").stdout
    refusing.unlink()
    assert "of 99 GPUs are there" in out
    assert "to drain: scontrol update NodeName=n1 State=DRAIN Reason=" in out


def test_only_slurm_ft_is_on_a_users_path(centre: Path) -> None:
    assert [path.name for path in (centre / "bin").iterdir()] == ["slurm-ft"]


def test_the_module_is_loaded_used_and_unloaded(centre: Path, module_system: ModuleSystem, tmp_path: Path) -> None:
    lines = """
before="$PATH|$MANPATH|$XDG_DATA_DIRS"
module load slurm-ft
slurm-ft --version
echo "$SLURM_FT_ROOT|$MANPATH|$XDG_DATA_DIRS"
module unload slurm-ft
echo "${SLURM_FT_ROOT-gone}"
[ "$before" = "$PATH|$MANPATH|$XDG_DATA_DIRS" ] && echo "as before"
"""
    out = module_system.shell(lines, centre / "share" / "modulefiles", tmp_path)
    # One empty entry or two (Lmod): both stand for the system's own pages.
    loaded = f"{centre}|{centre}/share/man:|{centre}/share:/usr/local/share:/usr/share\n"
    assert out.replace("::", ":") == f"{VERSION}{loaded}gone\nas before\n"


def test_what_a_user_has_in_the_variables_stays(centre: Path, module_system: ModuleSystem, tmp_path: Path) -> None:
    lines = """
export MANPATH=/opt/man XDG_DATA_DIRS=/usr/share:/opt/share
module load slurm-ft
module unload slurm-ft
for entry in $(echo "$MANPATH:$XDG_DATA_DIRS" | tr : " "); do echo "$entry"; done | sort
"""
    assert (
        module_system.shell(lines, centre / "share" / "modulefiles", tmp_path) == "/opt/man\n/opt/share\n/usr/share\n"
    )


def test_help_and_whatis_are_there(centre: Path, module_system: ModuleSystem, tmp_path: Path) -> None:
    lines = "module help slurm-ft 2>&1; module whatis slurm-ft 2>&1"
    out = module_system.shell(lines, centre / "share" / "modulefiles", tmp_path)
    assert "exec slurm-ft run -- python train.py" in out
    assert "Description: keeps a distributed PyTorch training alive" in out


@pytest.mark.skipif(not shutil.which("man"), reason="there is no man program here")
def test_man_finds_the_pages_of_the_module(centre: Path, module_system: ModuleSystem, tmp_path: Path) -> None:
    out = module_system.shell(
        "module load slurm-ft; man -w slurm-ft-submit", centre / "share" / "modulefiles", tmp_path
    )
    assert out.strip() == str(centre / "share" / "man" / "man1" / "slurm-ft-submit.1")


def installed(prefix: Path, *modules: Path) -> None:
    """A stand-in for an installation: what the removal looks at."""
    for path in (*modules, prefix / "venv" / "pyvenv.cfg"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (prefix / ".slurm-ft-centre").write_text("".join(f"{path}\n" for path in modules))


def test_removal_takes_the_folder_and_its_modulefiles_and_no_other(tmp_path: Path) -> None:
    modules = tmp_path / "modules" / "slurm-ft"
    installed(tmp_path / "0.1", modules / "0.1", modules / "0.1.lua")
    (modules / "0.2").touch()
    run(INSTALL, "--prefix", str(tmp_path / "0.1"), "--remove", folder=tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.2", "modules", "slurm-ft"]


def test_a_folder_that_is_not_ours_is_neither_removed_nor_installed_into(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    for flags in (("--remove",), ()):
        done = run(INSTALL, "--prefix", str(tmp_path / "theirs"), *flags, folder=tmp_path, code=1)
        assert "error: " in done.stderr and "hint: " in done.stderr
    assert (tmp_path / "theirs" / "file").exists()


def test_an_installation_that_fails_leaves_nothing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "no space left" >&2; exit 1\n')
    python.chmod(0o755)
    run(INSTALL, "--prefix", str(tmp_path / "0.1"), "--python", str(python), folder=tmp_path, code=1)
    assert not (tmp_path / "0.1").exists()
