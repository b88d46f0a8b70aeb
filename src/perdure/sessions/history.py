"""All that was said in a session, whatever its view shows of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.loop.compaction_draft import MARK
from perdure.loop.compaction_options import STRATEGIES
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Span, every_span
from perdure.protocols import Journal, RunOnRecord


async def all_said(journal: Journal | None, first: AgentSession, session: AgentSession) -> list[Message]:
    """What a session has taken over from its parent, then its own log; with what was selected or adopted in its place.

    `first` is its version 1. What compaction has put in place of messages was not said by anybody, and is left out.
    """
    viewed = [message for span in every_span(session.state.transcript.pieces) for message in await _read(journal, span)]
    if journal is None:
        return _said_once(viewed)
    return _said_once(_merged(await _logged(journal, first, session), viewed))


async def _logged(journal: Journal, first: AgentSession, session: AgentSession) -> list[Message]:
    own, end = await journal.log_of(session.id)
    said: list[Message] = []
    for span in every_span(first.state.transcript.pieces):
        if span.tape.ref != own:
            said += await _read(journal, span)
    done = 0
    for after, log, start, stop in await _branches(journal, session, own):
        said += await journal.messages(own, done, after) if done < after else ()
        said += await journal.messages(log, start, stop)
        done = max(done, after)
    said += await journal.messages(own, done, end) if done < end else ()
    return said


def _merged(said: list[Message], viewed: Iterable[Message]) -> list[Message]:
    """Both, each message once: what is only in the view stands behind what it follows there."""
    known = {message.id for message in said}
    behind: dict[str | None, list[Message]] = {}
    last: str | None = None
    for message in viewed:
        if message.id in known:
            last = message.id
        else:
            known.add(message.id)
            behind.setdefault(last, []).append(message)
    merged = behind.get(None, [])
    for message in said:
        merged += (message, *behind.get(message.id, ()))
    return merged


async def _read(journal: Journal | None, span: Span) -> Sequence[Message]:
    if span.tape.items is not None or span.tape.ref is None or journal is None:
        return span.messages()
    return await journal.messages(span.tape.ref, span.start, span.stop)


async def _branches(journal: Journal, session: AgentSession, own: LogRef) -> list[tuple[int, LogRef, int, int]]:
    """Where in the session's log the answer of a selected branch belongs, and the stretch that holds it."""
    runs = [run for run in await journal.runs(session.id) if run.log != own and run.start < run.stop]
    if not runs:
        return []
    selected = {
        entry.body["selected_loop_id"]
        for entry in await journal.read(session.id, after=runs[0].first.seq)
        if entry.kind == "parallel_loop_end"
    }
    return [(_place(run), run.log, run.start, run.stop) for run in runs if run.loop_id in selected]


def _place(run: RunOnRecord) -> int:
    """The position behind what the branches of a group answer."""
    place: Sequence[int] = run.first.body.get("input_at") or (0, 0)
    return place[1]


def _said_once(messages: Iterable[Message]) -> list[Message]:
    """Without what compactions have made, and without the second of two: a block may show what it also covers."""
    once = {message.id: message for message in messages}
    return [message for message in once.values() if message.metadata.get(MARK) not in STRATEGIES]
