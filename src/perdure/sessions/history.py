"""All that was said in a session, whatever its view shows of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import itemgetter

from perdure.loop.compaction_draft import MARK
from perdure.loop.compaction_options import STRATEGIES
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Span, every_span
from perdure.protocols import Journal, RunOnRecord

AtVersion = Callable[[int], Awaitable[AgentSession]]
Insertion = tuple[int, Sequence[Message]]
"""Messages of another log, and after how many of the session's own they belong."""


async def all_said(journal: Journal | None, session: AgentSession, at_version: AtVersion) -> list[Message]:
    """What a session began with, then its own log; with what was selected or adopted where it came to show that.

    What compaction has put in place of messages was not said by anybody, and is left out.
    """
    viewed = await _named_by(journal, session)
    if journal is None:
        adopted = await _adoptions(None, session, at_version)
        return _said_once([*(message for _, messages in adopted for message in messages), *viewed])
    return _said_once(_merged(await _logged(journal, session, at_version), viewed))


async def _logged(journal: Journal, session: AgentSession, at_version: AtVersion) -> list[Message]:
    own, end = await journal.log_of(session.id)
    said = await _named_by(journal, await at_version(1), without=own)
    # At one place the branches come first: what they answer stands in the log, behind what was adopted before it.
    elsewhere = [*await _branches(journal, session, own), *await _adoptions(journal, session, at_version, own)]
    done = 0
    for after, messages in sorted(elsewhere, key=itemgetter(0)):
        said += await journal.messages(own, done, after) if done < after else ()
        said += messages
        done = max(done, after)
    said += await journal.messages(own, done, end) if done < end else ()
    return said


async def _adoptions(
    journal: Journal | None, session: AgentSession, at_version: AtVersion, own: LogRef | None = None
) -> list[Insertion]:
    """What the session took over from branches, oldest first: one version is read for each."""
    adopted: list[Insertion] = []
    version = session.state.adopted.version if session.state.adopted else 0
    while 0 < version <= session.version:
        then = await at_version(version)
        adoption = then.state.adopted
        if adoption is None or adoption.version != version:
            break  # a release that did not know of adoptions has copied this from another session
        adopted.append((adoption.at, await _named_by(journal, then, without=own)))
        version = adoption.before if adoption.before < version else 0
    return adopted[::-1]


async def _named_by(journal: Journal | None, session: AgentSession, without: LogRef | None = None) -> list[Message]:
    """All that a version shows or covers, but for what stands in one log."""
    spans = every_span(session.state.transcript.pieces)
    named = (span for span in spans if without is None or span.tape.ref != without)
    return [message for span in named for message in await _read(journal, span)]


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


async def _branches(journal: Journal, session: AgentSession, own: LogRef) -> list[Insertion]:
    """The answers of selected branches, and where in the session's log each belongs."""
    runs = [run for run in await journal.runs(session.id) if run.log != own and run.start < run.stop]
    if not runs:
        return []
    selected = {
        entry.body["selected_loop_id"]
        for entry in await journal.read(session.id, after=runs[0].first.seq)
        if entry.kind == "parallel_loop_end"
    }
    chosen = [run for run in runs if run.loop_id in selected]
    return [(_place(run), await journal.messages(run.log, run.start, run.stop)) for run in chosen]


def _place(run: RunOnRecord) -> int:
    """The position behind what the branches of a group answer."""
    place: Sequence[int] = run.first.body.get("input_at") or (0, 0)
    return place[1]


def _said_once(messages: Iterable[Message]) -> list[Message]:
    """Without what compactions have made, and without the second of two: a block may show what it also covers."""
    once = {message.id: message for message in messages}
    return [message for message in once.values() if message.metadata.get(MARK) not in STRATEGIES]
