"""The view of a conversation for a page that is loaded in the middle of it, and the place to follow it from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal

import msgspec

from perdure.actions.inbox import QUEUE, STEER, Inbox, messages_in
from perdure.actions.waiting import is_waiting
from perdure.model.execution import PendingCall
from perdure.model.ids import SessionId
from perdure.model.loop_events import AnyLoopEvent, MessageEnd
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import Journal, JournalEntry, RunOnRecord, RunProgress
from perdure.runtime.record_reader import is_left_to_worker
from perdure.sessions.following import Follower, is_answer, last_run, progress_of
from perdure.sessions.reply import Chunk

Activity = Literal["idle", "running", "waiting", "killed", "left"]
"""The state of a session's run: see `View.activity`."""


class View(msgspec.Struct, frozen=True):
    """A conversation at one moment: what was said, and how far the run under way has come.

    `follow(after=view.cursor)` yields what follows, without a gap and without a repetition.
    """

    session: AgentSession
    """The newest version. What the run under way says is not in it yet."""
    messages: Sequence[Message]
    """The messages that the session shows, without those of the run under way."""
    activity: Activity
    """"running"; "waiting" for a person to decide on `pending_calls`; "left" to a worker, such as by
    `approve(wait=False)`; "killed"; or "idle". A worker, or `recover`, continues a run that was left or killed."""
    asked: tuple[Message, ...] = ()
    """The messages that the run under way was sent."""
    said: tuple[Message, ...] = ()
    """The whole messages that it has said since, including tool calls and their results."""
    text: str = ""
    """The text of its answer so far, including the message that is being written. Offsets of chunks count in it."""
    pending_calls: tuple[PendingCall, ...] = ()
    """The tool calls that wait for a person."""
    queued: tuple[Message, ...] = ()
    """The messages that wait for the run to end, or to take them in."""
    cursor: str | None = None
    """The cursor from which `follow(after=…)` continues, or None if nothing has run yet."""


Load = Callable[[], Awaitable[AgentSession]]
Version = Callable[[], Awaitable[int]]


async def view_of(journal: Journal, load: Load, version: Version) -> View:
    """Return the view of a session.

    Session, record and inbox are read one after the other. They are of one state if nobody has saved meanwhile, since
    only a save ends a run. Otherwise they are read again.
    """
    while True:
        session = await load()
        # The inbox before the record: an item that a run takes in between is then on record, and not counted twice.
        posted = await Inbox(journal, session.id).items()
        progress = await progress_of(journal, session.id)
        view = await _seen(journal, session, progress, await _waiting(journal, session, posted))
        if await version() == session.version:
            return view


def view_without_journal(session: AgentSession, *, is_running: bool) -> View:
    """Return the view of a session in a store that records no runs. Only those of this process are known."""
    waits = session.state.execution.pending_calls if session.state.execution else ()
    activity: Activity = "running" if is_running else "waiting" if waits else "idle"
    return View(session, session.state.messages, activity, pending_calls=waits if activity == "waiting" else ())


async def _seen(journal: Journal, session: AgentSession, progress: RunProgress, queued: tuple[Message, ...]) -> View:
    run = await _last_run(journal, session, progress)
    if run is None:
        return View(session, session.state.messages, _activity(session, progress), queued=queued)
    onlooker = Onlooker(journal, session.id, run)
    text = await onlooker.look(progress)
    is_its_own = onlooker.base_version == session.version and not onlooker.is_over
    is_under_way = is_its_own and (progress.is_claimed or progress.is_interrupted)
    activity = _activity(session, progress, is_under_way=is_under_way)
    if activity == "killed" and await is_left_to_worker(journal, session.id):
        activity = "left"
    if not is_under_way and activity != "waiting":
        place = onlooker.place.ended() if onlooker.is_over else onlooker.place
        return View(session, session.state.messages, activity, queued=queued, cursor=place.cursor)
    return View(
        session,
        _without(session.state.messages, {message.id for message in (*onlooker.asked, *onlooker.said)}),
        activity,
        asked=tuple(onlooker.asked),
        said=tuple(message for message in onlooker.said if not message.is_superseded),
        text=text,
        pending_calls=_pending(session) if activity == "waiting" else (),
        queued=queued,
        cursor=onlooker.place.cursor,
    )


async def _last_run(journal: Journal, session: AgentSession, progress: RunProgress) -> RunOnRecord | None:
    if is_waiting(session) and session.state.execution is not None:
        return next(iter(await journal.runs(session.id, run=session.state.execution.execution_id)), None)
    return await last_run(journal, session.id, progress.seq + 1)


def _activity(session: AgentSession, progress: RunProgress, *, is_under_way: bool = False) -> Activity:
    if is_waiting(session) and not is_under_way:  # also while a compaction has claimed it
        return "waiting"
    return "running" if progress.is_claimed else "killed" if progress.is_interrupted else "idle"


def _pending(session: AgentSession) -> tuple[PendingCall, ...]:
    return session.state.execution.pending_calls if session.state.execution else ()


def _without(messages: Sequence[Message], ids: set[str]) -> Sequence[Message]:
    """Return messages without those at the end that have these ids. Only at the end: one may have been sent before."""
    stop = len(messages)
    while stop and messages[stop - 1].id in ids:
        stop -= 1
    return messages[:stop]


async def _waiting(journal: Journal, session: AgentSession, posted: Sequence[JournalEntry]) -> tuple[Message, ...]:
    """Return the messages in an inbox that no run has begun to answer or taken in."""
    inbox, waiting = Inbox(journal, session.id), []
    for item in posted:
        if item.kind in (QUEUE, STEER) and not await inbox.was_delivered(item):
            waiting += messages_in(item)
    return tuple(waiting)


class Onlooker(Follower):
    """A follower that looks once at how far a run has come, and keeps the messages that it was sent and has said."""

    def __init__(self, journal: Journal, session_id: SessionId, run: RunOnRecord) -> None:
        super().__init__(journal, session_id, run, None)
        self.asked: list[Message] = []
        self.said: list[Message] = []

    async def look(self, progress: RunProgress) -> str:
        """Return the text of the run so far. The place is then behind that text, as after following the run."""
        text = ""
        async for chunk in self.news(progress):
            text = text[: chunk.offset] + chunk
        return text

    async def hear(self, event: AnyLoopEvent) -> AsyncIterator[Chunk]:
        if isinstance(event, MessageEnd):
            self._keep(event.message, event.loop_id)
        async for chunk in super().hear(event):
            yield chunk

    def _keep(self, message: Message, loop_id: str) -> None:
        if self.said or is_answer(message, loop_id):
            if not self.is_group:  # it is not known yet which branch is selected
                self.said.append(message)
        elif message not in self.asked:  # each branch of a group tells of it
            self.asked.append(message)
