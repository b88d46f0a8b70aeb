"""Verbs that show less of a transcript, and all of it again. What is covered stays where it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from perdure.actions.given import require_loops
from perdure.actions.running import LEASE, owner_here
from perdure.actions.transcript import open_calls
from perdure.errors import ConfigurationError, InvalidData, PerdureError, StoreError
from perdure.loop.compaction_options import CompactionOptions
from perdure.loop.compactor import Compacted, Compactor, overlaid
from perdure.loop.factory import LoopFactory
from perdure.loop.narrator import snapshot
from perdure.model.definition import ModelConfig
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import new_id
from perdure.model.loop_events import AgentEnd, AgentStart, Compaction, ContinuationKind
from perdure.model.session import AgentSession
from perdure.model.transcript import Block, Piece, Span, Tape, Transcript
from perdure.model.usage import Usage
from perdure.model.value import ErrorRecord
from perdure.protocols import ActionContext, Journal
from perdure.recording import JournalRecord, see_through


class CompactTranscript:
    """Show less of what was said, by the options of `CompactionOptions`; nothing happens where there is nothing to do.

    A summary is written by the session's own model, or by `model`; both are reached through `loops`.
    """

    def __init__(
        self, *, loops: LoopFactory | None = None, model: ModelConfig | str | None = None, **options: Any
    ) -> None:
        self.options = CompactionOptions.of(options)
        self._loops = None if loops is None else require_loops(loops)
        self._summary_model = None if model is None else ModelConfig.of(model)
        self.runs_model = self.options.calls_model(has_model=loops is not None)
        if loops is None and self.options.calls_model(has_model=False):
            raise ConfigurationError(
                "The strategy 'llm' needs a model to write the summary: pass CompactTranscript(loops=LoopFactory(…)), "
                "or a compress_callback that writes it."
            )

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        state = session.state
        async with _claimed(session, context) as record:
            compactor = self._compactor(session)
            try:
                made = await compactor.compact(state.transcript, open_calls=open_calls(state))
            except BaseException as error:
                await self._charge(session, record, compactor.spent, error)
                raise
            if made is None:
                await _leave_as_it_is(session, context, record)
                return session
            after = session.with_state(state.with_transcript(overlaid(state.transcript, made)))
            if record is not None and context is not None:
                self._put_on_record(session, record, made)
                context.saving = record.saving()
            return after

    def _compactor(self, session: AgentSession) -> Compactor:
        if self._loops is None:
            return Compactor(self.options)
        model = self._loops.model_of(session.definition, session.state)
        return self._loops.compactor_of(self.options, model, summary_model=self._summary_model)

    def _put_on_record(self, session: AgentSession, record: JournalRecord, made: Compacted) -> None:
        """A loop of its own: it has a cost, and no step. Its events are written with the save, or not at all."""
        start = self._start(session, has_model=made.block.model is not None, base_version=session.version)
        common = _ids_of(start)
        record.put(start)
        record.put(Compaction(**common, seq=2, block=made.block, shown=made.shown, usage=made.usage))
        record.put(AgentEnd(**common, seq=3, status=ExecutionStatus.COMPLETED, usage=made.usage))

    async def _charge(
        self, session: AgentSession, record: JournalRecord | None, spent: Usage, error: BaseException
    ) -> None:
        """Put on record what was spent for nothing. The session stays as it is, so there is nothing to be resumed."""
        if record is None or spent == Usage():
            return
        start = self._start(session, has_model=True, base_version=None)
        cancelled = isinstance(error, asyncio.CancelledError)
        status = ExecutionStatus.STOPPED if cancelled else ExecutionStatus.FAILED
        errors = () if cancelled else (ErrorRecord.of(error),)
        record.put(start)
        record.put(AgentEnd(**_ids_of(start), seq=2, status=status, usage=spent, errors=errors))
        with contextlib.suppress(PerdureError):  # what the caller is to hear of is why the compaction failed
            await record.barrier()

    def _start(self, session: AgentSession, *, has_model: bool, base_version: int | None) -> AgentStart:
        execution, config = session.state.execution, None
        if has_model and self._loops is not None:
            config = snapshot(self._summary_model or self._loops.model_of(session.definition, session.state))
        return AgentStart(
            loop_id=new_id(),
            session_id=session.id,
            agent_id=session.state.agent_id,
            seq=1,
            parent_loop_id=execution.execution_id if execution else None,
            continuation=ContinuationKind("compaction"),
            config=config,
            base_version=base_version,
        )


def _ids_of(start: AgentStart) -> dict[str, Any]:
    return {"loop_id": start.loop_id, "session_id": start.session_id, "agent_id": start.agent_id}


class UncompactTranscript:
    """Take a compaction block off, the newest of the view unless one is named: what it covers is shown again."""

    def __init__(self, block_id: str | None = None) -> None:
        if block_id is not None and not isinstance(block_id, str):
            raise InvalidData("$.block_id", f"expected the id of a block, got {type(block_id).__name__}")
        self.block_id = block_id

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> AgentSession:
        view = session.state.transcript
        block_id = self.block_id or _newest(view)
        if block_id is None:
            raise InvalidData("$.block_id", "this transcript has no compaction block on it; there is nothing to undo")
        shown = view.uncover(block_id)
        if context is not None and context.journal is not None:
            shown = await _read_in(shown, context.journal)
        return session.with_state(session.state.with_transcript(shown))


def _newest(view: Transcript) -> str | None:
    blocks = [piece for piece in view.pieces if isinstance(piece, Block)]
    newest = max(enumerate(blocks), key=lambda each: (each[1].at is not None, each[1].at, each[0]), default=None)
    return None if newest is None else newest[1].id


async def _read_in(view: Transcript, journal: Journal) -> Transcript:
    """A view whose every message is at hand: a load leaves in the store what blocks cover."""
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


@asynccontextmanager
async def _claimed(session: AgentSession, context: ActionContext | None) -> AsyncIterator[JournalRecord | None]:
    """Hold a session while a compaction goes on, so that no run starts on it meanwhile; given back if that fails."""
    if context is None or context.journal is None:
        yield None
        return
    record = JournalRecord(context.journal, session, owner=owner_here(), lease=LEASE)
    try:
        await record.barrier()
        async with _beating(record):
            yield record
    except BaseException:  # a cancellation may come at any point, behind the compaction too
        await see_through(_release(record, context.journal))
        raise


@asynccontextmanager
async def _beating(record: JournalRecord) -> AsyncIterator[None]:
    beating = asyncio.ensure_future(_beat(record))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beat(record: JournalRecord) -> None:
    while True:
        await asyncio.sleep(record.lease / 3)
        await record.beat()


async def _release(record: JournalRecord, journal: Journal) -> None:
    if record.claim is not None:
        with contextlib.suppress(StoreError):
            await journal.release(record.claim)


async def _leave_as_it_is(session: AgentSession, context: ActionContext | None, record: JournalRecord | None) -> None:
    """Nothing to be saved: the version does not move."""
    if context is not None:
        context.answer = session
        if record is not None and context.journal is not None:
            await _release(record, context.journal)
