"""The SQLite files of LangGraph's `SqliteSaver`: each checkpoint becomes a version, as the adapter saves it.

A checkpoint has all messages of its thread. They are compared with those of its parent, so that each is stored once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from perdure.adapters.foreign import same
from perdure.adapters.forms.langchain import FORM
from perdure.adapters.importing.arriving import NOTE, ImportReport, Refused, Target
from perdure.adapters.importing.langgraph_values import kept, message_in, read
from perdure.adapters.importing.sources import ROW, Database, read_object, read_text, read_time
from perdure.errors import InvalidData, SessionBusy, SessionConflict
from perdure.model.ids import SessionId, now
from perdure.model.lineage import SpawnRef
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.model.value import JSON
from perdure.protocols import Entry, Key

_CHECKPOINT, _CHANNEL, _WRITES = "langgraph", "channel/", "langgraph.writes"
_SHOWN = "messages"


def pieces(source: Path) -> list[Any]:
    """Return the threads of a file, each with its namespaces."""
    file = _File(Database(source))
    return [partial(file.thread, thread) for thread in file.threads()]


class Checkpoint(NamedTuple):
    """A checkpoint as it is read, and the writes of the tasks that began from it."""

    id: str
    parent: str | None
    values: Mapping[str, Any]
    rest: Mapping[str, Any]
    metadata: Mapping[str, Any]
    writes: Sequence[Entry]

    @property
    def messages(self) -> list[Message] | None:
        """The messages of the channel that becomes the transcript, or None if it has something else."""
        found = self.values.get(_SHOWN)
        if not isinstance(found, list):
            return None
        items = [message_in(each) for each in found]
        return None if None in items else [FORM.message(item) for item in items]


@dataclass(frozen=True)
class Namespace:
    """The checkpoints of a thread, or of a subgraph in it, the oldest first."""

    thread: str
    ns: str
    read: Any
    """The function that yields the checkpoints."""
    has: Any
    """The function that tells whether there is a checkpoint of an id."""

    async def arrive(self, target: Target) -> ImportReport:
        session_id = _id_of(target, self.thread, self.ns)
        before = await target.store.load(session_id)
        if before is not None and not _is_imported(before, target):
            reason = f"Another session has the id {session_id!r}. Import into another store."
            return ImportReport(refused=(Refused(session_id, reason),))
        live = None if before is None else await _live(before, target)
        diverged = live if live is not None and self._has_left(live) else None
        arriving = _Arriving(target, self, await _opened(target, self.thread, self.ns), diverged)
        try:
            for checkpoint in self.read():
                await arriving.take(checkpoint)
            await arriving.end()
        except (SessionBusy, SessionConflict) as error:
            return ImportReport(messages=arriving.messages, refused=(Refused(session_id, str(error)),))
        is_new = arriving.checkpoints > 0
        told = (self.thread,) if arriving.branches and not self.ns else ()
        return ImportReport(sessions=is_new, messages=arriving.messages, skipped=not is_new, diverged=told)

    def _has_left(self, live: AgentSession) -> bool:
        """Tell whether a thread has continued here since it arrived, by a run or by a verb."""
        note = _noted(live)
        return "id" in note and (not self.has(note["id"]) or live.state.shown_since > note["version"])


class _Arriving:
    """A writer that saves checkpoints one after the other, if they have not arrived before.

    `live` is the conversation of a thread that has continued here too. It stays the newest, and others are branches.
    """

    def __init__(self, target: Target, place: Namespace, session: AgentSession, live: AgentSession | None) -> None:
        self._target = target
        self._place = place
        self._session = session
        self._live = live
        self.checkpoints = self.messages = self.branches = 0

    async def take(self, checkpoint: Checkpoint) -> None:
        store, session_id = self._target.store, self._session.id
        if await store.find_key(session_id, checkpoint.id) is not None:
            # The checkpoint has arrived before, but its tasks may have written since.
            await self._add_writes(checkpoint)
            return
        base = await self._base(checkpoint.parent)
        wanted = checkpoint.messages
        view, new = (base, 0) if wanted is None else _drawn(base, wanted)
        note = self._note(checkpoint, shown=None if wanted is None else _SHOWN)
        channels = {
            _CHANNEL + name: kept(value)
            for name, value in checkpoint.values.items()
            if wanted is None or name != _SHOWN
        }
        state = self._session.state
        own = {key: value for key, value in state.metadata.items() if not _is_checkpoints(key)}
        context = replace(state.context, transcript=view, metadata={**own, **channels, _CHECKPOINT: note})
        changed = self._session.with_state(state.with_context(context))
        # The adapter finds the version of a checkpoint by this key.
        key = Key(checkpoint.id, checkpoint.parent or "")
        self._session = await store.save(changed, key=key, entries=checkpoint.writes)
        self.checkpoints += 1
        self.messages += new
        self.branches += self._live is not None

    async def end(self) -> None:
        """Save the conversation of a thread that has continued here again, so that it is the newest version."""
        live = self._live
        if live is None or live.version == self._session.version:
            return
        note = {**_noted(live), "in_order": False}
        context = replace(live.state.context, metadata={**live.state.metadata, _CHECKPOINT: note})
        state = self._session.state.with_context(context).with_transcript(
            context.transcript, rewound_to=live.state.rewound_to, shown_since=live.state.shown_since
        )
        self._session = await self._target.store.save(self._session.with_state(state))

    async def _base(self, parent: str | None) -> Transcript:
        """Return the view of a checkpoint's parent."""
        if parent is None or _noted(self._session).get("id") == parent:
            return self._session.state.transcript
        found = await self._target.store.find_key(self._session.id, parent)
        session = None if found is None else await self._target.store.load(self._session.id, found[1])
        return (session or self._session).state.transcript

    def _note(self, checkpoint: Checkpoint, *, shown: str | None) -> dict[str, JSON]:
        before = _noted(self._session)
        latest, is_in_order = before.get("latest"), bool(before.get("in_order", True))
        told: dict[str, JSON] = {
            "thread": self._place.thread,
            "ns": self._place.ns,
            "id": checkpoint.id,
            "parent": checkpoint.parent,
            "version": self._session.version + 1,
            "latest": checkpoint.id if latest is None else max(latest, checkpoint.id),
            "in_order": is_in_order and (latest is None or latest <= checkpoint.id),
            "shown": shown,
            "checkpoint": kept(checkpoint.rest),
            "metadata": kept(checkpoint.metadata),
        }
        if self._live is None:
            return told
        # An import that is killed before its end leaves the live conversation to be found by these.
        return {**told, "latest": _noted(self._live).get("latest"), "in_order": False, "live": self._live.version}

    async def _add_writes(self, checkpoint: Checkpoint) -> None:
        """Put on record what tasks have written since the checkpoint arrived."""
        if not checkpoint.writes:
            return
        known = await self._target.store.read(self._session.id, run=checkpoint.id)
        told = {entry.body["task"] for entry in known if entry.kind == _WRITES}
        new = [entry for entry in checkpoint.writes if entry.body["task"] not in told]
        if new:
            await self._target.store.note(self._session.id, new)
            self.checkpoints += 1


class _File:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._checkpoints = database.require("LangGraph", "thread_id", "checkpoint_ns", "checkpoint_id", "checkpoint")
        self._writes = database.table("thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel")

    def threads(self) -> list[str]:
        return [*dict.fromkeys(thread for thread, _ in self._places())]

    def _places(self) -> list[tuple[str, str]]:
        found = {
            (
                read_text(row["thread_id"], f"{self._checkpoints}[{row[ROW]}].thread_id"),
                read_text(row["checkpoint_ns"], f"{self._checkpoints}[{row[ROW]}].checkpoint_ns"),
            ): None
            for row in self._db.rows(self._checkpoints, "rowid", columns=("thread_id", "checkpoint_ns"))
        }
        return [*found]

    def thread(self, thread: str) -> Iterator[Namespace]:
        """Yield the namespaces of a thread: its own first, and callers before those that they call."""
        for ns in sorted(ns for each, ns in self._places() if each == thread):
            yield Namespace(thread, ns, partial(self._read, thread, ns), partial(self._has, thread, ns))

    def _has(self, thread: str, ns: str, checkpoint_id: str) -> bool:
        place = {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}
        return any(True for _ in self._db.rows(self._checkpoints, columns=("checkpoint_id",), **place))

    def _read(self, thread: str, ns: str) -> Iterator[Checkpoint]:
        for row in self._db.rows(self._checkpoints, "checkpoint_id", thread_id=thread, checkpoint_ns=ns):
            yield self._checkpoint(row)

    def _checkpoint(self, row: dict[str, Any]) -> Checkpoint:
        where = f"{self._checkpoints}[{row[ROW]}]"
        found = read(row["type"], row["checkpoint"], f"{where}.checkpoint")
        if not isinstance(found, dict) or not isinstance(found.get("channel_values", {}), dict):
            raise InvalidData(f"{where}.checkpoint", "this is not a checkpoint. Remove the row and import again")
        metadata = read_object(row["metadata"], f"{where}.metadata") if row["metadata"] else {}
        parent = row["parent_checkpoint_id"]
        return Checkpoint(
            read_text(row["checkpoint_id"], f"{where}.checkpoint_id"),
            read_text(parent, f"{where}.parent_checkpoint_id") if parent else None,
            found.get("channel_values", {}),
            {key: value for key, value in found.items() if key != "channel_values"},
            metadata,
            self._writes_of(row, read_time(found.get("ts")) if isinstance(found.get("ts"), str) else None),
        )

    def _writes_of(self, row: dict[str, Any], at: Any) -> list[Entry]:
        """Return the writes of each task as an entry."""
        if self._writes is None:
            return []
        place = {key: row[key] for key in ("thread_id", "checkpoint_ns", "checkpoint_id")}
        tasks: dict[tuple[str, str], list[JSON]] = {}
        for each in self._db.rows(self._writes, "task_id, idx", **place):
            where = f"{self._writes}[{each[ROW]}]"
            value = kept(read(each["type"], each["value"], f"{where}.value"))
            task = read_text(each["task_id"], f"{where}.task_id")
            told: JSON = [each["idx"], read_text(each["channel"], f"{where}.channel"), value]
            tasks.setdefault((task, each.get("task_path") or ""), []).append(told)
        when = (at or now()).timestamp()
        return [
            Entry(_WRITES, {"task": task, "path": path, "at": when, "writes": writes}, row["checkpoint_id"])
            for (task, path), writes in tasks.items()
        ]


def _id_of(target: Target, thread: str, ns: str) -> SessionId:
    return target.id_of(thread, ns) if ns else target.id_of(thread)


async def _opened(target: Target, thread: str, ns: str) -> AgentSession:
    """Return the session of a namespace. If there is none, create it and those around it."""
    session_id = _id_of(target, thread, ns)
    found = await target.store.load(session_id)
    if found is not None:
        return found
    spawn = None
    if ns:
        caller = await _opened(target, thread, ns.rpartition("|")[0])
        node, _, task = ns.rpartition("|")[2].partition(":")
        spawn = SpawnRef(caller.id, "", task or node, node)
    made = target.new(session_id, name=ns or thread, spawn=spawn)
    note = {"from": target.framework, "id": session_id}
    return await target.store.create(made.with_state(made.state.with_metadata(NOTE, note)))


async def _live(session: AgentSession, target: Target) -> AgentSession:
    """Return the version of a thread that its graph continues from: the one that the adapter takes for the newest."""
    note = _noted(session)
    version, latest = note.get("live"), note.get("latest")
    if version is None and latest not in (None, note.get("id")):
        found = await target.store.find_key(session.id, latest)
        version = None if found is None else found[1]
    live = None if version is None else await target.store.load(session.id, version)
    return session if live is None else live


def _is_imported(session: AgentSession, target: Target) -> bool:
    note = session.state.metadata.get(NOTE)
    is_ours = session.info.agent_name == target.framework
    return is_ours and isinstance(note, Mapping) and note.get("id") == session.id


def _noted(session: AgentSession) -> Mapping[str, Any]:
    note: Mapping[str, Any] = session.state.metadata.get(_CHECKPOINT, {})
    return note


def _is_checkpoints(key: str) -> bool:
    return key == _CHECKPOINT or key.startswith(_CHANNEL)


def _drawn(base: Transcript, wanted: Sequence[Message]) -> tuple[Transcript, int]:
    """Return a view of messages that reuses what another view has of them, and the number of new ones."""
    stored = list(base)
    common = 0
    while common < min(len(stored), len(wanted)) and _is_same(stored[common], wanted[common]):
        common += 1
    view, at, new = base.cut(0, common), common, 0
    for message in wanted[common:]:
        found = next((place for place in range(at, len(stored)) if _is_same(stored[place], message)), None)
        if found is None:
            view, new = view.append(message), new + 1
        else:
            view, at = Transcript((*view.pieces, *base.cut(found, found + 1).pieces)), found + 1
    return view, new


def _is_same(stored: Message, message: Message) -> bool:
    return stored.id == message.id and (stored == message or same(FORM.items(stored), FORM.items(message)))
