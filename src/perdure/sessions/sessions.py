"""Every verb on sessions, by id. A `Chat` has the same ones for the session it stands for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Self, Unpack

from msgspec.structs import replace

from perdure.actions.children import spawned_by
from perdure.actions.given import require_loops
from perdure.actions.inbox import CANCEL
from perdure.actions.send import SendMessage, WhenBusy, waiting_messages
from perdure.aio import in_slices
from perdure.errors import (
    ConfigurationError,
    InputRefused,
    InvalidData,
    RunFailed,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
)
from perdure.loop.factory import LoopFactory
from perdure.loop.filters import rejection_in
from perdure.model.checks import expect_function, expect_method, expect_several, expect_wait
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId, now
from perdure.model.loop_events import AnyLoopEvent, LoopEvent
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, SessionStatus, check_owner
from perdure.model.state import AgentState
from perdure.paging import all_infos
from perdure.protocols import (
    Action,
    ArchivingStore,
    BulkErasure,
    Entry,
    Erasure,
    Filters,
    Opened,
    Search,
    SearchHit,
    SessionController,
    SessionStore,
)
from perdure.runtime.bus import EventBus, Subscriber
from perdure.runtime.runtime import OnConflict, SessionRuntime
from perdure.sessions.chat import Chat
from perdure.sessions.open_sessions import LiveSet, LiveSubscription
from perdure.sessions.opening import OnChange, changed_agent, changed_fields, check_on_change
from perdure.sessions.reply import Chunk, Reply
from perdure.sessions.streaming import Listener
from perdure.stores.urls import store_of

if TYPE_CHECKING:
    from perdure.actions.approval import ApproveToolCalls, DenyToolCalls, Shown
    from perdure.actions.definition import ChangeModel
    from perdure.actions.resume import RecoveryReport
    from perdure.archive.moving import MoveReport, Progress
    from perdure.model.record import LoopRecord, SessionRecord
    from perdure.sessions.lineage import Ancestry, Diff

# Verbs are imported where they are used: a process that opens a session and sends needs few of them.
ASSISTANT = AgentDefinition("assistant")
"""Who answers in a session that was opened without an agent."""


class Sessions:
    """Sessions in a store, and an agent loop to run them. With an owner, no other owner's sessions exist.

    A `model` is what sessions that keep another one are changed to when they are sent to.
    """

    def __init__(
        self,
        store: SessionStore,
        loops: LoopFactory,
        *,
        events: EventBus,
        owner: str | None = None,
        live: int = 128,
        model: ModelConfig | None = None,
        controller: SessionController | None = None,
        grace: float = 5.0,
    ) -> None:
        check_owner(owner)
        self.store = store
        self.loops = require_loops(loops)
        self.owner = owner
        self.runtime = SessionRuntime(store, controller=controller, events=events)
        self._controller = controller
        self._live = LiveSet(store, live)
        self._is_open = False
        self._model = model
        self._events = events
        self._grace = expect_wait(grace, "$.grace")
        self._streams: set[asyncio.Task[Reply]] = set()
        self._alone: set[SessionRuntime] = set()
        """The runtimes of agents that are asked once, without a session."""
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
        is_shared = isinstance(self.store, Opened) and self.store.is_open  # whoever opened it closes it
        if isinstance(self.store, AbstractAsyncContextManager) and not is_shared:
            await self._exits.enter_async_context(self.store)
        self._exits.push_async_callback(self.loops.aclose)
        self._exits.callback(self._events.wiretap(self._live.emit).cancel)
        self._is_open = True
        return self

    async def __aexit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Let runs end before the store is closed. After an error nobody waits: they are left to be recovered."""
        try:
            await self._end_runs(at_once=kind is not None)
        finally:
            await self._exits.aclose()
            self._is_open = False

    async def _end_runs(self, *, at_once: bool = False) -> None:
        """Stop streams that were left, and wait for runs; those that take longer than the grace are interrupted."""
        await self._stop_streams()
        grace = 0.0 if at_once else self._grace
        await asyncio.gather(*(each.close(grace) for each in (self.runtime, *self._alone)))

    async def _stop_streams(self) -> None:
        """Stop the runs of streams that were left before their end, and wait until what they said is kept."""
        for work in self._streams:
            work.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

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
            own = found.agent_name
            reason = f"Session {session_id!r} belongs to the agent {own!r}, not to {agent.name!r}."
            advice = "Open it without an agent, open another session, or give it another agent with ChangeDefinition."
            raise SessionConflict(session_id, found.version, found.version, reason, advice, agent=own)
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
        from perdure.actions.definition import ChangeDefinition

        given = replace(agent, model=session.definition.model) if agent.model is None else agent
        await self.execute(session_id, ChangeDefinition(given))

    async def new_session(self, session_id: str) -> Chat:
        """Begin a session with the agent, tags and model of another. A model that connect() names comes first."""
        like = await self.session(session_id)
        made = await self._create(SessionId.generate(), like.definition, like.info.tags, model=like.state.default_model)
        return self._handle(made.id)

    async def _create(
        self, session_id: SessionId, agent: AgentDefinition, tags: Iterable[str], model: ModelConfig | None = None
    ) -> AgentSessionInfo:
        seed = AgentState.of(agent).with_default_model(self.loops.model or model)
        try:
            made = await self.runtime.create(agent, seed=seed, session_id=session_id, owner=self.owner, tags=tags)
        except SessionConflict:  # somebody else was quicker, or it is another owner's
            found = await self._find(session_id)
            if found is None:
                raise SessionNotFound(
                    session_id, None, f"The id {session_id!r} is taken, and not yours to open.", "Choose another."
                ) from None
            return found
        self.live.touch(session_id).keeps_model = True
        return made.info

    async def _keep_model(self, session_id: SessionId) -> None:
        """Change the model that a session keeps to the one that connect() names, by an action of its own.

        It is looked at once for each connection, so that a later ChangeModel holds. A definition's model, and an
        override, come first and stay.
        """
        if self._model is None or self.live.touch(session_id).keeps_model:
            return
        session = await self.store.load(session_id)
        if session is None or session.status is not SessionStatus.ACTIVE:
            return  # which the send itself refuses
        from perdure.actions.definition import ChangeModel

        is_named_elsewhere = session.state.model is not None or session.definition.model is not None
        if not is_named_elsewhere and session.state.default_model != self._model:
            await self._change_model(session_id, ChangeModel(self._model, as_default=True))
        self.live.touch(session_id).keeps_model = True

    async def _change_model(self, session_id: SessionId, change: ChangeModel) -> None:
        try:
            await self.execute(session_id, change)
        except RunInterrupted:
            await self._resume(session_id)  # with the model that it was begun with
            await self.execute(session_id, change)

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
        metadata: Mapping[str, Any] | None = None,
        any_role: bool = False,
    ) -> Reply:
        """Say something and wait for the answer. RunFailed if the run ends without one.

        While another run is under way it is SessionBusy; with `when_busy` the message is left with that run, to be sent
        after it ("queue") or to be taken in on its way ("steer"), and the reply is `queued`: it has no answer yet.
        `metadata` goes on the record of the run. Messages of other roles than `user` are InvalidData, unless
        `any_role` lets them pass.
        """
        action = SendMessage(message, self.loops, key=key, when_busy=when_busy, metadata=metadata, any_role=any_role)
        with suppress(*() if when_busy == "raise" else (SessionBusy,)):  # the run that is under way sends what is left
            await self._keep_model(await self._reach(session_id))
        after = await self._after_run(session_id, action)
        return Reply(after, queued=True) if action.was_left else _answered(after, action)

    async def stream(
        self, session_id: str, message: object, *, key: str | None = None, metadata: Mapping[str, Any] | None = None
    ) -> AsyncIterator[Chunk]:
        """Say something and have the answer's text as it comes; the last chunk is empty and has the `reply`.

        Whoever stops listening stops the run; what was said until then is kept.
        """
        action = SendMessage(message, self.loops, key=key, metadata=metadata)
        session_id = await self._reach(session_id)
        await self._keep_model(session_id)
        listener = Listener(session_id)
        listening = self._events.subscribe(LoopEvent, listener.hear, session_id=session_id)
        work = listener.listen_to(self._run(session_id, action))
        self._streams.add(work)
        try:
            while (chunk := await listener.chunks.get()) is not None:
                yield chunk
            yield Chunk(reply=await self._streamed(work))
        finally:
            listening.cancel()
            work.cancel()  # which does nothing to one that is done
            await asyncio.gather(work, return_exceptions=True)
            self._streams.discard(work)

    async def _streamed(self, work: asyncio.Task[Reply]) -> Reply:
        """Return the reply of a stream's run; an error for a listener whose connection is closed under it."""
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ConfigurationError(
                "The connection was closed while the answer was streamed, so the run was stopped. What was said so far "
                "is kept."
            ) from None

    async def run(self, message: object, agent: AgentDefinition | None = None) -> Reply:
        """Ask once, without a session: nothing is kept but what the reply holds.

        ConfigurationError if a tool is called that needs a person's approval: nobody could give it afterwards.
        """
        self._require_open()
        runtime = SessionRuntime(store_of("memory://"), controller=self._controller, events=self._events)
        session = await runtime.create(ASSISTANT if agent is None else agent, owner=self.owner)
        action = SendMessage(message, self.loops)
        self._alone.add(runtime)
        try:
            after = await runtime.execute(session.id, action)
        except RunInterrupted:
            raise ConfigurationError(
                "The connection was left while run() was under way. Nothing of it is kept."
            ) from None
        finally:
            self._alone.discard(runtime)
        from perdure.loop.unattended import require_nothing_pending

        reply = _answered(after, action)
        require_nothing_pending(reply.pending_calls)
        return reply

    async def approve(self, session_id: str, call_ids: Shown | None = None) -> Reply:
        """Let pending tool calls be made, and the run continue: all of them, or those given as they were shown.

        A call is given as it is in `reply.pending_calls`, or by its digest or id. PendingCallsChanged is raised, and
        nothing is made, if the session waits for something else by now.
        """
        from perdure.actions.approval import ApproveToolCalls

        shown = await self._shown(session_id, call_ids)
        return await self._decide(session_id, ApproveToolCalls(self.loops, call_ids=shown))

    async def deny(self, session_id: str, reason: str, call_ids: Shown | None = None) -> Reply:
        """Keep pending tool calls from being made; the model is told why, and continues."""
        from perdure.actions.approval import DenyToolCalls

        shown = await self._shown(session_id, call_ids)
        return await self._decide(session_id, DenyToolCalls(self.loops, reason=reason, call_ids=shown))

    async def _shown(self, session_id: str, call_ids: Shown | None) -> Shown:
        """Return the calls that a decision is about: without any named, those that wait when it is made.

        It is not about calls that wait only after somebody else's decision, or once a killed run was recovered.
        """
        if call_ids is not None:
            return call_ids
        session = await self.store.load(await self._reach(session_id))
        execution = session.state.execution if session is not None else None
        return execution.pending_calls if execution is not None else ()

    async def _decide(self, session_id: str, action: ApproveToolCalls | DenyToolCalls) -> Reply:
        reply = await self._run(session_id, action)
        return replace(reply, used_before=action.used_before)

    async def _run(self, session_id: str, action: Action) -> Reply:
        return _answered(await self._after_run(session_id, action), action)

    async def _after_run(self, session_id: str, action: Action) -> AgentSession:
        key = await self._reach(session_id)
        with self.live.running(key):
            try:
                return await self.runtime.execute(key, action, on_conflict="retry")
            except RunInterrupted as error:
                if error.session_id != key or self.runtime.is_closing:
                    raise
            await self._resume(key)
            return await self.runtime.execute(key, action, on_conflict="retry")

    async def _resume(self, session_id: SessionId) -> None:
        """Go on with a run that was killed, before anything else is said."""
        from perdure.actions.resume import recover

        report = await recover(self.runtime, self.loops, session_id=session_id)
        if report.errors:
            error = report.errors[0]
            killed = f"The last run was killed, and cannot be recovered: {error.what}"
            raise ConfigurationError(killed, error.advice) from error

    async def cancel(self, session_id: str) -> bool:
        """Ask the run that is under way, in whichever process, to stop; False if there is none.

        One that was killed is ended where it stands.
        """
        from perdure.actions.resume import ResumeExecution

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
        """Execute any action on a session. After a conflict, one that may be repeated is applied again."""
        key = await self._reach(session_id)
        with self.live.running(key):
            after = await self.runtime.execute(key, action, on_conflict=on_conflict)
        waiting = waiting_messages(self.runtime, key, self.loops)
        if waiting is not None and after.status is SessionStatus.ACTIVE:  # it may be just now
            await self.runtime.follow(waiting)
        return after

    async def inject(self, session_id: str, message: object) -> None:
        """Append a message, `{role, content, …}` or a Message, without running the agent."""
        from perdure.actions.transcript import InjectMessage

        if isinstance(message, str):
            raise InvalidData("$.message", "a message to inject needs a role: {'role': 'user', 'content': …}")
        await self.execute(session_id, InjectMessage(message))

    async def trim(self, session_id: str, keep_last: int) -> int:
        """Show the last messages only; how many that are."""
        from perdure.actions.transcript import TrimTranscript

        return _length(await self.execute(session_id, TrimTranscript(keep_last)))

    async def compact(self, session_id: str, **options: Any) -> int:
        """Show a summary or less of what is older; how many messages are shown then. See `CompactionOptions`."""
        from perdure.actions.compact import CompactTranscript

        return _length(await self.execute(session_id, CompactTranscript(loops=self.loops, **options)))

    async def uncompact(self, session_id: str, block_id: str | None = None) -> int:
        """Show again what the newest compaction covers, or that of an id; how many messages are shown then."""
        from perdure.actions.compact import UncompactTranscript

        return _length(await self.execute(session_id, UncompactTranscript(block_id)))

    async def reset(self, session_id: str) -> None:
        """Show nothing of what was said so far."""
        from perdure.actions.transcript import ResetTranscript

        await self.execute(session_id, ResetTranscript())

    async def undo(self, session_id: str) -> int:
        """Take back the last change of what is shown; how many messages are shown then."""
        from perdure.actions.transcript import Undo

        return _length(await self.execute(session_id, Undo()))

    async def rewind(self, session_id: str, to: int | str) -> int:
        """Go back to a version, by its number, or to a message, by its id; how many messages are shown then."""
        from perdure.actions.transcript import Rewind

        return _length(await self.execute(session_id, Rewind(to)))

    async def suspend(self, session_id: str) -> None:
        from perdure.actions.lifecycle import SuspendSession

        await self.execute(session_id, SuspendSession())

    async def resume(self, session_id: str) -> None:
        from perdure.actions.lifecycle import ResumeSession

        await self.execute(session_id, ResumeSession())

    async def fork(
        self,
        src: str,
        dst: str | None = None,
        *,
        at: int | str | None = None,
        version: int | None = None,
        loop: str | None = None,
    ) -> Chat:
        """Return a new session that begins where another stands: at its end, at a message, at an older version, or
        where one of its loops ended, be it a branch that was not selected."""
        from perdure.actions.fork import ForkSession

        action = ForkSession(at=at, dst=dst, loop=loop)
        if loop is not None and version is not None:
            raise InvalidData("$.version", "a loop says itself which version it began from; give loop= or version=")
        made = await self.runtime.branch(await self._reach(src), action, version=version)
        return self._handle(made.id)

    async def adopt(self, session_id: str, branch: str) -> None:
        """Show from now on what a fork of the session shows."""
        from perdure.actions.adopt import AdoptBranch

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
        """Return a page of headers, the newest first, or by `order="updated"` the last updated first.

        Those of this owner's sessions, where there is one. `owner=None` asks for sessions without an owner.
        """
        self._require_open()
        if self.owner is not None:
            if filters.get("owner", self.owner) != self.owner:
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
        said = session.state.transcript
        messages = [message.to_dict() async for some in in_slices(said) for message in some]
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
        from perdure.sessions.history import all_said

        session = await self.session(session_id)
        return await all_said(self.runtime.journal, session, partial(self.session, session_id))

    async def ancestry(self, session_id: str) -> Ancestry:
        """What a session was forked from, what was forked from it, and the first of its line."""
        from perdure.sessions.lineage import ancestry_of

        return await ancestry_of(self.store, await self.info(session_id))

    async def diff(self, left: str, right: str) -> Diff:
        """What two sessions have in common from their beginning on, and how each goes on."""
        from perdure.sessions.lineage import diff_of

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
        from perdure.actions.resume import RecoveryReport, recover

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
        from perdure.archive.moving import export_sessions

        _check_moving(target, "write", "$.target", progress)
        wanted = None if session_ids is None else expect_several(session_ids, "$.session_ids")
        chosen = None if wanted is None else [(await self.info(each)).id for each in wanted]
        if chosen is None and self.owner is not None:
            chosen = [info.id for info in await all_infos(self)]
        return await export_sessions(self._archive(), target, chosen, progress=progress)

    async def import_(
        self, source: str | os.PathLike[str] | BinaryIO, *, progress: Progress | None = None
    ) -> MoveReport:
        """Take in the sessions of a file that `export` has written; those that are there already are skipped."""
        from perdure.archive.moving import import_sessions

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
        """Erase sessions for good, and those of their sub-agents with them; what forks show stays.

        Return how many were erased, sub-agents' sessions included. One that is running is left alone.
        """
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
            filters: Filters = {"status": each}
            if before is not None:
                filters |= {"updated_before": before, "order": "updated"}  # no page looks at sessions that stay
            erased += len(await self._erase([info.id for info in await all_infos(self, **filters)]))
        return erased

    async def _erase(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Erase sessions with those of their sub-agents, except those that run or that somebody else has erased.

        Return the ids erased.
        """
        session_ids = await self._with_children(session_ids)
        store = self.store
        erased = await (store.delete_many(session_ids) if isinstance(store, BulkErasure) else self._each(session_ids))
        for session_id in erased:
            self.live.close(session_id)
        return erased

    async def _each(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Erase sessions one by one, as `BulkErasure` does at once."""
        erased: list[SessionId] = []
        for session_id in session_ids:
            with suppress(SessionBusy, SessionNotFound):
                await self.store.delete(session_id)
                erased.append(session_id)
        return erased

    async def delete(self, session_id: str) -> Sequence[SessionId]:
        """Erase a session for good, and the sessions of its sub-agents with it; what its forks show stays.

        Return the ids erased.
        """
        key = (await self.info(session_id)).id
        if self.runtime.journal is not None and await self.runtime.journal.is_claimed(key):
            raise SessionBusy(key)
        erased = await self._erase([key])
        if key not in erased:  # somebody has begun to run it, or has erased it: the store says which
            await self.store.delete(key)
        return erased

    async def _with_children(self, session_ids: Sequence[SessionId]) -> Sequence[SessionId]:
        """Return ids, each once and after those of the sessions that its sub-agents have."""
        every: dict[SessionId, None] = {}
        for session_id in session_ids:
            every |= dict.fromkeys(info.id for info in await spawned_by(self.store, session_id, deleted=True))
            every[session_id] = None
        return tuple(every)

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace what messages say, for good and everywhere; return how many were replaced.

        A sub-agent's session and its caller's have copies of each other's texts in messages of their own, which stay:
        `search` finds them.

        Subscribers of the session, and of its forks that are open here, hear it once it is done.
        """
        from perdure.sessions.redacting import tell_of_redaction

        key, began = await self._reach(session_id), now()
        replaced = await self._erasure().redact(key, message_ids, replacement=replacement)
        if self.runtime.journal is not None:
            await tell_of_redaction(self.runtime.journal, self._events, (key, *self.live), began)
        return replaced

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


def _answered(session: AgentSession, action: Action) -> Reply:
    state = session.state
    rejection = rejection_in(state.execution.continuation.stop_signals) if state.execution else None
    if rejection is not None:
        raise InputRefused(session.id, session.version, rejection)
    if state.status is ExecutionStatus.FAILED:
        last = state.errors[-1] if state.errors else None
        kind, reason = (last.type, last.message) if last else (None, str(state.stop_reason))
        raise RunFailed(session.id, session.version, reason, is_shown=_is_shown(session, action), kind=kind)
    return Reply(session)


def _is_shown(session: AgentSession, action: Action) -> bool:
    """Tell whether the view has what was sent: not if an input filter failed, which leaves the view as it was."""
    sent = {message.id for message in action.messages} if isinstance(action, SendMessage) else set()
    return not sent or any(message.id in sent for message in session.state.messages)


def _length(session: AgentSession) -> int:
    return len(session.state.transcript)
