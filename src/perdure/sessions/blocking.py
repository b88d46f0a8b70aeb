"""The verbs of `Sessions` and `Chat` without `await`: a thread with an event loop awaits them.

Written by tests/sessions/make_blocking.py. Change the async verbs, and run that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from perdure.model.value import EMPTY
from perdure.sessions.awaited import Awaited, AwaitedSessions
from perdure.sessions.chat import Chat
from perdure.sessions.operating import TAKEN_BACK
from perdure.sessions.queueing import Queued
from perdure.sessions.started_run import StartedRun

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime, timedelta
    from typing import BinaryIO, Literal, Unpack

    from perdure.actions.approval import Shown
    from perdure.actions.resume import RecoveryReport
    from perdure.archive.backups import BackupReport
    from perdure.archive.moving import MoveReport, Progress
    from perdure.loop.factory import LoopFactory
    from perdure.model.definition import AgentDefinition
    from perdure.model.ids import SessionId
    from perdure.model.loop_events import AnyLoopEvent
    from perdure.model.message import Media, Message
    from perdure.model.record import LoopRecord, SessionRecord
    from perdure.model.retention import Retention, RetentionPolicy
    from perdure.model.session import AgentSession, AgentSessionInfo, ListedSession, SessionInfoList, SessionStatus
    from perdure.protocols import (
        Action,
        Filters,
        Forgotten,
        Journal,
        MessagePlace,
        SearchHit,
        SessionHead,
        SessionStore,
        Timer,
    )
    from perdure.runtime.bus import Subscriber
    from perdure.runtime.runtime import OnConflict, SessionRuntime
    from perdure.sessions.attaching import Sent
    from perdure.sessions.conversations import Format, ImportReport
    from perdure.sessions.keeping import ErasureReceipt
    from perdure.sessions.lineage import Ancestry, Diff
    from perdure.sessions.open_sessions import LiveSet, LiveSubscription
    from perdure.sessions.opening import OnChange
    from perdure.sessions.operating import Backlog, Dropped
    from perdure.sessions.reply import Chunk, Reply
    from perdure.sessions.rounds import RetentionReport
    from perdure.sessions.talking import OnceOptions, SendOptions
    from perdure.sessions.viewing import View

T = TypeVar("T")


class BlockingSessions(AwaitedSessions):
    """`Sessions` whose verbs are not awaited. Use them with `with`.

    Most verbs are about one session, and take its `session_id` first. Parameters that several verbs have:

    - `message`: a text, a `Message`, a dict `{role, content}`, or an item of OpenAI's Responses API.
    - `parts`: images and files from `perdure.attach` or as paths, and further texts, which go with a text.
    - `output`: the form of the answer, as a type or a JSON schema. `reply.value` has it in that form.
    - `context`: the object that tools find in `ToolContext.context`. It is never stored.
    - `call_ids`: the pending calls that are decided on, as in `reply.pending_calls`, or their ids. None means all.
    - `answers`, `errors`: the results of calls that are made outside, or the reasons why they failed, by call ids.
    - `wait`: False to leave the run to a worker, after the decision is on record.
    - `detach`: True to let the run continue when you stop listening.
    - `limit`: the number of items that are returned at most.
    """

    def __enter__(self) -> BlockingSessions:
        # By name: Jedi, which completes names in notebooks, takes the base class for what a Self in it stands for.
        self._open()
        return self

    def of(self, owner: str) -> BlockingSessions:
        """Return the sessions of one owner, with every verb, on the same connection: its store, cache and runs.

        They are open while this connection is. For them, no session of anybody but `owner` exists.
        """
        self._running()
        return BlockingSessions(self._target.of(owner), self._loop)

    def expecting(self, version: int) -> BlockingSessions:
        """Return these sessions for a change that is bound to a `version`: `sessions.expecting(7).trim("a", 4)`.

        If the session has another version by then, SessionConflict is raised and nothing is changed. A decision that is
        left to a worker is bound, too. Verbs that run an agent here are not: a message joins the conversation at
        whatever version it is.
        """
        self._running()
        return BlockingSessions(self._target.expecting(version), self._loop)

    def open(
        self,
        id: str | None = None,
        agent: AgentDefinition | None = None,
        *,
        tags: Iterable[str] = (),
        on_change: OnChange = "raise",
    ) -> BlockingChat:
        """Return a handle on a session: on a new one, or on the one with an `id`, which is created if it is missing.

        A session that is created has the `agent`, by default a plain assistant with every tool, and the `tags`.

        `on_change` says what happens if the session keeps another definition of this agent. "raise" raises
        SessionConflict. With "keep" the session continues with its own. With "take" it is given the new one, on record.
        """
        return BlockingChat(self._wait(self._target.open(id, agent, tags=tags, on_change=on_change)), self._loop)

    def new_session(self, session_id: str) -> BlockingChat:
        """Create a session with the agent, tags and model of another. A model that connect() names comes first."""
        return BlockingChat(self._wait(self._target.new_session(session_id)), self._loop)

    def close(self, session_id: str) -> None:
        """Drop a session from memory, and its subscribers with it. The store keeps the session."""
        return self._wait(self._target.close(session_id))

    def subscribe(self, session_id: str, subscriber: Subscriber) -> LiveSubscription:
        """Call a function, the `subscriber`, plain or async, with every event of a session in this process.

        It is called until the returned subscription is cancelled, or the session is closed.
        """
        return self._wait(self._target.subscribe(session_id, subscriber))

    def queue(self, *, limit: int = 100) -> Backlog:
        """Return what waits, what is being run, what is delayed and what is parked.

        At most `limit` waiting sessions are returned. With an owner, only what belongs to that owner is.
        """
        return self._wait(self._target.queue(limit=limit))

    def unpark(self, session_id: str) -> None:
        """Open a session that was parked. A worker sends what waits there. Raise InvalidData if it is not parked.

        The message whose run was ended is not sent again. `retry` does that, or the same message under its key.
        """
        return self._wait(self._target.unpark(session_id))

    def drop_waiting(self, session_id: str, reason: str = TAKEN_BACK, *, key: str | None = None) -> Sequence[Dropped]:
        """Take back every message that waits in a session's inbox, and return them.

        With a `key`, only the message of that key is taken back, and only if it is the next to be sent. Each is on
        record as refused for the `reason`, and `Queued.reply` raises InputRefused. Raise SessionBusy while the session
        is being run, and RunInterrupted if its run was killed.
        """
        return self._wait(self._target.drop_waiting(session_id, reason, key=key))

    def drop_timer(self, session_id: str, name: str) -> bool:
        """Take back what is sent later, by its `name`: a message's key or a timer's. Return False if there is none."""
        return self._wait(self._target.drop_timer(session_id, name))

    def enqueue(
        self,
        session_id: str,
        message: object,
        *parts: Sent,
        priority: int = 0,
        at: datetime | None = None,
        output: object = None,
        **options: Unpack[SendOptions],
    ) -> BlockingQueued:
        """Leave a message with a session, and return at once. A worker sends it, after the earlier ones.

        With `at` it is sent at that time. Sessions whose messages have a higher `priority` are run first. The same
        `key` again leaves nothing new: it returns the message that waits, or its answer. Raise QueueFull if too much
        waits, and SessionNotActive if the session is deleted. The other options are those of `send`. A `context` cannot
        be left, but `context_data` can.
        """
        return BlockingQueued(
            self._wait(
                self._target.enqueue(session_id, message, *parts, priority=priority, at=at, output=output, **options)
            ),
            self._loop,
        )

    def schedule(
        self,
        name: str,
        message: object,
        *parts: Sent,
        cron: str,
        timezone: str | None = None,
        session_id: str | None = None,
        priority: int = 0,
        output: object = None,
        **options: Unpack[SendOptions],
    ) -> Timer:
        """Leave a message with a session again and again: `cron="0 7 * * MON", timezone="Europe/Oslo"`.

        Without a `session_id` it is the session with the schedule's `name`, which is created if it does not exist. A
        schedule of the same name in that session is replaced. If no worker ran when it was due, it is sent once later.

        Sessions whose messages have a higher `priority` are run first. The other options are those of `send`, except
        for `key` and `context`.
        """
        return self._wait(
            self._target.schedule(
                name,
                message,
                *parts,
                cron=cron,
                timezone=timezone,
                session_id=session_id,
                priority=priority,
                output=output,
                **options,
            )
        )

    def schedules(self, session_id: str | None = None) -> Sequence[Timer]:
        """Return the schedules of a session, or of all sessions within reach."""
        return self._wait(self._target.schedules(session_id))

    def unschedule(self, name: str, session_id: str | None = None) -> bool:
        """End the schedule of a `name`. Return False if the session has none of that name."""
        return self._wait(self._target.unschedule(name, session_id))

    def timers(self, session_id: str | None = None) -> Sequence[Timer]:
        """Return the timers: schedules, and messages that wait for their time."""
        return self._wait(self._target.timers(session_id))

    @overload
    def send(
        self, session_id: str, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> Reply[T]: ...

    @overload
    def send(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> Reply[Any]: ...

    def send(
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
        return self._wait(self._target.send(session_id, message, *parts, output=output, **options))

    @overload
    def start(
        self, session_id: str, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> BlockingRun[T]: ...

    @overload
    def start(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> BlockingRun[Any]: ...

    def start(
        self, session_id: str, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> BlockingRun[Any]:
        """Send a message, and return once the run has begun. The run belongs to the connection, not to the caller.

        The options are those of `send`. When the connection is left, the run has its grace to end. Then it is
        interrupted, to be recovered later.
        """
        return BlockingRun(
            self._wait(self._target.start(session_id, message, *parts, output=output, **options)), self._loop
        )

    def stream(
        self,
        session_id: str,
        message: object,
        *parts: Sent,
        output: object = None,
        detach: bool = False,
        **options: Unpack[SendOptions],
    ) -> Iterator[Chunk]:
        """Send a message and yield the answer's text as it comes. The last chunk is empty and has the `reply`.

        If you stop listening, the run stops, and what was said until then is kept. With `detach`, the run continues.
        The other options are those of `send`.
        """
        return self._iterate(self._target.stream(session_id, message, *parts, output=output, detach=detach, **options))

    def result(self, session_id: str, key: str) -> Reply[Any] | None:
        """Return the result of a `key`, without starting anything, or None if no message with it was ever sent.

        While its message waits or is being answered, the reply is `queued`, and in the latter case also `running`.
        Raise RunFailed if its run ended without an answer.
        """
        return self._wait(self._target.result(session_id, key))

    def follow(self, session_id: str, *, after: str | None = None, timeout: float = 60.0) -> Iterator[Chunk]:
        """Yield the text of the run under way, or of the last one, from any process.

        It begins after the chunk whose `cursor` is given as `after`, or else at the beginning of the run. Then comes
        the text as it is written. The last chunk is empty and has the `reply`. If you stop listening, the run
        continues. If the model begins an answer again, a chunk that `restarts` has the `offset` from which on the text
        so far is void.

        If the run's process has died, this waits until another recovers it. RunInterrupted is raised after `timeout`
        seconds without that. A text that is not a cursor raises InvalidData at once. Errors that require reading the
        store are raised at the first chunk.
        """
        return self._iterate(self._target.follow(session_id, after=after, timeout=timeout))

    def retry(self, session_id: str, *, output: object = None, **options: Unpack[SendOptions]) -> Reply[Any]:
        """Send the last message that is shown again. The old answer leaves the view, and stays in the history.

        The options are those of `send`, except that a retry never waits. Without a `key` the answer is kept under the
        key of the old run. Without an `output` it has the form of the old answer. Raise SessionBusy while another run
        is under way, InvalidData if nothing was sent yet, and SessionNotActive while the run waits for approval.
        """
        return self._wait(self._target.retry(session_id, output=output, **options))

    def start_retry(
        self, session_id: str, *, output: object = None, **options: Unpack[SendOptions]
    ) -> BlockingRun[Any]:
        """Send the last message again, as `retry` does, and return once the run has begun, as `start` does."""
        return BlockingRun(self._wait(self._target.start_retry(session_id, output=output, **options)), self._loop)

    def stream_retry(
        self, session_id: str, *, output: object = None, detach: bool = False, **options: Unpack[SendOptions]
    ) -> Iterator[Chunk]:
        """Send the last message again, as `retry` does, and yield the answer's text as it comes."""
        return self._iterate(self._target.stream_retry(session_id, output=output, detach=detach, **options))

    @overload
    def run(
        self, message: object, agent: AgentDefinition | None = None, *, output: type[T], **options: Unpack[OnceOptions]
    ) -> Reply[T]: ...

    @overload
    def run(
        self,
        message: object,
        agent: AgentDefinition | None = None,
        *,
        output: object = None,
        **options: Unpack[OnceOptions],
    ) -> Reply[Any]: ...

    def run(
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
        return self._wait(self._target.run(message, agent, output=output, **options))

    def approve(
        self, session_id: str, call_ids: Shown | None = None, *, context: object = None, wait: bool = True
    ) -> Reply[Any]:
        """Approve pending tool calls, and continue the run: all of them, or those given as they were shown.

        A call is given as it is in `reply.pending_calls`, or by its digest or id. Raise PendingCallsChanged, and make
        no call, if the session waits for something else by now.

        With `wait=False` the decision is put on record in one commit. A worker, or `recover` in any process, continues
        the run. Nothing is run here, so neither tools nor a model are needed, and the reply is `queued`. Raise
        PendingCallsChanged if somebody has decided already.
        """
        return self._wait(self._target.approve(session_id, call_ids, context=context, wait=wait))

    def deny(
        self, session_id: str, reason: str, call_ids: Shown | None = None, *, context: object = None, wait: bool = True
    ) -> Reply[Any]:
        """Deny pending tool calls. The model is told the `reason`, and continues.

        With `wait=False` a worker continues the run: see `approve`.
        """
        return self._wait(self._target.deny(session_id, reason, call_ids, context=context, wait=wait))

    def stream_approve(
        self, session_id: str, call_ids: Shown | None = None, *, context: object = None, detach: bool = False
    ) -> Iterator[Chunk]:
        """Approve pending tool calls, as `approve` does, and yield the text of what follows as it comes."""
        return self._iterate(self._target.stream_approve(session_id, call_ids, context=context, detach=detach))

    def stream_deny(
        self,
        session_id: str,
        reason: str,
        call_ids: Shown | None = None,
        *,
        context: object = None,
        detach: bool = False,
    ) -> Iterator[Chunk]:
        """Deny pending tool calls for a `reason`, as `deny` does, and yield the text of what follows as it comes."""
        return self._iterate(self._target.stream_deny(session_id, reason, call_ids, context=context, detach=detach))

    def answer(
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
        return self._wait(self._target.answer(session_id, answers, errors=errors, context=context, wait=wait))

    def stream_answer(
        self,
        session_id: str,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        detach: bool = False,
    ) -> Iterator[Chunk]:
        """Hand in the results of calls that are made outside, as `answer` does, and yield the text of what follows."""
        return self._iterate(
            self._target.stream_answer(session_id, answers, errors=errors, context=context, detach=detach)
        )

    def settle(
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
        return self._wait(
            self._target.settle(
                session_id, approve=approve, deny=deny, answers=answers, errors=errors, context=context, wait=wait
            )
        )

    def start_settle(
        self,
        session_id: str,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
    ) -> BlockingRun[Any]:
        """Settle several pending calls, as `settle` does, and return once the run continues, as `start` does.

        `approve` has the calls to approve, and `deny` a reason for each call to deny.
        """
        return BlockingRun(
            self._wait(
                self._target.start_settle(
                    session_id, approve=approve, deny=deny, answers=answers, errors=errors, context=context
                )
            ),
            self._loop,
        )

    def cancel(self, session_id: str, *, run: str | None = None) -> bool:
        """Ask the run that is under way, in any process, to stop. Return False if there is none.

        A run that was killed is ended where it is. With `run`, the id of a run, no other run is stopped: False is
        returned if another one is under way.
        """
        return self._wait(self._target.cancel(session_id, run=run))

    def inject(self, session_id: str, message: object, *parts: Sent) -> None:
        """Append a message, or a list of them, without running the agent. `parts` follow a single one.

        Each is a Message, a dict `{role, content, …}`, or an item of OpenAI's Responses API. A single one may be a
        text, which counts as the user's.
        """
        return self._wait(self._target.inject(session_id, message, *parts))

    def trim(self, session_id: str, keep_last: int) -> int:
        """Show only the last messages, `keep_last` of them. Return how many are shown then.

        A few more are shown where a tool call would lose its result.
        """
        return self._wait(self._target.trim(session_id, keep_last))

    def compact(self, session_id: str, **options: Any) -> int:
        """Show a summary, or less, of older messages. Return how many are shown then.

        The `options` are the fields of `CompactionOptions`.
        """
        return self._wait(self._target.compact(session_id, **options))

    def uncompact(self, session_id: str, block_id: str | None = None) -> int:
        """Show again what the newest compaction covers, or the one with a `block_id`. Return the number shown."""
        return self._wait(self._target.uncompact(session_id, block_id))

    def reset(self, session_id: str) -> None:
        """Show nothing of what was said so far."""
        return self._wait(self._target.reset(session_id))

    def undo(self, session_id: str) -> int:
        """Take back the last change of what is shown. Return how many messages are shown then."""
        return self._wait(self._target.undo(session_id))

    def rewind(self, session_id: str, to: int | str) -> int:
        """Go back `to` a version, by its number, or a message, by its id. Return how many messages are shown then."""
        return self._wait(self._target.rewind(session_id, to))

    def suspend(self, session_id: str, *, until: datetime | None = None) -> None:
        """Close a session to messages until it is resumed: by hand, or by a worker at the time `until`."""
        return self._wait(self._target.suspend(session_id, until=until))

    def resume(self, session_id: str) -> None:
        """Open a session that was suspended, completed or failed."""
        return self._wait(self._target.resume(session_id))

    def rename(self, session_id: str, name: str | None) -> None:
        """Give a session a `name` for people, or none."""
        return self._wait(self._target.rename(session_id, name))

    def delete(self, session_id: str) -> None:
        """Hide a session from lists, and the sessions of its sub-agents with it. `restore` takes that back."""
        return self._wait(self._target.delete(session_id))

    def restore(self, session_id: str) -> None:
        """Take the deletion of a session back. What was erased cannot be restored."""
        return self._wait(self._target.restore(session_id))

    def fork(
        self,
        src: str,
        dst: str | None = None,
        *,
        at: int | str | None = None,
        version: int | None = None,
        loop: str | None = None,
    ) -> BlockingChat:
        """Make a session that begins where the session `src` is, and return its handle.

        Its id is `dst`, or a new one. It begins at the other's end, or `at` a message: at a number of messages, or
        after a message with an id. With a `version` it begins at an older version. With a `loop`, the id of a run, it
        begins where that run ended, even on a branch that was not selected.
        """
        return BlockingChat(self._wait(self._target.fork(src, dst, at=at, version=version, loop=loop)), self._loop)

    def adopt(self, session_id: str, branch: str) -> None:
        """Show from now on what a fork of the session shows. `branch` is the fork's id."""
        return self._wait(self._target.adopt(session_id, branch))

    def retain(self, session_id: str, rule: Retention | None) -> None:
        """Give a session a `rule` of its own about how long it is kept. None takes it away.

        It overrides the rules of its tags, its owner and the connection. Every worker applies it.
        """
        return self._wait(self._target.retain(session_id, rule))

    def hold(self, session_id: str, case: str | None = None) -> None:
        """Put a legal hold on a session: until it is lifted, nothing of it can be erased, forgotten or redacted.

        The hold is the tag `hold`, or `hold:case` for a `case`. It covers the sessions of sub-agents, too, and is put
        on record.
        """
        return self._wait(self._target.hold(session_id, case))

    def lift_hold(self, session_id: str, case: str | None = None) -> None:
        """Lift the legal hold of a `case`, and put that on record. Raise InvalidData if the session has no such hold.

        If the session's key was forgotten, its record is erased too, and the hold is lifted without an entry there.
        """
        return self._wait(self._target.lift_hold(session_id, case))

    def holds(self, session_ids: Iterable[str]) -> Mapping[SessionId, str]:
        """Return those sessions of `session_ids` that a legal hold is on, each with its tag.

        The hold may be on the session that has called a sub-agent's.
        """
        return self._wait(self._target.holds(session_ids))

    def apply_retention(
        self, policy: Retention | RetentionPolicy | None = None, *, dry_run: bool = False
    ) -> RetentionReport:
        """Erase the sessions and versions whose time is over. Return what was erased, and which sessions stay and why.

        The rules are those of the `policy`, or else of the connection, and those that sessions have of their own. With
        `dry_run` nothing is erased: the report says what would be. Sessions stay while something is under way in them
        or waits there, and while they are under a legal hold. With an owner, only that owner's sessions are looked at.
        """
        return self._wait(self._target.apply_retention(policy, dry_run=dry_run))

    def recover(self, session_id: str | None = None) -> RecoveryReport:
        """Continue runs that were killed: that of one session, or all of them without a `session_id`."""
        return self._wait(self._target.recover(session_id))

    def export(
        self,
        target: str | os.PathLike[str] | BinaryIO,
        session_ids: Iterable[str] | None = None,
        *,
        format: Format = "perdure",
        history: bool = False,
        progress: Progress | None = None,
    ) -> MoveReport:
        """Write sessions, by default all, with their versions and runs to one file of JSON Lines.

        `target` is a path or a binary file. `session_ids` are the sessions. `progress` is called with the number of
        sessions that are done and of all sessions, or 0 if that is not known.

        In the `format` "openai" or "markdown" only what they show is written, or with `history` all that was said. As
        "openai", one session is a list of messages. Several are a line `{"messages": […]}` each.
        """
        return self._wait(self._target.export(target, session_ids, format=format, history=history, progress=progress))

    @overload
    def import_(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        format: Literal["openai"],
        agent: AgentDefinition | None = None,
        progress: Progress | None = None,
    ) -> ImportReport: ...

    @overload
    def import_(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        format: Literal["perdure", "openai"] = "perdure",
        agent: AgentDefinition | None = None,
        progress: Progress | None = None,
    ) -> MoveReport: ...

    def import_(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        format: Literal["perdure", "openai"] = "perdure",
        agent: AgentDefinition | None = None,
        progress: Progress | None = None,
    ) -> MoveReport:
        """Import the sessions of a file that `export` has written. Sessions that exist already are skipped.

        `source` is a path or a binary file. `progress` is called as by `export`.

        In the `format` "openai", a list of messages, or one message a line, makes one session. Lines `{"messages":
        […]}` make one session each. Each has a new id, which the report names, and this `agent`.
        """
        return self._wait(self._target.import_(source, format=format, agent=agent, progress=progress))

    def purge(
        self, *, older_than: timedelta | datetime | None = None, status: SessionStatus | str | None = None
    ) -> int:
        """Erase sessions for good, and those of their sub-agents with them. What forks show stays.

        `older_than` bounds their last update: by an age, or by a time. `status` narrows them to one status. Return how
        many were erased, sub-agents' sessions included. Sessions that are being run, or are under a legal hold, are
        left alone.
        """
        return self._wait(self._target.purge(older_than=older_than, status=status))

    def erase(self, session_id: str) -> Sequence[SessionId]:
        """Erase a session for good, and the sessions of its sub-agents with it. What its forks show stays.

        Return the ids erased. Raise SessionBusy while one of them is being run, and SessionHeld if a legal hold is on
        one of them; then nothing is erased.
        """
        return self._wait(self._target.erase(session_id))

    def erase_owner(self, owner: str | None = None, *, wait: float = 10.0, forget_key: bool = False) -> ErasureReceipt:
        """Erase a person: every session of an `owner`, hidden ones and forks too, with records, keys and index.

        The owner's access tokens go first, so that no service accepts them any more. Raise CorruptRecord, and erase
        nothing, if one of them is damaged.

        Runs under way are asked to stop. Those that have not stopped after `wait` seconds are named in the receipt:
        erase again once they have ended. Sessions under a legal hold stay, and are named too. On a connection of one
        owner, that owner is erased.

        With `forget_key`, the owner's data keys are destroyed at the end. From then on nothing of the owner can be
        read in backups of a sealed store, and neither can the owner's messages that forks of others show.
        """
        return self._wait(self._target.erase_owner(owner, wait=wait, forget_key=forget_key))

    def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace what messages say, for good and everywhere. Return how many were replaced.

        A sub-agent's session and its caller's have copies of each other's texts in messages of their own. These stay,
        and `search` finds them. Subscribers of the session, and of its forks that are open here, hear of the redaction
        once it is done. `message_ids` are the messages, and `replacement` is what is read in their place.
        """
        return self._wait(self._target.redact(session_id, message_ids, replacement=replacement))

    def forget(self, session_id: str, *, before: int) -> Forgotten:
        """Erase the versions of a session that are older than `before`, for good. The newest always stays.

        What only they show is erased with them: messages, files, runs, words in the search index. Everything that a
        kept version shows or covers stays, and so do messages that forks show, and idempotency keys. Return how much
        was erased.

        The session gets one more version. Loading a version older than `info.first_version` raises VersionForgotten.
        """
        return self._wait(self._target.forget(session_id, before=before))

    def backup(
        self,
        target: str | os.PathLike[str],
        *,
        keep: int | None = None,
        full: bool = False,
        gentle: bool = True,
        progress: Progress | None = None,
    ) -> BackupReport:
        """Add a backup of the whole store to a directory, the `target`, while others read and write. Not for one owner.

        Only what the directory does not have is written. With `keep`, that many backups of this store are left. `full`
        writes everything again. A `gentle` backup pauses for others in this process. `progress` is called with the
        bytes that are done and the bytes in all. `perdure.backups.restore` puts a store back.
        """
        return self._wait(self._target.backup(target, keep=keep, full=full, gentle=gentle, progress=progress))

    def gc(self) -> int:
        """Erase leftovers of erased sessions that nothing points to. Return how many messages. Not for one owner."""
        return self._wait(self._target.gc())

    def exists(self, session_id: str) -> bool:
        """Return whether a session exists within reach, hidden ones included."""
        return self._wait(self._target.exists(session_id))

    def session(self, session_id: str, version: int | None = None) -> AgentSession:
        """Return the session itself, as of a `version`, by default the newest."""
        return self._wait(self._target.session(session_id, version))

    def versions(self, session_id: str, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        """Return a page of a session's versions, newest first: headers, definitions and metadata, without messages.

        For the next page, give the version of the last one as `before`.
        """
        return self._wait(self._target.versions(session_id, before=before, limit=limit))

    def view(self, session_id: str) -> View:
        """Return a conversation for a page that is being loaded, from any process.

        It has the messages, the calls that wait for a person, and the queued messages. Of the run under way, it has
        the messages it was sent and what it has said so far. `follow(after=…)` continues from its `cursor`. All of it
        is one consistent state.
        """
        return self._wait(self._target.view(session_id))

    def list(self, **filters: Unpack[Filters]) -> SessionInfoList[ListedSession]:
        """Return a page of sessions, the newest first, or by `order="updated"` the last updated first.

        With an owner, these are the owner's sessions. `owner=None` asks for sessions without an owner. Each has a
        title, its last words, and the number of messages that it shows.
        """
        return self._wait(self._target.list(**filters))

    def headers(self, **filters: Unpack[Filters]) -> SessionInfoList:
        """Return the same page as headers alone. That costs less, because no message is read."""
        return self._wait(self._target.headers(**filters))

    def length(self, session_id: str) -> int:
        """Return how many messages the model is shown."""
        return self._wait(self._target.length(session_id))

    def snapshot(self, session_id: str) -> dict[str, Any] | None:
        """Return a copy of what the model is shown, as plain data, or None if the session does not exist."""
        return self._wait(self._target.snapshot(session_id))

    def history(self, session_id: str) -> Sequence[Message]:
        """Return all that was said, including messages that are covered, trimmed or rewound."""
        return self._wait(self._target.history(session_id))

    def read(self, session_id: str, part: Media | str) -> Media:
        """Return an image or a file, a `part` of a message, with its bytes in `data`. One on the web stays as it is.

        Bytes of more than a few KB are not loaded with a session. They are read when they are sent, or by this verb.
        The part's `hash` may be given in its place. What is returned then has no name, and the type that its first
        bytes tell, or `application/octet-stream`.
        """
        return self._wait(self._target.read(session_id, part))

    def ancestry(self, session_id: str) -> Ancestry:
        """Return what a session was forked from, what was forked from it, and the first of its line."""
        return self._wait(self._target.ancestry(session_id))

    def diff(self, left: str, right: str) -> Diff:
        """Return what two sessions, `left` and `right`, have in common from their beginning, and how each continues."""
        return self._wait(self._target.diff(left, right))

    def search(self, text: str, *, session_id: str | None = None, limit: int = 20) -> Sequence[SearchHit]:
        """Return the messages that have every word of a `text`, best first, including covered and trimmed ones.

        With a `session_id`, only that session is searched. The page Search has the queries.
        """
        return self._wait(self._target.search(text, session_id=session_id, limit=limit))

    def find(self, message_id: str, *, limit: int = 10) -> Sequence[MessagePlace]:
        """Return the places of the messages with a `message_id`, in any session, those in the newest sessions first.

        Covered, trimmed and rewound messages are found, too. An id that was given twice leads to several places.
        """
        return self._wait(self._target.find(message_id, limit=limit))

    def record(self, session_id: str, *, limit: int | None = None, before: int | None = None) -> SessionRecord:
        """Return what ran in a session: the headers of its loops, in the order in which they began.

        With a `limit` only the last loops are returned. With `before`, the `cursor` of an event, they began before it.
        """
        return self._wait(self._target.record(session_id, limit=limit, before=before))

    def loop(self, session_id: str, loop_id: str) -> LoopRecord:
        """Return the whole record of one run, by its `loop_id`."""
        return self._wait(self._target.loop(session_id, loop_id))

    def events(
        self, session_id: str, *, after: int | None = None, last: int | None = None, follow: bool = False
    ) -> Iterator[AnyLoopEvent]:
        """Yield the events on record, and with `follow` those to come, from any process.

        It begins after the event whose `cursor` is given as `after`, or with the `last` events.
        """
        return self._iterate(self._target.events(session_id, after=after, last=last, follow=follow))

    @property
    def owner(self) -> str | None:
        """The owner whose sessions these are, or None for those of everybody."""
        return self._target.owner

    @property
    def store(self) -> SessionStore:
        """The store that has the sessions."""
        return self._target.store

    @property
    def loops(self) -> LoopFactory:
        """The factory of the loops that run agents."""
        return self._target.loops

    @property
    def runtime(self) -> SessionRuntime:
        """The runtime under the verbs."""
        return self._target.runtime

    @property
    def journal(self) -> Journal | None:
        """The part of the store that records runs; None if it records none."""
        return self._target.journal

    @property
    def live(self) -> LiveSet:
        """The sessions that somebody has open on this connection."""
        return self._target.live

    def info(self, session_id: str) -> AgentSessionInfo:
        """Return a session's header."""
        return self._wait(self._target.info(session_id))

    def execute(self, session_id: str, action: Action, *, on_conflict: OnConflict = "retry") -> AgentSession:
        """Execute any `action` on a session. After a conflict, one that may be repeated is applied again.

        `on_conflict` is "retry" for that, or "raise" for SessionConflict. With "fork", the change is kept as a fork,
        and the error names it.
        """
        return self._wait(self._target.execute(session_id, action, on_conflict=on_conflict))


class BlockingChat(Awaited[Chat]):
    """A `Chat` whose verbs are not awaited.

    `sessions.open` makes it. Parameters that several verbs have:

    - `message`: a text, a `Message`, a dict `{role, content}`, or an item of OpenAI's Responses API.
    - `parts`: images and files from `perdure.attach` or as paths, and further texts, which go with a text.
    - `output`: the form of the answer, as a type or a JSON schema. `reply.value` has it in that form.
    - `context`: the object that tools find in `ToolContext.context`. It is never stored.
    - `call_ids`: the pending calls that are decided on, as in `reply.pending_calls`, or their ids. None means all.
    - `answers`, `errors`: the results of calls that are made outside, or the reasons why they failed, by call ids.
    - `wait`: False to leave the run to a worker, after the decision is on record.
    - `detach`: True to let the run continue when you stop listening.
    - `limit`: the number of items that are returned at most.
    """

    @property
    def id(self) -> SessionId:
        """The id of the session."""
        return self._target.id

    @property
    def sessions(self) -> BlockingSessions:
        """The sessions that it belongs to."""
        return BlockingSessions(self._target.sessions, self._loop)

    @overload
    def send(self, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]) -> Reply[T]: ...

    @overload
    def send(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> Reply[Any]: ...

    def send(self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]) -> Reply[Any]:
        """Send a message and wait for the answer. Raise RunFailed if the run ends without one.

        While another run is under way, SessionBusy is raised, unless `when_busy` leaves the message with that run. The
        other options are the fields of `SendOptions`.
        """
        return self._wait(self._target.send(message, *parts, output=output, **options))

    def stream(
        self, message: object, *parts: Sent, output: object = None, detach: bool = False, **options: Unpack[SendOptions]
    ) -> Iterator[Chunk]:
        """Send a message and yield the answer's text as it comes. The last chunk is empty and has the `reply`.

        If you stop listening, the run stops, unless you `detach` it.
        """
        return self._iterate(self._target.stream(message, *parts, output=output, detach=detach, **options))

    @overload
    def start(
        self, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> BlockingRun[T]: ...

    @overload
    def start(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> BlockingRun[Any]: ...

    def start(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> BlockingRun[Any]:
        """Send a message, and return once the run has begun. The run belongs to the connection, not to the caller."""
        return BlockingRun(self._wait(self._target.start(message, *parts, output=output, **options)), self._loop)

    def enqueue(
        self,
        message: object,
        *parts: Sent,
        priority: int = 0,
        at: datetime | None = None,
        output: object = None,
        **options: Unpack[SendOptions],
    ) -> BlockingQueued:
        """Leave a message for a worker to send, now or `at` a time, and return at once.

        Sessions whose messages have a higher `priority` are run first.
        """
        return BlockingQueued(
            self._wait(self._target.enqueue(message, *parts, priority=priority, at=at, output=output, **options)),
            self._loop,
        )

    def result(self, key: str) -> Reply[Any] | None:
        """Return the result of a `key`, without starting anything, or None if no message with it was ever sent."""
        return self._wait(self._target.result(key))

    def follow(self, *, after: str | None = None, timeout: float = 60.0) -> Iterator[Chunk]:
        """Yield the text of the run under way, or of the last one, after the chunk whose `cursor` is given as `after`.

        It works from any process, and the run continues if you stop listening. The last chunk is empty and has the
        `reply`. If the run's process has died, this waits until another recovers it. RunInterrupted is raised after
        `timeout` seconds without that.
        """
        return self._iterate(self._target.follow(after=after, timeout=timeout))

    def retry(self, *, output: object = None, **options: Unpack[SendOptions]) -> Reply[Any]:
        """Send the last message again. The old answer leaves the view, and stays in the history."""
        return self._wait(self._target.retry(output=output, **options))

    def start_retry(self, *, output: object = None, **options: Unpack[SendOptions]) -> BlockingRun[Any]:
        """Send the last message again, and return once the run has begun."""
        return BlockingRun(self._wait(self._target.start_retry(output=output, **options)), self._loop)

    def stream_retry(
        self, *, output: object = None, detach: bool = False, **options: Unpack[SendOptions]
    ) -> Iterator[Chunk]:
        """Send the last message again, and yield the answer's text as it comes."""
        return self._iterate(self._target.stream_retry(output=output, detach=detach, **options))

    def approve(self, call_ids: Shown | None = None, *, context: object = None, wait: bool = True) -> Reply[Any]:
        """Approve pending tool calls: all of them, or those given as they are in `reply.pending_calls`.

        With `wait=False` a worker continues the run. Then neither tools nor a model are needed here.
        """
        return self._wait(self._target.approve(call_ids, context=context, wait=wait))

    def deny(
        self, reason: str, call_ids: Shown | None = None, *, context: object = None, wait: bool = True
    ) -> Reply[Any]:
        """Deny pending tool calls. The model is told the `reason`, and continues, here or at a worker."""
        return self._wait(self._target.deny(reason, call_ids, context=context, wait=wait))

    def stream_approve(
        self, call_ids: Shown | None = None, *, context: object = None, detach: bool = False
    ) -> Iterator[Chunk]:
        """Approve pending tool calls, and yield the text of what follows as it comes."""
        return self._iterate(self._target.stream_approve(call_ids, context=context, detach=detach))

    def stream_deny(
        self, reason: str, call_ids: Shown | None = None, *, context: object = None, detach: bool = False
    ) -> Iterator[Chunk]:
        """Deny pending tool calls for a `reason`, and yield the text of what follows as it comes."""
        return self._iterate(self._target.stream_deny(reason, call_ids, context=context, detach=detach))

    def answer(
        self,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        wait: bool = True,
    ) -> Reply[Any]:
        """Hand in the results of calls that are made outside, by their ids, and continue the run.

        With `wait=False` a worker continues it.
        """
        return self._wait(self._target.answer(answers, errors=errors, context=context, wait=wait))

    def settle(
        self,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        wait: bool = True,
    ) -> Reply[Any]:
        """Settle several pending calls at once, and continue the run: `approve` some, `deny` some, answer some.

        `deny` has a reason for each call. With `wait=False` a worker continues the run.
        """
        return self._wait(
            self._target.settle(approve=approve, deny=deny, answers=answers, errors=errors, context=context, wait=wait)
        )

    def start_settle(
        self,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
    ) -> BlockingRun[Any]:
        """Settle several pending calls, and return once the run continues. It belongs to the connection.

        `approve` has the calls to approve, and `deny` a reason for each call to deny.
        """
        return BlockingRun(
            self._wait(
                self._target.start_settle(approve=approve, deny=deny, answers=answers, errors=errors, context=context)
            ),
            self._loop,
        )

    def stream_answer(
        self,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        detach: bool = False,
    ) -> Iterator[Chunk]:
        """Hand in the results of calls that are made outside, and yield the text of what follows as it comes."""
        return self._iterate(self._target.stream_answer(answers, errors=errors, context=context, detach=detach))

    def cancel(self, *, run: str | None = None) -> bool:
        """Ask the run that is under way, in any process, to stop. Return False if there is none.

        With `run`, the id of a run, no other run is stopped.
        """
        return self._wait(self._target.cancel(run=run))

    def read(self, part: Media | str) -> Media:
        """Return an image or a file, a `part` of a message of this session or its hash, with its bytes in `data`."""
        return self._wait(self._target.read(part))

    def inject(self, message: object, *parts: Sent) -> None:
        """Append a message, or a list of them, without running the agent. `parts` follow a single one."""
        return self._wait(self._target.inject(message, *parts))

    def fork(
        self,
        dst: str | None = None,
        *,
        at: int | str | None = None,
        version: int | None = None,
        loop: str | None = None,
    ) -> BlockingChat:
        """Make a session that begins where this one is, and return its handle. Nothing is copied.

        Its id is `dst`, or a new one. It begins at this one's end, or `at` a message: at a number of messages, or
        after a message with an id. With a `version` it begins at an older version. With a `loop`, the id of a run, it
        begins where that run ended.
        """
        return BlockingChat(self._wait(self._target.fork(dst, at=at, version=version, loop=loop)), self._loop)

    def adopt(self, branch: BlockingChat | str) -> None:
        """Show from now on what a fork of this session shows. `branch` is the fork's handle or id."""
        return self._wait(self._target.adopt(branch._target if isinstance(branch, BlockingChat) else branch))

    def diff(self, other: BlockingChat | str) -> Diff:
        """Return what this session and the `other` have in common from their beginning on, and how each continues."""
        return self._wait(self._target.diff(other._target if isinstance(other, BlockingChat) else other))

    def trim(self, keep_last: int) -> int:
        """Show only the last messages, `keep_last` of them. Return how many are shown then.

        A few more are shown where a tool call would lose its result.
        """
        return self._wait(self._target.trim(keep_last))

    def compact(self, **options: Any) -> int:
        """Show a summary, or less, of older messages. Return how many are shown then.

        The `options` are the fields of `CompactionOptions`.
        """
        return self._wait(self._target.compact(**options))

    def uncompact(self, block_id: str | None = None) -> int:
        """Show again what the newest compaction covers, or the one with a `block_id`. Return the number shown."""
        return self._wait(self._target.uncompact(block_id))

    def reset(self) -> None:
        """Show nothing of what was said so far."""
        return self._wait(self._target.reset())

    def undo(self) -> int:
        """Take back the last change of what is shown. Return how many messages are shown then."""
        return self._wait(self._target.undo())

    def rewind(self, to: int | str) -> int:
        """Go back `to` a version, by its number, or a message, by its id. Return how many messages are shown then."""
        return self._wait(self._target.rewind(to))

    def suspend(self, *, until: datetime | None = None) -> None:
        """Close the session to messages until it is resumed: by hand, or by a worker at the time `until`."""
        return self._wait(self._target.suspend(until=until))

    def resume(self) -> None:
        """Open the session again after it was suspended, completed or failed."""
        return self._wait(self._target.resume())

    def rename(self, name: str | None) -> None:
        """Give the session a `name` for people, or none."""
        return self._wait(self._target.rename(name))

    def delete(self) -> None:
        """Hide the session from lists. `restore` takes that back."""
        return self._wait(self._target.delete())

    def restore(self) -> None:
        """Take the deletion of the session back. What was erased cannot be restored."""
        return self._wait(self._target.restore())

    def erase(self) -> Sequence[SessionId]:
        """Erase the session for good, and the sessions of its sub-agents with it."""
        return self._wait(self._target.erase())

    def redact(self, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace the content of messages for good, wherever it is: in versions, forks, records and the search index.

        `message_ids` are the messages, and `replacement` is what is read in their place. Return how many were replaced.
        """
        return self._wait(self._target.redact(message_ids, replacement=replacement))

    def forget(self, *, before: int) -> Forgotten:
        """Erase the versions older than `before`, for good, and what only they show. Return how much was erased."""
        return self._wait(self._target.forget(before=before))

    def retain(self, rule: Retention | None) -> None:
        """Give the session a `rule` of its own about how long it is kept. None takes it away."""
        return self._wait(self._target.retain(rule))

    def hold(self, case: str | None = None) -> None:
        """Put a legal hold on the session: nothing of it can be erased, forgotten or redacted until it is lifted.

        The hold is the tag `hold`, or `hold:case` for a `case`.
        """
        return self._wait(self._target.hold(case))

    def lift_hold(self, case: str | None = None) -> None:
        """Lift the legal hold of a `case`, and put that on record."""
        return self._wait(self._target.lift_hold(case))

    def session(self, version: int | None = None) -> AgentSession:
        """Return the session itself, as of a `version`, by default the newest."""
        return self._wait(self._target.session(version))

    def versions(self, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        """Return a page of the session's versions, newest first, without what they show.

        For the next page, give the version of the last one as `before`.
        """
        return self._wait(self._target.versions(before=before, limit=limit))

    def view(self) -> View:
        """Return the conversation for a page that is being loaded, with the `cursor` to `follow` from.

        It works from any process, even during a run.
        """
        return self._wait(self._target.view())

    def snapshot(self) -> dict[str, Any] | None:
        """Return a copy of what the model is shown, as plain data, or None if the session does not exist."""
        return self._wait(self._target.snapshot())

    def length(self) -> int:
        """Return how many messages the model is shown."""
        return self._wait(self._target.length())

    def history(self) -> Sequence[Message]:
        """Return all that was said, including messages that are covered, trimmed or rewound."""
        return self._wait(self._target.history())

    def search(self, text: str, *, limit: int = 20) -> Sequence[SearchHit]:
        """Return the messages of this session that have every word of a `text`, best first."""
        return self._wait(self._target.search(text, limit=limit))

    def ancestry(self) -> Ancestry:
        """Return what the session was forked from, what was forked from it, and the first of its line."""
        return self._wait(self._target.ancestry())

    def record(self) -> SessionRecord:
        """Return what ran in the session: the headers of its loops."""
        return self._wait(self._target.record())

    def events(
        self, *, after: int | None = None, last: int | None = None, follow: bool = False
    ) -> Iterator[AnyLoopEvent]:
        """Yield the events on record, and with `follow` those to come, from any process.

        It begins after the event whose `cursor` is given as `after`, or with the `last` events.
        """
        return self._iterate(self._target.events(after=after, last=last, follow=follow))

    def subscribe(self, subscriber: Subscriber) -> LiveSubscription:
        """Call a function, the `subscriber`, plain or async, with every event of this session.

        It is called until the returned subscription is cancelled, or the session is closed.
        """
        self._running()
        return self._target.subscribe(subscriber)

    def export(
        self, target: str | os.PathLike[str] | BinaryIO, *, format: Format = "perdure", history: bool = False
    ) -> MoveReport:
        """Write the session to a file: whole, or as a conversation in the `format` "openai" or "markdown".

        `target` is a path or a binary file. A conversation has the messages shown, or with `history` all that was said.
        """
        return self._wait(self._target.export(target, format=format, history=history))

    def recover(self) -> bool:
        """Continue a run that was killed. Return whether there was one."""
        return self._wait(self._target.recover())

    def close(self) -> None:
        """Drop the session from memory, and its subscribers with it. The store keeps the session."""
        return self._wait(self._target.close())

    def new_session(self) -> SessionId:
        """Begin a new session with the same agent and model. From now on this handle is for the new one."""
        return self._wait(self._target.new_session())

    def check_and_rotate(self, idle: float | timedelta) -> SessionId | None:
        """Begin a new session if nothing has happened in this one for `idle`, in seconds or as a timedelta.

        Return its id, or None if no session was begun.

        A session is never left during a run. The run may be under way, here or elsewhere, or wait for approval, or it
        may have been killed. The next send recovers a killed run first.
        """
        return self._wait(self._target.check_and_rotate(idle))


class BlockingRun(Awaited[StartedRun[T]], Generic[T]):
    """A `StartedRun` whose verbs are not awaited."""

    @property
    def is_detached(self) -> bool:
        """Return whether the run continues when nobody listens any more. A run that is only waited for does."""
        return self._target.is_detached

    @property
    def session_id(self) -> SessionId:
        """The session that it runs in."""
        return self._target.session_id

    @property
    def is_done(self) -> bool:
        """True once the run is over."""
        return self._target.is_done

    def begun(self) -> None:
        """Wait until the run has claimed its session. Raise the error that kept it from that."""
        return self._wait(self._target.begun())

    def stream(self) -> Iterator[Chunk]:
        """Yield the answer's text, from its beginning, as it comes. The last chunk is empty and has the `reply`.

        Any number of listeners may come, early or late, and leave again.
        """
        return self._iterate(self._target.stream())

    def result(self) -> Reply[T]:
        """Wait for the answer. Raise RunFailed if the run ends without one, RunInterrupted if it waits for recovery."""
        return self._wait(self._target.result())

    def cancel(self) -> bool:
        """Stop the run, and wait until what was said so far is kept. Return False if it was over.

        If the answer is another run's, that run continues, and only the wait for it ends. `chat.cancel()` stops it.
        """
        return self._wait(self._target.cancel())


class BlockingQueued(Awaited[Queued]):
    """A `Queued` whose verbs are not awaited."""

    @property
    def session_id(self) -> SessionId:
        """The session that it was left with."""
        return self._target.session_id

    @property
    def key(self) -> str:
        """The key by which `result` finds its answer, also from another process."""
        return self._target.key

    @property
    def at(self) -> datetime | None:
        """The time at which it is sent, or None for as soon as a worker can."""
        return self._target.at

    def reply(self, timeout: float | None = None) -> Reply[Any] | None:
        """Wait for the answer, for as long as it takes or for `timeout` seconds. Return None after that time.

        Raise RunFailed if its run ended without an answer, and InputRefused if it can never be sent, for example
        because it was taken back.
        """
        return self._wait(self._target.reply(timeout))

    def stream(self) -> Iterator[Chunk]:
        """Yield the answer's text, from its beginning, as a worker writes it. The last chunk has the `reply`.

        It waits until a worker takes the message. If you stop listening, the run continues. The errors are those of
        `reply`.
        """
        return self._iterate(self._target.stream())

    def drop(self) -> bool:
        """Take the message back. Return False if its time has come: it waits in the inbox, or has been answered."""
        return self._wait(self._target.drop())
