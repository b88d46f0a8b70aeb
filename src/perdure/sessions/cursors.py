"""Cursors: how much of a run's text a reader has seen, as a text with which the reader continues."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BadBase64
from typing import Self
from zlib import crc32

import msgspec

from perdure.errors import InvalidData
from perdure.model.checks import expect
from perdure.model.value import brief


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in the text of a run: after the first `offset` characters of one of its messages.

    The checksum is that of these characters. It tells later whether the message still begins with them.
    """

    run: str
    message_id: str = ""
    attempt: int = 0
    """The number of times that the model had begun the message again."""
    base: int = 0
    """The number of characters of the run before the message."""
    offset: int = 0
    crc: int = 0
    is_end: bool = False
    """True if the run is over, and its reply was given."""

    @classmethod
    def of(cls, cursor: str) -> Self:
        """Return the place that a cursor stands for."""
        try:
            raw = urlsafe_b64decode(expect(cursor, str, "$.after").encode("ascii"))
            place = msgspec.json.decode(raw, type=cls)
        except (UnicodeEncodeError, BadBase64, msgspec.MsgspecError):
            raise _not_a_cursor(cursor) from None
        if min(place.attempt, place.base, place.offset, place.crc) < 0 or not place.run:
            raise _not_a_cursor(cursor)
        return place

    @property
    def cursor(self) -> str:
        return urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @property
    def end(self) -> int:
        """Return the number of characters of the run before this place."""
        return self.base + self.offset

    def after(self, text: str) -> Place:
        """Return the place after this further text of the same message."""
        crc = crc32(_bytes(text), self.crc)
        return Place(self.run, self.message_id, self.attempt, self.base, self.offset + len(text), crc)

    def in_message(self, message_id: str, attempt: int = 0) -> Place:
        """Return the beginning of the message that comes next."""
        return Place(self.run, message_id, attempt, self.end)

    def at_beginning(self, attempt: int = 0) -> Place:
        """Return the beginning of the same message."""
        return Place(self.run, self.message_id, attempt, self.base)

    def ended(self) -> Place:
        return Place(self.run, self.message_id, self.attempt, self.base, self.offset, self.crc, True)

    def is_in(self, text: str) -> bool:
        """Tell whether a message's text begins with what comes before this place in it."""
        return len(text) >= self.offset and crc32(_bytes(text[: self.offset])) == self.crc


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _not_a_cursor(cursor: object) -> InvalidData:
    return InvalidData("$.after", f"{brief(cursor)} is not a chunk's `cursor`")
