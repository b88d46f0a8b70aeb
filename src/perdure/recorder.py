"""A recorder that builds session records from events, for an agent that perdure does not run. It knows only events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from perdure.model.ids import now
from perdure.model.lineage import ChildLoopRef, SpawnRef
from perdure.model.loop_events import (
    AgentStart,
    AnyLoopEvent,
    LoopEvent,
    MessageUpdate,
    ParallelLoopEnd,
    ParallelLoopStart,
    Redacted,
    ToolExecutionEnd,
)
from perdure.model.record import LoopFold, LoopRecord, ParallelGroupRecord, SessionRecord, with_children
from perdure.redaction.records import RecordRedaction, names_any

_log = logging.getLogger("perdure.recorder")


@dataclass(frozen=True)
class SessionRecorderConfig:
    """The settings of a recorder: the events it keeps, and the functions it calls.

    `before_task` is called with a session that is about to begin. It refuses the session by returning False.
    `after_task` is called with a session that `flush` has finalised.
    """

    include_streaming_events: bool = False
    """True to keep the pieces of streamed messages, too."""
    before_task: Callable[[SessionRecord], bool] | None = None
    after_task: Callable[[SessionRecord], None] | None = None


class SessionRecorder:
    """A recorder that takes events of any number of sessions, in order per loop, and keeps a record of each session.

    If events of a session come after a flush, they continue its record, and the next flush gives the whole record. So
    the recorder remembers every session. A `Redacted` event replaces the content of messages in all that is remembered,
    and the next flush gives the record without it. `config` has its settings.
    """

    def __init__(self, config: SessionRecorderConfig | None = None) -> None:
        self._config = config or SessionRecorderConfig()
        self._sessions: dict[str, SessionRecord] = {}
        self._active: dict[str, None] = {}
        """The sessions with events since the last flush, in that order."""
        self._loops: dict[str, LoopFold] = {}
        self._completed: dict[str, SessionRecord] = {}
        self._refused: set[str] = set()
        self._redactions: dict[str, RecordRedaction] = {}
        self._awaited_refs: dict[str, list[ChildLoopRef]] = {}
        self._awaited_spawns: dict[str, SpawnRef] = {}
        self.unknown_events = 0
        """The number of events of a loop that had not started."""
        self.late_events = 0
        """The number of events that came after the end of their loop, or a second time."""

    def on_event(self, event: AnyLoopEvent | object) -> bool:
        """Take an `event`. Return True if it was recorded.

        An event is not recorded if its session was refused, or its loop is unknown or has ended. Nor are events that
        belong to no loop, so a recorder may listen to a whole `EventBus`. A redaction counts if it changed a record.
        """
        if isinstance(event, Redacted):
            return self._redact(event)
        if not isinstance(event, LoopEvent):
            return False
        return self._on_loop_event(event)  # type: ignore[arg-type]  # the union has every kind of loop event

    def _on_loop_event(self, event: AnyLoopEvent) -> bool:
        if isinstance(event, AgentStart | ParallelLoopStart) and not self._open(event):
            return False
        if isinstance(event, ParallelLoopStart):
            self._register_branches(event)
            return True
        if isinstance(event, ParallelLoopEnd):
            return self._select_branch(event)
        if isinstance(event, AgentStart):
            self._start_loop(event)
        return self._take(event)

    def _open(self, event: AgentStart | ParallelLoopStart) -> bool:
        """Begin a session at its first event, unless `before_task` refuses it."""
        session_id = self._session_of(event)
        if session_id in self._refused:
            return False
        if session_id in self._sessions:
            return True  # also a session that a flush has finalised: its record continues
        spawn = self._awaited_spawns.pop(session_id, None)
        if isinstance(event, AgentStart) and event.spawn_ref is not None:
            spawn = event.spawn_ref
        session = SessionRecord(
            session_id=session_id, agent_id=event.agent_id, created_at=event.at, parent_spawn_ref=spawn
        )
        if self._config.before_task is not None and not self._config.before_task(session):
            self._refused.add(session_id)
            return False
        self._sessions[session_id] = session
        return True

    def _session_of(self, event: AnyLoopEvent) -> str:
        """Return the session of an event: that of its loop, if known. A loop outside any session counts as one."""
        known = self._loops.get(event.loop_id)
        return known.session_id if known is not None else event.session_id or event.loop_id

    def _start_loop(self, event: AgentStart) -> None:
        session_id = self._session_of(event)
        if event.loop_id not in self._loops:
            self._loops[event.loop_id] = LoopFold(LoopRecord(loop_id=event.loop_id, session_id=session_id))
        for ref in self._awaited_refs.pop(event.loop_id, ()):
            self._loops[event.loop_id].link(ref)
        if event.spawn_ref is not None:
            self._link_child(event, event.spawn_ref)

    def _link_child(self, event: AgentStart, spawn: SpawnRef) -> None:
        """Link a child that names its parent with that parent, in whichever order their events came."""
        session_id = self._session_of(event)
        self._sessions[session_id] = replace(self._sessions[session_id], parent_spawn_ref=spawn)
        if event.parent_loop_id not in (spawn.parent_loop_id, None) or (event.resumed and event.parent_loop_id is None):
            return  # a later loop of the child: it continues one of the child's own, not a call of the parent
        ref = ChildLoopRef(spawn.tool_call_id, spawn.tool_name, event.loop_id, session_id)
        parent = self._loops.get(spawn.parent_loop_id)
        if parent is None:
            self._awaited_refs.setdefault(spawn.parent_loop_id, []).append(ref)
        else:
            parent.link(ref)
            self._active[parent.session_id] = None

    def _link_parent(self, event: ToolExecutionEnd, ref: ChildLoopRef) -> None:
        """Link a parent that names a child with that child. The child's events may still be to come."""
        spawn = SpawnRef(event.session_id or "", event.loop_id, ref.tool_call_id, ref.tool_name)
        child = self._sessions.get(ref.child_session_id)
        if child is None:
            self._awaited_spawns[ref.child_session_id] = spawn
        elif child.parent_spawn_ref is None:
            self._sessions[child.session_id] = replace(child, parent_spawn_ref=spawn)
            self._active[child.session_id] = None

    def _take(self, event: AnyLoopEvent) -> bool:
        record = self._loops.get(event.loop_id)
        if record is None:
            if self._session_of(event) not in self._refused:
                self.unknown_events += 1
                _log.warning("%s for loop %s, which has not started", type(event).__name__, event.loop_id)
            return False
        if record.is_late(event):
            self.late_events += 1
            _log.warning("%s for loop %s, which has ended; it changes nothing", type(event).__name__, event.loop_id)
            return False
        if record.session_id in self._redactions:
            event = self._redactions[record.session_id].later(event)
        keep = self._config.include_streaming_events or not isinstance(event, MessageUpdate)
        record.take(event, keep_event=keep)
        if isinstance(event, ToolExecutionEnd) and event.child is not None:
            self._link_parent(event, event.child)
        session = self._sessions[record.session_id]
        self._sessions[record.session_id] = replace(session, last_active_at=event.at)
        self._active[record.session_id] = None
        return True

    def _register_branches(self, event: ParallelLoopStart) -> None:
        self._active[self._session_of(event)] = None
        for loop_id in event.loop_ids:
            if loop_id in self._loops:
                self._loops[loop_id].announce(ParallelGroupRecord(event.loop_ids))
            else:
                self._loops[loop_id] = LoopFold(LoopRecord.pending(event, loop_id))

    def _select_branch(self, event: ParallelLoopEnd) -> bool:
        if self._session_of(event) in self._refused:
            return False
        for loop_id in event.loop_ids:
            record = self._loops.get(loop_id)
            if record is None:
                self.unknown_events += 1
                _log.warning("a parallel group ended with loop %s, which was not announced", loop_id)
                continue
            record.select(event)
            self._active[record.session_id] = None
        return any(loop_id in self._loops for loop_id in event.loop_ids)

    def _redact(self, event: Redacted) -> bool:
        """Replace the content of messages in every record that holds them. Return True if a record has changed."""
        changed = [self._redact_in(session_id, event.message_ids) for session_id in self._concerned(event)]
        return any(changed)

    def _concerned(self, event: Redacted) -> list[str]:
        """Return the sessions whose records a redaction has to change.

        It may name a fork, which shows messages that only its parent's record holds, and summaries of them.
        """
        named, ids = self._session_of(event), set(event.message_ids)
        holders = dict.fromkeys(loop.session_id for loop in self._loops.values() if names_any(loop.record(), ids))
        if named in holders:
            return [named]
        return [*holders, named] if named in self._sessions else list(holders)

    def _redact_in(self, session_id: str, message_ids: tuple[str, ...]) -> bool:
        """Redact a session's record, and the one that a flush has finalised but nobody has fetched yet."""
        folds = [loop for loop in self._loops.values() if loop.session_id == session_id]
        completed = self._completed.get(session_id)
        before = [*(fold.record() for fold in folds), *(completed.loops if completed is not None else ())]
        after = self._redactions.setdefault(session_id, RecordRedaction()).redact(before, message_ids)
        if after == before:
            return False
        for fold, record in zip(folds, after, strict=False):
            fold.rewrite(record)
        if completed is not None:
            self._completed[session_id] = replace(completed, loops=tuple(after[len(folds) :]))
        self._active[session_id] = None  # a record handed over before has the old text: the next flush replaces it
        return True

    def _session(self, session_id: str) -> SessionRecord:
        loops = with_children(loop.record() for loop in self._loops.values() if loop.session_id == session_id)
        return replace(self._sessions[session_id], loops=loops)

    def checkpoint(self) -> tuple[SessionRecord, ...]:
        """Return every open session as it is now, with running loops. Nothing is finalised."""
        return tuple(map(self._session, self._active))

    def flush(self) -> None:
        """Finalise every open session. Loops that have not ended are aborted, with what they have reached.

        They are aborted only in the record that is handed over. If more events of such a loop come, it continues.
        """
        at = now()
        opened, self._active = tuple(self._active), {}
        for session in map(self._session, opened):
            final = replace(session, loops=tuple(loop.aborted(at) for loop in session.loops))
            self._completed[final.session_id] = final
            if self._config.after_task is not None:
                self._config.after_task(final)

    def drain_completed(self) -> tuple[SessionRecord, ...]:
        """Return the sessions that `flush` has finalised, each as of the last time. They are returned once."""
        drained, self._completed = tuple(self._completed.values()), {}
        return drained
