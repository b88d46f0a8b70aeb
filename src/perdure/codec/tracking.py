"""Relief for Python's garbage collector: it need not visit the JSON inside of messages that were read in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from perdure.model.message import Envelope, Message, Opaque, Text, ToolCall, ToolResult, UnknownPart
from perdure.model.value import EMPTY, FrozenDict, FrozenList

_FROZEN = (FrozenDict, FrozenList)
_JSON_FIELDS: dict[type, tuple[str, ...]] = {
    ToolCall: ("arguments", "opaque"),
    ToolResult: ("content",),
    Opaque: ("body",),
    Envelope: ("body",),
    UnknownPart: ("body",),
}


def untrack(messages: Iterable[Message]) -> None:
    """Take the frozen JSON of decoded messages out of the garbage collector's lists.

    Python tracks every instance of a subclass of dict or list. Whenever a quarter of what it tracks is new, it visits
    everything in the process, and all threads wait. That takes 20 to 150 ms, several times for one long session.
    Decoded JSON that is frozen cannot be part of a cycle, so there is nothing to collect.
    """
    forget = _forget()
    last: Any = EMPTY
    for message in messages:
        if message.metadata is not last:  # the messages of one run share it
            last = message.metadata
            _untrack(last, forget)
        for part in message.parts:
            kind = type(part)
            if kind is not Text:
                for field in _JSON_FIELDS.get(kind, ()):
                    _untrack(getattr(part, field), forget)


def _untrack(value: Any, forget: Callable[[Any], object]) -> None:
    if type(value) not in _FROZEN or value is EMPTY:
        return
    forget(value)
    for item in value.values() if type(value) is FrozenDict else value:
        if type(item) in _FROZEN:
            _untrack(item, forget)


@cache
def _forget() -> Callable[[Any], object]:
    """Return the function that CPython itself calls for a plain dict of texts and numbers."""
    try:
        from ctypes import py_object, pythonapi  # here, since it takes 5 ms, and most processes read no long session

        untrack = pythonapi.PyObject_GC_UnTrack
    except (ImportError, AttributeError):  # another Python, which has its own collector
        return bool
    untrack.argtypes, untrack.restype = (py_object,), None
    return untrack
