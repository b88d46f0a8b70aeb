"""Remove a run from the view, and leave everything that others have said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from perdure.actions.run import require_journal
from perdure.actions.transcript import at_version
from perdure.actions.waiting import end_waiting
from perdure.errors import VersionForgotten
from perdure.loop.compaction.draft import MARK
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Piece, Span, Transcript
from perdure.protocols import ActionContext, ActionResult, Answer, JournalEntry, Kept

IsOwn = Callable[[Message], bool]


@dataclass(frozen=True, slots=True)
class TakeBackRun:
    """An action that shows a session as if one run had not been. The run began from version `before`, ended in `after`.

    If the view is still as the run left it, the view of `before` is shown again. If others have spoken since, the run's
    own messages are removed from between theirs, except for those that a compaction has covered. If nothing is left to
    remove, nothing happens, and no version is made.
    """

    may_be_repeated: ClassVar[bool] = True

    loop_id: str
    before: int
    after: int

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult:
        shown = await _without_run(session, self.loop_id, context, (self.before, self.after))
        if shown is session:
            return Answer(session)
        ran_last = shown.state.execution is not session.state.execution
        return await end_waiting(session, shown, context, "the run was taken back") if ran_last else shown


async def without_run(session: AgentSession, loop_id: str, context: Kept | None) -> AgentSession:
    """Return a session without what one of its runs was asked and has said, so that the run can begin again.

    Nothing is saved. The same version gives the same session, so that a recovery begins where the killed run did.
    """
    journal = require_journal(context, "A run that is begun again")
    runs = await journal.runs(session.id, run=loop_id)
    start: Mapping[str, Any] = runs[0].first.body if runs and runs[0].first.kind == "agent_start" else {}
    before = start.get("base_version")
    # Its save made the next version. A run that replaced another one did not begin with the view before it.
    versions = (before, before + 1) if before is not None and start.get("takes_back") is None else None
    return await _without_run(session, loop_id, context, versions)


async def _without_run(
    session: AgentSession, loop_id: str, context: Kept | None, versions: tuple[int, int] | None
) -> AgentSession:
    """Return a session without a run that led from one version's view to another's. Without these, its words are cut.

    A trim, compaction or reset since the run stays in effect.
    """
    is_own = _words(loop_id, await require_journal(context, "TakeBackRun").read(session.id, run=loop_id))
    view = Transcript(_without(session.state.transcript, is_own))
    if versions is not None:
        with suppress(VersionForgotten):  # then only its own messages are removed
            began, left = [(await at_version(session, each, context)).state.transcript for each in versions]
            if session.state.transcript == left and not _has_others_words(began, left, is_own):
                view = began
    if view == session.state.transcript:
        return session
    ran_last = session.state.execution is not None and session.state.execution.execution_id == loop_id
    state = session.state.for_next_execution() if ran_last else session.state
    return session.with_state(state.with_transcript(view))


def _words(loop_id: str, entries: Sequence[JournalEntry]) -> IsOwn:
    """Return a test for a run's own messages: what it was asked, what filters warned of, what it answered.

    Others may have steered the run, or spoken while it waited for a person: their messages are not its own.
    """
    asked = _told(takewhile(lambda entry: entry.kind != "turn_start", entries))
    told = _told(entries)

    def is_own(message: Message) -> bool:
        if message.metadata.get("execution_id") == loop_id or message.id in asked:
            return True
        return message.role == "system" and message.id in told

    return is_own


def _told(entries: Iterable[JournalEntry]) -> set[str]:
    return {entry.body["message"]["id"] for entry in entries if entry.kind == "message_end"}


def _has_others_words(before: Transcript, after: Transcript, is_own: IsOwn) -> bool:
    known = {message.id for message in before}
    new = (message for message in after if message.id not in known and MARK not in message.metadata)
    return not all(map(is_own, new))


def _without(view: Transcript, is_own: IsOwn) -> Iterator[Piece]:
    """Yield the pieces of a view without a run's own messages. Blocks stay whole."""
    for piece in view.pieces:
        if not isinstance(piece, Span):
            yield piece
            continue
        start = 0
        for place, message in enumerate(piece.messages()):
            if is_own(message):
                yield piece.cut(start, place)
                start = place + 1
        yield piece.cut(start, len(piece))
