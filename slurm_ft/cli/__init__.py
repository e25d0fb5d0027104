"""The command line: one click module a command, and a table that finds it.

`COMMANDS` holds each command's module and its line in the help, so that `slurm-ft --help` imports no command
and a command imports only itself. A module has its click command under the name `command`.

`main` is the entry point. It differs from click's own in three ways: Ctrl-C leaves with 130, a reader that
went away (`slurm-ft logs | head`) is not an error, and output that the terminal's encoding cannot hold is
replaced instead of ending the command.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import signal
import sys
from typing import Any, NoReturn, TextIO

import click
from click.shell_completion import CompletionItem

from slurm_ft import __version__
from slurm_ft.errors import UsageError

COMMANDS = {
    "submit": ("slurm_ft.cli.submit", "Submit a training as one Slurm job, or run it on this machine."),
    "run": ("slurm_ft.cli.run", "Run a training inside this allocation; the last line of an sbatch script."),
    "status": ("slurm_ft.cli.status", "Show the replicas of a run, like squeue."),
    "logs": ("slurm_ft.cli.logs", "Print or follow what the ranks write."),
    "explain": ("slurm_ft.cli.explain", "Say why each replica is where it is and what comes next."),
    "inject": ("slurm_ft.cli.inject", "Break one rank of a running run, to see it repaired."),
    "report": ("slurm_ft.cli.report", "Report incidents, recovery times and goodput."),
    "save": ("slurm_ft.cli.save", "Ask the ranks of a run to save now, and say what came of it."),
    "check": ("slurm_ft.cli.check", "Look whether hosts are fit to train; silent when all is well."),
    "stop": ("slurm_ft.cli.stop", "End a run in order: its ranks may save first."),
    "cancel": ("slurm_ft.cli.cancel", "End a run now: scancel its job or end its local head."),
    "list": ("slurm_ft.cli.list_runs", "List the runs in the runs folder."),
    "templates": ("slurm_ft.cli.templates", "List, show or copy sbatch scripts to start from."),
    "config": ("slurm_ft.cli.config", "Show the settings that hold here, and where each comes from."),
    "env": ("slurm_ft.cli.env", "Show which variables reach a job, a replica's step and a rank."),
    "module": ("slurm_ft.cli.module", "Print or write the modulefile of an installation."),
    "completion": ("slurm_ft.cli.completion", "Print the completion script of bash, zsh or fish."),
}

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


class LazyGroup(click.Group):
    """A group that imports a command when it is used, and not to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"commands: {', '.join(COMMANDS)}"
            raise UsageError(f"there is no command `{name}`", hint)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        # From the table, since click's own imports each command to see whether it is hidden.
        names = [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        # Here and not in `main`, because click takes a broken pipe for a failure and leaves with 1.
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _leave_without_reader()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


EPILOG = """\b
Examples:
  slurm-ft submit --cluster local --replicas 4 -- python train.py
  slurm-ft status --follow
"""


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.version_option(__version__, prog_name="slurm-ft", message="%(prog)s %(version)s")
def cli() -> None:
    """Keep a distributed PyTorch training alive inside one Slurm allocation."""


def main() -> NoReturn:
    """The entry point `slurm-ft`."""
    for stream in (sys.stdout, sys.stderr):
        _never_fail_to_encode(stream)
    try:
        result = cli.main(prog_name="slurm-ft", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave_without_reader()
    sys.exit(result if isinstance(result, int) else 0)


def _leave_without_reader() -> NoReturn:
    # What is left in the buffer would raise again when Python flushes it at exit.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_BROKEN_PIPE)


def _never_fail_to_encode(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
