"""One round of retention: which sessions have been kept for long enough, and what is done about them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

import msgspec

from perdure.errors import ConfigurationError, CorruptRecord, InvalidData
from perdure.model.ids import SessionId
from perdure.model.retention import Retention, RetentionPolicy, is_hold, keep_mark
from perdure.model.session import AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.paging import pages
from perdure.protocols import Due, Erased, Filters, Left, WhyLeft
from perdure.sessions.retaining import Retaining

AT_ONCE = 50
"""How many sessions are erased in one commit, with those of their sub-agents: others wait for no more than that."""
Between = Callable[[], Awaitable[object]]
"""Called after each commit of a round, with time for others."""


class RetentionReport(msgspec.Struct, frozen=True):
    """What retention has erased; in a dry run, what it would erase now."""

    at: datetime
    """The time that ages were counted from."""
    dry_run: bool
    erased: Sequence[SessionId]
    """The sessions that are gone, sub-agents' included."""
    pruned: Sequence[SessionId]
    """The sessions whose older versions are gone."""
    versions: int
    """How many versions are gone: of erased sessions, and older ones of the others."""
    messages: int
    """How many messages nothing shows any more."""
    bytes: int
    """What the erased rows held. The space in indexes comes on top of it."""
    left: Sequence[Left]
    """The sessions that stay for now, though their time is over, and why."""

    @classmethod
    def of(cls, erased: Erased, at: datetime, *, dry_run: bool) -> Self:
        counts = (erased.versions, erased.messages, erased.bytes)
        return cls(at, dry_run, tuple(erased.erased), tuple(erased.pruned), *counts, tuple(erased.left))

    @property
    def sessions(self) -> int:
        return len(self.erased)


class Round:
    """One look at all sessions whose time may be over by a policy, and what is done about them.

    Sessions are found by the times of the rules, so that a round costs what it finds. Those that were not updated after
    `since` are not looked at for the number of their versions.
    """

    def __init__(
        self, sessions: Retaining, policy: RetentionPolicy, at: datetime, *, since: datetime | None = None
    ) -> None:
        self._sessions = sessions
        self._store = sessions._retains()
        self._policy = policy
        self._at = at
        self._since = since
        self._due: dict[SessionId, AgentSessionInfo] = {}
        self._grown: dict[SessionId, tuple[Due, int]] = {}
        self._left: dict[SessionId, Left] = {}

    async def carry_out(self, *, dry_run: bool = False, between: Between | None = None) -> RetentionReport:
        """Erase what is due, some at a time, and call `between` after each time."""
        await self._find()
        due = sorted(self._due.values(), key=lambda info: (info.created_at, info.id))
        batches = [[*map(Due.of, due[at : at + AT_ONCE])] for at in range(0, len(due), AT_ONCE)]
        prunes = [self._grown[key] for key in sorted(self._grown)]
        if dry_run:
            found = [await self._store.rehearse(batches, prunes)] if batches or prunes else []
        else:
            found = [each async for each in self._erase(batches, prunes, between)]
        left = Erased(left=tuple(self._left.values()))
        return RetentionReport.of(Erased.joined([*found, left]), self._at, dry_run=dry_run)

    async def _erase(
        self, batches: Iterable[Sequence[Due]], prunes: Iterable[tuple[Due, int]], between: Between | None
    ) -> AsyncIterator[Erased]:
        for batch in batches:
            for erased in await self._retired(batch):
                self._sessions._close(erased.erased)
                yield erased
            if between is not None:
                await between()
        for due, before in prunes:
            yield await self._store.prune(due, before=before)
            if between is not None:
                await between()

    async def _retired(self, batch: Sequence[Due]) -> list[Erased]:
        """Erase sessions together; if one of them is damaged, those that are not, one by one."""
        try:
            return [await self._store.retire(batch)]
        except CorruptRecord as error:
            if len(batch) == 1:
                return [Erased(left=[Left(batch[0].session_id, WhyLeft.DAMAGED, error.what)])]
        return [erased for each in batch for erased in await self._retired([each])]

    async def _find(self) -> None:
        rules = await self._store.own_rules()
        for filters, rule in self._sources(rules):
            for bounds in self._bounds(rule):
                async for page in self._listed(filters | bounds):
                    self._take(page)
        counts = [rule.versions for _, rule in self._sources(rules) if rule.versions is not None]
        if counts:
            async for found in self._with_versions(min(counts)):
                self._take(found)

    def _sources(self, own: Iterable[Retention]) -> Iterator[tuple[Filters, Retention]]:
        """Yield the filters that lead to the sessions which may have a rule, each with the rule."""
        yield from ((Filters(tag=keep_mark(rule)), rule) for rule in own)
        yield from ((Filters(tag=tag), rule) for tag, rule in self._policy.tags.items())
        yield from ((Filters(owner=owner), rule) for owner, rule in self._policy.owners.items())
        if self._policy.default is not None:
            yield Filters(), self._policy.default

    def _bounds(self, rule: Retention) -> Iterator[Filters]:
        """Yield the filters that lead to sessions whose time is over by a rule."""
        if rule.idle is not None:
            yield Filters(updated_before=self._at - rule.idle, order="updated")
        if rule.age is not None:
            yield Filters(created_before=self._at - rule.age)

    async def _with_versions(self, least: int) -> AsyncIterator[Sequence[AgentSessionInfo]]:
        """Yield sessions that may have more versions than a rule keeps."""
        if self._since is not None:
            async for page in self._listed(Filters(updated_after=self._since, order="updated")):
                yield page
            return
        after: str | None = ""
        while after is not None:
            found, after = await self._store.overgrown(least, after=after)
            owner = self._sessions.owner
            yield [info for info in found if owner in (None, info.owner)]

    async def _listed(self, filters: Filters) -> AsyncIterator[SessionInfoList]:
        """Yield pages of sessions, hidden ones too. Those of sub-agents are not among them: they go with others."""
        for status in (Filters(), Filters(status=SessionStatus.DELETED)):
            wanted: Filters = filters | status
            async for page in pages(self._sessions.headers, **wanted | Filters(top_level=True)):
                yield page

    def _take(self, infos: Iterable[AgentSessionInfo]) -> None:
        """Take note of what is to be done about sessions."""
        for info in infos:
            if info.id in self._due or info.id in self._left:
                continue
            is_over, before = self._policy.is_over(info, self._at), self._policy.forgets_before(info)
            hold = next(filter(is_hold, info.tags), None)
            if hold is not None and (is_over or before is not None):
                self._left[info.id] = Left(info.id, WhyLeft.HOLD, f"{hold} on {info.id}")
            elif is_over:
                self._due[info.id] = info
                self._grown.pop(info.id, None)
            elif before is not None:
                self._grown[info.id] = Due.of(info), before


def load_policy(path: str | os.PathLike[str]) -> RetentionPolicy:
    """Return the policy that a TOML file says. InvalidData names the field that is wrong.

    At the top it has the default: `age`, `idle` and `versions`. Tables `[tags.NAME]` and `[owners.NAME]` have the same.
    """
    file = Path(path)
    try:
        with file.open("rb") as source:
            plain = tomllib.load(source)
    except OSError as error:
        raise ConfigurationError(f"The policy {file} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidData(str(file), f"this is not TOML: {error}") from None
    try:
        return RetentionPolicy.from_dict(plain)
    except InvalidData as error:
        raise InvalidData(f"{file}: {error.path.removeprefix('$').removeprefix('.') or 'top'}", error.problem) from None
