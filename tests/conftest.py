"""Settings that all tests share. Helpers are in `tests.waiting` and `tests.world`."""

import hypothesis

# A loaded machine is slow, and a failure must be the same when it is looked for again.
hypothesis.settings.register_profile("slurm-ft", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("slurm-ft")
