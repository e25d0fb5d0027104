"""A submission out of an environment that is against it, on a real Slurm: what a rank gets is right to the byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from slurm_ft.testing.devcluster import DevCluster

SLURM_FT = str(Path(sys.executable).with_name("slurm-ft"))
DUMP = "import json, os, sys; json.dump([dict(os.environ), sys.argv[2:]], open(sys.argv[1], 'w'))"
WRONG = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_MEM_PER_CPU": "4000", "SLURM_MEM_PER_GPU": "1",
         "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1", "SLURM_EXPORT_ENV": "NONE", "SLURM_CPU_BIND": "rank",
         "SLURM_TRES_PER_TASK": "cpu:1", "SLURM_CPUS_PER_TASK": "99", "SLURM_NTASKS_PER_GPU": "3", "SLURM_GPUS": "77",
         "SLURM_HINT": "nomultithread", "SLURM_DISTRIBUTION": "cyclic", "SLURM_HOSTFILE": "/nowhere",
         "SBATCH_EXPORT": "NONE", "SBATCH_EXCLUSIVE": "user", "SBATCH_ARRAY_INX": "1-3", "SBATCH_GPUS": "77",
         "SBATCH_TIMELIMIT": "0", "SBATCH_REQUEUE": "x", "SRUN_CPUS_PER_TASK": "99", "SRUN_EXPORT_ENV": "NONE",
         "HIP_VISIBLE_DEVICES": "5", "PMI_RANK": "3", "TORCHELASTIC_RUN_ID": "none", "SLURM_FT_SOCKET": "@gone",
         "SLURM_FT_RUN": "/gone", "RANK": "7", "MASTER_ADDR": "gone", "LOCAL_RANK": "5"}  # fmt: skip
OWN = {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": "10.0.0.0/8",
       "CONDA_PROMPT_MODIFIER": "(my env) ", "QUOTES": "a'b\"c`d`$HOME $(e) \\",
       "LINES_OF_TEXT": "one\ntwo\n\nthree", "NON_ASCII": "prüfung 学", "NOT_UTF8": os.fsdecode(b"\xff\xfe"),
       "EMPTY": "", "BASH_FUNC_greet%%": "() {  echo hi\n}"}  # fmt: skip
ARGUMENTS = ["it's 50% done", "$HOME `x` \\", 'a "b"', "", "学", "--note=a b;c"]


def test_a_rank_gets_the_users_variables_and_arguments_and_none_of_an_outer_job(
    devcluster: DevCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "my run's (v2) $x"
    folder.mkdir()
    seen = folder / "seen.json"
    environ = {**devcluster.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **WRONG, **OWN}
    argv = [SLURM_FT, "submit", "--local-run-dir", "--run-dir", str(folder / "run"), "--runs", str(folder / "runs")]
    argv += ["--time", "5", "--no-zygote", "--", sys.executable, "-c", DUMP, str(seen), *ARGUMENTS]
    done = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, errors="replace", timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    got, arguments = json.loads(seen.read_text())
    assert arguments == ARGUMENTS
    assert {name: got.get(name) for name in OWN if name != "no_proxy"} == {
        name: value for name, value in OWN.items() if name != "no_proxy"
    }
    assert got["no_proxy"].startswith("10.0.0.0/8,") and "127.0.0.1" in got["no_proxy"].split(",")
    left = {name: value for name, value in WRONG.items() if got.get(name) == value}
    # The rank has some of these names, with values of its own job.
    assert left == {}
    assert (got["RANK"], got["LOCAL_RANK"], got["SLURM_FT_RUN"]) == ("0", "0", str(folder / "run"))
