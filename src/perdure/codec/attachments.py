"""Images and files apart from the messages that show them: large bytes are kept once, under their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from perdure.codec.documents import from_dict
from perdure.codec.messages import decode_message, encode_message
from perdure.errors import InvalidData
from perdure.model.message import Media, Message

MOST_INLINE = 4096
"""The most bytes of an image or a file that stay within its message. To keep fewer apart costs more than it saves."""
MOST_BYTES = 48_000_000
"""The largest file. In an export it is one line of base64, and no line is longer than 128 MiB."""
# Every message that names bytes by their hash contains this. A text cannot: there JSON puts a backslash before a quote.
_MARK = b'"hash":"'


class Attachment(NamedTuple):
    """Bytes that a message names by their hash. `body` is None if they are in the store already."""

    hash: str
    size: int
    body: bytes | None


def hash_of_bytes(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def has_attachments(message: Message) -> bool:
    """Tell whether a message has bytes that are kept apart, or will be once it is stored."""
    for part in message.parts:  # noqa: SIM110 - a generator takes twice as long, and this runs for every message
        if type(part) is Media and _is_apart(part):
            return True
    return False


def _is_apart(part: Media) -> bool:
    return part.hash is not None or (part.data is not None and len(part.data) > MOST_INLINE)


def detached(message: Message) -> tuple[Message, tuple[Attachment, ...]]:
    """Return a message as a store keeps it, with large bytes named by their hash, and those bytes.

    Raise InvalidData if a file is larger than MOST_BYTES.
    """
    kept, found = _detached(message)
    for each in found:
        if each.size > MOST_BYTES:
            problem = f"a file of {each.size:,} bytes is over the cap of {MOST_BYTES:,}; send its address"
            raise InvalidData("$.data", problem)
    return kept, found


def _detached(message: Message) -> tuple[Message, tuple[Attachment, ...]]:
    if not has_attachments(message):
        return message, ()
    found: dict[str, Attachment] = {}
    parts = tuple(_detached_part(part, found) if type(part) is Media else part for part in message.parts)
    return replace(message, parts=parts), tuple(found.values())


def _detached_part(part: Media, found: dict[str, Attachment]) -> Media:
    if not _is_apart(part):
        return part
    body = part.data
    if body is not None:
        part = replace(part, data=None, hash=hash_of_bytes(body), size=len(body))
    assert part.hash is not None, "a part is checked when it is made"
    # The same file may come twice, once with its bytes and once by its hash alone: the bytes win.
    if part.hash not in found or found[part.hash].body is None:
        found[part.hash] = Attachment(part.hash, part.size or 0, body)
    return part


def hashes_in(raw: bytes) -> frozenset[str]:
    """Return the hashes that a stored message names. Most name none, and are not decoded to find that out."""
    return decode_message(raw).file_hashes if _MARK in raw else frozenset()


def detached_raw(raw: bytes) -> tuple[bytes, tuple[Attachment, ...]]:
    """Return a stored message with large bytes apart. Earlier releases have stored the bytes within it."""
    if len(raw) <= MOST_INLINE or b'"media"' not in raw:
        return raw, ()
    message, found = _detached(decode_message(raw))
    return (encode_message(message), found) if any(each.body is not None for each in found) else (raw, ())


def detached_post(body: Any) -> tuple[Any, tuple[Attachment, ...]]:
    """Return an item for an inbox with the large bytes of its messages apart, and those bytes."""
    found: dict[str, Attachment] = {}

    def part(message: Message) -> Message:
        kept, attachments = detached(message)
        found.update((each.hash, each) for each in attachments if each.body is not None or each.hash not in found)
        return kept

    return _changed_post(body, part), tuple(found.values())


def attached_post(body: Any, bodies: Mapping[str, bytes]) -> Any:
    """Return an item of an inbox with these bytes put back into its messages."""
    return _changed_post(body, lambda message: message.with_files(bodies))


def hashes_in_post(body: Any) -> set[str]:
    """Return the hashes that the messages of an item of an inbox name."""
    return {key for _, message in _messages_with_media(body) for key in message.file_hashes}


def _changed_post(body: Any, change: Callable[[Message], Message]) -> Any:
    changed = {place: change(message).to_dict() for place, message in _messages_with_media(body)}
    if not changed:
        return body
    messages = [changed.get(place, plain) for place, plain in enumerate(body["messages"])]
    return {**body, "messages": messages}


def _messages_with_media(body: Any) -> Iterator[tuple[int, Message]]:
    """Yield the messages of an item that have an image or a file. Other data of any form is left as it is."""
    messages = body.get("messages") if isinstance(body, Mapping) else None
    for place, plain in enumerate(messages if isinstance(messages, Sequence) else ()):
        parts = plain.get("parts") if isinstance(plain, Mapping) else None
        if any(isinstance(each, Mapping) and each.get("type") == "media" for each in parts or ()):
            with suppress(InvalidData):  # data that only looks like a message may be posted too
                yield place, from_dict(Message, plain)
