"""The tables in PostgreSQL: jobs as queries, loads and lists as one statement each, saves in batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from perdure.aio import finish_despite_cancel
from perdure.errors import CorruptRecord, StoreError
from perdure.protocols import Problem, SearchHit
from perdure.stores.engine import Change, Fetch, IndexedEngine, Job, Kind, Request, T
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import Batch, Values
from perdure.stores.jobs import rates, record, sketching, waiting
from perdure.stores.jobs.listing import HeaderRow, Page
from perdure.stores.jobs.loading import Load, Loaded, decoded, is_there, read_messages
from perdure.stores.jobs.saving import Append, Keep, Place
from perdure.stores.jobs.values import unpacked_value
from perdure.stores.postgres import notes, quick, sketches
from perdure.stores.postgres import waiting as waits
from perdure.stores.postgres.inbox import Inbox
from perdure.stores.postgres.link import Connection, Link, Queries, ask, fetched
from perdure.stores.postgres.listener import Listener
from perdure.stores.postgres.looks import Looks
from perdure.stores.postgres.rows import SQL, given_time, queries_of
from perdure.stores.postgres.schema import migrate
from perdure.stores.postgres.statistics import Statistics
from perdure.stores.postgres.writer import Writer
from perdure.stores.sealed_jobs import Owner
from perdure.stores.sealing import Sealing
from perdure.stores.search import Query
from perdure.stores.tapes import TapeCache

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit, Landing, Outline

# The messages come along if nothing of the session is cached and they are few.
_LOAD = """
    SELECT session.sid, session.log, session.msg_end, session.evt_end, session.version, meta.erasures,
        head.version, head.crc, head.body, value.hashes, value.bodies,
        msg.logs, msg.places, msg.sums, msg.bodies,
        (SELECT max(newest.version) FROM head AS newest WHERE newest.sid = session.sid)
    FROM session CROSS JOIN meta
    LEFT JOIN head ON head.sid = session.sid AND head.version = coalesce(%(version)s, session.version)
    LEFT JOIN LATERAL (
        SELECT array_agg(hash) AS hashes, array_agg(body) AS bodies
        FROM value WHERE hash = ANY (head.hashes)
    ) AS value ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(row.log) AS logs, array_agg(row.pos) AS places, array_agg(row.crc) AS sums,
            array_agg(row.body) AS bodies
        FROM generate_series(1, cardinality(head.wanted), 3) AS each
        JOIN msg AS row ON row.log = head.wanted[each]
            AND row.pos >= head.wanted[each + 1] AND row.pos < head.wanted[each + 2]
        WHERE %(cold)s
    ) AS msg ON true
    WHERE session.id = %(id)s
"""
_VALUES = "SELECT hash, body FROM value WHERE hash = ANY (%s)"


class PostgresEngine(IndexedEngine):
    """An engine that keeps the tables in a schema of a PostgreSQL database."""

    can_be_sealed = True
    kind = "postgres"

    def __init__(self, dsn: str, schema: str, pool: int, *, restoring: bool = False) -> None:
        self._is_restoring = restoring
        self._dsn = dsn
        self._schema = schema
        self._pool = pool
        self._open: _Open | None = None

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise StoreError("This store is open already.")
        await migrate(self._dsn, self._schema, restoring=self._is_restoring)
        link = Link(self._dsn, self._schema, self._pool)
        try:
            await link.open()
            self.origin = str((await link.row("SELECT uid FROM meta"))[0])
        except BaseException:
            await link.close()
            raise
        self._open = _Open(link, self.sealing)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            opened, self._open, self.origin = self._open, None, ""
            # A forked child must not write to its parent's connections, nor a second loop use the first one's.
            if opened.link.is_abandoned:
                opened.link.abandon()
            else:
                await finish_despite_cancel(opened.close())

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def is_abandoned(self) -> bool:
        """True if the process or the event loop that opened it is gone, and with it all that it held."""
        return self._open is not None and self._open.link.is_abandoned

    @property
    def opened(self) -> _Open:
        if self._open is None:
            raise StoreError("This store is not open. Use it inside `async with PostgresStore(dsn) as store:`.")
        self._open.link.check()
        return self._open

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        link, at = self.opened.link, given_time()
        if kind == "write" and isinstance(job, partial) and (way := self._short_way(job.func, job.args)) is not None:
            return await way  # type: ignore[no-any-return]  # what the job would return

        def queries() -> Queries[T]:
            return queries_of(job(), at, self.sealing)

        is_read = kind in ("glance", "read")
        if is_read and not long and (not self.sealing.is_on or quick.reads_no_bodies(job)):
            with suppress(quick.Odd):
                return await quick.answered(link, job)  # type: ignore[no-any-return]  # what the job would return
        if kind == "write" and long:  # an import writes a session like this
            self.opened.statistics.note()
        transact = link.transact_in_thread if long else link.transact
        try:
            if is_read and not long:
                return await link.read(lambda connection: ask(connection, queries()))
            return await transact(queries, snapshot=is_read)
        except CorruptRecord:  # what others write or erase between two statements looks like damage
            return await transact(queries, snapshot=is_read)

    def _short_way(self, job: Any, given: tuple[Any, ...]) -> Awaitable[Any] | None:
        """Return what does the same as a job by one statement, or a few. None if the job has to be driven."""
        link = self.opened.link
        # These write bodies, which the job seals first.
        if self.sealing.is_on and job in (record.post, record.note, sketching.keep):
            return None
        if job is record.post and not given[1].attachments:
            return self.opened.inbox.post(*given)
        if job is record.note:
            return self._note(*given)
        if job is sketching.keep:
            return sketches.keep(link, *given)
        if job is waiting.has_waiting:
            return waits.has_waiting(link, *given)
        return waits.reserve(link, *given) if job is rates.reserve else None

    async def _note(self, session_id: str, batch: Batch | None) -> int:
        place = await notes.note(self.opened.link, session_id, batch)
        self.opened.writer.note(session_id, place)
        return place.evt_end

    async def commit(self, change: Change) -> Any:
        opened = self.opened
        if self.sealing.is_on and isinstance(change, Keep | Append) and change.attachments:
            return await self._commit_by_job(change)
        made = await opened.writer.make(change)  # type: ignore[arg-type]  # there are no others
        if isinstance(change, Keep) and change.is_new:
            opened.statistics.note()
        return made

    async def _commit_by_job(self, change: Keep | Append) -> Any:
        """Make a change statement by statement: the names of its files depend on what is there."""
        at = given_time()

        async def finished() -> Any:
            return change.finish(
                await self.opened.link.transact(
                    lambda: queries_of(change.job(), at, self.sealing, Owner(change.owner)), snapshot=False
                )
            )

        return await finish_despite_cancel(finished())

    async def fetch(self, load: Fetch[T]) -> T | None:
        assert isinstance(load, Load)
        try:
            return await self._fetch(load)
        except CorruptRecord:  # others may have written between its statements: a snapshot tells if it is damage
            opened, at = self.opened, given_time()
            return await opened.link.transact(lambda: queries_of(load.job(), at, self.sealing), snapshot=True)

    async def _fetch(self, load: Load) -> Any:
        opened = self.opened
        if load.may_be_at_hand:
            assert load.known is not None
            seen = await opened.looks.at(load.session_id)
            if seen is None or seen == (load.known.session.version, load.known.erasures):
                return None if seen is None else Loaded(seen.erasures)
        found: Loaded | None = await opened.link.read(lambda connection: _load(connection, load, self.sealing))
        if found is not None and found.place is not None and load.version is None:
            opened.writer.note(load.session_id, found.place)
        return found

    async def page(self, page: Request[T]) -> T:
        assert isinstance(page, Page)
        steps = SQL.page(page)
        text, values = next(steps)
        try:
            while True:
                text, values = steps.send(await self.opened.link.rows(text, tuple(values)))
        except StopIteration as done:
            rows: Any = [HeaderRow(*row) for row in done.value]
            return rows

    async def faults(self) -> Sequence[Problem]:
        from perdure.stores.postgres.faults import faults

        return await self.opened.link.transact_in_thread(partial(faults, self.sealing), snapshot=True)

    async def mend(self, *, dry_run: bool) -> Sequence[Problem]:
        from perdure.stores.postgres.mending import mend, mendable

        link = self.opened.link
        wrong = partial(mendable, self.sealing)
        found = await link.transact_in_thread(wrong, snapshot=True)
        if not found or dry_run:
            return found
        await link.transact_in_thread(lambda: mend(found, self.sealing))
        left = {(each.session_id, each.where) for each in await link.transact_in_thread(wrong, snapshot=True)}
        return [each for each in found if (each.session_id, each.where) not in left]

    async def copy_out(self, deposit: Deposit) -> Outline:
        from perdure.stores.postgres.copying import copy_out

        return await self.opened.link.work_in_thread(partial(copy_out, deposit))

    def landing(self) -> Landing:
        from perdure.stores.postgres.copying import PostgresLanding

        made = partial(PostgresEngine, self._dsn, self._schema, self._pool, restoring=True)
        return PostgresLanding(self._dsn, self._schema, made)

    async def search(self, query: Query) -> Sequence[SearchHit]:
        from perdure.stores.postgres.search import search

        return await search(self.opened.link, query, self.sealing)

    async def named(self, message_id: str) -> Sequence[tuple[int, int]]:
        from perdure.stores.postgres.search import named

        return await named(self.opened.link, message_id, self.sealing)

    async def index(self, *, rebuild: bool, progress: Callable[[int, int], None] | None) -> int:
        from perdure.stores.postgres.search import index

        return await index(self.opened.link, self.sealing, rebuild=rebuild, progress=progress)


class _Open:
    """An open engine: its connections, and its tasks that write and listen."""

    def __init__(self, link: Link, sealing: Sealing) -> None:
        self.link = link
        self.looks = Looks(link)
        self.inbox = Inbox(link)
        self.writer = Writer(link, self.inbox, sealing)
        self.listener = Listener(link)
        self.statistics = Statistics(link)

    async def close(self) -> None:
        """Carry out what is waiting, and close the connections."""
        # The writer first: until it has ended, its orders still need the link.
        try:
            await self.writer.close()
            await self.looks.close()
        finally:
            self.link.closed = True
            await self.listener.close()
            await self.statistics.close()
            await self.link.close()


async def _load(connection: Connection, load: Load, sealing: Sealing) -> Loaded | None:
    """Read a session with one statement, and with a few more what the first did not fetch."""
    session_id = load.session_id
    asked = {"id": session_id, "version": load.version, "cold": load.known is None and load.last is None}
    rows = await fetched(connection, _LOAD, asked)
    if not rows:
        return None
    *numbers, newest, erasures, version, crc, body, hashes, bodies, logs, places, sums, said, last = rows[0]
    if not is_there(session_id, load.version, newest, last, version is not None):
        return None
    place = Place(*numbers)
    if sealing.is_on:
        body, crc = sealing.opened("head", body, crc)
        opened = [sealing.opened("msg", *each) for each in zip(said or (), sums or (), strict=True)]
        said, sums = [body for body, _ in opened], [crc for _, crc in opened]
    head = StoredHead(unpacked_head(body, crc, session_id, place.sid, version), session_id, version)
    values = await _values(connection, session_id, head, dict(zip(hashes or (), bodies or (), strict=True)), sealing)
    along = _stretches(session_id, zip(logs or (), places or (), sums or (), said or (), strict=True))
    tapes = load.tapes
    if along:  # not into the caller's own: that is added to only once all is read
        tapes = TapeCache("")
        for stretch in along:
            tapes.put(*stretch)
    for log, start, stop in tapes.missing(head.wanted(values, load.last)):
        job = read_messages(session_id, log, start, stop)
        along.append((log, start, await ask(connection, queries_of(job, None, sealing))))
    return Loaded(erasures, head, values, along, place)


async def _values(
    connection: Connection, session_id: str, head: StoredHead, known: dict[str, bytes], sealing: Sealing
) -> Values:
    """Return the values that a head names. Those that were not fetched along with it are read here."""
    values: Values = {}
    while wanted := [key for key in head.hashes(values) if key not in values]:
        missing = [key for key in wanted if key not in known]
        if missing:
            known |= dict(await fetched(connection, _VALUES, (missing,)))
        for key in wanted:
            body, _ = sealing.opened("value", known.get(key), name=key)
            values[key] = unpacked_value(session_id, key, body)
    return values


def _stretches(session_id: str, rows: Any) -> list[Any]:
    """Return the messages that came along with a head, in stretches."""
    stretches: list[tuple[int, int, list[Any]]] = []
    for log, pos, crc, body in sorted(rows):
        if stretches and stretches[-1][0] == log and stretches[-1][1] + len(stretches[-1][2]) == pos:
            stretches[-1][2].append((pos, crc, body))
        else:
            stretches.append((log, pos, [(pos, crc, body)]))
    return [(log, start, decoded(session_id, log, start, start + len(few), few)) for log, start, few in stretches]
