"""A submitit executor whose jobs repair themselves: `submitit.AutoExecutor(folder, cluster="slurm_ft")`.

The pickled function runs in every rank, as with submitit's own Slurm executor, and a job's tasks are the ranks
of all replicas. What is different: the job is a run of slurm-ft, so a task that dies is started again in the same
allocation, and with it the other tasks of its replica only.

    executor       what the user holds: parameters, submission, jobs
    environment    what a task sees: submitit.JobEnvironment
    batch          the job's batch step: looks after the run, and at its end hands in what was not
    task           a rank: runs the pickled function, and hands in its result when it is final

The entry points in setup.cfg (group `submitit`) make it known to submitit.
"""
