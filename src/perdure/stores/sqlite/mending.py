"""Repair of what follows from a SQLite file's rows: indexes, missing parts of the schema, counters, copies in tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress

import apsw

from perdure.protocols import Problem
from perdure.stores.sqlite.check import meta_problems, missing_parts, page_problems, tag_problems
from perdure.stores.sqlite.schema import exclusively, rows_of

_COPIED = ("owner", "agent", "status", "spawned", "created", "recent")
_TAGS = (
    f"UPDATE tag SET ({', '.join(_COPIED)}) = (SELECT {', '.join(_COPIED)} FROM session WHERE session.sid = tag.sid)"
    " WHERE EXISTS (SELECT 1 FROM session AS of WHERE of.sid = tag.sid"
    f" AND ({', '.join(f'tag.{name}' for name in _COPIED)})"
    f" IS NOT ({', '.join(f'of.{name}' for name in _COPIED)}))"
)
_SEQUENCE = re.compile(r"the sequence of (\w+)")
_OF_INDEX = re.compile(r"index \w+|Tree \d+ page \d+")


def mendable(db: apsw.Connection) -> list[Problem]:
    """Return what is wrong and can be made again, as far as that shows before it is tried."""
    pages = [problem for problem in _safely(page_problems, db) if _OF_INDEX.search(problem.where)]
    return [*pages, *_beside_pages(db)]


def mend(db: apsw.Connection) -> list[Problem]:
    """Make again what is wrong, each in a transaction, while no other process writes. Return what was mended."""
    before = [*_safely(page_problems, db)]
    if before:
        _make_indexes_anew(db)
    after = {problem.where for problem in _safely(page_problems, db)} if before else set()
    mended = [problem for problem in before if problem.where not in after]
    found = _beside_pages(db)
    for statements in map(_statements_for, found):
        # One that fails must not keep the others from being mended. It is found again below.
        with suppress(apsw.Error), exclusively(db):
            for statement in statements:
                db.execute(statement).fetchall()
    left = {problem.where for problem in _beside_pages(db)}
    return [*mended, *(problem for problem in found if problem.where not in left)]


def _beside_pages(db: apsw.Connection) -> list[Problem]:
    looks: tuple[Callable[[apsw.Connection], Iterator[Problem]], ...] = (missing_parts, meta_problems, tag_problems)
    return [problem for look in looks for problem in _safely(look, db) if _statements_for(problem)]


def _safely(look: Callable[[apsw.Connection], Iterator[Problem]], db: apsw.Connection) -> list[Problem]:
    try:
        return [*look(db)]
    except (apsw.CorruptError, UnicodeError):  # the check reports it
        return []


def _make_indexes_anew(db: apsw.Connection) -> None:
    """Make all indexes again at once. If one of them prevents that, make those that can be made."""
    with suppress(apsw.CorruptError):
        with exclusively(db):
            db.execute("REINDEX").fetchall()
        return
    names = "SELECT name FROM sqlite_schema WHERE type = 'index'"
    for (name,) in rows_of(db, names):
        with suppress(apsw.CorruptError), exclusively(db):
            db.execute(f'REINDEX "{name}"').fetchall()


def _statements_for(problem: Problem) -> list[str]:
    """Return the statements that make something again; none if it does not follow from other rows."""
    if found := _SEQUENCE.fullmatch(problem.where):
        table = found[1]
        number = "sid" if table == "session" else table
        return [
            f"DELETE FROM sqlite_sequence WHERE name = '{table}'",
            f"INSERT INTO sqlite_sequence (name, seq) SELECT '{table}', max({number}) FROM {table}",
        ]
    if problem.where == "its tags in lists":
        return [_TAGS]
    kind, _, name = problem.where.partition(" ")
    if kind in ("index", "trigger"):
        return [f'DROP {kind} IF EXISTS "{name}"', _made_by(kind, name)]
    return []


def _made_by(kind: str, name: str) -> str:
    """Return the statement that a new file has for an index or a trigger."""
    from perdure.stores.sqlite.schema import migrate

    new = apsw.Connection(":memory:")
    try:
        migrate(new)
        ((sql,),) = rows_of(new, "SELECT sql FROM sqlite_schema WHERE type = ? AND name = ?", (kind, name))
        return str(sql)
    finally:
        new.close()
