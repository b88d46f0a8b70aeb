"""LangGraph's checkpoints as versions of a session, written and read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import RESUME, TASKS
from msgspec.structs import replace

from perdure.adapters.langgraph_messages import MessageViews, View, are_messages
from perdure.adapters.langgraph_values import PLAIN, kept, value_of
from perdure.errors import InvalidData
from perdure.model.ids import now
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.model.value import EMPTY, JSON
from perdure.protocols import Entry, JournalEntry, Key

NOTE = "langgraph"
"""The metadata key of a checkpoint's data, except its channels."""
_CHANNEL = "channel/"
"""The prefix of the metadata keys of channels."""
_WRITES = "langgraph.writes"
"""The kind of the entries on record that keep a task's writes. Their run is the checkpoint that they belong to."""

_TRIGGERS = ("branch:to:", "join:", "__start__", TASKS)
"""The beginnings of the names of channels that start a node. It runs only if one of them has a value."""


class Place(NamedTuple):
    """The place of a checkpoint: its thread, its namespace and its id. Without an id, it is that of the newest."""

    thread: str
    ns: str = ""
    id: str | None = None

    @classmethod
    def of(cls, config: RunnableConfig) -> Place:
        given = config["configurable"]
        thread = given["thread_id"]
        if thread is None or not str(thread).strip():
            # Otherwise the conversations of all callers without an id would be in one thread.
            problem = f"expected the id of a thread, got {'None' if thread is None else 'a blank text'}"
            raise InvalidData("$.configurable.thread_id", problem)
        return cls(str(thread), given.get("checkpoint_ns") or "", given.get("checkpoint_id") or None)

    @property
    def config(self) -> RunnableConfig:
        named = {"thread_id": self.thread, "checkpoint_ns": self.ns, "checkpoint_id": self.id}
        return {"configurable": named}

    @property
    def outer(self) -> Place:
        """The namespace that has called this one. The thread's own is the outermost."""
        return Place(self.thread, self.ns.rpartition("|")[0])


class Codec(NamedTuple):
    """A way to write and read values: the serializer of the moment, and what is known of messages."""

    serde: SerializerProtocol
    views: MessageViews


class Note:
    """The data of a checkpoint in a version of a session, except the values of channels.

    It has no id yet if the session was created before its first checkpoint came.
    """

    __slots__ = ("_metadata", "_note", "version")

    def __init__(self, metadata: Mapping[str, Any], version: int) -> None:
        self._metadata = metadata
        self._note: Mapping[str, Any] = metadata.get(NOTE, EMPTY)
        self.version = version

    @property
    def id(self) -> str | None:
        return self._note.get("id")

    @property
    def parent(self) -> str | None:
        return self._note.get("parent")

    @property
    def latest(self) -> str | None:
        """The greatest id of the session's checkpoints up to this version."""
        return self._note.get("latest")

    @property
    def is_in_order(self) -> bool:
        """True if the ids of the checkpoints up to this version came in ascending order."""
        return bool(self._note.get("in_order", True))

    @property
    def is_put(self) -> bool:
        """True if LangGraph has saved this version, and neither a verb of perdure nor a fork."""
        return self.saved_as == self.version

    @property
    def saved_as(self) -> int:
        """The version that LangGraph has saved. In a fork it is one of the original's."""
        found: int = self._note.get("version", 0)
        return found

    @property
    def has_lost_plan(self) -> bool:
        """True if it was saved again after the messages that its tasks were planned from had gone."""
        return bool(self._note.get("lost_plan", False))

    @property
    def names(self) -> tuple[str, str]:
        """The thread and the namespace that this was saved for. A fork has those of its original."""
        return self._note.get("thread", ""), self._note.get("ns", "")

    @property
    def metadata(self) -> CheckpointMetadata:
        found: CheckpointMetadata = value_of(self._note["metadata"], PLAIN)
        return found

    @property
    def unseeded(self) -> set[str]:
        """The channels of which only the writes since an older checkpoint are kept. They need that one."""
        counters = self.metadata.get("counters_since_delta_snapshot", {})
        return {name for name in counters if not self.has_channel(name)}

    @property
    def shown(self) -> str | None:
        """The channel whose messages are the transcript, or None if there is none."""
        return self._note.get("shown")

    def has_channel(self, name: str) -> bool:
        return self.shown == name or _CHANNEL + name in self._metadata


class StoredCheckpoint(Note):
    """A version of a session as a checkpoint."""

    __slots__ = ("session",)

    def __init__(self, session: AgentSession) -> None:
        super().__init__(session.state.metadata, session.version)
        self.session = session

    def channel(self, name: str, codec: Codec) -> Any:
        """Return the value of one channel that it has."""
        if self.shown == name:
            return codec.views.messages(self.session.state.transcript, codec.serde)
        return value_of(self._metadata[_CHANNEL + name], codec.serde)

    def checkpoint(self, codec: Codec) -> Checkpoint:
        """Return what LangGraph has saved."""
        found = self._without_channels(codec)
        values = {
            key.removeprefix(_CHANNEL): value_of(stored, codec.serde)
            for key, stored in self._metadata.items()
            if key.startswith(_CHANNEL)
        }
        if self.shown is not None:
            values[self.shown] = codec.views.messages(self.session.state.transcript, codec.serde)
        found["channel_values"] = values
        return found

    def channel_versions(self, codec: Codec) -> ChannelVersions:
        return self._without_channels(codec)["channel_versions"]

    def _without_channels(self, codec: Codec) -> Checkpoint:
        found: Checkpoint = value_of(self._note["checkpoint"], codec.serde)
        return found

    def follows(self, planned: StoredCheckpoint) -> bool:
        """Tell whether the tasks that were planned from a view still belong to what this version shows.

        They do as long as the last message of that view is shown, and no call of a tool was added after it.
        """
        last = [*planned.session.state.transcript[-1:]]
        for message in reversed(self.session.state.transcript):
            # By value: a message that was changed in place has the same id.
            if last and message == last[0]:
                return True
            if message.tool_calls:
                return False
        return not last

    def without_plan(self, place: Place, codec: Codec) -> CheckpointTuple:
        """Return the checkpoint with nothing to do next: its channels hold no task, and nothing waits."""
        found = self.tuple_at(place, (), codec)
        values = found.checkpoint["channel_values"]
        for name in [name for name in values if name.startswith(_TRIGGERS)]:
            del values[name]
        return found

    def tuple_at(self, place: Place, writes: Iterable[JournalEntry], codec: Codec) -> CheckpointTuple:
        """Return the checkpoint as LangGraph reads it, with the writes that wait for the next step."""
        parent = None if self.parent is None else place._replace(id=self.parent).config
        return CheckpointTuple(
            place._replace(id=self.id).config,
            self.checkpoint(codec),
            self.metadata,
            parent,
            read_writes(writes, codec.serde),
        )

    @property
    def key(self) -> Key:
        """The key by which this version is found."""
        assert self.id is not None
        return Key(self.id, self.parent or "")

    def moved(self, head: AgentSession, place: Place, latest: str, *, has_plan: bool) -> AgentSession:
        """Return the next version of a session, which has this checkpoint again or in another thread.

        `latest` is the greatest id there. Checkpoints may be moved in any order, so lists have to sort them. Without
        `has_plan`, its tasks have gone.
        """
        own: dict[str, JSON] = {"thread": place.thread, "ns": place.ns, "version": head.version + 1}
        note = {**self._note, **own, "latest": latest, "in_order": False}
        if not has_plan:
            note["lost_plan"] = True
        state = self.session.state
        context = replace(state.context, metadata={**state.metadata, NOTE: note})
        return head.with_state(head.state.with_context(context))


class NewCheckpoint(NamedTuple):
    """A checkpoint to be saved."""

    place: Place
    """The place of its parent."""
    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    new_versions: ChannelVersions
    config: RunnableConfig
    messages: str
    """The channel that becomes the transcript."""

    @property
    def id(self) -> str:
        return self.checkpoint["id"]

    @property
    def saved_at(self) -> RunnableConfig:
        return self.place._replace(id=self.id).config

    def branches_off(self) -> bool:
        """Tell whether the caller has asked for another branch."""
        return self.metadata.get("source") in ("fork", "update")

    def on_top_of(
        self, head: StoredCheckpoint, base: StoredCheckpoint, view: Transcript, codec: Codec
    ) -> tuple[AgentSession, View]:
        """Return the session's next version. Values that are the same in the base are not stored again.

        The messages are compared with `view`, which is the base's or that of the calling graph.
        """
        values = self.checkpoint["channel_values"]
        same = self._same_as(base, codec)
        wanted: Any = values.get(self.messages)
        is_shown = are_messages(wanted)
        is_known = not is_shown or (self.messages in same and base.shown == self.messages)
        own_view = base.session.state.transcript
        drawn = View(own_view) if is_known else codec.views.view(view, wanted, codec.serde)
        stored = base.session.state.metadata
        channels = {
            key: stored[key] if name in same and key in stored else kept(value, codec.serde)
            for name, value in values.items()
            if not (is_shown and name == self.messages)
            for key in (_CHANNEL + name,)
        }
        own = {key: value for key, value in head.session.state.metadata.items() if not _is_ours(key)}
        note = self._note(head, codec, shown=self.messages if is_shown else None)
        state = head.session.state
        context = replace(state.context, transcript=drawn.transcript, metadata={**own, **channels, NOTE: note})
        return head.session.with_state(state.with_context(context)), drawn

    def _same_as(self, base: StoredCheckpoint, codec: Codec) -> set[str]:
        """Return the channels that have not been written since the base. The base has to be the parent."""
        if base.id is None or base.id != self.place.id:
            return set()
        then = base.channel_versions(codec)
        now_there = self.checkpoint["channel_versions"]
        return {
            name for name, version in now_there.items() if name not in self.new_versions and then.get(name) == version
        }

    def _note(self, head: StoredCheckpoint, codec: Codec, *, shown: str | None) -> dict[str, JSON]:
        rest = {key: value for key, value in self.checkpoint.items() if key != "channel_values"}
        metadata = get_checkpoint_metadata(self.config, self.metadata)
        return {
            "thread": self.place.thread,
            "ns": self.place.ns,
            "id": self.id,
            "parent": self.place.id,
            "version": head.session.version + 1,
            "latest": self.id if head.latest is None else max(head.latest, self.id),
            "in_order": head.is_in_order and (head.latest is None or head.latest <= self.id),
            "shown": shown,
            "checkpoint": kept(rest, codec.serde),
            # Never encrypted, since lists are filtered by it.
            "metadata": kept(metadata, PLAIN),
        }


def emptied(session: AgentSession) -> AgentSession:
    """Return the next version of a session, without a checkpoint."""
    own = {key: value for key, value in session.state.metadata.items() if not _is_ours(key)}
    context = replace(session.state.context, transcript=Transcript(), metadata=own)
    return session.with_state(session.state.with_context(context))


def _is_ours(key: str) -> bool:
    return key == NOTE or key.startswith(_CHANNEL)


def writes_entry(
    place: Place, writes: Sequence[tuple[str, Any]], task: str, path: str, serde: SerializerProtocol
) -> Entry:
    """Return the writes of a task as an entry for the record."""
    told = [
        [WRITES_IDX_MAP.get(channel, at), channel, kept(value, serde)] for at, (channel, value) in enumerate(writes)
    ]
    body: JSON = {"task": task, "path": path, "at": now().timestamp(), "writes": told}
    return Entry(_WRITES, body, place.id)


def are_writes(entry: JournalEntry) -> bool:
    return entry.kind == _WRITES


def answers_interrupt(entry: Entry) -> bool:
    """Tell whether an entry's writes answer an interrupt."""
    return any(channel == RESUME for _, channel, _ in entry.body["writes"])


def read_writes(entries: Iterable[JournalEntry], serde: SerializerProtocol) -> list[PendingWrite]:
    """Return the writes of a checkpoint's tasks in LangGraph's order.

    If a task writes again, its first writes stay. Errors, interrupts and answers to them are replaced.
    """
    found: dict[tuple[str, int], tuple[str, str, JSON]] = {}
    for entry in entries:
        if not are_writes(entry):
            continue
        body: Any = entry.body
        # LangGraph gives the channels of errors, interrupts and answers negative indexes.
        replaces = all(at < 0 for at, _, _ in body["writes"])
        for at, channel, value in body["writes"]:
            if replaces or (body["task"], at) not in found:
                found[body["task"], at] = body["path"], channel, value
    in_order = sorted(found.items(), key=lambda each: writes_sort_key(each[1][0], *each[0]))
    return [(task, channel, value_of(value, serde)) for (task, _), (_, channel, value) in in_order]
