"""Writes the golden files of the current stored format: `python tests/golden/make.py`.

Each format has a directory that is written once, by the release that introduces the format, and never again: those
files have to load for ever. So this refuses to touch a directory that is there.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from perdure import codec
from perdure.archive import export_sessions
from perdure.model import ids
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget
from perdure.model.lineage import SpawnRef
from perdure.model.message import Media, Message, Opaque, Thinking, ToolCall
from perdure.model.session import AgentSession
from perdure.protocols import Entry, Key
from perdure.stores import heads
from perdure.stores.file import FileStore
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite_schema import newest_schema
from perdure.testing import FrozenClock
from perdure.testing.samples import fork, new_session, note, run_of, say, seen, show, tell, texts

HERE = Path(__file__).parent
CURRENT = f"format-{codec.FORMAT}-head-{heads.FORMAT}-schema-{newest_schema()}"
"""Values have a format, heads one besides, and SQLite files a schema. What is not named was the first of its kind."""
STORES: dict[str, Callable[[Path], Any]] = {
    "sessions.sqlite": SqliteStore,
    "files": FileStore,
}


async def furnish(store: Any) -> None:
    """Sessions with something of everything that a store can hold."""
    alpha = await _converse(store)
    beta = await store.create(say(fork(alpha, id="beta"), "Only in the fork"))
    await store.save(beta.suspended())
    await _run(store)
    spawned = SpawnRef("gamma", "loop-1", "call-9", "research")
    deleted = await store.create(new_session("Hidden", id="delta", spawn_ref=spawned))
    await store.save(deleted.deleted())
    await _nest(store)


async def _nest(store: Any) -> None:
    """`epsilon`: compactions of compactions, so deep that blocks are stored apart."""
    session = await store.create(new_session("One", "Two", "Three", id="epsilon"))
    for level in range(60):
        view = say(session, f"Said at {level}").state.transcript
        summary = [Message.user(f"Summary {level}")]
        session = show(session, view.cover(0, len(view) - 2, summary, by="test", tokens_before=level))
    await store.save(run_of(await store.save(session)))


async def _converse(store: Any) -> AgentSession:
    definition = AgentDefinition(
        "support",
        label="Support",
        description="Answers questions. " * 20,
        system_prompt="Be brief.",
        model=ModelConfig("offline", temperature=0.5, settings={"seed": 7}),
        tools=("look_up",),
        budget=ExecutionBudget(max_steps=9, max_cost=1.5),
        metadata={"team": "north"},
    )
    given = new_session("Where is order 7?", id="alpha", definition=definition, owner="ann", tags=("vip", "eu"))
    session = await store.create(AgentSession.from_dict({**given.to_dict(), "from_the_future": {"kept": True}}))
    session = await store.save(run_of(session))
    session = await store.save(tell(session, *_content()).with_name("Order 7"))
    session = await store.save(note(note(session, "ticket", "OPS-142"), "notes", ["a long note"] * 40))
    view = session.state.transcript.cover(
        0, 4, [Message.assistant("They asked for order 7.")], by="test", tokens_before=90
    )
    session = await store.save(show(session, view))
    session = await store.save(show(session, session.state.transcript.trim(5)))
    state = session.state.with_system_prompt("Be very brief. " * 30).with_task("Find order 7")
    return await store.save(session.with_state(state.with_response_format({"type": "object"}).for_next_execution()))


def _content() -> list[Message]:
    holo = codec.convert(Message, {"role": "user", "id": "m-holo", "parts": [{"type": "hologram", "rays": [1, None]}]})
    return [
        Message.assistant(Thinking("hm", signature="c2ln", provider="p"), "So \x00 \u202e 😀"),
        Message.assistant(tool_calls=[ToolCall("look_up", {"n": 2**63, "f": -0.5}, id="call-2")]),
        Message.tool("call-2", {"found": [1, None, True]}, is_error=True),
        Message.user("See:", Media("image/png", data=bytes(range(16)), name="a.png"), Media("text/html", url="x:y")),
        Message.assistant(Opaque("p", {"response": "r-1"}), metadata={"nested": {"a": [1]}}),
        holo,
    ]


async def _run(store: Any) -> None:
    """`gamma`: a run on record that was saved, and one that was killed."""
    session = await store.create(new_session("Go", id="gamma"))
    ahead = [Message.assistant("Written ahead")]
    start = [Entry("start", {"n": 1}, "loop-1"), Entry("note", None)]
    claim, appended = await store.claim("gamma", version=1, owner="runner", messages=ahead, entries=start)
    await store.append(
        claim, messages=[Message.assistant("On a branch")], entries=[Entry("go", [2], "loop-1")], log="b-1"
    )
    for word in ("left", "right"):
        await store.post("gamma", Entry("steer", word))
    session = await store.save(
        tell(session, *ahead),
        claim=claim,
        written=appended.written,
        entries=[Entry("end", {}, "loop-1")],
        taken=1,
        key=Key("key-1", "digest-1"),
    )
    lost = [Entry("start", {"n": 2}, "loop-2")]
    await store.claim("gamma", version=2, owner="killed", messages=[Message.user("Never saved")], entries=lost)


async def describe(store: Any) -> dict[str, Any]:
    """All that a store answers, as JSON: what the files are to be read as for ever."""
    page = await store.list()
    hidden = await store.list(status="deleted")
    names = [info.id for info in (*page, *hidden)]
    return {"listed": [info.id for info in page], "sessions": {name: await _describe(store, name) for name in names}}


async def _describe(store: Any, name: str) -> dict[str, Any]:
    newest = await store.load(name)
    versions = [await store.load(name, version) for version in range(1, newest.version + 1)]
    return {
        "versions": [_version(session) for session in versions],
        "record": [[entry.seq, entry.kind, entry.body, entry.run] for entry in await store.read(name)],
        "inbox": [[item.seq, item.kind, item.body] for item in await store.read(name, inbox=True)],
    }


def _version(session: AgentSession) -> dict[str, Any]:
    return {
        "version": session.version,
        "status": session.status.value,
        "texts": texts(session),
        "metadata": dict(session.state.metadata),
        "blocks": [[block.id, block.by, len(block)] for block in session.state.transcript.blocks()],
        "document": seen(session).to_dict(),
    }


async def write(directory: Path) -> None:
    described = []
    for name, opened in STORES.items():
        numbers = count(1)
        with ids.use(clock=FrozenClock(tick=1), ids=lambda numbers=numbers: f"id-{next(numbers):05}"):
            async with opened(directory / name) as store:
                await furnish(store)
                described.append(await describe(store))
                session = await store.load("alpha", 4)
                with ids.use(clock=FrozenClock(datetime(2030, 1, 1, tzinfo=UTC))):  # when the claim has lapsed
                    await export_sessions(store, directory / "export.jsonl")
    assert all(each == described[0] for each in described), "the stores do not agree"
    (directory / "expected.json").write_text(_json(described[0]))
    (directory / "session.json").write_text(_json(session.to_dict()))


def _json(plain: Any) -> str:
    return json.dumps(plain, indent=1, ensure_ascii=True) + "\n"


def main() -> None:
    directory = HERE / CURRENT
    if directory.exists():
        sys.exit(f"{directory} is there. Golden files are never written again; a new format gets a new directory.")
    directory.mkdir()
    asyncio.run(write(directory))
    for lock in directory.rglob("*lock"):
        lock.unlink()
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
