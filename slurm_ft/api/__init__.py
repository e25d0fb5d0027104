"""The Python API: what `slurm-ft submit`, `status`, `logs`, `report` and `stop` do, for programs and notebooks.

    import slurm_ft

    with slurm_ft.Cluster("slurm", partition="gpu", time="8:00:00") as cluster:
        run = cluster.submit(slurm_ft.RunSpec("titan", slurm_ft.ReplicaSpec(("python", "train.py")), replicas=4))
        report = run.result()

    run = slurm_ft.Run.attach("last")        # from another process, or after the notebook died

A run lives by itself, in its job or in the background of this machine; `Run` only reads its folder and writes
requests into it. So nothing is lost with the process that submitted it.
"""

from slurm_ft.api.cluster import Cluster
from slurm_ft.api.run import Run
from slurm_ft.spec import Budget, Policy, ReplicaSpec, RunSpec

__all__ = ["Budget", "Cluster", "Policy", "ReplicaSpec", "Run", "RunSpec"]
