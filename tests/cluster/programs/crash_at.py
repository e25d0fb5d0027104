"""Trains on nothing up to the step that it is given, and fails there each time."""

import sys
import time

from slurm_ft.train.progress import report

last = int(sys.argv[1])
for step in range(1, last + 1):
    time.sleep(0.05)
    report(step, loss=1.0 / step)
raise ValueError(f"the data is broken at step {last}")
