"""Messages as bytes, and back. This is what `values` does for any value, but quicker, since there are many messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec
from msgspec.structs import astuple

from perdure.codec.unknown import is_marked
from perdure.codec.values import DECODE_ERRORS, MAX_BYTES, decode, encode, is_in_bounds
from perdure.errors import InvalidData
from perdure.model.message import Envelope, Message, Part, Text, Thinking, ToolCall, ToolResult
from perdure.model.value import EMPTY, FrozenDict

_message_encoder = msgspec.json.Encoder()
_message_decoder = msgspec.json.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Return a message's bytes, after a check of what callers have put into it."""
    return encode_settled(message)[0]


def encode_settled(message: Message) -> tuple[bytes, Message]:
    """Return a message's bytes, and the message as every later load returns it, with plain types only."""
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
        pass  # the slow way below finds out what is wrong, and says where
    raw = encode(message)
    return raw, decode_message(raw)


def settled(message: Message) -> Message:
    """Return a message as every later load returns it: itself, unless a text in it is of a subclass of str."""
    texts = (message.id, message.role, *(text for part in message.parts for text in _texts_of(part)))
    return message if all(type(text) is str for text in texts) else decode_message(encode_message(message))


def _texts_of(part: Part) -> Sequence[str]:
    if type(part) is Text:
        return (part.text,)
    return [value for value in astuple(part) if isinstance(value, str)]


def _is_plain(message: Message) -> bool:
    """Tell whether all parts of a message are of types that come back unchanged, as in most messages."""
    if message.unknown or type(message.id) is not str or not _is_flat(message.metadata):
        return False
    for part in message.parts:  # noqa: SIM110 - a generator takes twice as long, and this runs for every message
        if not _is_plain_part(part):
            return False
    return True


def _is_plain_part(part: Part) -> bool:
    if part.unknown:
        return False
    if type(part) is Text:
        return type(part.text) is str
    if type(part) is ToolCall:
        is_named = type(part.name) is str and type(part.id) is str
        return is_named and part.provider is None and part.opaque is None and _is_flat(part.arguments)
    if type(part) is ToolResult:
        is_named = type(part.call_id) is str and (part.name is None or type(part.name) is str)
        return is_named and type(part.is_error) is bool and _is_scalar(part.content)
    if type(part) is Thinking:
        told = (part.signature, part.provider, part.id)
        return type(part.text) is str and all(each is None or type(each) is str for each in told)
    if type(part) is Envelope:
        return type(part.format) is str and type(part.body) is str
    return False


def _is_flat(mapping: Mapping[str, Any], depth: int = 2) -> bool:
    """Tell whether a mapping is frozen and contains only scalars, or a few levels of them, so it is not too deep."""
    if mapping is EMPTY:
        return True
    if type(mapping) is not FrozenDict:
        return False
    for key, value in mapping.items():
        if type(key) is not str:
            return False
        if not _is_scalar(value) and not (depth and type(value) is FrozenDict and _is_flat(value, depth - 1)):
            return False
    return True


def _is_scalar(value: object) -> bool:
    """Tell whether a value is a scalar that comes back unchanged. Numbers have to be finite, and fit into 64 bits."""
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**63)  # type: ignore[operator]  # as was asked
    if kind is float:
        return isfinite(value)  # type: ignore[arg-type]  # as was asked
    return kind is str or kind is bool or value is None


def decode_message(raw: bytes) -> Message:
    try:
        return _message_decoder.decode(raw)
    except DECODE_ERRORS:  # it has fields that this release does not know, or it is damaged
        return decode(Message, raw)


def decode_messages(raws: Sequence[bytes]) -> list[Message]:
    """Return many messages from their bytes, as quickly as possible."""
    try:
        return list(map(_message_decoder.decode, raws))
    except DECODE_ERRORS:  # one of them needs the slower way, which also names the fault
        return list(map(decode_message, raws))
