"""The usage of runs, and sums of it: by agent, model, day, owner or session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from perdure.errors import CorruptRecord, KeyUnavailable, SessionNotFound, UnreadableFile
from perdure.model.usage import Usage
from perdure.paging import pages, unread_ids
from perdure.protocols import Filters
from perdure.sessions.json_forms import of_usage

if TYPE_CHECKING:
    from perdure.model.record import LoopRecord
    from perdure.model.session import AgentSessionInfo
    from perdure.sessions.looking import Looking

Key = tuple[str, str]
Tell = Callable[[int, int], None]
Part = Literal["agent", "model", "day", "owner", "session_id"]


@dataclass
class RunCost:
    """The usage of one run. That of its sub-agents counts for their own runs."""

    session_id: str
    owner: str | None
    agent: str
    model: str
    at: datetime | None
    usage: Usage
    redactions: Mapping[str, int] = field(default_factory=dict)

    @property
    def day(self) -> str:
        """The date in UTC on which the run began."""
        return self.at.astimezone(UTC).date().isoformat() if self.at else "unknown"


class Sum(msgspec.Struct, frozen=True):
    """The usage of several runs together."""

    key: str | None
    runs: int
    usage: Usage


class Spending(msgspec.Struct, frozen=True):
    """The runs of the sessions that were looked at."""

    runs: list[RunCost]
    is_whole: bool
    """False if there are more sessions than were looked at."""
    damaged: tuple[str, ...] = ()
    """The sessions whose runs cannot be read, and are not counted."""

    def by(self, part: Part) -> list[Sum]:
        """Return a sum for each agent, model, day, owner or session, sorted by its name."""
        groups: dict[str | None, list[RunCost]] = {}
        for each in self.runs:
            groups.setdefault(getattr(each, part), []).append(each)
        return [summed(key, groups[key]) for key in sorted(groups, key=lambda key: (key is not None, key or ""))]


def summed(key: str | None, runs: Iterable[RunCost]) -> Sum:
    """Return the usage of several runs together, under a name."""
    counted = list(runs)
    return Sum(key, len(counted), sum((each.usage for each in counted), start=Usage()))


def redacted_in(runs: Iterable[RunCost]) -> dict[str, int]:
    """Return how often each redactor has replaced something in the messages of runs."""
    return dict(sum((Counter(each.redactions) for each in runs), start=Counter[str]()))


async def spending_of(
    sessions: Looking, since: datetime | None = None, *, limit: int | None = None, tell: Tell | None = None
) -> Spending:
    """Return every run since a time, of all sessions, or of the `limit` that were changed last.

    A caller's usage on record contains that of its sub-agents, which is subtracted here. A damaged session is named,
    and the others are counted.
    """
    infos, damaged, is_whole = await _changed_since(sessions, since, limit)
    runs: dict[Key, RunCost] = {}
    spawned: list[tuple[Key, Usage]] = []
    for done, info in enumerate(infos, 1):
        try:
            found = _runs_of(info, await _loops(sessions, info.id))
        except (CorruptRecord, KeyUnavailable, UnreadableFile):
            found = {}
            damaged.append(info.id)
        runs |= found
        if info.spawn_ref is not None:
            ref = info.spawn_ref
            used = sum((each.usage for each in found.values()), start=Usage())
            spawned.append(((ref.parent_session_id, ref.parent_loop_id), used))
        if tell is not None:
            tell(done, len(infos))
    for caller, used in spawned:
        if caller in runs:
            runs[caller].usage = _without(runs[caller].usage, used)
    wanted = [each for each in runs.values() if since is None or (each.at is not None and each.at >= since)]
    return Spending(wanted, is_whole, tuple(damaged))


async def _changed_since(
    sessions: Looking, since: datetime | None, limit: int | None
) -> tuple[list[AgentSessionInfo], list[str], bool]:
    """Return the headers of sessions that were changed since a time, and the ids of those whose header is unreadable.

    The flag tells whether these are all of them.
    """
    filters: Filters = {} if since is None else {"updated_after": since}
    if limit is not None:
        filters |= {"order": "updated"}
    found: list[AgentSessionInfo] = []
    damaged: list[str] = []
    async for page in pages(sessions.headers, **filters):
        found += page
        damaged += unread_ids(page)
        if limit is not None and len(found) > limit:
            return found[:limit], damaged, False
    return found, damaged, True


async def _loops(sessions: Looking, session_id: str) -> list[LoopRecord]:
    """Return the headers of a session's runs. A run that has not ended is read whole, since its header lacks the usage.

    A session that was erased meanwhile has no runs.
    """
    try:
        headers = (await sessions.record(session_id)).loops
    except SessionNotFound:
        return []
    return [each if each.status.is_over else await sessions.loop(session_id, each.loop_id) for each in headers]


def _runs_of(info: AgentSessionInfo, loops: Iterable[LoopRecord]) -> dict[Key, RunCost]:
    runs: dict[Key, RunCost] = {}
    for loop in loops:
        usage = loop.usage
        group = loop.parallel_group
        # The usage of judging is told by every branch of a group, and is counted for the first alone.
        if group is not None and group.all_loop_ids[0] == loop.loop_id:
            usage = usage + group.evaluation_usage
        model = _model_of(loop)
        facts = (info.id, info.owner, info.agent_name, model, loop.started_at, usage, loop.redactions)
        runs[info.id, loop.loop_id] = RunCost(*facts)
    return runs


def _model_of(loop: LoopRecord) -> str:
    if loop.config is not None:
        return loop.config.model
    return "none (compaction)" if loop.continuation_kind.kind == "compaction" else "unknown"


def _without(usage: Usage, part: Usage) -> Usage:
    """Return a usage without a part of it, never below 0: a run that was killed may not have counted the part yet."""
    fields = of_usage(usage)
    return Usage(**{name: max(0, amount - getattr(part, name)) for name, amount in fields.items()})
