"""Short forms of ids for people: the shortest end that no other session has, since ids that perdure makes begin alike.

A long id that was chosen, or that an adapter made from a framework's names, is shown by a beginning that no other has.
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
"""A UUID, with or without an owner's mark. Any other id was chosen by somebody, who knows it by its beginning."""
_LONG = 32
_HASH = re.compile(r"\.h[a-z2-7]{26}$")
"""The end of an adapter's ids, which nobody reads."""
_UNREADABLE = re.compile(r"o[a-z2-7]{16}\..*\.h[a-z2-7]{26}")
"""An adapter's id that begins with the mark of an owner. Neither its beginning nor its end means anything to people."""
_BEGINNING = 20
"""The fewest characters shown of a long id, unless it has fewer before its hash."""
_ALIKE = 50
"""The most sessions with the same end that are compared. If there are more, a longer end is tried."""


def shown(session_id: str) -> str:
    """Return an id as this terminal shows it: short if `learn` has looked it up, and whole in a pipe."""
    ctx = click.get_current_context(silent=True)
    if ctx is None or not is_terminal():
        return session_id
    learned: dict[str, str] = ctx.meta.get(_LEARNED, {})
    return learned.get(session_id, session_id)


async def learn(sessions: Sessions, session_ids: Iterable[str]) -> None:
    """Look up the short forms of ids that will be printed. In a pipe, look up nothing."""
    ctx, store = click.get_current_context(silent=True), sessions.store
    if ctx is None or not is_terminal() or not isinstance(store, Names):
        return
    learned: dict[str, str] = ctx.meta.setdefault(_LEARNED, {})
    reach = _Reach(store, sessions.owner)
    wanted = list(dict.fromkeys(session_ids))
    with suppress(PerdureError):  # then ids are shown whole: the command that reads a damaged store reports it
        learned.update(zip(wanted, await asyncio.gather(*map(reach.short, wanted)), strict=True))


class _Reach:
    """The sessions that one owner may name. Others do not count, or the length of an id would tell about them."""

    def __init__(self, names: Names, owner: str | None) -> None:
        self._names = names
        self._owner = owner
        self._mark = "" if owner is None else mark_of(owner)

    async def short(self, session_id: str) -> str:
        """Return a text that names one session and no other, as `named` looks for it."""
        bare = session_id.removeprefix(self._mark)
        if not _MADE_UP.fullmatch(session_id) and not _UNREADABLE.fullmatch(bare):
            return await self._beginning(session_id, bare)
        length, is_there = await self._length(session_id, deleted=False)
        if not is_there:  # then it is deleted: `named` looks for such sessions last
            length = max(length, (await self._length(session_id, deleted=True))[0])
        for end in _ends(session_id, length):
            if not await self._is_beginning(end):
                return end
        return session_id

    async def _beginning(self, session_id: str, bare: str) -> str:
        """Return a chosen id without the mark. If it is long, return the beginning that no other session has."""
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
        """Return ids that begin or end with a text, deleted or not, up to a limit."""
        found: list[str] = []
        for deleted in (False, True):
            for prefix in {text, self._mark + text}:
                found += await self._names.ids_with_prefix(prefix, owner=self._owner, deleted=deleted, limit=_ALIKE)
            if len(text) >= SHORTEST_SUFFIX:
                found += await self._names.ids_with_suffix(text, owner=self._owner, deleted=deleted, limit=_ALIKE)
        return found

    async def _length(self, session_id: str, *, deleted: bool) -> tuple[int, bool]:
        """Return the length of an end that no other id has, and whether the session itself was found."""
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
        """Tell whether some id, deleted or not, begins with a text. Then the text would also name that session."""
        for prefix in {end, self._mark + end}:
            for deleted in (False, True):
                if await self._names.ids_with_prefix(prefix, owner=self._owner, deleted=deleted, limit=1):
                    return True
        return False


def _ends(session_id: str, least: int) -> Iterable[str]:
    """Return the ends of an id, the shortest first. They begin with a letter or digit, as an id has to."""
    return (session_id[-length:] for length in range(least, len(session_id)) if session_id[-length].isalnum())


def _common_start(one: Iterable[str], other: Iterable[str]) -> int:
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _common_end(one: str, other: str) -> int:
    return _common_start(reversed(one), reversed(other))
