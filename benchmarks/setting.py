"""The benchmarks' data: turns with a tool call, sessions that hold many of them, and their files."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import msgspec

from benchmarks.others.turns import MESSAGES, Turn
from benchmarks.others.with_perdure import messages
from perdure import AgentDefinition, AgentSession, InjectMessage, Message, SessionRuntime
from perdure.stores.sqlite.schema import connect

AGENT = AgentDefinition("bench", system_prompt="Be brief.")
BATCH = 5_000
_NUMBERS = count(1)


def next_turn() -> Turn:
    """Return a turn with texts and ids of its own."""
    return Turn(next(_NUMBERS))


def turn() -> tuple[Message, ...]:
    """Return four messages, 2.5 KB as JSON: a question, a tool call, its result, an answer."""
    return messages(next_turn())


def turns(count_of_messages: int) -> list[Message]:
    return [message for _ in range(count_of_messages // MESSAGES) for message in turn()]


def json_size(said: tuple[Message, ...] | list[Message]) -> int:
    return sum(len(msgspec.json.encode(message)) for message in said)


class AddTurn:
    """An action that adds one turn."""

    async def execute_on(self, session: AgentSession, context: object = None) -> AgentSession:
        return session.with_state(session.state.with_messages(*turn()))


async def filled(runtime: SessionRuntime, messages: int, **info: Any) -> AgentSession:
    """Create a session that holds this many messages, a multiple of four."""
    session = await runtime.create(AGENT, **info)
    for start in range(0, messages, BATCH):
        session = await runtime.execute(session.id, InjectMessage(*turns(min(BATCH, messages - start))))
    assert len(session.state.transcript) == messages
    return session


async def make_steady(store: Any, path: Path, messages: int = 40_000) -> None:
    """Bring an open SQLite file to a steady state: its write-ahead log is large, and overwritten from its start.

    A commit that has to extend the log takes more time to sync; and the log is gone once the file is closed everywhere.
    """
    store.evict((await filled(SessionRuntime(store), messages)).id)
    checkpoint(path)


class Saver:
    """Saves one turn after another onto one session."""

    def __init__(self, store: Any, session: AgentSession) -> None:
        self.store = store
        self.session = session

    async def __call__(self) -> None:
        state = self.session.state.with_messages(*turn())
        self.session = await self.store.save(self.session.with_state(state))


class BareFile:
    """A connection of its own to a SQLite file, in a thread of its own, which writes bare transactions."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.db = self._thread.submit(connect, path).result()

    async def run(self, write: Callable[..., None], *given: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, write, *given)

    def last(self, table: str, count: int) -> list[bytes]:
        """Return the bodies of the last rows of a table, in order."""
        query = f"SELECT body FROM {table} ORDER BY rowid DESC LIMIT {count}"
        found: Any = self._thread.submit(lambda: self.db.execute(query).fetchall()).result()
        return [body for (body,) in reversed(found)]

    def add_head(self, sid: int, version: int, head: bytes) -> None:
        """Write the head of a version, in the thread."""
        row = (sid, version, zlib.crc32(head), head)
        self.db.execute("INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)", row)

    def close(self) -> None:
        self._thread.submit(self.db.close).result()
        self._thread.shutdown()


def settled_size(path: Path) -> int:
    """Return the size of a SQLite file once its write-ahead log has been moved into it."""
    checkpoint(path)
    return path.stat().st_size


def checkpoint(path: Path) -> None:
    connection = apsw.Connection(str(path))
    try:
        connection.set_busy_timeout(10_000)
        connection.execute("SELECT 1 FROM sqlite_schema").fetchall()  # the log exists only after it
        logged, moved = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
        assert logged == moved >= 0, "the write-ahead log could not be moved into the file"
    finally:
        connection.close()


def wal_frames(path: Path) -> int:
    """Return the number of pages in the write-ahead log, from its index: `mxFrame`, 16 bytes into the -shm file."""
    header = Path(f"{path}-shm").read_bytes()[:48]
    return int.from_bytes(header[16:20], "little")
