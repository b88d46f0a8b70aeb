"""Sessions by their id, or by a beginning or an end of it, and what is done to the one that is named."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import click

from perdure.cli.errors import NOT_FOUND, USAGE, Failure
from perdure.cli.hints import command
from perdure.cli.setup import on_sessions
from perdure.cli.short_ids import learn
from perdure.errors import InvalidSessionId, PerdureError, SessionNotFound
from perdure.model.ids import SessionId, mark_of
from perdure.protocols import SHORTEST_SUFFIX, Names

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

T = TypeVar("T")
LAST_USED = "@"
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
    """Return the session that an argument names: by its id, by a beginning or an end that no other has, or by `@`."""
    found = await (last_used(sessions) if text == LAST_USED else _meant(sessions, SessionId(text)))
    await learn(sessions, [found])
    return found


async def last_used(sessions: Sessions) -> SessionId:
    """Return the session that was changed last, and is not a sub-agent's."""
    page = await sessions.headers(order="updated", top_level=True, limit=1)
    for info in page:
        return info.id
    for damage in page.damaged:
        raise damage
    whose = "" if sessions.owner is None else f" of {sessions.owner!r}"
    raise Failure(f"There is no session{whose} yet. Begin one: {command('chat', begins=True)}", NOT_FOUND)


async def _meant(sessions: Sessions, text: SessionId) -> SessionId:
    with suppress(SessionNotFound):
        return (await sessions.info(text)).id
    found = await _like(sessions, text) or await _like(sessions, text, deleted=True)
    if not found:
        raise SessionNotFound(text)
    if len(found) > 1:
        raise _ambiguous(text, found)
    return found[0]


def _ambiguous(text: str, found: Sequence[str]) -> Failure:
    more = len(found) > _SHOWN
    some = ", ".join(found[:_SHOWN]) + (" …" if more else "")
    count = f"More than {_SHOWN}" if more else str(len(found))
    alike = "begin or end" if len(text) >= SHORTEST_SUFFIX else "begin"
    return Failure(f"{count} sessions {alike} with {text!r}: {some}\nType more of the id.", USAGE)


async def _like(sessions: Sessions, text: str, *, deleted: bool = False) -> Sequence[SessionId]:
    """Return this owner's sessions whose id begins or ends so: one more than are shown, if there are more."""
    found = [
        *await _beginning_with(sessions, text, deleted=deleted, limit=_SHOWN + 1),
        *await _ending_with(sessions, text, deleted=deleted, limit=_SHOWN + 1),
    ]
    return list(dict.fromkeys(found))[: _SHOWN + 1]


async def _beginning_with(sessions: Sessions, text: str, *, deleted: bool, limit: int) -> Sequence[SessionId]:
    """A store that cannot find them so knows whole ids only. An owner need not type the mark that ids begin with."""
    store, owner = sessions.store, sessions.owner
    if not isinstance(store, Names):
        return ()
    found = list(await store.ids_with_prefix(text, owner=owner, deleted=deleted, limit=limit))
    if owner is not None:
        with suppress(InvalidSessionId):  # too long to have a mark
            found += await store.ids_with_prefix(mark_of(owner) + text, owner=owner, deleted=deleted, limit=limit)
    return found


async def _ending_with(sessions: Sessions, text: str, *, deleted: bool, limit: int) -> Sequence[SessionId]:
    store = sessions.store
    if not isinstance(store, Names) or len(text) < SHORTEST_SUFFIX:
        return ()
    return await store.ids_with_suffix(text, owner=sessions.owner, deleted=deleted, limit=limit)


def ids_beginning_with(ctx: click.Context, incomplete: str) -> list[str]:
    """Return what a shell may complete an id to: ids that begin so, else those that end so. Nothing without a store."""

    async def work(sessions: Sessions) -> list[str]:
        mark = "" if sessions.owner is None else mark_of(sessions.owner)
        found = await _beginning_with(sessions, incomplete, deleted=False, limit=_COMPLETED)
        found = found or await _ending_with(sessions, incomplete, deleted=False, limit=_COMPLETED)
        # What is completed has to begin with what was typed.
        return [each if each.startswith(incomplete) else each.removeprefix(mark) for each in dict.fromkeys(found)]

    try:
        return on_sessions(ctx, work)
    except (PerdureError, OSError, click.UsageError):
        return []
