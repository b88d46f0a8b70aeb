"""LangGraph's values as JSON: the msgpack of its serializer, in a form that can be read and redacted.

This is a stored format, an object with one of three keys:

| key | what is under it |
|---|---|
| `json` | the value itself |
| `objects` | JSON in which an object of one key that begins with `$` is what JSON cannot express |
| `data` | anything else that a serializer writes, such as an encrypted text, as base64; its `type` is beside it |

| key in `objects` | what it stands for |
|---|---|
| `$` and a number | an object that LangGraph writes under this code: mostly module, name and arguments |
| `$map` | pairs: an object with keys that are not texts, or with one that begins with `$` |
| `$bytes` | bytes, as base64 |
| `$float` | a number that is not finite |
"""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec
import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from perdure.adapters.foreign import is_plain
from perdure.model.value import JSON

_READABLE = "msgpack"
_ANY_KEY = ormsgpack.OPT_NON_STR_KEYS
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
PLAIN = JsonPlusSerializer()
"""The serializer of what is never encrypted: a checkpoint's metadata, by which lists are filtered."""


def kept(value: Any, serde: SerializerProtocol) -> dict[str, JSON]:
    """Return a value as it is stored. It is readable unless its serializer writes what only it can read."""
    kind, raw = serde.dumps_typed(value)
    told = _told_bytes(raw) if kind == _READABLE else None
    return {"type": kind, "data": base64.b64encode(raw).decode()} if told is None else told


def value_of(stored: Any, serde: SerializerProtocol) -> Any:
    """Return the value that was stored."""
    if "json" in stored:
        # A copy, since the graph may change it.
        return _decode(_encode(stored["json"]))
    if "objects" in stored:
        return serde.loads_typed((_READABLE, _pack(_read(stored["objects"]))))
    return serde.loads_typed((stored["type"], base64.b64decode(stored["data"])))


def is_readable(serde: SerializerProtocol) -> bool:
    """Tell whether a serializer writes what can be shown as JSON. One that encrypts does not."""
    return serde.dumps_typed("")[0] == _READABLE


def plain_data(value: Any) -> JSON | None:
    """Return a value as the JSON that LangGraph's serializer makes of it, or None if it is more than JSON."""
    try:
        told = _told_bytes(PLAIN.dumps_typed(value)[1])
    except (TypeError, ValueError):  # ormsgpack's errors are of these classes
        return None
    return None if told is None else told.get("json")


def _told_bytes(raw: bytes) -> dict[str, JSON] | None:
    """Return msgpack in its stored form, or None if that would not give the same bytes back."""
    objects = _Objects()
    found = ormsgpack.unpackb(raw, ext_hook=objects.met, option=_ANY_KEY)
    if not objects.were_met and is_plain(found):
        return {"json": found}
    told = _told(found)
    return {"objects": told} if is_plain(told) and _says_again(told, raw) else None


def _says_again(told: JSON, raw: bytes) -> bool:
    try:
        return _pack(_read(told)) == raw
    except (TypeError, ValueError, LookupError):
        return False


class _Object:
    """A value that msgpack has under a code of LangGraph's."""

    __slots__ = ("body", "code")

    def __init__(self, code: int, body: Any) -> None:
        self.code = code
        self.body = body


class _Objects:
    """A reader that takes the objects in msgpack apart instead of making them."""

    def __init__(self) -> None:
        self.were_met = False

    def met(self, code: int, raw: bytes) -> _Object:
        self.were_met = True
        return _Object(code, ormsgpack.unpackb(raw, ext_hook=self.met, option=_ANY_KEY))


def _told(value: Any) -> JSON:
    kind = type(value)
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _told(each) for key, each in value.items()}
        return {"$map": [[_told(key), _told(each)] for key, each in value.items()]}
    if kind is list or kind is tuple:
        return [_told(each) for each in value]
    if kind is _Object:
        return {f"${value.code}": _told(value.body)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is float and not math.isfinite(value):
        return {"$float": repr(value)}
    told: JSON = value
    return told


def _read(told: Any) -> Any:
    if isinstance(told, dict):
        tag = next(iter(told)) if len(told) == 1 else ""
        if tag.startswith("$"):
            return _object(tag[1:], told[tag])
        return {key: _read(each) for key, each in told.items()}
    return [_read(each) for each in told] if isinstance(told, list) else told


def _object(tag: str, body: Any) -> Any:
    if tag == "map":
        return {_hashable(_read(key)): _read(each) for key, each in body}
    if tag == "bytes":
        return base64.b64decode(body)
    return float(body) if tag == "float" else ormsgpack.Ext(int(tag), _pack(_read(body)))


def _hashable(key: Any) -> Any:
    # A key that was a tuple has become a list in JSON.
    return tuple(key) if isinstance(key, list) else key


def _pack(value: Any) -> bytes:
    return ormsgpack.packb(value, option=_ANY_KEY)
