"""The agent: our process on each host of a replica. It owns that host's ranks."""
