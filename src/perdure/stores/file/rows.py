"""A log's lines as rows. Only tables that are asked for are made, and of a log that has grown only its new lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from zlib import crc32

import msgspec

from perdure import codec
from perdure.errors import CorruptRecord
from perdure.model.session import tag_rows
from perdure.protocols import Key
from perdure.stores.engine import Delete
from perdure.stores.file.log import LogKey, SessionLog
from perdure.stores.format.heads import decode_info
from perdure.stores.format.rows import LAST, Stretch
from perdure.stores.jobs.attachments import hashes_in
from perdure.stores.jobs.saving import EMPTY_SESSION, info_columns, update_columns
from perdure.stores.tables import Tables

# Tables whose rows are made together.
_TOGETHER = {"tag": "session", "msg": "log", "uses": "value", "batch": "run"}


def number_of(stem: str) -> int:
    """Return a number for a log that has no birth of its own. It is below 0, where births never are."""
    return -1 - crc32(stem.encode())


class LogEntry(msgspec.Struct, frozen=True):
    """An entry of a record or an inbox as a line has it, with its body unread."""

    kind: str
    body: msgspec.Raw = msgspec.Raw(b"null")
    run: str | None = None


class LogRows:
    """The rows of one log. A session's number is the time of its birth, and a log's number is its key."""

    def __init__(self, tables: Tables, log: SessionLog, is_there: Callable[[str], bool]) -> None:
        key = LogKey.parse(log.key)
        is_own = key is not None and log.stem in (key.owner, key.base)
        self.log = log
        self.key = log.key if is_own else ""
        self.sid = key.birth if key is not None and is_own else number_of(log.stem)
        self.is_left_over = False
        """True if a session has a row even if all of it is damaged, so that it can be erased."""
        self.broken: dict[str, CorruptRecord] = {}
        """The tables that cannot be made, although each line is sound."""
        self._is_there = is_there
        """A function that tells whether the session with a key exists."""
        self._tables = tables
        self._made: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._refs: set[tuple[Stretch, int]] = set()
        self._keys: dict[str, tuple[Key, int]] = {}
        self._makers: Mapping[str, Callable[[], None]] = {
            "session": self._session,
            "log": self._logs,
            "head": self._heads,
            "value": self._values,
            "ref": self._shown,
            "run": self._record,
            "inbox": self._inbox,
            "attached": self._attached,
            "key": self._requests,
            "timer": self._timers,
        }

    def give_another_number(self) -> None:
        assert not self._made, "its rows have the other one"
        self.sid = number_of(self.log.stem)

    def make(self, table: str) -> None:
        """Bring the rows of a table up to date."""
        together = _TOGETHER.get(table, table)
        if together in self.broken:
            raise self.broken[together]
        if self._made.get(together) != self.log.end:
            self._made[together] = self.log.end
            try:
                # Rows that are made from lines are not changes of the job.
                with self._tables.unnoted():
                    self._makers[together]()
            except CorruptRecord as error:
                self.broken[together] = error
                raise
        if table == "run":
            self._reach()

    def _put(self, table: str, or_set: tuple[str, ...] | None = None, /, **columns: Any) -> Any:
        rows = self._tables.tables[table]
        return rows.add(columns) if or_set is None else rows.put(columns, or_set)

    def _new(self, what: str, length: int) -> tuple[int, int]:
        """Return the range by which something has grown since its rows were made."""
        start, self._counts[what] = self._counts.get(what, 0), length
        return start, length

    def _session(self) -> None:
        log = self.log
        if not log.version and not self.is_left_over:
            return
        row = {**EMPTY_SESSION, "id": log.stem, "version": 0, "created": 0.0, "log": self.key}
        row |= {"updated": 0.0, "spawned": 0, "recent": 0}
        tags: tuple[str, ...] = ()
        try:
            info = decode_info(log.heads.get(log.version, b""), log.stem, log.version)
            row |= {**info_columns(info), "id": log.stem, "version": log.version}
            row |= update_columns(info.updated_at)
            tags = tag_rows(info)
        except CorruptRecord:
            if not self.is_left_over:
                raise
        row |= {"msg_end": log.end_of(""), "evt_end": len(log.events), "inbox_end": len(log.inbox)}
        line = LogKey.parse(log.line)
        row |= {"taken": log.taken, "epoch": log.epoch, "line": line and line.birth}
        is_unknown = log.since is None and len(log.inbox) > log.taken
        row |= {"priority": log.priority, "since": row["updated"] if is_unknown else log.since}
        if log.held is not None:
            row |= {"claim": msgspec.json.encode(log.held.holder), "expires": log.held.expires}
        self._put("session", tuple(row), sid=self.sid, **row)
        self._tables.answer(Delete("tag", {"sid": self.sid}))
        for tag in tags:
            self._put("tag", tag=tag, sid=self.sid)

    def _logs(self) -> None:
        for name in dict.fromkeys(("", *self.log.messages)) if self.key else ():
            key, rows = self.log.key_of(name), self.log.messages.get(name, {})
            self._put("log", (), log=key, sid=self.sid, name=name)
            for position, body in islice(rows.items(), *self._new(f"log {name}", len(rows))):
                self._put("msg", log=key, pos=position, body=body)

    def _attached(self) -> None:
        """Note which messages and items name images and files. Lines have that in their bodies only."""
        for name, rows in self.log.messages.items() if self.key else ():
            for position, body in islice(rows.items(), *self._new(f"attached {name}", len(rows))):
                self._note_files(hashes_in(body), self.log.key_of(name), position)
        for seq, entry in self._entries("attached inbox", self.log.inbox) if self.key else ():
            self._note_files(codec.hashes_in_post(codec.decode_plain(bytes(entry.body))), self.key, -seq)

    def _note_files(self, hashes: Iterable[str], log: str, pos: int) -> None:
        for key in hashes:
            self._put("attached", hash=key, log=log, pos=pos)

    def _heads(self) -> None:
        heads = self.log.heads
        for version, body in islice(heads.items(), *self._new("head", len(heads))):
            self._put("head", sid=self.sid, version=version, body=body)

    def _values(self) -> None:
        values = self.log.values
        for name, body in islice(values.items(), *self._new("value", len(values))):
            if name:  # a redacted value has lost its name
                self._put("value", (), hash=name, body=body)
                self._put("uses", hash=name, sid=self.sid)

    def _shown(self) -> None:
        shown = {(stretch, self.log.refs.get(stretch, 0)) for stretch in self._stretches()}
        for (log, start, stop), since in sorted(shown - self._refs, key=str):
            self._put("ref", log=log, child=self.sid, start=start, stop=stop, since=since or None)
        self._refs |= shown

    def _stretches(self) -> Iterator[Stretch]:
        yield from self.log.shown()
        if self.log.line and not self._is_there(self.log.line):
            # A release that does not know of lines has erased that session, and has kept what is named here.
            own = {self.log.key_of(name) for name in ("", *self.log.messages)}
            yield from (stretch for stretch in self.log.named() if stretch[0] not in own)

    def _record(self) -> None:
        for seq, entry in self._entries("event", self.log.events):
            run = None
            if entry.run is not None:
                reach = {"first_seq": seq, "last_seq": seq, "log": self.key, "first_pos": 0, "end_pos": 0}
                run = self._put("run", ("last_seq",), sid=self.sid, loop=entry.run, **reach)
            body = msgspec.json.encode([[entry.kind, entry.body]])
            self._put("batch", sid=self.sid, last=seq, count=1, run=run, body=body)

    def _reach(self) -> None:
        """Note where the messages of runs are. Most logs have no lines about that: then it is the whole log."""
        rows = self._tables.tables["run"]
        with self._tables.unnoted():
            for row in [*rows.find({"sid": self.sid})]:
                name = row["loop"] if row["loop"] in self.log.messages else ""
                start, stop = self.log.runs.get(row["loop"], (self._begin(name), None))
                place = {"log": self.log.key_of(name), "first_pos": start}
                place["end_pos"] = self.log.end_of(name) if stop is None else stop
                if any(row[column] != value for column, value in place.items()):
                    rows.change(row, place)

    def _begin(self, name: str) -> int:
        """Return the position from which on nothing of a log was forgotten."""
        key = self.log.key_of(name)
        return max((start for log, start, stop in self.log.refs if (log, stop) == (key, LAST)), default=0)

    def _inbox(self) -> None:
        for seq, entry in self._entries("inbox", self.log.inbox):
            self._put("inbox", sid=self.sid, seq=seq, run=entry.run, kind=entry.kind, body=bytes(entry.body))

    def _entries(self, what: str, lines: list[bytes]) -> Iterator[tuple[int, LogEntry]]:
        start, stop = self._new(what, len(lines))
        for seq, raw in enumerate(lines[start:stop], start + 1):
            try:
                yield seq, msgspec.json.decode(raw, type=LogEntry)
            except msgspec.MsgspecError as error:
                raise CorruptRecord(self.log.stem, f"{what} {seq}", str(error)) from None

    def _requests(self) -> None:
        for name, (key, version) in self.log.keys.items():
            if self._keys.get(name) != (key, version):
                self._keys[name] = (key, version)
                self._put("key", ("digest", "version"), sid=self.sid, name=name, digest=key.digest, version=version)

    def _timers(self) -> None:
        self._tables.answer(Delete("timer", {"sid": self.sid}))
        for name, (number, due, body) in self.log.timers.items():
            self._put("timer", timer=number, sid=self.sid, name=name, due=due, body=body)

    def put_sketches(self, pieces: Iterable[tuple[int, int, bytes]]) -> None:
        """Replace the pieces of an answer under way."""
        with self._tables.unnoted():
            self._tables.answer(Delete("sketch", {"sid": self.sid}))
            for start, crc, body in pieces:
                self._put("sketch", ("crc", "body"), sid=self.sid, start=start, crc=crc, body=body)

    def drop(self) -> None:
        """Remove all rows."""
        answer, used = self._tables.answer, self._tables.tables["uses"]
        with self._tables.unnoted():
            for table in ("session", "tag", "log", "head", "uses", "run", "batch", "inbox", "key", "sketch", "timer"):
                answer(Delete(table, {"sid": self.sid}))
            answer(Delete("ref", {"child": self.sid}))
            for name in self.log.messages if "log" in self._made else ():
                answer(Delete("msg", {"log": self.log.key_of(name)}))
            for name in ("", *self.log.messages) if "attached" in self._made else ():
                answer(Delete("attached", {"log": self.log.key_of(name)}))
            for key in self.log.values if "value" in self._made else ():
                if not any(True for _ in used.find({"hash": key})):
                    answer(Delete("value", {"hash": key}))
        self._made.clear()
