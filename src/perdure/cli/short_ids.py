"""Ids as a person sees them: the shortest end that no other session has, since ids that perdure makes up begin alike.

Of a long id that was chosen, or that an adapter made of a framework's names, it is the beginning that no other has.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING

import click

from perdure.cli.terminal import is_terminal
from perdure.errors import PerdureError
from perdure.model.ids import mark_of
from perdure.protocols import SHORTEST_SUFFIX, Names

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

_LEARNED = "perdure.short_ids"
_MADE_UP = re.compile(r"(?:o[a-z2-7]{16}\.)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A UUID, behind an owner's mark or not. Any other id was chosen by somebody, who knows it by its beginning."""
_LONG = 32
_HASH = re.compile(r"\.h[a-z2-7]{26}$")
"""What an adapter's ids end with, and nobody reads."""
_UNREADABLE = re.compile(r"o[a-z2-7]{16}\..*\.h[a-z2-7]{26}")
"""An adapter's id that begins with the mark of an owner: neither its beginning nor its end tells anybody anything."""
_BEGINNING = 20
"""The fewest characters that are left of a long id, unless only its hash is longer."""
_ALIKE = 50
"""How many sessions with the same end are compared; if there are more, a longer end is tried."""


def shown(session_id: str) -> str:
    """Return an id as this terminal shows it: short if `learn` has found how, and whole in a pipe."""
    ctx = click.get_current_context(silent=True)
    if ctx is None or not is_terminal():
        return session_id
    learned: dict[str, str] = ctx.meta.get(_LEARNED, {})
    return learned.get(session_id, session_id)


async def learn(sessions: Sessions, session_ids: Iterable[str]) -> None:
    """Find out how short the ids can be shown that are about to be. Nothing is looked up if nobody looks."""
    ctx, store = click.get_current_context(silent=True), sessions.store
    if ctx is None or not is_terminal() or not isinstance(store, Names):
        return
    learned: dict[str, str] = ctx.meta.setdefault(_LEARNED, {})
    reach = _Reach(store, sessions.owner)
    wanted = list(dict.fromkeys(session_ids))
    with suppress(PerdureError):  # what is damaged is told by those who read it; ids are shown whole then
        learned.update(zip(wanted, await asyncio.gather(*map(reach.short, wanted)), strict=True))


class _Reach:
    """The sessions that one owner may name. Those of others count for nothing, or lengths would tell of them."""

    def __init__(self, names: Names, owner: str | None) -> None:
        self._names = names
        self._owner = owner
        self._mark = "" if owner is None else mark_of(owner)

    async def short(self, session_id: str) -> str:
        """Return what names a session and no other, as `named` looks for it."""
        bare = session_id.removeprefix(self._mark)
        if not _MADE_UP.fullmatch(session_id) and not _UNREADABLE.fullmatch(bare):
            return await self._beginning(session_id, bare)
        length, is_there = await self._length(session_id, deleted=False)
        if not is_there:  # then it is one of the deleted, which are looked for last
            length = max(length, (await self._length(session_id, deleted=True))[0])
        for end in _ends(session_id, length):
            if not await self._is_beginning(end):
                return end
        return session_id

    async def _beginning(self, session_id: str, bare: str) -> str:
        """Return an id that was chosen, without the mark; if it is long, the beginning that no other session has."""
        if len(bare) <= _LONG:
            return bare
        length = min(_BEGINNING, len(_HASH.sub("", bare)))
        while length < len(bare):
            others = [each for each in await self._alike(bare[:length]) if each != session_id]
            if not others:
                return bare[:length]
            alike = max(_common_start(bare, each.removeprefix(self._mark)) for each in others)
            length = max(length, alike) + 1
        return bare

    async def _alike(self, text: str) -> list[str]:
        """Return the sessions that begin or end so, deleted or not: as far as they are looked at."""
        found: list[str] = []
        for deleted in (False, True):
            for prefix in {text, self._mark + text}:
                found += await self._names.ids_with_prefix(prefix, owner=self._owner, deleted=deleted, limit=_ALIKE)
            if len(text) >= SHORTEST_SUFFIX:
                found += await self._names.ids_with_suffix(text, owner=self._owner, deleted=deleted, limit=_ALIKE)
        return found

    async def _length(self, session_id: str, *, deleted: bool) -> tuple[int, bool]:
        """Return how long an end has to be that no other id has, and whether the session itself was met."""
        length = SHORTEST_SUFFIX
        while True:
            end = session_id[-length:]
            found = await self._names.ids_with_suffix(end, owner=self._owner, deleted=deleted, limit=_ALIKE)
            if len(found) < _ALIKE or length >= len(session_id):
                break
            length *= 2
        others = [each for each in found if each != session_id]
        return max([length, *(1 + _common_end(session_id, each) for each in others)]), len(others) < len(found)

    async def _is_beginning(self, end: str) -> bool:
        """Tell whether the id of a session begins so, which would be meant as well, or is it, deleted or not."""
        for prefix in {end, self._mark + end}:
            for deleted in (False, True):
                if await self._names.ids_with_prefix(prefix, owner=self._owner, deleted=deleted, limit=1):
                    return True
        return False


def _ends(session_id: str, least: int) -> Iterable[str]:
    """Return the ends of an id, the shortest first, without those that a shell or an id could not begin with."""
    return (session_id[-length:] for length in range(least, len(session_id)) if session_id[-length].isalnum())


def _common_start(one: Iterable[str], other: Iterable[str]) -> int:
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _common_end(one: str, other: str) -> int:
    return _common_start(reversed(one), reversed(other))
