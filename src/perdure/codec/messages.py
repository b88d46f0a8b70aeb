"""Messages as bytes, and back: what a value's way does, but quicker, for there are many."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import astuple

from perdure.codec.unknown import is_marked
from perdure.codec.values import DECODE_ERRORS, MAX_BYTES, decode, encode, is_in_bounds
from perdure.errors import InvalidData
from perdure.model.message import Message, Part, Text
from perdure.model.value import EMPTY

_message_encoder = msgspec.json.Encoder()
_message_decoder = msgspec.json.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Return a message's bytes, after what callers put into it has been checked."""
    return encode_settled(message)[0]


def encode_settled(message: Message) -> tuple[bytes, Message]:
    """Return a message's bytes, and the message as every later load gives it: of plain types all through."""
    if type(message) is not Message:
        raise InvalidData("$", f"expected a Message, got {type(message).__name__}")
    try:
        raw = _message_encoder.encode(message)
        if len(raw) <= MAX_BYTES and not is_marked(raw):
            if _is_plain(message):
                return raw, message
            back = _message_decoder.decode(raw)
            if back == message and is_in_bounds(message, raw):
                return raw, back
    except (*DECODE_ERRORS, UnicodeError):
        pass  # the long way finds out what is wrong, and says where
    raw = encode(message)
    return raw, decode_message(raw)


def settled(message: Message) -> Message:
    """Return a message as every later load gives it: itself, unless a text in it is of a subclass of str."""
    texts = (message.id, message.role, *(text for part in message.parts for text in _texts_of(part)))
    return message if all(type(text) is str for text in texts) else decode_message(encode_message(message))


def _texts_of(part: Part) -> Sequence[str]:
    if type(part) is Text:
        return (part.text,)
    return [value for value in astuple(part) if isinstance(value, str)]


def _is_plain(message: Message) -> bool:
    """Whether a message is nothing but text, as most are: then its types are all there is to check."""
    if message.metadata is not EMPTY or message.unknown or type(message.id) is not str:
        return False
    for part in message.parts:  # noqa: SIM110 - a generator takes twice as long, and this runs for every message
        if type(part) is not Text or type(part.text) is not str or part.unknown:
            return False
    return True


def decode_message(raw: bytes) -> Message:
    try:
        return _message_decoder.decode(raw)
    except DECODE_ERRORS:
        return decode(Message, raw)


def decode_messages(raws: Sequence[bytes]) -> list[Message]:
    """Many messages from their bytes, as quickly as can be."""
    try:
        return list(map(_message_decoder.decode, raws))
    except DECODE_ERRORS:
        return list(map(decode_message, raws))
