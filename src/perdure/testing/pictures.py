"""Pictures: everything that a store shows of a session, as plain data. Equal pictures show every reader the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.errors import PerdureError
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.testing.samples import seen

Picture = dict[str, Any]
KEYS = tuple(f"key-{number}" for number in range(8))
"""The idempotency keys that the shapes use."""


async def pictures(store: Any, session_ids: Iterable[str]) -> dict[str, Picture | None]:
    """Return a picture of each session, or None for a session that is not there."""
    return {session_id: await picture(store, session_id) for session_id in session_ids}


async def picture(store: Any, session_id: str) -> Picture | None:
    """Return a session's view and header, its log, its record, its inbox, its timers, and whether a run holds it."""
    store.evict(session_id)  # what is at hand says nothing of what is kept
    session = await store.load(session_id)
    if session is None:
        return None
    entries = await store.read(session_id)
    log, end = await store.log_of(session_id)
    return {
        "version": session.version,
        "shown": [message.text for message in session.state.messages],
        "digest": _digest(msgspec.json.encode(_timeless(session).to_dict())),
        "said": await _said(store, log, end),
        "record": [entry.kind for entry in entries],
        # A redaction that was cut off is finished by the next to open the store, which notes its own time.
        "entries": _digest(msgspec.json.encode([entry for entry in entries if entry.kind != "redacted"])),
        "inbox": [entry.kind for entry in await store.read(session_id, inbox=True)],
        "timers": [[timer.name, timer.due] for timer in await store.timers(session_id)],
        "keys": [name for name in KEYS if await store.find_key(session_id, name) is not None],
        "versions": [head.info.version for head in await store.versions(session_id, limit=200)],
        "held": await store.is_claimed(session_id) or await store.is_interrupted(session_id),
    }


def _timeless(session: AgentSession) -> AgentSession:
    return replace(seen(session), info=replace(session.info, updated_at=session.info.created_at))


async def _said(store: Any, log: LogRef, end: int) -> list[str]:
    """Return the texts of a log. If some of them were forgotten, read each one separately."""
    try:
        return [message.text for message in await store.messages(log, 0, end)]
    except PerdureError:
        return [await _said_at(store, log, place) for place in range(end)]


async def _said_at(store: Any, log: LogRef, place: int) -> str:
    try:
        (message,) = await store.messages(log, place, place + 1)
    except PerdureError as error:
        # The error is part of the picture: what was forgotten before a power cut must stay forgotten after it.
        return type(error).__name__
    return str(message.text)


def _digest(raw: bytes) -> str:
    # 64 bits tell two pictures apart, and keep the marks short that carry them.
    return hashlib.sha256(raw).hexdigest()[:16]
