"""`slurm-ft completion`: the script that lets a shell complete slurm-ft's commands, options and runs.

The script is click's: at each Tab it asks `slurm-ft` itself, so it never grows old. It is made from click's
template and no shell is run for it, since it may be written on a machine that has not that shell.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from slurm_ft.cli import common

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SLURM_FT_COMPLETE"

PLACES = {
    "bash": "share/bash-completion/completions/slurm-ft",
    "zsh": "share/zsh/site-functions/_slurm-ft",
    "fish": "share/fish/vendor_completions.d/slurm-ft.fish",
}
"""Where each shell looks for it, below an installation's prefix."""


def script(shell: str) -> str:
    """The completion script for a shell of SHELLS."""
    kind = get_completion_class(shell)
    assert kind is not None
    completer = kind(click.Group(), {}, "slurm-ft", VARIABLE)
    return completer.source_template % completer.source_vars()


@common.command(
    "completion",
    examples=("slurm-ft completion bash > ~/.local/share/bash-completion/completions/slurm-ft",
              "slurm-ft completion fish | source"),
)  # fmt: skip
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
def command(shell: str) -> None:
    """Print the script that lets your shell complete slurm-ft.

    In a start-up file of bash or zsh: `eval "$(slurm-ft completion bash)"`. A module of your centre's does it
    by itself, but not for zsh.
    """
    click.echo(script(shell))
