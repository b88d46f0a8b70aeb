"""The desk that carries out jobs: the rows of the logs that a job asks for, as their files are now.

A log is checked once in a job. Its rows are kept from job to job while the log only grows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from zlib import crc32

from perdure.errors import CorruptRecord, UnreadableFile
from perdure.model.session import AgentSession
from perdure.stores.engine import (
    Clock,
    Count,
    Delete,
    Insert,
    Kind,
    Later,
    Lock,
    Pledge,
    Select,
    Statement,
    Update,
    Where,
    drive,
)
from perdure.stores.file import hints
from perdure.stores.file.directory import Directory, is_stem, owner_of
from perdure.stores.file.group import members
from perdure.stores.file.listing import ROW_OF_HEADER, header_rows
from perdure.stores.file.log import LogKey, SessionLog
from perdure.stores.file.rows import LogRows
from perdure.stores.file.sketches import read_sketches
from perdure.stores.file.small_tables import Rates, SmallTable, Tokens
from perdure.stores.jobs.loading import Load
from perdure.stores.tables import Record, Rows, Tables

_AT_HAND = 32
# Owners share this many lock files, since these are never removed.
_OWNERS_LOCKS = 64


class MoreLocks(Exception):
    """The error for sessions that have to be locked first: the job starts over, with these locked too."""

    def __init__(self, needed: Iterable[str]) -> None:
        super().__init__(needed)
        self.needed = set(needed)


def _hint_for(table: str, where: Where) -> str:
    """Return the kind of hints that lead to the sessions of a statement; "" if hints do not tell."""
    if table == "timer" and "sid" not in where:
        return hints.TIMERS
    is_scan = table == "session" and "id" not in where and "sid" not in where
    return hints.WAITING if is_scan and "inbox_end > taken" in where else ""


class Desk:
    """The tables of a directory, for one job at a time."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.tables = Tables()
        self.tables.tables["session"].number_for = self._birth_for
        self.tables.tables["log"].number_for = self._key_for
        # If another process sets a timer at the same instant, it is in another session, which tells them apart.
        self.tables.tables["timer"].number_for = lambda row: time.time_ns()
        self.tables.answer(Insert("meta", ("key", "value"), [("uid", directory.origin), ("erasures", 0)]))
        self.seen: dict[str, LogRows] = {}
        """The logs that the job has looked at, by stem."""
        self.pledges: dict[str, bytes] = {}
        self.blobs = directory.blobs
        self.small: dict[str, SmallTable] = {
            kind.name: kind(directory.folder, directory.lock_timeout) for kind in (Rates, Tokens)
        }
        """The tables whose rows are in no log, by name."""
        self.held: set[str] = set()
        self.looked_at: set[str] = set()
        self.has_seen_all = False
        self._kept: dict[str, LogRows] = {}
        self._stems: dict[int, str] = {}
        self._doubtful: set[str] = set()
        self._sketched: set[str] = set()
        """The logs whose answers under way were read in this job. These are in a file that changes without the log."""
        self._without_values: list[LogRows] = []

    def begin(self, locks: ExitStack, ids: Iterable[str], at: float, kind: Kind, *, is_strict: bool) -> None:
        """Clear the desk for a job, with some sessions locked. With `is_strict` the job is told of damage at once."""
        self._locks, self._at, self._is_strict, self._is_erasing = locks, at, is_strict, kind == "erase"
        self.has_seen_all = False
        for noted in (self.seen, self.looked_at, self.pledges, self.held, self._doubtful, self._sketched):
            noted.clear()
        self._without_values.clear()
        self.tables.begin()
        self.blobs.begin()
        for table in self.small.values():
            table.begin(is_writing=kind in ("write", "erase"))
        self._owner = ""
        self.lock(ids)
        self.tables.answer(Update("meta", {"value": self.directory.erasures()}, {"key": "erasures"}))

    @contextmanager
    def looking(self, ids: Iterable[str]) -> Iterator[None]:
        """Look at logs while some sessions are locked."""
        with ExitStack() as locks:
            locks.callback(self.end)
            self.begin(locks, ids, 0.0, "read", is_strict=False)
            yield

    def end(self) -> None:
        """Take back what is not written. Drop logs that are damaged, or that no job has asked for lately."""
        self.tables.take_back()
        odd = [stem for stem, rows in self._kept.items() if rows.log.damage or rows.broken or rows.is_left_over]
        for stem in (*self._doubtful, *odd, *list(self._kept)[:-_AT_HAND]):
            self.forget(stem)

    def forget(self, stem: str) -> None:
        self.seen.pop(stem, None)
        rows = self._kept.pop(stem, None)
        if rows is not None:
            rows.drop()
            self._stems.pop(rows.sid, None)

    def forget_all(self) -> None:
        for stem in list(self._kept):
            self.forget(stem)

    def lock(self, session_ids: Iterable[str]) -> None:
        wanted = {each for each in session_ids if is_stem(each)} - self.held
        if wanted and (self.held or self.seen):
            raise MoreLocks(wanted)  # all locks are taken in one order, and before anything is read
        if wanted:
            self._locks.enter_context(self.directory.locked(wanted))
            self.held |= wanted
            if not self.held.isdisjoint(members(self.directory.folder)):
                raise MoreLocks(())  # the process that held these locks was killed: its work is finished first

    def answer(self, statement: Statement) -> list[Any]:
        match statement:
            case Lock(session_ids, _, owner):
                self.lock(session_ids)
                if owner is not None:
                    self._lock_owner(owner)
                return []
            case Pledge(session_id, body):
                self.pledges[session_id] = body
                return []
            case Clock():
                return [(self._at,)]
            case Select("blob") | Count("blob") | Insert("blob") | Delete("blob"):
                return self.blobs.answer(statement)
            case Select(table) | Count(table) | Insert(table) | Update(table) | Delete(table) if table in self.small:
                return self.small[table].answer(statement, self._locks)
            case Select("session", columns, where) if self._is_in_headers(columns, where):
                return self._select_headers(statement)
            case Insert(table, columns, rows, or_set):
                statement = Insert(table, columns, list(rows), or_set)
                if or_set is not None:
                    self._prepare_insert(statement)
            case Update(table, values, where):
                if not self.held and table == "session" and "id" in where:
                    self.lock([where["id"]])
                self._prepare(table, where)
                statement = Update(table, {name: self._settled(each) for name, each in values.items()}, where)
            case Select(table=table, where=where) | Count(table, where) | Delete(table, where):
                self._prepare(table, where)
        return self.tables.answer(statement)

    def _settled(self, value: Any) -> Any:
        return self._at + value.seconds if isinstance(value, Later) else value

    def _is_in_headers(self, columns: Iterable[str], where: Where) -> bool:
        """Tell whether the headers of documents are enough for an answer, so that logs need not be read."""
        asked = {key.partition(" ")[0] for key in where}
        is_scan = bool(asked) and "id" not in where and "sid" not in asked
        is_unchanged = not self.held or not self.tables.touched
        return is_scan and self._is_strict and is_unchanged and {*columns, *asked} <= ROW_OF_HEADER

    def _select_headers(self, statement: Select) -> list[Any]:
        few = Tables()
        for row in header_rows(self.directory, statement.where):
            few.tables["session"].put(row, ())
        return few.answer(statement)

    def _prepare_insert(self, statement: Insert) -> None:
        column = {"ref": "child", "attached": "log"}.get(statement.table, "sid")
        if column in statement.columns:
            place = statement.columns.index(column)
            self._prepare(statement.table, {f"{column} in": {row[place] for row in statement.rows}})
        else:
            self._prepare(statement.table, {"hash in": ()})

    def _prepare(self, table: str, where: Where) -> None:
        """Bring up to date the rows that a statement may concern."""
        if table == "meta":
            return
        named, hint = self._named(table, where), _hint_for(table, where)
        if hint:
            found: Iterable[LogRows] = self._look_at_hinted(hint)
        else:
            found = self.look_at_all() if named is None else named
        for rows in found:
            try:
                if table == "sketch":
                    self._read_sketches(rows)
                else:
                    rows.make(table)
            except CorruptRecord:
                # A damaged session must not stop a scan. An erasure has to know of every log, since each may show what
                # is erased.
                if (named is not None and not hint) or self._is_erasing:
                    raise

    def _look_at_hinted(self, kind: str) -> list[LogRows]:
        """Return the logs of sessions that may have something waiting, or timers. Leave out damaged ones."""
        folder = self.directory.folder
        if not hints.is_surveyed(folder):
            hints.survey(folder, (rows.log for rows in self.look_at_all()))
        found = []
        for session_id in hints.hinted(folder, kind):
            with suppress(CorruptRecord, UnreadableFile):
                rows = self.existing(session_id)
                if rows is not None and not rows.log.damage:
                    found.append(rows)
        for stem in self._kept.keys() - self.seen.keys():  # their rows may be outdated, and would be in the answer
            self.forget(stem)
        return found

    def _lock_owner(self, owner: str) -> None:
        """Hold the lock for counting an owner's items or claims. It is one of a few, which owners share."""
        name = f".owners-{crc32(owner.encode()) % _OWNERS_LOCKS:02}"
        if self._owner != name:
            self._locks.enter_context(self.directory.folder.locked([name], self.directory.lock_timeout))
            self._owner = name

    def _read_sketches(self, rows: LogRows) -> None:
        """Bring the pieces of an answer under way up to date, once for each job."""
        if rows.log.stem not in self._sketched:
            self._sketched.add(rows.log.stem)
            rows.put_sketches(read_sketches(self.directory.folder, rows.log.stem))

    def _named(self, table: str, where: Where) -> Iterable[LogRows] | None:
        """Return the logs that a statement names; None if it may concern any."""
        given = {key.removesuffix(" in"): value if key.endswith(" in") else [value] for key, value in where.items()}
        if table in ("value", "uses") and "sid" not in given:
            # A value is in the log of every session that names it. So only logs that were looked at can be meant.
            pending, self._without_values = self._without_values, []
            return pending
        if table == "session" and "id" in given:
            return [rows for each in given["id"] if (rows := self.existing(each)) is not None]
        number = "child" if table == "ref" else "sid"
        if number in given:
            return [self.look(self._stems[sid]) for sid in given[number] if sid in self._stems]
        if table in ("msg", "log", "attached") and "log" in given:
            return [rows for key in given["log"] if (rows := self.log_of(key)) is not None]
        return () if table == "run" and "run" in given else None

    def look(self, stem: str) -> LogRows:
        """Return the rows of a log, as far as they are made."""
        if stem in self.seen:
            return self.seen[stem]
        owner = owner_of(stem)
        if owner in self.directory.changing and owner not in self.held:
            raise MoreLocks([owner])  # another process changes it with others: it is looked at when all are changed
        self.looked_at.add(stem)
        known = self._kept.pop(stem, None)
        try:
            log = self.directory.log(stem, known.log if known else None)
        finally:
            if known is not None:
                self._kept[stem] = known
        if known is None or known.log is not log:
            self.forget(stem)
            known = LogRows(self.tables, log, self._is_there)
        return self._take(stem, known)

    def _take(self, stem: str, rows: LogRows) -> LogRows:
        if self._stems.get(rows.sid, stem) != stem:
            rows.give_another_number()  # two sessions were born at the same time
        rows.is_left_over = self._is_erasing and owner_of(stem) == stem and self.directory.has(rows.log)
        self._kept[stem] = self.seen[stem] = rows
        self._stems[rows.sid] = stem
        self._without_values.append(rows)
        if self.tables.touched:
            self._doubtful.add(stem)  # its rows may be mixed with those that the job has written
        return rows

    def grown(self, log: SessionLog) -> None:
        """Note that lines were written to a log. The first ones give it its key."""
        rows = self.seen[log.stem]
        if rows.log.key == rows.key:
            self._without_values.append(rows)
        else:
            self.renew(log)

    def renew(self, log: SessionLog) -> LogRows:
        self.forget(log.stem)
        return self._take(log.stem, LogRows(self.tables, log, self._is_there))

    def existing(self, session_id: str) -> LogRows | None:
        """Return a session's log. Raise CorruptRecord if it is damaged and the job is strict."""
        if not is_stem(session_id):
            return None
        is_first_look = session_id not in self.seen
        rows = self.look(session_id)
        if is_first_look and self._is_strict:
            self.directory.sound(rows.log)
            if rows.log.key != rows.key:
                raise CorruptRecord(session_id, rows.log.file, f"it is the log of {rows.log.key!r}")
        if self._is_erasing and rows.log.damage and not rows.log.key:
            return self._named_by_others(rows)
        return rows

    def _named_by_others(self, rows: LogRows) -> LogRows:
        """Return a log whose first line is damaged, with the key by which others name it."""
        for other in self.look_at_all():
            for key in (other.log.line, *(key for key, _, _ in other.log.shown())):
                found = LogKey.parse(key)
                if found and found.owner == rows.log.stem:
                    rows.log.key = found.base
                    return self.renew(rows.log)
        return rows

    def log_of(self, key: int | str) -> LogRows | None:
        """Return the log with a key: the session's, if it is still the same session, or what its deletion has left."""
        found = LogKey.parse(key)
        for stem in (found.owner, found.base) if found else ():
            rows = self.look(stem)
            if found and rows.key == found.base:
                return rows
        return None

    def _is_there(self, key: str) -> bool:
        found = LogKey.parse(key)
        return found is not None and self.look(found.owner).key == found.base

    def key_of(self, sid: int) -> str:
        """Return the key of a session's log, given the session's number."""
        return self.look(self._stems[sid]).key

    def look_at_all(self) -> Iterable[LogRows]:
        """Return all logs. Leave out unreadable ones, except in an erasure: they may show what is erased."""
        if not self.has_seen_all:
            for stem in self._stems_there():
                try:
                    self.look(stem)
                except (CorruptRecord, UnreadableFile):
                    if self._is_erasing:
                        raise
            for stem in self._kept.keys() - self.seen.keys():
                self.forget(stem)
            self.has_seen_all = True
        return list(self.seen.values())

    def _stems_there(self) -> Iterator[str]:
        yield from self.directory.ids()
        for base in sorted(self.directory.remainders()):
            # A deletion that was killed before its end has written this remainder, and the session still exists.
            owner = self.seen.get(owner_of(base))
            if owner is None or owner.key != base:
                yield base

    def stem_of(self, table: str, row: Record) -> str | None:
        """Return the log that a row is kept in; None if it is not in a log."""
        if table in ("value", "meta"):
            return None
        if table in ("msg", "attached"):
            key = LogKey.parse(row["log"])
            remainder = key and self.seen.get(key.base)
            return key and (key.base if remainder and remainder.key == key.base else key.owner)
        return self._stems.get(row["child" if table == "ref" else "sid"])

    def rows_of(self, table: str) -> Rows:
        return self.tables.tables[table]

    def assembled(self, session_id: str) -> AgentSession:
        """Return a session's newest version."""
        load = Load(session_id, None, self.directory.origin)
        loaded = drive(load.job(), self.answer)
        assert loaded is not None, "it is there"
        assert loaded.head is not None, "nothing of it is known"
        for log, start, messages in loaded.fetched:
            load.tapes.put(log, start, messages)
        return loaded.head.session(loaded.values, load.tapes.span)

    def _birth_for(self, row: Record) -> int:
        """Return a number that no session has had: the machine's time, even if another clock is in use."""
        sid = time.time_ns()
        while sid in self._stems:
            sid += 1
        self._stems[sid] = row["id"]
        return sid

    def _key_for(self, row: Record) -> str:
        row["crc"] = None
        key = f"{self._stems[row['sid']]}@{row['sid']}"
        return f"{key}/{row['name']}" if row["name"] else key
