"""Send messages to an agent and run it to its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from perdure import codec
from perdure.actions.running import QUEUE, STEER, RunOptions, messages_in, require_journal, run_agent
from perdure.actions.spawning import Spawner
from perdure.errors import ClaimLost, InvalidData, SessionBusy, SessionNotActive, SessionNotFound
from perdure.loop.factory import LoopFactory
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionStatus
from perdure.protocols import ActionContext, Entry, JournalEntry, Key

WhenBusy = Literal["raise", "steer", "queue"]


class SendMessage:
    """Append what a user says, run the agent, and keep what comes of it.

    `key` makes a repeated request return what the first one came to. `when_busy` says what becomes of a message to a
    session that is being run: an error at once; delivered to the run between two steps; or sent when the run ends.
    """

    def __init__(
        self,
        message: object,
        loops: LoopFactory,
        *,
        key: str | None = None,
        when_busy: WhenBusy = "raise",
        depth: int = 0,
        taken: int = 0,
    ) -> None:
        given = message if isinstance(message, Sequence) and not isinstance(message, str) else (message,)
        self.messages = tuple(map(Message.of, given))
        if not self.messages:
            raise InvalidData("$.message", "there is nothing to send; give at least one message")
        if when_busy not in ("raise", STEER, QUEUE):
            raise InvalidData("$.when_busy", f"expected 'raise', 'steer' or 'queue', got {when_busy!r}")
        if key is not None and (not isinstance(key, str) or not 1 <= len(key) <= 500):
            raise InvalidData("$.key", "a key is a text of 1 to 500 characters")
        self._loops = loops
        self._when_busy = when_busy
        self._depth = depth
        self._taken = taken
        self._key = None if key is None else Key(key, self._digest())

    def _digest(self) -> str:
        said = [[message.role, message.parts] for message in self.messages]
        return hashlib.sha256(codec.encode(said)).hexdigest()

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        if self._key is not None and await self._is_answered(self._key, session, context):
            return session
        if session.status is not SessionStatus.ACTIVE:
            raise SessionNotActive(session.id, session.status.value)
        options = RunOptions(inputs=self.messages, key=self._key, depth=self._depth, taken=self._taken)
        state = session.state.with_messages(*self.messages)
        spawn = Spawner(session, context) if context is not None else None
        try:
            after = await run_agent(session, state, self._loops, context, options, spawn)
        except ClaimLost:
            raise
        except SessionBusy:
            if self._when_busy == "raise" or context is None:
                raise
            await self._post(session, context)
            return session
        if context is not None and context.journal is not None:
            context.after_saved = _Leftovers(context, self._loops).send
        return after

    async def _is_answered(self, key: Key, session: AgentSession, context: ActionContext | None) -> bool:
        found = await require_journal(context, "An idempotency key").find_key(session.id, key.name)
        if found is None:
            return False
        first, version = found
        if first.digest != key.digest:
            raise InvalidData("$.key", f"the key {key.name!r} was used for another message; a new request needs a new key")
        assert context is not None
        context.answer = await context.store.load(session.id, version)
        if context.answer is None:
            raise SessionNotFound(session.id, version)
        return True

    async def _post(self, session: AgentSession, context: ActionContext) -> None:
        """Leave the messages with the run; or, should it have ended meanwhile, see to it that they are sent."""
        journal = require_journal(context, "when_busy")
        plain = [msgspec.to_builtins(message) for message in self.messages]
        await journal.post(session.id, Entry(self._when_busy, {"messages": plain}))
        context.answer = session
        if not await journal.is_claimed(session.id):
            await _Leftovers(context, self._loops).send(session)
            context.answer = await context.store.load(session.id)


class _Leftovers:
    """Messages that were posted for a run that has ended: each is sent in its turn."""

    def __init__(self, context: ActionContext, loops: LoopFactory) -> None:
        self._context = context
        self._loops = loops

    async def send(self, session: AgentSession) -> None:
        while (entry := await self._next(session)) is not None:
            try:
                action = SendMessage(messages_in(entry), self._loops, taken=entry.seq)
                await self._context.execute(session.id, action)
            except (SessionBusy, SessionNotActive):
                return  # whoever runs it now, or resumes it, sends the rest

    async def _next(self, session: AgentSession) -> JournalEntry | None:
        journal = require_journal(self._context, "when_busy")
        waiting = await journal.read(session.id, inbox=True)
        return next((entry for entry in waiting if entry.kind in (QUEUE, STEER)), None)
