"""`slurm-ft config`: the settings that hold here. What is printed is itself a settings file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click

from slurm_ft import config
from slurm_ft.cli import common


@common.command(
    "config", examples=("slurm-ft config --show-origin", "slurm-ft config --profile lumi-g"), cls=click.Command
)
@click.option("--show-origin", is_flag=True, help="Say where each value comes from, and where it is documented.")
@common.json_option
@click.option("--profiles", is_flag=True, help="List the site profiles that are shipped, and leave.")
@click.option("--profile", metavar="NAME", help="Print a shipped profile's file, and leave.")
@click.option("--sample", is_flag=True, help="Print a file that has every setting in a comment, and leave.")
@click.option("--slurm", is_flag=True, help="Say which Slurm is here and who asks it (pyslurm or its commands).")
def command(show_origin: bool, as_json: bool, profiles: bool, profile: str | None, sample: bool, slurm: bool) -> None:
    """Show the settings that hold for this user in this folder.

    From high to low: the options of a command, variables (SLURM_FT_PARTITION), ./slurm-ft.toml,
    $XDG_CONFIG_HOME/slurm-ft/config.toml, the site's file ($SLURM_FT_SITE, the module's etc/slurm-ft/config.toml
    or /etc/slurm-ft/config.toml), the profile that one of these names, the default.
    """
    if profiles:
        for name in config.profiles():
            click.echo(f"{name:<18} {config.profile_text(name).splitlines()[0].lstrip('# ')}")
    elif profile:
        click.echo(config.profile_text(profile), nl=False)
    elif sample:
        click.echo(config.sample(), nl=False)
    elif slurm:
        _slurm(as_json)
    else:
        found = config.settings(os.environ, Path.cwd())
        if as_json:
            common.print_json(_as_json(found))
        else:
            click.echo("\n".join(_lines(found, show_origin)))


def _slurm(as_json: bool) -> None:
    from slurm_ft.slurm.client import SlurmClient
    from slurm_ft.slurm.commands import Commands
    from slurm_ft.slurm.readers import choose

    release = "{}.{:02d}".format(*SlurmClient().version())
    choice = choose(Commands())
    if as_json:
        common.print_json({"schema": 1, "slurm": release, "reader": choice.reader.name, "why": choice.why})
    else:
        click.echo(f"Slurm {release}, asked by {choice.reader.name} ({choice.why})")


def _lines(found: config.Settings, show_origin: bool) -> Iterator[str]:
    for key in config.KEYS:
        values = found.lists[key.name] if key.kind == "texts" else [found.single.get(key.name)]
        if key.kind == "texts" and values:
            yield f"{key.name} = ["
            yield from (
                _line(f"  {json.dumps(item.value, ensure_ascii=False)},", item, show_origin) for item in values if item
            )
            yield "]"
        elif key.kind != "texts" and values[0] is not None:
            item = values[0]
            yield _line(f"{key.name} = {json.dumps(item.value, ensure_ascii=False)}", item, show_origin)
    if found.network:
        yield "\n[network]"
    for name, item in found.network.items():
        own = "  # your environment has a value, which stays" if show_origin and name in os.environ else ""
        yield _line(f"{name} = {json.dumps(item.value, ensure_ascii=False)}", item, show_origin) + own


def _line(text: str, item: config.Value, show_origin: bool) -> str:
    if not show_origin:
        return text
    return f"{text:<34}  # {item.origin}{f' ({item.source})' if item.source else ''}"


def _as_json(found: config.Settings) -> dict[str, object]:
    def entry(item: config.Value) -> dict[str, object]:
        return {"value": item.value, "origin": item.origin, "source": item.source}

    return {
        "schema": 1,
        "settings": {name: entry(item) for name, item in found.single.items()}
        | {name: [entry(item) for item in items] for name, items in found.lists.items()},
        "network": {name: entry(item) for name, item in found.network.items()},
    }
