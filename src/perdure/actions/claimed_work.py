"""The life cycle of a claim: an action's work on a session that nobody else may run meanwhile.

The first write claims the session, and the inbox is watched while the work lasts. The claim ends with the save of what
`next` returns. In any other case the runtime leaves the claim (`JournalRecord.leave`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext
from typing import Any

from perdure.actions.inbox import Inbox, RunInbox
from perdure.aio import finished
from perdure.errors import RunInterrupted
from perdure.loop.agent_loop import Run
from perdure.model.session import AgentSession
from perdure.protocols import ActionContext, Key, Next, Sequel
from perdure.run_journal import JournalRecord, owner_here


class ClaimedWork:
    """Work on one session. Without a journal it is neither claimed nor recorded, and `record` is None."""

    def __init__(
        self,
        session: AgentSession,
        context: ActionContext | None,
        *,
        taken: int = 0,
        takes_over: bool = False,
        then: Sequel | None = None,
    ) -> None:
        self._session_id = session.id
        self._context = context
        self.record: JournalRecord | None = None
        self._inbox: RunInbox | None = None
        if context is not None and context.journal is not None:
            self.record = JournalRecord(
                context.journal, session, owner=owner_here(), terms=context.terms, taken=taken, takes_over=takes_over
            )
            context.hold(self.record, then)

    @property
    def can_be_saved(self) -> bool:
        """Return whether the runtime could save something now: nothing is recorded, or the claim is held."""
        return self._context is not None and (self.record is None or self.record.claim is not None)

    async def open_inbox(self, run: Run | None = None, *, answers: str | None = None) -> None:
        """Read the inbox once the session is claimed. Without a run to steer, messages wait until the work ends."""
        if self.record is None or self._context is None or self._context.journal is None:
            return
        self._inbox = RunInbox(run, self.record, Inbox(self._context.journal, self._session_id), answers=answers)
        await self._inbox.open()
        if run is not None:
            run.between_steps = self._inbox.deliver

    async def carry_out(self, steps: Coroutine[Any, Any, None]) -> None:
        """Carry the work out to its end, and watch the inbox and the claim meanwhile.

        A request to cancel that is found there ends the work in good order. Cancelling this call cancels the work, and
        waits for it.
        """
        work = asyncio.ensure_future(steps)
        with self._context.under_way.cancellable(work) if self._context is not None else nullcontext():
            if self._inbox is None:
                await finished(work)
                return
            watch = self._inbox.attend(work)
            try:
                await finished(work)
            finally:
                failure = await watch.end()
                # The store may be closed next: no piece of the answer may still be unwritten then.
                if self.record is not None and self.record.is_sketching:
                    await self.record.end_sketches()
            # The watch cancels the work when the claim is lost. `finished` treats that as a normal end.
            if failure is not None:
                raise failure

    def next(
        self, session: AgentSession, *, key: Key | None = None, tells: Sequence[object] = ()
    ) -> AgentSession | Next:
        """Return the result of the work, for the save that ends the claim."""
        if self._context is None:
            return session
        return Next(session, None if self.record is None else self.record.saving(key), tells)

    def interrupted_by_closing(self) -> RunInterrupted:
        """Explain to the sender why the run has no answer: the runtime was closed before it came."""
        return RunInterrupted(
            self._session_id,
            f"The run of session {self._session_id!r} was interrupted: its connection was closed before it had ended. "
            "What it has done is on record. recover() or the next send() continues it, and cancel() ends it at that "
            "point.",
        )
