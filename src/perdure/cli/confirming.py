"""The question before content is lost for good."""

from __future__ import annotations

import sys

import click

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(yes: bool, what: str) -> None:
    """Ask before content is lost for good. Only the commands that call this lose anything."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {what} for good. Add --yes if you mean it.")
    click.confirm(f"{what[0].upper()}{what[1:]} for good?", abort=True)
