"""One writer for each process: the changes that wait go out together, as one statement.

While a batch is on its way, the next one gathers. So a single save goes at once, and many share a round trip and a
commit. A large number is split over two connections, so that one half is prepared while the server writes the other.
What may take long goes aside, on a connection of its own. That is a change to a session that another client has locked,
or one that names others' logs. A cancelled caller does not cancel its change: what was handed in is carried out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

import psycopg

from perdure.errors import (
    ClaimLost,
    ErasedMeanwhile,
    InvalidData,
    OwnerBusy,
    PerdureError,
    SessionNotFound,
    StoreError,
)
from perdure.stores.cache import LRU
from perdure.stores.engine import Job, Lock
from perdure.stores.format.rows import Stretch
from perdure.stores.jobs.attachments import require_reachable
from perdure.stores.jobs.claiming import Facts, count_of_erasures
from perdure.stores.jobs.lines import noted
from perdure.stores.jobs.saving import Append, Change, Keep, Place, Take, borrowed_by
from perdure.stores.postgres import link as lines
from perdure.stores.postgres.inbox import Inbox
from perdure.stores.postgres.link import Connection, Line, Link, as_store_error, ask, fetched, is_lost, is_passing
from perdure.stores.postgres.orders import Answer, Order
from perdure.stores.postgres.parcel import Parcel
from perdure.stores.postgres.rows import plain, queries_of
from perdure.stores.sealing import Sealing

MOST_PER_BATCH = 32
_MOST_TRIES = 40
_PAUSE = 0.05
# Numbers are fetched ahead, so that not every new session costs a round trip for its own.
_NUMBERS_AT_ONCE = 16

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
_OP_OF_HEAD = (
    "SELECT head.op FROM head JOIN session ON session.sid = head.sid WHERE session.id = %s AND head.version = %s"
)


class _Lane:
    """A connection for batches, the task that sends them, and the batch on its way."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.task: asyncio.Task[None] | None = None
        self.under_way: list[Order] = []

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()


class Writer:
    """A writer of changes. Each change gets its result, even if its caller is gone."""

    def __init__(self, link: Link, inbox: Inbox, sealing: Sealing) -> None:
        self._link = link
        self._sealing = sealing
        self._inbox = inbox
        self._waiting: list[Order] = []
        self._lanes = [_Lane(line) for line in link.writing]
        self._aside: dict[str, Order] = {}
        """The changes that are made on connections of their own, by session."""
        self._tasks_aside: set[asyncio.Task[None]] = set()
        self._places: LRU[str, Place] = LRU(4096)
        self._branches: LRU[tuple[str, str], tuple[int, int]] = LRU(4096)
        self._numbers: list[Place] = []
        """Numbers for new sessions. Those that are left when the store is closed are never used."""

    async def make(self, change: Change) -> Any:
        """Return the result of a change, or raise the error that refused it."""
        self._link.check()
        order = Order(change, self._sealing)
        self._waiting.append(order)
        self._start()
        return await order.done

    def _start(self) -> None:
        """Let a lane take what waits: at once if all lanes are idle, and one more when a batch is full."""
        idle = [lane for lane in self._lanes if not lane.is_busy]
        if idle and (len(idle) == len(self._lanes) or len(self._waiting) >= MOST_PER_BATCH):
            self._run(idle[0])

    def _run(self, lane: _Lane) -> None:
        lane.task = asyncio.get_running_loop().create_task(self._serve(lane), name="perdure writer")
        lane.task.add_done_callback(lambda task: self._ended(task, lane))

    def note(self, session_id: str, place: Place) -> None:
        """Note where a session's log and record were seen to end. If they have grown, the next change finds out."""
        self._places.keep(session_id, place)

    def _ended(self, task: asyncio.Task[None], lane: _Lane) -> None:
        """Answer the waiting callers if the task was cancelled, as in a shutdown that cancels all tasks."""
        if task.cancelled():
            unanswered, lane.under_way = lane.under_way, []
            if not any(other.is_busy for other in self._lanes):
                unanswered, self._waiting = [*unanswered, *self._waiting], []
            self._fail_cancelled(order for order in unanswered if self._is_here(order))

    def _fail_cancelled(self, orders: Iterable[Order]) -> None:
        self._fail(
            orders,
            StoreError(
                "The store's writer was cancelled before it had an answer. Whether this was written is not known: "
                "load the session to see."
            ),
        )

    async def close(self) -> None:
        """Carry out what is waiting."""
        while under_way := {lane.task for lane in self._lanes if lane.task and lane.is_busy} | self._tasks_aside:
            await asyncio.wait(under_way)

    async def _serve(self, lane: _Lane) -> None:
        lost_since: float | None = None
        clock = asyncio.get_running_loop().time
        while batch := self._next_batch(lane):
            if len(batch) == MOST_PER_BATCH and (
                idle := next((each for each in self._lanes if not each.is_busy), None)
            ):
                self._run(idle)
            try:
                await self._carry_out(batch, lane)
                lost_since = None
            except Exception as error:  # around a request: without an answer its callers would wait for ever
                lost_since = lost_since or clock()
                left = [order for order in batch if order not in self._waiting and self._is_here(order)]
                # Queued again at the head, so that no later change to the same session overtakes it.
                if is_lost(error) and clock() < lost_since + lines.PATIENCE:
                    self._waiting[:0] = [order for order in left if not order.is_settled]
                    await asyncio.sleep(_PAUSE)
                else:
                    self._fail(left, error)

    def _is_here(self, order: Order) -> bool:
        """Tell whether a change is made by a lane, and not aside."""
        return self._aside.get(order.session_id) is not order

    def _next_batch(self, lane: _Lane) -> list[Order]:
        """Return changes to different sessions. A second one to the same session waits for the first."""
        batch: list[Order] = []
        rest: list[Order] = []
        lane.under_way = batch
        taken = set(self._aside)
        taken.update(order.session_id for each in self._lanes for order in each.under_way if not order.is_settled)
        for order in self._waiting:
            if len(batch) < MOST_PER_BATCH and order.session_id not in taken:
                batch.append(order)
            else:
                rest.append(order)
            taken.add(order.session_id)
        self._waiting = rest
        return batch

    async def _carry_out(self, batch: list[Order], lane: _Lane) -> None:
        async with lane.line.connection() as connection:
            found = await self._located(connection, batch)
            together = []
            for order in found:
                if order.needs_care:
                    self._set_aside(order)
                else:
                    together.append(order)
            if together:
                # Their rows are locked in this order. Jobs lock by the same, so that no two wait for each other.
                together.sort(key=lambda order: order.place.sid)
                await self._send(connection, together)

    def _set_aside(self, order: Order) -> None:
        """Make a change on a connection of its own, where it does not hold up others."""
        self._aside[order.session_id] = order
        task = asyncio.get_running_loop().create_task(self._make_aside(order), name="perdure writer aside")
        self._tasks_aside.add(task)
        task.add_done_callback(lambda task: self._ended_aside(task, order))

    def _ended_aside(self, task: asyncio.Task[None], order: Order) -> None:
        self._tasks_aside.discard(task)
        if self._aside.get(order.session_id) is order:
            del self._aside[order.session_id]
        if task.cancelled():
            self._fail_cancelled([order])
        if self._waiting:
            self._start()

    async def _make_aside(self, order: Order) -> None:
        try:
            async with self._link.connection() as connection:
                if order.needs_care:
                    await self._send_carefully(connection, order)
                else:
                    await self._send(connection, [order], waits=True)
        except Exception as error:  # around a request: without an answer its caller would wait for ever
            if is_lost(error) and order.tries < _MOST_TRIES:
                self._waiting.insert(0, order)  # if the server stays unreachable, a lane finds out
            else:
                self._fail([order], error)

    async def _send(self, connection: Connection, batch: list[Order], *, waits: bool = False) -> None:
        """Send changes. Unless `waits` is set, changes to locked sessions go aside."""
        try:
            answers = await self._execute(connection, batch, waits=waits)
        except psycopg.Error as error:
            if is_lost(error):
                raise
            await self._after_failure(connection, batch, error, waits=waits)
            return
        await self._deliver(connection, batch, answers)

    async def _execute(self, connection: Connection, batch: list[Order], *, waits: bool) -> list[Answer]:
        parcel = Parcel()
        for n, order in enumerate(batch):
            order.put_into(parcel, n)
            order.tries += 1
        statement, values = parcel.statement(self._link.channel, waits=waits)
        try:
            return [Answer(*row) for row in await fetched(connection, statement, values)]
        except psycopg.Error as error:
            if is_lost(error):  # the server may have committed before the answer was lost
                for order in batch:
                    order.may_have_been_made = True
            raise

    async def _after_failure(
        self, connection: Connection, batch: list[Order], error: psycopg.Error, *, waits: bool
    ) -> None:
        """Send the changes of a failed batch one by one, to find the one that is wrong. None of them was written."""
        if len(batch) > 1:
            for each in batch:
                await self._send(connection, [each], waits=waits)
            return
        (order,) = batch
        self._forget(order)
        if is_passing(error) and order.tries < _MOST_TRIES:
            self._waiting.insert(0, order)
        else:
            self._fail([order], error)

    async def _deliver(self, connection: Connection, batch: list[Order], answers: list[Answer]) -> None:
        again = []
        for answer in answers:
            order = batch[answer.n]
            try:
                if answer.done or (order.may_have_been_made and await _was_made(connection, order.change, answer)):
                    self._answer(order, answer)
                elif answer.passed_over:
                    self._set_aside(order)
                else:
                    order.may_have_been_made = False  # it was not made, so it may be sent with another place
                    self._refuse(order, answer.facts)
                    again.append(order)
            except psycopg.Error:
                raise
            except Exception as error:  # around a request: the others in its batch must not fail with it
                self._fail([order], error)
        self._waiting[:0] = again

    def _refuse(self, order: Order, facts: Facts) -> None:
        """Raise the reason for which a change was refused. Return if only its place was outdated: it is sent again."""
        self._forget(order)
        order.refuse(facts)
        if order.tries >= _MOST_TRIES:
            raise StoreError(f"Session {order.session_id!r} changes faster than it can be written. Try again.")
        if facts.sid is not None:
            self._places.keep(order.session_id, Place(facts.sid, facts.log, facts.msg_end, facts.evt_end))

    def _answer(self, order: Order, answer: Answer) -> None:
        result, place = order.made(answer)
        self._places.keep(order.session_id, place)
        if answer.sid is not None:
            self._inbox.note(order.session_id, answer.sid, answer.inbox_end)
        if (end := order.branch_end()) is not None:
            self._branches.keep((order.session_id, order.branch), end)
        result = order.change.finish(result)
        order.is_settled = True
        if not order.done.done():
            order.done.set_result(result)

    def _fail(self, orders: Iterable[Order], error: BaseException) -> None:
        for order in orders:
            failure = as_store_error(error)
            if order.may_have_been_made and not isinstance(error, PerdureError):
                failure = StoreError(
                    f"The connection to PostgreSQL was lost, and not made again in {lines.PATIENCE:g} s ({error}). "
                    "Whether this was written is not known: load the session to see."
                )
            if not order.done.done() and not order.is_settled:
                order.done.set_exception(failure)
            order.is_settled = True

    def _forget(self, order: Order) -> None:
        self._places.pop(order.session_id, None)
        self._branches.pop((order.session_id, order.branch), None)
        order.branch_log = None

    async def _located(self, connection: Connection, batch: list[Order]) -> list[Order]:
        """Find where sessions' logs and records end. Return the changes to existing sessions, refuse the others."""
        unknown = [each.session_id for each in batch if not each.is_new and each.session_id not in self._places]
        if unknown:
            for session_id, *numbers in await fetched(connection, _PLACES, (unknown,)):
                self._places.keep(session_id, Place(*numbers))
        new = [order for order in batch if order.is_new and order.numbers is None]
        while len(new) > len(self._numbers):  # another lane may take some of them in the meantime
            rows = await fetched(connection, _NUMBERS, (len(new) - len(self._numbers) + _NUMBERS_AT_ONCE,))
            self._numbers += [Place(*row) for row in rows]
        for order in new:
            order.numbers = self._numbers.pop(0)
        found = []
        for order in batch:
            place = order.numbers if order.is_new else self._places.recall(order.session_id)
            if order.may_have_been_made and order.place.sid:
                place = order.place  # sent again unchanged: a newer place may already include the change itself
            try:
                if place is None:
                    order.refuse(Facts())
                    raise SessionNotFound(order.session_id)
                order.place = place
                await self._find_branch(connection, order)
                found.append(order)
            except PerdureError as error:
                self._fail([order], error)
        return found

    async def _find_branch(self, connection: Connection, order: Order) -> None:
        """Find the log of the branch that an append goes to, if there is one. Raise ClaimLost if the claim is lost."""
        change = order.change
        if not isinstance(change, Append) or not change.branch:
            return
        if order.branch_log is not None:  # sent before, so it is sent the same: its answer may have been lost
            return
        known = self._branches.recall((order.session_id, change.branch))
        if known is None:
            asked = {"id": order.session_id, "name": plain(change.branch), "epoch": change.claim.epoch}
            rows = await fetched(connection, _BRANCH, asked)
            if not rows:
                raise ClaimLost(change.session_id, change.claim.epoch)
            known = (rows[0][0], rows[0][1])
        order.branch_log = known

    async def _send_carefully(self, connection: Connection, order: Order) -> None:
        """Write a change that names others' logs, or files that it does not bring, while these cannot be erased.

        A claim is written while no other process counts the claims of its owner.
        """
        try:
            async with connection.transaction():
                noting = queries_of(_must_be_noted(order), order.at, self._sealing)
                order.refs = await ask(connection, noting)
                answers = await self._execute(connection, [order], waits=True)
        except (SessionNotFound, ErasedMeanwhile, InvalidData, OwnerBusy) as error:
            self._fail([order], error)
        except psycopg.Error as error:
            if is_lost(error):
                order.may_have_been_made = True
                raise
            await self._after_failure(connection, [order], error, waits=True)
        else:
            await self._deliver(connection, [order], answers)


def _must_be_noted(order: Order) -> Job[list[Stretch]]:
    """Return the stretches that are not noted yet, of others' logs or of its own.

    Raise SessionNotFound if one is erased, and OwnerBusy if a claim is one too many. Raise InvalidData if a message
    names a file that is not the session's.
    """
    change = order.change
    yield Lock((change.session_id,), "share")
    if isinstance(change, Take) and not order.may_have_been_made:  # a claim that was made would count against itself
        yield from change.require_seat()
    shown: Collection[Stretch] = ()
    stretches: list[Stretch] = []
    if isinstance(change, Keep):
        erasures = yield from count_of_erasures()
        if not order.may_have_been_made:  # otherwise an erasure after its creation would refuse it
            change.require_unerased(erasures)
        stretches = yield from change.regained(order.draft)
        shown = order.draft.named
        stretches += (yield from change.unnoted(order.draft, erasures)) if order.draft.new_refs else []
    if hashes := borrowed_by(change):
        shown = shown or (yield from noted(change.session_id, order.place.sid))
        yield from require_reachable(change.session_id, order.place.sid, hashes, shown)
    return stretches


async def _was_made(connection: Connection, change: Change, answer: Answer) -> bool:
    """Tell whether a change that is refused now was made when it was sent the first time."""
    if answer.op == change.op:
        return True
    if not isinstance(change, Keep):
        return False
    return [(change.op,)] == await fetched(connection, _OP_OF_HEAD, (str(change.session_id), change.version))
