"""Runs that were killed, and whether the next one needs tools: what hints have to say to work."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from perdure.cli.hints import command
from perdure.errors import PerdureError

if TYPE_CHECKING:
    import click

    from perdure.sessions.face import Sessions

KILLED = "killed"


async def killed_in(sessions: Sessions) -> set[str]:
    """The sessions whose last run was killed and waits to be recovered."""
    journal = sessions.runtime.journal
    return set() if journal is None else {str(each) for each in await journal.lapsed()}


async def needs_tools(sessions: Sessions, session_id: str) -> bool:
    """Whether a session can hardly go on without tools: it waits with calls, its agent names some, or its last run
    has called one. A session that cannot be read is left to whoever reads it next."""
    try:
        return await _calls_tools(sessions, session_id)
    except PerdureError:
        return False


async def _calls_tools(sessions: Sessions, session_id: str) -> bool:
    session = await sessions.session(session_id)
    execution = session.state.execution
    if session.definition.tools or (execution is not None and execution.pending_calls):
        return True
    record = await sessions.record(session_id, limit=1)
    loops = [await sessions.loop(session_id, header.loop_id) for header in record.loops]
    return any(message.tool_calls for loop in loops for message in loop.messages)


def needs_tools_there(ctx: click.Context | None, session_id: str) -> bool:
    """The same of a session in a store that is closed by now; False if that can no longer be told."""
    from perdure.cli.setup import opened

    async def look(ctx: click.Context) -> bool:
        async with opened(ctx, must_exist=True) as sessions:
            return await needs_tools(sessions, session_id)

    try:
        return ctx is not None and asyncio.run(look(ctx))
    except (PerdureError, OSError):
        return False


def to_go_on(session_id: str, *, tools: bool) -> str:
    """What to type where a run was killed."""
    recover = command("recover", session_id, tools=tools)
    return f"Go on with it: {recover}\nOr end it: {command('cancel', session_id)}"
