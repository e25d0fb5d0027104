"""Named dimensions over the hosts of an allocation: pure arithmetic, no process and no network."""
