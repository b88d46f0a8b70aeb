"""What the SQL stores promise beneath their sessions: conditions that no row may meet, and columns that heads bear out.

Both dialects read the conditions as they stand. Each costs what a table holds, and an index's look for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from perdure.model.session import AgentSessionInfo
from perdure.protocols import Problem
from perdure.stores.noted import KEPT

LEFT_OVER = "Nobody is shown it. `gc` clears up some of it; in a copy of the store it stays behind."
ENDS = "Restore the session from a backup; until then nothing should be sent to it."
_COPY = "Nothing that was said is touched by it. Copying the store into a new one writes it anew."
_SAVE = "Nothing that was said is touched by it. Save the session once (a note will do), or copy the store."
_TAGS = "Nothing that was said is touched by it. Tag the session with something new, or copy the store into a new one."
_RUN = (
    "The conversation is not touched by this, only its record. Copying the store into a new one finds the place anew."
)
_RECORD = "The conversation is not touched by this, only its record; restore the session from a backup to mend that."
_CLAIM = (
    "Set `expires` in the session's row to 0 if it has a claim, and to NULL if it has none; then run `perdure recover` "
    "on the session by its id."
)
KEY = "A request that is sent again under that key may be answered anew. Restore the session from a backup to mend it."


class Rule(NamedTuple):
    """A condition that no session's row may meet, and how to say that one does."""

    where: str
    what: str
    repair: str
    condition: str


_NOT_SO = "it is not what the session's row says"
_END_OF_LOG = "(SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = {})"
RULES = (
    Rule(
        "its newest version",
        _NOT_SO,
        ENDS,
        "version <> (SELECT coalesce(max(version), 0) FROM head WHERE head.sid = s.sid)",
    ),
    Rule("the end of its log", _NOT_SO, ENDS, f"msg_end <> {_END_OF_LOG.format('s.log')}"),
    Rule(
        "the end of its record",
        _NOT_SO,
        ENDS,
        "evt_end <> (SELECT coalesce(max(last), 0) FROM batch WHERE batch.sid = s.sid)",
    ),
    Rule(
        "the end of its inbox",
        _NOT_SO,
        ENDS,
        "inbox_end <> (SELECT coalesce(max(seq), 0) FROM inbox WHERE inbox.sid = s.sid)",
    ),
    Rule(
        "its inbox",
        "an item is missing from it",
        "What has been dealt with is not needed any more: copying the store into a new one leaves that behind.",
        "(SELECT count(*) FROM inbox WHERE inbox.sid = s.sid AND seq > 0) <>"
        " (SELECT coalesce(max(seq), 0) FROM inbox WHERE inbox.sid = s.sid)",
    ),
    Rule(
        "how far its inbox is taken",
        "it is noted to be taken to where it does not reach, so that what is posted would not be heard",
        _COPY,
        "taken < 0 OR taken > inbox_end",
    ),
    Rule(
        "its epoch",
        "it is out of the session's range, so that a claim on another session of the same id might count as one on it",
        _COPY,
        "epoch < (sid << 20) OR epoch >= ((sid + 1) << 20)",
    ),
    Rule(
        "its claim",
        "it has a holder and no end, or an end and no holder",
        _CLAIM,
        "(claim IS NULL) <> (expires IS NULL)",
    ),
    Rule(
        "its log",
        _NOT_SO,
        ENDS,
        "NOT EXISTS (SELECT 1 FROM log WHERE log.log = s.log AND log.sid = s.sid AND log.name = '')",
    ),
    Rule(
        "the log of one of its runs",
        "it is missing, another session's, or a branch's of another name",
        _RECORD,
        "EXISTS (SELECT 1 FROM run LEFT JOIN log ON log.log = run.log WHERE run.sid = s.sid"
        " AND (log.sid IS DISTINCT FROM s.sid OR log.name NOT IN ('', run.loop)))",
    ),
    Rule(
        "the stretch of one of its runs",
        "it goes beyond the log that it is in",
        _RUN,
        "EXISTS (SELECT 1 FROM run WHERE run.sid = s.sid AND (first_pos < 0 OR first_pos > end_pos"
        f" OR end_pos > {_END_OF_LOG.format('run.log')}))",
    ),
    Rule(
        "one of its idempotency keys",
        "it stands for a version that there is not",
        KEY,
        "EXISTS (SELECT 1 FROM key WHERE key.sid = s.sid AND (key.version < 1 OR key.version > s.version))",
    ),
    Rule(
        "what it is noted to show of others",
        "it is a stretch of a log that is not there, or that does not reach so far",
        KEPT,
        "EXISTS (SELECT 1 FROM ref WHERE ref.child = s.sid AND (start < 0 OR start > stop"
        " OR NOT EXISTS (SELECT 1 FROM log WHERE log.log = ref.log)"
        f" OR stop > {_END_OF_LOG.format('ref.log')}))",
    ),
)

_GONE = "NOT EXISTS (SELECT 1 FROM session WHERE session.sid = {})"


def left_over(*more_tables: str) -> dict[str, str]:
    """By table, what selects the numbers of rows that belong to no session."""
    tables = ("head", "batch", "run", "inbox", "key", "tag", "uses", *more_tables)
    return {
        **{each: f"SELECT DISTINCT sid FROM {each} WHERE {_GONE.format(f'{each}.sid')}" for each in tables},
        "value": "SELECT hash FROM value WHERE NOT EXISTS (SELECT 1 FROM uses WHERE uses.hash = value.hash)",
        "ref": f"SELECT DISTINCT child FROM ref WHERE {_GONE.format('ref.child')}",
        "log": (
            f"SELECT log FROM log WHERE {_GONE.format('log.sid')}"
            " AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.log = log.log)"
        ),
        "msg": "SELECT DISTINCT log FROM msg WHERE NOT EXISTS (SELECT 1 FROM log WHERE log.log = msg.log)",
        "msg of an erased session": (
            f"SELECT DISTINCT msg.log FROM msg JOIN log ON log.log = msg.log WHERE {_GONE.format('log.sid')}"
            " AND NOT EXISTS"
            " (SELECT 1 FROM ref WHERE ref.log = msg.log AND ref.start <= msg.pos AND msg.pos < ref.stop)"
        ),
    }


MISSING_VALUES = (
    "SELECT {id}, uses.hash FROM uses JOIN session ON session.sid = uses.sid"
    " WHERE NOT EXISTS (SELECT 1 FROM value WHERE value.hash = uses.hash)"
)
# A save writes some of them anew, and compares the time of creation; a copy tells by that whether a session is there.
_REPAIRS = {"status": _SAVE, "agent": _SAVE, "owner": _COPY, "parent": _COPY, "created": ENDS, "updated": _SAVE}
COLUMNS = tuple(_REPAIRS)


def wrong_columns(
    info: AgentSessionInfo, columns: Sequence[object], tags: Collection[str], text: Callable[[str], str] = str
) -> Iterator[Problem]:
    """The columns that filters go by, against the newest version; `text` is how the store writes text."""
    expected = (
        info.status.value,
        text(info.agent_name),
        None if info.owner is None else text(info.owner),
        None if info.parent_id is None else str(info.parent_id),
        info.created_at.timestamp(),
        info.updated_at.timestamp(),
    )
    for name, found, said in zip(COLUMNS, columns, expected, strict=True):
        if found != said:
            what = f"it says {found!r}, and the newest version {said!r}"
            yield Problem(info.id, f"column {name}", what, _REPAIRS[name])
    if set(tags) != set(map(text, info.tags)):
        yield Problem(info.id, "tags", "they are not those of the newest version", _TAGS)
