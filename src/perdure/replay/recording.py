"""A stored session as a replay reads it: a copy in memory, separate from the store that it came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import msgspec

from perdure.actions.parallel import Config, config_of, configured
from perdure.actions.undo_run import without_run
from perdure.archive.moving import import_sessions
from perdure.errors import ConfigurationError, InvalidData, SessionNotFound
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.loop_events import (
    AgentStart,
    AnyLoopEvent,
    InputRejected,
    ParallelLoopEnd,
    ParallelLoopStart,
    UnknownEvent,
)
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.paging import all_infos
from perdure.protocols import ArchivingStore
from perdure.replay.story import PlayedTurn, by_loop, turn_of
from perdure.runtime.runtime import SessionRuntime
from perdure.sessions.chat import Chat
from perdure.sessions.sessions import Sessions
from perdure.stores.store import Store
from perdure.stores.urls import store_of


class LeftOut(msgspec.Struct, frozen=True):
    """A run that is not replayed, and the reason."""

    loop_id: str
    """The run."""
    reason: str
    """A sentence about why."""


class Recording:
    """One stored session with its runs. Nothing done with it reaches the store that it was read from.

    `of`, `taken` and `in_file` make it. `store` has the session, `info` is its header, and `sessions` are those that it
    was taken from.
    """

    def __init__(self, store: Store, info: AgentSessionInfo, sessions: Sessions | None = None) -> None:
        self.store = store
        self.info = info
        self.sessions = sessions
        """The sessions that it was taken from, or None if it was read from a file."""
        self.turns: Sequence[PlayedTurn] = ()
        """The runs that can be replayed, in the order in which they began."""
        self.left_out: Sequence[LeftOut] = ()
        self._configs: Mapping[str, Config] = {}

    @property
    def session_id(self) -> SessionId:
        """The id of the session."""
        return self.info.id

    def __repr__(self) -> str:
        return f"<Recording {self.session_id} with {len(self.turns)} turns>"

    @classmethod
    async def of(cls, source: Chat | Recording | str | os.PathLike[str]) -> Recording:
        """Return the recording of the session that a handle or an exported file has, which is the `source`."""
        if isinstance(source, Recording):
            return source
        if isinstance(source, Chat):
            return await cls.taken(source.sessions, source.id)
        if not isinstance(source, str | os.PathLike):
            raise InvalidData("$.source", f"expected a Chat, a Recording or a path, got {type(source).__name__}")
        found = await cls.in_file(source)
        if len(found) == 1:
            return found[0]
        ids = ", ".join(each.session_id for each in found[:5]) or "none"
        problem = f"{os.fspath(source)} has {len(found)} sessions that nobody called: {ids}"
        raise InvalidData("$.source", f"{problem}; take one of `await Recording.in_file(path)`")

    @classmethod
    async def taken(cls, sessions: Sessions, session_id: str) -> Self:
        """Return the recording of a session in a store. Raise SessionBusy while a run of it is under way.

        `sessions` are those of `connect`, and `session_id` names the session.
        """
        store, found = _memory(), (await sessions.info(session_id)).id
        await store.restore(await _archive(sessions).dump(found, alone=True))
        return await cls._read(store, found, sessions)

    @classmethod
    async def in_file(cls, path: str | os.PathLike[str]) -> list[Self]:
        """Return the recordings of the sessions in an exported file, except for those of sub-agents.

        `path` is the file.
        """
        store = _memory()
        await import_sessions(store, path)
        infos = sorted(await all_infos(store.list), key=lambda info: (info.created_at, info.id))
        return [await cls._read(store, info.id) for info in infos if info.spawn_ref is None]

    async def children(self) -> Sequence[Recording]:
        """Return the recordings of its sub-agents' sessions, in the order in which these were created."""
        listing = self.store.list if self.sessions is None else self.sessions.headers
        infos = await all_infos(listing, parent=self.session_id)
        # Lists begin with the newest session.
        spawned = [info.id for info in reversed(infos) if info.spawn_ref is not None]
        if self.sessions is None:
            return [await self._read(self.store, each) for each in spawned]
        return [await self.taken(self.sessions, each) for each in spawned]

    @classmethod
    async def _read(cls, store: Store, session_id: SessionId, sessions: Sessions | None = None) -> Self:
        runtime = SessionRuntime(store)
        made = cls(store, await runtime.get_session_info(session_id), sessions)
        made._take([event async for event in runtime.events(session_id)])
        return made

    def _take(self, events: Sequence[AnyLoopEvent]) -> None:
        groups = _Groups(events)
        self._configs = groups.configs
        loops = by_loop(events)
        starts = [event for event in events if isinstance(event, AgentStart)]
        taken_back = {event.takes_back for event in starts if event.takes_back is not None}
        turns, left_out = [], []
        for loop_id, told in loops.items():
            if all(isinstance(event, UnknownEvent) for event in told):
                continue  # an adapter's notes, such as those on a checkpoint of LangGraph: perdure ran nothing there
            turn = turn_of(told)
            reason = groups.why_not(loop_id) or _why_not(turn, told, loop_id in taken_back)
            if reason is not None:
                left_out.append(LeftOut(loop_id, reason))
            elif turn is not None and turn.start.continuation.kind != "compaction":
                turns.append(turn)
        self.turns, self.left_out = tuple(turns), tuple(left_out)

    async def before(self, turn: PlayedTurn) -> AgentSession:
        """Return the session as a `turn` found it: the agent, its model, and the history before the question.

        Raise VersionForgotten if that version is gone.
        """
        version = turn.start.base_version
        found = await self.store.load(self.session_id, version)
        if found is None:
            raise SessionNotFound(self.session_id, version)
        if turn.start.takes_back is not None:
            found = await without_run(found, turn.start.takes_back, _Kept(self.store, self.store))
        config = self._configs.get(turn.loop_id)
        return found if config is None else _configured(found, config)

    def called(self) -> list[str]:
        """Return the names of the tools that were called, except for unknown tools and those that a message brought."""
        calls = [(turn, call) for turn in self.turns for step in turn.steps for call in step.calls]
        return [call.name for turn, call in calls if call.name not in turn.brought and not call.is_unknown]

    async def with_files(self, messages: Sequence[Message]) -> list[Message]:
        """Return `messages` with the bytes of the images and files that they name."""
        wanted = {key for message in messages for key in message.file_hashes}
        if not wanted:
            return list(messages)
        bodies = await self.store.attachments(self.session_id, sorted(wanted))
        return [message.with_files(bodies) for message in messages]


def _memory() -> Store:
    store = store_of("memory://")
    assert isinstance(store, Store)
    return store


class _Kept(NamedTuple):
    """The copy, in the form of an action's context."""

    store: Store
    journal: Store


def _archive(sessions: Sessions) -> ArchivingStore:
    if not isinstance(sessions.store, ArchivingStore):
        raise ConfigurationError("This store cannot give a session out whole, which a replay needs.")
    return sessions.store


def _configured(session: AgentSession, config: Config) -> AgentSession:
    """Return a session as a branch of a parallel evaluation had it."""
    definition, state = configured(session, config)
    return session.with_definition(definition).with_state(state)


def _why_not(turn: PlayedTurn | None, told: Sequence[AnyLoopEvent], is_taken_back: bool) -> str | None:
    """Return the reason why a run is not replayed, or None if it can be."""
    if turn is None:
        return "its beginning is not on record"
    if turn.start.continuation.kind == "compaction":
        return None  # not a turn: what it did is part of the next one's history
    if is_taken_back:
        return "it was taken back, and another run took its place"
    rejected = [event for event in told if isinstance(event, InputRejected) and not event.message_ids]
    if rejected:
        return f"its input was refused: {rejected[0].reason}"
    if turn.start.base_version is None or not turn.asked:
        return "the record does not tell what it was asked"
    if turn.status is ExecutionStatus.IN_PROGRESS and not turn.steps:
        return "the model has not answered yet"
    return None


class _Groups:
    """The parallel evaluations on record. Of each, the selected branch is the turn."""

    def __init__(self, events: Sequence[AnyLoopEvent]) -> None:
        self.configs: dict[str, Config] = {}
        self._branches: set[str] = set()
        self._selected: set[str | None] = set()
        for event in events:
            if isinstance(event, ParallelLoopStart):
                self._branches.update(event.loop_ids)
                # Not strict: the event may have no configs.
                self.configs |= dict(zip(event.loop_ids, map(config_of, event.configs), strict=False))
            elif isinstance(event, ParallelLoopEnd):
                self._selected.add(event.selected_loop_id)

    def why_not(self, loop_id: str) -> str | None:
        if loop_id not in self._branches or loop_id in self._selected:
            return None
        return "another answer was selected in its place"
