"""Repair of what follows from a SQLite file's rows: indexes, missing parts of the schema, counters, copies in tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress

import apsw

from perdure.protocols import MEND_FIRST, Problem
from perdure.stores.sqlite.check import (
    GIVE_BACK,
    has_only_unused_pages,
    meta_problems,
    missing_parts,
    page_problems,
    tag_problems,
    tree_damage,
)
from perdure.stores.sqlite.schema import exclusively, rows_of

_COPIED = ("owner", "agent", "status", "spawned", "created", "recent")
_TAGS = (
    f"UPDATE tag SET ({', '.join(_COPIED)}) = (SELECT {', '.join(_COPIED)} FROM session WHERE session.sid = tag.sid)"
    " WHERE EXISTS (SELECT 1 FROM session AS of WHERE of.sid = tag.sid"
    f" AND ({', '.join(f'tag.{name}' for name in _COPIED)})"
    f" IS NOT ({', '.join(f'of.{name}' for name in _COPIED)}))"
)
_SEQUENCE = re.compile(r"the sequence of (\w+)")
_REBUILT = "_rebuilt"
_INDEXES = "SELECT name FROM sqlite_schema WHERE type = 'index'"
_Way = Callable[[apsw.Connection, str], None]


def mendable(db: apsw.Connection) -> list[Problem]:
    """Return what is wrong and can be rebuilt, as far as that shows before it is tried."""
    pages = [problem for problem in _safely(page_problems, db) if problem.repair in (MEND_FIRST, GIVE_BACK)]
    return [*pages, *_beside_pages(db)]


def mend(db: apsw.Connection) -> list[Problem]:
    """Make again what is wrong, each in a transaction, while no other process writes. Return what was mended."""
    before = [*_safely(page_problems, db)]
    if before:
        _rebuild_indexes(db)
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
    """Return what a check finds until it meets something unreadable, which it reports itself."""
    found: list[Problem] = []
    with suppress(apsw.CorruptError, UnicodeError):
        for problem in look(db):
            found.append(problem)  # what it has found before it raises counts too
    return found


def _rebuild_indexes(db: apsw.Connection) -> None:
    """Make all indexes again: in their own pages if SQLite can clear them, else in new ones."""
    ways: dict[str, _Way] = {name: _clear_and_fill for (name,) in rows_of(db, _INDEXES)}
    # With this check on, SQLite refuses to clear a page with a damaged cell.
    db.pragma("cell_size_check", 0)
    try:
        while ways and (failed := _tried(db, ways)):
            for name in failed:
                if ways.pop(name) is _clear_and_fill:
                    ways[name] = _replace
    except _Unverifiable:
        _replace_each(db)
    finally:
        db.pragma("cell_size_check", 1)
    with suppress(apsw.CorruptError, apsw.FullError):  # the check then reports the pages
        if has_only_unused_pages(db):  # those of indexes that were replaced, now or before a kill
            db.execute("VACUUM").fetchall()


def _tried(db: apsw.Connection, ways: Mapping[str, _Way]) -> Collection[str]:
    """Make indexes again in one transaction. Return those that prevent it, and then change nothing.

    To clear a damaged index may free pages of a table. Which index has done that is not known, so all are returned.
    """
    damage = _verified(db)
    name = ""
    try:
        with exclusively(db):
            for name, way in ways.items():  # after an error it is the one that has failed
                way(db, name)
            after = _verified(db)
            # A page that was freed, and that a table still names. The same may have been said of it before.
            is_shared = any("2nd reference" in line for line in after)
            if not after <= damage or (is_shared and _clear_and_fill in ways.values()):
                raise _Harmful
    except _Harmful:
        return [*ways]
    except (apsw.CorruptError, apsw.ConstraintError):
        return [name]
    return ()


def _verified(db: apsw.Connection) -> set[str]:
    try:
        return tree_damage(db)
    except apsw.CorruptError:
        raise _Unverifiable from None


class _Harmful(Exception):
    """The error that rolls back a repair that has damaged something else."""


class _Unverifiable(Exception):
    """The error for a damaged row of a table. SQLite then commits nothing in a transaction that verifies itself."""


def _replace_each(db: apsw.Connection) -> None:
    """Replace each index whose table can be read. This frees no page, so it needs no verification."""
    for (name,) in rows_of(db, _INDEXES):
        with suppress(apsw.CorruptError, apsw.ConstraintError), exclusively(db):
            _replace(db, name)


def _clear_and_fill(db: apsw.Connection, name: str) -> None:
    db.execute(f'REINDEX "{name}"').fetchall()


def _replace(db: apsw.Connection, name: str) -> None:
    """Build an index again in new pages, without a look at its old ones. These are then in no use."""
    ((table, made_by),) = rows_of(db, "SELECT tbl_name, sql FROM sqlite_schema WHERE name = ?", (name,))
    new = name.removeprefix("sqlite_") + _REBUILT
    if made_by is None:  # the index of a UNIQUE column or of a key
        columns = ", ".join(f'"{column}"' for _, _, column in rows_of(db, f'PRAGMA index_info("{name}")'))
        db.execute(f'CREATE UNIQUE INDEX "{new}" ON "{table}" ({columns})').fetchall()
    else:
        db.execute(made_by.replace(name, new, 1)).fetchall()
    db.pragma("writable_schema", 1)
    try:
        root = "(SELECT rootpage FROM sqlite_schema WHERE name = ?)"
        db.execute(f"UPDATE sqlite_schema SET rootpage = {root} WHERE name = ?", (new, name))
        db.execute("DELETE FROM sqlite_schema WHERE name = ?", (new,))
    finally:
        db.pragma("writable_schema", "RESET")  # this also reads the schema again


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
