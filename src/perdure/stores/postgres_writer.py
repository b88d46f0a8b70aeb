"""One writer a process: the changes that wait go out together, as one statement on one connection.

While a batch is on its way the next one gathers; so a lone save goes at once, and a crowd shares a round trip and a
commit. A cancelled caller does not cancel its change: what was handed in is carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

import psycopg

from perdure.errors import ClaimLost, PerdureError, SessionNotFound, StoreError
from perdure.stores import postgres_patience as patience
from perdure.stores.cache import LRU
from perdure.stores.postgres_changes import Append, Change, Keep
from perdure.stores.postgres_link import GATE, Connection, Link, as_store_error, is_lost, is_passing
from perdure.stores.postgres_rows import Facts, Parcel, Place, plain

MOST_PER_BATCH = 256
_MOST_TRIES = 40
_PAUSE = 0.05

_WRITE = (files("perdure.stores") / "sql" / "postgres" / "write.sql").read_text()
_PLACES = "SELECT id, sid, log, msg_end, evt_end FROM session WHERE id = ANY (%s)"
_NUMBERS = (
    "SELECT nextval(pg_get_serial_sequence('session', 'sid')), nextval(pg_get_serial_sequence('log', 'log'))"
    " FROM generate_series(1, %s)"
)
_BRANCH = """
    WITH made AS (
        INSERT INTO log (sid, name)
        SELECT sid, %(name)s FROM session WHERE id = %(id)s AND epoch = %(epoch)s AND claim IS NOT NULL
        ON CONFLICT DO NOTHING RETURNING log
    )
    SELECT log, 0 FROM made
    UNION ALL
    SELECT log.log, (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = log.log)
    FROM log JOIN session ON session.sid = log.sid WHERE session.id = %(id)s AND log.name = %(name)s
"""
_LOCKED = "SELECT 1 FROM session WHERE id = %s FOR UPDATE"
_SHARED = "SELECT pg_advisory_xact_lock_shared(%s, hashtext(current_schema()))"
_REF = """
    SELECT EXISTS (
            SELECT 1 FROM ref WHERE child = %(sid)s AND log = %(log)s AND start <= %(start)s AND stop >= %(stop)s
        ),
        (SELECT session.sid FROM log JOIN session ON session.sid = log.sid WHERE log.log = %(log)s),
        (SELECT count(*) FROM msg WHERE log = %(log)s AND pos >= %(start)s AND pos < %(stop)s)
"""
_OP_OF_HEAD = (
    "SELECT head.op FROM head JOIN session ON session.sid = head.sid WHERE session.id = %s AND head.version = %s"
)


class Writer:
    """Carries out changes. `finish` is called with each answer in turn, though its caller may be gone."""

    def __init__(self, link: Link, finish: Callable[[Change, Any], Any]) -> None:
        self._link = link
        self._finish = finish
        self._waiting: list[Change] = []
        self._under_way: list[Change] = []
        self._task: asyncio.Task[None] | None = None
        self._places: LRU[str, Place] = LRU(4096)
        self._branches: LRU[tuple[str, str], tuple[int, int]] = LRU(4096)

    async def make(self, change: Change) -> Any:
        """What comes of a change, or the error that refused it."""
        self._link.check()
        self._queue([change])
        return await change.done

    def note(self, session_id: str, place: Place) -> None:
        """Where a session was seen to stand; what it knows itself may be newer, and is found out if it is not."""
        self._places.keep(session_id, place)

    def forget(self, session_id: str) -> None:
        self._places.pop(session_id, None)

    def _queue(self, changes: Iterable[Change]) -> None:
        self._waiting += changes
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="perdure writer")
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Answer those who wait, if somebody has cancelled the task, as a shutdown does that cancels all of them."""
        if task.cancelled():
            unanswered, self._waiting = [*self._under_way, *self._waiting], []
            self._fail(
                [change for change in unanswered if not change.is_settled],
                StoreError(
                    "The store's writer was cancelled before it had an answer. Whether this was written is not known: "
                    "load the session to see."
                ),
            )

    async def close(self) -> None:
        """Carry out what is waiting."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _serve(self) -> None:
        lost_since: float | None = None
        clock = asyncio.get_running_loop().time
        while self._waiting:
            batch = self._under_way = self._next_batch()
            try:
                await self._carry_out(batch)
                lost_since = None
            except Exception as error:  # around a request: without an answer those who wait would wait for ever
                lost_since = lost_since or clock()
                if is_lost(error) and clock() < lost_since + patience.PATIENCE:
                    left = [change for change in batch if not change.is_settled and change not in self._waiting]
                    self._waiting[:0] = left
                    await asyncio.sleep(_PAUSE)
                else:
                    self._fail([change for change in batch if change not in self._waiting], error)
        self._under_way = []

    def _next_batch(self) -> list[Change]:
        """Changes to different sessions; a second one to the same waits for what becomes of the first."""
        batch: list[Change] = []
        rest: list[Change] = []
        taken: set[str] = set()
        for change in self._waiting:
            if len(batch) < MOST_PER_BATCH and change.session_id not in taken:
                batch.append(change)
            else:
                rest.append(change)
            taken.add(change.session_id)
        self._waiting = rest
        return batch

    async def _carry_out(self, batch: list[Change]) -> None:
        async with self._link.connection() as connection:
            found = await self._located(connection, batch)
            careful = [(change, place) for change, place in found if change.refs(place)]
            together = [(change, place) for change, place in found if not change.refs(place)]
            if together:
                together.sort(key=lambda located: located[1].sid)  # the order in which their rows are locked
                await self._send(connection, together)
            for change, place in careful:
                await self._send_carefully(connection, change, place)

    async def _send(self, connection: Connection, batch: list[tuple[Change, Place]]) -> None:
        try:
            answers = await self._execute(connection, batch)
        except psycopg.Error as error:
            if is_lost(error):
                raise
            await self._after_failure(connection, batch, error)
            return
        await self._deliver(connection, [change for change, _ in batch], answers)

    async def _execute(self, connection: Connection, batch: list[tuple[Change, Place]]) -> list[Facts]:
        parcel = Parcel()
        for n, (change, place) in enumerate(batch):
            change.put_into(parcel, n, place)
        parameters = {**parcel.parameters(), "gate": GATE, "channel": self._link.channel}
        for change, _ in batch:
            change.tries += 1
        try:
            rows = await (await connection.execute(_WRITE, parameters, binary=True)).fetchall()
        except psycopg.Error as error:
            if is_lost(error):
                for change, _ in batch:
                    change.may_have_been_made = True
            raise
        return [Facts(*row) for row in rows]

    async def _after_failure(
        self, connection: Connection, batch: list[tuple[Change, Place]], error: psycopg.Error
    ) -> None:
        """Nothing of the batch was written. Alone, each finds out whether it was the one that is wrong."""
        if len(batch) > 1:
            for each in batch:
                await self._send(connection, [each])
            return
        ((change, _),) = batch
        self._forget(change)
        if (is_passing(error) or isinstance(error, psycopg.errors.UniqueViolation)) and change.tries < _MOST_TRIES:
            self._waiting.insert(0, change)
        else:
            self._fail([change], error)

    async def _deliver(self, connection: Connection, changes: list[Change], answers: list[Facts]) -> None:
        again = []
        for facts in answers:
            change = changes[facts.n]
            try:
                if facts.done or (change.may_have_been_made and await _was_made(connection, change, facts)):
                    self._answer(change, facts)
                    continue
                self._forget(change)
                change.refuse(facts)
                if change.tries >= _MOST_TRIES:
                    raise StoreError(f"Session {change.session_id!r} changes faster than it can be written. Try again.")
                if facts.sid is not None:
                    self._places.keep(change.session_id, facts.place)
                again.append(change)
            except psycopg.Error:
                raise
            except Exception as error:  # around a request: those that share its batch are not to suffer
                self._fail([change], error)
        self._waiting[:0] = again

    def _answer(self, change: Change, facts: Facts) -> None:
        result, place = change.made(facts)
        self._places.keep(change.session_id, place)
        if isinstance(change, Append) and (end := change.branch_end()) is not None:
            self._branches.keep((change.session_id, change.branch), end)
        result = self._finish(change, result)
        change.is_settled = True
        if not change.done.done():
            change.done.set_result(result)

    def _fail(self, changes: Iterable[Change], error: BaseException) -> None:
        for change in changes:
            failure = as_store_error(error)
            if change.may_have_been_made and not isinstance(error, PerdureError):
                failure = StoreError(
                    f"The connection to PostgreSQL was lost, and not made again in {patience.PATIENCE:g} s ({error}). "
                    "Whether this was written is not known: load the session to see."
                )
            if not change.done.done() and not change.is_settled:
                change.done.set_exception(failure)
            change.is_settled = True

    def _forget(self, change: Change) -> None:
        self._places.pop(change.session_id, None)
        if isinstance(change, Append):
            self._branches.pop((change.session_id, change.branch), None)
            change.branch_log = None

    async def _located(self, connection: Connection, batch: list[Change]) -> list[tuple[Change, Place]]:
        """The changes with where their sessions stand; those whose session is not there are refused at once."""
        unknown = [str(c.session_id) for c in batch if c.kind != "create" and c.session_id not in self._places]
        if unknown:
            for session_id, *numbers in await _fetch(connection, _PLACES, (unknown,)):
                self._places.keep(session_id, Place(*numbers))
        new = [change for change in batch if isinstance(change, Keep) and change.is_new and change.numbers is None]
        for change, numbers in zip(new, await _fetch(connection, _NUMBERS, (len(new),)) if new else [], strict=True):
            change.numbers = Place(*numbers)
        found = []
        for each in batch:
            place = each.numbers if isinstance(each, Keep) and each.is_new else self._places.recall(each.session_id)
            if place is None:
                self._fail([each], each.not_there())
            elif await self._has_branch(connection, each):
                found.append((each, place))
        return found

    async def _has_branch(self, connection: Connection, change: Change) -> bool:
        """Find the log of the branch that an append goes to, if it goes to one; False if the claim is lost."""
        if not isinstance(change, Append) or not change.branch:
            return True
        if change.branch_log is not None:  # sent before, and to be sent the same: its answer may have been lost
            return True
        key = (str(change.session_id), change.branch)
        known = self._branches.recall(key)
        if known is None:
            asked = {"id": key[0], "name": plain(change.branch), "epoch": change.claim.epoch}
            rows = await _fetch(connection, _BRANCH, asked)
            if not rows:
                self._fail([change], ClaimLost(change.session_id, change.claim.epoch))
                return False
            known = (rows[0][0], rows[0][1])
        change.branch_log = known
        return True

    async def _send_carefully(self, connection: Connection, change: Change, place: Place) -> None:
        """Write what names others' logs, while nobody can erase them."""
        assert isinstance(change, Keep)
        try:
            async with connection.transaction():
                await connection.execute(_LOCKED, (change.session_id,))
                await connection.execute(_SHARED, (GATE,))
                change.checked_refs = [
                    stretch for stretch in change.refs(place) if await _must_note(connection, change, place, stretch)
                ]
                answers = await self._execute(connection, [(change, place)])
        except SessionNotFound as error:
            self._fail([change], error)
        except psycopg.Error as error:
            if is_lost(error):
                change.may_have_been_made = True
                raise
            await self._after_failure(connection, [(change, place)], error)
        else:
            await self._deliver(connection, [change], answers)


async def _must_note(connection: Connection, change: Keep, place: Place, stretch: Any) -> bool:
    """Whether a stretch of a log is another session's and not noted yet; SessionNotFound if it is erased."""
    log, start, stop = stretch
    asked = {"sid": place.sid, "log": log, "start": start, "stop": stop}
    ((noted, owner, count),) = await _fetch(connection, _REF, asked)
    if owner is None and not noted and count != stop - start:
        raise SessionNotFound(change.session.info.parent_id or f"log {log}")
    return not noted and owner != place.sid


async def _was_made(connection: Connection, change: Change, facts: Facts) -> bool:
    """Whether a change that is refused now was made when it was sent before."""
    if facts.op == change.op:
        return True
    if not isinstance(change, Keep):
        return False
    return [(change.op,)] == await _fetch(connection, _OP_OF_HEAD, (str(change.session_id), change.version))


async def _fetch(connection: Connection, query: str, parameters: Any) -> list[Any]:
    return await (await connection.execute(query, parameters, binary=True)).fetchall()
