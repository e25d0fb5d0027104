"""What the devcluster writes for a Slurm of its own folder and for accounting; no process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_ft.errors import LaunchError, UsageError
from slurm_ft.testing import devcluster_accounting as accounting
from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing import slurm_releases as releases


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A Slurm's prefix, as far as it is looked at."""
    place = tmp_path / "slurm"
    for folder, names in (
        ("sbin", ("slurmctld", "slurmd")),
        ("bin", ("srun", "sbatch", "scancel", "scontrol", "sinfo")),
    ):
        (place / folder).mkdir(parents=True)
        for name in names:
            (place / folder / name).write_text("#!/bin/sh\n")
            (place / folder / name).chmod(0o755)
    (place / "lib64" / "slurm").mkdir(parents=True)
    (place / "lib64" / "slurm" / "auth_munge.so").touch()
    return place


def test_slurms_programs_come_from_the_root_and_from_nowhere_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "PROGRAMS", config.PROGRAMS)
    names = ("slurmctld", "srun")
    assert config.find_programs(names, str(root)) == {"slurmctld": f"{root}/sbin/slurmctld", "srun": f"{root}/bin/srun"}
    (root / "bin" / "srun").unlink()
    with pytest.raises(UsageError, match="has no srun"):
        config.find_programs(names, str(root))


def test_the_plugins_of_a_root_are_found_below_lib_or_lib64(root: Path, tmp_path: Path) -> None:
    shape = config.Shape(hosts=1, slurm_root=str(root))
    assert f"PluginDir={root}/lib64/slurm" in config.slurm_conf(tmp_path, shape, [1, 2])
    with pytest.raises(UsageError, match="no plugins"):
        config.plugin_folder(str(tmp_path))


def test_accounting_has_a_port_of_its_own_and_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    shape = config.Shape(hosts=2, accounting=True)
    assert config.port_count(shape) == 4
    text = config.slurm_conf(tmp_path, shape, [1001, 1002, 1003, 1004])
    assert "AccountingStorageType=accounting_storage/slurmdbd" in text
    assert "AccountingStoragePort=1004" in text and "Port=1003 " in text and "Port=1004 CPUs" not in text
    accounting.write_files(tmp_path, shape, 1004)
    conf = tmp_path / "slurmdbd.conf"
    assert conf.stat().st_mode & 0o777 == 0o600
    assert "DbdAddr=127.0.0.1" in conf.read_text() and "DbdPort=1004" in conf.read_text()
    without = config.slurm_conf(tmp_path, config.Shape(hosts=2), [1, 2, 3])
    assert "AccountingStorageType=accounting_storage/none" in without


def test_the_database_has_no_network_port(tmp_path: Path) -> None:
    argv = accounting.mariadbd(tmp_path, {"mariadbd": "/usr/sbin/mariadbd"})
    assert "--skip-networking" in argv and f"--socket={tmp_path}/mariadb.sock" in argv


def test_a_marker_of_an_older_devcluster_is_still_read(tmp_path: Path) -> None:
    (tmp_path / config.MARKER).write_text('{"shape": {"hosts": 2}, "ports": [1, 2, 3]}')
    assert config.read_marker(tmp_path)[0] == config.Shape(hosts=2)


def test_missing_programs_of_accounting_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(config, "SYSTEM_FOLDERS", ())
    with pytest.raises(LaunchError, match="slurmdbd") as caught:
        accounting.find_programs()
    assert "mariadb-server-core" in caught.value.hint


def test_a_release_without_a_mirror_says_how_to_name_one(tmp_path: Path) -> None:
    noble = next(release for release in releases.RELEASES if release.origin == "Ubuntu")
    with pytest.raises(UsageError, match="comes from Ubuntu") as caught:
        releases.prefix(noble, tmp_path, {})
    assert "--mirror Ubuntu=URI" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_cached_release_is_used_where_it_was_made_and_nowhere_else(tmp_path: Path) -> None:
    release = releases.Release("99.05", "Nowhere", "never")
    place = tmp_path / "99.05"
    place.mkdir()
    record = '{"place": "%s", "version": "99.05.1", "package": "99.05.1-1"}'
    (place / releases.RECORD).write_text(record % place)
    assert releases.prefix(release, tmp_path, {}) == place
    assert releases.version_of(place) == "99.05.1-1"
    (place / releases.RECORD).write_text(record % "/moved/from/here")
    with pytest.raises(UsageError):
        releases.prefix(release, tmp_path, {})
