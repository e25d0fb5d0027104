"""This process as a client: its certificate, made before Monarch is imported for the first time."""

from __future__ import annotations

import os

from slurm_ft.monarch import tls

CLIENT_FOLDER = tls.prepare_client(os.environ)
