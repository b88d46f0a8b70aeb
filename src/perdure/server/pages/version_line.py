"""A session's versions as a line: a window of them, each with what has made it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from perdure.model.ids import SessionId
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus
from perdure.model.transcript import Block
from perdure.protocols import PARKED
from perdure.server.pages.texts import shortened
from perdure.sessions.pages import SpanReader, end_of_session
from perdure.sessions.sessions import Sessions

AROUND = 15
"""The number of versions on a line."""
_STATUS = {
    SessionStatus.ACTIVE: "resumed",
    SessionStatus.SUSPENDED: "suspended",
    SessionStatus.COMPLETED: "completed",
    SessionStatus.FAILED: "failed",
    SessionStatus.DELETED: "deleted",
}


@dataclass(frozen=True)
class VersionDot:
    """A version on the line."""

    number: int
    cause: str
    kind: str
    """The style of its dot: made by a run, a compaction, a cut, or something else."""
    shown: int
    at: datetime


@dataclass(frozen=True)
class VersionLine:
    """Versions around the one that is looked at."""

    dots: Sequence[VersionDot]
    current: int
    newest: int
    first: int

    @property
    def older(self) -> int | None:
        return self.current - 1 if self.current > self.first else None

    @property
    def newer(self) -> int | None:
        return self.current + 1 if self.current < self.newest else None

    @property
    def is_past(self) -> bool:
        return self.current < self.newest


async def version_line(sessions: Sessions, newest: AgentSessionInfo, current: AgentSession) -> VersionLine:
    """Return the line of a session's versions. No version is read further than its list of pieces."""
    high = min(newest.version, max(current.version + AROUND // 2, newest.first_version + AROUND - 1))
    low = max(newest.first_version, high - AROUND + 1)
    # One more than is shown, since a version's cause is its difference from the one before.
    numbers = range(max(low - 1, newest.first_version), high + 1)
    known = await asyncio.gather(*(_loaded(sessions, newest.id, number, current) for number in numbers))
    reader = SpanReader(sessions.runtime.journal)
    dots = [await _dot(reader, known[place - 1] if place else None, after) for place, after in enumerate(known)]
    return VersionLine(dots[-(high - low + 1) :], current.version, newest.version, newest.first_version)


async def _loaded(sessions: Sessions, session_id: SessionId, number: int, current: AgentSession) -> AgentSession:
    return current if number == current.version else await end_of_session(sessions, session_id, number, last=0)


async def _dot(reader: SpanReader, before: AgentSession | None, after: AgentSession) -> VersionDot:
    kind, cause = _cause(before, after)
    if kind == "run" and before is not None:
        cause = await _first_words(reader, before, after) or cause
    return VersionDot(after.version, cause, kind, len(after.state.transcript), after.info.updated_at)


def _cause(before: AgentSession | None, after: AgentSession) -> tuple[str, str]:
    """Return the cause of a version, as a style and in words, by its differences from the one before."""
    if before is None:
        is_first = after.version == 1
        return "", ("forked" if after.info.parent_id else "created") if is_first else "the oldest that is kept"
    return _by_run(before, after) or _by_view(before, after) or ("", _by_header(before, after))


def _by_run(before: AgentSession, after: AgentSession) -> tuple[str, str] | None:
    then, run = before.state.execution, after.state.execution
    if run is None or (then is not None and (then.execution_id, then.status) == (run.execution_id, run.status)):
        return None
    if len(after.state.transcript) <= len(before.state.transcript) and run.pending_calls == ():
        return None
    if run.pending_calls and (then is None or then.pending_calls != run.pending_calls):
        return "waits", "waits for you"
    return "run", "run"


def _by_view(before: AgentSession, after: AgentSession) -> tuple[str, str] | None:
    then, view = before.state.transcript, after.state.transcript
    if after.state.rewound_to and after.state.rewound_to != before.state.rewound_to:
        return "cut", f"undone, back to {after.state.rewound_to}"
    if after.state.adopted != before.state.adopted:
        return "run", "adopted a fork"
    blocks, more = _blocks(before), _blocks(after)
    if more - blocks:
        return "fold", "compacted"
    if blocks - more and len(view) >= len(then):
        return "fold", "uncompacted"
    if len(view) < len(then):
        return "cut", ("trimmed" if _last_place(after) == _last_place(before) else "rewound") if view else "cleared"
    return ("said", "messages added") if len(view) > len(then) else None


def _blocks(session: AgentSession) -> set[str]:
    return {piece.id for piece in session.state.transcript.pieces if isinstance(piece, Block)}


def _last_place(session: AgentSession) -> tuple[object, int] | None:
    """Return the place in a log of the last message that is shown."""
    spans = list(session.state.transcript.spans())
    return (spans[-1].tape.ref, spans[-1].stop) if spans else None


def _by_header(before: AgentSession, after: AgentSession) -> str:
    then, info = before.info, after.info
    if PARKED in info.tags and PARKED not in then.tags:
        return "parked"
    if then.status is not info.status:
        was_deleted = then.status is SessionStatus.DELETED
        return "restored" if was_deleted else _STATUS[info.status]
    changes = (
        (then.name != info.name, "renamed"),
        (then.tags != info.tags, "tagged"),
        (before.definition != after.definition, "agent changed"),
        (before.state.model != after.state.model, "model changed"),
        (before.state.context.system_prompt != after.state.context.system_prompt, "prompt changed"),
        (before.state.metadata != after.state.metadata, "metadata"),
    )
    return next((words for is_it, words in changes if is_it), "changed")


async def _first_words(reader: SpanReader, before: AgentSession, after: AgentSession) -> str:
    """Return the beginning of what was said to a run: the first message that the version before did not show."""
    place = len(before.state.transcript)
    spans = after.state.transcript.cut(place, place + 1).spans()
    messages = await reader.messages(spans)
    return shortened(messages[0].text, 40) if messages else ""
