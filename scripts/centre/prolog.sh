#!/bin/sh
# A sample for slurm.conf: Prolog=PREFIX/share/slurm-ft/prolog.sh
#
# slurmd runs it as root on each node before a job's first step there. It calls no command of Slurm's, and is over
# within 10 s. For nodes that one job has to itself: on a shared node the GPUs of others are not idle.
#
#   refuse=no     log what is wrong, with the line that would drain the node, and let the job start
#   refuse=yes    fail too: Slurm then drains the node by itself and queues the job again
refuse=no
here=$(dirname -- "$(readlink -f -- "$0")")
slurm_ft=$here/../../bin/slurm-ft

say() { logger -t slurm-ft -- "$1"; }

gpus=$(printf '%s' "$SLURM_JOB_GPUS" | tr ',' '\n' | grep -c .)
faults=$(timeout -k 1 10 "$slurm_ft" check --node --gpus "$gpus" 2>&1) && exit 0

first=$(printf '%s\n' "$faults" | sed -n '1s/^ERROR: //p' | tr -d "'")
say "job $SLURM_JOB_ID: ${first:-the check failed or did not answer}"
say "to drain: scontrol update NodeName=$SLURMD_NODENAME State=DRAIN Reason='slurm-ft: ${first:-check failed}'"
[ "$refuse" = no ]
