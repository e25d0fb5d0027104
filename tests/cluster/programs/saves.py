"""Counts steps into a file, saves when it is asked to, and goes on from the run's last save. Uses no torch.

    saves.py LEDGER STEPS

Each line of LEDGER is `replica attempt step`. With a file `go` beside LEDGER it runs to the end; before that it
stops short of it.
"""

import os
import sys
import time
from pathlib import Path

from slurm_ft.train import last_save, on_save, report

ledger, steps = Path(sys.argv[1]), int(sys.argv[2])
replica, attempt = os.environ["SLURM_FT_REPLICA"], os.environ["SLURM_FT_ATTEMPT"]


def save(step: int) -> str:
    path = ledger.with_name(f"ckpt-{replica}-{step}")
    path.write_text(str(step))
    return str(path)


on_save(save)
last = last_save()
step = int(Path(last.path).read_text()) if last else 0
while step < steps:
    if step == steps - 1 and not ledger.with_name("go").exists():
        report(step)
        time.sleep(0.05)
        continue
    step += 1
    with ledger.open("a") as file:
        file.write(f"{replica} {attempt} {step}\n")
    report(step, loss=1.0 / step)
    time.sleep(0.05)
