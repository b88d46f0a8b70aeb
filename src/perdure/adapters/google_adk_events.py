"""Events of Google ADK out of messages, remembered: to read one from JSON takes four times as long as to copy it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from google.adk.events import Event

from perdure.adapters.foreign import JSON
from perdure.adapters.forms.adk import FORM
from perdure.adapters.moulds import Mould, mould_of
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession

MOST = 50_000
"""How many events are remembered, of all sessions together. Each takes 7 KB at the most, unless what is said is long."""

_Kept = dict[int, tuple[Message, tuple[Mould, ...]]]
"""Moulds by the identity of their messages. The message is kept with them, so that no other takes its identity."""


class RememberedEvents:
    """The events of the sessions that were read last. Threads may share it: what two build at once is built twice."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: OrderedDict[SessionId, _Kept] = OrderedDict()
        self._changing = threading.Lock()

    def of(self, session: AgentSession, messages: Sequence[Message]) -> list[Event]:
        """Return new events for some of a session's messages, for a caller that may change them."""
        known = self._kept.get(session.id, {})
        shown = [known.get(id(message)) or _moulded(session, message) for message in messages]
        is_whole = len(shown) == len(session.state.messages)
        self._keep(session.id, ({} if is_whole else known) | {id(entry[0]): entry for entry in shown})
        return [mould() for _, moulds in shown for mould in moulds]

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


def after(session: AgentSession, messages: Sequence[Message], timestamp: float) -> Sequence[Message]:
    """Return those messages whose events are not older than a time."""
    return [message for message in messages if _time_of(session, message) >= timestamp]


def is_kept(messages: Iterable[Message], event: Event) -> bool:
    """Return whether one of some messages has an event that equals this one, id and all."""
    same = [message for message in messages if FORM.id_of(message) == event.id]
    return any(Event.model_validate(item) == event for message in same for item in FORM.items(message))


def _moulded(session: AgentSession, message: Message) -> tuple[Message, tuple[Mould, ...]]:
    events = [Event.model_validate(_complete(session, message, item)) for item in FORM.items(message)]
    return message, tuple(mould for event in events if (mould := mould_of(event)) is not None)


def _complete(session: AgentSession, message: Message, item: JSON) -> JSON:
    """Return an item with what ADK would otherwise make up anew with each read; perdure's own messages lack it."""
    if "timestamp" in item:
        return item
    return {"invocation_id": message.id, **item, "timestamp": _time_of(session, message)}


def _time_of(session: AgentSession, message: Message) -> float:
    """Return the time of a message's event; of perdure's own messages when they were made, as their ids tell."""
    found = FORM.frame(message).get("timestamp")
    if isinstance(found, int | float):
        return found
    made = _time_in(message.id)
    return session.info.created_at.timestamp() if made is None else made


def _time_in(message_id: str) -> float | None:
    """Return the time that a UUIDv7 begins with; None for any other id."""
    digits = message_id.replace("-", "")
    if len(digits) != 32 or digits[12] != "7":
        return None
    try:
        return int(digits[:12], 16) / 1000
    except ValueError:
        return None
