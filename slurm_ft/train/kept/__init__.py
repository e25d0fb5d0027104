"""Training state that outlives its process, in memory that the keeper of the host holds. See `keep`.

record     the small part of a state as bytes
layout     where tensors lie in a memory
memory     one held memory: header, commit word, records, tensors
live       tensors that are trained where they are held
snapshot   copies, double-buffered and checksummed
state      what a training's state is made of
agree      all ranks of a replica go on from the same state
holder     a name at the keeper; keep_live and keep_snapshots fill it
keep       the whole, for training scripts
"""

from slurm_ft.train.kept.keep import Kept, Restored, keep

__all__ = ["Kept", "Restored", "keep"]
