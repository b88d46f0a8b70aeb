"""Events of Google ADK, made of messages and remembered. Reading one from JSON takes four times as long as a copy."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from google.adk.events import Event, EventActions
from google.adk.events.event import NodeInfo

from perdure.adapters.forms.adk import FORM
from perdure.adapters.moulds import Mould
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.value import JSON

MOST = 50_000
"""The number of events remembered, of all sessions together. Each takes 1 KB plus what is said in it."""

_Entry = tuple[Message, list[Mould[Event]]]
_Kept = dict[int, _Entry]
"""Moulds by the identity of their messages. The message is kept with them: no other object can get its identity."""


class RememberedEvents:
    """The events of the sessions that were read last. Threads may share it; what two build at once is built twice."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: OrderedDict[SessionId, _Kept] = OrderedDict()
        self._changing = threading.Lock()

    def of(self, session: AgentSession, messages: Sequence[Message]) -> list[Event]:
        """Return new events for some of a session's messages, for a caller that may change them."""
        with _nothing_collected():
            known = self._kept.get(session.id, {})
            shown = [known.get(id(message)) or _moulded(session, message) for message in messages]
            # If all is asked for, what the session does not show any more is dropped.
            is_whole = len(shown) == len(session.state.messages)
            self._keep(session.id, ({} if is_whole else known) | {id(entry[0]): entry for entry in shown})
            return [mould.copy() for _, moulds in shown for mould in moulds]

    def forget(self, session_id: SessionId) -> None:
        with self._changing:
            self._kept.pop(session_id, None)

    def _keep(self, session_id: SessionId, kept: _Kept) -> None:
        with self._changing:
            self._kept[session_id] = kept
            self._kept.move_to_end(session_id)
            count = sum(map(len, self._kept.values()))
            while count > self._most:
                count -= len(self._kept.popitem(last=False)[1])


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Pause the garbage collector. It would search the whole heap, and all that is made here is in use.

    An event is 20 objects. At 10,000 events collections took three quarters of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def message_of(event: Event, message_id: str | None = None) -> Message:
    """Return the message that keeps an event. Empty fields are left out: they come back when the event is read."""
    item: dict[str, Any] = event.model_dump(mode="json", exclude_none=True)
    for name, empty in _EMPTY.items():
        given = item.get(name, {})
        item[name] = {key: value for key, value in given.items() if key not in empty or value != empty[key]}
        if not item[name]:
            del item[name]
    return FORM.message(item, message_id=message_id)


_EMPTY: dict[str, dict[str, Any]] = {
    "actions": {name: {} for name, field in EventActions.model_fields.items() if field.default_factory is dict},
    "node_info": {"path": NodeInfo().path},
}


def after(session: AgentSession, messages: Sequence[Message], timestamp: float) -> Sequence[Message]:
    """Return those messages whose events are not older than a time."""
    return [message for message in messages if _time_of(session, message) >= timestamp]


def is_kept(messages: Iterable[Message], event: Event) -> bool:
    """Tell whether one of these messages, which have the event's id, keeps an event that equals it."""
    return any(Event.model_validate(item) == event for message in messages for item in FORM.items(message))


def _moulded(session: AgentSession, message: Message) -> _Entry:
    items = [_complete(session, message, item) for item in FORM.items(message)]
    return message, [Mould(Event.model_validate(item)) for item in items]


def _complete(session: AgentSession, message: Message, item: JSON) -> JSON:
    """Return an item with the fields that ADK would otherwise invent at each read. perdure's own messages lack them."""
    if "timestamp" in item:
        return item
    # ADK quotes to a model what other agents have said, but this was said in place of the session's own agent.
    own = {"author": _agent_before(session, message)} if message.role == "assistant" else {}
    return {"invocation_id": message.id, **item, **own, "timestamp": _time_of(session, message)}


def _agent_before(session: AgentSession, message: Message) -> str:
    """Return the agent that spoke last before a message, or `model` if none has."""
    is_before, author = False, None
    for each in reversed(session.state.transcript):
        if is_before and each.role == "assistant":
            author = FORM.frame(each).get("author")
        if isinstance(author, str):
            return author
        is_before = is_before or each is message
    return "model"


def _time_of(session: AgentSession, message: Message) -> float:
    """Return the time of a message's event. A message of perdure's own has the time that its id tells."""
    found = FORM.frame(message).get("timestamp")
    if isinstance(found, int | float):
        return found
    made = _time_in(message.id)
    return session.info.created_at.timestamp() if made is None else made


def _time_in(message_id: str) -> float | None:
    """Return the time that a UUIDv7 begins with, or None for any other id."""
    digits = message_id.replace("-", "")
    # The thirteenth digit of a UUID is its version.
    if len(digits) != 32 or digits[12] != "7":
        return None
    try:
        # A UUIDv7 begins with 48 bits of milliseconds.
        return int(digits[:12], 16) / 1000
    except ValueError:
        return None
