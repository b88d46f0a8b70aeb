"""A store with a bit of everything, and trees with inner pages, for damage to be tried on."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from perdure.actions.lifecycle import DeleteSession
from perdure.actions.send import SendMessage
from perdure.loop.factory import LoopFactory
from perdure.loop.tools import tool
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId
from perdure.model.message import Message, ToolCall
from perdure.model.transcript import Transcript
from perdure.protocols import Entry, Sketch, Timer, Token, is_queue, is_sketchbook, is_token_book
from perdure.runtime.runtime import SessionRuntime
from perdure.testing.parts.checking import fill
from perdure.testing.parts.journal import entries, messages
from perdure.testing.samples import fork, new_session, note, say, show
from perdure.testing.scripted import ScriptedDriver

OWNERS = tuple(f"owner-{letter * 60}" for letter in "abcdef")
"""Long names. Some dozens of them fill a page of an index, so that the index has an inner page above its leaves."""
CROWD = 90
# Some 28 years: the claim of `under-way` must not lapse before its answers are compared.
LEASE = 900_000_000.0
FAR = 4_000_000_000.0
"""A time that no test reaches."""


async def furnish(store: Any, *, crowd: int = CROWD) -> None:
    """Put sessions of every kind into an empty store: run, forked, compacted, hidden, killed, waiting and tagged."""
    await fill(store)
    await _crowd(store, crowd)
    await _talks(store)
    await _long_view(store)
    await _forgotten(store)
    await _records(store)
    await _running(store)
    if is_queue(store):
        await _queues(store, crowd)
    if is_token_book(store):
        await _tokens(store)


async def _crowd(store: Any, count: int) -> None:
    """Create many small sessions of several owners, agents and statuses, for the indexes of lists."""
    runtime = SessionRuntime(store)
    for number in range(count):
        owner = OWNERS[number % len(OWNERS)] if number % 7 else None
        agent = AgentDefinition(f"agent-{'xyz'[number % 3] * 40}", system_prompt="Be brief.")
        tags = (f"tag-{'pqr'[number % 3] * 50}", "all") if number % 2 else ()
        made = new_session(f"word{number} common", id=f"crowd-{number:03d}", definition=agent, owner=owner, tags=tags)
        made = await store.create(made)
        if number % 9 == 1:
            await store.save(made.suspended())
        elif number % 9 == 4:
            await runtime.execute(made.id, DeleteSession())
        elif number % 9 == 7:
            child = fork(made, id=f"{made.id}-child")
            await store.create(say(replace(child, info=replace(child.info, owner=owner)), "branched off"))


async def _talks(store: Any) -> None:
    """Record real runs with tools."""

    @tool
    async def look(text: str) -> str:
        """Look something up."""
        return f"found {text}"

    agent = AgentDefinition("talker", system_prompt="Look it up.", tools=("look",))
    runtime = SessionRuntime(store)
    await runtime.create(agent, session_id="talks", owner=OWNERS[0], tags=("vip",))
    for number in range(8):
        call = ToolCall("look", {"text": f"order {number}"}, id=f"call-{number}")
        loops = LoopFactory(driver=ScriptedDriver([call, f"It is {number}, zebra{number}."]), tools=[look])
        await runtime.execute("talks", SendMessage(f"Where is order {number}?", loops, key=f"key-{number}"))


async def _long_view(store: Any) -> None:
    """Create a session with a long log, blocks inside blocks and large metadata, and a fork of it."""
    session = await store.create(
        new_session(*(f"m{number} apple" for number in range(400)), id="long", owner=OWNERS[1])
    )
    session = await store.save(
        show(session, session.state.transcript.cover(0, 100, [Message.user("a hundred")], by="t"))
    )
    session = await store.save(show(session, session.state.transcript.cover(0, 50, [Message.user("more")], by="t")))
    session = await store.save(note(session, "large", {"text": [f"value {number}" for number in range(2_000)]}))
    for number in range(30):
        session = await store.save(say(session, f"turn {number}"))
    await store.create(say(fork(session, id="long-child"), "on its own"))


async def _forgotten(store: Any) -> None:
    """Create a session whose older versions were forgotten, and a fork that shows what it has cut away."""
    session = await store.create(new_session("Hello", "pear", "plum", id="forgotten", owner=OWNERS[3]))
    await store.create(say(fork(session, id="forgotten-child"), "branched off"))
    for number in range(8):
        session = await store.save(say(show(session, Transcript()), f"fig {number}"))
    await store.forget(session.id, before=session.version - 1)


async def _records(store: Any) -> None:
    """Record many small runs in one session, some of them with branches."""
    session = await store.create(new_session("Hello", id="many-runs"))
    for number in range(24):
        run = f"run-{number:02d}-{'r' * 60}"
        said, start = messages(f"said {number}"), [Entry("agent_start", {"messages": 1}, run)]
        claim, ahead = await store.claim(session.id, version=session.version, owner="me", messages=said, entries=start)
        if number % 6 == 0:
            branch = f"branch-{number}"
            await store.append(claim, messages=messages("aside"), entries=entries("step", run=branch), log=branch)
        session = session.with_state(session.state.with_messages(*said))
        end = [Entry("agent_end", {}, run)]
        session = await store.save(session, claim=claim, written=ahead.written, entries=end)


async def _running(store: Any) -> None:
    """Create a session that is running, with an answer under way, and one that waits for recovery."""
    await store.create(new_session("Hello", id="under-way", owner=OWNERS[2]))
    claim, ahead = await store.claim("under-way", version=1, owner="me", lease=LEASE, entries=entries("start"))
    if is_sketchbook(store):
        for start, text in enumerate("xyz"):
            await store.sketch(claim, Sketch("run-1", "m", text, start, seq=ahead.seq))
    await store.create(new_session("Hello", id="given-up", owner=OWNERS[2]))
    claim, _ = await store.claim("given-up", version=1, owner="me", entries=entries("start"))
    await store.release(claim, interrupted=True)


async def _queues(store: Any, count: int) -> None:
    for number in range(0, min(40, count), 2):
        if number % 9 == 4:
            continue
        session_id = SessionId(f"crowd-{number:03d}")
        await store.post(session_id, Entry("queue", {"text": f"item {number}"}), priority=number % 3)
        await store.set_timer(Timer(session_id, f"wake-{'t' * 40}", 10.0 + number, Entry("queue", {"text": "later"})))
    await store.set_timer(Timer(SessionId("talks"), "cron", FAR, Entry("queue", {}), cron="0 9 * * *", timezone="UTC"))


async def _tokens(store: Any) -> None:
    made = (await store.load("talk")).info.created_at
    for number in range(6):
        await store.add_token(
            Token(digest=f"{number + 1:x}" * 64, owner=OWNERS[number % 3], may_write=bool(number % 2), created_at=made)
        )
