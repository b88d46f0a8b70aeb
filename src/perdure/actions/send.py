"""Send messages to an agent and run it to its answer."""

from __future__ import annotations

import hashlib
import logging
from typing import Literal

from perdure import codec
from perdure.actions.given import messages_to_send, require_loops
from perdure.actions.refused import refuse
from perdure.actions.running import (
    QUEUE,
    STEER,
    RunOptions,
    messages_in,
    pending_in,
    require_journal,
    run_agent,
    take,
    was_delivered,
)
from perdure.actions.spawning import Spawner
from perdure.errors import (
    ClaimLost,
    InvalidData,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SessionNotFound,
)
from perdure.loop.factory import LoopFactory
from perdure.model.checks import expect_text
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import ActionContext, Entry, Journal, JournalEntry, Key

WhenBusy = Literal["raise", "steer", "queue"]

_log = logging.getLogger("perdure.actions")


class SendMessage:
    """Append what a user says, run the agent, and keep what comes of it.

    `key` makes a repeated request return what the first one came to. `when_busy` says what becomes of a message to a
    session that is being run: an error at once; delivered to the run between two steps; or sent when the run ends.
    Messages of other roles than `user` are refused unless `any_role` is set; `InjectMessage` takes all.
    """

    runs_model = True

    def __init__(
        self,
        message: object,
        loops: LoopFactory,
        *,
        key: str | None = None,
        when_busy: WhenBusy = "raise",
        depth: int = 0,
        taken: int = 0,
        any_role: bool = False,
    ) -> None:
        self.messages = messages_to_send(message, any_role=any_role)
        if when_busy not in ("raise", STEER, QUEUE):
            raise InvalidData("$.when_busy", f"expected 'raise', 'steer' or 'queue', got {when_busy!r}")
        if key is not None and not 1 <= len(expect_text(key, "$.key")) <= 500:
            raise InvalidData("$.key", "a key is a text of 1 to 500 characters")
        if key is not None and when_busy == STEER:
            problem = "a message that steers another run has no result of its own; use when_busy='queue'"
            raise InvalidData("$.key", problem)
        self._loops = require_loops(loops)
        self._when_busy = when_busy
        self._depth = depth
        self._taken = taken
        self._key = None if key is None else Key(key, self._digest())
        self.was_left = False
        """Whether the messages were left with a run that is under way: what the session says is no answer to them."""

    def _digest(self) -> str:
        said = [[message.role, message.parts] for message in self.messages]
        return hashlib.sha256(codec.encode(said)).hexdigest()

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        if self._key is not None and await self._is_answered(self._key, session, context):
            return session
        if session.status is not SessionStatus.ACTIVE:
            raise SessionNotActive(session.id, session.status.value, pending_in(session))
        options = RunOptions(inputs=self.messages, key=self._key, depth=self._depth, taken=self._taken)
        state = session.state.with_messages(*self.messages)
        spawn = Spawner(session, context) if context is not None else None
        try:
            after = await run_agent(session, state, self._loops, context, options, spawn)
        except (ClaimLost, RunInterrupted):
            raise
        except (SessionBusy, SessionConflict) as error:  # it is being run, or has been since it was loaded
            if self._when_busy == "raise" or context is None or error.session_id != session.id:  # or a child is
                raise
            await self._post(session, context)
            return session
        send_leftovers_after(context, self._loops, self._depth)
        return after

    async def _is_answered(self, key: Key, session: AgentSession, context: ActionContext | None) -> bool:
        found = await require_journal(context, "An idempotency key").find_key(session.id, key.name)
        if found is None:
            return False
        first, version = found
        if first.digest != key.digest:
            problem = f"the key {key.name!r} was used for another message; a new request needs a new key"
            raise InvalidData("$.key", problem)
        assert context is not None
        context.answer = await context.store.load(session.id, version)
        if context.answer is None:
            raise SessionNotFound(session.id, version)
        return True

    async def _post(self, session: AgentSession, context: ActionContext) -> None:
        """Leave the messages with the run; or, should it have ended meanwhile, see to it that they are sent."""
        journal = require_journal(context, "when_busy")
        plain = [message.to_dict() for message in self.messages]
        key = None if self._key is None else self._key.name
        await journal.post(session.id, Entry(self._when_busy, {"messages": plain, "key": key}))
        context.answer = session
        if not await journal.is_claimed(session.id):
            await _Leftovers(context, journal, self._loops, self._depth).send(session)
            context.answer = await context.store.load(session.id) or session
        first = self.messages[0].id
        self.was_left = all(message.id != first for message in reversed(context.answer.state.transcript))


def send_leftovers_after(context: ActionContext | None, loops: LoopFactory, depth: int = 0) -> None:
    """Once a run is saved, send what was posted while it went on and could not be delivered to it."""
    if context is not None and context.journal is not None:
        context.after_saved = _Leftovers(context, context.journal, loops, depth).send


class _Leftovers:
    """Messages that were posted for a run that has ended: each is sent in its turn."""

    def __init__(self, context: ActionContext, journal: Journal, loops: LoopFactory, depth: int) -> None:
        self._context = context
        self._journal = journal
        self._action = SendPosted(loops, depth=depth)

    async def send(self, session: AgentSession) -> None:
        while await _first_posted(self._journal, session.id) is not None:
            try:
                await self._context.execute(session.id, self._action)
            except SessionConflict:
                continue  # somebody has changed it since it was loaded
            except (SessionBusy, SessionNotActive):
                return  # whoever runs it now, or resumes it, sends the rest


class SendPosted:
    """Send the first message that waits in a session's inbox; nothing happens if none does.

    It is looked up once the session is loaded, and the claim compares the version: two who try send it once.
    """

    runs_model = True

    def __init__(self, loops: LoopFactory, *, depth: int = 0) -> None:
        self._loops = loops
        self._depth = depth

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        journal = require_journal(context, "SendPosted")
        assert context is not None
        entry = await _first_posted(journal, session.id)
        if entry is None:
            context.answer = session
            return session
        if was_delivered(entry, session.state):
            await take(journal, session, entry.seq)
            context.answer = session
            return session
        key = entry.body.get("key")
        said = messages_in(entry)  # checked when they were posted
        action = SendMessage(said, self._loops, key=key, depth=self._depth, taken=entry.seq, any_role=True)
        try:
            after = await action.execute_on(session, context)
        except InvalidData as error:
            if error.path != "$.key":
                raise
            # It can never be sent; left in the inbox, it would be tried, and raised to others, after every run.
            _log.warning("a message that was posted to session %s is refused: %s", session.id, error)
            await refuse(session, context, journal, entry, error.problem)
            context.answer = session
            return session
        if context.answer is not None:  # by its key: it has been sent before
            await take(journal, session, entry.seq)
        context.after_saved = None
        return after


async def _first_posted(journal: Journal, session_id: str) -> JournalEntry | None:
    waiting = await journal.read(session_id, inbox=True)
    return next((entry for entry in waiting if entry.kind in (QUEUE, STEER)), None)
