"""Commands that erase. They ask first, for nothing else in perdure loses what was said."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from perdure.cli.naming import named
from perdure.cli.options import older_option, session_argument, status_option, store_options
from perdure.cli.setup import opened, run
from perdure.cli.terminal import counted, say

_yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def _confirm(yes: bool, what: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {what} for good. Add --yes if you mean it.")
    click.confirm(f"{what[0].upper()}{what[1:]} for good?", abort=True)


@click.command()
@session_argument("sessions", nargs=-1, metavar="[SESSION]...")
@older_option("older_than")
@status_option
@_yes
@store_options
@click.pass_context
def purge(
    ctx: click.Context, sessions: tuple[str, ...], older_than: datetime | None, status: str | None, yes: bool
) -> None:
    """Erase each SESSION, or all of an age or status, with their sub-agents' sessions. Prints how many.

    What their forks show stays.
    """
    if bool(sessions) == bool(older_than or status):
        raise click.UsageError("Name the sessions, or which by --older-than and --status.")

    async def find() -> list[str]:
        async with opened(ctx, must_exist=True) as store:
            return [await named(store, each) for each in sessions]

    async def work(found: list[str]) -> int:
        async with opened(ctx, must_exist=True) as store:
            if not found:
                return await store.purge(older_than=older_than, status=status)
            return sum([len(await store.delete(session_id)) for session_id in found])

    found = run(find())
    _confirm(yes, f"erase {', '.join(found)}" if found else "erase these sessions")
    say(f"sessions erased: {run(work(found))}")


@click.command()
@session_argument()
@click.argument("messages", nargs=-1, required=True)
@click.option("--replacement", default="[redacted]", show_default=True, help="What stands there instead.")
@_yes
@store_options
@click.pass_context
def redact(ctx: click.Context, session: str, messages: tuple[str, ...], replacement: str, yes: bool) -> None:
    """Replace what MESSAGES of SESSION, given by their ids, say: in every version, fork, summary and index."""
    _confirm(yes, f"replace {counted(len(messages), 'message')}")

    async def work() -> int:
        async with opened(ctx, must_exist=True) as store:
            return await store.redact(await named(store, session), messages, replacement=replacement)

    say(f"messages replaced: {run(work())}")


@click.command()
@store_options
@click.pass_context
def gc(ctx: click.Context) -> None:
    """Erase what erased sessions have left behind and nothing points to."""

    async def work() -> int:
        async with opened(ctx, must_exist=True) as store:
            return await store.gc()

    say(f"messages erased: {run(work())}")
