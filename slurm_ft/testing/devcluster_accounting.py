"""Accounting for a devcluster: a real slurmdbd and a MariaDB of its own, as text and command lines.

No process is started here but the one that fills the empty database folder. MariaDB has no network port: its
socket lies in the cluster's folder, which only this user can enter, so it asks for no password. slurmdbd finds
it through MYSQL_UNIX_PORT and listens on this machine only.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from slurm_ft.errors import LaunchError
from slurm_ft.testing import devcluster_config as config
from slurm_ft.testing import devcluster_network

PROGRAMS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd")
PACKAGES = "apt-get install slurmdbd mariadb-server-core"
INSTALL_SECONDS = 60.0

SLURMDBD_CONF = """\
DbdHost={machine}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CommunicationParameters=NoInAddrAny
PidFile={folder}/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm_acct_db
{plugins}
"""


def find_programs(slurm_root: str = "") -> dict[str, str]:
    """Full paths of what accounting needs. Raises LaunchError where a program is not installed."""
    try:
        return config.find_programs(PROGRAMS, slurm_root)
    except LaunchError as error:
        raise LaunchError(error.message, hint=f"`{PACKAGES}`") from None


def write_files(folder: Path, shape: config.Shape, port: int) -> None:
    """The database's folder and the file that slurmdbd reads, which it takes from none but its own user."""
    (folder / "db").mkdir(mode=0o700)
    conf = folder / "slurmdbd.conf"
    conf.touch(mode=0o600)
    values = {"machine": devcluster_network.machine(), "user": config.user_name(), "plugins": config.plugin_line(shape)}
    conf.write_text(SLURMDBD_CONF.format(folder=folder, port=port, **values))


def fill_database(folder: Path, programs: dict[str, str]) -> None:
    """Make the system tables of an empty database: the stored procedures of slurmdbd live in them.

    mariadb-install-db does this too, and four times slower: it adds help texts, time zones and views.
    """
    tables = Path(programs["mariadbd"]).resolve().parents[1] / "share/mysql/mysql_system_tables.sql"
    log = folder / "log" / "mariadb-bootstrap.out"
    try:
        sql = b"create database mysql;\nuse mysql;\n" + tables.read_bytes()
        with open(log, "wb") as out:
            argv = [*_server(folder, programs), "--bootstrap"]
            done = subprocess.run(argv, input=sql, stdout=out, stderr=out, timeout=INSTALL_SECONDS)
    except OSError as error:
        raise LaunchError(f"the database could not be made: {error}", hint=f"`{PACKAGES}`") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"the database was not made in {INSTALL_SECONDS:.0f} s", hint="is the disk busy?") from None
    if done.returncode:
        raise LaunchError("the database could not be made", hint=f"see {log}")


# Nothing in this database outlives the cluster: it need not be safe, nor large.
_SMALL = (
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-flush-method=nosync",
    "--innodb-doublewrite=0",
    "--performance-schema=0",
)


def mariadbd(folder: Path, programs: dict[str, str]) -> list[str]:
    """The command line of the database server."""
    files = [f"--socket={socket(folder)}", f"--pid-file={folder / 'mariadbd.pid'}"]
    return [*_server(folder, programs), *files, "--skip-networking"]


def _server(folder: Path, programs: dict[str, str]) -> list[str]:
    options = ["--no-defaults", f"--datadir={folder / 'db'}", f"--tmpdir={folder}", f"--user={config.user_name()}"]
    return [programs["mariadbd"], *options, "--skip-grant-tables", "--skip-log-bin", *_SMALL]


def socket(folder: Path) -> Path:
    return folder / "mariadb.sock"


def environment(folder: Path) -> dict[str, str]:
    """What slurmdbd needs to find the database, and newer clients (MariaDB 11.4 on) to do without TLS there."""
    return {"MYSQL_UNIX_PORT": os.fspath(socket(folder)), "MARIADB_TLS_DISABLE_PEER_VERIFICATION": "1"}
