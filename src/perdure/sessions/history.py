"""The history of a session: all that was said, whether or not its view shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Protocol

from perdure.aio import aside, in_slices
from perdure.loop.compaction.draft import MARK
from perdure.loop.compaction.options import STRATEGIES
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Span, every_span
from perdure.model.value import EMPTY
from perdure.protocols import FORGOTTEN, Chronicle, Forgets, Journal, RunOnRecord

_PAGE = 4_096


class _Forgetting(Journal, Forgets, Protocol):
    """A journal in which versions may have been forgotten."""


AtVersion = Callable[[int], Awaitable[AgentSession]]
Placed = tuple[tuple[object, int], Message]
"""A message, and its place. Copies of one message share its id, and are told apart by their places."""
Insertion = tuple[int, list[Placed]]
"""Messages of another log, and the number of the session's own messages after which they belong."""


async def all_said(journal: Journal | None, session: AgentSession, at_version: AtVersion) -> list[Message]:
    """Return what a session began with, then its own log. Selected or adopted messages are where they came to be shown.

    The texts that compactions put in place of messages were not said by anybody, so they are left out.
    """
    if journal is None:
        adopted = await _adoptions(None, session, at_version)
        viewed = await _named_by(journal, session)
        return await aside(_said_once, [*(placed for _, messages in adopted for placed in messages), *viewed])
    own, end = await journal.log_of(session.id)
    if session.info.first_version > 1 and isinstance(journal, Forgets):
        return await _said_since(journal, session, await at_version(session.info.first_version), own)
    began = await _named_by(journal, await at_version(1), without=own)
    # At the same place, branches come first: the messages they answer are in the log, after those adopted earlier.
    elsewhere = [*await _branches(journal, session, own), *await _adoptions(journal, session, at_version, own)]
    is_logged = _is_logged(session, own, end)
    if is_logged and not began and not elsewhere:  # most sessions are like this: nothing has to be put together
        pages = _log_of(journal, session, own, end)
        return [message async for page in pages for message in page if _is_said(message)]
    logged = await _logged(journal, began, elsewhere, own, [(0, end)])
    viewed = [] if is_logged else await _named_by(journal, session)
    twins = await _twins(journal, logged, viewed)
    return await aside(lambda: _said_once(_merged(_renamed(logged, twins), _renamed(viewed, twins))))


async def some_said(
    journal: Journal | None, session: AgentSession, at_version: AtVersion, start: int, stop: int
) -> tuple[Sequence[Message], int]:
    """Return what was said from one place to another, and the number of places.

    Most sessions have only their own log, and nothing else is read for them. What compactions have put into that log
    has places too, but is left out.
    """
    end = None if journal is None else await _end_of_plain_log(journal, session, at_version)
    if journal is None or end is None:
        said = await all_said(journal, session, at_version)
        return said[start:stop], len(said)
    own, _ = await journal.log_of(session.id)
    pages = _pages(journal, own, start, min(stop, end))
    return [message async for page in pages for message in page if _is_said(message)], end


async def _end_of_plain_log(journal: Journal, session: AgentSession, at_version: AtVersion) -> int | None:
    """Return the end of a session's log if all that was said is in it, or None."""
    own, end = await journal.log_of(session.id)
    if session.info.first_version > 1 and isinstance(journal, Forgets):
        return None
    if not _is_logged(session, own, end) or await _branches(journal, session, own):
        return None
    has_more = session.state.adopted is not None or await _named_by(journal, await at_version(1), without=own)
    return None if has_more else end


def _is_logged(session: AgentSession, own: LogRef, end: int) -> bool:
    """Tell whether all that a session shows or covers is in its own log."""
    return all(span.tape.ref == own and span.stop <= end for span in every_span(session.state.transcript.pieces))


async def _said_since(journal: _Forgetting, session: AgentSession, oldest: AgentSession, own: LogRef) -> list[Message]:
    """Return what is left of what was said, if older versions were forgotten. It begins with what the oldest shows."""
    kept = await journal.kept_of_log(session.id)
    elsewhere = [*await _branches(journal, session, own), *await _adoptions(journal, session, _unasked, own)]
    logged = await _logged(journal, [], elsewhere, own, kept)
    views = [await _named_by(journal, each) for each in (oldest, session)]
    twins = await _twins(journal, logged, *views)
    # What the oldest version shows of other sessions stays where it showed it.
    logged = await aside(lambda: _merged(_renamed(logged, twins), _renamed(views[0], twins)))
    return await aside(lambda: _said_once(_merged(logged, _renamed(views[1], twins))))


async def _unasked(version: int) -> AgentSession:
    raise AssertionError("a store that forgets tells of adoptions itself")


async def _log_of(journal: Journal, session: AgentSession, own: LogRef, end: int) -> AsyncIterator[Sequence[Message]]:
    """Yield the messages of a session's own log. Those that were loaded with it are not read again."""
    spans = (span for span in every_span(session.state.transcript.pieces) if span.tape.items is not None)
    done = 0
    for span in sorted(spans, key=attrgetter("start")):
        async for page in _pages(journal, own, done, span.start):
            yield page
        async for some in in_slices(span.tape.read(max(done, span.start), max(done, span.stop))):
            yield some
        done = max(done, span.stop)
    async for page in _pages(journal, own, done, end):
        yield page


async def _pages(journal: Journal, log: LogRef, start: int, stop: int) -> AsyncIterator[Sequence[Message]]:
    """Yield messages of a log. Between two pages, other readers of the store and other tasks have their turn."""
    for low in range(start, stop, _PAGE):
        async for some in in_slices(await journal.messages(log, low, min(stop, low + _PAGE))):
            yield some


async def _logged(
    journal: Journal,
    began: list[Placed],
    elsewhere: Iterable[Insertion],
    own: LogRef,
    kept: Sequence[tuple[int, int]],
) -> list[Placed]:
    """Return what was said before, then the kept stretches of the session's log, with what is elsewhere in between."""
    said, done = began, 0
    end = max((stop for _, stop in kept), default=0)
    for after, messages in (*sorted(elsewhere, key=itemgetter(0)), (end, [])):
        for start, stop in kept:
            said += await _stretch(journal, own, max(start, done), min(stop, after))
        said += messages
        done = max(done, after)
    return said


async def _stretch(journal: Journal, log: LogRef, start: int, stop: int) -> list[Placed]:
    placed: list[Placed] = []
    async for page in _pages(journal, log, start, stop):
        placed += [((log, place), message) for place, message in enumerate(page, start + len(placed))]
    return placed


async def _adoptions(
    journal: Journal | None, session: AgentSession, at_version: AtVersion, own: LogRef | None = None
) -> list[Insertion]:
    """Return what the session took over from branches, oldest first.

    If the store cannot tell, one version is loaded for each.
    """
    adopted: list[Insertion] = []
    version = session.state.adopted.version if session.state.adopted else 0
    if isinstance(journal, Chronicle) and 0 < version <= session.version:
        for each in await journal.adoptions(session.id, version):
            elsewhere = (stretch for stretch in each.stretches if stretch[0] != own)
            adopted.append((each.at, [placed for stretch in elsewhere for placed in await _stretch(journal, *stretch)]))
        return adopted
    while 0 < version <= session.version:
        then = await at_version(version)
        adoption = then.state.adopted
        if adoption is None or adoption.version != version:
            break  # an older release, which did not know of adoptions, has copied this from another session
        adopted.append((adoption.at, await _named_by(journal, then, without=own)))
        version = adoption.before if adoption.before < version else 0
    return adopted[::-1]


async def _named_by(journal: Journal | None, session: AgentSession, without: LogRef | None = None) -> list[Placed]:
    """Return all that a version shows or covers, except for what is in the log `without`."""
    spans = [
        span for span in every_span(session.state.transcript.pieces) if without is None or span.tape.ref != without
    ]
    read = [(span, await _read(journal, span)) for span in spans]
    return await aside(_placed, read) if read else []


def _placed(read: Iterable[tuple[Span, Sequence[Message]]]) -> list[Placed]:
    """Return the messages of spans, each with its place. A message that several spans name comes once."""
    placed = {
        (span.tape, place): message for span, messages in read for place, message in enumerate(messages, span.start)
    }
    copies: Counter[str] = Counter()
    named: list[Placed] = []
    for (tape, place), message in placed.items():
        copies[message.id] += 1
        # A store without logs makes new tapes with every load. There, copies are told apart by their number.
        named.append(((message.id, copies[message.id]) if tape.ref is None else (tape.ref, place), message))
    return named


async def _twins(journal: Journal, *placed: list[Placed]) -> dict[object, str]:
    """Return the logs that are copies of each other, by the name that they have in common.

    A fork that moved to another store without its parent has a copy of what it shows of the parent. If the parent moves
    there later and adopts the fork, it shows a copy of what it has itself.
    """
    logs = await aside(lambda: {place[0] for each in placed for place, _ in each if isinstance(place[0], LogRef)})
    if len(logs) < 2 or not isinstance(journal, Chronicle):
        return {}
    names = await journal.names_of(logs)
    often = Counter(names.values())
    return {log: name for log, name in names.items() if often[name] > 1}


def _renamed(placed: list[Placed], twins: dict[object, str]) -> list[Placed]:
    """Give the same place to a message and its copy.

    The id is part of it: a session and the copy of its log may have grown apart.
    """
    if not twins:
        return placed
    return [(((twins[log], message.id), at) if log in twins else (log, at), message) for (log, at), message in placed]


def _merged(said: list[Placed], viewed: Iterable[Placed]) -> list[Placed]:
    """Return both, each message once. A message that is only in the view comes after the one that it follows there."""
    known = {place for place, _ in said}
    behind: dict[object, list[Placed]] = {}
    last: object = None
    for place, message in viewed:
        if place in known:
            last = place
        else:
            known.add(place)
            behind.setdefault(last, []).append((place, message))
    merged = behind.get(None, [])
    for place, message in said:
        merged += ((place, message), *behind.get(place, ()))
    return merged


async def _read(journal: Journal | None, span: Span) -> Sequence[Message]:
    if span.tape.items is not None or span.tape.ref is None or journal is None:
        return span.messages()
    pages = _pages(journal, span.tape.ref, span.start, span.stop)
    return [message async for page in pages for message in page]


async def _branches(journal: Journal, session: AgentSession, own: LogRef) -> list[Insertion]:
    """Return the answers of selected branches, and the place in the session's log where each belongs."""
    found = await (journal.branches(session.id) if isinstance(journal, Chronicle) else journal.runs(session.id))
    runs = [run for run in found if run.log != own and run.start < run.stop]
    if not runs:
        return []
    selected = {
        entry.body.get("selected_loop_id")  # an evaluation that was given up has selected none
        for entry in await journal.read(session.id, after=runs[0].first.seq)
        if entry.kind == "parallel_loop_end"
    }
    chosen = [run for run in runs if run.loop_id in selected]
    return [(_place(run), await _stretch(journal, run.log, run.start, run.stop)) for run in chosen]


def _place(run: RunOnRecord) -> int:
    """Return the position after the messages that the branches of a group answer."""
    place: Sequence[int] = run.first.body.get("input_at") or (0, 0)
    return place[1]


def _said_once(placed: Iterable[Placed]) -> list[Message]:
    """Return each message once, without those that compactions have made. A block may show what it also covers."""
    once = dict(placed)
    return list(filter(_is_said, once.values()))


def _is_said(message: Message) -> bool:
    """Tell whether somebody said a message, and no compaction made it."""
    return message.id != FORGOTTEN and (message.metadata is EMPTY or message.metadata.get(MARK) not in STRATEGIES)
