"""Runs of Pydantic AI's harness kept by perdure: `StepPersistence(store=PerdureStepStore())`.

A run is a session. A snapshot is a version of it, whose view is the history: what two snapshots share is stored once.
Events and the ledger of tool calls are on the session's record. They are written without reading what is there. What
was written twice is left out when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic_ai_harness.step_persistence import ContinuableSnapshot, RunRecord, StepEvent, ToolEffectRecord

from perdure.adapters.foreign import same
from perdure.adapters.forms.pydantic import FORM
from perdure.adapters.home import Home
from perdure.adapters.pydantic_ai_messages import read, told
from perdure.errors import SessionConflict, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.model.value import JSON, thawed
from perdure.paging import all_infos
from perdure.protocols import Entry, Key, SessionStore
from perdure.sessions.chat import Chat

_RUN, _SNAPSHOT = "harness_run", "harness_snapshot"
_CONVERSATION, _PARENT = "harness_conversation", "harness_parent"
_EVENT, _EFFECT = "pydantic-ai-harness.event", "pydantic-ai-harness.effect"
_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_RUNS = TypeAdapter(list[RunRecord], config=_BYTES)
_EVENTS = TypeAdapter(list[StepEvent], config=_BYTES)
_EFFECTS = TypeAdapter(list[ToolEffectRecord], config=_BYTES)


class PerdureStepStore:
    """A step store that keeps the runs of Pydantic AI's `StepPersistence`.

    `store` is a URL or a store; without one it is the store that the command line uses. An `owner` sees no other runs.
    """

    def __init__(self, *, store: str | SessionStore | None = None, owner: str | None = None) -> None:
        self._home = Home("pydantic-ai-harness", store, owner=owner)

    def chat(self, run_id: str) -> Chat:
        """Return a chat with every perdure verb for a run. The next snapshot that is read has what they change."""
        return self._home.chat(self._home.id_of(run_id))

    async def register_run(self, record: RunRecord) -> None:
        kept = _RUNS.dump_python([record], mode="json")[0]

        def change(session: AgentSession) -> AgentSession:
            state = session.state.with_metadata(_RUN, kept)
            for key, value in ((_CONVERSATION, record.conversation_id), (_PARENT, record.parent_run_id)):
                state = state.with_metadata(key, None if value is None else _mark(value))
            return session.with_state(state).with_indexed((_CONVERSATION, _PARENT))

        await self._home.run(self._home.change(self._home.id_of(record.run_id), change, name=record.run_id))

    async def get_run(self, *, run_id: str) -> RunRecord | None:
        session = await self._home.run(self._home.load(self._home.id_of(run_id)))
        return None if session is None else _run_in(session.state.metadata)

    async def list_runs(
        self, *, parent_run_id: str | None = None, conversation_id: str | None = None
    ) -> list[RunRecord]:
        asked = {
            key: _mark(value)
            for key, value in ((_PARENT, parent_run_id), (_CONVERSATION, conversation_id))
            if value is not None
        }
        found = await self._home.run(self._listed(asked))
        return sorted(found, key=lambda record: record.started_at)

    async def append_event(self, event: StepEvent) -> None:
        body = _EVENTS.dump_python([event], mode="json")[0]
        await self._home.run(self._note(event.run_id, Entry(_EVENT, body, event.run_id)))

    async def list_events(self, *, run_id: str) -> list[StepEvent]:
        seen: set[str] = set()
        found: list[StepEvent] = []
        for event in _EVENTS.validate_python(await self._home.run(self._noted(run_id, _EVENT))):
            if event.idempotency_key is None or event.idempotency_key not in seen:
                found.append(event)
            seen.add(event.idempotency_key or "")
        return found

    async def save_snapshot(self, snapshot: ContinuableSnapshot) -> None:
        await self._home.run(self._save(_Snapshot(snapshot)))

    async def latest_snapshot(self, *, run_id: str, include_interrupted: bool = False) -> ContinuableSnapshot | None:
        session = await self._home.run(self._latest(run_id, include_interrupted=include_interrupted))
        if session is None:
            return None
        kept = thawed(session.state.metadata[_SNAPSHOT])["fields"]
        messages = read([item for message in session.state.transcript for item in FORM.items(message)])
        return _read_snapshot(kept, messages)

    async def record_tool_effect(self, record: ToolEffectRecord) -> None:
        body = _EFFECTS.dump_python([record], mode="json")[0]
        await self._home.run(self._note(record.run_id, Entry(_EFFECT, body, record.run_id)))

    async def get_tool_effect(self, *, run_id: str, tool_call_id: str) -> ToolEffectRecord | None:
        return (await self._effects(run_id)).get(tool_call_id)

    async def list_unresolved_tool_effects(self, *, run_id: str) -> list[ToolEffectRecord]:
        return [record for record in (await self._effects(run_id)).values() if record.status == "started"]

    async def _effects(self, run_id: str) -> dict[str, ToolEffectRecord]:
        """Return the last record of each tool call, in the order in which they began."""
        found = _EFFECTS.validate_python(await self._home.run(self._noted(run_id, _EFFECT)))
        return {record.tool_call_id: record for record in found}

    async def _listed(self, asked: Mapping[str, str]) -> list[RunRecord]:
        infos = await all_infos(
            self._home.store.list, agent=self._home.agent.name, owner=self._home.owner, metadata=asked
        )
        heads = await self._home.store.heads([info.id for info in infos])
        return [record for head in heads.values() if (record := _run_in(head.metadata)) is not None]

    async def _note(self, run_id: str, entry: Entry) -> None:
        """Put an entry on the record of a run, which may not be registered yet."""
        session_id = self._home.id_of(run_id)
        try:
            await self._home.store.note(session_id, [entry])
        except SessionNotFound:
            # The harness may record an event before it registers the run.
            await self._home.change(session_id, lambda session: session, name=run_id)
            await self._home.store.note(session_id, [entry])

    async def _noted(self, run_id: str, kind: str) -> list[JSON]:
        session_id = self._home.id_of(run_id)
        if await self._home.load(session_id) is None:
            return []
        entries = await self._home.store.read(session_id, run=run_id)
        return [thawed(entry.body) for entry in entries if entry.kind == kind]

    async def _save(self, snapshot: _Snapshot) -> None:
        session_id = self._home.id_of(snapshot.run_id)
        while True:
            session = await self._home.load(session_id)
            if session is None:
                await self._home.change(session_id, lambda new: new, name=snapshot.run_id)
                continue
            if await self._is_kept(session, snapshot):
                return
            try:
                await self._home.store.save(snapshot.on_top_of(session), key=snapshot.key)
                return
            except SessionConflict:
                continue  # a conflict with another writer: read the session again

    async def _is_kept(self, session: AgentSession, snapshot: _Snapshot) -> bool:
        """Tell whether a snapshot was kept before, or is an older one that comes late."""
        if snapshot.key is None:
            return False
        last = _noted_in(session).get("sequence")
        is_late = last is not None and snapshot.sequence is not None and snapshot.sequence < last
        return is_late or await self._home.store.find_key(session.id, snapshot.key.name) is not None

    async def _latest(self, run_id: str, *, include_interrupted: bool) -> AgentSession | None:
        session = await self._home.load(self._home.id_of(run_id))
        if session is None or _SNAPSHOT not in session.state.metadata:
            return None
        note = _noted_in(session)
        if include_interrupted or note["fields"]["state"] == "complete":
            return session
        version = note.get("complete_at")
        return None if version is None else await self._home.load(session.id, version)


class _Snapshot:
    """A snapshot to be saved, as items."""

    def __init__(self, snapshot: ContinuableSnapshot) -> None:
        self.run_id: str = snapshot.run_id
        key = snapshot.idempotency_key
        self.key = None if key is None else Key(key, "snapshot")
        prefix, colon, _ = (key or "").partition(":")
        self.sequence = int(prefix) if colon and prefix.isdecimal() else None
        """The number that a key of `StepPersistence` begins with. It never falls."""
        self._items = told(snapshot.messages)
        names = ("run_id", "step_index", "conversation_id", "parent_run_id", "agent_name", "state", "idempotency_key")
        self._fields = {name: getattr(snapshot, name) for name in names}
        self._fields["timestamp"] = snapshot.timestamp.isoformat()

    def on_top_of(self, session: AgentSession) -> AgentSession:
        """Return the next version of a session. Messages that its view already has are not stored again."""
        before = _noted_in(session)
        version = session.version + 1
        complete_at = version if self._fields["state"] == "complete" else before.get("complete_at")
        sequence = self.sequence if self.sequence is not None else before.get("sequence")
        note = {"fields": self._fields, "complete_at": complete_at, "sequence": sequence}
        state = session.state.with_transcript(_drawn(session.state.transcript, self._items))
        return session.with_state(state.with_metadata(_SNAPSHOT, note))


def _drawn(view: Transcript, items: Sequence[JSON]) -> Transcript:
    """Return a view of items that reuses the beginning of another view."""
    common = at = 0
    for message in view:
        mine = FORM.items(message)
        if not same(mine, list(items[at : at + len(mine)])):
            break
        common, at = common + 1, at + len(mine)
    return view.cut(0, common).append(*map(FORM.message, items[at:]))


def _read_snapshot(fields: dict[str, Any], messages: list[Any]) -> ContinuableSnapshot:
    at = datetime.fromisoformat(fields["timestamp"])
    return ContinuableSnapshot(**{**fields, "timestamp": at, "messages": messages})


def _run_in(metadata: Mapping[str, Any]) -> RunRecord | None:
    found: list[RunRecord] = _RUNS.validate_python([thawed(metadata[_RUN])] if _RUN in metadata else [])
    return found[0] if found else None


def _noted_in(session: AgentSession) -> Mapping[str, Any]:
    note: Mapping[str, Any] = session.state.metadata.get(_SNAPSHOT, {})
    return note


def _mark(name: str) -> str:
    """Return the value that lists are narrowed by. A name itself may be too long for an index."""
    return str(SessionId.of(name))
