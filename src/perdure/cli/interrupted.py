"""Runs that were killed, and the tools that they need: hints have to name both, or they would not work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from perdure.cli.hints import command
from perdure.errors import PerdureError
from perdure.model.definition import OWN_DRIVER
from perdure.sessions.family_tree import HANDED_OVER, LEFT

if TYPE_CHECKING:
    import click

    from perdure.sessions.sessions import Sessions

T = TypeVar("T")


async def needs_tools(sessions: Sessions, session_id: str) -> bool:
    """Tell whether a session probably needs tools to continue.

    It does if calls are pending, its agent names tools, or its last run has called one."""
    try:
        return await _calls_tools(sessions, session_id)
    except PerdureError:  # only a hint depends on it: the next command that reads the session reports the error
        return False


async def _calls_tools(sessions: Sessions, session_id: str) -> bool:
    session = await sessions.session(session_id)
    execution = session.state.execution
    if session.definition.tools or (execution is not None and execution.pending_calls):
        return True
    record = await sessions.record(session_id, limit=1)
    loops = [await sessions.loop(session_id, header.loop_id) for header in record.loops]
    return any(message.tool_calls for loop in loops for message in loop.messages)


async def how_to_continue(sessions: Sessions, session_id: str) -> str:
    """Return what to do about a run that waits to be continued."""
    if await _asks_a_driver(sessions, session_id):
        return "Only the program that ran it has its model. Start it again, with connect(…, recover=True)."
    return f"Continue it here: {command('recover', session_id, tools=await needs_tools(sessions, session_id))}"


async def _asks_a_driver(sessions: Sessions, session_id: str) -> bool:
    """Tell whether the model of the last run was a driver that a program had given."""
    try:
        record = await sessions.record(session_id, limit=1)
    except PerdureError:  # only a hint depends on it
        return False
    return any(header.config is not None and header.config.provider == OWN_DRIVER for header in record.loops)


async def subagents_of(sessions: Sessions, session_id: str) -> set[str]:
    """Return the names of the tools that have spawned sub-agents in a session."""
    children = await sessions.headers(parent=session_id, limit=1000)
    return {child.spawn_ref.tool_name for child in children if child.spawn_ref is not None}


def needs_tools_there(ctx: click.Context | None, session_id: str) -> bool:
    """Tell the same about a session in a store that is closed by now. Return False if it cannot be read."""
    return _looked_up(ctx, session_id, needs_tools, False)


def subagents_there(ctx: click.Context | None) -> set[str]:
    """Return the sub-agents of the session that a command was given. The store is opened again for it."""
    given = ctx.params.get("session") or ctx.params.get("wanted") if ctx is not None else None
    return set() if given is None else _looked_up(ctx, given, subagents_of, set())


def _looked_up(
    ctx: click.Context | None, session_id: str, look: Callable[[Sessions, str], Awaitable[T]], otherwise: T
) -> T:
    from perdure.cli.session_ids import on_session

    try:
        return otherwise if ctx is None else on_session(ctx, session_id, look)[1]
    except (PerdureError, OSError):  # this is called to explain an error: a second one would hide the first
        return otherwise


def told_of(why: str, session_id: str) -> str:
    """Return a sentence about a run that waits to be continued."""
    if why == LEFT:
        return f"The run of {session_id} was decided on, and waits for a worker."
    if why == HANDED_OVER:
        return f"The last run of {session_id} was handed over, and waits for a worker."
    return f"The last run of {session_id} was killed."


def to_go_on(session_id: str, *, tools: bool) -> str:
    """Return the commands to type after a run was killed."""
    recover = command("recover", session_id, tools=tools)
    return f"Continue it: {recover}\nOr end it: {command('cancel', session_id)}"
