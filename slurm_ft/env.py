"""Every environment variable that slurm-ft reads or sets, in one place.

`VARIABLES` is the contract: a name, who sets it, and what it means. Code uses the constants, docs are
generated from the table. Nothing here reads the environment.
"""

from __future__ import annotations

from typing import NamedTuple

RUN = "SLURM_FT_RUN"
REPLICA = "SLURM_FT_REPLICA"
ATTEMPT = "SLURM_FT_ATTEMPT"
HOST = "SLURM_FT_HOST"
SOCKET = "SLURM_FT_SOCKET"
BOOTSTRAP = "SLURM_FT_BOOTSTRAP"
STEP = "SLURM_FT_STEP"
MIN_REPLICAS = "SLURM_FT_MIN_REPLICAS"
KEEPER = "SLURM_FT_KEEPER"
KEEPER_MODE = "SLURM_FT_KEEPER_MODE"
RUNS = "SLURM_FT_RUNS"
ADDRESS = "SLURM_FT_ADDRESS"
DEVCLUSTER = "SLURM_FT_DEVCLUSTER"
ROOT = "SLURM_FT_ROOT"
SITE = "SLURM_FT_SITE"
PARTITION = "SLURM_FT_PARTITION"
ACCOUNT = "SLURM_FT_ACCOUNT"
QOS = "SLURM_FT_QOS"
TIME = "SLURM_FT_TIME"
GPUS_PER_NODE = "SLURM_FT_GPUS_PER_NODE"
CPUS_PER_NODE = "SLURM_FT_CPUS_PER_NODE"
MEM = "SLURM_FT_MEM"
SPARES = "SLURM_FT_SPARES"
GPU_CPUS = "SLURM_FT_GPU_CPUS"
SCRATCH_ROOT = "SLURM_FT_SCRATCH_ROOT"
SCRATCH = "SLURM_FT_SCRATCH"
CHECK = "SLURM_FT_CHECK"
HEALTH_CHECK = "SLURM_FT_HEALTH_CHECK"
SPARE_CHECK = "SLURM_FT_SPARE_CHECK"
LINES = "SLURM_FT_LINES"
OPTIONS = "SLURM_FT_OPTIONS"
CHAIN = "SLURM_FT_CHAIN"
TRANSPORT_KEY = "SLURM_FT_TRANSPORT_KEY"
MESH = "SLURM_FT_MESH"

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
REPLICA_GROUP_ID = "REPLICA_GROUP_ID"
NUM_REPLICA_GROUPS = "NUM_REPLICA_GROUPS"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
TIMEOUTS = "SLURM_FT_TIMEOUTS"
QUORUM_RETRIES = "TORCHFT_QUORUM_RETRIES"

KEEPER_MODES = {
    "off": frozenset[str](),
    "live": frozenset({"live"}),
    "snapshot": frozenset({"snapshot"}),
    "both": frozenset({"live", "snapshot"}),
}
"""What `--keeper` and SLURM_FT_KEEPER_MODE may be, and what is kept then."""


class Variable(NamedTuple):
    """One variable: its name, who sets it (see SET_BY in scripts/make_docs), and what it means in one sentence."""

    name: str
    set_by: str
    meaning: str


VARIABLES = (
    Variable(RUN, "agent", "the run folder, as an absolute path"),
    Variable(REPLICA, "agent", "the number of the rank's replica, from 0"),
    Variable(ATTEMPT, "agent", "the number of this start of the replica, from 1"),
    Variable(HOST, "agent", "the host's name in the run, also for its health check; marks a rank's processes"),
    Variable(SOCKET, "agent", "the agent's socket; slurm_ft.train.progress sends there"),
    Variable(
        BOOTSTRAP, "agent", "our bootstrap, for a script that starts the program: python $SLURM_FT_BOOTSTRAP x.py"
    ),
    Variable(STEP, "launcher", "marks the processes of a local step, so that none is left behind"),
    Variable(SCRATCH, "agent", "the site's scratch folder on this host, where there is one"),
    Variable(CHECK, "check", "what `slurm-ft check --hosts` asks of each host, as JSON"),
    Variable(MESH, "mesh", "tells a process of a Python mesh where it belongs; gone before your code runs"),
    Variable(MIN_REPLICAS, "agent", "the fewest replicas that may train, from the run's policy"),
    Variable(KEEPER, "agent", "the socket of the host's keeper, where the run has one; slurm_ft.train.keep asks there"),
    Variable(
        KEEPER_MODE, "agent", "what the host's keeper keeps: live, snapshot, both or off; also for its health check"
    ),
    Variable("RANK", "agent", "the rank within its replica, from 0"),
    Variable("LOCAL_RANK", "agent", "the rank within its host, from 0"),
    Variable("WORLD_SIZE", "agent", "the ranks of one replica"),
    Variable("LOCAL_WORLD_SIZE", "agent", "the ranks of one replica on one host"),
    Variable("MASTER_ADDR", "agent", "the first host of the replica, as other hosts reach it"),
    Variable("MASTER_PORT", "agent", "a port of that host, new for each attempt"),
    Variable(LIGHTHOUSE, "agent", "torchft's Lighthouse; a value of the user's own wins"),
    Variable(REPLICA_GROUP_ID, "agent", "the replica, as torchft names it; a value of the user's own wins"),
    Variable(NUM_REPLICA_GROUPS, "agent", "the number of replicas; a value of the user's own wins"),
    Variable(QUORUM_RETRIES, "agent", "how often torchft asks an absent Lighthouse; a value of the user's own wins"),
    Variable(TIMEOUTS, "agent", "time-outs for torchft's Manager where the program sets none (JSON, seconds)"),
    Variable(ERROR_FILE, "agent", "where a rank leaves its traceback (torch elastic's error file)"),
    Variable(RUNS, "user", "the folder that holds run folders; `runs` by default"),
    Variable(DEVCLUSTER, "user", "the folder of the devcluster (python -m slurm_ft.testing.devcluster)"),
    Variable("GPU_PLATFORM", "user", "restricts the native libraries: rocm, cuda or host"),
    Variable("SLURM_FT_NATIVE", "user", "at install: auto (build the native libraries if possible), required, off"),
    Variable("SLURM_FT_NATIVE_LIB", "user", "the folder of the native libraries; the package's own by default"),
    Variable(ADDRESS, "user", "the address on which the head listens; Slurm's NodeAddr by default"),
    Variable(TRANSPORT_KEY, "user", "a file with the secret of the checkpoint transport, where no run of slurm-ft is"),
    Variable(SITE, "user", "the site's settings: a file, or a shipped profile's name (slurm-ft config --profiles)"),
    Variable(PARTITION, "user", "stands for --partition; SBATCH_PARTITION does too"),
    Variable(ACCOUNT, "user", "stands for --account; SBATCH_ACCOUNT does too"),
    Variable(QOS, "user", "stands for --qos; SBATCH_QOS does too"),
    Variable(TIME, "user", "stands for --time"),
    Variable(GPUS_PER_NODE, "user", "stands for --gpus-per-node"),
    Variable(CPUS_PER_NODE, "user", "stands for --cpus-per-node"),
    Variable(MEM, "user", "stands for --mem"),
    Variable(SPARES, "user", "stands for --spares"),
    Variable(GPU_CPUS, "user", "stands for --gpu-cpus"),
    Variable(SCRATCH_ROOT, "user", "stands for the setting `scratch`"),
    Variable(HEALTH_CHECK, "user", "stands for --health-check"),
    Variable(SPARE_CHECK, "user", "stands for the setting `spare_check`"),
    Variable(ROOT, "module", "the installation; its etc/slurm-ft/config.toml is the site's file, where there is one"),
    Variable(LINES, "submit", "the `# SLURM_FT` lines of a script, for the `slurm-ft run` in it"),
    Variable(CHAIN, "submit", "the number of this job in its chain, from 1"),
    Variable(OPTIONS, "submit", "options of `slurm-ft submit SCRIPT`; they win over those of the `slurm-ft run` in it"),
)
