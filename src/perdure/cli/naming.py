"""Sessions by the beginning of their id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from perdure.cli.errors import NOT_FOUND, USAGE, Failure
from perdure.cli.hints import command
from perdure.errors import PerdureError, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import Names

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

NEWEST = "@"
_SHOWN = 5
_COMPLETED = 100


async def named(sessions: Sessions, text: str) -> SessionId:
    """The session that an argument names: by its id, by a beginning that no other has, or `@`, the newest."""
    if text == NEWEST:
        return await _newest(sessions)
    wanted = SessionId(text)
    if await sessions.exists(wanted):
        return wanted
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
    page = await sessions.list(limit=1)
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
    from perdure.cli.setup import opened

    async def look() -> list[str]:
        async with opened(ctx, must_exist=True) as sessions:
            return list(map(str, await _beginning_with(sessions, incomplete, limit=_COMPLETED)))

    try:
        return asyncio.run(look())
    except (PerdureError, OSError):
        return []
