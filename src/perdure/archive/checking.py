"""A check of everything that a store's content promises. It says what to do about each fault, and changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

import msgspec

from perdure import codec
from perdure.aio import aside
from perdure.archive.given_store import checked_store
from perdure.archive.moving import Progress
from perdure.errors import (
    CorruptRecord,
    InvalidSessionFile,
    KeyUnavailable,
    PerdureError,
    SessionBusy,
    SessionNotFound,
    StoreError,
    UnreadableFile,
)
from perdure.model.execution import ExecutionStatus
from perdure.model.ids import SessionId
from perdure.model.loop_events import KINDS
from perdure.model.session import AgentSession, AgentSessionInfo, SessionStatus
from perdure.paging import pages
from perdure.protocols import (
    MEND_FIRST,
    Archive,
    ArchivedSession,
    Checkable,
    Entry,
    Filters,
    Journal,
    Problem,
    SessionStore,
)
from perdure.runtime.record_reader import read_events
from perdure.stores.format.heads import StoredHead
from perdure.stores.format.rows import Stretch
from perdure.stores.jobs.archive.archived import check, first_version, newest_version

RESTORE = (
    "Restore it from a backup: erase the session here, then import its export; or restore the whole store. Until then "
    "its earlier versions may still load, and a fork of one of them can continue."
)
_RESTORE_ALL = (
    "Restore the whole store from a backup into another place: `perdure restore --from TARGET --store URL --verify`."
)
_DOCUMENT = "Delete the .json file: the log beside it holds everything, and the next save writes the file again."
_VIEW = "Rewind the session to an earlier version, or trim its transcript, so that calls and results pair up again."
_RECORD = "Only the record is affected, not the conversation; restore the session from a backup to repair it."
_KEY = (
    "A request that is sent again under this key would be answered again, or not as it was. Restore the session from a "
    "backup, or use another key for what is still to be sent."
)
_HEADER = "Save the session once (a tag or a note will do): that writes its header again."
_TRY_AGAIN = "Look at the reason, mend it, and check again."
_AFTERWARDS = (
    "This may come from the damaged index above. Repair that first with `perdure fsck --repair`, then check again."
)
_DAMAGED_TABLE = "the database file: "
_DECODED_AT_ONCE = 256

# The errors that damaged data can cause in code that reads it. None of them may end the check.
_DAMAGE = (PerdureError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class FsckReport(msgspec.Struct, frozen=True):
    """The result of a check: how much it has read, and the problems that it has found."""

    sessions: int = 0
    """The number of sessions that were read."""
    messages: int = 0
    """The number of their messages."""
    problems: tuple[Problem, ...] = ()
    """The problems, causes first."""

    @property
    def is_sound(self) -> bool:
        """True if no problem was found."""
        return not self.problems


async def fsck(store: SessionStore, *, session_id: str | None = None, progress: Progress | None = None) -> FsckReport:
    """Check a `store`, or one session of it. Damage is reported, and never raised.

    With a `session_id` only that session is checked. A session that is being run is checked as of its last version.
    Raise SessionNotFound for an unknown id. `progress` is called after each session.
    """
    survey = _Survey(checked_store(store, "$.store"))
    infos = await survey.listed(session_id)
    for done, info in enumerate(infos, 1):
        await survey.check_session(info)
        if progress is not None:
            progress(done, len(infos))
    if isinstance(store, Journal):
        with survey.watching(None, "claims"):
            await store.lapsed()
    # Damage below sessions can look like damage of one session.
    if isinstance(store, Checkable) and (session_id is None or survey.problems):
        with survey.watching(None, "the store"):
            survey.problems += await store.check()
    survey.put_causes_first()
    return FsckReport(len(infos), survey.messages, tuple(survey.distinct(session_id)))


class _Survey:
    """A check that is under way."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.problems: list[Problem] = []
        self.messages = 0
        self._lengths: dict[str, int] = {}

    def distinct(self, session_id: str | None) -> Iterator[Problem]:
        """Yield each problem once. Several checks may meet the same damaged record."""
        met: set[tuple[str | None, str]] = set()
        for problem in self.problems:
            is_asked_for = session_id in (None, problem.session_id) or problem.repair == MEND_FIRST
            if (problem.session_id, problem.where) not in met and is_asked_for:
                met.add((problem.session_id, problem.where))
                yield problem

    def put_causes_first(self) -> None:
        """Put damaged indexes before all else. What is read by them is then not to be erased or restored yet."""
        causes = [each for each in self.problems if each.repair == MEND_FIRST]
        if causes:
            rest = [each for each in self.problems if each.repair != MEND_FIRST]
            self.problems = [*causes, *map(_as_an_effect, rest)]

    @contextmanager
    def watching(self, session_id: str | None, where: str) -> Iterator[None]:
        """Note what damaged data raises in the block, and continue after the block."""
        try:
            yield
        except _DAMAGE as error:
            self.problems.append(_problem(error, session_id, where))

    def note(self, session_id: str | None, where: str, what: str, repair: str) -> None:
        self.problems.append(Problem(session_id, where, what, repair))

    async def listed(self, session_id: str | None) -> list[AgentSessionInfo]:
        """Return the sessions to check. Sessions with a damaged header are noted, and not checked further."""
        found: dict[str, AgentSessionInfo] = {}
        wanted: list[Filters] = [{"id": session_id}] if session_id else [{}, {"status": SessionStatus.DELETED}]
        for filters in wanted:
            with self.watching(session_id, "the list of sessions"):
                async for page in pages(self._store.list, **filters):
                    self.problems += [_problem(error, session_id, "header") for error in page.damaged]
                    found |= {info.id: info for info in page}
        if session_id is not None and not found and not self.problems:
            raise SessionNotFound(session_id)
        return sorted(found.values(), key=lambda info: (info.created_at, info.id))

    async def check_session(self, info: AgentSessionInfo) -> None:
        """Check one session. If it was erased meanwhile, drop its problems, since missing parts are not damage then."""
        known = len(self.problems)
        await self._look_at(info)
        if len(self.problems) > known and await self._is_gone(info.id):
            del self.problems[known:]

    async def _is_gone(self, session_id: SessionId) -> bool:
        with suppress(*_DAMAGE):
            return not await self._store.exists(session_id)
        return False

    async def _look_at(self, info: AgentSessionInfo) -> None:
        with self.watching(info.id, "newest version"):
            session = await self._store.load(info.id)
            if session is None:
                self.note(info.id, "header", "it is listed, and cannot be loaded", RESTORE)
                return
            if session.info != info and session.version == info.version:
                self.note(info.id, "header", "the list does not show what the newest version says", _HEADER)
            for what in await aside(list, _view_faults(session)):
                self.note(info.id, f"view of version {session.version}", what, _VIEW)
        await self._check_whole(info)
        if isinstance(self._store, Journal):
            await self._check_record(self._store, info.id)

    async def _check_whole(self, info: AgentSessionInfo) -> None:
        """Check every version, value and message of a session, all at once if the store can return it whole."""
        with self.watching(info.id, "versions"):
            with suppress(SessionBusy):  # saved versions can be checked below, even while the session runs
                if isinstance(self._store, Archive):
                    await self._check_archived(self._store, info)
                    return
            for version in range(info.first_version, info.version + 1):
                if await self._store.load(info.id, version) is None:
                    self.note(info.id, f"version {version}", "it is missing", RESTORE)

    async def _check_archived(self, store: Archive, info: AgentSessionInfo) -> None:
        archived = await store.dump(info.id)
        stretches = await aside(self._look_through, archived, info)
        if not all(self._is_known(archived, *stretch) for stretch in stretches):
            await store.dump(info.id, alone=True)  # this reads the rest from other sessions, or says what is missing

    def _look_through(self, archived: ArchivedSession, info: AgentSessionInfo) -> Sequence[Stretch]:
        """Note what is wrong with an archived session. Return the stretches of logs that its versions name."""
        for name, rows in archived.logs.items():
            self._check_log(info, name, rows)
        if newest_version(archived) < info.version:
            self.note(info.id, f"version {info.version}", "it is missing", RESTORE)
        for run, what in _run_faults(archived.entries):
            self.note(info.id, f"run {run}", what, _RECORD)
        for key, what in _key_faults(archived):
            self.note(info.id, f"idempotency key {key!r}", what, _KEY)
        return check(archived)

    def _check_log(self, info: AgentSessionInfo, name: str, rows: Mapping[int, bytes]) -> None:
        session_id = info.id
        self.messages += len(rows)
        # Once versions were forgotten, a log may have gaps.
        if info.first_version == 1:
            self._lengths[name] = len(rows)
            if sorted(rows) != list(range(len(rows))):
                self.note(session_id, f"log {name}", "a message is missing from it", RESTORE)
        items = iter(rows.items())
        while some := dict(islice(items, _DECODED_AT_ONCE)):
            self._check_messages(session_id, name, some)

    def _check_messages(self, session_id: SessionId, name: str, rows: Mapping[int, bytes]) -> None:
        try:
            codec.decode_messages(list(rows.values()))  # quicker than one by one, which is done only to find a fault
        except _DAMAGE:
            for at, raw in rows.items():
                with self.watching(session_id, f"message {at} of log {name}"):
                    codec.decode_message(raw)

    def _is_known(self, archived: ArchivedSession, log: int | str, start: int, stop: int) -> bool:
        """Tell whether a stretch has been checked, with its own session or as a part of this one."""
        name = str(log)
        return name in archived.logs or name in archived.lent or stop <= self._lengths.get(name, 0)

    async def _check_record(self, journal: Journal, session_id: SessionId) -> None:
        with self.watching(session_id, "record"):
            async for _ in read_events(journal, session_id, after=None, last=None, follow=False):
                pass
        with self.watching(session_id, "runs"):
            entries = await journal.read(session_id)
            end = entries[-1].seq if entries else 0
            starts, ends = {each.run: each.seq for each in reversed(entries)}, {each.run: each.seq for each in entries}
            for run in await journal.runs(session_id):
                if run.start < run.stop:
                    await journal.messages(run.log, run.start, run.stop)
                first, last = starts.get(run.loop_id, 0), ends.get(run.loop_id, 0)
                # If it reaches beyond the entries that were read, it has grown meanwhile.
                if run.last.seq <= end and (run.first.seq, run.last.seq) != (first, last):
                    noted = f"it is noted to reach from entry {run.first.seq} to {run.last.seq}"
                    what = f"{noted}, and it does from {first} to {last}" if last else f"{noted}, and has none"
                    self.note(session_id, f"run {run.loop_id}", what, _RECORD)
        with self.watching(session_id, "inbox"):
            await journal.read(session_id, inbox=True)
        with self.watching(session_id, "claim"):
            await journal.is_claimed(session_id)


def _as_an_effect(problem: Problem) -> Problem:
    """Return a problem with the advice to repair a damaged index first. A damaged page of a table comes from none."""
    if problem.where.startswith(_DAMAGED_TABLE):
        return problem
    return msgspec.structs.replace(problem, repair=_AFTERWARDS)


def _view_faults(session: AgentSession) -> Iterator[str]:
    """Yield what a model would refuse: results without their calls, and calls without results once a run is over."""
    called: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for message in session.state.messages:
        for result in message.tool_results:
            if not called[result.call_id]:
                yield f"the result of call {result.call_id!r} stands without its call"
            answered[result.call_id] += 1
        for call in message.tool_calls:
            called[call.id] += 1
    yield from (f"call {call!r} has {count} results" for call, count in answered.items() if count > called[call] > 0)
    if session.state.status is ExecutionStatus.COMPLETED:
        # Only the run's own calls: after a rewind, an older call may be in the view without its result.
        own = {call.id for step in session.state.steps for call in step.tool_calls}
        yield from (f"call {call!r} has no result" for call in called if call in own and not answered[call])


def _key_faults(archived: ArchivedSession) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with idempotency keys. A run with a key names it, and is saved together with its end."""
    ended = {entry.run for entry in archived.entries if entry.kind == "agent_end"}
    for run, name, digest in _keys_told(archived.entries):
        kept = archived.keys.get(name)
        if kept is None:
            if run in ended:
                yield name, f"run {run} has answered a request under it, and it is not there"
        elif kept[0] != digest:
            yield name, f"it does not stand for the request that run {run} has answered"
        elif first_version(archived) <= kept[1] <= newest_version(archived) and _run_of(archived, kept[1]) != run:
            yield name, f"it stands for version {kept[1]}, which run {run} has not saved"


def _keys_told(entries: tuple[Entry, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield each key with the last run for it, which has answered the request or tries to. Earlier ones have failed."""
    last: dict[str, tuple[str, str, str]] = {}
    for entry in entries:
        told = entry.body.get("key") if entry.kind == "agent_start" and isinstance(entry.body, Mapping) else None
        match told:
            case [str() as name, str() as digest] if entry.run is not None:
                last[name] = (entry.run, name, digest)
    yield from last.values()


def _run_of(archived: ArchivedSession, version: int) -> str | None:
    """Return the run that ended with a version."""
    raw = archived.heads[version - first_version(archived)]
    run = StoredHead(raw, archived.session_id, version).run(archived.values)
    return None if run is None else run.execution_id


def _run_faults(entries: tuple[Entry, ...]) -> Iterator[tuple[str, str]]:
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        if entry.run is not None and entry.kind in KINDS:  # other kinds are a newer release's, whose rules are unknown
            kinds.setdefault(entry.run, []).append(entry.kind)
    for run, told in kinds.items():
        if told[0] != "agent_start":
            yield run, f"its record begins with {told[0]!r}, not with its start"
        if told.count("agent_end") > told.count("agent_start"):
            yield run, "it has ended more often than it was started"


def _problem(error: BaseException, session_id: str | None, where: str) -> Problem:
    """Return an error as a line of a report."""
    match error:
        case CorruptRecord():
            whose = error.session_id or session_id
            repair = _RECORD if error.position.startswith(("event", "inbox")) else RESTORE if whose else _RESTORE_ALL
            return Problem(whose, error.position.removeprefix("of "), error.reason, repair)
        case KeyUnavailable():
            what = f"it could not be checked: {error.what}"
            return Problem(error.session_id or session_id, where, what, error.advice, needs_key=True)
        case InvalidSessionFile():
            return Problem(session_id, error.path, error.reason, _DOCUMENT)
        case UnreadableFile():
            return Problem(session_id, error.path, error.reason, _TRY_AGAIN)
        case StoreError():
            return Problem(session_id, where, str(error), _TRY_AGAIN)
        case PerdureError():
            return Problem(session_id, where, str(error), RESTORE)
    return Problem(session_id, where, f"it cannot be read ({type(error).__name__}: {error})", RESTORE)
