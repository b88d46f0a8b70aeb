"""Repair of rows that can be derived from versions and messages: columns, tags, references, counters.

Nothing is guessed. A version or a message is never changed, and only a backup helps if one cannot be read. A counter is
only moved forward, to the rows that are there. If it is ahead of them, rows may be lost, and it is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from perdure.errors import CorruptRecord, InvalidData
from perdure.model.session import tag_rows
from perdure.protocols import Entry, Problem
from perdure.stores.engine import Clock, Delete, Insert, Job, Lock, Select, Statement, Update
from perdure.stores.format.heads import StoredHead, decode_info, unpacked_head
from perdure.stores.format.renaming import OpenHead, RenamedBlocks
from perdure.stores.format.rows import Stretch, Values, prepare_batch
from perdure.stores.jobs.attachments import named_in
from perdure.stores.jobs.checking import FILTERED, SessionRow
from perdure.stores.jobs.lines import began_with
from perdure.stores.jobs.record import note
from perdure.stores.jobs.saving import Pack, end_of_log, info_columns, update_columns
from perdure.stores.jobs.values import gather_unmet
from perdure.stores.sealing import KEYED, plain_name
from perdure.stores.tapes import without

REPAIRED = "repaired"
"""The kind of entry for repairs on a session's record."""
_DONE = "It follows from other stored data, and was rewritten."
_DAMAGE = (CorruptRecord, InvalidData, TypeError, ValueError, LookupError, AttributeError)
# The tables whose rows only repeat what heads and messages say, and the column with the session's number.
_NOTES = {"tag": "sid", "uses": "sid", "ref": "child"}


def sessions() -> Job[list[str]]:
    """Return the ids of all sessions."""
    return [session_id for (session_id,) in (yield Select("session", ("id",), {"sid !=": None}, order="sid"))]


def repair_session(session_id: str, pack: Pack, *, dry_run: bool) -> Job[list[Problem]]:
    """Repair what can be repaired in a session, put the repairs on its record, and return what was wrong."""
    if not dry_run:
        yield Lock((session_id,), "share")
    rows = yield Select("session", SessionRow._fields, {"id": session_id})
    if not rows:
        return []
    repair = _Repair(SessionRow(*rows[0]), dry_run=dry_run)
    for step in (repair.counters, repair.columns, repair.claim, repair.notes, repair.files):
        with suppress(*_DAMAGE):  # a step that meets something unreadable ends; the check reports the damage
            yield from step()
    if repair.found and not dry_run and (yield from repair.has_sound_record()):
        told = [{"where": each.where, "what": each.what} for each in repair.found]
        at = (yield Clock())[0][0]
        yield from note(session_id, prepare_batch([Entry(REPAIRED, {"at": at, "repaired": told})], pack))
    return repair.found


class _Repair:
    """A session that is being repaired."""

    def __init__(self, session: SessionRow, *, dry_run: bool) -> None:
        self._session = session
        self._dry_run = dry_run
        self.found: list[Problem] = []

    def _fix(self, where: str, what: str, *statements: Statement) -> Job[None]:
        self.found.append(Problem(self._session.id, where, what, _DONE))
        for statement in () if self._dry_run else statements:  # noqa: UP028  # answers are sent back to this frame
            yield statement

    def _set(self, where: str, what: str, values: Mapping[str, Any]) -> Job[None]:
        yield from self._fix(where, what, Update("session", values, {"sid": self._session.sid}))
        self._session = self._session._replace(**values)

    def counters(self) -> Job[None]:
        """Move counters forward to the last rows. Otherwise the next row would get a number that is taken."""
        session, sid = self._session, self._session.sid
        ends = {
            "version": (yield from _last("head", "version", sid)),
            "evt_end": (yield from _last("batch", "last", sid)),
            "inbox_end": (yield from _last("inbox", "seq", sid)),
        }
        logs = yield Select("log", ("log",), {"sid": sid, "name": ""})
        if [log for (log,) in logs] == [session.log]:
            ends["msg_end"] = yield from end_of_log(session.log)
        for column, end in ends.items():
            counted = getattr(session, column)
            if type(counted) is int and counted < end:
                yield from self._set(
                    f"column {column}", f"it says {counted}, and there are rows up to {end}", {column: end}
                )

    def columns(self) -> Job[None]:
        """Set the columns that lists use, and the tags, to those of the newest version."""
        session = self._session
        ((crc, body),) = yield Select("head", ("crc", "body"), {"sid": session.sid, "version": session.version})
        head = unpacked_head(body, crc, session.id, session.sid, session.version)
        info = decode_info(head, session.id, session.version)
        expected = {**info_columns(info), **update_columns(info.updated_at)}
        for name in FILTERED:
            found, said = getattr(session, name), expected[name]
            if found != said:
                what = f"it says {found!r}, and the newest version {said!r}"
                # An engine may work `recent` out by itself, from the time of the update.
                values = {"updated": expected["updated"], name: said} if name == "recent" else {name: said}
                yield from self._set(f"column {name}", what, values)
        noted = {tag for (tag,) in (yield Select("tag", ("tag",), {"sid": session.sid}))}
        wanted = {*tag_rows(info)}
        if noted != wanted:
            yield from self._fix(
                "tags",
                "they are not those of the newest version",
                *(Delete("tag", {"tag": tag, "sid": session.sid}) for tag in sorted(noted - wanted)),
                Insert("tag", ("tag", "sid"), [(tag, session.sid) for tag in sorted(wanted - noted)], or_set=()),
            )

    def claim(self) -> Job[None]:
        """Let a claim without an end lapse. Drop an end without a claim, and the unfinished answer of an ended run."""
        session = self._session
        if (session.claim is None) != (session.expires is None):
            what = "it has a holder and no end, or an end and no holder"
            yield from self._set("its claim", what, {"expires": None if session.claim is None else 0.0})
        if session.claim is None and (yield Select("sketch", ("start",), {"sid": session.sid})):
            what = "it is of a run that is over"
            yield from self._fix("its answer under way", what, Delete("sketch", {"sid": session.sid}))
        if session.taken < session.inbox_end and type(session.since) is not float:
            what = "it is missing, so that lists of what waits may fail"
            yield from self._set("since when its inbox waits", what, {"since": session.updated})

    def notes(self) -> Job[None]:
        """Make the notes that erasures use name all that the versions name, and nothing else."""
        session, sid = self._session, self._session.sid
        rows = yield Select("head", ("version", "crc", "body"), {"sid": sid}, order="version")
        named, shown = yield from _named_by(session, rows)
        used = {key for (key,) in (yield Select("uses", ("hash",), {"sid": sid}))}
        for key in sorted(named - used):
            what = "a version names it, and that is not noted where deletions look"
            yield from self._fix(f"value {key}", what, Insert("uses", ("hash", "sid"), [(key, sid)], or_set=()))
        for key in sorted(used - named):
            what = "it is noted to be used, and no version names it"
            yield from self._fix(f"value {key}", what, Delete("uses", {"hash": key, "sid": sid}))
        yield from self._references(shown)

    def _references(self, shown: Mapping[int, frozenset[Stretch]]) -> Job[None]:
        sid = self._session.sid
        own = {log for (log,) in (yield Select("log", ("log",), {"sid": sid}))}
        refs = yield Select("ref", ("log", "start", "stop", "since"), {"child": sid})
        inherited = yield from self._of_line()
        # A session that has forgotten something has rows for what it keeps of its own logs.
        in_part = {log for log, _, _, _ in refs} & own
        everything = [each for stretches in shown.values() for each in stretches]
        yield from self._drop_wrong([row for row in refs if row[0] not in own], everything)
        noted: list[Stretch] = [*(row[:3] for row in refs), *inherited]
        first = min(shown, default=1)
        for version, stretches in sorted(shown.items()):
            counted = [each for each in stretches if each[0] not in own or each[0] in in_part]
            for log, start, stop in [*without(counted, noted)]:
                noted.append((log, start, stop))
                is_first = version == first and log not in own
                row = (log, sid, start, stop, None if is_first else version)
                what = "the session shows it, and that is not noted where deletions look"
                insert = Insert("ref", ("log", "child", "start", "stop", "since"), [row])
                yield from self._fix(f"messages {start} to {stop} of log {log}", what, insert)

    def _of_line(self) -> Job[Sequence[Stretch]]:
        """Return the stretches that the session shows by its line. A wrong line is dropped, and all are noted then."""
        session = self._session
        if session.line is None:
            return ()
        rows = yield Select("session", ("id", "line"), {"sid": session.line})
        if not rows or session.line >= session.sid:
            what = "it is a session that is not there, or that is younger"
            yield from self._set("its line", what, {"line": None})
            return ()
        return tuple((yield from began_with(rows[0][0], session.line, rows[0][1])))

    def _drop_wrong(self, refs: Sequence[Any], shown: Sequence[Stretch]) -> Job[None]:
        """Cut notes of stretches that no version shows. They keep text from being erased."""
        sid = self._session.sid
        for log, start, stop, since in refs:
            row: Stretch = (log, start, stop)
            wrong = [*without([row], shown)] if start < stop else [row]
            if wrong:
                kept = [*without([row], wrong)] if start < stop else []
                rows = [(log, sid, low, high, since) for _, low, high in kept]
                where = {"child": sid, "log": log, "start": start, "stop": stop}
                again = [Insert("ref", ("log", "child", "start", "stop", "since"), rows)] if rows else []
                what = "it is noted that the session shows it, and no version does"
                place = f"messages {start} to {stop} of log {log}"
                yield from self._fix(place, what, Delete("ref", where), *again)

    def files(self) -> Job[None]:
        """Correct the notes which messages show which images and files."""
        for (log,) in (yield Select("log", ("log",), {"sid": self._session.sid}, order="log")):
            rows = yield Select("attached", ("pos", "hash"), {"log": log})
            noted = {(pos, plain_name(key)) for pos, key in rows if type(pos) is int and pos >= 0}
            # Files whose key is not there: nobody can tell which of the message's hashes they have.
            closed = {pos for pos, key in noted if key.startswith(KEYED)}
            noted = {(pos, key) for pos, key in noted if pos not in closed}
            found = yield from named_in(log)
            named = {(pos, key) for pos, hashes in found if pos not in closed for key in hashes}
            for pos, key in sorted(named - noted):
                what = f"that it has the file {key} is not noted where erasures look"
                insert = Insert("attached", ("hash", "log", "pos"), [(key, log, pos)], or_set=())
                yield from self._fix(f"message {pos} of log {log}", what, insert)
            for pos, key in sorted(noted - named):
                what = f"it is noted to have the file {key}, and does not"
                delete = Delete("attached", {"log": log, "pos": pos, "hash": key})
                yield from self._fix(f"message {pos} of log {log}", what, delete)

    def has_sound_record(self) -> Job[bool]:
        """Tell whether the record ends where its counter says, so that an entry can be added."""
        session = self._session
        return (yield from _last("batch", "last", session.sid)) == session.evt_end


def _last(table: str, column: str, sid: int) -> Job[int]:
    rows = yield Select(table, (column,), {"sid": sid}, order=f"-{column}", limit=1)
    return rows[0][0] if rows and type(rows[0][0]) is int else 0


def _named_by(session: SessionRow, rows: Sequence[Any]) -> Job[tuple[set[str], dict[int, frozenset[Stretch]]]]:
    """Return the values that versions name, and for each version the stretches of logs that it shows.

    Raise CorruptRecord if one of them cannot be read, since what it names must not be taken for unused.
    """
    if not rows or [row[0] for row in rows] != [*range(rows[0][0], session.version + 1)]:
        raise CorruptRecord(session.id, "its versions", "one is missing")
    named: set[str] = set()
    shown: dict[int, frozenset[Stretch]] = {}
    values: Values = {}
    met: set[Stretch] = set()

    def meet(log: int | str, start: int, stop: int) -> int | str:
        met.add((log, start, stop))
        return log

    blocks = RenamedBlocks(meet)
    for version, crc, body in rows:
        raw = unpacked_head(body, crc, session.id, session.sid, version)
        head = StoredHead(raw, session.id, version)
        values = (yield from gather_unmet(session.id, head, values, blocks.met)).values
        named |= values.keys()
        OpenHead(raw, head, values).renamed(blocks)
        shown[version] = frozenset(met)
        met.clear()
    first = decode_info(
        unpacked_head(rows[-1][2], rows[-1][1], session.id, session.sid, rows[-1][0]), session.id, rows[-1][0]
    )
    if first.first_version != rows[0][0]:
        raise CorruptRecord(session.id, "its versions", "the oldest is missing")
    return named, shown


def repair_left_over(*, dry_run: bool) -> Job[list[Problem]]:
    """Remove notes of sessions that are gone. If heads of one are left, its row may be damaged, and the notes stay."""
    found: list[Problem] = []
    for table, column in _NOTES.items():
        last: Any = None
        while rows := (yield Select(table, (column,), _behind(column, last), order=column, limit=1)):
            last = rows[0][0]
            is_there = (yield Select("session", ("sid",), {"sid": last})) or (
                yield Select("head", ("version",), {"sid": last}, limit=1)
            )
            if not is_there:
                found.append(Problem(None, f"{table} {last}", "it belongs to no session", _DONE))
                if not dry_run:
                    yield Delete(table, {column: last})
    return found


def _behind(column: str, last: Any) -> dict[str, Any]:
    return {f"{column} !=": None} if last is None else {f"{column} >": last}
