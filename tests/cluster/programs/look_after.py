"""The head of the run in a folder whose run.json a test has written, with a policy that no option offers."""

import os
import sys

from slurm_ft.controller.head import look_after
from slurm_ft.paths import RunPaths
from slurm_ft.submit.place import allocation_place

sys.exit(look_after(RunPaths(sys.argv[1]), allocation_place(os.environ)))
