"""The normal form of a session's record as a document: each message stands in it once, and is named elsewhere.

A document in which messages stand again and again, as older releases wrote them, reads just as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perdure.errors import InvalidData

NAMED = "$message"
"""The one key of what stands for a message that stands elsewhere in the document: its value is the message's id."""


def with_messages_once(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a record in which a message that was there before is named by its id."""
    known: dict[str, Any] = {}

    def named(message: Any) -> Any:
        first = known.setdefault(message["id"], message)
        return {NAMED: message["id"]} if first is not message and first == message else message

    return _changed(document, named)


def with_messages_whole(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a record with every message in its place."""
    known: dict[str, Any] = {}

    def note(message: Any) -> Any:
        if isinstance(message, Mapping) and isinstance(message.get("id"), str):
            known.setdefault(message["id"], message)
        return message

    def whole(message: Any) -> Any:
        if not isinstance(message, Mapping) or NAMED not in message:
            return message
        message_id = message[NAMED]
        if not isinstance(message_id, str) or message_id not in known:
            raise InvalidData("$.loops", f"message {message_id!r} is named, and stands nowhere in the record")
        return known[message_id]

    _changed(document, note)
    return _changed(document, whole)


def _changed(document: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A record's document with every message changed, in the order in which they stand."""
    loops = document.get("loops")
    if not isinstance(loops, list):
        return dict(document)
    return {**document, "loops": [_changed_loop(loop, change) for loop in loops]}


def _changed_loop(loop: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(loop, Mapping):
        return loop
    changed = _with_list(loop, "messages", change)
    return _with_list(changed, "events", lambda event: _changed_event(event, change))


def _changed_event(event: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(event, Mapping):
        return event
    if event.get("type") == "message_end" and "message" in event:
        return {**event, "message": change(event["message"])}
    return _with_list(event, "messages", change) if event.get("type") == "agent_end" else event


def _with_list(fields: Mapping[str, Any], name: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    found: Iterable[Any] | None = fields.get(name)
    return {**fields, name: list(map(change, found))} if isinstance(found, list) else dict(fields)
