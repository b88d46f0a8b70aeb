"""Conversations of Pydantic AI kept by perdure: `store = PerdureConversationStore()`.

A conversation is a session, and an entry is a message with the entry's id. A save is a version, and its metadata has
the record. A fork is a child session that shows the parent's messages where they are. A branch that was left is an
older version, which the record names. An entry's parent is the one before it in the view, and is not stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perdure.adapters.extras import extra

with extra("pydantic-ai"):
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_ai.conversation_store import (
        ConversationConflict,
        ConversationEntry,
        ConversationRecord,
        ConversationStore,
    )
    from pydantic_ai.usage import RunUsage

from perdure.adapters.forms.pydantic import FORM
from perdure.adapters.home import Home
from perdure.adapters.pydantic_ai_messages import read, told
from perdure.errors import ErasedMeanwhile, InvalidData, SessionConflict, SessionNotFound
from perdure.model.ids import SessionId, mark_of
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus
from perdure.model.transcript import Transcript
from perdure.model.value import EMPTY, JSON, thawed
from perdure.protocols import SessionHead, SessionStore
from perdure.sessions.chat import Chat
from perdure.stores.cache import LRU

_NOTE, _SCOPE = "pydantic-ai", "pydantic-ai scope"
_REMEMBERED = 10_000
_PAGE = 200
# The adapter of a list passes its configuration on to what is in it; that of a dataclass cannot have one.
_RECORDS = TypeAdapter(list[ConversationRecord], config=ConfigDict(ser_json_bytes="base64", val_json_bytes="base64"))


class PerdureConversationStore(ConversationStore):
    """A conversation store that keeps conversations of Pydantic AI as sessions.

    `store` is a URL or a store; without one it is the store that the command line uses. An `owner` sees no other's
    conversations. `delete` erases all versions of a conversation, except what its forks show.
    """

    def __init__(self, *, store: str | SessionStore | None = None, owner: str | None = None) -> None:
        self._home = Home("pydantic-ai", store, owner=owner)
        self._tips: LRU[str, _Place] = LRU(_REMEMBERED)
        """The places where the histories of records end. Their readers know only the id of the last entry."""

    def chat(self, conversation_id: str) -> Chat:
        """Return a chat with every perdure verb for a conversation: fork, undo, compact, search, redact and so on."""
        return self._home.chat(self._home.id_of(conversation_id))

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        return await self._home.run(self._record(conversation_id))

    async def read_records(self, *, scope: str | None = None, limit: int | None = None) -> Sequence[ConversationRecord]:
        return await self._home.run(self._records(scope, limit))

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        chain = _chain_to(record.head_id, new_entries)
        items = told([entry.message for entry in chain])
        messages = [FORM.message(item, message_id=entry.id) for entry, item in zip(chain, items, strict=True)]
        written = _Written(record, chain[0].parent_id if chain else record.head_id, messages)
        try:
            await self._home.run(self._write(written, expected_revision))
        except SessionConflict as error:
            raise _conflict(error, record.conversation_id) from error

    async def delete_record(self, conversation_id: str, *, expected_revision: str) -> None:
        try:
            await self._home.run(self._delete(conversation_id, expected_revision))
        except (SessionConflict, SessionNotFound) as error:
            raise _conflict(error, conversation_id) from error

    async def read_history(self, head_id: str | None, *, limit: int | None = None) -> list[ConversationEntry]:
        if head_id is None:
            return []
        return _entries(await self._home.run(self._history(head_id)), limit)

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        return (await self.read_history(entry_id, limit=1))[-1]

    async def _record(self, conversation_id: str) -> ConversationRecord | None:
        session = await self._home.load(self._home.id_of(conversation_id))
        return None if session is None else await self._record_of(session, conversation_id)

    async def _record_of(self, session: AgentSession, conversation_id: str) -> ConversationRecord:
        note = _Note.of(session)
        record = await self._changed(note, session) if note.is_outdated else note.record
        self._remember(record, note, session)
        return dataclasses.replace(record, conversation_id=conversation_id)

    async def _changed(self, note: _Note, session: AgentSession) -> ConversationRecord:
        """Return the record of a session whose last save was by a perdure verb."""
        head_id = _tip(session.state.transcript)
        is_same_head = head_id == note.record.head_id
        record = dataclasses.replace(
            note.record,
            head_id=head_id,
            deferred_tool_requests=note.record.deferred_tool_requests if is_same_head else None,
            revision=note.revision,
            updated_at=session.info.updated_at,
        )
        if note.is_of(session.info):
            return record
        first = session if session.version == 1 else await self._home.load(session.id, 1)
        return dataclasses.replace(
            record,
            usage=record.usage if is_same_head else RunUsage(),
            forked_from=note.record.conversation_id or None,
            forked_at=None if first is None else _tip(first.state.transcript),
            branches=[],
        )

    async def _records(self, scope: str | None, limit: int | None) -> list[ConversationRecord]:
        found: list[ConversationRecord] = []
        narrowed = {} if scope is None else {_SCOPE: _mark(scope)}
        after: str | None = None
        while limit is None or len(found) < limit:
            most = _PAGE if limit is None else min(_PAGE, limit - len(found))
            page = await self._home.store.list(
                agent=self._home.agent.name,
                owner=self._home.owner,
                metadata=narrowed,
                order="updated",
                limit=most,
                after=after,
            )
            for head in (await self._home.store.heads([info.id for info in page])).values():
                found += await self._listed(head)
            if page.next is None:
                break
            after = page.next
        return sorted(found, key=lambda record: record.updated_at, reverse=True)

    async def _listed(self, head: SessionHead) -> list[ConversationRecord]:
        """Return the record in a head. The session is read only if its last save was by a perdure verb."""
        note = _Note(head.info, head.metadata)
        if not note.is_outdated:
            return [note.record]
        session = await self._home.load(head.info.id)
        return [] if session is None else [await self._record_of(session, self._conversation_of(session, note))]

    def _conversation_of(self, session: AgentSession, note: _Note) -> str:
        """Return the id of a conversation. A fork that perdure has made has the id that it got there."""
        if note.is_of(session.info):
            return note.record.conversation_id
        return session.id if self._home.owner is None else session.id.removeprefix(mark_of(self._home.owner))

    async def _write(self, written: _Written, expected_revision: str | None) -> None:
        while True:
            try:
                return await self._write_once(written, expected_revision)
            except ErasedMeanwhile:  # a fork must be made of what is left
                continue

    async def _write_once(self, written: _Written, expected_revision: str | None) -> None:
        # Read first: the store then refuses a fork of what is erased from now on.
        record, erasures = written.record, await self._home.store.erasures()
        session_id = self._home.id_of(record.conversation_id)
        session = await self._home.load(session_id)
        if (None if session is None else _Note.of(session).revision) != expected_revision:
            raise ConversationConflict(record.conversation_id)
        source = await self._place(written.base_id, session, record.forked_from)
        if source is None:
            raise ConversationConflict(record.conversation_id)
        view = source.view.append(*written.messages)
        if session is not None:
            await self._home.store.save(_noted(session, view, record))
            return
        made = self._home.new(session_id)
        if source.session is not None:
            made = source.session.forked(session_id, source.session.state.for_next_execution())
        name = record.conversation_id
        made = _noted(made, view, record).with_name(None if name == session_id else name)
        await self._home.store.create(made, erasures=erasures)

    async def _place(self, tip: str | None, session: AgentSession | None, forked_from: str | None) -> _Source | None:
        """Return the view that ends with an entry, or None if no session has one."""
        parent = None
        if session is None and forked_from is not None:
            parent = await self._home.load(self._home.id_of(forked_from))
        if tip is None:
            return _Source(parent, Transcript())
        for each in (session, parent):
            view = None if each is None else await self._view_to(tip, each)
            if view is not None:
                return _Source(each, view)
        return await self._anywhere(tip)

    async def _anywhere(self, tip: str) -> _Source | None:
        """Return the view that ends with an entry about which only the id may be known."""
        place = self._tips.recall(tip)
        session = None if place is None else await self._own(*place)
        view = None if session is None else _cut_after(session.state.transcript, tip)
        if view is not None:
            return _Source(session, view)
        for found in await self._home.store.find_message(tip, owner=self._home.owner):
            session = await self._own(found.session_id)
            view = None if session is None else await self._view_to(tip, session)
            if view is not None:
                return _Source(session, view)
        return None

    async def _own(self, session_id: SessionId, version: int | None = None) -> AgentSession | None:
        """Return a session if it is a conversation of this owner that is not deleted."""
        session = await self._home.store.load(session_id, version)
        if session is None or session.status is SessionStatus.DELETED:
            return None
        is_own = session.info.agent_name == self._home.agent.name and session.info.owner == self._home.owner
        return session if is_own else None

    async def _view_to(self, tip: str, session: AgentSession) -> Transcript | None:
        """Return the view up to an entry that a session shows now, or showed in a branch that it has left."""
        view = _cut_after(session.state.transcript, tip)
        left = _Note.of(session).left_at
        for version in sorted({*left.values()}, reverse=True) if view is None else ():
            older = await self._home.load(session.id, version)
            view = None if older is None else _cut_after(older.state.transcript, tip)
            if view is not None:
                break
        return view

    async def _history(self, head_id: str) -> Transcript:
        source = await self._anywhere(head_id)
        if source is None:
            raise LookupError(f"Entry {head_id!r} is in no conversation of this store. Load the conversation again.")
        return source.view

    async def _delete(self, conversation_id: str, expected_revision: str) -> None:
        session = await self._home.load(self._home.id_of(conversation_id))
        if session is None or _Note.of(session).revision != expected_revision:
            raise ConversationConflict(conversation_id)
        await self._home.store.delete(session.id, expected=session.info)

    def _remember(self, record: ConversationRecord, note: _Note, session: AgentSession) -> None:
        for tip, version in note.left_at.items():
            self._tips.keep(tip, _Place(session.id, version))
        if record.head_id is not None:
            self._tips.keep(record.head_id, _Place(session.id, session.version))


class _Place(NamedTuple):
    session_id: SessionId
    version: int


class _Source(NamedTuple):
    """A view to continue from, and its session, which is None for a conversation that begins."""

    session: AgentSession | None
    view: Transcript


class _Written(NamedTuple):
    """A record to be written, the entry that the new ones follow, and these as messages."""

    record: ConversationRecord
    base_id: str | None
    messages: Sequence[Message]


class _Note:
    """The metadata about a session's conversation. It is outdated if a perdure verb has saved the session since."""

    def __init__(self, info: AgentSessionInfo, metadata: Mapping[str, Any]) -> None:
        note = metadata.get(_NOTE)
        self._body: Mapping[str, Any] = note if isinstance(note, Mapping) else EMPTY
        self.is_outdated = self._body.get("at") != info.version or not self.is_of(info)
        # A conversation that perdure's own verbs have changed needs a revision for each version too.
        made_up = f"{info.created_at.isoformat()}.{info.version}"
        self.revision: str = made_up if self.is_outdated else self._body["record"]["revision"]

    @classmethod
    def of(cls, session: AgentSession) -> _Note:
        return cls(session.info, session.state.metadata)

    def is_of(self, info: AgentSessionInfo) -> bool:
        """Tell whether the note was written for this session. A fork that perdure has made has its parent's note."""
        return self._body.get("session") == info.id

    @property
    def left_at(self) -> Mapping[str, int]:
        """The last version that showed each branch that was left."""
        left: Mapping[str, int] = self._body.get("left_at", EMPTY)
        return left

    @property
    def record(self) -> ConversationRecord:
        if "record" not in self._body:  # it was cleared, or never there
            return ConversationRecord(conversation_id="", head_id=None)
        return _RECORDS.validate_python([thawed(self._body["record"])])[0]


def _noted(session: AgentSession, view: Transcript, record: ConversationRecord) -> AgentSession:
    """Return the next version of a session, with another view and the record in its metadata."""
    known: dict[str, int] = {**_Note.of(session).left_at} if session.version else {}
    tip = _tip(session.state.transcript) if session.version else None
    if tip is not None:
        known[tip] = session.version
    left_at = {tip: known[tip] for tip in record.branches if tip in known}
    note = {
        "record": _brief(_RECORDS.dump_python([record], mode="json")[0]),
        "session": session.id,
        "at": session.version + 1,
        **({"left_at": left_at} if left_at else {}),
    }
    state = session.state.with_transcript(view).with_metadata(_NOTE, note)
    if record.scope is not None:
        state = state.with_metadata(_SCOPE, _mark(record.scope))
    return session.with_state(state).with_indexed((_SCOPE,))


def _brief(told: dict[str, Any]) -> dict[str, Any]:
    """Return a record without empty fields such as 0 and None, which is what a missing field means."""
    brief = {key: value for key, value in told.items() if value or key == "head_id"}
    return {**brief, "usage": {key: value for key, value in told["usage"].items() if value}}


def _mark(scope: str) -> str:
    """Return the value that lists are narrowed by. A scope itself may be too long for an index."""
    return str(SessionId.of(scope))


def _chain_to(head_id: str | None, entries: Sequence[ConversationEntry]) -> list[ConversationEntry]:
    """Return new entries as the end of a history. Raise InvalidData if one of them does not lead to its head."""
    new = {entry.id: entry for entry in entries}
    chain: list[ConversationEntry] = []
    while head_id is not None and (entry := new.pop(head_id, None)) is not None:
        chain.append(entry)
        head_id = entry.parent_id
    if new:
        problem = (
            f"entry {next(iter(new))!r} is not in the history that the record ends with; write each branch by itself"
        )
        raise InvalidData("$.new_entries", problem)
    return chain[::-1]


def _entries(view: Transcript, limit: int | None) -> list[ConversationEntry]:
    """Return the last entries of a view."""
    # One more than asked for: its id is the parent of the first.
    items = list(_items(view if limit is None else view[max(0, len(view) - limit - 1) :]))
    parents = [None, *(name for name, _ in items)]
    start = 0 if limit is None else max(0, len(items) - limit)
    messages = read([item for _, item in items[start:]])
    return [
        ConversationEntry(id=name, parent_id=parent_id, message=message)
        for (name, _), parent_id, message in zip(items[start:], parents[start:], messages, strict=False)
    ]


def _items(view: Sequence[Message]) -> Iterator[tuple[str, JSON]]:
    """Yield each entry's id and item. A message of perdure's own may be several entries: the last has its id."""
    for message in view:
        name = FORM.id_of(message)
        *before, last = FORM.items(message)
        yield from ((f"{name}.{place}", item) for place, item in enumerate(before))
        yield name, last


def _tip(view: Transcript) -> str | None:
    return FORM.id_of(view[-1]) if view else None


def _cut_after(view: Transcript, tip: str) -> Transcript | None:
    """Return a view up to an entry, or None if it does not have the entry."""
    if _tip(view) == tip:
        return view
    for place, message in enumerate(view):
        name = FORM.id_of(message)
        if name == tip:
            return view.cut(0, place + 1)
        if tip.startswith(f"{name}."):  # the entry is within a message, which is kept up to there
            items = dict(_items([message]))
            kept = [*items][: [*items].index(tip) + 1] if tip in items else []
            parts = [FORM.message(items[each], message_id=each) for each in kept]
            return view.cut(0, place).append(*parts) if parts else None
    return None


def _conflict(error: SessionConflict | SessionNotFound, conversation_id: str) -> Exception:
    """Return Pydantic AI's own error, unless the session belongs to another agent."""
    if isinstance(error, SessionConflict) and error.agent is not None:
        return error
    return ConversationConflict(conversation_id)
