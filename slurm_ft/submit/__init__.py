"""How a run gets to where it happens: as a Slurm job, in the allocation around us, or on this machine."""
