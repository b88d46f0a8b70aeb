"""Repair of what follows from the rows of a PostgreSQL schema: counters, words, tables that repeat others' rows."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.protocols import Problem
from perdure.stores.postgres.faults import faults, wrongly_fetched_along
from perdure.stores.postgres.link import Queries
from perdure.stores.sealing import Sealing

_FOLLOWS = (
    *("the sequence of ", "claimed ", "its claim", "what waits in its inbox", "its tags in lists"),
    *("its place in lists", "the search index of log ", "what is fetched along with version "),
)
"""The beginnings of the places that can be rebuilt here."""
_COPIED = ("owner", "agent", "status", "spawned", "created", "recent")
# No other process may add to these tables in between: a claim whose note was removed would not be found.
_LOCK = "LOCK TABLE claimed, waiting, backdated, tag, unindexed IN SHARE ROW EXCLUSIVE MODE"
_STEPS = (
    "DELETE FROM claimed WHERE NOT EXISTS"
    " (SELECT 1 FROM session WHERE session.sid = claimed.sid AND session.claim IS NOT NULL)",
    "INSERT INTO claimed SELECT sid FROM session WHERE claim IS NOT NULL ON CONFLICT DO NOTHING",
    "DELETE FROM waiting",
    "INSERT INTO waiting SELECT sid, owner, status, priority, coalesce(since, updated) FROM session"
    " WHERE inbox_end > taken",
    "INSERT INTO backdated SELECT sid FROM session WHERE updated < created ON CONFLICT DO NOTHING",
    f"UPDATE tag SET {', '.join(f'{name} = session.{name}' for name in _COPIED)} FROM session"
    f" WHERE session.sid = tag.sid AND ({', '.join(f'tag.{name}' for name in _COPIED)})"
    f" IS DISTINCT FROM ({', '.join(f'session.{name}' for name in _COPIED)})",
    """
    WITH waiting AS MATERIALIZED (
        SELECT log, range_agg(int8range(start, stop)) AS stretches FROM unindexed WHERE start < stop GROUP BY log
    )
    INSERT INTO unindexed (log, start, stop)
    SELECT msg.log, msg.pos, msg.pos + 1 FROM msg LEFT JOIN waiting ON waiting.log = msg.log
    WHERE NOT coalesce(waiting.stretches @> msg.pos, false)
        AND NOT EXISTS (SELECT 1 FROM word WHERE word.log = msg.log AND word.pos = msg.pos)
    """,
)
_NUMBERED = {"session": "sid", "log": "log", "run": "run", "timer": "timer"}


def mendable(sealing: Sealing) -> Queries[list[Problem]]:
    """Return what is wrong and can be rebuilt."""
    return [problem for problem in (yield from faults(sealing)) if problem.where.startswith(_FOLLOWS)]


def mend(found: Sequence[Problem], sealing: Sealing) -> Queries[None]:
    """Make again what is wrong, in one transaction."""
    yield _LOCK, ()
    for step in _STEPS:
        yield step, ()
    for table, number in _NUMBERED.items():
        sequence = f"pg_get_serial_sequence('{table}', '{number}')::regclass"
        yield (
            f"SELECT setval({sequence}, max({number})) FROM {table}"
            f" HAVING max({number}) > coalesce(pg_sequence_last_value({sequence}), 0)",
            (),
        )
    if any(problem.where.startswith("what is fetched along") for problem in found):
        for sid, version, named in (yield from wrongly_fetched_along(sealing)):
            # Without `wanted`, a second statement reads the messages, until the session is saved again.
            yield "UPDATE head SET hashes = %s, wanted = NULL WHERE sid = %s AND version = %s", (named, sid, version)
