"""Certificates for Monarch's `tls://` transport: one authority a job, one certificate a process.

Whoever reaches the port of a worker loop without TLS can run code as the job's owner. The authority lies in the job's
secret folder (0700); each process issues its own certificate for its own addresses.

Monarch looks for the certificate when it is first imported. So a client's is made before that, when slurm_ft.monarch is
imported, together with the authority, in a folder of this process; a job takes the authority over into its own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import trustme

from slurm_ft.errors import UsageError
from slurm_ft.submit.place import LOOPBACK, allocation_place

VARIABLES = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
"""Where Monarch's transport looks for them."""


def prepare_client(surroundings: Mapping[str, str]) -> Path:
    """Make an authority and this process's certificate; gives their folder. Raises UsageError when it is too late."""
    if "monarch" in sys.modules:
        raise UsageError("monarch was imported before slurm_ft.monarch", "import slurm_ft.monarch first")
    folder = Path(tempfile.mkdtemp(prefix="slurm-ft-monarch-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    authority = trustme.CA(organization_name="slurm-ft", organization_unit_name="Monarch")
    authority.cert_pem.write_to_path(folder / "authority.pem")
    _write_private(folder / "authority.key", authority.private_key_pem.bytes())
    addresses = {LOOPBACK}
    if "SLURM_JOB_ID" in surroundings:
        addresses.add(allocation_place(surroundings).address)
    use_certificate(folder, sorted(addresses), "client")
    return folder


def hand_over(client: Path, folder: Path) -> None:
    """Copy the authority to where the workers find it."""
    shutil.copyfile(client / "authority.pem", folder / "authority.pem")
    _write_private(folder / "authority.key", (client / "authority.key").read_bytes())


def use_certificate(folder: Path, addresses: Sequence[str], name: str) -> None:
    """Issue this process's certificate for its addresses, and tell Monarch where it is. Call it before Monarch is
    imported."""
    authority = trustme.CA.from_pem((folder / "authority.pem").read_bytes(), (folder / "authority.key").read_bytes())
    issued = authority.issue_cert(*addresses)
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    _write_private(key, issued.private_key_pem.bytes())
    os.environ.update(zip(VARIABLES, map(str, (certificate, key, folder / "authority.pem")), strict=True))


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
