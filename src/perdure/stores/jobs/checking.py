"""Everything that can be wrong with rows: with those of a session, and with those that belong to none.

It reads no message and no record. `fsck` does, since it loads and dumps every session. An engine's `faults` are what
only the engine can see: damaged pages, a wrong schema, numbers that might be given out twice, seals, the search index,
columns that repeat a body. For files these are torn lines, documents, work that was cut short, and the owner of a log.
An engine that meets damage while it answers a statement raises CorruptRecord. Only that look ends then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from perdure.codec import hash_of_bytes
from perdure.errors import CorruptRecord, InvalidData, InvalidSessionId, KeyUnavailable
from perdure.model.session import AgentSessionInfo, tag_rows
from perdure.protocols import Problem
from perdure.stores.engine import Count, Job, Select, Where
from perdure.stores.format.heads import StoredHead, decode_info, unpacked_head
from perdure.stores.format.renaming import OpenHead, RenamedBlocks
from perdure.stores.format.rows import Stretch, Values
from perdure.stores.jobs import timers, tokens
from perdure.stores.jobs.archive.archived import LENT
from perdure.stores.jobs.attachments import name_of, named_in
from perdure.stores.jobs.claiming import holder_of
from perdure.stores.jobs.lines import began_with, noted_by_owners
from perdure.stores.jobs.record import posted_of, require_key
from perdure.stores.jobs.saving import end_of_log, info_columns, require_log, update_columns
from perdure.stores.jobs.sketching import piece_of
from perdure.stores.jobs.values import gather_unmet, read_value
from perdure.stores.sealing import plain_name
from perdure.stores.tapes import without

_BACKUP = "Restore the session from a backup; until then nothing should be sent to it."
_COPY = "No message is affected. Copying the store into a new one rewrites it."
_SAVE = "No message is affected. Save the session once (a note will do), or copy the store."
_TAGS = "No message is affected. Tag the session with something new, or copy the store into a new one."
_RUN = "Only the record is affected, not the conversation. Copying the store into a new one finds the place again."
_RECORD = "Only the record is affected, not the conversation; restore the session from a backup to repair it."
_INBOX = "It was handled already, and is not needed. Copying the store into a new one leaves it behind."
_POST = "No message is affected. It is set again by the next item that is posted once all are taken."
_GAP = "Handled items are not needed any more: copying the store into a new one leaves them behind."
_CLAIM = (
    "Set `expires` in the session's row to 0 if it has a claim, and to NULL if it has none; then run `perdure recover` "
    "on the session by its id."
)
_KEY = "A request that is sent again under that key may run again. Restore the session from a backup to mend it."
_TIMER = "It will not ring. Set it again with `replace=True`, or drop it by its name."
_RATE = "No message is affected. The next place in it may be given too early or too late."
_TOKEN = "It gives no access. Revoke it by its id with `perdure token revoke`, and make a new one."
_TOKENS = "No token is valid until that is fixed. Restore the file from a backup, or remove it and make new tokens."
_SKETCH = "Followers see the answer once it is whole; a recovered run asks for it again. The next answer replaces it."
_REFS = "Do not delete the session it shows, which would erase that part. Copying the store into a new one mends it."
_USES = "Delete no other session, which might erase it. Copying the store into a new one mends it."
_KEPT = "It keeps text from being erased. Copying the store into a new one leaves it behind."
_LEFT_OVER = "No session shows it. `gc` removes some of it; a copy of the store does not have it."

_NOT_SO = "it is not what the session's row says"
# The columns that lists filter by. A save writes some of them again. It compares the time of creation, and a copy
# tells by that whether a session is there already, so only a backup mends that one.
FILTERED = {
    **dict.fromkeys(("status", "agent", "updated", "recent"), _SAVE),
    **dict.fromkeys(("owner", "parent", "spawned"), _COPY),
    "created": _BACKUP,
}
# Tables whose rows belong to sessions, and the column with the session's number.
_OWNED = {
    **dict.fromkeys(("head", "batch", "run", "inbox", "key", "sketch", "timer", "tag", "uses"), "sid"),
    "ref": "child",
}
_AT_ONCE = 500
_MOST_TOLD = 20

# The errors that damaged data can cause in code that reads it.
_DAMAGE = (CorruptRecord, InvalidData, InvalidSessionId, TypeError, ValueError, LookupError, AttributeError)


def check() -> Job[list[Problem]]:
    """Return all that is wrong, read in one snapshot, one session after the other."""
    survey = _Survey()
    yield from _check_meta(survey)
    with survey.watching(None, "the rates", _RATE):
        yield from _check_rates(survey)
    with survey.watching(None, "the tokens", _TOKENS):
        yield from _check_tokens(survey)
    with survey.watching(None, "the sessions"):
        yield from _check_sessions(survey)
    with survey.watching(None, "the logs of erased sessions"):
        yield from _check_orphans(survey)
    with survey.watching(None, "the values"):
        yield from _check_values(survey)
    with survey.watching(None, "the images and files"):
        yield from _check_files(survey)
    for table, column in _OWNED.items():
        with survey.watching(None, f"the table {table}"):
            yield from _check_left_over(survey, table, column, "session", "sid")
    with survey.watching(None, "the table msg"):
        yield from _check_left_over(survey, "msg", "log", "log", "log")
    with survey.watching(None, "the table attached"):
        yield from _check_left_over(survey, "attached", "log", "log", "log")
    return survey.problems


class _Survey:
    """A check under way: the problems found, and the number of rows met in each table."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.met: Counter[str] = Counter()

    def note(self, session_id: str | None, where: str, what: str, repair: str, *, needs_key: bool = False) -> None:
        self.problems.append(Problem(session_id, where, what, repair, needs_key))

    @contextmanager
    def watching(self, session_id: str | None, where: str, repair: str = _BACKUP) -> Iterator[None]:
        """Note the damage that ends a look, so that the check continues."""
        try:
            yield
        except CorruptRecord as error:
            self.note(error.session_id or session_id, error.position.removeprefix("of "), error.reason, repair)
        except KeyUnavailable as error:
            what = f"it could not be checked: {error.what}"
            self.note(error.session_id or session_id, where, what, error.advice, needs_key=True)
        except _DAMAGE as error:
            self.note(session_id, where, f"it cannot be read ({type(error).__name__}: {error})", repair)


def _behind(column: str, last: Any) -> Where:
    """Return the condition for the rows after the last one."""
    return {f"{column} !=": None} if last is None else {f"{column} >": last}


def _check_meta(survey: _Survey) -> Job[None]:
    rows: list[Any] = []
    with survey.watching(None, "meta"):
        rows = yield Select("meta", ("value",), {"key": "erasures"})
    if not rows or type(rows[0][0]) is not int or rows[0][0] < 0:
        survey.note(None, "meta erasures", "it is not the number of erasures so far", _COPY)


class SessionRow(NamedTuple):
    """The row of a session."""

    sid: int
    id: str
    log: int | str
    version: int
    msg_end: int
    evt_end: int
    inbox_end: int
    taken: int
    epoch: int
    claim: bytes | None
    expires: float | None
    status: str
    agent: str
    owner: str | None
    parent: str | None
    created: float
    updated: float
    spawned: int
    recent: int
    line: int | None
    priority: int
    since: float | None


def _check_sessions(survey: _Survey) -> Job[None]:
    last: Any = None
    while rows := (yield Select("session", SessionRow._fields, _behind("sid", last), order="sid", limit=_AT_ONCE)):
        for row in rows:
            yield from _check_session(survey, SessionRow(*row))
        last = rows[-1][0]


def _check_session(survey: _Survey, session: SessionRow) -> Job[None]:
    with survey.watching(session.id, "its claim"):
        _check_claim(survey, session)
    looks = {
        "its logs": _check_logs,
        "its record": _check_record,
        "its inbox": _check_inbox,
        "its idempotency keys": _check_keys,
        "its answer under way": _check_sketches,
        "its timers": _check_timers,
        "what it is noted to show of others": _check_refs,
        "its line": _check_line,
        "its versions": _check_versions,
    }
    for where, look in looks.items():
        with survey.watching(session.id, where):
            yield from look(survey, session)


def _check_claim(survey: _Survey, session: SessionRow) -> None:
    if type(session.log) is int and not session.sid << 20 <= session.epoch < (session.sid + 1) << 20:
        # In files it counts from the time of birth, and their engine checks it.
        what = "it is out of the session's range, so that a claim on another session of the same id might count as one"
        survey.note(session.id, "its epoch", f"{what} on it", _COPY)
    if (session.claim is None) != (session.expires is None):
        survey.note(session.id, "its claim", "it has a holder and no end, or an end and no holder", _CLAIM)
    if session.claim is not None:
        holder_of(session.id, session.claim)


def _check_logs(survey: _Survey, session: SessionRow) -> Job[None]:
    """Check the session's logs, their ends, and the places of its runs in them."""
    names: dict[int | str, str] = {}
    ends: dict[int | str, int] = {session.log: 0}
    rows = yield Select("log", ("log", "name", "crc"), {"sid": session.sid}, order="log")
    in_part = yield from noted_by_owners({log: session.sid for log, _, _ in rows})
    for log, name, crc in rows:
        with survey.watching(None, f"log {log}"):
            require_log(None, log, session.sid, name, crc)
        names[log], ends[log] = name, (yield from end_of_log(log))
        ((count,),) = yield Count("msg", {"log": log})
        survey.met["msg"] += count
        yield from _check_attached(survey, session.id, log)
        if log in in_part:
            yield from _check_kept(survey, session.id, log, ends[log])
        # A log with copies of another session's messages has only those that are shown.
        elif count != ends[log] and not name.startswith(LENT):
            survey.note(session.id, f"log {log}", "its messages are not numbered from 0 on", _BACKUP)
    if names.get(session.log) != "":
        survey.note(session.id, "its log", _NOT_SO, _BACKUP)
    if session.msg_end != ends[session.log]:
        survey.note(session.id, "the end of its log", _NOT_SO, _BACKUP)
    yield from _check_runs(survey, session, names, ends)


def _check_kept(survey: _Survey, session_id: str, log: int | str, end: int) -> Job[None]:
    """Check a log with forgotten messages: it has those that rows of any session name, and no others."""
    refs = yield Select("ref", ("log", "start", "stop"), {"log": log})
    held = [(log, pos, pos + 1) for (pos,) in (yield Select("msg", ("pos",), {"log": log}))]
    for _, start, stop in without([(log, start, min(stop, end)) for _, start, stop in refs], held):
        survey.note(session_id, f"messages {start} to {stop} of log {log}", "they are missing", _BACKUP)
    for _, start, stop in without(held, refs):
        what = "they are left of versions that were forgotten, and nobody shows them"
        survey.note(session_id, f"messages {start} to {stop} of log {log}", what, _LEFT_OVER)


def _check_attached(survey: _Survey, session_id: str | None, log: int | str) -> Job[None]:
    """Check that the images and files in a log's messages are noted, and that they are there."""
    rows = yield Select("attached", ("pos", "hash"), {"log": log})
    survey.met["attached"] += len(rows)
    noted = {(pos, plain_name(key)) for pos, key in rows if type(pos) is not int or pos >= 0}
    named = {(pos, key) for pos, hashes in (yield from named_in(log)) for key in hashes}
    for pos, key in sorted(named - noted):
        survey.note(
            session_id, name_of(log, pos), f"that it has the file {key} is not noted where erasures look", _USES
        )
    for pos, key in sorted(noted - named, key=str):
        survey.note(session_id, name_of(log, pos), f"it is noted to have the file {key}, and does not", _KEPT)
    for key in sorted({key for _, key in rows}, key=str):
        if not (yield Select("blob", ("hash",), {"hash": key})):
            survey.note(session_id, f"file {key}", "it is missing", _BACKUP)


def _check_runs(
    survey: _Survey, session: SessionRow, names: Mapping[int | str, str], ends: Mapping[int | str, int]
) -> Job[None]:
    rows = yield Select("run", ("loop", "log", "first_pos", "end_pos"), {"sid": session.sid})
    survey.met["run"] += len(rows)
    if any(names.get(log) not in ("", loop) for loop, log, _, _ in rows):
        what = "it is missing, another session's, or a branch's of another name"
        survey.note(session.id, "the log of one of its runs", what, _RECORD)
    if any(not 0 <= start <= stop <= ends.get(log, 0) for _, log, start, stop in rows):
        survey.note(session.id, "the stretch of one of its runs", "it goes beyond the log that it is in", _RUN)


def _check_record(survey: _Survey, session: SessionRow) -> Job[None]:
    rows = yield Select("batch", ("last", "count"), {"sid": session.sid}, order="last")
    survey.met["batch"] += len(rows)
    if any(last - count != before for (last, count), (before, _) in zip(rows, [(0, 0), *rows], strict=False)):
        survey.note(session.id, "its record", "its entries are not numbered from 1 on", _RECORD)
    if session.evt_end != (rows[-1][0] if rows else 0):
        survey.note(session.id, "the end of its record", _NOT_SO, _BACKUP)


def _check_inbox(survey: _Survey, session: SessionRow) -> Job[None]:
    rows = yield Select("inbox", ("seq", "run", "kind", "crc", "body"), {"sid": session.sid}, order="seq")
    survey.met["inbox"] += len(rows)
    if session.inbox_end != (rows[-1][0] if rows else 0):
        survey.note(session.id, "the end of its inbox", _NOT_SO, _BACKUP)
    if [row[0] for row in rows] != [*range(1, len(rows) + 1)]:
        survey.note(session.id, "its inbox", "an item is missing from it", _GAP)
    if not 0 <= session.taken <= session.inbox_end:
        what = "it is noted to be taken to where it does not reach, so that what is posted would not be heard"
        survey.note(session.id, "how far its inbox is taken", what, _COPY)
    elif session.taken < session.inbox_end and not (type(session.since) is float and type(session.priority) is int):
        what = "it is missing or of another type, so that lists of what waits may fail"
        survey.note(session.id, "since when its inbox waits, or how urgent it is", what, _POST)
    for row in rows:
        if row[0] <= session.taken:  # `fsck` reads the others; these are read by nobody, but their text is still there
            with survey.watching(session.id, f"inbox {row[0]}", _INBOX):
                posted_of(session.id, session.sid, *row)


def _check_keys(survey: _Survey, session: SessionRow) -> Job[None]:
    rows = yield Select("key", ("name", "digest", "version", "crc"), {"sid": session.sid})
    survey.met["key"] += len(rows)
    for row in rows:
        with survey.watching(session.id, f"key {row[0]!r}", _KEY):
            require_key(session.id, session.sid, *row)
        if not 1 <= row[2] <= session.version:
            what = f"it names a version that does not exist ({row[2]})"
            survey.note(session.id, f"idempotency key {row[0]!r}", what, _KEY)


def _check_sketches(survey: _Survey, session: SessionRow) -> Job[None]:
    rows = yield Select("sketch", ("start", "crc", "body"), {"sid": session.sid}, order="start")
    survey.met["sketch"] += len(rows)
    if any(piece_of(session.id, *row) is None for row in rows):
        survey.note(session.id, "its answer under way", "a piece of it is not what was written", _SKETCH)
    if rows and session.claim is None:
        survey.note(session.id, "its answer under way", "it is of a run that is over", _LEFT_OVER)


def _check_timers(survey: _Survey, session: SessionRow) -> Job[None]:
    rows = yield Select("timer", timers.COLUMNS, {"sid": session.sid}, order="timer")
    survey.met["timer"] += len(rows)
    for row in rows:
        with survey.watching(session.id, f"timer {row[2]!r}", _TIMER):
            timers.timer_of(session.id, row)


def _check_rates(survey: _Survey) -> Job[None]:
    for name, until in (yield Select("rate", ("name", "until"))):
        if type(until) is not int or until < 0:
            survey.note(None, f"rate {name!r}", "it is not a time", _RATE)


def _check_tokens(survey: _Survey) -> Job[None]:
    for row in (yield Select("token", tokens.COLUMNS)):
        with survey.watching(None, f"token {row[1]!r}", _TOKEN):
            tokens.token_of(row)


def _check_refs(survey: _Survey, session: SessionRow) -> Job[None]:
    """Check that all that the session is noted to show of others is there."""
    own = {log for (log,) in (yield Select("log", ("log",), {"sid": session.sid}))}
    for log, start, stop in (yield Select("ref", ("log", "start", "stop"), {"child": session.sid})):
        survey.met["ref"] += 1
        if log in own:
            continue
        is_there = yield Select("log", ("log",), {"log": log})
        if not is_there or not 0 <= start <= stop <= (yield from end_of_log(log)):
            what = "it is a stretch of a log that is not there, or that does not reach so far"
            survey.note(session.id, "what it is noted to show of others", what, _KEPT)


def _check_line(survey: _Survey, session: SessionRow) -> Job[None]:
    """Check that the line is there and older, which excludes a circle."""
    if session.line is not None:
        is_there = yield Select("session", ("sid",), {"sid": session.line})
        if not is_there or session.line >= session.sid:
            survey.note(session.id, "its line", "it is a session that is not there, or that is younger", _REFS)


def _check_versions(survey: _Survey, session: SessionRow) -> Job[None]:
    """Check the versions, and the columns and rows beside them that lists and erasures use."""
    tags = {tag for (tag,) in (yield Select("tag", ("tag",), {"sid": session.sid}))}
    uses = {key for (key,) in (yield Select("uses", ("hash",), {"sid": session.sid}))}
    rows = yield Select("head", ("version", "crc", "body"), {"sid": session.sid}, order="version")
    survey.met.update({"tag": len(tags), "uses": len(uses), "head": len(rows)})
    if session.version != (rows[-1][0] if rows else 0):
        survey.note(session.id, "its newest version", _NOT_SO, _BACKUP)
    values = {key for (key,) in (yield Select("value", ("hash",), {"hash in": sorted(uses)}))}
    for key in sorted(uses - values):
        survey.note(session.id, f"value {key}", "it is missing", _BACKUP)
    heads = {version: unpacked_head(body, crc, session.id, session.sid, version) for version, crc, body in rows}
    first = 1
    if session.version in heads:
        info = decode_info(heads[session.version], session.id, session.version)
        first = info.first_version
        survey.problems += wrong_columns(info, session, tags)
    if [row[0] for row in rows] != [*range(first, first + len(rows))]:
        survey.note(session.id, "its versions", f"they are not numbered from {first} on", _BACKUP)
    yield from _check_references(survey, session, heads, uses)


def wrong_columns(info: AgentSessionInfo, session: SessionRow, tags: Iterable[str]) -> Iterator[Problem]:
    """Compare the columns that lists filter by with the newest version, and yield the differences."""
    expected = {**info_columns(info), **update_columns(info.updated_at)}
    for name, repair in FILTERED.items():
        found, said = getattr(session, name), expected[name]
        if found != said:
            what = f"it says {found!r}, and the newest version {said!r}"
            yield Problem(info.id, f"column {name}", what, repair)
    if set(tags) != set(tag_rows(info)):
        yield Problem(info.id, "tags", "they are not those of the newest version", _TAGS)


def _check_references(survey: _Survey, session: SessionRow, heads: Mapping[int, bytes], uses: set[str]) -> Job[None]:
    """Compare the notes that erasures use with all that the versions name."""
    named: set[str] = set()
    shown: set[Stretch] = set()
    values: Values = {}

    def meet(log: int | str, start: int, stop: int) -> int | str:
        shown.add((log, start, stop))
        return log

    blocks = RenamedBlocks(meet)
    for version, raw in heads.items():
        head = StoredHead(raw, session.id, version)
        # Versions next to each other have mostly the same values, so those of the last are kept for the next.
        values = (yield from gather_unmet(session.id, head, values, blocks.met)).values
        named |= values.keys()
        OpenHead(raw, head, values).renamed(blocks)
    for key in sorted(uses - named):
        with survey.watching(session.id, f"value {key}"):
            yield from read_value(session.id, key)
    own = {log for (log,) in (yield Select("log", ("log",), {"sid": session.sid}))}
    noted = yield Select("ref", ("log", "start", "stop"), {"child": session.sid})
    # All that the line began with is in its own rows or in those of its line, which is checked by itself.
    if session.line is not None:
        for line_id, line in (yield Select("session", ("id", "line"), {"sid": session.line})):
            noted += yield from began_with(line_id, session.line, line)
    kept = [each for each in noted if each[0] in own]
    noted = [each for each in noted if each[0] not in own]
    foreign = [stretch for stretch in shown if stretch[0] not in own]
    survey.problems += wrong_references(session.id, (named, uses), (foreign, noted))
    in_part = {log for log, _, _ in kept}
    for log, start, stop in without([each for each in shown if each[0] in in_part], kept):
        where = f"what it keeps of log {log}"
        what = f"it shows messages {start} to {stop}, and that is not noted where erasures look"
        survey.note(session.id, where, what, _REFS)


def wrong_references(
    session_id: str, values: tuple[set[str], set[str]], stretches: tuple[Iterable[Stretch], Iterable[Stretch]]
) -> Iterator[Problem]:
    """Yield the differences between what versions name and what is noted: values, and stretches of others' logs."""
    named, used = values
    for key in sorted(named - used):
        what = "a version names it, and that is not noted where deletions look"
        yield Problem(session_id, f"value {key}", what, _USES)
    for key in sorted(used - named):
        yield Problem(session_id, f"value {key}", "it is noted to be used, and no version names it", _KEPT)
    shown, noted = stretches
    for log, start, stop in without(shown, noted):
        what = "the session shows it, and that is not noted where deletions look"
        yield Problem(session_id, f"messages {start} to {stop} of log {log}", what, _REFS)
    for log, start, stop in without(noted, shown):
        what = "it is noted that the session shows it, and no version does"
        yield Problem(session_id, f"messages {start} to {stop} of log {log}", what, _KEPT)


def _check_orphans(survey: _Survey) -> Job[None]:
    """Check that all that is left of erased sessions' logs is shown by others."""
    last: Any = None
    while rows := (yield Select("log", ("log", "sid"), _behind("log", last), order="log", limit=_AT_ONCE)):
        alive = {sid for (sid,) in (yield Select("session", ("sid",), {"sid in": [*{row[1] for row in rows}]}))}
        for log, sid in rows:
            if sid not in alive:
                with survey.watching(None, f"log {log}"):
                    yield from _check_orphan(survey, log)
        last = rows[-1][0]


def _check_orphan(survey: _Survey, log: int | str) -> Job[None]:
    refs = yield Select("ref", ("log", "start", "stop"), {"log": log})
    held = yield Select("msg", ("pos",), {"log": log})
    survey.met["msg"] += len(held)
    yield from _check_attached(survey, None, log)
    if not refs:
        survey.note(None, f"log {log}", "it belongs to no session", _LEFT_OVER)
    for _, start, stop in without([(log, pos, pos + 1) for (pos,) in held], refs):
        what = "they are left of an erased session, and nobody shows them"
        survey.note(None, f"messages {start} to {stop} of log {log}", what, _LEFT_OVER)
    for sid, name, crc in (yield Select("log", ("sid", "name", "crc"), {"log": log})):
        require_log(None, log, sid, name, crc)


def _check_values(survey: _Survey) -> Job[None]:
    last: Any = None
    while rows := (yield Select("value", ("hash",), _behind("hash", last), order="hash", limit=_AT_ONCE)):
        keys = [key for (key,) in rows]
        used = {key for (key,) in (yield Select("uses", ("hash",), {"hash in": keys}))}
        for key in keys:
            if key not in used:
                survey.note(None, f"value {key}", "it belongs to no session", _LEFT_OVER)
        last = keys[-1]


def _check_files(survey: _Survey) -> Job[None]:
    """Check the images and files one by one, as each may be large."""
    last = ""
    while rows := (yield Select("blob", ("hash", "size"), {"hash >": last}, order="hash", limit=_AT_ONCE)):
        for key, size in rows:
            with survey.watching(None, f"file {key}"):
                yield from _check_file(survey, key, size)
        last = rows[-1][0]


def _check_file(survey: _Survey, key: str, size: int) -> Job[None]:
    if not (yield Select("attached", ("log",), {"hash": key}, limit=1)):
        survey.note(None, f"file {key}", "it belongs to no message", _LEFT_OVER)
    for (body,) in (yield Select("blob", ("body",), {"hash": key})):
        if type(body) is not bytes or hash_of_bytes(body) != plain_name(key) or len(body) != size:
            survey.note(None, f"file {key}", "its hash or its size does not match", _BACKUP)


def _check_left_over(survey: _Survey, table: str, column: str, owners: str, key: str) -> Job[None]:
    """Look for rows without an owner, if a table has more rows than were met with their owners."""
    ((count,),) = yield Count(table, {})
    last, told = None, 0
    while count != survey.met[table] and told < _MOST_TOLD:
        rows = yield Select(table, (column,), _behind(column, last), order=column, limit=1)
        if not rows:
            return
        last = rows[0][0]
        if not (yield Select(owners, (key,), {key: last})):
            survey.note(None, f"{table} {last}", "it belongs to no session", _LEFT_OVER)
            told += 1
