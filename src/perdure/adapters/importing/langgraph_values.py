"""LangGraph's msgpack as the JSON that its adapter stores, without making an object of any class.

`adapters/langgraph_values.py` says what that JSON looks like. Here it is made without LangGraph, and nothing in a file
decides which class is imported.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from perdure.adapters.foreign import is_plain
from perdure.adapters.importing.sources import read_json
from perdure.errors import InvalidData
from perdure.model.value import JSON

_PYDANTIC = 5
"""The code of an object that is given by its module, its name, its data and a method."""
_MESSAGES = "langchain_core.messages."
_pack = msgspec.msgpack.Encoder().encode


class Made(NamedTuple):
    """The data that LangGraph would make an object of: a code, and a body."""

    code: int
    body: Any


def read(kind: Any, raw: Any, where: str) -> Any:
    """Return a value that LangGraph has serialized. Objects in it are taken apart, and not made."""
    if kind == "null":
        return None
    if kind == "bytes" and isinstance(raw, bytes):
        return raw
    if kind == "json":
        return read_json(raw, where)
    if kind != "msgpack" or not isinstance(raw, bytes):
        problem = f"this was written as {kind!r}, which only the program that wrote it can read: it may be encrypted"
        raise InvalidData(where, f"{problem}. Remove the row, or copy the thread with that program into a plain file")
    try:
        return _unpacked(raw)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidData(where, f"this is not msgpack: {error}. Remove the row and import again") from None


def kept(value: Any) -> dict[str, JSON]:
    """Return a value as the adapter stores it: as JSON, or else as bytes that LangGraph reads."""
    if _has_legacy(value):
        # LangGraph makes objects of these only when it reads them from JSON.
        return {"type": "json", "data": base64.b64encode(json.dumps(value).encode()).decode()}
    if not _has_made(value) and is_plain(value):
        return {"json": value}
    told = _told(value)
    if is_plain(told):
        return {"objects": told}
    return {"type": "msgpack", "data": base64.b64encode(_pack(_packable(value))).decode()}


def message_in(value: Any) -> dict[str, Any] | None:
    """Return the item of a LangChain message for its form, or None if the value is something else."""
    if isinstance(value, Made) and value.code == _PYDANTIC and isinstance(value.body, list) and len(value.body) > 2:
        module, name, data = value.body[:3]
        is_message = isinstance(module, str) and module.startswith(_MESSAGES)
    elif isinstance(value, dict) and _is_legacy(value):
        name, data, is_message = value["id"][-1], value["kwargs"], "messages" in value["id"]
    else:
        return None
    if not (is_message and isinstance(data, dict) and isinstance(name, str)):
        return None
    kind = data.get("type", _KINDS.get(name))
    told = _told(data)
    is_own = kind in _KINDS.values() and _KINDS.get(name) == kind
    return {"type": kind, "data": told} if is_own and is_plain(told) and not _has_made(data) else None


_KINDS = {
    **{f"{name}Message": name.lower() for name in ("Human", "System", "Tool", "Function", "Chat", "Remove")},
    "AIMessage": "ai",
    **{f"{name}MessageChunk": f"{name}MessageChunk" for name in ("AI", "Human", "System", "Tool", "Function", "Chat")},
}
"""LangChain's own classes of messages, with the `type` of each."""


def _unpacked(raw: Any) -> Any:
    return msgspec.msgpack.decode(bytes(raw), ext_hook=lambda code, body: Made(code, _unpacked(body)))


def _told(value: Any) -> JSON:
    kind = type(value)
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _told(each) for key, each in value.items()}
        return {"$map": [[_told(key), _told(each)] for key, each in value.items()]}
    if kind is Made:
        return {f"${value.code}": _told(value.body)}
    if kind is list or kind is tuple:
        return [_told(each) for each in value]
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is float and not math.isfinite(value):
        return {"$float": repr(value)}
    told: JSON = value
    return told


def _packable(value: Any) -> Any:
    if isinstance(value, Made):
        return msgspec.msgpack.Ext(value.code, _pack(_packable(value.body)))
    if isinstance(value, dict):
        return {_packable(key): _packable(each) for key, each in value.items()}
    return [_packable(each) for each in value] if isinstance(value, list | tuple) else value


def _inner(value: Any) -> Iterator[Any]:
    """Yield a value and all that is in it."""
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, Made):
            left.append(each.body)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each


def _has_made(value: Any) -> bool:
    return any(isinstance(each, Made | bytes) for each in _inner(value))


def _has_legacy(value: Any) -> bool:
    return any(isinstance(each, dict) and _is_legacy(each) for each in _inner(value))


def _is_legacy(value: dict[Any, Any]) -> bool:
    """Tell whether a value has the form of objects that LangGraph wrote before it had msgpack."""
    return value.get("type") == "constructor" and "lc" in value and isinstance(value.get("id"), list)
