"""Commands that erase. They ask first, for nothing else in perdure loses what was said."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING

import click

from perdure.actions.children import spawned_by
from perdure.cli.hints import command
from perdure.cli.naming import named
from perdure.cli.options import older_option, session_argument, status_option, store_options
from perdure.cli.setup import opened, run
from perdure.cli.terminal import counted, note, say

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

_SHOWN = 5
"""The most ids that a note names."""
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

    async def work() -> tuple[int, list[str]]:
        async with opened(ctx, must_exist=True) as sessions:
            session_id = await named(sessions, session)
            replaced = await sessions.redact(session_id, messages, replacement=replacement)
            return replaced, await _with_copies(sessions, session_id)

    replaced, others = run(work())
    say(f"messages replaced: {replaced}")
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
        note(
            "Sub-agents and their callers have each other's texts in messages of their own. Sessions that may have "
            f"copies: {shown}. To see where a text still is: {command('search', 'TEXT')}"
        )


async def _with_copies(sessions: Sessions, session_id: str) -> list[str]:
    """Return the sessions that a session exchanges texts with: its caller's, and those of its sub-agents."""
    caller = (await sessions.info(session_id)).spawn_ref
    spawned = await spawned_by(sessions.store, session_id, deleted=True)
    return [*([caller.parent_session_id] if caller is not None else []), *(info.id for info in spawned)]


@click.command()
@store_options
@click.pass_context
def gc(ctx: click.Context) -> None:
    """Erase what erased sessions have left behind and nothing points to."""

    async def work() -> int:
        async with opened(ctx, must_exist=True) as store:
            return await store.gc()

    say(f"messages erased: {run(work())}")
