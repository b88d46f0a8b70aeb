"""The changes that a job has made to a log, from rows to lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.model.ids import SessionId
from perdure.protocols import ArchivedSession, Entry
from perdure.stores.claims import Holder
from perdure.stores.engine import TABLES
from perdure.stores.file.desk import Desk
from perdure.stores.file.log import WITH_LINE, Held, Line, LogKey, line, opening
from perdure.stores.format.packing import unpack_entries
from perdure.stores.format.rows import operation_id
from perdure.stores.jobs.archive.archived import name_of_log, run_stretches, within
from perdure.stores.tables import Record

# Rows of these tables may change after they were added. Their lines are then written again.
_REPLACED = ("msg", "head", "batch", "inbox")


class Changes:
    """The rows of one log that were added, changed (with what they were before) and removed, by table."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.added: dict[str, list[Record]] = {}
        self.changed: dict[str, list[tuple[Record, Record]]] = {}
        self.removed: dict[str, list[Record]] = {}

    def note(self, table: str, before: Record | None, after: Record | None) -> None:
        if before is None and after is not None:
            self.added.setdefault(table, []).append(after)
        elif before is not None and after is None:
            self.removed.setdefault(table, []).append(before)
        elif before is not None and after is not None and before != after:
            self.changed.setdefault(table, []).append((before, after))

    @property
    def is_remainder(self) -> bool:
        """Return whether the log is the remainder of an erased session."""
        return "@" in self.stem

    @property
    def is_erasure(self) -> bool:
        return "session" in self.removed

    @property
    def is_trim(self) -> bool:
        return self.is_remainder and "msg" in self.removed

    @property
    def is_forgetting(self) -> bool:
        """Return whether a session's log has lost something: versions, or messages that only others had shown."""
        is_session = not self.is_erasure and not self.is_remainder
        return is_session and ("head" in self.removed or "msg" in self.removed)

    @property
    def is_rewrite(self) -> bool:
        return any(table in self.changed for table in _REPLACED) or "uses" in self.removed


def changes_of(desk: Desk) -> list[Changes]:
    """Return the changes of a job for each log, in the order of the last change to each."""
    firsts: dict[tuple[str, int], tuple[str, Record, Record | None]] = {}
    found: dict[str, Changes] = {}
    for touched in desk.tables.touched:
        firsts.setdefault((touched.table, id(touched.row)), touched)
        stem = desk.stem_of(touched.table, touched.row)
        if stem is not None:
            found[stem] = found.pop(stem) if stem in found else Changes(stem)
    rows: dict[tuple[str, Any], list[Record | None]] = {}
    for table, row, before in firsts.values():
        for place, each in ((0, before), (1, row if desk.rows_of(table).holds(row) else None)):
            if each is not None:
                rows.setdefault((table, _key_of(table, each)), [None, None])[place] = each
    for (table, _), (before, after) in rows.items():
        stem = desk.stem_of(table, after or before or {})
        if stem is not None:
            found[stem].note(table, before, after)
    return list(found.values())


def _key_of(table: str, row: Record) -> tuple[Any, ...]:
    columns = TABLES[table].unique[0] if TABLES[table].unique else TABLES[table].columns
    return tuple(row[name] for name in columns)


def shown_owners(changes: Changes, desk: Desk) -> set[str]:
    """Return the sessions that a session has begun to show, or to have as its line."""
    keys = (LogKey.parse(row["log"]) for row in changes.added.get("ref", ()))
    line = LogKey.parse(_line_key(changes, desk) or "")
    return {key.owner for key in (*keys, line) if key is not None}


def _line_key(changes: Changes, desk: Desk) -> str | None:
    """Return the key of a session's new line, "" if it has lost its line; None if that has not changed."""
    before, after = session_rows(changes)
    if after is None or after["line"] == (before or {"line": None})["line"]:
        return None
    return "" if after["line"] is None else desk.key_of(after["line"])


def lines_of(changes: Changes, desk: Desk) -> tuple[list[Line], list[Line]]:
    """Return the lines of an operation, and those of a second one that follows it."""
    before, after = session_rows(changes)
    line_key = _line_key(changes, desk)
    first = [] if before or not after else [opening(after["log"], WITH_LINE if line_key else codec.FORMAT)]
    claims = [] if after is None else list(_claim_lines(before, after))
    messages = (line("message", _branch(row["log"]), row["pos"], row["body"]) for row in changes.added.get("msg", ()))
    heads = sorted(changes.added.get("head", ()), key=lambda row: row["version"])
    lines = [
        *messages,
        *_value_lines(changes, desk),
        *_ref_lines(changes.added.get("ref", ())),
        *([] if line_key is None else [line("line", line_key)]),
        *_event_lines(changes.added.get("batch", ()), desk),
        *_run_lines(changes, desk),
        *(line("taken", at=after["taken"]) for _ in "1" if after and after["taken"] > (before or after)["taken"]),
        *_key_lines(changes),
        *_inbox_lines(changes.added.get("inbox", ())),
        *_waits_lines(before, after),
        *_timer_lines(changes),
        *(each for each in claims if each.kind == "release"),
        *(line("head", at=row["version"], body=row["body"]) for row in heads),
    ]
    held = [each for each in claims if each.kind != "release"]
    # A listing reads only what follows the newest version, so a claim has to come after it.
    return ([*first, *lines], held) if heads else ([*first, *held, *lines], [])


# The tables that a session's log has lines for, each with the column that names the session.
_IN_LOG = {**dict.fromkeys(("session", "uses", "batch", "key", "inbox", "timer", "head"), "sid"), "ref": "child"}


def whole_log(stem: str, desk: Desk) -> tuple[list[Line], list[Line]]:
    """Return all lines of a session's log, from its rows as they are going to be. Its claim is the second part."""
    rows, whole = desk.look(stem), Changes(stem)
    for table in (*_IN_LOG, "msg"):
        rows.make(table)
    found = {table: desk.rows_of(table).find({column: rows.sid}) for table, column in _IN_LOG.items()}
    names = ("", *(name for name in rows.log.messages if name))
    found["msg"] = [row for name in names for row in _messages(desk, rows.log.key_of(name))]
    for table, each in found.items():
        for row in each:
            whole.note(table, None, row)
    (session,) = found["session"]
    lines, _ = lines_of(whole, desk)
    claim, release = _claim_again(session)
    told = [line("taken", at=session["taken"]), *([claim, release] if session["claim"] is None else [])]
    heads = len(found["head"])
    first = opening(session["log"], WITH_LINE if session["line"] is not None else codec.FORMAT, operation_id())
    return [first, *lines[1:-heads], *told, *lines[-heads:]], [] if session["claim"] is None else [claim]


def _messages(desk: Desk, log: str) -> list[Record]:
    return sorted(desk.rows_of("msg").find({"log": log}), key=lambda row: int(row["pos"]))


def _claim_again(session: Record) -> tuple[Line, Line]:
    """Return a session's last claim and its release. They are kept, so that the next claim gets another number."""
    held = Held(Holder(""), 0.0)
    if session["claim"] is not None:
        held = Held(msgspec.json.decode(session["claim"], type=Holder), session["expires"])
    return line("claim", at=session["epoch"], body=msgspec.json.encode(held)), line("release", at=session["epoch"])


def session_rows(changes: Changes) -> tuple[Record | None, Record | None]:
    """Return a session's row before and after, None if it does not exist. Both are None if nothing has changed."""
    for row in changes.added.get("session", ()):
        return None, row
    for before, after in changes.changed.get("session", ()):
        return before, after
    return None, None


def _claim_lines(before: Record | None, after: Record) -> Iterator[Line]:
    was = before or {"claim": None, "expires": None, "epoch": 0}
    at = after["sid"] if before is None else after["epoch"]  # epochs of a new session begin with its birth
    if after["claim"] is None:
        if was["claim"] is not None:
            yield line("release", at=at)
    elif was["claim"] is None or was["epoch"] != after["epoch"]:
        holder = msgspec.json.decode(after["claim"], type=Holder)
        yield line("claim", at=at, body=msgspec.json.encode(Held(holder, after["expires"])))
    elif was["expires"] != after["expires"]:
        yield line("beat", at=at, body=msgspec.json.encode(after["expires"]))


def _branch(log: str) -> str:
    key = LogKey.parse(log)
    return key.name if key else ""


def _value_lines(changes: Changes, desk: Desk) -> Iterator[Line]:
    for row in changes.added.get("uses", ()):
        for value in desk.rows_of("value").find({"hash": row["hash"]}):
            yield line("value", row["hash"], body=value["body"])


def _ref_lines(rows: Iterable[Record]) -> list[Line]:
    shown = sorted((row["log"], row["start"], row["stop"], row["since"] or 0) for row in rows)
    return [line("ref", log, since, msgspec.json.encode([start, stop])) for log, start, stop, since in shown]


def _event_lines(rows: Iterable[Record], desk: Desk) -> Iterator[Line]:
    for row in _in_order(rows):
        yield from (line("event", at=seq, body=body) for seq, body in _entries(row, desk))


def _in_order(batches: Iterable[Record]) -> list[Record]:
    return sorted(batches, key=lambda row: int(row["last"]))


def _entries(row: Record, desk: Desk) -> Iterator[tuple[int, bytes]]:
    """Yield the entries of a batch, each with its number."""
    for seq, entry in enumerate(_unpacked(row, desk), row["last"] - row["count"] + 1):
        yield seq, codec.encode(entry)


def _unpacked(batch: Record, desk: Desk) -> list[Entry]:
    loop = next((run["loop"] for run in desk.rows_of("run").find({"run": batch["run"]})), None)
    return unpack_entries(loop, batch["body"])


def _run_lines(changes: Changes, desk: Desk) -> Iterator[Line]:
    """Yield the places of runs' messages, for a log that is written with gaps. Other logs need no such lines."""
    key = desk.look(changes.stem).key or next((row["log"] for row in changes.added.get("session", ())), "")
    own = [(row["log"], row["start"], row["stop"]) for row in changes.added.get("ref", ())]
    own = [each for each in own if (found := LogKey.parse(each[0])) and found.base == key]
    if not own:
        return
    logs: dict[str, dict[int, bytes]] = {}
    for row in changes.added.get("msg", ()):
        logs.setdefault(name_of_log(changes.stem, _branch(row["log"])), {})[row["pos"]] = row["body"]
    entries = [entry for row in _in_order(changes.added.get("batch", ())) for entry in _unpacked(row, desk)]
    archived = ArchivedSession(
        session_id=SessionId(changes.stem), heads=(), values={}, logs=logs, entries=tuple(entries)
    )
    for loop, (branch, start, stop) in run_stretches(archived).items():
        place = within(own, (f"{key}/{branch}" if branch else key, start, stop))
        if start < stop:
            yield line("run", loop, body=msgspec.json.encode(place[1:]))


def _inbox_lines(rows: Iterable[Record]) -> list[Line]:
    return [line("inbox", at=row["seq"], body=_posted(row)) for row in sorted(rows, key=lambda row: int(row["seq"]))]


def _waits_lines(before: Record | None, after: Record | None) -> Iterator[Line]:
    """Yield the priority of what waits and since when it waits, if a post has changed that."""
    if after is None or after["since"] is None:
        return
    was = before or {"priority": 0, "since": None}
    if (was["priority"], was["since"]) != (after["priority"], after["since"]):
        yield line("waits", at=after["priority"], body=msgspec.json.encode(float(after["since"])))


def _timer_lines(changes: Changes) -> Iterator[Line]:
    """Yield the timers that are gone, then those that were set, since a new one may have an old one's name."""
    for row in changes.removed.get("timer", ()):
        yield line("timer", row["name"], row["timer"])
    for row in (*changes.added.get("timer", ()), *(after for _, after in changes.changed.get("timer", ()))):
        yield line("timer", row["name"], row["timer"], _set(row))


def _set(row: Record) -> bytes:
    return msgspec.json.encode((row["due"], msgspec.Raw(row["body"])))


def _posted(row: Record) -> bytes:
    return codec.encode(Entry(row["kind"], codec.decode_plain(row["body"]), row["run"]))


def _key_lines(changes: Changes) -> list[Line]:
    rows = [*changes.added.get("key", ()), *(after for _, after in changes.changed.get("key", ()))]
    return [line("key", row["name"], row["version"], msgspec.json.encode(row["digest"])) for row in rows]


class Rewriting:
    """A function that turns a log's lines into those of the rewritten log."""

    def __init__(self, changes: Changes, desk: Desk) -> None:
        self._bodies = dict(_bodies(changes.changed, desk))
        self._unused = {row["hash"] for row in changes.removed.get("uses", ())}
        self._timers = {(number, due) for number, due, _ in desk.look(changes.stem).log.timers.values()}

    def __call__(self, each: Line) -> Line:
        if each.kind == "value" and each.name in self._unused:
            # An empty value takes its place, since a missing number would count as damage.
            return replace(each, name="", body=msgspec.Raw(b"null"))
        if each.kind == "timer" and not self._is_set(each):
            return replace(each, body=msgspec.Raw(b"null"))  # an old timer may contain what is redacted
        body = self._bodies.get((each.kind, each.name, each.at))
        return each if body is None else replace(each, body=msgspec.Raw(body))

    def _is_set(self, each: Line) -> bool:
        """Tell whether a line has a timer's present state."""
        if bytes(each.body) == b"null":
            return False
        due, _ = msgspec.json.decode(each.body, type=tuple[float, msgspec.Raw])
        return (each.at, due) in self._timers


def _bodies(
    changed: Mapping[str, list[tuple[Record, Record]]], desk: Desk
) -> Iterator[tuple[tuple[str, str, int], bytes]]:
    for _, row in changed.get("msg", ()):
        yield ("message", _branch(row["log"]), row["pos"]), row["body"]
    for _, row in changed.get("head", ()):
        yield ("head", "", row["version"]), row["body"]
    for _, row in changed.get("batch", ()):
        yield from ((("event", "", seq), body) for seq, body in _entries(row, desk))
    for _, row in changed.get("inbox", ()):
        yield ("inbox", "", row["seq"]), _posted(row)
    for _, row in changed.get("timer", ()):
        yield ("timer", row["name"], row["timer"]), _set(row)
