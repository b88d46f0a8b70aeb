"""A PostgreSQL schema looked at beneath its sessions: rows that belong to nobody, ends, columns that filters go by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perdure.errors import CorruptRecord
from perdure.model.session import AgentSessionInfo
from perdure.protocols import Problem
from perdure.stores.moving import merged
from perdure.stores.postgres_archive import Db, read_heads, read_value, rows_of
from perdure.stores.postgres_rows import plain
from perdure.stores.renaming import OpenHead
from perdure.stores.rows import Stretch, decode_info

_LEFT_OVER = "Nobody is shown it. `gc` clears up some of it; in a copy of the store it stays behind."
_ENDS = "Restore the session from a backup; until then nothing should be sent to it."
_COLUMNS = "Save the session once (a tag or a note will do): that writes the columns anew. Or copy it into a new store."
_REFS = "Do not delete the session it shows, which would erase that part. Copying the store into a new one mends it."
_CLAIMS = "A killed run of it would not be found by `recover`. Run `recover` on the session by its id."

_GONE = "NOT EXISTS (SELECT 1 FROM session WHERE session.sid = {})"
_BELONG_TO_NOBODY = {
    **{
        table: f"SELECT DISTINCT sid FROM {table} WHERE {_GONE.format(f'{table}.sid')}"
        for table in ("head", "batch", "run", "inbox", "key", "tag", "uses", "claimed")
    },
    "value": "SELECT hash FROM value WHERE NOT EXISTS (SELECT 1 FROM uses WHERE uses.hash = value.hash)",
    "ref": f"SELECT DISTINCT child FROM ref WHERE {_GONE.format('ref.child')}",
    "log": (
        f"SELECT log FROM log WHERE {_GONE.format('log.sid')}"
        " AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.log = log.log)"
    ),
    "msg": "SELECT DISTINCT log FROM msg WHERE NOT EXISTS (SELECT 1 FROM log WHERE log.log = msg.log)",
    "msg of an erased session": (
        f"SELECT DISTINCT msg.log FROM msg JOIN log ON log.log = msg.log WHERE {_GONE.format('log.sid')} AND NOT EXISTS"
        " (SELECT 1 FROM ref WHERE ref.log = msg.log AND ref.start <= msg.pos AND msg.pos < ref.stop)"
    ),
}
_WRONG_ENDS = {
    "its newest version": "version <> (SELECT coalesce(max(version), 0) FROM head WHERE head.sid = s.sid)",
    "the end of its log": "msg_end <> (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = s.log)",
    "the end of its record": "evt_end <> (SELECT coalesce(max(last), 0) FROM batch WHERE batch.sid = s.sid)",
    "the end of its inbox": "inbox_end <> (SELECT coalesce(max(seq), 0) FROM inbox WHERE inbox.sid = s.sid)",
    "its log": "NOT EXISTS (SELECT 1 FROM log WHERE log.log = s.log AND log.sid = s.sid AND log.name = '')",
    "the log of one of its runs": (
        "EXISTS (SELECT 1 FROM run LEFT JOIN log ON log.log = run.log"
        " WHERE run.sid = s.sid AND log.sid IS DISTINCT FROM s.sid)"
    ),
}
_UNNOTED = (
    "SELECT id FROM session WHERE claim IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM claimed WHERE claimed.sid = session.sid)"
)


def check(db: Db) -> list[Problem]:
    """All that is wrong, read in one snapshot."""
    return [problem for look in (_left_over, _ends, _missing_values, _heads) for problem in look(db)]


def _left_over(db: Db) -> Iterator[Problem]:
    for table, sql in _BELONG_TO_NOBODY.items():
        for (number,) in rows_of(db, f"{sql} LIMIT 20"):
            yield Problem(None, f"{table} {number}", "it belongs to no session", _LEFT_OVER)


def _ends(db: Db) -> Iterator[Problem]:
    for what, condition in _WRONG_ENDS.items():
        for (session_id,) in rows_of(db, f"SELECT id FROM session AS s WHERE {condition}"):
            yield Problem(session_id, what, "it is not what the session's row says", _ENDS)
    for (session_id,) in rows_of(db, _UNNOTED):
        yield Problem(session_id, "its claim", "it is not noted where those who recover look", _CLAIMS)


def _missing_values(db: Db) -> Iterator[Problem]:
    sql = (
        "SELECT id, hash FROM uses JOIN session ON session.sid = uses.sid"
        " WHERE NOT EXISTS (SELECT 1 FROM value WHERE value.hash = uses.hash)"
    )
    for session_id, key in rows_of(db, sql):
        yield Problem(session_id, f"value {key}", "it is missing", _ENDS)


def _heads(db: Db) -> Iterator[Problem]:
    """The columns that filters go by, and the notes that keep what others show, against what the heads say."""
    sql = "SELECT sid, id, version, status, agent, owner, parent, created, updated FROM session ORDER BY sid"
    for sid, session_id, version, *columns in rows_of(db, sql):
        try:
            heads = read_heads(db, session_id, sid)
            info = decode_info(heads[version], session_id, version)
            yield from _columns(db, sid, info, columns)
            yield from _refs(db, sid, session_id, heads)
        except (CorruptRecord, KeyError):
            continue  # a damaged head is reported by those who read the session


def _columns(db: Db, sid: int, info: AgentSessionInfo, columns: list[object]) -> Iterator[Problem]:
    names = ("status", "agent", "owner", "parent", "created", "updated")
    expected = (
        info.status.value,
        plain(info.agent_name),
        None if info.owner is None else plain(info.owner),
        info.parent_id,
        info.created_at.timestamp(),
        info.updated_at.timestamp(),
    )
    for name, found, said in zip(names, columns, expected, strict=True):
        if found != said:
            yield Problem(info.id, f"column {name}", f"it says {found!r}, and the newest version {said!r}", _COLUMNS)
    if {tag for (tag,) in rows_of(db, "SELECT tag FROM tag WHERE sid = %s", sid)} != set(map(plain, info.tags)):
        yield Problem(info.id, "tags", "they are not those of the newest version", _COLUMNS)


def _refs(db: Db, sid: int, session_id: str, heads: dict[int, bytes]) -> Iterator[Problem]:
    own = {log for (log,) in rows_of(db, "SELECT log FROM log WHERE sid = %s", sid)}
    noted = merged(rows_of(db, "SELECT log, start, stop FROM ref WHERE child = %s", sid))
    for log, start, stop in _named(db, session_id, heads):
        if log not in own and not any(log == other and low <= start and stop <= high for other, low, high in noted):
            what = "the session shows it, and that is not noted where deletions look"
            yield Problem(session_id, f"messages {start} to {stop} of log {log}", what, _REFS)


def _named(db: Db, session_id: str, heads: dict[int, bytes]) -> Iterable[Stretch]:
    met: set[Stretch] = set()

    def meet(log: int | str, start: int, stop: int) -> int | str:
        met.add((log, start, stop))
        return log

    for version, raw in heads.items():
        OpenHead(raw, session_id, version, lambda key: read_value(db, session_id, key)).renamed(meet)
    return merged(met)
