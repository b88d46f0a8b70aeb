"""Sessions by the beginning of their id, and what is done to the one that is named."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import click

from perdure.cli.errors import NOT_FOUND, USAGE, Failure
from perdure.cli.hints import command
from perdure.cli.setup import on_sessions
from perdure.errors import PerdureError, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import Names

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

T = TypeVar("T")
NEWEST = "@"
_SHOWN = 5
_COMPLETED = 100


def on_session(
    ctx: click.Context, text: str, verb: Callable[[Sessions, SessionId], Awaitable[T]]
) -> tuple[SessionId, T]:
    """Carry out a verb on the session that an argument names. Return its id, and what the verb returns."""

    async def work(sessions: Sessions) -> tuple[SessionId, T]:
        session_id = await named(sessions, text)
        return session_id, await verb(sessions, session_id)

    return on_sessions(ctx, work)


async def named(sessions: Sessions, text: str) -> SessionId:
    """The session that an argument names: by its id, by a beginning that no other has, or `@`, the newest."""
    if text == NEWEST:
        return await _newest(sessions)
    wanted = SessionId(text)
    with suppress(SessionNotFound):
        return (await sessions.info(wanted)).id
    found = await _beginning_with(sessions, wanted) or await _beginning_with(sessions, wanted, deleted=True)
    if not found:
        raise SessionNotFound(wanted)
    if len(found) > 1:
        more = len(found) > _SHOWN
        some = ", ".join(found[:_SHOWN]) + (" …" if more else "")
        count = f"More than {_SHOWN}" if more else str(len(found))
        raise Failure(f"{count} sessions begin with {text!r}: {some}\nType more of the id.", USAGE)
    return found[0]


async def _newest(sessions: Sessions) -> SessionId:
    page = await sessions.headers(limit=1)
    if not page:
        raise Failure(f"There is no session yet. Begin one: {command('chat', begins=True)}", NOT_FOUND)
    return page.all()[0].id


async def _beginning_with(
    sessions: Sessions, beginning: str, *, deleted: bool = False, limit: int = _SHOWN + 1
) -> Sequence[SessionId]:
    """Of this owner's sessions only. A store that cannot find them so knows whole ids, and no beginnings."""
    store = sessions.store
    if not isinstance(store, Names):
        return ()
    return await store.ids_with_prefix(beginning, owner=sessions.owner, deleted=deleted, limit=limit)


def ids_beginning_with(ctx: click.Context, incomplete: str) -> list[str]:
    """What a shell may complete an id to. It says nothing where there is no store."""
    try:
        found = on_sessions(ctx, lambda sessions: _beginning_with(sessions, incomplete, limit=_COMPLETED))
        return list(map(str, found))
    except (PerdureError, OSError):
        return []
