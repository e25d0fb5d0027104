"""slurm-ft keeps a distributed PyTorch training alive inside one Slurm allocation.

Importing this package imports neither torch nor Slurm: a login node needs only the base install.
"""

__version__ = "0.1.0"
