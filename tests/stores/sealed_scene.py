"""A store in which every kind of row has the same canary word, and ways to look for it and to change single bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests import postgres_server

from perdure import AgentDefinition, Media, Message, Sessions, ToolCall, UpdateTask, WriteMetadata, connect, tool
from perdure.codec import hash_of_bytes
from perdure.keys import FileKeyRing
from perdure.protocols import Entry, Sketch, Timer
from perdure.testing import ScriptedDriver

MASTER = b"a master key of 32 random bytes."
WORD = "zebrafinch"
PHOTO = WORD.encode() * 1000
OWNER = "ada"


@tool(idempotent=True)
def look_up(bird: str) -> str:
    """Look a bird up."""
    return f"the {bird} sings"


def ring_in(where: Path, master: Any = MASTER) -> FileKeyRing:
    return FileKeyRing(where / "keys.json", master=master, create=True)


def urls(where: Path) -> dict[str, str]:
    return {"sqlite": f"sqlite:///{where / 'sessions.db'}", "postgres": postgres_server.url_of(where)}


@asynccontextmanager
async def opened(url: str, ring: FileKeyRing | None, *, live: int = 128) -> AsyncIterator[Sessions]:
    script = ScriptedDriver([ToolCall("look_up", {"bird": WORD}, id="call-1"), f"It is a {WORD}."])
    async with connect(url, driver=script, tools=[look_up], keys=ring, live=live) as sessions:
        yield sessions


async def say_everything(sessions: Sessions) -> tuple[str, str]:
    """Write the word wherever a session can have it. Return the ids of a session and of a fork that is being run."""
    mine = sessions.of(OWNER)
    agent = AgentDefinition("birds", system_prompt=f"You know the {WORD}. " * 30, tools=("look_up",))
    chat = await mine.open(f"{OWNER}-1", agent)
    await chat.send(f"What is a {WORD}?", key=f"request about a {WORD}")
    await chat.inject(Message.user(f"A picture of a {WORD}", Media("image/png", data=PHOTO, name=f"{WORD}.png")))
    await chat.rename(f"All about the {WORD}")
    await sessions.execute(chat.id, WriteMetadata("small", WORD))
    await sessions.execute(chat.id, WriteMetadata("large", f"{WORD} " * 1000))
    await sessions.execute(chat.id, UpdateTask(f"Find a {WORD}"))
    for _ in range(3):
        await chat.send(f"Again, the {WORD}!")
    await chat.compact(compact_strategy="truncate", keep_last=2)
    fork = await chat.fork(f"{OWNER}-2")
    await fork.send(f"And in a fork: {WORD}?")
    store: Any = sessions.store
    await store.post(chat.id, Entry("note", {"text": WORD, "messages": [Message.user(f"queued {WORD}").to_dict()]}))
    await store.set_timer(Timer(chat.id, "later", 4e9, Entry("note", {"text": f"the {WORD} later"})))
    session = await store.load(fork.id)
    claim, appended = await store.claim(
        fork.id,
        version=session.version,
        owner="a process that is killed",
        messages=[Message.user(f"written ahead: {WORD}")],
        entries=[Entry("agent_start", {"said": WORD}, "run-1")],
    )
    assert await store.sketch(claim, Sketch("run-1", "message-1", f"The {WORD} is", 0, 1, appended.seq))
    assert await store.search(WORD)
    return chat.id, fork.id


def told() -> list[bytes]:
    """Return what must be nowhere: the word, and checksums that would confirm a guess."""
    return [WORD.encode(), WORD.encode().hex().encode(), hash_of_bytes(PHOTO).encode()]


def bytes_in(where: Path) -> dict[str, bytes]:
    """Return all files of a directory."""
    return {path.name: path.read_bytes() for path in where.rglob("*") if path.is_file()}


def bytes_in_schema(where: Path) -> dict[str, bytes]:
    """Return all rows of all tables of a schema in PostgreSQL's own binary form, and the texts of its indexes."""
    import psycopg

    schema = postgres_server.schema_of(where)
    found: dict[str, bytes] = {}
    with psycopg.connect(postgres_server.dsn()) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
        for (table,) in rows:
            with connection.cursor().copy(f'COPY "{schema}"."{table}" TO STDOUT (FORMAT binary)') as copied:
                found[table] = b"".join(bytes(piece) for piece in copied)
        words = connection.execute(f'SELECT words::text FROM "{schema}".word').fetchall()
        found["words"] = repr(words).encode()
    return found
