"""Tell subscribers that messages were redacted: the store has put it on record, and emits nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime

from perdure.errors import PerdureError
from perdure.model.loop_events import Redacted
from perdure.model.message import Message
from perdure.protocols import EventHandler, Journal
from perdure.run_journal import event_of

_log = logging.getLogger("perdure.sessions")

LAST_LOOKED_AT = 8
"""The number of entries that are read: others may have written behind the one that tells of the redaction."""


async def tell_of_redaction(
    journal: Journal, events: EventHandler, session_ids: Iterable[str], since: datetime
) -> None:
    """Emit the redactions on record in these sessions since a time. A failure is only logged: the redaction is done."""
    for session_id in dict.fromkeys(session_ids):
        try:
            entries = await journal.read(session_id, last=LAST_LOOKED_AT)
            told = [event_of(entry, session_id, "", _unread) for entry in entries if entry.kind == "redacted"]
        except PerdureError as error:
            _log.warning("session %s was redacted, and its subscribers were not told: %s", session_id, error)
            continue
        for event in told:
            if isinstance(event, Redacted) and event.at >= since:
                await events.emit(event)


def _unread(message_id: str) -> Message:
    return Message("user", (), message_id)
