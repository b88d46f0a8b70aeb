"""A session with a short view, read in the event loop's thread, which takes less time than a hand-over.

What would take longer is left to the reading threads: a long view, a large message, a slow disk. So is all that is
wrong: the job that reads there reports it.
"""

from __future__ import annotations

import apsw

from perdure.stores.format.gathering import Gathering
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import Values
from perdure.stores.jobs import loading
from perdure.stores.jobs.claiming import number
from perdure.stores.jobs.loading import Load, Loaded
from perdure.stores.jobs.values import unpacked_value
from perdure.stores.sealing import Sealing

FEW = 64
"""The most messages that are read. Fifty of 650 bytes take 0.1 ms."""
_SMALL = 16_384
"""The most bytes of a row that are read. SQLite tells the length without reading the rest of the row."""
_SLOW = 0.02
_SHARE = 100

# The id is read a second time, by the number of the row: a look-up by an index returns what the index says.
_HEAD = (
    "SELECT session.sid, session.version, head.crc, (SELECT value FROM meta WHERE key = 'erasures'),"
    " (SELECT id FROM session AS found WHERE found.sid = session.sid),"
    " (SELECT max(version) FROM head AS last WHERE last.sid = session.sid),"
    f" CASE WHEN length(head.body) <= {_SMALL} THEN head.body END"
    " FROM session JOIN head ON head.sid = session.sid AND head.version = session.version WHERE session.id = ?"
)
_VALUE = f"SELECT body FROM value WHERE hash = ? AND length(body) <= {_SMALL}"
_MESSAGES = (
    f"SELECT pos, crc, CASE WHEN length(body) <= {_SMALL} THEN body END"
    " FROM msg WHERE log = ? AND pos >= ? AND pos < ? ORDER BY pos"
)


def read_short(load: Load, sealing: Sealing, db: apsw.Connection) -> Loaded | None:
    """Return a session as it is now. If this returns None or raises, the job has to read the session."""
    row = db.execute(_HEAD, (str(load.session_id),)).fetchone()
    if row is None:
        return None
    sid, version, crc, erasures, found, last, body = row
    if (found, last) != (load.session_id, version) or type(body) is not bytes:
        return None
    body, crc = sealing.opened("head", body, crc)
    head = StoredHead(unpacked_head(body, crc, load.session_id, sid, version), load.session_id, version)
    values = _values(load, head, sealing, db)
    if values is None:
        return None
    gaps = load.missing(head, values)
    if sum(stop - start for _, start, stop in gaps) > FEW:
        return None
    fetched = []
    for each, start, stop in gaps:
        rows = db.execute(_MESSAGES, (each, start, stop)).fetchall()
        if sealing.is_on:
            rows = sealing.opened_rows("msg", rows)
        fetched.append((each, start, loading.decoded(load.session_id, each, start, stop, rows)))
    return Loaded(number(erasures, None, "meta erasures"), head, values, fetched)


def _values(load: Load, head: StoredHead, sealing: Sealing, db: apsw.Connection) -> Values | None:
    """Return the values that a version names; None if one is large."""
    gathering = Gathering(head)
    for key in gathering:
        value = load.cached.get(key)
        if value is None:
            row = db.execute(_VALUE, (key,)).fetchone()
            if row is None:
                return None
            value = unpacked_value(load.session_id, key, sealing.opened("value", row[0], name=key)[0])
        gathering.put(key, value)
    return gathering.values


class Patience:
    """A guard that lets an event loop read by itself. After a slow read it does not, for a hundred times as long.

    So a slow disk costs the loop at most a hundredth of its time.
    """

    def __init__(self) -> None:
        self._again = 0.0

    def is_there(self, now: float) -> bool:
        return now >= self._again

    def note(self, start: float, end: float) -> None:
        """Note when a read began and ended."""
        if end - start > _SLOW:
            self._again = end + (end - start) * _SHARE
