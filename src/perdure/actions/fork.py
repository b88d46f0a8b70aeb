"""Branch a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.actions.transcript import place_of
from perdure.model.checks import expect_count
from perdure.model.ids import SessionId
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext


@dataclass(frozen=True, slots=True)
class ForkSession:
    """A new session, of version 0, that begins where this one stands: keep it with `await store.create(fork)`.

    `at` is how many messages it begins with, or the id of the last of them; all of them by default. Nothing is
    copied: the fork's transcript points into this session's log.
    """

    at: int | str | None = None
    dst: str | None = None

    def __post_init__(self) -> None:
        if self.dst is not None:
            SessionId(self.dst)
        if self.at is not None and not isinstance(self.at, str):
            expect_count(self.at, "$.at")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        transcript = session.state.transcript
        if self.at is not None:
            transcript = transcript.cut(0, place_of(transcript, self.at, "$.at"))
        state = session.state.for_next_execution().with_transcript(transcript)
        return session.forked(SessionId.generate() if self.dst is None else SessionId(self.dst), state)
