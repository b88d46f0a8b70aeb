"""Every verb on sessions, by id. A `Chat` has the same ones for the session it stands for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, BinaryIO, Self, Unpack

from msgspec.structs import replace

from perdure.actions.adopt import AdoptBranch
from perdure.actions.approval import ApproveToolCalls, DenyToolCalls
from perdure.actions.compact import CompactTranscript, UncompactTranscript
from perdure.actions.definition import ChangeDefinition
from perdure.actions.fork import ForkSession
from perdure.actions.given import require_loops
from perdure.actions.lifecycle import ResumeSession, SuspendSession
from perdure.actions.resume import RecoveryReport, ResumeExecution, recover
from perdure.actions.running import CANCEL
from perdure.actions.send import SendMessage, WhenBusy
from perdure.actions.transcript import InjectMessage, ResetTranscript, Rewind, TrimTranscript, Undo
from perdure.archive import ArchivingStore, MoveReport, Progress, export_sessions, import_sessions
from perdure.errors import (
    ConfigurationError,
    InvalidData,
    RunFailed,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
)
from perdure.loop.factory import LoopFactory
from perdure.model.checks import expect_function, expect_method, expect_several
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId, now
from perdure.model.loop_events import AnyLoopEvent
from perdure.model.message import Message
from perdure.model.record import LoopRecord, SessionRecord
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, SessionStatus, check_owner
from perdure.protocols import Action, Entry, Erasure, Filters, Search, SearchHit, SessionStore
from perdure.runtime.bus import EventBus, Subscriber
from perdure.runtime.runtime import OnConflict, SessionRuntime
from perdure.sessions.chat import Chat
from perdure.sessions.family import Ancestry, Diff, ancestry_of, diff_of
from perdure.sessions.history import all_said
from perdure.sessions.listener import Listener
from perdure.sessions.live import LiveSet, LiveSubscription
from perdure.sessions.opening import OnChange, changed_agent, changed_fields, check_on_change
from perdure.sessions.reply import Chunk, Reply
from perdure.stores.memory import MemoryStore

ASSISTANT = AgentDefinition("assistant")
"""Who answers in a session that was opened without an agent."""


class Sessions:
    """Sessions in a store, and an agent loop to run them. With an owner, no other owner's sessions exist."""

    def __init__(
        self,
        store: SessionStore,
        loops: LoopFactory,
        *,
        events: EventBus,
        owner: str | None = None,
        live: int = 128,
    ) -> None:
        check_owner(owner)
        self.store = store
        self.loops = require_loops(loops)
        self.owner = owner
        self.runtime = SessionRuntime(store, events=events)
        self._live = LiveSet(store, live)
        self._is_open = False
        self._events = events
        self._exits = AsyncExitStack()

    @property
    def live(self) -> LiveSet:
        """The sessions that somebody has open here."""
        self._require_open()
        return self._live

    def _require_open(self) -> None:
        if not self._is_open:
            raise ConfigurationError(
                "This connection is not open: nothing would be heard or kept. Use it inside "
                "`async with perdure.connect(…) as sessions:`."
            )

    async def __aenter__(self) -> Self:
        is_shared = getattr(self.store, "is_open", False)  # whoever opened it closes it
        if isinstance(self.store, AbstractAsyncContextManager) and not is_shared:
            await self._exits.enter_async_context(self.store)
        self._exits.push_async_callback(self.loops.aclose)
        self._exits.callback(self._events.wiretap(self._live.emit).cancel)
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()
        self._is_open = False

    # Opening and closing

    async def open(
        self,
        id: str | None = None,
        agent: AgentDefinition | None = None,
        *,
        tags: Iterable[str] = (),
        on_change: OnChange = "raise",
    ) -> Chat:
        """Return a handle on a session: on a new one, or on that of an id, which is created unless it is there.

        `on_change` says what happens if the session keeps another definition of this agent: SessionConflict ("raise"),
        the session goes on with its own ("keep"), or it is given the new one, on record ("take").
        """
        check_on_change(on_change)
        if agent is not None and not isinstance(agent, AgentDefinition):
            raise InvalidData("$.agent", f"expected an AgentDefinition, got {type(agent).__name__}")
        session_id = SessionId.generate() if id is None else SessionId(id)
        found = None if id is None else await self._find(session_id)
        if found is None:
            found = await self._create(session_id, agent or ASSISTANT, tags)
        if agent is not None and agent.name != found.agent_name:
            reason = f"Session {session_id!r} belongs to the agent {found.agent_name!r}, not to {agent.name!r}. "
            advice = "Open it without an agent, open another session, or give it another agent with ChangeDefinition."
            raise SessionConflict(session_id, found.version, found.version, reason + advice)
        if agent is not None and id is not None:
            await self._settle_agent(session_id, agent, on_change)
        return self._handle(session_id)

    async def _settle_agent(self, session_id: SessionId, agent: AgentDefinition, on_change: OnChange) -> None:
        session = await self.store.load(session_id)  # not by the runtime: nobody reads it yet
        if session is None:
            raise SessionNotFound(session_id)
        if on_change == "keep" or not changed_fields(session, agent):
            return
        if on_change == "raise":
            raise changed_agent(session, agent)
        given = replace(agent, model=session.definition.model) if agent.model is None else agent
        await self.execute(session_id, ChangeDefinition(given))

    async def _create(self, session_id: SessionId, agent: AgentDefinition, tags: Iterable[str]) -> AgentSessionInfo:
        try:
            made = await self.runtime.create(agent, session_id=session_id, owner=self.owner, tags=tags)
        except SessionConflict:  # somebody else was quicker, or it is another owner's
            found = await self._find(session_id)
            if found is None:
                raise SessionNotFound(
                    session_id, reason=f"The id {session_id!r} is taken, and not yours to open. Choose another."
                ) from None
            return found
        return made.info

    def _handle(self, session_id: SessionId) -> Chat:
        self.live.touch(session_id)
        return Chat(self, session_id)

    async def _find(self, session_id: str) -> AgentSessionInfo | None:
        """A session's header; None if there is none, or another owner's."""
        self._require_open()
        page = await self.store.list(id=SessionId(session_id), limit=1)
        if page.damaged:
            raise page.damaged[0]
        found = page.all()[0] if page else None
        return found if found is None or self.owner in (None, found.owner) else None

    async def _reach(self, session_id: str) -> SessionId:
        """The id of a session that this owner may touch. Without an owner the verb itself finds out."""
        self._require_open()
        checked = SessionId(session_id)
        if self.owner is not None and await self._find(checked) is None:
            raise SessionNotFound(checked)
        return checked

    async def close(self, session_id: str) -> None:
        """Let go of a session: its subscribers hear nothing more, and it leaves the memory. The store keeps it."""
        await self.info(session_id)
        self.live.close(session_id)

    async def subscribe(self, session_id: str, subscriber: Subscriber) -> LiveSubscription:
        """Call a function, plain or async, with every event of a session in this process."""
        return self.live.subscribe((await self.info(session_id)).id, subscriber)

    # Talking

    async def send(
        self,
        session_id: str,
        message: object,
        *,
        key: str | None = None,
        when_busy: WhenBusy = "raise",
        any_role: bool = False,
    ) -> Reply:
        """Say something and wait for the answer. RunFailed if the run ends without one.

        While another run is under way it is SessionBusy; with `when_busy` the message is left with that run, to be sent
        after it ("queue") or to be taken in on its way ("steer"), and the reply is `queued`: it has no answer yet.
        Messages of other roles than `user` are InvalidData, unless `any_role` lets them pass.
        """
        action = SendMessage(message, self.loops, key=key, when_busy=when_busy, any_role=any_role)
        after = await self._after_run(session_id, action)
        return Reply(after, queued=True) if action.was_left else _answered(after)

    async def stream(self, session_id: str, message: object, *, key: str | None = None) -> AsyncIterator[Chunk]:
        """Say something and have the answer's text as it comes; the last chunk is empty and has the `reply`.

        Whoever stops listening stops the run; what was said until then is kept.
        """
        action = SendMessage(message, self.loops, key=key)
        session_id = await self._reach(session_id)
        listener = Listener(session_id)
        listening = self._events.wiretap(listener.hear)
        work = listener.listen_to(self._run(session_id, action))
        try:
            while (chunk := await listener.chunks.get()) is not None:
                yield chunk
            yield Chunk(reply=await work)
        finally:
            listening.cancel()
            work.cancel()  # which does nothing to one that is done
            await asyncio.gather(work, return_exceptions=True)

    async def run(self, message: object, agent: AgentDefinition | None = None) -> Reply:
        """Ask once, without a session: nothing is kept but what the reply holds."""
        self._require_open()
        runtime = SessionRuntime(MemoryStore(), events=self._events)
        session = await runtime.create(agent or ASSISTANT, owner=self.owner)
        return _answered(await runtime.execute(session.id, SendMessage(message, self.loops)))

    async def approve(self, session_id: str, call_ids: Iterable[str] | None = None) -> Reply:
        """Let pending tool calls be made, all of them by default, and the run go on."""
        return await self._run(session_id, ApproveToolCalls(self.loops, call_ids=call_ids))

    async def deny(self, session_id: str, reason: str, call_ids: Iterable[str] | None = None) -> Reply:
        """Keep pending tool calls from being made; the model is told why, and goes on."""
        return await self._run(session_id, DenyToolCalls(self.loops, reason=reason, call_ids=call_ids))

    async def _run(self, session_id: str, action: Action) -> Reply:
        return _answered(await self._after_run(session_id, action))

    async def _after_run(self, session_id: str, action: Action) -> AgentSession:
        key = await self._reach(session_id)
        with self.live.running(key):
            try:
                return await self.runtime.execute(key, action)
            except RunInterrupted as error:
                if error.session_id != key:
                    raise
            await self._resume(key)
            return await self.runtime.execute(key, action)

    async def _resume(self, session_id: SessionId) -> None:
        """Go on with a run that was killed, before anything else is said."""
        report = await recover(self.runtime, self.loops, session_id=session_id)
        if report.failed:
            raise ConfigurationError(f"The last run was killed, and cannot be recovered: {report.failed[0][1]}")

    async def cancel(self, session_id: str) -> bool:
        """Ask the run that is under way, in whichever process, to stop; False if there is none.

        One that was killed is ended where it stands.
        """
        key, journal = (await self.info(session_id)).id, self.runtime.journal
        if journal is None:
            raise ConfigurationError("This store has no journal, so a run cannot be reached from here.")
        if not await journal.is_claimed(key):
            if not await journal.is_interrupted(key):
                return False
            await self.execute(key, ResumeExecution(self.loops, give_up=True), on_conflict="raise")
            return True
        await journal.post(key, Entry(CANCEL))
        return True

    # Changing what is shown

    async def execute(self, session_id: str, action: Action, *, on_conflict: OnConflict = "retry") -> AgentSession:
        """Execute any action on a session. One that runs no model is applied anew where somebody else was quicker."""
        key = await self._reach(session_id)
        with self.live.running(key):
            return await self.runtime.execute(key, action, on_conflict=on_conflict)

    async def inject(self, session_id: str, message: object) -> None:
        """Append a message, `{role, content, …}` or a Message, without running the agent."""
        if isinstance(message, str):
            raise InvalidData("$.message", "a message to inject needs a role: {'role': 'user', 'content': …}")
        await self.execute(session_id, InjectMessage(message))

    async def trim(self, session_id: str, keep_last: int) -> int:
        """Show the last messages only; how many that are."""
        return _length(await self.execute(session_id, TrimTranscript(keep_last)))

    async def compact(self, session_id: str, **options: Any) -> int:
        """Show a summary or less of what is older; how many messages are shown then. See `CompactionOptions`."""
        return _length(await self.execute(session_id, CompactTranscript(loops=self.loops, **options)))

    async def uncompact(self, session_id: str, block_id: str | None = None) -> int:
        """Show again what the newest compaction covers, or that of an id; how many messages are shown then."""
        return _length(await self.execute(session_id, UncompactTranscript(block_id)))

    async def reset(self, session_id: str) -> None:
        """Show nothing of what was said so far."""
        await self.execute(session_id, ResetTranscript())

    async def undo(self, session_id: str) -> int:
        """Take back the last change of what is shown; how many messages are shown then."""
        return _length(await self.execute(session_id, Undo()))

    async def rewind(self, session_id: str, to: int | str) -> int:
        """Go back to a version, by its number, or to a message, by its id; how many messages are shown then."""
        return _length(await self.execute(session_id, Rewind(to)))

    async def suspend(self, session_id: str) -> None:
        await self.execute(session_id, SuspendSession())

    async def resume(self, session_id: str) -> None:
        await self.execute(session_id, ResumeSession())

    async def fork(
        self, src: str, dst: str | None = None, *, at: int | str | None = None, version: int | None = None
    ) -> Chat:
        """A new session that begins where another stands: at its end, at a message, or at an older version."""
        session = await self.session(src, version)
        made = await self.store.create(await ForkSession(at=at, dst=dst).execute_on(session))
        return self._handle(made.id)

    async def adopt(self, session_id: str, branch: str) -> None:
        """Show from now on what a fork of the session shows."""
        await self.execute(session_id, AdoptBranch(await self._reach(branch)))

    # Looking

    async def exists(self, session_id: str) -> bool:
        self._require_open()
        if self.owner is None:
            return await self.store.exists(SessionId(session_id))
        return await self._find(session_id) is not None

    async def info(self, session_id: str) -> AgentSessionInfo:
        """A session's header."""
        found = await self._find(session_id)
        if found is None:
            raise SessionNotFound(session_id)
        return found

    async def session(self, session_id: str, version: int | None = None) -> AgentSession:
        """The session itself, as of a version."""
        return await self.runtime.get_session(await self._reach(session_id), version=version)

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        """A page of headers, newest first; of this owner's sessions, where there is one."""
        self._require_open()
        if self.owner is not None:
            if filters.get("owner") not in (None, self.owner):
                return SessionInfoList(())
            filters["owner"] = self.owner
        return await self.store.list(**filters)

    async def length(self, session_id: str) -> int:
        """How many messages the model is shown."""
        return _length(await self.session(session_id))

    async def snapshot(self, session_id: str) -> dict[str, Any] | None:
        """A copy of what the model is shown, as plain data; None if there is no such session."""
        try:
            session = await self.session(session_id)
        except SessionNotFound:
            return None
        messages = [message.to_dict() for message in session.state.messages]
        return {
            "id": str(session.id),
            "version": session.version,
            "status": session.status.value,
            "agent": session.info.agent_name,
            "system_prompt": session.state.context.system_prompt,
            "metadata": dict(session.state.metadata),
            "messages": messages,
        }

    async def history(self, session_id: str) -> Sequence[Message]:
        """All that was said, whatever is covered, trimmed or rewound now."""
        session = await self.session(session_id)
        return await all_said(self.runtime.journal, session, partial(self.session, session_id))

    async def ancestry(self, session_id: str) -> Ancestry:
        """What a session was forked from, what was forked from it, and the first of its line."""
        return await ancestry_of(self.store, await self.info(session_id))

    async def diff(self, left: str, right: str) -> Diff:
        """What two sessions have in common from their beginning on, and how each goes on."""
        return diff_of(await self.session(left), await self.session(right))

    async def search(self, text: str, *, session_id: str | None = None, limit: int = 20) -> Sequence[SearchHit]:
        """The messages that have every word of a text, best first, covered and trimmed ones too."""
        self._require_open()
        store = self.store
        if not isinstance(store, Search):
            raise _cannot(store, "search messages")
        key = None if session_id is None else (await self.info(session_id)).id
        return await store.search(text, owner=self.owner, session_id=key, limit=limit)

    async def record(self, session_id: str, *, limit: int | None = None, before: int | None = None) -> SessionRecord:
        """What ran in a session."""
        return await self.runtime.record((await self.info(session_id)).id, limit=limit, before=before)

    async def loop(self, session_id: str, loop_id: str) -> LoopRecord:
        """The whole record of one run."""
        return await self.runtime.loop((await self.info(session_id)).id, loop_id)

    async def events(
        self, session_id: str, *, after: int | None = None, last: int | None = None, follow: bool = False
    ) -> AsyncIterator[AnyLoopEvent]:
        """The events on record, and with `follow` those to come, from whichever process."""
        key = (await self.info(session_id)).id
        async for event in self.runtime.events(key, after=after, last=last, follow=follow):
            yield event

    # Keeping and erasing

    async def recover(self, session_id: str | None = None) -> RecoveryReport:
        """Go on with runs that were killed: with one session's, or with all of them."""
        self._require_open()
        if session_id is not None or self.owner is None:
            key = None if session_id is None else (await self.info(session_id)).id
            return await recover(self.runtime, self.loops, session_id=key)
        lapsed = await self.runtime.journal.lapsed() if self.runtime.journal is not None else ()
        own = [each for each in reversed(lapsed) if await self._find(each) is not None]  # children first
        return RecoveryReport.joined([await recover(self.runtime, self.loops, session_id=each) for each in own])

    async def export(
        self,
        target: str | os.PathLike[str] | BinaryIO,
        session_ids: Iterable[str] | None = None,
        *,
        progress: Progress | None = None,
    ) -> MoveReport:
        """Write sessions with all their versions and runs into one file of JSON Lines, all of them by default."""
        _check_moving(target, "write", "$.target", progress)
        wanted = None if session_ids is None else expect_several(session_ids, "$.session_ids")
        chosen = None if wanted is None else [(await self.info(each)).id for each in wanted]
        if chosen is None and self.owner is not None:
            chosen = [info.id async for info in self._all({})]
        return await export_sessions(self._archive(), target, chosen, progress=progress)

    async def import_(
        self, source: str | os.PathLike[str] | BinaryIO, *, progress: Progress | None = None
    ) -> MoveReport:
        """Take in the sessions of a file that `export` has written; those that are there already are skipped."""
        _check_moving(source, "read", "$.source", progress)
        return await import_sessions(self._archive(), source, owner=self.owner, progress=progress)

    def _archive(self) -> ArchivingStore:
        self._require_open()
        if not isinstance(self.store, ArchivingStore):
            raise _cannot(self.store, "move sessions")
        return self.store

    def _erasure(self) -> Erasure:
        self._require_open()
        if not isinstance(self.store, Erasure):
            raise _cannot(self.store, "erase single messages")
        return self.store

    async def purge(
        self, *, older_than: timedelta | datetime | None = None, status: SessionStatus | str | None = None
    ) -> int:
        """Erase sessions for good, but for what their forks show; how many. One that is running is left alone."""
        if older_than is None and status is None:
            raise InvalidData("$", "name what is to be erased: older_than, status, or both")
        if not isinstance(older_than, timedelta | datetime | None):
            given = type(older_than).__name__
            raise InvalidData("$.older_than", f"expected a timedelta, or a datetime with a time zone; got {given}")
        before = now() - older_than if isinstance(older_than, timedelta) else older_than
        if before is not None and before.tzinfo is not None and before > now():
            raise InvalidData("$.older_than", "this is in the future, so every session would be erased")
        erased = 0
        for each in (status,) if status is not None else SessionStatus:
            filters: Filters = {"status": each} if before is None else {"status": each, "updated_before": before}
            erased += len(await self._erase([info.id async for info in self._all(filters)]))
        return erased

    async def _erase(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Erase sessions, but for those that run or that somebody else has erased; which they were."""
        at_once = getattr(self.store, "delete_many", None)
        erased: list[SessionId] = [] if at_once is None else list(await at_once(session_ids))
        for session_id in session_ids if at_once is None else ():
            with suppress(SessionBusy, SessionNotFound):
                await self.store.delete(session_id)
                erased.append(session_id)
        for session_id in erased:
            self.live.close(session_id)
        return erased

    async def delete(self, session_id: str) -> None:
        """Erase a session for good, but for what its forks show."""
        key = (await self.info(session_id)).id
        await self.store.delete(key)
        self.live.close(key)

    async def _all(self, filters: Filters) -> AsyncIterator[AgentSessionInfo]:
        filters["limit"] = 500
        while True:
            page = await self.list(**filters)
            for info in page:
                yield info
            if page.next is None:
                return
            filters["after"] = page.next

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace what messages say, for good and everywhere; how many were replaced."""
        return await self._erasure().redact(await self._reach(session_id), message_ids, replacement=replacement)

    async def gc(self) -> int:
        """Erase what erased sessions have left behind and nothing points to; how many messages. Not for one owner."""
        if self.owner is not None:
            raise ConfigurationError(
                "Clearing up goes through the whole store, whoever owned what is left in it. Call gc() on sessions "
                "that were connected without an owner."
            )
        return await self._erasure().gc()


def _check_moving(file: object, method: str, path: str, progress: object) -> None:
    if not isinstance(file, str | os.PathLike):
        expect_method(file, method, path)
    if progress is not None:
        expect_function(progress, "$.progress")


def _cannot(store: SessionStore, what: str) -> ConfigurationError:
    return ConfigurationError(f"A {type(store).__name__} cannot {what}. Use a store of perdure's own that can.")


def _answered(session: AgentSession) -> Reply:
    state = session.state
    if state.status is ExecutionStatus.FAILED:
        last = state.errors[-1] if state.errors else None
        reason = f"{last.type}: {last.message}" if last else str(state.stop_reason)
        raise RunFailed(session.id, session.version, reason)
    return Reply(session)


def _length(session: AgentSession) -> int:
    return len(session.state.transcript)
