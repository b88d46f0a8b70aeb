"""One round of retention: find the sessions that have been kept for long enough, and erase them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

import msgspec

from perdure.archive.whole_file import checked_path
from perdure.errors import ConfigurationError, CorruptRecord, InvalidData, KeyForgotten, KeyUnavailable, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.retention import Retention, RetentionPolicy, is_hold, keep_mark
from perdure.model.session import AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.paging import pages
from perdure.protocols import Due, Erased, Filters, Left, WhyLeft
from perdure.sessions.graphs import has_interrupt, is_thread
from perdure.sessions.retaining import Retaining

AT_ONCE = 50
"""The number of sessions that are erased in one commit, besides their sub-agents': other writers wait that long."""
Between = Callable[[], Awaitable[object]]
"""A function that is called after each commit of a round, when others have their turn."""


class RetentionReport(msgspec.Struct, frozen=True):
    """The outcome of retention: what it has erased, or, in a dry run, what it would erase now."""

    at: datetime
    """The time that ages were counted from."""
    dry_run: bool
    """True if nothing was erased."""
    erased: Sequence[SessionId]
    """The sessions that are gone, sub-agents' included."""
    pruned: Sequence[SessionId]
    """The sessions whose older versions are gone."""
    versions: int
    """The number of versions that are gone: those of erased sessions, and older ones of the others."""
    messages: int
    """The number of messages that nothing shows any more."""
    bytes: int
    """The size of the erased rows. The space in indexes comes on top of it."""
    left: Sequence[Left]
    """The sessions that stay for now, though their time is over, and why."""

    @classmethod
    def of(cls, erased: Erased, at: datetime, *, dry_run: bool) -> Self:
        """Return the report of what was `erased`, or in a `dry_run` would be, by ages counted from `at`."""
        counts = (erased.versions, erased.messages, erased.bytes)
        return cls(at, dry_run, tuple(erased.erased), tuple(erased.pruned), *counts, tuple(erased.left))

    @property
    def sessions(self) -> int:
        """The number of sessions that are gone."""
        return len(self.erased)


class Round:
    """One round over all sessions whose time may be over by a policy.

    Sessions are found by the times of the rules, so that a round costs what it finds. Sessions that were not updated
    after `since` are not checked for the number of their versions.
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
        """Erase what is due, in batches, and call `between` after each batch."""
        await self._find()
        await self._leave_waiting_threads()
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
        """Erase sessions in one commit. If one of them is damaged, erase the others one by one."""
        try:
            return [await self._store.retire(batch)]
        except (CorruptRecord, KeyUnavailable) as error:
            if len(batch) == 1:
                return [Erased(left=[Left(batch[0].session_id, WhyLeft.DAMAGED, error.what)])]
        return [erased for each in batch for erased in await self._retired([each])]

    async def _find(self) -> None:
        rules = await self._store.own_rules()
        for filters, rule in self._sources(rules):
            for bounds in self._bounds(rule):
                async for page in self._listed(filters | bounds):
                    self._take(page)
                    self._note_unread(page)
        counts = [rule.versions for _, rule in self._sources(rules) if rule.versions is not None]
        if counts:
            async for found in self._with_versions(min(counts)):
                self._take(found)

    async def _leave_waiting_threads(self) -> None:
        """Leave LangGraph's threads that wait on an interrupt. The store knows only what perdure's own runs wait for.

        A thread is read here, and not in the commit that erases it: an interrupt comes with a new version, or from a
        node that has worked all the time since the last one.
        """
        for info in [*filter(is_thread, self._due.values())]:
            if info.status is SessionStatus.DELETED:
                continue
            try:
                left = Left(info.id, WhyLeft.APPROVAL) if await self._waits_for_person(info) else None
            except (CorruptRecord, KeyUnavailable) as error:
                left = Left(info.id, WhyLeft.DAMAGED, error.what)
            if left is not None:
                del self._due[info.id]
                self._left[info.id] = left

    async def _waits_for_person(self, info: AgentSessionInfo) -> bool:
        journal = self._sessions.runtime.journal
        try:
            heads = await self._sessions.versions(info.id, limit=1)
            return journal is not None and any([await has_interrupt(journal, info.id, each.metadata) for each in heads])
        except (SessionNotFound, KeyForgotten):  # erased meanwhile, or nobody can read it any more
            return False

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
        # Each new version is an update, so a later round only looks at what was updated since the one before.
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
        """Yield pages of sessions, hidden ones too. Sub-agents' are left out: they are erased with their callers'."""
        # A list without a status leaves hidden sessions out, so that these take a list of their own.
        for status in (Filters(), Filters(status=SessionStatus.DELETED)):
            wanted: Filters = filters | status
            async for page in pages(self._sessions.headers, **wanted | Filters(top_level=True)):
                yield page

    def _note_unread(self, page: SessionInfoList) -> None:
        """Name the sessions whose headers cannot be read: whether their time is over is not known."""
        for error in page.damaged:
            if isinstance(error, CorruptRecord | KeyUnavailable) and error.session_id is not None:
                session_id = SessionId(error.session_id)
                self._left[session_id] = Left(session_id, WhyLeft.DAMAGED, error.what)

    def _take(self, infos: Iterable[AgentSessionInfo]) -> None:
        """Note what has to be done about sessions."""
        for info in infos:
            if info.id in self._due or info.id in self._left:
                continue
            is_over, before = self._policy.is_over(info, self._at), self._policy.forgets_before(info)
            hold = next(filter(is_hold, info.tags), None)
            if hold is not None and (is_over or before is not None):
                self._left[info.id] = Left(info.id, WhyLeft.HOLD, f"{hold} on {info.id}")
            elif is_over:
                self._due[info.id] = info
                # Found before for its versions alone: these are erased with the session.
                self._grown.pop(info.id, None)
            elif before is not None:
                self._grown[info.id] = Due.of(info), before


def load_policy(path: str | os.PathLike[str]) -> RetentionPolicy:
    """Return the policy in a TOML file. Raise InvalidData, which names the field, if something in it is wrong.

    `path` is the file. The default is at the top: `age`, `idle` and `versions`. Tables `[tags.NAME]` and
    `[owners.NAME]` have the same fields.
    """
    file = Path(checked_path(path, "$.path"))
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
