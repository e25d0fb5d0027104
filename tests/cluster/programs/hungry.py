"""Trains on nothing until FINISH exists; replica 1 takes memory for ever once EAT is there, which it takes away."""

import os
import sys
import time
from pathlib import Path

from slurm_ft.train.progress import report

finish, eat = map(Path, sys.argv[1:3])
eaten = []
step = 0
while not finish.exists():
    step += 1
    time.sleep(0.05)
    report(step, loss=1.0 / step, tokens=10 * step)
    if os.environ["SLURM_FT_REPLICA"] == "1" and eat.exists():
        eat.unlink()
        while True:
            eaten.append(b"x" * (16 << 20))
