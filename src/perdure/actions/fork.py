"""Branch a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from perdure.actions.run import require_journal
from perdure.actions.transcript import at_version, place_of
from perdure.actions.undo_run import without_run
from perdure.errors import InvalidData
from perdure.loop.replay import Replay
from perdure.model.checks import expect_count
from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart
from perdure.model.message import Message
from perdure.model.record import LoopRecord
from perdure.model.session import AgentSession
from perdure.model.state import AgentState
from perdure.model.transcript import Piece, Span, Tape, Transcript
from perdure.protocols import ActionContext, Journal, StoredAt
from perdure.runtime.record_reader import read_loop


@dataclass(frozen=True, slots=True)
class ForkSession:
    """An action that makes a new session, of version 0, which begins where this one is now.

    Keep it with `await runtime.branch(session_id, ForkSession())`, or without any stage by `await store.create(fork)`.
    `at` is the number of messages it begins with, or the id of the last of them. By default it begins with all.
    `loop` is the id of one of this session's loops. The fork begins where that loop ended, even if it is a branch that
    was not selected. Nothing is copied: the fork's transcript points into this session's logs.
    """

    at: int | str | None = None
    dst: str | None = None
    """The id of the new session. Without one it gets a UUIDv7."""
    loop: str | None = None

    def __post_init__(self) -> None:
        if self.loop is not None and not isinstance(self.loop, str):
            raise InvalidData("$.loop", f"expected the id of a loop, got {type(self.loop).__name__}")
        if self.loop is not None and self.at is not None:
            raise InvalidData("$.at", "a fork begins at a message or at the end of a loop; give at= or loop=, not both")
        if self.dst is not None:
            SessionId(self.dst)
        if self.at is not None and not isinstance(self.at, str):
            expect_count(self.at, "$.at")

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        state = session.state if self.loop is None else await _after_loop(session, self.loop, context)
        transcript = state.transcript
        if self.at is not None:
            transcript = transcript.cut(0, place_of(transcript, self.at, "$.at"))
        state = state.for_next_execution().with_transcript(transcript)
        return session.forked(
            SessionId.generate(session.info.owner) if self.dst is None else SessionId(self.dst), state
        )


async def _after_loop(session: AgentSession, loop_id: str, context: ActionContext | None) -> AgentState:
    """Return the state that a loop began with, with the transcript as it was at the loop's end."""
    journal = require_journal(context, "A fork of a loop")
    loop = await read_loop(journal, session.id, loop_id)
    start = next((event for event in loop.events if isinstance(event, AgentStart)), None)
    if start is None or start.base_version is None or not loop.status.is_over:
        problem = f"loop {loop_id!r} is {loop.status.value}; fork one that began from a version and has ended"
        raise InvalidData("$.loop", problem)
    found = await at_version(session, start.base_version, context)
    if start.takes_back is not None:
        found = await without_run(found, start.takes_back, context)
    began = found.state
    shown = Replay(began).apply_all(loop.events).state.transcript
    written = await _places(journal, session, loop, start)
    return began.with_transcript(Transcript(_linked(shown.pieces, written)))


async def _places(
    journal: Journal, session: AgentSession, loop: LoopRecord, start: AgentStart
) -> Mapping[str, StoredAt]:
    """Return the positions of a loop's messages in the session's logs."""
    (run,) = await journal.runs(session.id, run=loop.loop_id)
    own, _ = await journal.log_of(session.id)
    stretches = [(run.log, run.start, run.stop)]
    # A branch of a parallel evaluation writes to its own log; the message that it answers is in the session's log.
    if start.input_at is not None:
        stretches.append((own, *start.input_at))
    return {
        message.id: StoredAt(log, place)
        for log, begin, stop in stretches
        for place, message in enumerate(await journal.messages(log, begin, stop) if begin < stop else (), begin)
    }


def _linked(pieces: Iterable[Piece], written: Mapping[str, StoredAt]) -> Iterator[Piece]:
    """Yield the pieces, with messages that a log holds named by their position there."""
    for piece in pieces:
        if not isinstance(piece, Span):
            covered, shown = tuple(_linked(piece.covered, written)), tuple(_linked(piece.shown, written))
            yield replace(piece, covered=covered, shown=shown)
        elif piece.tape.ref is not None:
            yield piece
        else:
            for message in piece.messages():
                yield _span_of(message, written.get(message.id))


def _span_of(message: Message, at: StoredAt | None) -> Span:
    if at is None:
        return Span(Tape([message]), 0, 1)
    return Span(Tape([message], at.log, at.position), at.position, at.position + 1)
