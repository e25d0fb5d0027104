"""Trains on nothing: reports a number of steps and ends well. Uses no torch."""

import sys
import time

from slurm_ft.train.progress import report

for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(0.05)
    report(step, loss=1.0 / step, tokens=10 * step)
