"""Talk to an agent: send, stream, decide on calls that wait, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, overload

from msgspec.structs import replace

from perdure.actions.inbox import CANCEL, under_way
from perdure.actions.send import SendMessage, WhenBusy, used_for_another
from perdure.aio import finish_despite_cancel
from perdure.errors import (
    ClaimLost,
    ConfigurationError,
    InputRefused,
    PendingCallsChanged,
    RunFailed,
    RunInterrupted,
    SessionBusy,
)
from perdure.loop.filters import rejection_in
from perdure.loop.response_format import Form
from perdure.model.checks import expect, expect_wait
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionStatus, ModelOptions, PendingCall
from perdure.model.ids import SessionId
from perdure.model.loop_events import LoopEvent
from perdure.model.session import AgentSession
from perdure.model.value import EMPTY
from perdure.protocols import RECOVERY, Action, Entry, Journal, JournalEntry
from perdure.run_journal import loops_on_record
from perdure.runtime.runtime import SessionRuntime
from perdure.sessions.attaching import Sent, message_of
from perdure.sessions.cursors import Place
from perdure.sessions.looking import Looking
from perdure.sessions.reply import Chunk, Reply
from perdure.sessions.started_run import StartedRun, last_chunk
from perdure.sessions.streaming import Listener
from perdure.stores.urls import store_of

if TYPE_CHECKING:
    from perdure.actions.approval import AnswerToolCalls, ApproveToolCalls, DenyToolCalls, SettleToolCalls, Shown
    from perdure.actions.definition import ChangeModel
    from perdure.actions.retry import RetryLastRun
    from perdure.loop.external import ExternalTool

    Decision = ApproveToolCalls | DenyToolCalls | SettleToolCalls

T = TypeVar("T")
# Actions are imported where they are used: a process that opens a session and sends needs few of them.
ASSISTANT = AgentDefinition("assistant")
"""The agent of a session that was opened without one."""


class SendOptions(TypedDict, total=False):
    """The options of everything that sends."""

    key: str | None
    """The idempotency key: the same key again returns the result of the first message."""
    when_busy: WhenBusy
    """"raise" SessionBusy while another run is under way, or "queue" the message, or "steer" that run with it."""
    metadata: Mapping[str, Any] | None
    """JSON values that are put on the record of the run."""
    any_role: bool
    """True to let messages of other roles than `user` pass."""
    context: object
    """The object that tools find in `ToolContext.context`. It is never stored."""
    context_data: Mapping[str, Any] | None
    """JSON that is stored with the run. `connect(context=…)` makes a context of it where the caller is gone."""
    external_tools: Iterable[ExternalTool] | None
    """Tools of `external_tool(…)` that this run alone may call."""
    instructions: str | None
    """Instructions for this run alone."""
    model_options: ModelOptions | None
    """Options for the model in this run alone."""


class OnceOptions(TypedDict, total=False):
    """The options of a question that is asked without a session."""

    any_role: bool
    """True to let messages of other roles than `user` pass."""
    external_tools: Iterable[ExternalTool] | None
    """Tools of `external_tool(…)` that may be called. The first call ends the run."""
    instructions: str | None
    """Instructions for this run."""
    model_options: ModelOptions | None
    """Options for the model."""


class Talking(Looking):
    """The verbs that run an agent."""

    @overload
    async def send(
        self, session_id: str, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> Reply[T]: ...

    @overload
    async def send(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> Reply[Any]: ...

    async def send(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> Reply[Any]:
        """Send a message and wait for the answer. Raise RunFailed if the run ends without one.

        `parts` are images and files that go with a text, from `perdure.attach` or as paths, and further texts.
        While another run is under way, SessionBusy is raised. With `when_busy` the message is left with that run
        instead: it is sent after it ("queue"), or taken in between two of its steps ("steer"). The reply is then
        `queued`: its answer is still to come.

        `context` is what tools find in `ToolContext.context`. It is never stored. `context_data` is JSON that is stored
        with the run. Where the caller is gone, `connect(context=…)` makes a context of it. `metadata` is put on the
        record of the run. Messages of other roles than `user` raise InvalidData, unless `any_role` lets them pass.

        `output`, a type or a JSON schema, is the form of this answer, which `reply.value` has. `external_tools` are
        tools of `external_tool(…)` that this run alone may call. `instructions` are given to this run alone, and
        `model_options` say how it alone asks the model.
        """
        return await self._sent(session_id, await self._sending(message, parts, output, options))

    @overload
    async def start(
        self, session_id: str, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> StartedRun[T]: ...

    @overload
    async def start(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> StartedRun[Any]: ...

    async def start(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> StartedRun[Any]:
        """Send a message, and return once the run has begun. The run belongs to the connection, not to the caller.

        The options are those of `send`. When the connection is left, the run has its grace to end. Then it is
        interrupted, to be recovered later.
        """
        run = await self._started(session_id, await self._sending(message, parts, output, options), detach=True)
        await run.begun()
        return run

    async def stream(
        self,
        session_id: str,
        message: object,
        *parts: Sent,
        output: object = None,
        detach: bool = False,
        **options: Unpack[SendOptions],
    ) -> AsyncIterator[Chunk]:
        """Send a message and yield the answer's text as it comes. The last chunk is empty and has the `reply`.

        If you stop listening, the run stops, and what was said until then is kept. With `detach`, the run continues.
        The other options are those of `send`.
        """
        run = await self._started(session_id, await self._sending(message, parts, output, options), detach=detach)
        async with self._listening(run) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _started(self, session_id: str, action: SendMessage | RetryLastRun, *, detach: bool) -> StartedRun[Any]:
        expect(detach, bool, "$.detach")
        key = await self._reach(session_id)
        listener = Listener(key)
        return self._run_apart(key, listener, self._sent(key, action, listener), detach)

    async def _sending(
        self, message: object, parts: Sequence[Sent], output: object, options: SendOptions
    ) -> SendMessage:
        _require_known(options)
        said = await message_of(message, parts)
        return SendMessage(said, self.loops, output=output, model_for=self._model_for, **options)

    async def _sent(
        self, session_id: str, action: SendMessage | RetryLastRun, listener: Listener | None = None
    ) -> Reply[Any]:
        """Return the reply to a message. One that another run answers is waited for if somebody listens to it.

        While the message of a key waits or is being answered, the same key sends nothing, whatever `when_busy` says.
        """
        key = await self._reach(session_id)
        found = await self._under_way(key, action, may_wait=True)
        if found is None:
            try:
                after: AgentSession | None = await self._after_run(key, action)
            except (ClaimLost, RunInterrupted):  # these kinds of SessionBusy concern its own run
                raise
            except SessionBusy:
                found = await self._under_way(key, action)
                if found is None and not await self._has_answer(key, action):
                    raise
                # The run that was in the way may have answered this very key by now.
                after = None if found is not None else await self._after_run(key, action)
            if after is not None:
                return await self._came_of(key, after, action, listener)
        assert found is not None
        is_running = found.kind == "agent_start"
        if listener is None and not is_running and _may_be_queued(action):
            return Reply(await self.session(key), queued=True)
        if listener is None:
            return await self._joined_apart(key, action, found)
        return await self._joined(key, action, found, listener)

    async def _came_of(
        self, session_id: SessionId, after: AgentSession, action: SendMessage | RetryLastRun, listener: Listener | None
    ) -> Reply[Any]:
        sent = _message_of(action)
        if self._keeps_model(after):
            self.live.touch(after.id).keeps_model = True
        if sent is None or not sent.was_left:
            return self._answered(after, action)
        if listener is None or sent.left_as is None:
            return Reply(after, queued=True, form=sent.form)
        return await self._joined(session_id, action, sent.left_as, listener)

    async def _under_way(
        self, session_id: SessionId, action: SendMessage | RetryLastRun, *, may_wait: bool = False
    ) -> JournalEntry | None:
        """Return the entry that tells that the message of an action's key waits or is being answered, or None.

        With `may_wait` it is looked for only if the message would be queued otherwise.
        """
        sent, journal = _message_of(action), self.runtime.journal
        if sent is None or sent.key is None or journal is None or (may_wait and not sent.may_be_queued):
            return None
        found = await under_way(journal, session_id, sent.key.name)
        if found is not None:
            _, digest = found.body["key"] if found.kind == "agent_start" else (None, found.body.get("digest"))
            if digest not in (None, sent.key.digest):
                raise used_for_another(sent.key.name)
        return found

    async def _has_answer(self, session_id: SessionId, action: SendMessage | RetryLastRun) -> bool:
        """Tell whether the key of an action's message has come to an answer."""
        sent, journal = _message_of(action), self.runtime.journal
        if sent is None or sent.key is None or journal is None:
            return False
        return await journal.find_key(session_id, sent.key.name) is not None

    async def _joined_apart(self, session_id: SessionId, action: Action, found: JournalEntry) -> Reply[Any]:
        """Wait for another run, in a task of the connection, which ends the wait when it is closed."""
        listener = Listener(session_id)
        run = self._run_apart(session_id, listener, self._joined(session_id, action, found, listener), detach=True)
        try:
            return await run.result()
        except asyncio.CancelledError:
            run.work.cancel()
            raise

    async def _joined(
        self, session_id: SessionId, action: Action, found: JournalEntry, listener: Listener
    ) -> Reply[Any]:
        """Wait for the run that answers a message, and pass its text on. Return the reply."""
        from perdure.sessions.joining import Joining

        assert self.runtime.journal is not None
        listener.wait_for_another()
        joining = Joining(self.runtime.journal, session_id, found, self._resume)
        async for chunk in joining.chunks():
            listener.start = listener.start or Place(chunk.place.run if chunk.place else "")
            listener.tell(chunk)
        if joining.follower is None:  # the key had its answer before
            return self._answered(await self._after_run(session_id, action), action)
        after = await self._session_after(session_id, joining.follower.runs, joining.follower.base_version)
        listener.start = listener.start or joining.follower.place
        sent = _message_of(action)
        reply = self._answered(after)
        return reply if sent is None or sent.form is None else replace(reply, form=sent.form)

    def _run_apart(
        self, session_id: SessionId, listener: Listener, work: Coroutine[Any, Any, Reply[T]], detach: bool
    ) -> StartedRun[T]:
        """Begin a run in a task of the connection."""
        heard = self._connection.events.subscribe(LoopEvent, listener.hear, session_id=session_id)
        run = StartedRun(session_id, listener, work, is_detached=detach)
        run.work.add_done_callback(lambda _: heard.cancel())
        self._connection.keep(run)
        return run

    @asynccontextmanager
    async def _listening(self, run: StartedRun[Any]) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Listen to a run. Leaving the block stops it, unless it is detached."""
        try:
            yield run.stream()
        finally:
            if not run.is_detached:
                # To its end, even if the listener was cancelled: what was said so far is saved before this returns.
                await finish_despite_cancel(run.cancel())

    async def result(self, session_id: str, key: str) -> Reply[Any] | None:
        """Return the result of a `key`, without starting anything, or None if no message with it was ever sent.

        While its message waits or is being answered, the reply is `queued`, and in the latter case also `running`.
        Raise RunFailed if its run ended without an answer.
        """
        found = await self.info(session_id)
        journal = self.runtime.journal
        if journal is None:
            raise ConfigurationError("This store has no journal, so it keeps no keys.")
        unanswered = await under_way(journal, found.id, key)
        is_running = unanswered is not None and unanswered.kind == "agent_start"
        kept = None if is_running else await journal.find_key(found.id, key)  # it may be running again
        if kept is not None:
            return self._answered(await self.runtime.get_session(found.id, version=kept[1]))
        if unanswered is None:
            return None
        return Reply(await self.runtime.get_session(found.id), queued=True, running=is_running)

    def follow(self, session_id: str, *, after: str | None = None, timeout: float = 60.0) -> AsyncIterator[Chunk]:
        """Yield the text of the run under way, or of the last one, from any process.

        It begins after the chunk whose `cursor` is given as `after`, or else at the beginning of the run. Then comes
        the text as it is written. The last chunk is empty and has the `reply`. If you stop listening, the run
        continues. If the model begins an answer again, a chunk that `restarts` has the `offset` from which on the text
        so far is void.

        If the run's process has died, this waits until another recovers it. RunInterrupted is raised after `timeout`
        seconds without that. A text that is not a cursor raises InvalidData at once. Errors that require reading the
        store are raised at the first chunk.
        """
        place = None if after is None else Place.of(after)
        return self._followed(session_id, place, expect_wait(timeout, "$.timeout"))

    async def _followed(self, session_id: str, place: Place | None, patience: float) -> AsyncIterator[Chunk]:
        from perdure.sessions.following import Follower, run_to_follow

        key, journal = (await self.info(session_id)).id, self.runtime.journal
        if journal is None:
            raise ConfigurationError("This store has no journal, so a run cannot be followed from here.")
        run = await run_to_follow(journal, key, place)
        if run is None:
            yield Chunk(reply=Reply(await self.session(key)))
            return
        follower = Follower(journal, key, run, place)
        async for chunk in follower.chunks(patience, self._connection.recover_soon):
            yield chunk
        after_run = await self._session_after(key, follower.runs, follower.base_version)
        yield last_chunk(self._answered(after_run), follower.place)

    async def _session_after(self, session_id: SessionId, runs: Collection[str], base: int | None) -> AgentSession:
        """Return the session as a run has left it, even if others have run since."""
        newest = await self.session(session_id)
        if base is None or _last_run(newest) in runs or base + 1 < newest.info.first_version:
            return newest
        then = await self.store.load(session_id, base + 1)
        return then if then is not None and _last_run(then) in runs else newest

    async def retry(self, session_id: str, *, output: object = None, **options: Unpack[SendOptions]) -> Reply[Any]:
        """Send the last message that is shown again. The old answer leaves the view, and stays in the history.

        The options are those of `send`, except that a retry never waits. Without a `key` the answer is kept under the
        key of the old run. Without an `output` it has the form of the old answer. Raise SessionBusy while another run
        is under way, InvalidData if nothing was sent yet, and SessionNotActive while the run waits for approval.
        """
        return await self._sent(session_id, self._retrying(output, options))

    async def start_retry(
        self, session_id: str, *, output: object = None, **options: Unpack[SendOptions]
    ) -> StartedRun[Any]:
        """Send the last message again, as `retry` does, and return once the run has begun, as `start` does."""
        run = await self._started(session_id, self._retrying(output, options), detach=True)
        await run.begun()
        return run

    async def stream_retry(
        self, session_id: str, *, output: object = None, detach: bool = False, **options: Unpack[SendOptions]
    ) -> AsyncIterator[Chunk]:
        """Send the last message again, as `retry` does, and yield the answer's text as it comes."""
        run = await self._started(session_id, self._retrying(output, options), detach=detach)
        async with self._listening(run) as chunks:
            async for chunk in chunks:
                yield chunk

    def _retrying(self, output: object, options: SendOptions) -> RetryLastRun:
        from perdure.actions.retry import RetryLastRun

        _require_known(options)
        given = {} if output is None else {"output": output}
        return RetryLastRun(self.loops, model_for=self._model_for, **given, **options)

    @overload
    async def run(
        self, message: object, agent: AgentDefinition | None = None, *, output: type[T], **options: Unpack[OnceOptions]
    ) -> Reply[T]: ...

    @overload
    async def run(
        self,
        message: object,
        agent: AgentDefinition | None = None,
        *,
        output: object = None,
        **options: Unpack[OnceOptions],
    ) -> Reply[Any]: ...

    async def run(
        self,
        message: object,
        agent: AgentDefinition | None = None,
        *,
        output: object = None,
        **options: Unpack[OnceOptions],
    ) -> Reply[Any]:
        """Ask an `agent` once, without a session. Nothing is kept except for the reply.

        Without an agent, a plain assistant with every tool is asked. `any_role`, `external_tools`, `instructions` and
        `model_options` are those of `send`. The run ends with the first call of an external tool, which
        `reply.pending_calls` has. Raise ConfigurationError if a tool is called that needs a person's approval: nobody
        could give it afterwards.
        """
        self._require_open()
        store = store_of("memory://")
        if self.loops.redaction is not None:
            from perdure.stores.redacting import RedactingStore

            store = RedactingStore(store, self.loops.redaction)
        runtime = SessionRuntime(store, controller=self._connection.controller, events=self._connection.events)
        if agent is not None:
            self.loops.learn_output(agent)
        _require_known(options, OnceOptions)
        action = SendMessage(message, self.loops, output=output, **options)
        session = await runtime.create(ASSISTANT if agent is None else agent, owner=self.owner)
        self._connection.alone.add(runtime)
        try:
            after = await runtime.execute(session.id, action)
        except RunInterrupted:
            raise ConfigurationError("The connection was closed during run(). Nothing of it is kept.") from None
        finally:
            self._connection.alone.discard(runtime)
        from perdure.loop.unattended import require_nothing_pending

        reply = self._answered(after, action)
        own = {spec.name for spec in after.state.execution.external_tools} if after.state.execution else set()
        require_nothing_pending([call for call in reply.pending_calls if call.name not in own])
        return reply

    async def approve(
        self, session_id: str, call_ids: Shown | None = None, *, context: object = None, wait: bool = True
    ) -> Reply[Any]:
        """Approve pending tool calls, and continue the run: all of them, or those given as they were shown.

        A call is given as it is in `reply.pending_calls`, or by its digest or id. Raise PendingCallsChanged, and make
        no call, if the session waits for something else by now.

        With `wait=False` the decision is put on record in one commit. A worker, or `recover` in any process, continues
        the run. Nothing is run here, so neither tools nor a model are needed, and the reply is `queued`. Raise
        PendingCallsChanged if somebody has decided already.
        """
        return await self._decide(session_id, await self._approval(session_id, call_ids, context, wait))

    async def deny(
        self,
        session_id: str,
        reason: str,
        call_ids: Shown | None = None,
        *,
        context: object = None,
        wait: bool = True,
    ) -> Reply[Any]:
        """Deny pending tool calls. The model is told the `reason`, and continues.

        With `wait=False` a worker continues the run: see `approve`.
        """
        return await self._decide(session_id, await self._denial(session_id, reason, call_ids, context, wait))

    async def stream_approve(
        self, session_id: str, call_ids: Shown | None = None, *, context: object = None, detach: bool = False
    ) -> AsyncIterator[Chunk]:
        """Approve pending tool calls, as `approve` does, and yield the text of what follows as it comes."""
        action = await self._approval(session_id, call_ids, context)
        async with self._listening(await self._decided_apart(session_id, action, detach)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream_deny(
        self,
        session_id: str,
        reason: str,
        call_ids: Shown | None = None,
        *,
        context: object = None,
        detach: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Deny pending tool calls for a `reason`, as `deny` does, and yield the text of what follows as it comes."""
        action = await self._denial(session_id, reason, call_ids, context)
        async with self._listening(await self._decided_apart(session_id, action, detach)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def answer(
        self,
        session_id: str,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        wait: bool = True,
    ) -> Reply[Any]:
        """Hand in the results of calls that are made outside, by their ids, and continue the run.

        `errors` are the reasons why calls failed. Raise InvalidData, and change nothing, if a call does not wait for an
        answer. With `wait=False` a worker continues the run: see `approve`.
        """
        key = await self._reach(session_id)
        return await self._decide(key, self._answering(answers, errors, context, wait))

    async def stream_answer(
        self,
        session_id: str,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        detach: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Hand in the results of calls that are made outside, as `answer` does, and yield the text of what follows."""
        key = await self._reach(session_id)
        action = self._answering(answers, errors, context)
        async with self._listening(await self._decided_apart(key, action, detach)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def settle(
        self,
        session_id: str,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        wait: bool = True,
    ) -> Reply[Any]:
        """Settle several pending calls at once, and continue the run: `approve` some, `deny` some, answer some.

        `deny` has a reason for each call, by its id or digest. If one of the calls does not wait any more, nothing
        changes. With `wait=False` a worker continues the run: see `approve`.
        """
        from perdure.actions.approval import SettleToolCalls

        key = await self._reach(session_id)
        given: dict[str, Any] = {"approve": approve, "deny": deny, "answers": answers, "errors": errors}
        return await self._decide(key, SettleToolCalls(self.loops, **given, **self._deciding(context, wait)))

    async def start_settle(
        self,
        session_id: str,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
    ) -> StartedRun[Any]:
        """Settle several pending calls, as `settle` does, and return once the run continues, as `start` does.

        `approve` has the calls to approve, and `deny` a reason for each call to deny.
        """
        from perdure.actions.approval import SettleToolCalls

        key = await self._reach(session_id)
        given: dict[str, Any] = {"approve": approve, "deny": deny, "answers": answers, "errors": errors}
        action = SettleToolCalls(self.loops, **given, **self._deciding(context, True))
        run = await self._decided_apart(key, action, detach=True)
        await run.begun()
        return run

    def _answering(
        self, answers: Mapping[str, object], errors: Mapping[str, str], context: object, wait: bool = True
    ) -> AnswerToolCalls:
        from perdure.actions.approval import AnswerToolCalls

        return AnswerToolCalls(self.loops, answers, errors=errors, **self._deciding(context, wait))

    def _deciding(self, context: object, wait: bool) -> dict[str, Any]:
        """Return the options that all decisions have."""
        return {"context": context, "model_for": self._connection.model_for, "wait": wait}

    async def _approval(
        self, session_id: str, call_ids: Shown | None, context: object, wait: bool = True
    ) -> ApproveToolCalls:
        from perdure.actions.approval import ApproveToolCalls

        shown = await self._shown(session_id, call_ids)
        if call_ids is None:  # calls that are made outside wait for their results, and cannot be approved
            shown = [call for call in shown if isinstance(call, PendingCall) and not call.external] or shown
        return ApproveToolCalls(self.loops, call_ids=shown, **self._deciding(context, wait))

    async def _denial(
        self, session_id: str, reason: str, call_ids: Shown | None, context: object, wait: bool = True
    ) -> DenyToolCalls:
        from perdure.actions.approval import DenyToolCalls

        shown = await self._shown(session_id, call_ids)
        return DenyToolCalls(self.loops, reason=reason, call_ids=shown, **self._deciding(context, wait))

    async def _decided_apart(self, session_id: str, action: Decision, detach: bool) -> StartedRun[Any]:
        expect(detach, bool, "$.detach")
        key = await self._reach(session_id)
        listener = Listener(key, continues=True, said=await self._said_by_run(key))
        return self._run_apart(key, listener, self._decide(key, action), detach)

    async def _said_by_run(self, session_id: SessionId) -> int:
        """Return how many characters the last run has said."""
        session = await self.store.load(session_id)
        execution = session.state.execution if session is not None else None
        steps = [each.step for each in execution.step_executions] if execution else []
        steps += [execution.current_step] if execution and execution.current_step else []
        said = (message for step in steps for message in step.output_messages if message.role == "assistant")
        return sum(len(message.text) for message in said)

    async def _shown(self, session_id: str, call_ids: Shown | None) -> Shown:
        """Return the calls that a decision is about. If none are named, these are all that wait when it is made.

        They do not include calls that wait only after somebody else's decision, or once a killed run was recovered.
        """
        if call_ids is not None:
            return call_ids
        session = await self.store.load(await self._reach(session_id))
        execution = session.state.execution if session is not None else None
        return execution.pending_calls if execution is not None else ()

    async def _decide(self, session_id: str, action: Decision) -> Reply[Any]:
        if action.is_left:
            return await self._left_to_worker(session_id, action)
        reply = await self._run(session_id, action)
        return replace(reply, used_before=action.used_before)

    async def _left_to_worker(self, session_id: str, action: Decision) -> Reply[Any]:
        """Put a decision on record, and tell workers. A run that waits to be continued is not continued here."""
        key = await self._reach(session_id)
        with self.live.running(key):
            try:
                session = await self._executed(key, action, expected=self._expected)
            except SessionBusy as busy:
                raise await self._decided_already(key, action) or busy from None
        if self._connection.dispatcher is not None:
            await self._connection.dispatcher.wake(key, priority=RECOVERY, owner=self.owner)
        return Reply(session, queued=True)

    async def _decided_already(self, session_id: SessionId, action: Decision) -> PendingCallsChanged | None:
        """Return the error for a decision after somebody else's, with which the run has not been saved yet.

        Return None if it is about other calls: these will wait again.
        """
        from perdure.actions.leaving import is_decided

        session, journal = await self.store.load(session_id), self.runtime.journal
        if session is None or journal is None or not await is_decided(journal, session, action.names):
            return None
        return PendingCallsChanged(session_id, (), (), is_decided=True)

    async def _run(self, session_id: str, action: Action) -> Reply[Any]:
        return self._answered(await self._after_run(session_id, action), action)

    def _answered(self, session: AgentSession, action: Action | None = None) -> Reply[Any]:
        _require_answer(session, action)
        sent = _message_of(action)
        given = sent.form if sent is not None else None
        schema = session.state.response_format
        if given is None and schema is not None:
            given = Form(schema)
        return Reply(session, form=given or self.loops.form_of(session.definition))

    async def _after_run(self, session_id: str, action: Action) -> AgentSession:
        key = await self._reach(session_id)
        with self.live.running(key):
            try:
                return await self._executed(key, action)
            except RunInterrupted as error:
                if error.session_id != key or self.runtime.is_closing:
                    raise
            # Recover and apply once more: callers need not handle the death of another process.
            await self._resume(key)
            return await self._executed(key, action)

    async def _executed(self, session_id: SessionId, action: Action, *, expected: int | None = None) -> AgentSession:
        """Execute an action. If this connection is recovering the session's run in the background, wait for its end.

        Raise SessionBusy if another process, or another caller, is running the session.
        """
        while True:
            recovering = self._connection.recovering
            ended = 0 if recovering is None else recovering.ended
            try:
                return await self.runtime.execute(session_id, action, on_conflict="retry", expected=expected)
            except (ClaimLost, RunInterrupted):
                raise
            except SessionBusy as error:
                if recovering is None or error.session_id != session_id:
                    raise
                if not await recovering.is_over(session_id, ended):
                    raise

    async def _resume(self, session_id: SessionId) -> None:
        """Continue a run that was killed, before anything else is sent."""
        from perdure.actions.resume import recover

        recovering = self._connection.recovering
        async with nullcontext() if recovering is None else recovering.alone(session_id):
            if recovering is not None and recovering.is_stopped:
                raise RunInterrupted(session_id)
            report = await recover(self.runtime, self.loops, session_id=session_id)
        if report.errors:
            error = report.errors[0]
            waits = f"The last run waits to be continued, and cannot be recovered: {error.what}"
            raise ConfigurationError(waits, error.advice) from error

    async def cancel(self, session_id: str, *, run: str | None = None) -> bool:
        """Ask the run that is under way, in any process, to stop. Return False if there is none.

        A run that was killed is ended where it is. With `run`, the id of a run, no other run is stopped: False is
        returned if another one is under way.
        """
        from perdure.actions.resume import ResumeExecution

        key, journal = (await self.info(session_id)).id, self.runtime.journal
        if journal is None:
            raise ConfigurationError("This store has no journal, so a run cannot be reached from here.")
        if run is not None and run != await self._newest_run(journal, key):
            return False
        if not await journal.is_claimed(key):
            if not await journal.is_interrupted(key):
                return False
            await self.execute(key, ResumeExecution(self.loops, give_up=True), on_conflict="raise")
            return True
        # Named in the request, too: that run may end before it is read, and the next one must not be stopped.
        await journal.post(key, Entry(CANCEL) if run is None else Entry(CANCEL, {"run": run}))
        return True

    async def _newest_run(self, journal: Journal, session_id: SessionId) -> str | None:
        runs = await loops_on_record(journal, session_id, limit=1)
        return runs[-1].loop_id if runs else None

    def _model_for(self, session: AgentSession) -> ChangeModel | None:
        """Return the change to the model that connect() names, if a session keeps another one.

        Each connection looks at a session until a run has begun with that model, and then not again, so that a later
        ChangeModel holds. A definition's model, and an override, come first and stay.
        """
        if self._connection.model_for is not None:
            return self._connection.model_for(session)
        model = self._connection.model
        if model is None or self.live.touch(session.id).keeps_model or self._keeps_model(session):
            return None
        from perdure.actions.definition import ChangeModel

        return ChangeModel(model, as_default=True)

    def _keeps_model(self, session: AgentSession) -> bool:
        is_named_elsewhere = session.state.model is not None or session.definition.model is not None
        return is_named_elsewhere or session.state.default_model == self._connection.model


def _require_known(options: Mapping[str, object], known: type = SendOptions) -> None:
    for name in options.keys() - known.__annotations__.keys():
        raise TypeError(f"got an unexpected keyword argument {name!r}")


def _message_of(action: Action | None) -> SendMessage | None:
    """Return the action that sends the message: this one, or the one that a retry has made. Return None for others."""
    sent = getattr(action, "sent", action)
    return sent if isinstance(sent, SendMessage) else None


def _may_be_queued(action: Action) -> bool:
    sent = _message_of(action)
    return sent is not None and sent.may_be_queued


def _require_answer(session: AgentSession, action: Action | None) -> None:
    """Raise RunFailed if a run has failed, and InputRefused if a filter has refused the message for it."""
    state = session.state
    rejection = rejection_in(state.execution.continuation.stop_signals) if state.execution else None
    if rejection is not None:
        raise InputRefused(session.id, session.version, rejection)
    if state.status is ExecutionStatus.FAILED:
        raise _failure(session, is_shown=_is_shown(session, action))


def _last_run(session: AgentSession) -> str | None:
    return session.state.execution.execution_id if session.state.execution else None


def _failure(session: AgentSession, *, is_shown: bool) -> RunFailed:
    cause = session.state.execution.cause if session.state.execution else None
    reason = cause.message if cause else str(session.state.stop_reason)
    return RunFailed(session.id, session.version, reason, is_shown=is_shown, cause=cause, session=session)


def _is_shown(session: AgentSession, action: Action | None) -> bool:
    """Tell whether the view has what was sent. An input filter that failed leaves the view as it was."""
    sent = _message_of(action)
    ids = {message.id for message in sent.asked} if sent is not None else set()
    return not ids or any(message.id in ids for message in session.state.messages)
