#!/bin/sh
# A sample for slurm.conf: Epilog=PREFIX/share/slurm-ft/epilog.sh
#
# slurmd runs it as root on each node when a job has left it. It calls no command of Slurm's, and is over within
# 15 s. It ends what the job has left behind, then logs what is wrong with the node and the line that would drain it.
# It always succeeds: an epilog that fails drains the node.
here=$(dirname -- "$(readlink -f -- "$0")")
slurm_ft=$here/../../bin/slurm-ft

say() { logger -t slurm-ft -- "$1"; }

# Processes that carry this job and this node in their environment, this script and its children excepted. Where
# steps are followed by cgroup there are none.
for file in /proc/[0-9]*/environ; do
  pid=${file#/proc/}
  pid=${pid%/environ}
  facts=$(tr '\0' '\n' 2>/dev/null <"$file") || continue
  printf '%s\n' "$facts" | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID" || continue
  printf '%s\n' "$facts" | grep -qx "SLURMD_NODENAME=$SLURMD_NODENAME" || continue
  printf '%s\n' "$facts" | grep -q '^SLURM_STEP_ID=' || continue # of a step or the batch script, not of a prolog
  say "job $SLURM_JOB_ID has left process $pid; it is killed"
  kill -KILL "$pid"
done

faults=$(timeout -k 1 10 "$slurm_ft" check --node 2>&1) && exit 0
first=$(printf '%s\n' "$faults" | sed -n '1s/^ERROR: //p' | tr -d "'")
say "after job $SLURM_JOB_ID: ${first:-the check failed or did not answer}"
say "to drain: scontrol update NodeName=$SLURMD_NODENAME State=DRAIN Reason='slurm-ft: ${first:-check failed}'"
exit 0
