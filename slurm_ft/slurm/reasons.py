"""Why a job waits or ended, in plain words, and what its owner can do about it.

Slurm writes a reason as one word (`QOSMaxJobsPerUserLimit`), at times with details after it
(`ReqNodeNotAvail, UnavailableNodes:node4`) and at times in brackets. The words are those of Slurm's page "Job
reason codes" and of slurm.h, 22.05 to 26.05. Limits come in families of dozens, which are read by their parts.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Reason:
    """What Slurm's word means; `advice` is empty where its owner can only wait."""

    words: str
    advice: str = ""


_WAIT_OR_LESS = "ask for fewer nodes or less time to start sooner"
_SINFO = "see what there is with `sinfo -o '%P %l %D %G'`"
_NEVER = "cancel it, and submit it with what a partition offers"
_ADMIN = "ask the administrators of the cluster"
_SHARE = "see the account's limits with `sacctmgr show assoc`"
_QOS = "see the limits with `sacctmgr show qos`, or name another one with --qos"

REASONS = {
    "Priority": Reason("jobs with a higher priority go first", _WAIT_OR_LESS),
    "Resources": Reason("waiting for enough free nodes", _WAIT_OR_LESS),
    "None": Reason("Slurm has not looked at it yet"),
    "BeginTime": Reason("its earliest start is still to come"),
    "Dependency": Reason("waiting for another job to end"),
    "DependencyNeverSatisfied": Reason(
        "it waits for a job that can no longer end as demanded: it will never start", "cancel it with scancel"
    ),
    "JobHeldUser": Reason("held by its owner", "`scontrol release JOB` lets it go"),
    "JobHeldAdmin": Reason("held by an administrator", _ADMIN),
    "JobHoldMaxRequeue": Reason(
        "held because it was put back into the queue too often", "see why it failed, then `scontrol release JOB`"
    ),
    "JobArrayTaskLimit": Reason("as many tasks of its array run as its limit allows", "raise the %N of --array"),
    "ReqNodeNotAvail": Reason(
        "a node that it needs is down, drained or reserved", "a shorter --time may end before a reservation begins"
    ),
    "NodeDown": Reason("a node that it needs is down", "name other nodes, or none"),
    "BadConstraints": Reason("no node has what it asks for: it will never start", _NEVER),
    "Constraints": Reason("no free node has the features it asks for", "drop --constraint, or wait"),
    "FrontEndDown": Reason("no front end node is up", _ADMIN),
    "PartitionDown": Reason("its partition is down", "name another with --partition"),
    "PartitionInactive": Reason("its partition starts no jobs now", "name another with --partition"),
    "PartitionNodeLimit": Reason("it asks for more nodes than its partition allows or has working", _SINFO),
    "PartitionTimeLimit": Reason("it asks for more time than its partition allows", _SINFO),
    "PartitionConfig": Reason("it breaks a limit of its partition", _SINFO),
    "AccountingPolicy": Reason("it breaks a limit of its account", _SHARE),
    "AccountNotAllowed": Reason("its account may not use this partition", "name another with --account"),
    "InvalidAccount": Reason("its account is not valid", "name another with --account"),
    "InvalidQOS": Reason("its QOS is not valid", _QOS),
    "QOSNotAllowed": Reason("its QOS may not be used here", _QOS),
    "QOSResourceLimit": Reason("its QOS has reached a limit", _QOS),
    "QOSJobLimit": Reason("its QOS has reached the number of jobs it allows", _QOS),
    "QOSTimeLimit": Reason("its QOS has used up its time, or the job asks for too much of it", _QOS),
    "QOSUsageThreshold": Reason("its QOS's share of use is below what is demanded", _QOS),
    "Reservation": Reason("waiting for its reservation to begin"),
    "ReservationDeleted": Reason("its reservation was deleted", "`scontrol update JobId=JOB ReservationName=`"),
    "Licenses": Reason("waiting for a licence"),
    "Cleaning": Reason("its earlier run is still being cleaned up"),
    "Prolog": Reason("the site's prolog is still running"),
    "DeadLine": Reason("it cannot end before its deadline"),
    "InactiveLimit": Reason("it did nothing for longer than the site allows"),
    "JobLaunchFailure": Reason("it could not be started: a file system, or a program that is not there"),
    "NonZeroExitCode": Reason("its program ended with an exit code other than 0"),
    "OutOfMemory": Reason("it ran out of memory", "ask for more with --mem"),
    "TimeLimit": Reason("it reached its time limit", "ask for more with --time, or let the run go on in a new job"),
    "SystemFailure": Reason("Slurm, a file system or the network failed", _ADMIN),
    "RaisedSignal": Reason("its program was ended by a signal"),
    "StepLimit": Reason("it has started as many steps as the site allows"),
    "BlockMaxError": Reason("a block of nodes has too many errors", _ADMIN),
    "BlockFreeAction": Reason("a block of nodes is being freed"),
    "FedJobLock": Reason("the clusters of the federation are agreeing on who starts it"),
    "ResourcesReserved": Reason("the nodes it needs are kept for a reservation"),
    "NodeNotAvail": Reason("a node that it needs is not available"),
    "MaxMemPerLimit": Reason("it asks for more memory for each CPU or node than is allowed", "ask for less with --mem"),
    "MaxSubmitLimit": Reason("you have submitted as many jobs as you may"),
    "MaxRequeue": Reason("it was put back into the queue too often"),
    "MaxBBLimit": Reason("it asks for more of the burst buffer than is allowed"),
    "RequeueExit": Reason("its exit code puts it back into the queue"),
    "RequeueExitHold": Reason("its exit code puts it back into the queue, held", "`scontrol release JOB`"),
    "ReservationNotAvail": Reason("its reservation is not available"),
    "PreemptionInProgress": Reason("jobs that it pushes aside are being ended"),
    "OriginalClusterDown": Reason("the cluster that it was submitted to is down"),
    "ClusterNotAllowed": Reason("it may not run on this cluster of the federation"),
    "HetJobStartFailure": Reason("another part of the heterogeneous job could not be started"),
    "launch failed requeued held": Reason(
        "it could not be started, went back into the queue and is held",
        "see the node's state, then `scontrol release JOB`",
    ),
}  # fmt: skip

_FAMILIES = (
    (re.compile(r"QOSMax\w*PerUser\w*"), Reason("you have reached the limit for each user of this QOS", _QOS)),
    (re.compile(r"QOSMax\w*PerAccount\w*"), Reason("your account has reached its limit in this QOS", _QOS)),
    (re.compile(r"QOSMax\w*"), Reason("it asks for more than its QOS allows a job, user or account", _QOS)),
    (re.compile(r"QOSMin\w*"), Reason("it asks for less than its QOS demands", _QOS)),
    (re.compile(r"QOSGrp\w*"), Reason("all jobs of this QOS together have reached its limit", _QOS)),
    (re.compile(r"AssocMax\w*"), Reason("it asks for more than your account allows a job or user", _SHARE)),
    (
        re.compile(r"AssocGrp\w*|Association\w*Limit"),
        Reason("all jobs of your account together have reached its limit", _SHARE),
    ),
    (re.compile(r"Max\w*PerAccount"), Reason("your account has reached its limit in this QOS", _QOS)),
    (re.compile(r"BurstBuffer\w*"), Reason("waiting for the burst buffer")),
)  # fmt: skip


def find(text: str) -> tuple[Reason | None, str]:
    """What a reason means and the details that Slurm gives with it. None for one that is not in the tables."""
    raw = text.strip()
    if raw.startswith("(") and raw.endswith(")"):
        raw = raw[1:-1]
    # A reason of several words; slurmctld writes some with underscores.
    for whole in (raw, raw.replace("_", " ")):
        if whole in REASONS:
            return REASONS[whole], ""
    word, *details = re.split(r"[\s,:()]+", raw, maxsplit=1)
    reason = REASONS.get(word) or next((reason for pattern, reason in _FAMILIES if pattern.fullmatch(word)), None)
    return reason, "".join(details).strip(" )") if reason else raw


def reason_words(text: str) -> str:
    """Say a reason in plain words and keep Slurm's details after it. An unknown reason comes back as it is."""
    reason, detail = find(text)
    if reason is None:
        return detail
    return f"{reason.words} ({detail})" if detail else reason.words


def wait_words(text: str, job_id: str) -> str:
    """A reason in plain words and, where there is something to do, what."""
    what = advice(text, job_id)
    return f"{reason_words(text)}; {what}" if what else reason_words(text)


def advice(text: str, job_id: str = "JOB") -> str:
    """What the job's owner can do, as one phrase; '' where there is nothing to do but wait."""
    reason, _ = find(text)
    return "" if reason is None else reason.advice.replace("JOB", job_id)
