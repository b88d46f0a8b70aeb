"""A handle on one session, which `sessions.open` returns."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, Unpack, overload

from perdure.actions.waiting import is_waiting
from perdure.model.checks import expect_method, expect_number
from perdure.model.ids import SessionId, now
from perdure.model.loop_events import AnyLoopEvent
from perdure.model.message import Media, Message
from perdure.model.retention import Retention
from perdure.model.session import AgentSession, SessionStatus
from perdure.model.value import EMPTY
from perdure.protocols import Forgotten, SearchHit, SessionHead
from perdure.runtime.bus import Subscriber
from perdure.sessions.attaching import Sent
from perdure.sessions.open_sessions import LiveSubscription
from perdure.sessions.reply import Chunk, Reply

if TYPE_CHECKING:
    from perdure.actions.approval import Shown
    from perdure.archive.moving import MoveReport
    from perdure.model.record import SessionRecord
    from perdure.sessions.conversations import Format
    from perdure.sessions.lineage import Ancestry, Diff
    from perdure.sessions.queueing import Queued
    from perdure.sessions.sessions import Sessions
    from perdure.sessions.started_run import StartedRun
    from perdure.sessions.talking import SendOptions
    from perdure.sessions.viewing import View

T = TypeVar("T")


class Chat:
    """One session's verbs. A handle keeps nothing but the id, so any number of them may be open on one session.

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

    def __init__(self, sessions: Sessions, session_id: SessionId) -> None:
        self._sessions = expect_method(sessions, "send", "$.sessions")
        self._id = SessionId(session_id)

    @property
    def id(self) -> SessionId:
        """The id of the session."""
        return self._id

    @property
    def sessions(self) -> Sessions:
        """The sessions that it belongs to."""
        return self._sessions

    def __repr__(self) -> str:
        return f"<Chat {self._id}>"

    @overload
    async def send(
        self, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> Reply[T]: ...

    @overload
    async def send(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> Reply[Any]: ...

    async def send(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> Reply[Any]:
        """Send a message and wait for the answer. Raise RunFailed if the run ends without one.

        While another run is under way, SessionBusy is raised, unless `when_busy` leaves the message with that run. The
        other options are the fields of `SendOptions`.
        """
        return await self._sessions.send(self._id, message, *parts, output=output, **options)

    def stream(
        self, message: object, *parts: Sent, output: object = None, detach: bool = False, **options: Unpack[SendOptions]
    ) -> AsyncIterator[Chunk]:
        """Send a message and yield the answer's text as it comes. The last chunk is empty and has the `reply`.

        If you stop listening, the run stops, unless you `detach` it.
        """
        return self._sessions.stream(self._id, message, *parts, output=output, detach=detach, **options)

    @overload
    async def start(
        self, message: object, *parts: Sent, output: type[T], **options: Unpack[SendOptions]
    ) -> StartedRun[T]: ...

    @overload
    async def start(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> StartedRun[Any]: ...

    async def start(
        self, message: object, *parts: Sent, output: object = None, **options: Unpack[SendOptions]
    ) -> StartedRun[Any]:
        """Send a message, and return once the run has begun. The run belongs to the connection, not to the caller."""
        return await self._sessions.start(self._id, message, *parts, output=output, **options)

    async def enqueue(
        self,
        message: object,
        *parts: Sent,
        priority: int = 0,
        at: datetime | None = None,
        output: object = None,
        **options: Unpack[SendOptions],
    ) -> Queued:
        """Leave a message for a worker to send, now or `at` a time, and return at once.

        Sessions whose messages have a higher `priority` are run first.
        """
        return await self._sessions.enqueue(
            self._id, message, *parts, priority=priority, at=at, output=output, **options
        )

    async def result(self, key: str) -> Reply[Any] | None:
        """Return the result of a `key`, without starting anything, or None if no message with it was ever sent."""
        return await self._sessions.result(self._id, key)

    def follow(self, *, after: str | None = None, timeout: float = 60.0) -> AsyncIterator[Chunk]:
        """Yield the text of the run under way, or of the last one, after the chunk whose `cursor` is given as `after`.

        It works from any process, and the run continues if you stop listening. The last chunk is empty and has the
        `reply`. If the run's process has died, this waits until another recovers it. RunInterrupted is raised after
        `timeout` seconds without that.
        """
        return self._sessions.follow(self._id, after=after, timeout=timeout)

    async def retry(self, *, output: object = None, **options: Unpack[SendOptions]) -> Reply[Any]:
        """Send the last message again. The old answer leaves the view, and stays in the history."""
        return await self._sessions.retry(self._id, output=output, **options)

    async def start_retry(self, *, output: object = None, **options: Unpack[SendOptions]) -> StartedRun[Any]:
        """Send the last message again, and return once the run has begun."""
        return await self._sessions.start_retry(self._id, output=output, **options)

    def stream_retry(
        self, *, output: object = None, detach: bool = False, **options: Unpack[SendOptions]
    ) -> AsyncIterator[Chunk]:
        """Send the last message again, and yield the answer's text as it comes."""
        return self._sessions.stream_retry(self._id, output=output, detach=detach, **options)

    async def approve(self, call_ids: Shown | None = None, *, context: object = None, wait: bool = True) -> Reply[Any]:
        """Approve pending tool calls: all of them, or those given as they are in `reply.pending_calls`.

        With `wait=False` a worker continues the run. Then neither tools nor a model are needed here.
        """
        return await self._sessions.approve(self._id, call_ids, context=context, wait=wait)

    async def deny(
        self, reason: str, call_ids: Shown | None = None, *, context: object = None, wait: bool = True
    ) -> Reply[Any]:
        """Deny pending tool calls. The model is told the `reason`, and continues, here or at a worker."""
        return await self._sessions.deny(self._id, reason, call_ids, context=context, wait=wait)

    def stream_approve(
        self, call_ids: Shown | None = None, *, context: object = None, detach: bool = False
    ) -> AsyncIterator[Chunk]:
        """Approve pending tool calls, and yield the text of what follows as it comes."""
        return self._sessions.stream_approve(self._id, call_ids, context=context, detach=detach)

    def stream_deny(
        self, reason: str, call_ids: Shown | None = None, *, context: object = None, detach: bool = False
    ) -> AsyncIterator[Chunk]:
        """Deny pending tool calls for a `reason`, and yield the text of what follows as it comes."""
        return self._sessions.stream_deny(self._id, reason, call_ids, context=context, detach=detach)

    async def answer(
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
        return await self._sessions.answer(self._id, answers, errors=errors, context=context, wait=wait)

    async def settle(
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
        given: dict[str, Any] = {"approve": approve, "deny": deny, "answers": answers, "errors": errors}
        return await self._sessions.settle(self._id, **given, context=context, wait=wait)

    async def start_settle(
        self,
        *,
        approve: Shown = (),
        deny: Mapping[str, str] = EMPTY,
        answers: Mapping[str, object] = EMPTY,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
    ) -> StartedRun[Any]:
        """Settle several pending calls, and return once the run continues. It belongs to the connection.

        `approve` has the calls to approve, and `deny` a reason for each call to deny.
        """
        given: dict[str, Any] = {"approve": approve, "deny": deny, "answers": answers, "errors": errors}
        return await self._sessions.start_settle(self._id, **given, context=context)

    def stream_answer(
        self,
        answers: Mapping[str, object] = EMPTY,
        *,
        errors: Mapping[str, str] = EMPTY,
        context: object = None,
        detach: bool = False,
    ) -> AsyncIterator[Chunk]:
        """Hand in the results of calls that are made outside, and yield the text of what follows as it comes."""
        return self._sessions.stream_answer(self._id, answers, errors=errors, context=context, detach=detach)

    async def cancel(self, *, run: str | None = None) -> bool:
        """Ask the run that is under way, in any process, to stop. Return False if there is none.

        With `run`, the id of a run, no other run is stopped.
        """
        return await self._sessions.cancel(self._id, run=run)

    async def read(self, part: Media | str) -> Media:
        """Return an image or a file, a `part` of a message of this session or its hash, with its bytes in `data`."""
        return await self._sessions.read(self._id, part)

    async def inject(self, message: object, *parts: Sent) -> None:
        """Append a message, or a list of them, without running the agent. `parts` follow a single one."""
        await self._sessions.inject(self._id, message, *parts)

    async def fork(
        self,
        dst: str | None = None,
        *,
        at: int | str | None = None,
        version: int | None = None,
        loop: str | None = None,
    ) -> Chat:
        """Make a session that begins where this one is, and return its handle. Nothing is copied.

        Its id is `dst`, or a new one. It begins at this one's end, or `at` a message: at a number of messages, or
        after a message with an id. With a `version` it begins at an older version. With a `loop`, the id of a run, it
        begins where that run ended.
        """
        return await self._sessions.fork(self._id, dst, at=at, version=version, loop=loop)

    async def adopt(self, branch: Chat | str) -> None:
        """Show from now on what a fork of this session shows. `branch` is the fork's handle or id."""
        await self._sessions.adopt(self._id, branch.id if isinstance(branch, Chat) else branch)

    async def diff(self, other: Chat | str) -> Diff:
        """Return what this session and the `other` have in common from their beginning on, and how each continues."""
        return await self._sessions.diff(self._id, other.id if isinstance(other, Chat) else other)

    async def trim(self, keep_last: int) -> int:
        """Show only the last messages, `keep_last` of them. Return how many are shown then.

        A few more are shown where a tool call would lose its result.
        """
        return await self._sessions.trim(self._id, keep_last)

    async def compact(self, **options: Any) -> int:
        """Show a summary, or less, of older messages. Return how many are shown then.

        The `options` are the fields of `CompactionOptions`.
        """
        return await self._sessions.compact(self._id, **options)

    async def uncompact(self, block_id: str | None = None) -> int:
        """Show again what the newest compaction covers, or the one with a `block_id`. Return the number shown."""
        return await self._sessions.uncompact(self._id, block_id)

    async def reset(self) -> None:
        """Show nothing of what was said so far."""
        await self._sessions.reset(self._id)

    async def undo(self) -> int:
        """Take back the last change of what is shown. Return how many messages are shown then."""
        return await self._sessions.undo(self._id)

    async def rewind(self, to: int | str) -> int:
        """Go back `to` a version, by its number, or a message, by its id. Return how many messages are shown then."""
        return await self._sessions.rewind(self._id, to)

    async def suspend(self, *, until: datetime | None = None) -> None:
        """Close the session to messages until it is resumed: by hand, or by a worker at the time `until`."""
        await self._sessions.suspend(self._id, until=until)

    async def resume(self) -> None:
        """Open the session again after it was suspended, completed or failed."""
        await self._sessions.resume(self._id)

    async def rename(self, name: str | None) -> None:
        """Give the session a `name` for people, or none."""
        await self._sessions.rename(self._id, name)

    async def delete(self) -> None:
        """Hide the session from lists. `restore` takes that back."""
        await self._sessions.delete(self._id)

    async def restore(self) -> None:
        """Take the deletion of the session back. What was erased cannot be restored."""
        await self._sessions.restore(self._id)

    async def erase(self) -> Sequence[SessionId]:
        """Erase the session for good, and the sessions of its sub-agents with it."""
        return await self._sessions.erase(self._id)

    async def redact(self, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace the content of messages for good, wherever it is: in versions, forks, records and the search index.

        `message_ids` are the messages, and `replacement` is what is read in their place. Return how many were replaced.
        """
        return await self._sessions.redact(self._id, message_ids, replacement=replacement)

    async def forget(self, *, before: int) -> Forgotten:
        """Erase the versions older than `before`, for good, and what only they show. Return how much was erased."""
        return await self._sessions.forget(self._id, before=before)

    async def retain(self, rule: Retention | None) -> None:
        """Give the session a `rule` of its own about how long it is kept. None takes it away."""
        await self._sessions.retain(self._id, rule)

    async def hold(self, case: str | None = None) -> None:
        """Put a legal hold on the session: nothing of it can be erased, forgotten or redacted until it is lifted.

        The hold is the tag `hold`, or `hold:case` for a `case`.
        """
        await self._sessions.hold(self._id, case)

    async def lift_hold(self, case: str | None = None) -> None:
        """Lift the legal hold of a `case`, and put that on record."""
        await self._sessions.lift_hold(self._id, case)

    async def session(self, version: int | None = None) -> AgentSession:
        """Return the session itself, as of a `version`, by default the newest."""
        return await self._sessions.session(self._id, version)

    async def versions(self, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        """Return a page of the session's versions, newest first, without what they show.

        For the next page, give the version of the last one as `before`.
        """
        return await self._sessions.versions(self._id, before=before, limit=limit)

    async def view(self) -> View:
        """Return the conversation for a page that is being loaded, with the `cursor` to `follow` from.

        It works from any process, even during a run.
        """
        return await self._sessions.view(self._id)

    async def snapshot(self) -> dict[str, Any] | None:
        """Return a copy of what the model is shown, as plain data, or None if the session does not exist."""
        return await self._sessions.snapshot(self._id)

    async def length(self) -> int:
        """Return how many messages the model is shown."""
        return await self._sessions.length(self._id)

    async def history(self) -> Sequence[Message]:
        """Return all that was said, including messages that are covered, trimmed or rewound."""
        return await self._sessions.history(self._id)

    async def search(self, text: str, *, limit: int = 20) -> Sequence[SearchHit]:
        """Return the messages of this session that have every word of a `text`, best first."""
        return await self._sessions.search(text, session_id=self._id, limit=limit)

    async def ancestry(self) -> Ancestry:
        """Return what the session was forked from, what was forked from it, and the first of its line."""
        return await self._sessions.ancestry(self._id)

    async def record(self) -> SessionRecord:
        """Return what ran in the session: the headers of its loops."""
        return await self._sessions.record(self._id)

    def events(
        self, *, after: int | None = None, last: int | None = None, follow: bool = False
    ) -> AsyncIterator[AnyLoopEvent]:
        """Yield the events on record, and with `follow` those to come, from any process.

        It begins after the event whose `cursor` is given as `after`, or with the `last` events.
        """
        return self._sessions.events(self._id, after=after, last=last, follow=follow)

    def subscribe(self, subscriber: Subscriber) -> LiveSubscription:
        """Call a function, the `subscriber`, plain or async, with every event of this session.

        It is called until the returned subscription is cancelled, or the session is closed.
        """
        return self._sessions.live.subscribe(self._id, subscriber)

    async def export(
        self, target: str | os.PathLike[str] | BinaryIO, *, format: Format = "perdure", history: bool = False
    ) -> MoveReport:
        """Write the session to a file: whole, or as a conversation in the `format` "openai" or "markdown".

        `target` is a path or a binary file. A conversation has the messages shown, or with `history` all that was said.
        """
        return await self._sessions.export(target, [self._id], format=format, history=history)

    async def recover(self) -> bool:
        """Continue a run that was killed. Return whether there was one."""
        report = await self._sessions.recover(self._id)
        return bool(report.resumed or report.suspended)

    async def close(self) -> None:
        """Drop the session from memory, and its subscribers with it. The store keeps the session."""
        await self._sessions.close(self._id)

    async def new_session(self) -> SessionId:
        """Begin a new session with the same agent and model. From now on this handle is for the new one."""
        self._id = (await self._sessions.new_session(self._id)).id
        return self._id

    async def check_and_rotate(self, idle: float | timedelta) -> SessionId | None:
        """Begin a new session if nothing has happened in this one for `idle`, in seconds or as a timedelta.

        Return its id, or None if no session was begun.

        A session is never left during a run. The run may be under way, here or elsewhere, or wait for approval, or it
        may have been killed. The next send recovers a killed run first.
        """
        seconds = idle.total_seconds() if isinstance(idle, timedelta) else idle
        expect_number(seconds, "$.idle")
        info = await self._sessions.info(self._id)
        if (now() - info.updated_at).total_seconds() < seconds or await self._is_within_run(info.status):
            return None
        return await self.new_session()

    async def _is_within_run(self, status: SessionStatus) -> bool:
        """Tell whether a run of the session has begun and not ended."""
        journal = self._sessions.runtime.journal
        if self._sessions.live.is_running(self._id):
            return True
        if status is SessionStatus.SUSPENDED and is_waiting(await self.session()):  # a pause alone is not a run
            return True
        return journal is not None and (await journal.is_claimed(self._id) or await journal.is_interrupted(self._id))
