"""The entries that a transcript of the Claude Agent SDK already has. An entry that is sent again is kept once.

An entry is known by its uuid. One without a uuid is known by its content, and by its time or else its place among the
others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from perdure.adapters.foreign import MARK
from perdure.adapters.forms.claude import FORM
from perdure.errors import SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.message import Envelope, Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.model.value import JSON, thawed
from perdure.stores.cache import LRU
from perdure.stores.store import Store

_MOST_SEEN = 128
"""The number of sessions whose history an adapter remembers: as many as a store has at hand."""
_REDACTED = "redacted"
_OWN_ID = MARK + MARK
"""The hole of an envelope that stands for the message's own id."""

Mark = str | bytes
"""The identity of an entry: its uuid, or a hash of its content."""


class Made(NamedTuple):
    """An entry, the message that keeps it, and its identity: as it is, and after a redaction."""

    entry: JSON
    message: Message
    mark: Mark
    mark_if_redacted: bytes | None

    @classmethod
    def of(cls, entry: JSON) -> Made:
        message, mark = FORM.message(entry), _mark_of_entry(entry)
        return cls(entry, message, mark, None if isinstance(mark, str) else _mark_of_frame(message))

    @property
    def has_uuid(self) -> bool:
        return isinstance(self.mark, str)

    @property
    def has_time(self) -> bool:
        return isinstance(self.entry, dict) and isinstance(self.entry.get("timestamp"), str)


class History:
    """The entries that a transcript has had, in the order in which they came."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._places: dict[Mark, int] = {}
        self.is_shown_to_end = True
        self.at: int | None = None
        """The place where the last append ended that only repeated known entries. None if that was the end."""

    def add(self, messages: Iterable[Message]) -> None:
        for message in messages:
            mark = _mark_of(message)
            self._places.setdefault(mark, len(self._marks))
            if isinstance(mark, bytes):  # an entry that was redacted may have had a uuid
                self._places.setdefault(FORM.id_of(message), len(self._marks))
            self._marks.append(mark)

    def new_among(self, given: Sequence[Made]) -> tuple[list[Made], int | None]:
        """Return the new entries of an append, and the place in this history where it ends, or None for the end.

        An entry without a uuid is old if it is there between the same two entries that have one, or with the same time.
        Between two old entries it is old wherever it is, since it may have been added late.
        """
        last_old = max((at for at, each in enumerate(given) if each.has_uuid and each.mark in self._places), default=-1)
        at, new, met, follows_new = self._start(given), list[Made](), set[Mark](), False
        for number, each in enumerate(given):
            place = self._place_of(each, at)
            if place is not None:
                at, follows_new = place + 1, False
            elif each.has_uuid:
                at, follows_new = len(self._marks), True
                new += [] if each.mark in met else [each]
                met.add(each.mark)
            elif number > last_old or follows_new or self._anywhere(each) is None:
                new.append(each)
        return new, at if at < len(self._marks) else None

    def _start(self, given: Sequence[Made]) -> int:
        """Return the place where an append begins: the end of the last one, or of a match at the end of the history."""
        end = len(self._marks)
        if self.at is not None:
            return self.at
        first = next((at for at, each in enumerate(given) if each.has_uuid), len(given))
        for count in range(min(first, end) if self.is_shown_to_end else 0, 0, -1):
            if all(map(_is, given[:count], self._marks[end - count :])):
                return end - count
        return end

    def _place_of(self, wanted: Made, at: int) -> int | None:
        """Return the place of an entry. One without a uuid is searched from `at` up to the next entry with a uuid."""
        if wanted.has_uuid:
            return self._places.get(wanted.mark)
        for place in range(at, len(self._marks)):
            if _is(wanted, self._marks[place]):
                return place
            if isinstance(self._marks[place], str):
                break
        return self._anywhere(wanted) if wanted.has_time else None

    def _anywhere(self, wanted: Made) -> int | None:
        found = self._places.get(wanted.mark)
        if found is None and wanted.mark_if_redacted is not None:
            return self._places.get(wanted.mark_if_redacted)
        return found


class Histories:
    """The histories of sessions. To bring one up to date costs what was appended since."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: LRU[SessionId, tuple[Transcript, History]] = LRU(_MOST_SEEN)

    async def of(self, session: AgentSession) -> History:
        view = session.state.transcript
        before, history = self._known.recall(session.id) or (view[:0], History())
        if not before or not view.extends(before):
            history = await self._read(session)
        elif len(view) > len(before):
            history.add(view[len(before) :])
            history.is_shown_to_end = True
        self._known.keep(session.id, (view, history))
        return history

    async def _read(self, session: AgentSession) -> History:
        """Return the history of a session: what it shows from other logs, then everything in its own log."""
        history, spans = History(), [*session.state.transcript.spans()]
        if not session.version:
            return history
        log, end = await self._store.log_of(session.id)
        own = [span for span in spans if span.tape.ref == log]
        for span in spans:
            if span.tape.ref != log:
                history.add(span.messages())
        pieces = [(span.start, span.messages()) for span in own]
        for start, stop in _gaps(sorted((span.start, span.stop) for span in own), end):
            with suppress(SessionNotFound):  # these messages have been erased
                pieces.append((start, [*await self._store.messages(log, start, stop)]))
        for _, messages in sorted(pieces, key=lambda piece: piece[0]):
            history.add(messages)
        history.is_shown_to_end = not end or (bool(own) and spans[-1] is own[-1] and own[-1].stop == end)
        return history


def _is(given: Made, mark: Mark) -> bool:
    return mark in (given.mark, given.mark_if_redacted)


def _mark_of(message: Message) -> Mark:
    """Return the identity of a message's entry."""
    envelope = message.parts[-1] if message.parts else None
    is_kept = isinstance(envelope, Envelope) and envelope.format == FORM.name
    if is_kept and _OWN_ID in str(envelope.body):  # type: ignore[union-attr]  # is_kept says that there is one
        return FORM.id_of(message)
    if _REDACTED in message.metadata:
        return _mark_of_frame(message) or FORM.id_of(message)
    return _mark_of_entry(FORM.items(message)[0]) if is_kept else FORM.id_of(message)


def _mark_of_entry(entry: JSON) -> Mark:
    uuid = entry.get("uuid") if isinstance(entry, dict) else None
    return uuid if isinstance(uuid, str) and uuid else _hash(entry)


def _mark_of_frame(message: Message) -> bytes | None:
    """Return the identity of an entry without a uuid after its content has been redacted."""
    frame: Mapping[str, Any] = FORM.frame(message)
    # In a list, so that it differs from the hash of an entry with the same content.
    return _hash([thawed(frame)]) if frame else None


def _hash(value: JSON) -> bytes:
    return blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _gaps(stretches: Iterable[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield what is between stretches that are in order, up to an end."""
    at = 0
    for start, stop in (*stretches, (end, end)):
        if at < start:
            yield at, start
        at = max(at, stop)
