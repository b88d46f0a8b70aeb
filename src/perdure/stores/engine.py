"""The port between sessions and their storage: nineteen tables, eight statements, one class to implement.

The meaning of a verb is written once, in `jobs/`, as a generator of row statements. An engine drives it: it carries out
each statement and sends its rows back. It knows tables, and nothing about sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

import msgspec

from perdure.aio import finish_despite_cancel
from perdure.errors import ConfigurationError, CorruptRecord
from perdure.model.value import EMPTY
from perdure.protocols import Problem, SearchHit
from perdure.stores.sealing import Sealing

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit, Landing, Outline
    from perdure.stores.search import Query

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Row = tuple[Any, ...]
Where = Mapping[str, Any]
"""Conditions, all of which have to be true: `{"sid": 7, "pos >=": 3, "hash in": keys, "claim !=": None}`.

A key is a column, or a column and one of `=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `ends`. None is compared as IS NULL.
`{"id ends": "4af2"}` is true of ids with this end, which has four characters or more. `{"inbox_end > taken": True}`
compares two columns of a row, which the table names as a pair.
"""


class Table(msgspec.Struct, frozen=True):
    """A table: its columns, those that make a row unique, and the ways in which rows are looked for."""

    columns: tuple[str, ...]
    unique: tuple[tuple[str, ...], ...]
    """The first of these is the key."""
    ways: tuple[tuple[str, ...], ...] = ()
    """Further columns that rows are found by, as an index would serve them."""
    number: str = ""
    """A column that the engine fills in with a number it has never given out before in this table."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs of columns: rows in which the first is greater than the second are few, and are found by that."""


TABLES: Mapping[str, Table] = {
    # Two rows: the store's own id under `uid`, and under `erasures` the number of erasures so far.
    "meta": Table(("key", "value"), (("key",),)),
    # The columns that lists filter by, the ends of the session's log, record and inbox, and its claim. `log` is its
    # main log. `spawned` is 1 for the session of a sub-agent, and else 0; `recent` is the minute of `updated`.
    # `line` is the number of the session that it was forked from, if what its first version shows of others is noted
    # there too. `priority` and `since` are of the items that wait in its inbox. Only a post sets them.
    "session": Table(
        (
            *("sid", "id", "log", "version", "status", "agent", "owner", "parent", "created", "updated"),
            *("spawned", "recent", "msg_end", "evt_end", "inbox_end", "taken", "epoch", "claim", "expires", "line"),
            *("priority", "since"),
        ),
        (("sid",), ("id",)),
        (("agent",), ("owner",), ("parent",), ("status",), ("created",), ("line",)),
        "sid",
        (("inbox_end", "taken"),),
    ),
    "tag": Table(("tag", "sid"), (("tag", "sid"),), (("sid",),)),
    # A log of messages: the main one of a session has the name "", that of a branch its loop's id.
    "log": Table(("log", "sid", "name", "crc"), (("log",), ("sid", "name")), (), "log"),
    "msg": Table(("log", "pos", "crc", "body"), (("log", "pos"),)),
    # Images and files, each once under the SHA-256 of its bytes; and the messages that show it. A position below 0 is
    # that of an item in the inbox of the log's session: -3 is the third.
    "blob": Table(("hash", "size", "body"), (("hash",),)),
    "attached": Table(("hash", "log", "pos"), (("log", "pos", "hash"),), (("hash", "log"),)),
    # One row for each version of a session.
    "head": Table(("sid", "version", "crc", "body"), (("sid", "version"),)),
    # Parts of heads that are large, or the same in many heads, each once; and the sessions whose heads name them.
    "value": Table(("hash", "body"), (("hash",),)),
    "uses": Table(("hash", "sid"), (("hash", "sid"),), (("sid",),)),
    # The stretches of others' logs that a session shows. Its first version shows the rows without a `since`, and all
    # that the first version of its line shows. Each other row came with the version in `since`.
    "ref": Table(("log", "child", "start", "stop", "since"), (), (("log",), ("child",))),
    # The runs on a session's record: their first and last entry, and where their messages are.
    "run": Table(
        ("run", "sid", "loop", "first_seq", "last_seq", "log", "first_pos", "end_pos"),
        (("run",), ("sid", "loop")),
        (("sid", "first_seq"),),
        "run",
    ),
    # The entries that one append puts on record, packed. `last` is the number of the last, `run` the run of most.
    "batch": Table(("sid", "last", "count", "run", "crc", "body"), (("sid", "last"),)),
    "inbox": Table(("sid", "seq", "run", "kind", "crc", "body"), (("sid", "seq"),)),
    "key": Table(("sid", "name", "digest", "version", "crc"), (("sid", "name"),)),
    # The text of an answer that is being written, in pieces, each with the place at which it starts.
    "sketch": Table(("sid", "start", "crc", "body"), (("sid", "start"),)),
    # Items that go into a session's inbox at a given time. Each name is used once in a session.
    "timer": Table(("timer", "sid", "name", "due", "crc", "body"), (("timer",), ("sid", "name")), (), "timer"),
    # Rates that processes share: the time, in microseconds since 1970, up to which their places are taken.
    "rate": Table(("name", "until"), (("name",),)),
    # Access tokens of a service: never a secret, only its digest. `body` has all that the other columns have.
    "token": Table(("digest", "id", "owner", "crc", "body"), (("digest",), ("id",)), (("owner",),)),
}


class Select(msgspec.Struct, frozen=True):
    """Rows of a table. The answer is a list of tuples, in the order of `columns`."""

    table: str
    columns: tuple[str, ...]
    where: Where = EMPTY
    order: str = ""
    """Columns to sort by, with a `-` before descending ones: `"-created -sid"`."""
    limit: int | None = None
    again: bool = False
    """Search in another way than the first time, which found nothing. An index may be damaged."""
    lenient: bool = False
    """Leave bodies sealed if their key is not at hand. They are read as damaged, and the others can still be read."""


class Count(msgspec.Struct, frozen=True):
    """The number of rows. The answer is `[(number,)]`."""

    table: str
    where: Where


class Insert(msgspec.Struct, frozen=True):
    """New rows. The answer has one row, with the number given to the last of them, if the table is numbered."""

    table: str
    columns: tuple[str, ...]
    rows: Iterable[Row]
    or_set: tuple[str, ...] | None = None
    """For a row whose key is there already: None is an error, () leaves that row, columns are set in it."""
    whose: tuple[str, int | str] | None = None
    """The column and the number of the rows' owner, where their own columns do not say: `("sid", 7)`."""


class Update(msgspec.Struct, frozen=True):
    """New values in rows: `{"taken": 5}`, or `{"version +": 1}` to add. The answer is `[(number of rows,)]`."""

    table: str
    values: Mapping[str, Any]
    where: Where


class Delete(msgspec.Struct, frozen=True):
    table: str
    where: Where


class Lock(msgspec.Struct, frozen=True):
    """Sessions that nobody else may change until the job is done. A job sends it before it writes.

    An engine that runs one writer at a time has nothing to do. Other engines lock in one order for all jobs: the
    sessions by their numbers, then the gate. `alone` shuts the gate to jobs that `share` it. A job that erases shuts
    it, and so waits for all jobs that are about to use a value or to show a log. Such jobs then wait for the
    erasure. So it shuts the gate as late as it can, and then checks again what it has read before.
    """

    session_ids: tuple[str, ...] = ()
    gate: Literal["", "share", "alone"] = ""
    owner: str | None = None
    """The owner whose items or claims are counted. Nobody else counts them meanwhile. Locked after the sessions."""


class Clock(msgspec.Struct, frozen=True):
    """The time by which leases are measured, in seconds since 1970. The answer is `[(time,)]`."""


class Later(msgspec.Struct, frozen=True):
    """A value in Update: the time of the clock plus `seconds`."""

    seconds: float


class Pledge(msgspec.Struct, frozen=True):
    """A note of the work in progress. An engine writes it if its commits can be interrupted half-way.

    The note is removed once the job is committed. If a commit was cut short, `gc` finds the note and finishes the work.
    """

    session_id: str
    body: bytes


class Interfered(Exception):
    """Raised by a job when others have written in between. The engine has to start the job again.

    An engine that runs one writer at a time never sees it.
    """


Statement = Select | Count | Insert | Update | Delete | Lock | Clock | Pledge
Job = Generator[Statement, list[Any], T]
"""A generator without I/O, clock or await. It may be driven anywhere, and again from the start after a conflict."""

Kind = Literal["glance", "read", "write", "erase"]


class Request(Protocol[T_co]):
    """A request that an engine may answer faster than by driving the job."""

    def job(self) -> Job[T_co]: ...


class Change(Request[Any], Protocol):
    """A change to one session, or to several. `finish` is called with its result, even if its caller was cancelled."""

    def finish(self, result: Any) -> Any: ...


class Fetch(Request[T_co | None], Protocol[T_co]):
    """A request for a session that may be at hand already."""

    @property
    def may_be_at_hand(self) -> bool: ...

    def is_current(self) -> Job[T_co | None]: ...


class Engine:
    """The keeper of the tables. Three methods are enough; others may be overridden if they can be faster.

    Rows are written whole and durably, or not at all. A reader sees one state of all tables. An engine that protects
    a table's rows by itself may return None for the column `crc`. Any other engine never returns None there.
    """

    origin: str = ""
    """The store's own id, once it is open: `uid` in the table `meta`. No two stores have the same."""
    key_of_log: type[int] | type[str] = int
    """The type of a log's number."""
    packs: bool = True
    """True if bodies of rows are made smaller before they are written."""
    can_be_sealed: bool = False
    """True if it drives jobs in a way that lets bodies be sealed."""
    sealing: Sealing = Sealing()
    """The keys that bodies of rows are sealed with. An engine with keys drives jobs by `sealed_jobs.translated`."""

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, *_: object) -> None:
        raise NotImplementedError

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        """Drive a job, and return its result. `job` makes the generator, and is called again for each new start.

        `glance` and `read` see one state of the tables. A glance looks at a row or two, which some engines can do at
        once. Where one state costs much, an engine may answer statements one by one. Jobs notice rows that do not fit
        together, so a job that then raises CorruptRecord has to be driven again in one state. `write` is a
        transaction: if the job raises, nothing has changed. `erase` is a write after which no trace of the deleted or
        replaced rows may be left anywhere. A `long` job computes between its statements, so an event loop's thread
        should not drive it.
        """
        raise NotImplementedError

    async def commit(self, change: Change) -> Any:
        """Make a change to one session: a save, a claim, an append."""
        return await self.commit_all(change)

    async def commit_all(self, change: Change) -> Any:
        """Make a change to several sessions, whole or not at all."""

        async def finished() -> Any:
            return change.finish(await self.run(change.job, "write"))

        # A cancelled caller's change was still written: the sessions at hand have to show it.
        return await finish_despite_cancel(finished())

    async def fetch(self, load: Fetch[T]) -> T | None:
        """Read a session. If it may be at hand, first look only whether that is still current."""
        if load.may_be_at_hand:
            found = await self.run(load.is_current, "glance")
            if found is not None:
                return found
        return await self.run(load.job)

    def is_as_known(self, load: Fetch[Any]) -> bool:
        """Tell whether a session at hand is current, without waiting. Return False if that would take a wait."""
        return False

    async def page(self, page: Request[T]) -> T:
        """Read a page of a list."""
        return await self.run(page.job)

    async def faults(self) -> Sequence[Problem]:
        """Return the damage below the rows: in files, indexes and counters of the engine."""
        return ()

    async def mend(self, *, dry_run: bool) -> Sequence[Problem]:
        """Rebuild what can be derived from rows and `faults` finds wrong. Return what was wrong.

        Each repair is one transaction. With `dry_run` nothing is changed.
        """
        return ()

    kind: str = ""
    """The name of this engine in a backup. An engine without one cannot be backed up."""

    async def copy_out(self, deposit: Deposit) -> Outline:
        """Put one state of everything into a deposit, while others read and write."""
        raise cannot_be_copied(self)

    def landing(self) -> Landing:
        """Return the place of this engine as a landing for a copy. The engine is not open."""
        raise cannot_be_copied(self)


def unfinished(path: Path) -> Path:
    """Return the path at which a copy is taken in before it is renamed to `path`."""
    return path.with_name(path.name + "-restoring")


def cannot_be_copied(engine: Engine) -> ConfigurationError:
    kind = type(engine).__name__.removesuffix("Engine")
    return ConfigurationError(f"A {kind}Store cannot be backed up or restored. Export its sessions instead.")


class IndexedEngine(Engine):
    """An engine with an index, by which it searches and finds messages by their ids."""

    async def search(self, query: Query) -> Sequence[SearchHit]:
        raise NotImplementedError

    async def named(self, message_id: str) -> Sequence[tuple[int | str, int]]:
        """Return the logs and positions at which a message may have this id. None that has it is left out."""
        raise NotImplementedError

    async def index(self, *, rebuild: bool, progress: Callable[[int, int], None] | None) -> int:
        raise NotImplementedError


def drive(job: Job[T], answer: Callable[[Statement], list[Any]]) -> T:
    """Drive a job to its end, with `answer` carrying out its statements one by one.

    Damage is raised inside the job, which may be able to find what it needs in another way.
    """
    try:
        statement = next(job)
        while True:
            try:
                rows = answer(statement)
            except CorruptRecord as damage:
                statement = job.throw(damage)
            else:
                statement = job.send(rows)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here
    finally:
        job.close()


@cache
def condition_of(key: str) -> tuple[str, str]:
    """Return the column and the operator of a condition."""
    column, _, operator = key.partition(" ")
    return column, operator or "="


@cache
def pair_of(key: str) -> tuple[str, str] | None:
    """Return the two columns that a condition compares; None if it compares a column with a value."""
    first, greater, second = key.partition(" > ")
    return (first, second) if greater else None


def order_of(order: str) -> Sequence[tuple[str, bool]]:
    """Return the columns to sort by, each with True if its order is descending."""
    return [(column.removeprefix("-"), column.startswith("-")) for column in order.split()]
