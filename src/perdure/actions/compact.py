"""Actions that show less of a transcript, or all of it again. Covered messages stay in the log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from perdure.actions.claimed_work import ClaimedWork
from perdure.actions.continuing import parent_of
from perdure.actions.given import require_loops
from perdure.actions.send import waiting_messages
from perdure.actions.transcript import open_calls
from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.loop.compaction.compactor import Compacted, Compactor, overlaid
from perdure.loop.compaction.options import CompactionOptions
from perdure.loop.factory import LoopFactory
from perdure.loop.run_events import snapshot
from perdure.model.definition import ModelConfig
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import new_id
from perdure.model.loop_events import AgentEnd, AgentStart, AnyLoopEvent, Compaction, ContinuationKind, LoopEvent
from perdure.model.session import AgentSession
from perdure.model.transcript import Block, Piece, Span, Tape, Transcript
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord
from perdure.protocols import ActionContext, ActionResult, Answer, Journal
from perdure.run_journal import JournalRecord


class CompactTranscript:
    """An action that shows less of what was said, by the options of `CompactionOptions`.

    If there is nothing to compact, nothing happens. A summary is written by the session's own model, or by `model`.
    Both are reached through `loops`. The other `options` are the fields of `CompactionOptions`.
    """

    def __init__(
        self, *, loops: LoopFactory | None = None, model: ModelConfig | str | None = None, **options: Any
    ) -> None:
        self.options = CompactionOptions.of(options)
        self._loops = None if loops is None else require_loops(loops)
        self._summary_model = None if model is None else ModelConfig.of(model)
        self.may_be_repeated = not self.options.calls_model(has_model=loops is not None)
        if loops is None and self.options.calls_model(has_model=False):
            raise ConfigurationError(
                "The strategy 'llm' needs a model to write the summary: pass CompactTranscript(loops=LoopFactory(…)), "
                "or a compress_callback that writes it."
            )

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        then = None if self._loops is None else waiting_messages(context, session.id, self._loops)
        work = ClaimedWork(session, context, then=then)
        await work.open_inbox()
        if work.record is not None:
            # The claim comes first: while a summary is written, no run may start on the session.
            await work.record.barrier()
        parent = await parent_of(session, context)
        made = await self._carried_out(session, parent, context, work)
        if made is None:
            return session if context is None else Answer(session)
        story = self._story(session, parent, made)
        if work.record is not None:
            for event in story:
                work.record.put(event)
        return work.next(_overlaid(session, made), tells=story)

    async def _carried_out(
        self, session: AgentSession, parent: str | None, context: ActionContext | None, work: ClaimedWork
    ) -> Compacted | None:
        """Compact while the session is claimed, so that no run starts on it. If it is cancelled, nothing changes."""
        compactor = self._compactor(session)
        made: list[Compacted | None] = []

        async def compact() -> None:
            made.append(await self._made(session, compactor))

        try:
            await work.carry_out(compact())
        except BaseException as error:
            await self._charge(session, parent, context, work.record, compactor.spent, error)
            raise
        if not made:
            await self._charge(session, parent, context, work.record, compactor.spent, asyncio.CancelledError())
        return made[0] if made else None

    async def _made(self, session: AgentSession, compactor: Compactor) -> Compacted | None:
        return await compactor.compact(session.state.transcript, open_calls=open_calls(session.state))

    def _compactor(self, session: AgentSession) -> Compactor:
        """Return the compactor. Without a model it cannot have a summary written, which only 'llm' needs."""
        if self._loops is None:
            return Compactor(self.options)
        model = self._loops.named_model(session.definition, session.state) or self._summary_model
        if model is None and not self.options.calls_model(has_model=False):
            return Compactor(self.options)
        model = model or self._loops.model_of(session.definition, session.state)  # which raises
        return self._loops.compactor_of(self.options, model, summary_model=self._summary_model)

    def _story(self, session: AgentSession, parent: str | None, made: Compacted) -> list[AnyLoopEvent]:
        """Return the events of the compaction's own loop, which has a cost and no step.

        They are written with the save, or not at all.
        """
        start = self._start(session, parent, has_model=made.block.model is not None, base_version=session.version)
        common = _ids_of(start)
        return [
            start,
            Compaction(**common, seq=2, block=made.block, shown=made.shown, usage=made.usage),
            AgentEnd(**common, seq=3, status=ExecutionStatus.COMPLETED, usage=made.usage, compactions=1),
        ]

    async def _charge(
        self,
        session: AgentSession,
        parent: str | None,
        context: ActionContext | None,
        record: JournalRecord | None,
        spent: Usage,
        error: BaseException,
    ) -> None:
        """Put on record what a failed compaction has spent. The session stays as it is."""
        if record is None or context is None or spent == Usage():
            return
        # Without a base version, recovery does not try to continue this loop.
        start = self._start(session, parent, has_model=True, base_version=None)
        cancelled = isinstance(error, asyncio.CancelledError)
        status = ExecutionStatus.STOPPED if cancelled else ExecutionStatus.FAILED
        errors = () if cancelled else (ErrorRecord.of(error),)
        story = [start, AgentEnd(**_ids_of(start), seq=2, status=status, usage=spent, errors=errors)]
        for event in story:
            record.put(event)
        with contextlib.suppress(PerdureError):  # the caller needs the reason why the compaction failed, not this error
            await record.barrier()
            await _tell(context, story)

    def _start(
        self, session: AgentSession, parent: str | None, *, has_model: bool, base_version: int | None
    ) -> AgentStart:
        config = None
        if has_model and self._loops is not None:
            config = snapshot(self._summary_model or self._loops.model_of(session.definition, session.state))
        return AgentStart(
            loop_id=new_id(),
            session_id=session.id,
            agent_id=session.state.agent_id,
            seq=1,
            parent_loop_id=parent,
            continuation=ContinuationKind("compaction"),
            config=config,
            base_version=base_version,
        )


async def _tell(context: ActionContext, story: Iterable[LoopEvent]) -> None:
    """Emit the events, once they are on record."""
    for event in story:
        await context.emit(event)


def _ids_of(start: AgentStart) -> dict[str, Any]:
    return {"loop_id": start.loop_id, "session_id": start.session_id, "agent_id": start.agent_id}


class UncompactTranscript:
    """An action that takes a compaction block off. What it covers is shown again.

    It is the view's newest block, or the one with a `block_id`.
    """

    may_be_repeated = True

    def __init__(self, block_id: str | None = None) -> None:
        if block_id is not None and not isinstance(block_id, str):
            raise InvalidData("$.block_id", f"expected the id of a block, got {type(block_id).__name__}")
        self.block_id = block_id

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        view = session.state.transcript
        block_id = self.block_id or _newest(view)
        if block_id is None:
            raise InvalidData("$.block_id", "this session has no compaction block, so there is nothing to show again")
        shown = view.uncover(block_id)
        if context is not None and context.journal is not None:
            shown = await _read_in(shown, context.journal)
        return session.with_state(session.state.with_transcript(shown))


def _newest(view: Transcript) -> str | None:
    blocks = [piece for piece in view.pieces if isinstance(piece, Block)]
    # A block without a time counts as older than any that has one: None and a time cannot be compared.
    newest = max(enumerate(blocks), key=lambda each: (each[1].at is not None, each[1].at, each[0]), default=None)
    return None if newest is None else newest[1].id


async def _read_in(view: Transcript, journal: Journal) -> Transcript:
    """Return a view with all its messages in memory: a load leaves what blocks cover in the store."""
    pieces: list[Piece] = []
    for piece in view.pieces:
        if isinstance(piece, Span):
            pieces.append(await _read_span(piece, journal))
        else:
            pieces.append(replace(piece, shown=tuple([await _read_span(span, journal) for span in piece.shown])))
    return Transcript(pieces)


async def _read_span(span: Span, journal: Journal) -> Span:
    if span.tape.items is not None or span.tape.ref is None:
        return span
    messages = await journal.messages(span.tape.ref, span.start, span.stop)
    return Span(Tape(list(messages), span.tape.ref, span.start), span.start, span.stop)


def _overlaid(session: AgentSession, made: Compacted) -> AgentSession:
    state = session.state.with_transcript(overlaid(session.state.transcript, made))
    return session.with_state(state.with_spent(made.usage))
