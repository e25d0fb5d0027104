"""Everything that knows how Slurm writes things: hostlists, times, memory, states, and one polite client."""
