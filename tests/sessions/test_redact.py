"""`connect(redact=…)`: what redactors find is nowhere, whichever way it came; the model is sent what is stored."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests import postgres_server

import perdure
from perdure import (
    AgentDefinition,
    ChangeSystemPrompt,
    Chat,
    DriverError,
    EventBus,
    InvalidData,
    Media,
    Message,
    ModelConfig,
    RedactionFailed,
    RunFailed,
    SendParallel,
    Sessions,
    TagSession,
    Thinking,
    ToolCall,
    UpdateTask,
    Worker,
    WriteMetadata,
    external_tool,
    redactors,
)
from perdure.model.ids import now
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta
from perdure.stores.format import packing
from perdure.testing import Chunks, ScriptedDriver

CANARY = "sk-canary0123456789abcdefXYZ"
MARK = "[redacted:api-key]"
KINDS = ("memory", "file", "sqlite", "postgres")


def url_of(kind: str, where: Path) -> str:
    if kind == "postgres":
        named = "&" if "?" in postgres_server.dsn() else "?"
        return f"{postgres_server.dsn()}{named}schema={postgres_server.schema_of(where)}"
    return {"memory": "memory://", "file": f"file://{where / 'files'}", "sqlite": f"sqlite:///{where / 's.db'}"}[kind]


def stored(kind: str, where: Path) -> Iterator[bytes]:
    """Every byte that a store has, as it stands and unpacked."""
    for path in (each for each in where.rglob("*") if each.is_file()):
        yield path.read_bytes()
    cells: list[object] = []
    if kind == "sqlite":
        with sqlite3.connect(where / "s.db") as database:
            tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            cells = [cell for name in tables for row in database.execute(f'SELECT * FROM "{name}"') for cell in row]
    elif kind == "postgres":
        with psycopg.connect(postgres_server.dsn()) as connection:
            schema = postgres_server.schema_of(where)
            rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
            for (table,) in rows:
                found = connection.execute(f'SELECT * FROM "{schema}"."{table}"'.encode()).fetchall()
                cells += [cell for row in found for cell in row]
    for cell in cells:
        raw = cell if isinstance(cell, bytes) else str(cell).encode()
        yield raw
        if isinstance(cell, bytes):
            try:
                yield packing.unpack(raw)
            except InvalidData:
                continue


async def told(sessions: Sessions) -> AsyncIterator[str]:
    """All that can be read of sessions: their heads, views, histories, records, inboxes and timers."""
    for info in (await sessions.list(limit=1000)).all():
        yield repr(await sessions.session(info.id))
        yield repr(await sessions.history(info.id))
        yield repr([event async for event in sessions.events(info.id)])
        yield repr(await sessions.store.dump(info.id, alone=True))  # type: ignore[attr-defined]  # each store can
        yield repr(await sessions.store.timers(info.id))  # type: ignore[attr-defined]  # each store can


@perdure.tool
def look(what: str) -> dict[str, object]:
    """Look something up."""
    return {"found": f"for {what}: {CANARY}", CANARY: 1, "card": 4111111111111111}


@perdure.tool(needs_approval=True)
def spend(on: str) -> str:
    """Spend money."""
    return f"spent on {on} {CANARY}"


@perdure.tool
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(f"{why} {CANARY}")


ASK = external_tool("ask", f"Asks {CANARY}", {"type": "object", "properties": {"q": {"type": "string"}}})


class Model:
    """Answers by the last word of what it was asked, always with the canary; keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.sent.append(repr((request.system_prompt, list(request.messages))))
        last = [message for message in request.messages if message.role != "system"][-1]  # behind it is a warning
        calls = {
            "look": ToolCall("look", {"what": CANARY, CANARY: "as a name"}),
            "spend": ToolCall("spend", {"on": CANARY}),
            "fail": ToolCall("fail", {"why": CANARY}),
            "ask": ToolCall("ask", {"q": CANARY}),
            "child": ToolCall("helper", {"prompt": f"find {CANARY}"}),
        }
        word = last.text.split()[-1] if last.role == "user" and last.text else ""
        if word == "break":
            await on_delta(Delta("text", f"I say {CANARY[:9]}"))
            raise DriverError(f"Incorrect API key provided: {CANARY}")
        for kind in ("thinking", "text"):
            for start in range(0, len(CANARY), 5):
                await on_delta(Delta(kind, CANARY[start : start + 5]))  # type: ignore[arg-type]  # it is one of them
        call = calls.get(word)
        if call is None:
            return ModelReply(Message.assistant(Thinking(f"think {CANARY}", signature="sealed"), f"so {CANARY}, then"))
        await on_delta(Delta("tool_call", f'{{"a": "{CANARY[:8]}', call_id=call.id, name=call.name))
        await on_delta(Delta("tool_call", f'{CANARY[8:]}"}}', call_id=call.id))
        return ModelReply(Message.assistant(f"I call {CANARY}", tool_calls=[call]))


Verb = Callable[[Sessions, Chat], Awaitable[object]]


async def streamed(chat: Chat, text: str) -> str:
    return "".join([str(chunk) async for chunk in chat.stream(text)])


async def worked(sessions: Sessions, session_id: str) -> None:
    async with asyncio.timeout(20):
        worker = Worker(sessions)
        task = asyncio.create_task(worker.run())
        while (await sessions.session(session_id)).state.step_count == 0:
            await asyncio.sleep(0.02)
        worker.stop()
        await task


async def _send(sessions: Sessions, chat: Chat) -> None:
    await chat.send(
        f"a {CANARY}", key="k", metadata={"of": CANARY}, context_data={"x": [CANARY]}, instructions=f"Say {CANARY}"
    )


async def _stream(sessions: Sessions, chat: Chat) -> None:
    assert CANARY[:12] not in await streamed(chat, f"a {CANARY}")


async def _start(sessions: Sessions, chat: Chat) -> None:
    await (await chat.start(Message.user(f"a {CANARY}", Media("text/plain", data=b"x", name=f"{CANARY}.txt")))).result()


async def _inject(sessions: Sessions, chat: Chat) -> None:
    await chat.inject([{"role": "user", "content": CANARY}, {"role": "assistant", "content": CANARY}])
    await chat.send("go on")


async def _tools(sessions: Sessions, chat: Chat) -> None:
    await chat.send("please look")
    await chat.send("please fail")


async def _approve(sessions: Sessions, chat: Chat) -> None:
    await chat.send("please spend")
    await chat.approve()


async def _deny(sessions: Sessions, chat: Chat) -> None:
    await chat.send("please spend")
    await chat.deny(f"because of {CANARY}")


async def _deny_later(sessions: Sessions, chat: Chat) -> None:
    await chat.send("please spend")
    await chat.deny(f"because of {CANARY}", wait=False)
    await sessions.recover(chat.id)


async def _answer(sessions: Sessions, chat: Chat) -> None:
    reply = await chat.send("please ask", external_tools=[ASK])
    await chat.answer({reply.pending_calls[0].id: {"said": CANARY}})


async def _fail(sessions: Sessions, chat: Chat) -> None:
    with pytest.raises(RunFailed) as caught:
        await chat.send("now break")
    assert CANARY not in str(caught.value)


async def _queue(sessions: Sessions, chat: Chat) -> None:
    await chat.enqueue(f"a {CANARY}", key="q", metadata={"of": CANARY})
    await sessions.enqueue(chat.id, f"later {CANARY}", at=now() + timedelta(days=1))
    await sessions.schedule("daily", f"again {CANARY}", cron="0 7 * * *", session_id=chat.id)


async def _work(sessions: Sessions, chat: Chat) -> None:
    await chat.enqueue(f"a {CANARY}")
    await worked(sessions, chat.id)


async def _steer(sessions: Sessions, chat: Chat) -> None:
    run = await chat.start("please look")
    await chat.send(f"and {CANARY}", when_busy="steer")
    await run.result()


async def _change(sessions: Sessions, chat: Chat) -> None:
    await chat.rename(f"about {CANARY}")
    for action in (
        WriteMetadata("note", {"deep": [CANARY], CANARY: 1}),
        UpdateTask(f"do {CANARY}"),
        ChangeSystemPrompt(f"You know {CANARY}"),
    ):
        await sessions.execute(chat.id, action)
    await chat.send("hello")


async def _fork(sessions: Sessions, chat: Chat) -> None:
    await chat.send(f"a {CANARY}")
    fork = await chat.fork()
    await fork.send(f"b {CANARY}")
    await chat.retry()


async def _compact(sessions: Sessions, chat: Chat) -> None:
    for _ in range(3):
        await chat.send(f"a {CANARY}")
    await chat.compact(keep_last=1, compact_strategy="llm")
    await chat.compact(keep_last=0, compress_callback=lambda messages: f"all of {CANARY}")
    await chat.send("go on")


async def _child(sessions: Sessions, chat: Chat) -> None:
    await chat.send("ask the child")


async def _parallel(sessions: Sessions, chat: Chat) -> None:
    action = SendParallel(
        f"a {CANARY}",
        sessions.loops,
        configs=[ModelConfig("one"), AgentDefinition("two", system_prompt=f"Keep {CANARY}")],
        metadata={"of": CANARY},
    )
    await sessions.execute(chat.id, action)


async def _import(sessions: Sessions, chat: Chat) -> None:
    said = [{"role": "user", "content": f"a {CANARY}"}, {"role": "assistant", "content": "b"}]
    await sessions.import_(io.BytesIO(json.dumps({"messages": said}).encode()), format="openai")
    await sessions.import_(io.BytesIO(await exported(f"c {CANARY}")))


async def exported(text: str) -> bytes:
    """A session of another store, as a file."""
    file = io.BytesIO()
    async with perdure.connect("memory://", driver=ScriptedDriver([ToolCall("look", {"what": text}), text])) as others:
        await (await others.open("other")).send(text)
        await others.export(file)
    return file.getvalue()


async def _once(sessions: Sessions, chat: Chat) -> None:
    await sessions.run(f"a {CANARY}", AgentDefinition("x", system_prompt=f"You know {CANARY}"))


VERBS: dict[str, Verb] = {
    name.removeprefix("_"): verb
    for name, verb in list(globals().items())
    if name.startswith("_") and name != "_" and asyncio.iscoroutinefunction(verb)
}
OPTIONS: dict[str, Any] = {
    "tools": [look, spend, fail],
    "subagents": [AgentDefinition("helper", description=f"Helps with {CANARY}", system_prompt=f"Use {CANARY}")],
    "input_filters": [lambda messages: perdure.Warned(f"beware of {CANARY}")],
    "title": lambda session: f"{'x' * 190} {CANARY}",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_canary_is_nowhere(kind: str, verb: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever verb brings a secret, it is in no byte of the store, no event, no log line, and not sent to a model."""
    model, bus, heard = Model(), EventBus(), list[str]()
    bus.wiretap(lambda event: heard.append(repr(event)))
    agent = AgentDefinition("keeper", system_prompt=f"You know {CANARY}", metadata={"of": CANARY})
    with caplog.at_level(logging.DEBUG):
        async with perdure.connect(
            url_of(kind, tmp_path), redact=redactors.DEFAULT, driver=model, events=bus, **OPTIONS
        ) as sessions:
            chat = await sessions.open("chat", agent)
            await sessions.open("chat", agent)
            await VERBS[verb](sessions, chat)
            shown = [each async for each in told(sessions)]
    assert not [each for each in (*shown, *heard, *model.sent, caplog.text) if CANARY in each]
    assert not [raw for raw in stored(kind, tmp_path) if CANARY.encode() in raw]
    assert any(MARK in each for each in shown)


@pytest.mark.parametrize("kind", ["file", "sqlite", "postgres"])
async def test_without_redactors_the_canary_is_found(kind: str, tmp_path: Path) -> None:
    """The look at a store's bytes does find what was not redacted."""
    async with perdure.connect(url_of(kind, tmp_path), driver=Model(), **OPTIONS) as sessions:
        await (await sessions.open("chat")).send(f"a {CANARY}")
        shown = [each async for each in told(sessions)]
    assert any(CANARY in each for each in shown)
    assert any(CANARY.encode() in raw for raw in stored(kind, tmp_path))
