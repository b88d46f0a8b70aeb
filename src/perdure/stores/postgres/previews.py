"""Previews of many sessions by a few statements, however many sessions there are.

The jobs are the same as on every engine. Here they are driven side by side: what all of them ask for next is read
with one statement for each table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perdure.errors import CorruptRecord
from perdure.protocols import Preview
from perdure.stores.engine import Job, Select, Statement
from perdure.stores.jobs.previewing import COLUMNS_OF_ROW, Standing, caught, previewed, title_of, view_of
from perdure.stores.postgres.link import Link
from perdure.stores.sealing import is_sealed

_HEADS = f"""
    SELECT {", ".join(f"session.{name}" for name in COLUMNS_OF_ROW)}, newest.crc, newest.body,
        first.version IS NOT NULL OR session.parent IS NOT NULL AND session.spawned = 0, first.crc, first.body
    FROM session
    LEFT JOIN head AS newest ON newest.sid = session.sid AND newest.version = session.version
    LEFT JOIN head AS first ON first.sid = session.sid
        AND first.version = (SELECT min(oldest.version) FROM head AS oldest WHERE oldest.sid = session.sid)
        AND (first.version > 1 OR session.parent IS NOT NULL AND session.spawned = 0)
    WHERE session.id = ANY (%s)
"""
_VALUES = "SELECT hash, body FROM value WHERE hash = ANY (%s)"
_MESSAGES = """
    SELECT asked.number, msg.pos, msg.crc, msg.body
    FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) WITH ORDINALITY AS asked (log, low, high, number)
    JOIN msg ON msg.log = asked.log AND msg.pos >= asked.low AND msg.pos < asked.high
    ORDER BY asked.number, msg.pos
"""


async def read(
    link: Link, session_ids: Sequence[str], cached: Mapping[str, bytes], is_strict: bool = True
) -> dict[str, Preview]:
    """Return the same as the job of this name."""
    standing: dict[str, Standing] = {}
    damaged: dict[str, CorruptRecord] = {}
    rows = await link.rows(_HEADS, ([*session_ids],))
    _require_unsealed(row[at] for row in rows for at in (6, 9))
    for row in rows:
        try:
            standing[row[0]] = Standing.of(row[:5], row[5:7], row[8:10] if row[7] else None)
        except CorruptRecord as damage:
            if is_strict:
                raise
            damaged[row[0]] = damage
    jobs = [caught(title_of(each, cached), is_strict) for each in standing.values()]
    jobs += [caught(view_of(each, cached, is_strict), is_strict) for each in standing.values()]
    came_to = await _side_by_side(link, jobs)
    views = dict(zip(standing, came_to[len(standing) :], strict=True))
    found = {key: previewed(standing[key], title, views[key]) for key, title in zip(standing, came_to, strict=False)}
    found |= {key: Preview(damage=damage) for key, damage in damaged.items()}
    return {key: found[key] for key in session_ids if key in found}


async def _side_by_side(link: Link, jobs: Sequence[Job[Any]]) -> list[Any]:
    """Drive jobs at once, and return what each returns."""
    results: list[Any] = [None] * len(jobs)
    answers: dict[int, Any] = dict.fromkeys(range(len(jobs)))
    while answers:
        asked: dict[int, Select] = {}
        for number, rows in answers.items():
            try:
                asked[number] = _select(jobs[number].send(rows))
            except StopIteration as done:
                results[number] = done.value
        answers = await _answers(link, asked)
    return results


def _require_unsealed(bodies: Iterable[Any]) -> None:
    """Raise CorruptRecord if a body is sealed. The job then reads it, and opens it or reports its missing key."""
    if any(map(is_sealed, bodies)):
        raise CorruptRecord(None, "of several sessions", "it is sealed")


def _select(statement: Statement) -> Select:
    assert isinstance(statement, Select), "they only read"
    return statement


async def _answers(link: Link, asked: Mapping[int, Select]) -> dict[int, Any]:
    values = {number: each.where["hash in"] for number, each in asked.items() if each.table == "value"}
    ranges = {number: each.where for number, each in asked.items() if each.table == "msg"}
    answers: dict[int, Any] = {number: [] for number in asked}
    if values:
        hashes = {key for keys in values.values() for key in keys}
        bodies = dict(await link.rows(_VALUES, ([*hashes],)))
        _require_unsealed(bodies.values())
        answers |= {number: [(key, bodies[key]) for key in keys if key in bodies] for number, keys in values.items()}
    numbers = [*ranges]
    bounds = [[where[key] for where in ranges.values()] for key in ("log", "pos >=", "pos <")]
    found = await link.rows(_MESSAGES, tuple(bounds)) if ranges else []
    _require_unsealed(row[-1] for row in found)
    for place, *row in found:
        answers[numbers[place - 1]].append(tuple(row))
    return answers
