"""The search for the session that an argument names: by its id, by a beginning or an end of it, or by its name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import click

from perdure.cli.errors import NOT_FOUND, USAGE, Failure
from perdure.cli.hints import command
from perdure.cli.setup import on_sessions
from perdure.cli.short_ids import learn
from perdure.cli.terminal import counted, note
from perdure.errors import InvalidSessionId, KeyUnavailable, PerdureError, SessionNotFound
from perdure.model.ids import SessionId, mark_of
from perdure.protocols import SHORTEST_SUFFIX, Names

if TYPE_CHECKING:
    from perdure.model.session import ListedSession
    from perdure.sessions.sessions import Sessions

T = TypeVar("T")
LAST_USED = "@"
_SHOWN = 5
_COMPLETED = 100
_PAGE = 1000


def on_session(
    ctx: click.Context, text: str, verb: Callable[[Sessions, SessionId], Awaitable[T]], *, of_words: bool = False
) -> tuple[SessionId, T]:
    """Carry out a verb on the session that an argument names. Return its id, and the result of the verb.

    `of_words` is for verbs about messages. If the session has none, a note names the sub-agent's session that has.
    """

    async def work(sessions: Sessions) -> tuple[SessionId, T]:
        session_id = await (named_with_words if of_words else named)(sessions, text)
        return session_id, await verb(sessions, session_id)

    return on_sessions(ctx, work)


async def named(sessions: Sessions, text: str) -> SessionId:
    """Return the session that an argument names.

    It may be its id, or a beginning or an end of it that no other id has. It may also be a name that no other session
    has, or `@`."""
    found = await (last_used(sessions) if text == LAST_USED else _meant(sessions, text))
    await learn(sessions, [found])
    return found


async def named_with_words(sessions: Sessions, text: str) -> SessionId:
    """Return the session that an argument names. If only its sub-agent's session has messages, print a note."""
    session_id = await named(sessions, text)
    children = await _spoken_children(sessions, session_id)
    if len(children) == 1:
        (child,) = children
        await learn(sessions, [child.id])
        has = counted(child.message_count or 0, "message")
        note(f"Session {session_id!r} has no messages. Its sub-agent's has {has}: {command('show', child.id)}")
    return session_id


async def _spoken_children(sessions: Sessions, session_id: SessionId) -> list[ListedSession]:
    """Return the sub-agents' sessions that have messages, if the session itself has never had one."""
    if any(info.message_count != 0 for info in await sessions.list(id=session_id, limit=1)):
        return []
    children = [info for info in await sessions.list(parent=session_id) if info.spawn_ref and info.message_count]
    return [] if children and await sessions.history(session_id) else children


async def last_used(sessions: Sessions) -> SessionId:
    """Return the session that was changed last, apart from those of sub-agents."""
    page = await sessions.headers(order="updated", top_level=True, limit=1)
    for info in page:
        return info.id
    for damage in page.damaged:  # the last one used is damaged: to take another in its place would be a surprise
        raise damage
    whose = "" if sessions.owner is None else f" of {sessions.owner!r}"
    raise Failure(f"No session{whose} exists yet. Begin one: {command('chat', begins=True)}", NOT_FOUND)


async def _meant(sessions: Sessions, text: str) -> SessionId:
    found = await _like_id(sessions, text) or await _of_name(sessions, text)
    if found is not None:
        return found
    try:
        missing = SessionNotFound(SessionId(text))
        if sessions.owner is None and await _has_owners(sessions):
            missing.add_note("If it is an owner's, add --owner OWNER.")
        raise missing
    except InvalidSessionId as error:  # the text is not an id, but a name may have any characters
        what = error.what.rstrip(".")
        raise Failure(f"{what}, and no session has that name. Type: {command('ls')}", USAGE) from None


async def _has_owners(sessions: Sessions) -> bool:
    """Tell whether a session that was used lately has an owner, as far as it can be read."""
    page = await sessions.headers(order="updated", limit=_COMPLETED)
    return any(info.owner is not None for info in page) or any(
        isinstance(each, KeyUnavailable) for each in page.damaged
    )


async def _like_id(sessions: Sessions, text: str) -> SessionId | None:
    try:
        session_id = SessionId(text)
    except InvalidSessionId:
        return None
    try:
        return (await sessions.info(session_id)).id
    except KeyUnavailable as error:  # it exists: some verbs need no key, and the others raise this themselves
        if error.session_id is not None:
            return SessionId(error.session_id)
        raise
    except SessionNotFound:
        pass
    found = await _like(sessions, text) or await _like(sessions, text, deleted=True)
    if len(found) > 1:
        raise _ambiguous(text, found)
    return found[0] if found else None


async def _of_name(sessions: Sessions, text: str) -> SessionId | None:
    """Return the session with this name. A framework's id may be any text, from which the session's id is made."""
    with suppress(SessionNotFound, InvalidSessionId):
        return (await sessions.info(SessionId.of(text))).id
    found: list[SessionId] = []
    after: str | None = None
    while True:
        page = await sessions.headers(top_level=True, limit=_PAGE, after=after)
        found += [info.id for info in page if info.name == text]
        if (after := page.next) is None:
            break
    if len(found) > 1:
        some = ", ".join(found[:_SHOWN]) + (" …" if len(found) > _SHOWN else "")
        raise Failure(f"{len(found):,} sessions have the name {text!r}: {some}\nType the id of one.", USAGE)
    return found[0] if found else None


def _ambiguous(text: str, found: Sequence[str]) -> Failure:
    more = len(found) > _SHOWN
    some = ", ".join(found[:_SHOWN]) + (" …" if more else "")
    count = f"More than {_SHOWN}" if more else str(len(found))
    alike = "begin or end" if len(text) >= SHORTEST_SUFFIX else "begin"
    return Failure(f"{count} sessions {alike} with {text!r}: {some}\nType more of the id.", USAGE)


async def _like(sessions: Sessions, text: str, *, deleted: bool = False) -> Sequence[SessionId]:
    """Return this owner's sessions whose id begins or ends with a text, at most one more than are shown."""
    found = [
        *await _beginning_with(sessions, text, deleted=deleted, limit=_SHOWN + 1),
        *await _ending_with(sessions, text, deleted=deleted, limit=_SHOWN + 1),
    ]
    return list(dict.fromkeys(found))[: _SHOWN + 1]


async def _beginning_with(sessions: Sessions, text: str, *, deleted: bool, limit: int) -> Sequence[SessionId]:
    """Return the ids that begin with a text. An owner need not type the mark that ids begin with."""
    store, owner = sessions.store, sessions.owner
    if not isinstance(store, Names):  # such a store finds whole ids only
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
    """Return the ids that a shell offers: those that begin with a text, or else those that end with it."""

    async def work(sessions: Sessions) -> list[str]:
        mark = "" if sessions.owner is None else mark_of(sessions.owner)
        found = await _beginning_with(sessions, incomplete, deleted=False, limit=_COMPLETED)
        found = found or await _ending_with(sessions, incomplete, deleted=False, limit=_COMPLETED)
        # What is completed has to begin with what was typed.
        return [each if each.startswith(incomplete) else each.removeprefix(mark) for each in dict.fromkeys(found)]

    try:
        return on_sessions(ctx, work)
    except (PerdureError, OSError, click.UsageError):  # an error would be printed into the line that is being typed
        return []
