"""A process that backs stores up and restores them in children of its own, which are killed at any instant.

It reads one JSON array a line, `[VERB, KIND, WHERE, TARGET]` with the verb "backup", "restore" or "repair", and forks:
a new Python for each round would take most of the time. It prints `child PID`, what the child prints, and `ended PID`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from perdure import FileStore, InjectMessage, Message, PostgresStore, SessionRuntime, SqliteStore
from perdure.archive import repair
from perdure.backups import backup, restore

KEPT = 3


def say(*words: object) -> None:
    """Write a line at once: a kill could cut it in two, and half of it would be taken for another line."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def closed(kind: str, where: Path) -> Any:
    """Return a store that is not open. A file names PostgreSQL's schema."""
    if kind == "sqlite":
        return SqliteStore(where / "sessions.db")
    if kind == "postgres":
        dsn, schema = (where / "postgres").read_text().splitlines()
        return PostgresStore(dsn, schema=schema, pool=2)
    return FileStore(where / "sessions")


async def back_up(kind: str, where: Path, target: Path) -> None:
    async with closed(kind, where) as store:
        said = InjectMessage(Message.user(os.urandom(20_000).hex()))
        session = await SessionRuntime(store).execute("s", said)
        made = await backup(store, target, keep=KEPT)
    say("made", made.backup.id, session.version)


async def put_back(kind: str, where: Path, target: Path) -> None:
    await restore(target, closed(kind, where))
    say("restored")


async def mend(kind: str, where: Path, target: Path) -> None:
    async with closed(kind, where) as store:
        await repair(store)
    say("repaired")


def main() -> None:
    for line in sys.stdin:
        verb, kind, where, target = json.loads(line)
        child = os.fork()
        if child == 0:
            work = {"backup": back_up, "restore": put_back, "repair": mend}[verb]
            asyncio.run(work(kind, Path(where), Path(target)))
            os._exit(0)
        say("child", child)
        os.waitpid(child, 0)
        say("ended", child)


if __name__ == "__main__":
    main()
