"""The request for a redaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.model.value import brief, clean_text, kind_of


class Request(NamedTuple):
    """A checked request for a redaction."""

    session_id: SessionId
    ids: tuple[str, ...]
    replacement: str

    @classmethod
    def of(cls, session_id: str, message_ids: Sequence[str], replacement: str) -> Request:
        if isinstance(message_ids, str) or not isinstance(message_ids, Iterable):
            problem = f"expected several ids, got {kind_of(message_ids)}; write [message.id]"
            raise InvalidData("$.message_ids", problem)
        given = tuple(message_ids)
        for place, each in enumerate(given):
            if not isinstance(each, str):
                raise InvalidData(f"$.message_ids[{place}]", f"a message's id is a text, not {brief(each)}")
        if not isinstance(replacement, str) or not replacement.strip() or len(replacement) > 1000:
            raise InvalidData("$.replacement", f"give a text of 1 to 1000 characters; got {brief(replacement)}")
        return cls(SessionId(session_id), tuple(dict.fromkeys(given)), clean_text(replacement))

    @property
    def pledge(self) -> bytes:
        """The note of it that is written before the first change. It names messages, but not their content."""
        return msgspec.json.encode([self.ids, self.replacement])

    @classmethod
    def of_pledge(cls, session_id: str, body: bytes) -> Request:
        """Return the redaction that was begun in a session, to finish it. Raise InvalidData if the note is damaged."""
        try:
            ids, replacement = msgspec.json.decode(body, type=tuple[tuple[str, ...], str])
        except msgspec.MsgspecError as error:
            raise InvalidData("$.pledge", str(error)) from None
        return cls(SessionId(session_id), ids, replacement)
