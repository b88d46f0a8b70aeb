"""Talk to an agent: send, stream, decide on calls that wait, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from perdure.actions.inbox import CANCEL
from perdure.actions.send import SendMessage, WhenBusy
from perdure.errors import ConfigurationError, InputRefused, RunFailed, RunInterrupted, SessionBusy
from perdure.loop.filters import rejection_in
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.loop_events import LoopEvent
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import Action, Entry
from perdure.runtime.runtime import SessionRuntime
from perdure.sessions.attaching import Sent, message_of
from perdure.sessions.reach import Reach
from perdure.sessions.reply import Chunk, Reply
from perdure.sessions.streaming import Listener
from perdure.stores.urls import store_of

if TYPE_CHECKING:
    from perdure.actions.approval import ApproveToolCalls, DenyToolCalls, Shown
    from perdure.actions.definition import ChangeModel

# Actions are imported where they are used: a process that opens a session and sends needs few of them.
ASSISTANT = AgentDefinition("assistant")
"""Who answers in a session that was opened without an agent."""


class Talking(Reach):
    """The verbs that run an agent."""

    async def send(
        self,
        session_id: str,
        message: object,
        *parts: Sent,
        key: str | None = None,
        when_busy: WhenBusy = "raise",
        metadata: Mapping[str, Any] | None = None,
        any_role: bool = False,
    ) -> Reply:
        """Say something and wait for the answer. RunFailed if the run ends without one.

        `parts` are images and files that go with a text, from `perdure.attach` or as paths, and further texts.
        While another run is under way it is SessionBusy; with `when_busy` the message is left with that run, to be sent
        after it ("queue") or to be taken in on its way ("steer"), and the reply is `queued`: it has no answer yet.
        `metadata` goes on the record of the run. Messages of other roles than `user` are InvalidData, unless
        `any_role` lets them pass.
        """
        said = await message_of(message, parts)
        action = SendMessage(said, self.loops, key=key, when_busy=when_busy, metadata=metadata, any_role=any_role)
        with suppress(*() if when_busy == "raise" else (SessionBusy,)):  # the run that is under way sends what is left
            await self._keep_model(await self._reach(session_id))
        after = await self._after_run(session_id, action)
        return Reply(after, queued=True) if action.was_left else _answered(after, action)

    async def stream(
        self,
        session_id: str,
        message: object,
        *parts: Sent,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[Chunk]:
        """Say something and have the answer's text as it comes; the last chunk is empty and has the `reply`.

        Whoever stops listening stops the run; what was said until then is kept.
        """
        action = SendMessage(await message_of(message, parts), self.loops, key=key, metadata=metadata)
        session_id = await self._reach(session_id)
        await self._keep_model(session_id)
        listener = Listener(session_id)
        listening = self._connection.events.subscribe(LoopEvent, listener.hear, session_id=session_id)
        work = listener.listen_to(self._run(session_id, action))
        self._connection.streams.add(work)
        try:
            while (chunk := await listener.chunks.get()) is not None:
                yield chunk
            yield Chunk(reply=await self._streamed(work))
        finally:
            listening.cancel()
            work.cancel()  # which does nothing to one that is done
            await asyncio.gather(work, return_exceptions=True)
            self._connection.streams.discard(work)

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
        runtime = SessionRuntime(
            store_of("memory://"), controller=self._connection.controller, events=self._connection.events
        )
        session = await runtime.create(ASSISTANT if agent is None else agent, owner=self.owner)
        action = SendMessage(message, self.loops)
        self._connection.alone.add(runtime)
        try:
            after = await runtime.execute(session.id, action)
        except RunInterrupted:
            raise ConfigurationError(
                "The connection was left while run() was under way. Nothing of it is kept."
            ) from None
        finally:
            self._connection.alone.discard(runtime)
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

    async def _keep_model(self, session_id: SessionId) -> None:
        """Change the model that a session keeps to the one that connect() names, by an action of its own.

        It is looked at once for each connection, so that a later ChangeModel holds. A definition's model, and an
        override, come first and stay.
        """
        if self._connection.model is None or self.live.touch(session_id).keeps_model:
            return
        session = await self.store.load(session_id)
        if session is None or session.status is not SessionStatus.ACTIVE:
            return  # which the send itself refuses
        from perdure.actions.definition import ChangeModel

        is_named_elsewhere = session.state.model is not None or session.definition.model is not None
        if not is_named_elsewhere and session.state.default_model != self._connection.model:
            await self._change_model(session_id, ChangeModel(self._connection.model, as_default=True))
        self.live.touch(session_id).keeps_model = True

    async def _change_model(self, session_id: SessionId, change: ChangeModel) -> None:
        try:
            await self.execute(session_id, change)
        except RunInterrupted:
            await self._resume(session_id)  # with the model that it was begun with
            await self.execute(session_id, change)


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
