"""Ids of responses and conversations. An id says where to look, so that any process finds what it means.

A response is a part of a run: from a message, or from a decision on calls that wait, to the next pause or the end. A
message's part is known by the session and the message's key. A decision's part is also known by the version that
waited. Both are known before anything is run, and stay the same afterwards.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b

import msgspec

from perdure.errors import InvalidSessionId
from perdure.model.ids import SessionId, new_id

_RESPONSE, _CONVERSATION, _COMPACTION = "resp_", "conv_", "cmp_"
_MOST = 2_000


class ResponseId(msgspec.Struct, frozen=True):
    """The place of a response: its session, the key of its run, and the version it decided on, or 0."""

    session: SessionId
    key: str
    after: int = 0

    def __str__(self) -> str:
        return _RESPONSE + _packed(self.session, self.key, str(self.after))

    @classmethod
    def of(cls, text: str) -> ResponseId | None:
        """Return the id that is written in a text, or None if it is not one."""
        parts = _unpacked(text, _RESPONSE)
        if parts is None or len(parts) != 3 or not parts[1] or not _is_number(parts[2]):
            return None
        session = _session_id(parts[0])
        return None if session is None else cls(session, parts[1], int(parts[2]))


def conversation_id(session: str) -> str:
    """Return the conversation id of a session."""
    return _CONVERSATION + _packed(session)


def session_of(conversation: str) -> SessionId | None:
    """Return the session of a conversation id, or None if it is not one."""
    parts = _unpacked(conversation, _CONVERSATION)
    return _session_id(parts[0]) if parts is not None and len(parts) == 1 else None


def handle_of(session: str, version: int) -> str:
    """Return a handle for a session as of a version. Clients keep it for later."""
    return _COMPACTION + _packed(session, str(version))


def handled(handle: str) -> tuple[SessionId, int] | None:
    """Return the session and the version that a handle stands for, or None if it is not one."""
    parts = _unpacked(handle, _COMPACTION)
    if parts is None or len(parts) != 2 or not _is_number(parts[1]):
        return None
    session = _session_id(parts[0])
    return None if session is None else (session, int(parts[1]))


def key_of(given: str | None, owner: str | None) -> str:
    """Return the key of a request, made of its `Idempotency-Key`, or a new one. Each owner has other keys."""
    if given is None:
        return new_id()
    # `person` makes other hashes of the same key than the native API does.
    return blake2b(msgspec.json.encode([owner, given]), digest_size=16, person=b"openai").hexdigest()


def _packed(*parts: str) -> str:
    return urlsafe_b64encode("\n".join(parts).encode()).decode().rstrip("=")


def _unpacked(text: str, prefix: str) -> list[str] | None:
    if not text.startswith(prefix) or len(text) > _MOST or not text.isascii():
        return None
    body = text.removeprefix(prefix)
    try:
        parts = urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode().split("\n")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return parts if prefix + _packed(*parts) == text else None  # there is one way to write an id


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= 15


def _session_id(text: str) -> SessionId | None:
    try:
        return SessionId(text)
    except InvalidSessionId:
        return None
