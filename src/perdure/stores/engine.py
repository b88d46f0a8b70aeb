"""The port between sessions and whatever keeps them: nineteen tables, six statements, one class to implement.

What a verb means is written once, in `jobs/`, as generators of row statements. An engine drives them: it carries out
each statement and sends its rows back. It knows tables, and nothing of sessions.
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
"""Conditions, all of which hold: `{"sid": 7, "pos >=": 3, "hash in": keys, "claim !=": None}`.

A key is a column, or a column and one of `=`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `ends`. None is compared as IS NULL.
`{"id ends": "4af2"}` is true of ids with this end, which has four characters or more. `{"inbox_end > taken": True}`
compares two columns of a row: those that a table names as a pair.
"""


class Table(msgspec.Struct, frozen=True):
    """A table: its columns, which of them make a row unique, and the ways in which rows are looked for."""

    columns: tuple[str, ...]
    unique: tuple[tuple[str, ...], ...]
    """The first of these is the key."""
    ways: tuple[tuple[str, ...], ...] = ()
    """Further columns that rows are found by, as an index would serve them."""
    number: str = ""
    """A column that the engine fills in with a number it has never given out before in this table."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Columns of which the first may be greater than the second. The rows where it is are few, and found by that."""


TABLES: Mapping[str, Table] = {
    # Two rows: the store's own id under `uid`, and under `erasures` how often something was erased.
    "meta": Table(("key", "value"), (("key",),)),
    # What lists filter by, how far the session's log, record and inbox go, and who runs it. `log` is its main log.
    # `spawned` is 1 for the session of a sub-agent, and else 0; `recent` is the minute of `updated`.
    # `line` is the number of the session that it was forked from, if what its first version shows of others is noted
    # there too. `priority` and `since` are of the items that wait in its inbox, and are set by a post alone.
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
    # What is large in a head, or the same in many, once; and which sessions' heads name it.
    "value": Table(("hash", "body"), (("hash",),)),
    "uses": Table(("hash", "sid"), (("hash", "sid"),), (("sid",),)),
    # What a session shows of others' logs. Its first version shows the rows without a `since`, and all that the first
    # version of its line shows; the others came with the version in `since`.
    "ref": Table(("log", "child", "start", "stop", "since"), (), (("log",), ("child",))),
    # The runs on a session's record: their first and last entry, and where their messages are.
    "run": Table(
        ("run", "sid", "loop", "first_seq", "last_seq", "log", "first_pos", "end_pos"),
        (("run",), ("sid", "loop")),
        (("sid", "first_seq"),),
        "run",
    ),
    # What one append puts on record, packed; `last` is the number of its last entry, `run` the run of most of them.
    "batch": Table(("sid", "last", "count", "run", "crc", "body"), (("sid", "last"),)),
    "inbox": Table(("sid", "seq", "run", "kind", "crc", "body"), (("sid", "seq"),)),
    "key": Table(("sid", "name", "digest", "version", "crc"), (("sid", "name"),)),
    # The text of an answer that is being written, piece by piece: where each starts, and what it says.
    "sketch": Table(("sid", "start", "crc", "body"), (("sid", "start"),)),
    # What is to go into a session's inbox at a time, by a name that is its own in the session.
    "timer": Table(("timer", "sid", "name", "due", "crc", "body"), (("timer",), ("sid", "name")), (), "timer"),
    # Rates that processes share: the time, in microseconds since 1970, up to which their places are taken.
    "rate": Table(("name", "until"), (("name",),)),
    # Access tokens of a service: never a secret, only its digest. The columns beside `body` say again what that says.
    "token": Table(("digest", "id", "owner", "crc", "body"), (("digest",), ("id",)), (("owner",),)),
}


class Select(msgspec.Struct, frozen=True):
    """Rows of a table. The answer is a list of tuples, in the order of `columns`."""

    table: str
    columns: tuple[str, ...]
    where: Where = EMPTY
    order: str = ""
    """Columns to sort by, with a `-` before those that go down: `"-created -sid"`."""
    limit: int | None = None
    again: bool = False
    """Look by another way than the first time, which found nothing: an index may be damaged."""
    lenient: bool = False
    """Leave bodies sealed whose key is not at hand: they are read as damaged, and keep nobody from the others."""


class Count(msgspec.Struct, frozen=True):
    """How many rows there are. The answer is `[(number,)]`."""

    table: str
    where: Where


class Insert(msgspec.Struct, frozen=True):
    """New rows. The answer has one row, with the number given to the last of them, if the table is numbered."""

    table: str
    columns: tuple[str, ...]
    rows: Iterable[Row]
    or_set: tuple[str, ...] | None = None
    """Where a row of the same key is there already: None is an error, () leaves it, columns are set in it."""
    whose: tuple[str, int | str] | None = None
    """The column and the number that say whose rows they are, where their own columns do not: `("sid", 7)`."""


class Update(msgspec.Struct, frozen=True):
    """Other values in rows: `{"taken": 5}`, or `{"version +": 1}` to add. The answer is `[(how many,)]`."""

    table: str
    values: Mapping[str, Any]
    where: Where


class Delete(msgspec.Struct, frozen=True):
    table: str
    where: Where


class Lock(msgspec.Struct, frozen=True):
    """Asked for by a job that writes, before it does: sessions that nobody else may change until it is done.

    An engine that runs one writer at a time has nothing to do. Others lock the sessions in one order for all: by their
    numbers, and then the gate. `alone` shuts the gate to those who `share` it: who erases, waits until nobody is about
    to use a value or to show a log, and they wait for him; so he shuts it as late as he can, and looks then whether
    what he has read before still holds.
    """

    session_ids: tuple[str, ...] = ()
    gate: Literal["", "share", "alone"] = ""
    owner: str | None = None
    """Whose items or claims are counted: nobody else counts them meanwhile. It is locked after the sessions."""


class Clock(msgspec.Struct, frozen=True):
    """The time that leases go by, in seconds since 1970. The answer is `[(time,)]`."""


class Later(msgspec.Struct, frozen=True):
    """Stands for the time of the clock and so many seconds more, as a value in Update."""

    seconds: float


class Pledge(msgspec.Struct, frozen=True):
    """What is being done, to be written down by an engine whose commit may be cut short in its middle.

    It is forgotten once the job is committed. What is left of one that was cut short is found by `gc`, and finished.
    """

    session_id: str
    body: bytes


class Interfered(Exception):
    """Raised by a job that others' writes have come in between of: it is to be begun again from the start.

    An engine that runs one writer at a time never meets it.
    """


Statement = Select | Count | Insert | Update | Delete | Lock | Clock | Pledge
Job = Generator[Statement, list[Any], T]
"""No I/O, no clock, no await: it may be driven anywhere, and again from the start if the engine was interrupted."""

Kind = Literal["glance", "read", "write", "erase"]


class Request(Protocol[T_co]):
    """Something asked of an engine that it may do in a quicker way than by driving the job."""

    def job(self) -> Job[T_co]: ...


class Change(Request[Any], Protocol):
    """A change to one session, or to several. `finish` is called with what came of it, though its caller may wait no
    more."""

    def finish(self, result: Any) -> Any: ...


class Fetch(Request[T_co | None], Protocol[T_co]):
    """A session asked for, of which something may be at hand."""

    @property
    def may_be_at_hand(self) -> bool: ...

    def is_current(self) -> Job[T_co | None]: ...


class Engine:
    """Keeps the tables. Three methods are enough; four more may be overridden where they can be quicker.

    Rows are written whole and last, or not at all; one who reads sees one state of all tables. A column that an engine
    protects by itself may be read as None where it is named `crc`; one that does not never reads None there.
    """

    origin: str = ""
    """The store's own id, once it is open: `uid` in the table `meta`. No two stores have the same."""
    key_of_log: type[int] | type[str] = int
    """The type of a log's number."""
    packs: bool = True
    """Whether bodies of rows are made smaller before they are written."""
    can_be_sealed: bool = False
    """Whether it drives jobs so that bodies may be sealed."""
    sealing: Sealing = Sealing()
    """What bodies of rows are sealed with. An engine that has keys drives jobs as `sealed_jobs.translated` has them."""

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, *_: object) -> None:
        raise NotImplementedError

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        """Drive a job, and return what it returns. `job` makes it, anew if it has to be begun again.

        `glance` and `read` see one state of the tables; a glance looks at a row or two, for whoever can do that at
        once. Where one state costs much, statements may be answered one by one, if a job that then raises CorruptRecord
        is driven again in one state: jobs notice what does not fit together. `write` is a transaction: if the job
        raises, nothing has changed. `erase` is a write after which nothing of what was deleted or replaced may be left
        anywhere. What is `long` computes between its statements, so that it should not be driven in an event loop's
        thread.
        """
        raise NotImplementedError

    async def commit(self, change: Change) -> Any:
        """Make a change to one session: a save, a claim, an append."""
        return await self.commit_all(change)

    async def commit_all(self, change: Change) -> Any:
        """Make a change to several sessions, all of it or nothing."""

        async def finished() -> Any:
            return change.finish(await self.run(change.job, "write"))

        return await finish_despite_cancel(finished())

    async def fetch(self, load: Fetch[T]) -> T | None:
        """Read a session; one that may be at hand is only looked at first."""
        if load.may_be_at_hand:
            found = await self.run(load.is_current, "glance")
            if found is not None:
                return found
        return await self.run(load.job)

    def is_as_known(self, load: Fetch[Any]) -> bool:
        """Tell whether a session is as it is known, without waiting; False if that takes a wait to find out."""
        return False

    async def page(self, page: Request[T]) -> T:
        """Read a page of a list."""
        return await self.run(page.job)

    async def faults(self) -> Sequence[Problem]:
        """Say what is wrong beneath the rows: with files, indexes, counters of the engine's own."""
        return ()

    async def mend(self, *, dry_run: bool) -> Sequence[Problem]:
        """Make anew what follows from rows, where `faults` finds it wrong, and return what was wrong.

        Each is one transaction. With `dry_run` nothing is changed.
        """
        return ()

    kind: str = ""
    """What a backup says it is of. An engine without one cannot be backed up."""

    async def copy_out(self, deposit: Deposit) -> Outline:
        """Put one state of everything into a deposit, while others read and write."""
        raise cannot_be_copied(self)

    def landing(self) -> Landing:
        """Return the place of this engine as one that a copy can be taken in at. The engine is not open."""
        raise cannot_be_copied(self)


def unfinished(path: Path) -> Path:
    """Return where a copy is taken in before it is put in the place of a path."""
    return path.with_name(path.name + "-restoring")


def cannot_be_copied(engine: Engine) -> ConfigurationError:
    kind = type(engine).__name__.removesuffix("Engine")
    return ConfigurationError(f"A {kind}Store cannot be backed up or restored. Export its sessions instead.")


class IndexedEngine(Engine):
    """An engine that searches, and finds messages by their ids, by an index."""

    async def search(self, query: Query) -> Sequence[SearchHit]:
        raise NotImplementedError

    async def named(self, message_id: str) -> Sequence[tuple[int | str, int]]:
        """Return the logs and positions at which messages of an id may stand; every one that is there is among them."""
        raise NotImplementedError

    async def index(self, *, anew: bool, progress: Callable[[int, int], None] | None) -> int:
        raise NotImplementedError


def drive(job: Job[T], answer: Callable[[Statement], list[Any]]) -> T:
    """Drive a job to its end, with `answer` carrying out its statements one by one.

    Damage that it meets is raised in the job, which may have something else to look at.
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
    """Return the columns to sort by, each with whether it goes down."""
    return [(column.removeprefix("-"), column.startswith("-")) for column in order.split()]
