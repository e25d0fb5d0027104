"""`slurm-ft submit`: one Slurm job for the whole run, or the same on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from slurm_ft import config
from slurm_ft.cli.common import Configured
from slurm_ft.cli.spec_options import check_program, make_spec, spec_options
from slurm_ft.errors import EXIT_TRY_AGAIN, SlurmFTError, UsageError
from slurm_ft.submit.script import Script
from slurm_ft.submit.script import find as find_script

if TYPE_CHECKING:
    from slurm_ft.paths import RunPaths
    from slurm_ft.slurm.client import Submitted as Job
    from slurm_ft.spec import RunSpec
    from slurm_ft.submit.request import Submitted

EPILOG = """\b
Examples:
  slurm-ft submit --replicas 16 --gpus-per-node 8 --time 8:00:00 -- python train.py
  slurm-ft submit --cluster local --replicas 4 --min-replicas 2 -- titan --steps 60
"""

DETACHED = "left the run to itself"


class SubmitCommand(Configured):
    keys = tuple(key.name for key in config.KEYS if key.kind != "texts")


@click.command(cls=SubmitCommand, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--cluster",
    type=click.Choice(["auto", "slurm", "local"]),
    default="auto",
    show_default=True,
    help="auto is Slurm, and an error where there is no sbatch.",
)
@spec_options
@click.option("--time", "time_limit", help="The job's time limit, as sbatch takes it.")
@click.option("--partition", "-p", help="Slurm's partition.")
@click.option("--account", "-A", help="Slurm's account.")
@click.option("--qos", help="Slurm's quality of service.")
@click.option("--gpus-per-node", type=int, help="GPUs on each host.")
@click.option("--cpus-per-node", type=int, help="CPUs on each host.")
@click.option("--mem", help="Memory on each host, as sbatch takes it.")
@click.option(
    "--sbatch-arg",
    "sbatch_args",
    multiple=True,
    metavar="--OPTION=VALUE",
    help="Any other option of sbatch's; repeatable.",
)
@click.option("--setup", multiple=True, metavar="LINE", help="A shell line to run in the job first; repeatable.")
@click.option("--local-run-dir", is_flag=True, help="The run folder is shared although its place looks local.")
@click.option(
    "--chain",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="N jobs, one after the other: each goes on where the time limit has ended the one before.",
)
@click.option("--no-wait", is_flag=True, help="Return when it is submitted.")
@click.option("--parsable", is_flag=True, help="Print only the job's id; implies --no-wait.")
def command(**options: Any) -> None:
    """Submit COMMAND as one job of replicas x nodes-per-replica + spares nodes, and show how it gets on.

    COMMAND may be an sbatch script of your own, with #SBATCH and `# SLURM_FT` lines and `slurm-ft run` in it: it is
    submitted as it is, and options of this command win over its lines.

    Without --no-wait the exit code is the run's. Ctrl-C asks on a terminal whether to leave the run alone
    or to stop it; elsewhere it leaves it alone.
    """
    script = find_script(options["command"])
    if script is not None and options["cluster"] != "local":
        _submit_script(script, options)
        return
    cluster = _cluster(options["cluster"], options["dry_run"])
    if cluster == "local":
        _without_settings_for_slurm(options)
    given = (options["ranks_per_node"], options["gpus_per_node"], 1)
    ranks = next(number for number in given if number is not None)
    replicas = 1 if options["replicas"] is None else options["replicas"]
    spec = make_spec(options, cluster, replicas, ranks)
    submit = _submit_local if cluster == "local" else _submit_slurm
    since = _written(options["run_dir"])
    submitted = submit(options, spec)
    if submitted is None:
        return
    _show(options, spec.name, submitted.job_id, submitted.paths, cluster, since, submitted.cluster)


def _written(run_dir: str | None) -> int:
    """How much of the log in this run folder is of earlier sessions."""
    from slurm_ft.events import written
    from slurm_ft.paths import RunPaths

    return written(RunPaths(run_dir).events) if run_dir and "%j" not in run_dir else 0


def _submit_script(script: Script, options: dict[str, Any]) -> None:
    """Submit the user's own script, and show its run as one of ours."""
    from slurm_ft.cli.submit_script import submission
    from slurm_ft.paths import RunPaths
    from slurm_ft.submit import chain
    from slurm_ft.submit import script as own
    from slurm_ft.submit.request import after_submission, check_allowed, folder_for
    from slurm_ft.submit.slurm_job import check_shared

    _cluster("slurm", options["dry_run"])
    request, run_dir, nodes = submission(script, options)
    check_allowed(options["sbatch_args"], config.settings(os.environ, Path.cwd()).texts("allowed_sbatch_args"))
    if options["dry_run"]:
        for name, value in request.variables.items():
            click.echo(f"{name}={shlex.quote(value)} \\")
        click.echo(shlex.join(request.argv()))
        return
    if not options["local_run_dir"]:
        check_shared(Path(run_dir), nodes)

    def link(number: int, first: str, after: tuple[str, ...]) -> Job:
        return own.submit(own.link(request, number, run_dir.replace("%j", first), after) if number else request)

    since = _written(run_dir)
    with folder_for(run_dir):
        links = [link(0, "", ())] if options["chain"] == 1 else chain.submit_links(options["chain"], link)
    first = links[0]
    paths = RunPaths(run_dir.replace("%j", first.job_id))
    if options["chain"] > 1:
        with after_submission([job.job_id for job in links]):
            paths.create()
            chain.record(paths, links)
    _show(options, script.name, first.job_id, paths, "slurm", since, first.cluster)


def _show(
    options: dict[str, Any], name: str, job_id: str, paths: RunPaths, cluster: str, since: int, where: str
) -> None:
    """Say what was submitted, and wait for its end unless that is not wanted. `where` is Slurm's name of the cluster
    on a site with several."""
    if options["parsable"]:
        click.echo(job_id)
        return
    click.echo(f"submitted {name} as {'job ' if cluster == 'slurm' else ''}{job_id}", err=True)
    click.echo(f"run folder: {paths.root}", err=True)
    if not options["no_wait"]:
        sys.exit(_wait(paths, job_id, cluster, where, since))


def _cluster(choice: str, dry_run: bool) -> str:
    """Where to run. A dry run needs no Slurm."""
    if choice == "local" or dry_run or shutil.which("sbatch"):
        return "local" if choice == "local" else "slurm"
    raise UsageError(
        "there is no Slurm here (no sbatch on the PATH)",
        "load your site's Slurm module, or run on this machine with `--cluster local`",
    )


def _without_settings_for_slurm(options: dict[str, Any]) -> None:
    """What a site set for its hosts says nothing about this machine."""
    context = click.get_current_context()
    for name, default in (("gpus_per_node", None), ("spares", 0)):
        if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
            options[name] = default


def _submit_local(options: dict[str, Any], spec: RunSpec) -> Submitted | None:
    from slurm_ft.cli.run import dry_run
    from slurm_ft.submit.place import local_place
    from slurm_ft.submit.request import local_paths, to_local

    check_program(spec.replica.command, sys.executable)
    place = local_paths(spec, Path(options["runs"]), options["run_dir"])
    if options["dry_run"]:
        click.echo(dry_run(place.paths, spec, local_place(spec, place.job_id)))
        return None
    return to_local(spec, place)


def _submit_slurm(options: dict[str, Any], spec: RunSpec) -> Submitted | None:
    from slurm_ft.submit import slurm_job
    from slurm_ft.submit.request import prepare, to_chain, to_slurm

    if options["chain"] > 1:  # the next link goes on, not the same job
        spec = replace(spec, policy=replace(spec.policy, requeue=False))

    named = {
        "time": options["time_limit"],
        "partition": options["partition"],
        "account": options["account"],
        "qos": options["qos"],
        "gpus-per-node": options["gpus_per_node"],
        "cpus-per-task": options["cpus_per_node"],
        "mem": options["mem"],
    }
    short = slurm_job.too_short(options["time_limit"], spec.policy)
    if short:
        click.echo(f"warning: {short}", err=True)
    settings = config.settings(os.environ, Path.cwd())
    runs, extra, setup = Path(options["runs"]), options["sbatch_args"], options["setup"]
    request = prepare(spec, runs, options["run_dir"], named, extra, setup, settings)
    if options["dry_run"]:
        click.echo(f"# sbatch {request.folder}/submission_file_<id>.sh")
        click.echo(slurm_job.render(request, slurm_job.batch_command(request.folder)), nl=False)
        return None
    if options["chain"] > 1:
        return to_chain(request, options["chain"], options["local_run_dir"])
    return to_slurm(request, options["local_run_dir"])


def _wait(paths: RunPaths, job_id: str, cluster: str, where: str = "", since: int = 0) -> int:
    """Show the run until it ends; gives its exit code. What stands before the byte `since` of its log is not its."""
    from slurm_ft.observe import requests
    from slurm_ft.observe.follow import follow
    from slurm_ft.observe.last_words import last_words
    from slurm_ft.observe.runs import Gone
    from slurm_ft.submit.slurm_job import JobWatch

    gone: Callable[[], bool] = Gone(paths)
    if cluster == "slurm":
        gone = JobWatch(paths, job_id, partial(click.echo, err=True), cluster=where)
    terminal = sys.stderr.isatty() and sys.stdin.isatty()
    history: int | None = None
    while True:
        try:
            code = follow(paths, sys.stdout, sys.stdout.isatty(), gone, history=history, since=since)
            following = _following(paths, job_id, code, where) if cluster == "slurm" else ""
        except KeyboardInterrupt:
            history = 0  # what was shown is not shown again
            answer = click.prompt("\nstop the run, leave it alone, or watch on?", default="leave", err=True,
                                  type=click.Choice(["stop", "leave", "watch"])) if terminal else "leave"  # fmt: skip
            if answer == "watch":
                continue
            if answer == "stop":
                requests.stop(paths)
                continue
            click.echo(f"{DETACHED}; come back with `slurm-ft status {paths.root} --follow`", err=True)
            return 128 + signal.SIGINT
        if following:
            job_id, history = following, 0
            gone = JobWatch(paths, job_id, partial(click.echo, err=True), cluster=where)
            continue
        if code is None:
            raise SlurmFTError(f"run {job_id} ended without a last word", f"see `slurm-ft explain {paths.root}`")
        for line in last_words(paths, code):
            click.echo(line, err=True)
        return code


def _following(paths: RunPaths, job_id: str, code: int | None, where: str) -> str:
    """The job to watch next when the run has left this one with this code, None without a last word; '' when it does
    not go on."""
    from slurm_ft.controller import comeback
    from slurm_ft.observe import runs

    if code is None:  # the next link of a chain begins however this one has ended
        link = next(iter(comeback.links_after(paths, job_id)), "")
        if link:
            click.echo(f"job {job_id} ended without a last word; {comeback.goes_on(link, job_id)}", err=True)
        return link
    if code != EXIT_TRY_AGAIN:
        return ""
    # The next link may have begun before this one was seen to be gone: then it was that one's session that ended.
    return _goes_on(paths, runs.read(paths, time.time()).snapshot.job_id or job_id, where)


def _goes_on(paths: RunPaths, job_id: str, where: str) -> str:
    """The job in which a run that had to end goes on, as soon as it does; '' when it does not."""
    from slurm_ft.submit import rejoin
    from slurm_ft.submit.slurm_job import JobWatch

    found = rejoin.goes_on_in(paths, job_id, lambda: False)
    if found is None:
        return ""
    following, words = found
    click.echo(words, err=True)
    gone = JobWatch(paths, following, partial(click.echo, err=True), cluster=where)
    return following if rejoin.begun_again(paths, gone) else ""
