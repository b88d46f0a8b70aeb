"""A migration of a large file in steps, none of which holds up other processes for long.

The part of a script before `-- at once` runs first, each statement in its own transaction. A statement with `:after`
and `:upto` runs for some sessions at a time. This part may be interrupted and begun again. Other processes may write
meanwhile. So it runs once more, for what they have changed, in one transaction with the rest.
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
    """Return the statements of a script that may run in steps, and the rest of it."""
    if not script.startswith(_IN_STEPS):
        return [], script
    steps, _, rest = script.partition(_AT_ONCE)
    bare = re.sub(r"^ *--.*\n", "", steps, flags=re.MULTILINE)
    return [each for each in bare.split(";") if each.strip()], rest


def take(
    connection: apsw.Connection, statements: list[str], together: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Execute statements in pieces, each inside the context of `together`: a transaction, or nothing if one is open."""
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
        if "duplicate column name" not in str(error):  # an interrupted run has added it already
            raise
