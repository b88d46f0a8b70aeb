"""Sessions by the beginning of their id."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from perdure.cli.errors import USAGE, Failure
from perdure.errors import PerdureError, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus

if TYPE_CHECKING:
    from perdure.sessions.face import Sessions

NEWEST = "@"
_SHOWN = 5


async def named(sessions: Sessions, text: str) -> SessionId:
    """The session that an argument names: by its id, by a beginning that no other has, or `@`, the newest."""
    if text == NEWEST:
        return await _newest(sessions)
    wanted = SessionId(text)
    if await sessions.exists(wanted):
        return wanted
    found = await _beginning_with(sessions, wanted, None) or await _beginning_with(
        sessions, wanted, SessionStatus.DELETED
    )
    if not found:
        raise SessionNotFound(wanted)
    if len(found) > 1:
        some = ", ".join(found[:_SHOWN]) + (" …" if len(found) > _SHOWN else "")
        raise Failure(f"{len(found)} sessions begin with {text!r}: {some}\nType more of the id.", USAGE)
    return found[0]


async def _newest(sessions: Sessions) -> SessionId:
    page = await sessions.list(limit=1)
    if not page:
        raise SessionNotFound(NEWEST)
    return page.all()[0].id


async def _beginning_with(
    sessions: Sessions, beginning: str, status: SessionStatus | None, *, most: int | None = None
) -> list[SessionId]:
    found: list[SessionId] = []
    after: str | None = None
    while most is None or len(found) < most:
        page = await (
            sessions.list(limit=1000, after=after)
            if status is None
            else sessions.list(limit=1000, after=after, status=status)
        )
        found += [info.id for info in page if info.id.startswith(beginning)]
        if page.next is None:
            break
        after = page.next
    return found


def ids_beginning_with(ctx: click.Context, incomplete: str) -> list[str]:
    """What a shell may complete an id to. It says nothing where there is no store."""
    from perdure.cli.setup import opened

    async def look() -> list[str]:
        async with opened(ctx, must_exist=True) as sessions:
            return [str(found) for found in await _beginning_with(sessions, incomplete, None, most=100)]

    try:
        return asyncio.run(look())
    except (PerdureError, OSError):
        return []
