"""The port's tables as this schema has them: statements as queries, and the columns and tables that follow from others.

`meta` has its rows as columns, two tables have a seal instead of a checksum, and texts contain no NUL. The tables
`claimed`, `waiting`, `word` and `unindexed` repeat what `session` and `msg` say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from msgspec.structs import replace

from perdure import codec
from perdure.model.ids import replaced_time
from perdure.stores.engine import (
    TABLES,
    Clock,
    Count,
    Delete,
    Insert,
    Interfered,
    Job,
    Lock,
    Pledge,
    Row,
    Select,
    Statement,
    T,
    Update,
    Where,
)
from perdure.stores.format import packing
from perdure.stores.format.blocks import names_in
from perdure.stores.format.heads import Head, is_block
from perdure.stores.postgres.link import Queries
from perdure.stores.sealed_jobs import Owner, translated
from perdure.stores.sealing import Sealing
from perdure.stores.sql import Adapter, Again, Dialect, Translator

PLAIN = Sealing()
GATE = 0x70657264
"""The advisory lock that an erasure takes alone, and that writers share while they use a value or a log."""
OWNERS = 0x7065726F
"""The advisory locks of owners whose items or claims are counted."""
OWNER_LOCK = "pg_advisory_xact_lock(%s, hashtext(current_schema() || '/' || %s::text))"
NOW = "extract(epoch FROM clock_timestamp())::double precision"
KEY_IS_SOUND = (
    "key.seal = hashtextextended(key.name, hashtextextended(key.digest, hashint8extended(key.version, key.sid)))"
    " AND key.name_hash = hashtextextended(key.name, key.sid)"
)
LOG_IS_SOUND = "log.seal = hashtextextended(log.name, hashint8extended(log.sid, log.log))"

_SEALED = {"key": KEY_IS_SOUND, "log": LOG_IS_SOUND}
_TEXTS = frozenset({"agent", "owner", "tag", "name", "loop", "kind", "digest"})
# A batch of changes locks rows in the same order, so that no two transactions wait for each other.
_LOCKED = "SELECT sid FROM session WHERE id = ANY (%s) ORDER BY sid FOR UPDATE"
_GATES = {
    "share": "SELECT pg_advisory_xact_lock_shared(%s, hashtext(current_schema()))",
    "alone": "SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))",
}
_CLAIM = "INSERT INTO claimed (sid) SELECT unnest(%s::bigint[]) ON CONFLICT DO NOTHING"
_FREE = "DELETE FROM claimed WHERE sid = ANY (%s::bigint[])"
_MESSAGE = ("log", "pos", "crc", "body")
_SAY = """
    INSERT INTO msg (log, pos, crc, body)
    SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bytea[])
"""
_ROWS_AT_ONCE = 1_000
_NOTE = "INSERT INTO unindexed (log, start, stop) SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[])"


def plain(text: str) -> str:
    """Return text as PostgreSQL can hold it, which is without NUL."""
    return text.replace("\\", "\\\\").replace("\x00", "\\0") if "\x00" in text or "\\" in text else text


def restored(stored: str) -> str:
    """Return the text that `plain` was given."""
    if "\\" not in stored:
        return stored
    return "\\".join(part.replace("\\0", "\x00") for part in stored.split("\\\\"))


def given_time() -> float | None:
    """Return the time that replaces the database's own, if one is set."""
    time = replaced_time()
    return None if time is None else time.timestamp()


class _Postgres(Dialect):
    mark = "%s"
    later = f"coalesce(%s::double precision, {NOW}) + %s"
    again = {"run": Again("run", {"loop": "loop || '' = %s"})}
    # OFFSET 0 makes the planner look the sessions up one by one, even if it takes the table for a small one.
    backdated = (
        "backdated CROSS JOIN LATERAL (SELECT * FROM session AS of WHERE of.sid = backdated.sid OFFSET 0) AS session"
    )

    def read(self, table: str, column: str) -> str:
        if column == "claim":
            return "convert_to(claim, 'UTF8')"
        if column == "crc" and table in _SEALED:
            return f"CASE WHEN {_SEALED[table]} THEN NULL ELSE -1 END"
        return column

    def adapter(self, table: str, column: str) -> Adapter | None:
        if column == "claim":
            return bytes.decode
        return plain if _is_text(table, column) else None

    def keeps(self, table: str, column: str) -> bool:
        if (table, column) == ("session", "recent"):
            return False  # the database computes it
        return column != "crc" or table not in _SEALED

    def among(self, column: str) -> str:
        return f"{column} = ANY (%s)"

    def ending(self, column: str) -> str:
        return f"right({column}, 4) = right(%s, 4) AND right({column}, length(%s)) = %s"

    def adapted_list(self, adapter: Adapter | None, values: Iterable[Any]) -> list[Any]:
        return [*values] if adapter is None else [adapter(value) for value in values]

    def moment(self, at: float | None, seconds: float) -> tuple[Any, ...]:
        return at, float(seconds)


def _is_text(table: str, column: str) -> bool:
    """Tell whether a column holds text that a user gives."""
    return column in _TEXTS or (table, column) == ("inbox", "run")


SQL = Translator(_Postgres())


class Heads:
    """The heads that a job writes, by session and version."""

    def __init__(self, sealing: Sealing) -> None:
        self.written: dict[tuple[int, int], Head] = {}
        self._sealing = sealing

    def add(self, sid: int, version: int, body: bytes) -> None:
        opened, _ = self._sealing.opened("head", body)
        self.written[sid, version] = codec.decode(Head, packing.unpack(opened))

    def names_in(self, name: str, body: bytes) -> list[str]:
        """Return the values that the value of a block names."""
        opened, _ = self._sealing.opened("value", body, name=name)
        return names_in(codec.decode_plain(packing.unpack(opened)))


class Locked(NamedTuple):
    """The sessions that a job has locked: the ids that it named, and the numbers of the rows that existed then."""

    ids: set[str]
    sids: set[int]

    def require(self, statement: Statement, rows: Sequence[Any]) -> None:
        """Raise Interfered if a row that a job reads is not the one that it has locked.

        A job that waits for an erasure locks nothing, since the row is gone. If the session was created again
        meanwhile, it has another row, which anyone may claim.
        """
        match statement:
            case Select("session", columns, {"id": session_id}) if session_id in self.ids and "sid" in columns:
                place = columns.index("sid")
                if any(row[place] not in self.sids for row in rows):
                    raise Interfered(f"session {session_id!r} was created while its row was waited for")
            case Insert("session"):
                self.sids.update(sid for (sid,) in rows)


def queries_of(job: Job[T], at: float | None, sealing: Sealing = PLAIN, owner: Owner | None = None) -> Queries[T]:
    """Return a job as queries. `at` is the time that replaces the server's, if there is one.

    With `owner`, all that it writes is that owner's.
    """
    job = translated(job, sealing, owner)
    heads = Heads(sealing)
    locked = Locked(set(), set())
    try:
        statement = next(job)
        while True:
            rows = yield from _answer(statement, at, heads, locked)
            locked.require(statement, rows)
            statement = job.send(rows)
    except StopIteration as done:
        result = done.value
    finally:
        job.close()
    if heads.written:
        yield from _name_values(heads)
    return result  # type: ignore[no-any-return]  # what a generator returns has no type here


def _name_values(heads: Heads) -> Queries[None]:
    """Note which values heads name, directly and by blocks, once all of these are written."""
    inner: dict[str, list[str]] = {}
    for (sid, version), head in heads.written.items():
        found = dict.fromkeys([head.definition, *head.hashed.values()])
        todo = [key for part, key in head.hashed.items() if is_block(part)]
        while todo:
            if unread := [key for key in todo if key not in inner]:
                rows = yield "SELECT hash, body FROM value WHERE hash = ANY (%s)", (unread,)
                inner |= {key: heads.names_in(key, body) for key, body in rows}
            todo = [name for key in todo for name in inner.get(key, ()) if name not in found]
            found |= dict.fromkeys(todo)
        yield "UPDATE head SET hashes = %s WHERE sid = %s AND version = %s", ([*found], sid, version)


def _answer(statement: Statement, at: float | None, heads: Heads, locked: Locked) -> Queries[list[Any]]:
    match statement:
        case Select():
            return (yield from _select(statement))
        case Count():
            return (yield SQL.count(statement))
        case Insert():
            return (yield from _insert(statement, heads))
        case Update():
            return (yield from _update(statement, at, heads))
        case Delete():
            yield from _delete(statement)
        case Lock(session_ids, gate, owner):
            if session_ids:
                ids = [str(each) for each in session_ids]
                locked.ids.update(ids)
                locked.sids.update(sid for (sid,) in (yield _LOCKED, (ids,)))
            if gate:
                yield _GATES[gate], (GATE,)
            if owner is not None:
                yield f"SELECT {OWNER_LOCK}", (OWNERS, plain(owner))
        case Clock():
            return [(at,)] if at is not None else (yield f"SELECT {NOW}", ())
        case Pledge():
            pass  # a commit is atomic, so nothing has to be pledged
    return []


def _select(asked: Select) -> Queries[list[Any]]:
    if asked.table == "meta":
        return (yield from _select_meta(asked))
    if (
        asked.again and asked.table == "key" and "name" in asked.where
    ):  # by the hash of its name, since the name or its index may be damaged
        read = SQL.select(replace(asked, where={}))[0]
        by_hash = f"{read} WHERE name_hash = hashtextextended(%s, %s::bigint)"
        return (yield by_hash, (plain(asked.where["name"]), asked.where["sid"]))
    text, values = SQL.select(asked)
    if asked.table == "session":
        text = _narrowed(text, asked.where)
    if "id ends" in asked.where:
        # Before it has statistics of the ends, the planner would rather walk all ids in their order.
        text = text.replace(" ORDER BY id", " ORDER BY id || ''", 1)
    rows = yield text, values
    texts = [place for place, column in enumerate(asked.columns) if _is_text(asked.table, column)]
    return [_with_texts(row, texts) for row in rows] if texts else rows


def _narrowed(text: str, where: Where) -> str:
    """Return a query of sessions that goes by `claimed` or `waiting`, if it asks for such sessions."""
    is_scan = "id" not in where and "sid" not in where
    if is_scan and where.get("claim !=", "") is None:  # no index is on the claim
        text = text.replace(" WHERE ", " WHERE sid IN (SELECT sid FROM claimed) AND ", 1)
    if is_scan and "inbox_end > taken" in where:
        text = text.replace(" WHERE ", " WHERE sid IN (SELECT sid FROM waiting) AND ", 1)
    return text


def _with_texts(row: Row, places: Sequence[int]) -> Row:
    found = list(row)
    for place in places:
        if type(found[place]) is str:
            found[place] = restored(found[place])
    return tuple(found)


def _select_meta(asked: Select) -> Queries[list[Any]]:
    kept = yield "SELECT uid, erasures FROM meta", ()
    rows = [{"key": key, "value": value} for row in kept for key, value in zip(("uid", "erasures"), row, strict=True)]
    wanted = asked.where.get("key")
    return [tuple(row[name] for name in asked.columns) for row in rows if wanted in (None, row["key"])]


def _insert(asked: Insert, heads: Heads) -> Queries[list[Any]]:
    """Write rows, some at a time. To build a list of 100,000 would stop every thread of the process for a while."""
    answer: list[Any] = [(None,)]
    noted = _Stretches()
    rows = iter(asked.rows)
    while some := [*islice(rows, _ROWS_AT_ONCE)]:
        answer = yield from _insert_some(replace(asked, rows=some), heads)
        if asked.table == "msg":
            log, pos = asked.columns.index("log"), asked.columns.index("pos")
            noted.add((row[log], row[pos]) for row in some)
    if noted.logs:
        yield noted.statement
    return answer


def _insert_some(asked: Insert, heads: Heads) -> Queries[list[Any]]:
    table, columns, rows = asked.table, asked.columns, [*asked.rows]
    if table == "msg" and asked.or_set is None and columns == _MESSAGE:
        yield _SAY, tuple(map(list, zip(*rows, strict=True)))
        return [(None,)]
    text, bound = SQL.insert(_completed(replace(asked, rows=rows)))
    answer: list[Any] = [(None,)]
    if TABLES[table].number or len(rows) == 1:
        for row in bound:
            answer = yield text, tuple(row)
    else:
        yield text, [*bound]
    if table == "head":
        sid, version, body = (columns.index(name) for name in ("sid", "version", "body"))
        for row in rows:
            heads.add(row[sid], row[version], row[body])
    if table == "session" and answer and rows[-1][columns.index("claim")] is not None:
        yield _CLAIM, ([answer[-1][0]],)
    return answer


def _completed(asked: Insert) -> Insert:
    """Return new rows with the columns that only this schema has."""
    table, columns, rows, or_set = asked.table, asked.columns, asked.rows, asked.or_set
    if table == "head":
        return Insert(table, (*columns, "op", "hashes"), [(*row, "", []) for row in rows], or_set)
    if table in ("session", "inbox"):
        return Insert(table, (*columns, "op"), [(*row, "") for row in rows], or_set)
    return asked


class _Stretches:
    """Stretches of logs that cover messages, which are noted as not indexed yet."""

    def __init__(self) -> None:
        self.logs: list[int] = []
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, places: Iterable[tuple[int, int]]) -> None:
        for log, pos in sorted(places):
            if self.logs and self.logs[-1] == log and self._stops[-1] == pos:
                self._stops[-1] += 1
            else:
                self.logs.append(log)
                self._starts.append(pos)
                self._stops.append(pos + 1)

    @property
    def statement(self) -> tuple[str, Any]:
        return _NOTE, (self.logs, self._starts, self._stops)


def _update(asked: Update, at: float | None, heads: Heads) -> Queries[list[Any]]:
    table, values, where = asked.table, asked.values, asked.where
    if table == "meta":
        ((key, value),) = values.items()
        sign = f"{where['key']} + " if key.endswith("+") else ""
        return (yield f"UPDATE meta SET {where['key']} = {sign}%s", (value,))
    if table in _SEALED and values.keys() == {"crc"}:
        return [(1,)]  # the database makes the seal
    if table == "head" and "body" in values:
        heads.add(where["sid"], where["version"], values["body"])
    if table == "msg" and "body" in values:  # a message with a new text is indexed again
        text, bound = SQL.delete(Delete("msg", where))
        gone = yield text.replace("DELETE FROM msg", "DELETE FROM word", 1) + " RETURNING log, pos", bound
        if gone:
            noted = _Stretches()
            noted.add(gone)
            yield noted.statement
    text, bound = SQL.update(asked, at)
    if table != "session" or "claim" not in values:
        return (yield text, bound)
    changed = yield f"{text} RETURNING sid", bound
    yield _FREE if values["claim"] is None else _CLAIM, ([sid for (sid,) in changed],)
    return [(len(changed),)]


def _delete(asked: Delete) -> Queries[None]:
    text, values = SQL.delete(asked)
    if asked.table == "session":
        gone = yield f"{text} RETURNING sid", values
        yield _FREE, ([sid for (sid,) in gone],)
    else:
        yield text, values  # the words of a message in the index go with it
