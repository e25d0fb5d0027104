"""A site's settings on a real Slurm: they reach the job, and what the user or a module has set stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from slurm_ft.testing.devcluster import DevCluster

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
SITE = """
scratch = "/tmp/$USER_OF_THE_HOST"
srun_args = ["--export=ALL,OF_SRUN=site"]
setup = ["export USER_OF_THE_HOST=me", "export NCCL_OF_THE_MODULE=module"]
sbatch_args = ["--comment=of the site"]
[network]
NCCL_OF_THE_SITE = "a b $HOME"
NCCL_OF_THE_MODULE = "site"
NCCL_OF_THE_USER = "site"
"""


def test_ranks_see_the_sites_network_variables_where_nobody_set_them(devcluster: DevCluster, tmp_path: Path) -> None:
    site, seen = tmp_path / "site.toml", tmp_path / "seen"
    site.write_text(SITE)
    environ = {
        **devcluster.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_FT_SITE": str(site),
        "SBATCH_PARTITION": "no-such-partition",
        "SLURM_FT_PARTITION": devcluster_partition(devcluster),
        "NCCL_OF_THE_USER": "user",
    }
    argv = [SLURM_FT, "submit", "--local-run-dir", "--run-dir", str(tmp_path / "run"), "--runs", str(tmp_path / "runs")]
    argv += ["--time", "5", "--", "bash", "-c", f"env | grep -E '^(NCCL_OF|OF_SRUN|SLURM_FT_SCRATCH=)' | sort > {seen}"]
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen.read_text().splitlines() == [
        "NCCL_OF_THE_MODULE=module",
        "NCCL_OF_THE_SITE=a b $HOME",
        "NCCL_OF_THE_USER=user",
        "OF_SRUN=site",
        "SLURM_FT_SCRATCH=/tmp/me",
    ]


def devcluster_partition(cluster: DevCluster) -> str:
    argv = ["sinfo", "--noheader", "--format=%R"]
    out = subprocess.run(argv, env=cluster.environ, capture_output=True, text=True, timeout=30, check=True).stdout
    return out.split()[0]
