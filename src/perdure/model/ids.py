"""Ids and time. In the model, both come from here alone, and both can be replaced."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import uuid_utils

from perdure.errors import InvalidSessionId

Time = Annotated[datetime, msgspec.Meta(tz=True)]
"""An instant with a time zone. None is stored or read without one: it could not be compared with others."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
# What `SessionId.of` makes ends like this: 128 bits in base32. A given name that looks so is hashed too: otherwise it
# could be mistaken for what other names were made into.
_MADE = re.compile(r".*\.h[a-z2-7]{26}")
_UNFIT = re.compile(r"[^A-Za-z0-9]+")
_READABLE = 60
_MARK_BYTES = 10
"""80 bits, which base32 writes as 16 letters: too many for anyone to find a name with the mark of another."""


class SessionId(str):
    """The name of a session: safe as a file name, a URL segment and an SQL value."""

    __slots__ = ()

    def __new__(cls, value: str) -> SessionId:
        if type(value) is cls:
            return value
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise InvalidSessionId(value)
        return super().__new__(cls, value)

    @classmethod
    def generate(cls, owner: str | None = None) -> SessionId:
        """Return a new UUIDv7: unique, and sorted by its time. With an owner, the owner's mark is put before it."""
        return cls(new_id()) if owner is None else cls.under(owner, new_id())

    @classmethod
    def under(cls, owner: str, name: str) -> SessionId:
        """Return the id of an owner's session: the owner's mark, a dot, and the name that the owner has given it.

        Names of different owners cannot clash, and a name that is taken does not reveal who has it. An id that has the
        mark already stays as it is.
        """
        mark = mark_of(owner)
        given = cls(name)
        return given if given.startswith(mark) else cls(mark + given)

    @classmethod
    def of(cls, *names: str) -> SessionId:
        """Return an id for one or several names, which may be any text. No two sequences of names share an id.

        A single name that is an id already stays as it is. Anything else becomes its letters and digits, for people to
        read, and a hash: `SessionId.of("order 7", "ada")` is `order-7-ada.h…`.
        """
        if not names:
            raise InvalidSessionId("")
        for name in names:
            if not isinstance(name, str):
                raise InvalidSessionId(name)
        if len(names) == 1 and _ID.fullmatch(names[0]) and not _MADE.fullmatch(names[0]):
            return cls(names[0])
        digest = _digest(*names, size=16)
        readable = _UNFIT.sub("-", "-".join(names))[:_READABLE].strip("-") or "session"
        return cls(f"{readable}.h{base64.b32encode(digest).decode().rstrip('=').lower()}")


def mark_of(owner: str) -> str:
    """Return how the ids of an owner's sessions begin. That tells owners apart, and does not show their names."""
    digest = _digest(owner, size=_MARK_BYTES)
    return f"o{base64.b32encode(digest).decode().lower()}."


def key_of_call(session_id: str | None, execution_id: str, call_id: str) -> str:
    """Return the text that tells one tool call from all others: the same in every process that makes it."""
    return _digest(session_id or "", execution_id, call_id, size=16).hex()


def _digest(*names: str, size: int) -> bytes:
    """Return a hash of names, with their lengths: "ab", "c" and "a", "bc" have different hashes."""
    raws = [name.encode("utf-8", "surrogatepass") for name in names]  # half of a surrogate pair may be in any text
    return hashlib.sha256(b"".join(b"%d:%b" % (len(raw), raw) for raw in raws)).digest()[:size]


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _uuid7() -> str:
    return str(uuid_utils.uuid7())


Clock = Callable[[], datetime]
IdSource = Callable[[], str]

_clock: ContextVar[Clock] = ContextVar("perdure_clock", default=_utc_now)
_ids: ContextVar[IdSource] = ContextVar("perdure_ids", default=_uuid7)


def now() -> datetime:
    """Return the current time, in UTC."""
    return _clock.get()()


def replaced_time() -> datetime | None:
    """Return the time of a clock that `use` has put in place, or None. With None, a store may ask its own clock."""
    clock = _clock.get()
    return None if clock is _utc_now else clock()


def new_id() -> str:
    """Return a new unique id."""
    return _ids.get()()


@contextmanager
def use(*, clock: Clock | None = None, ids: IdSource | None = None) -> Iterator[None]:
    """Replace the clock or the source of ids within a block, for this task and those it starts."""
    clock_token = _clock.set(clock or _clock.get())
    ids_token = _ids.set(ids or _ids.get())
    try:
        yield
    finally:
        _clock.reset(clock_token)
        _ids.reset(ids_token)
