"""A process that backs stores up and restores them in children of its own, which are killed at any instant.

It reads one JSON array a line, `[VERB, KIND, WHERE, TARGET]` with the verb "backup", "restore" or "repair", and forks: a
new Python for each round would take most of the time. It prints `child PID`, what the child prints, and `ended PID`.
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


def closed(kind: str, where: Path) -> Any:
    """Return a store that is not open. PostgreSQL's schema is named in a file."""
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
    print("made", made.backup.id, session.version, flush=True)


async def put_back(kind: str, where: Path, target: Path) -> None:
    await restore(target, closed(kind, where))
    print("restored", flush=True)


async def mend(kind: str, where: Path, target: Path) -> None:
    async with closed(kind, where) as store:
        await repair(store)
    print("repaired", flush=True)


def main() -> None:
    for line in sys.stdin:
        verb, kind, where, target = json.loads(line)
        child = os.fork()
        if child == 0:
            work = {"backup": back_up, "restore": put_back, "repair": mend}[verb]
            asyncio.run(work(kind, Path(where), Path(target)))
            os._exit(0)
        print("child", child, flush=True)
        os.waitpid(child, 0)
        print("ended", child, flush=True)


if __name__ == "__main__":
    main()
