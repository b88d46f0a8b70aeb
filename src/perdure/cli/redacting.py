"""The command that replaces what messages say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from perdure.cli.confirming import confirm, yes_option
from perdure.cli.hints import command
from perdure.cli.options import session_argument, store_command
from perdure.cli.session_ids import on_session
from perdure.cli.terminal import counted, note, say
from perdure.errors import InvalidData

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

_SHOWN = 5
"""The most ids that a note names."""


@store_command()
@session_argument()
@click.argument("messages", nargs=-1, required=True)
@click.option("--replacement", default="[redacted]", show_default=True, help="What stands there instead.")
@yes_option
def redact(ctx: click.Context, session: str, messages: tuple[str, ...], replacement: str, yes: bool) -> None:
    """Replace what MESSAGES of SESSION, given by their ids, say: in every version, fork, summary and index."""
    if not yes:
        session, _ = on_session(ctx, session, partial(_require_said, message_ids=messages), of_words=True)
    confirm(yes, f"replace {counted(len(messages), 'message')}")

    async def verb(sessions: Sessions, session_id: str) -> tuple[int, list[str]]:
        replaced = await sessions.redact(session_id, messages, replacement=replacement)
        return replaced, await _with_copies(sessions, session_id)

    _, (replaced, others) = on_session(ctx, session, verb, of_words=yes)
    say(f"messages replaced: {replaced}")
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
        note(
            "Sub-agents and their callers have each other's texts in messages of their own. Sessions that may have "
            f"copies: {shown}. To see where a text still is: {command('search', 'TEXT')}"
        )


async def _require_said(sessions: Sessions, session_id: str, message_ids: Sequence[str]) -> None:
    """Raise InvalidData if a message does not exist, before a person is asked to confirm."""
    said = [*await sessions.history(session_id), *(await sessions.session(session_id)).state.messages]
    known = {message.id for message in said}
    for missing in (each for each in message_ids if each not in known):
        what = f"session {session_id!r} has no message {missing!r}"
        raise InvalidData("$", f"{what}. See the ids: {command('show', session_id, '--all')}")


async def _with_copies(sessions: Sessions, session_id: str) -> list[str]:
    """Return the sessions that a session exchanges texts with: that of its caller, and those of its sub-agents.

    A caller's session in which nothing was ever said has no copies. Some frameworks keep their agents below such one.
    """
    from perdure.actions.children import spawned_by

    caller = (await sessions.info(session_id)).spawn_ref
    spawned = [info.id for info in await spawned_by(sessions.store, session_id, deleted=True)]
    if caller is None:
        return list(spawned)
    said = await sessions.history(caller.parent_session_id)
    return [*([caller.parent_session_id] if said else []), *spawned]
