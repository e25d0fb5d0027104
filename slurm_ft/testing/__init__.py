"""What tests and trials need: a real Slurm on one machine, injected faults, a tiny trainer."""
