"""The normal form of a session's record as a document: each message is in it once, and is named elsewhere.

Documents that repeat messages, as older releases wrote them, are read too. An event of a kind that this release does
not know is kept in the form in which the release that knows it writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perdure.errors import InvalidData
from perdure.model.loop_events import KINDS, UNTOLD, LoopEvent, shared_fields

UNKNOWN = "unknown_event"
NAMED = "$message"
"""The only key of an object in place of a message that is elsewhere in the document. Its value is the message's id."""


def with_messages_once(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a record in which a repeated message is named by its id."""
    known: dict[str, Any] = {}

    def named(message: Any) -> Any:
        first = known.setdefault(message["id"], message)
        # Another message under the same id stays whole, so that nothing is lost.
        return {NAMED: message["id"]} if first is not message and first == message else message

    return _with_events(_changed(document, named), _as_its_release_writes)


def with_messages_whole(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a record with every message in its place."""
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

    _changed(document, note)  # all of them first: a document may name a message before it has it
    return _with_events(_changed(document, whole), _as_unknown)


def _changed(document: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a record's document with every message changed, one after the other."""
    loops = document.get("loops")
    if not isinstance(loops, list):
        return dict(document)
    return {**document, "loops": [_changed_loop(loop, change) for loop in loops]}


def _with_events(document: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    loops = document.get("loops")
    if not isinstance(loops, list):
        return dict(document)
    changed = [_with_list(loop, "events", change) if isinstance(loop, Mapping) else loop for loop in loops]
    return {**document, "loops": changed}


def _as_unknown(event: Any) -> Any:
    """Return an event of an unknown kind as an `UnknownEvent`; any other as it is."""
    if not isinstance(event, Mapping) or not isinstance(event.get("type"), str) or event["type"] in KINDS:
        return event
    shared = shared_fields(event)
    body = {name: part for name, part in event.items() if name != "type" and name not in shared}
    return {"at": UNTOLD, **shared, "type": UNKNOWN, "kind": event["type"], "body": body}


def _as_its_release_writes(event: Any) -> Any:
    """Return an `UnknownEvent` with its own kind and fields, unless it would not be read back as the same."""
    if not isinstance(event, Mapping) or event.get("type") != UNKNOWN or event["kind"] in KINDS:
        return event
    body = event.get("body")
    if not isinstance(body, Mapping) or {"type", *LoopEvent.__struct_fields__} & set(body):
        return event
    shared = {name: event[name] for name in LoopEvent.__struct_fields__ if name in event}
    return {"type": event["kind"], **shared, **body}


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
