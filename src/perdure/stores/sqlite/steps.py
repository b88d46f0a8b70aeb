"""A migration of a large file in steps, none of which holds others up for long.

What stands before `-- at once` in a migration's script is carried out first, a statement a transaction, and statements
with `:after` and `:upto` for some sessions at a time. It may be cut short and begun again. Others may write meanwhile,
so that it is carried out once more, for what they have changed, together with the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import apsw

_IN_STEPS = "-- in steps\n"
_AT_ONCE = "-- at once\n"
_SESSIONS_AT_ONCE = 2_000
Bindings = dict[str, int] | None


def halves(script: str) -> tuple[list[str], str]:
    """Return the statements of a script that may be carried out in steps, and the rest."""
    if not script.startswith(_IN_STEPS):
        return [], script
    steps, _, rest = script.partition(_AT_ONCE)
    bare = re.sub(r"^ *--.*\n", "", steps, flags=re.MULTILINE)
    return [each for each in bare.split(";") if each.strip()], rest


def take(
    connection: apsw.Connection, statements: list[str], together: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Carry out statements, each piece of them inside of what `together` gives: a transaction, or one that is open."""
    for statement in statements:
        for bindings in _pieces(connection, statement):
            with together():
                _carry_out(connection, statement, bindings)


def _pieces(connection: apsw.Connection, statement: str) -> Iterator[Bindings]:
    if ":upto" not in statement:
        yield None
        return
    last = connection.execute("SELECT max(sid) FROM session").get
    for start in range(0, last or 0, _SESSIONS_AT_ONCE):
        yield {"after": start, "upto": start + _SESSIONS_AT_ONCE}


def _carry_out(connection: apsw.Connection, statement: str, bindings: Bindings) -> None:
    try:
        connection.execute(statement, bindings).fetchall()
    except apsw.SQLError as error:
        if "duplicate column name" not in str(error):  # it was cut short, and is begun again
            raise
