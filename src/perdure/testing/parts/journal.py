"""The common parts of the journal's contracts: the type of a store with a journal, and a few short cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Span, Transcript
from perdure.protocols import NOTHING_WRITTEN, Claim, Entry, Journal, Key, SessionStore, StoredAt

Place = tuple[int | str, int]


class JournaledStore(Journal, SessionStore, Protocol):
    """A store whose runs are on record."""

    async def save(
        self,
        session: AgentSession,
        *,
        claim: Claim | None = None,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
    ) -> AgentSession: ...


def entries(*kinds: str, run: str | None = "run-1") -> list[Entry]:
    return [Entry(kind, {"said": kind}, run) for kind in kinds]


def messages(*texts: str) -> list[Message]:
    return [Message.assistant(text) for text in texts]


async def kinds(store: JournaledStore, session_id: str, **options: Any) -> list[str]:
    """Return the kinds of a session's entries, in order."""
    return [entry.kind for entry in await store.read(session_id, **options)]


async def spoken(store: JournaledStore, place: StoredAt, *, count: int = 1) -> list[str]:
    """Return the texts of a log from a place on."""
    found = await store.messages(place.log, place.position, place.position + count)
    return [message.text for message in found]


def places(transcript: Transcript) -> list[Place]:
    """Return the log and position of each message that a stored transcript shows."""
    return [place for span in transcript.spans() for place in _places(span)]


def _places(span: Span) -> list[Place]:
    assert span.tape.ref is not None, "the message is not in a log"
    return [(span.tape.ref.key, position) for position in range(span.start, span.stop)]
