"""`connect(redact=…)`: what redactors find is stored nowhere, and the model is sent the stored text."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
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
from perdure.archive import fsck
from perdure.archive.copying import copy
from perdure.events import AgentEnd
from perdure.model.ids import now
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta
from perdure.stores.format import packing
from perdure.stores.redacting import without_redactors
from perdure.testing import Chunks, Delay, FailingStore, ScriptedDriver

CANARY = "sk-canary0123456789abcdefXYZ"
MARK = "[redacted:api-key]"
KINDS = ("memory", "file", "sqlite", "postgres")


def url_of(kind: str, where: Path) -> str:
    if kind == "postgres":
        named = "&" if "?" in postgres_server.dsn() else "?"
        return f"{postgres_server.dsn()}{named}schema={postgres_server.schema_of(where)}"
    return {"memory": "memory://", "file": f"file://{where / 'files'}", "sqlite": f"sqlite:///{where / 's.db'}"}[kind]


def stored(kind: str, where: Path) -> Iterator[bytes]:
    """Return every byte that a store has, as it is and unpacked."""
    for path in (each for each in where.rglob("*") if each.is_file()):
        yield path.read_bytes()
    cells: list[object] = []
    if kind == "sqlite":
        with closing(sqlite3.connect(where / "s.db")) as database:
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
    """Return all that can be read of sessions: their heads, views, histories, records, inboxes and timers."""
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
    """A model that answers by the last word of its request, always with the canary, and keeps its requests."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self.sent.append(repr((request.system_prompt, list(request.messages))))
        last = [message for message in request.messages if message.role != "system"][-1]  # a warning follows it
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
        async for event in sessions.events(session_id, follow=True):
            if isinstance(event, AgentEnd):
                break
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
    """Return a session of another store, as a file."""
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
    """Whichever verb brings a secret, no byte of the store, no event, no log line and no request to a model has it."""
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
    """The search through a store's bytes does find what was not redacted."""
    async with perdure.connect(url_of(kind, tmp_path), driver=Model(), **OPTIONS) as sessions:
        await (await sessions.open("chat")).send(f"a {CANARY}")
        shown = [each async for each in told(sessions)]
    assert any(CANARY in each for each in shown)
    assert any(CANARY.encode() in raw for raw in stored(kind, tmp_path))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_model_is_sent_what_is_stored(kind: str, tmp_path: Path) -> None:
    """A tool is called with the arguments on record, and a later turn sees the same text as the first did."""
    seen: list[str] = []

    @perdure.tool
    def note(text: str) -> str:
        """Note."""
        seen.append(text)
        return f"{CANARY} noted"

    driver = ScriptedDriver([ToolCall("note", {"text": f"a {CANARY}"}), "done"])
    async with perdure.connect(url_of(kind, tmp_path), redact=redactors.DEFAULT, driver=driver, tools=[note]) as app:
        chat = await app.open("chat")
        await chat.send(f"b {CANARY}")
        sent = list(driver.requests[-1].messages)
        app.store.evict("chat")  # type: ignore[attr-defined]  # each of these stores can
        again = (await app.session("chat")).state.messages
        assert seen == [f"a {MARK}"]
        assert [message.parts for message in again][: len(sent)] == [message.parts for message in sent]


async def test_counts_are_on_record() -> None:
    """The run's record says how often each redactor has replaced something, and so does each message."""
    driver = ScriptedDriver(["no secrets here", f"{CANARY} and {CANARY}"])
    async with perdure.connect("memory://", redact=redactors.DEFAULT, driver=driver) as app:
        chat = await app.open("chat")
        await chat.send("pay with 4111 1111 1111 1111")
        [loop] = (await app.record("chat")).loops
        assert loop.redactions == {"card-number": 1}
        assert (await app.session("chat")).state.messages[0].metadata["redactions"] == {"card-number": 1}
        await chat.send("hello")
        assert (await app.record("chat")).loops[-1].redactions == {}


async def test_a_repeated_key_is_known_by_the_redacted_text(tmp_path: Path) -> None:
    """The digest of a key is that of the stored text, so that it reveals nothing of the secret."""
    driver = ScriptedDriver(lambda _: "yes")
    async with perdure.connect(url_of("sqlite", tmp_path), redact=redactors.DEFAULT, driver=driver) as app:
        chat = await app.open("chat")
        first = await chat.send(f"use {CANARY}", key="k")
        again = await chat.send(f"use {CANARY}", key="k")
        other = await chat.send(f"use {CANARY}other", key="k")
        assert first.session.version == again.session.version == other.session.version
        assert len(driver.requests) == 1
        with pytest.raises(InvalidData, match="was used for another message"):
            await chat.send("something else", key="k")


def bomb(text: str) -> str:
    if "BOOM" in text:
        raise ValueError(f"cannot read {text}")
    return text


def number(text: str) -> str:
    return 7 if "BOOM" in text else text  # type: ignore[return-value]  # that is what is tested


@pytest.mark.parametrize("bad", [bomb, number])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_redactor_that_fails_keeps_nothing_of_the_message(
    kind: str, bad: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A message is refused, an answer or a result fails the run, and the session stays usable."""

    @perdure.tool
    def explode() -> str:
        """Explode."""
        return "BOOM result"

    script = {"one": "BOOM answer", "two": ToolCall("explode", {}), "three": Chunks(["fine, ", "BOOM", " chunk"])}
    driver = ScriptedDriver(lambda request: script.get(request.messages[-1].text, "fine"))
    bus, heard = EventBus(), list[str]()
    bus.wiretap(lambda event: heard.append(repr(event)))
    async with perdure.connect(url_of(kind, tmp_path), redact=[bad], driver=driver, tools=[explode], events=bus) as app:
        chat = await app.open("chat")
        with pytest.raises(RedactionFailed, match=r"the text was not stored.*repeat the call"):
            await chat.send("BOOM message")
        assert (await app.info("chat")).version == 1
        for said in script:
            with pytest.raises(RunFailed) as caught:
                await chat.send(said)
            assert caught.value.cause is not None
            assert caught.value.cause.type == "RedactionFailed"
        with pytest.raises(RedactionFailed):
            await chat.inject({"role": "user", "content": "BOOM"})
        assert (await chat.send("go on")).text == "fine"
        statuses = [str(loop.status) for loop in (await app.record("chat")).loops]
        assert statuses == ["failed", "failed", "failed", "completed"]
        shown = [each async for each in told(app)]
    assert not [each for each in (*shown, *heard, caplog.text) if "BOOM" in each]
    assert not [raw for raw in stored(kind, tmp_path) if b"BOOM" in raw]


async def test_names_are_refused() -> None:
    """Ids, owners, tags, keys and names of agents are stored unchanged, so a secret in one is refused."""
    async with perdure.connect("memory://", redact=redactors.DEFAULT, driver=ScriptedDriver(["yes"])) as app:
        chat = await app.open("chat")
        refused: list[Awaitable[object]] = [
            app.open(CANARY),
            app.of(CANARY).open("mine"),
            app.open("other", AgentDefinition(CANARY)),
            app.execute("chat", TagSession(CANARY)),
            chat.send("hello", key=CANARY),
            app.schedule("daily" + " " + CANARY, "hello", cron="0 7 * * *", session_id="chat"),
        ]
        for work in refused:
            with pytest.raises(InvalidData, match="a redactor finds a secret in it") as caught:
                await work
            assert CANARY not in str(caught.value)


async def test_a_stream_is_what_the_answer_will_be(tmp_path: Path) -> None:
    """The chunks of a streamed answer add up to its text on record, and a sketch of it has no part of a secret."""
    pieces = ["The key is ", *[CANARY[start : start + 3] for start in range(0, len(CANARY), 3)], " and ", "so on"]
    script = Chunks([each for piece in pieces for each in (piece, Delay(0.04, ""))])
    async with perdure.connect(
        url_of("sqlite", tmp_path), redact=redactors.DEFAULT, driver=ScriptedDriver([script])
    ) as app:
        chat = await app.open("chat")
        seen, sketches = list[str](), list[str]()
        async for chunk in chat.stream("go"):
            seen.append(str(chunk))
            sketches.append(repr(await app.store.progress("chat")))  # type: ignore[attr-defined]  # SQLite has it
        assert "".join(seen) == (await app.session("chat")).state.messages[-1].text
        assert "".join(seen) == f"The key is {MARK} and so on"
        assert not [each for each in (*seen, *sketches) if "canary" in each]


async def test_an_answer_that_is_cut_off_keeps_no_half_of_a_secret(tmp_path: Path) -> None:
    """Text that is held back when a model breaks off is not kept."""
    script = Chunks(["I will say: ", CANARY[:12], DriverError("it broke")])
    async with perdure.connect(
        url_of("sqlite", tmp_path), redact=redactors.DEFAULT, driver=ScriptedDriver([script])
    ) as app:
        chat = await app.open("chat")
        with pytest.raises(RunFailed):
            await chat.send("go")
        assert (await app.session("chat")).state.messages[-1].text == "I will say: "


async def test_a_session_is_recovered_with_what_was_stored(tmp_path: Path) -> None:
    """A run that was killed after a redacted step continues with the redacted texts, and counts them all."""
    driver = ScriptedDriver([ToolCall("look", {"what": CANARY}), f"so {CANARY}"])
    store = FailingStore(perdure.SqliteStore(tmp_path / "s.db"))
    async with perdure.connect(store, redact=redactors.DEFAULT, driver=driver, tools=[look]) as app:
        chat = await app.open("chat")
        store.crash(call=4)
        with pytest.raises(perdure.StoreError):
            await chat.send(f"a {CANARY}")
        store.heal()
    async with perdure.connect(
        url_of("sqlite", tmp_path), redact=redactors.DEFAULT, driver=driver, tools=[look]
    ) as app:
        await app.recover()
        [loop] = (await app.record("chat")).loops
        assert loop.redactions["api-key"] == 3  # in the message, the call and the answer; the result is unknown
        assert not [each async for each in told(app) if CANARY in each]


async def test_an_archive_with_a_secret_in_its_head_is_refused() -> None:
    """A name, a prompt or metadata of an archive cannot be changed without changing its checksum."""
    file = io.BytesIO()
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as others:
        await others.open("other", AgentDefinition("x", system_prompt=f"You know {CANARY}"))
        await others.export(file)
    async with perdure.connect("memory://", redact=redactors.DEFAULT) as app:
        file.seek(0)
        with pytest.raises(InvalidData, match="redactors find a secret"):
            await app.import_(file)
        assert not await app.exists("other")


async def test_a_store_that_redacts_serves_everywhere(tmp_path: Path) -> None:
    """`perdure.redacting` makes a store for adapters; a connection to it redacts as the store does."""
    store = perdure.redacting(url_of("sqlite", tmp_path), redactors.DEFAULT)
    shared = perdure.shared(store)
    made = await shared.create(
        perdure.SessionFactory().create(AgentDefinition("x", system_prompt=CANARY), session_id="mine")
    )
    assert made.definition.system_prompt == MARK
    shared.close()
    async with perdure.connect(
        perdure.redacting(url_of("sqlite", tmp_path), redactors.DEFAULT), driver=ScriptedDriver([CANARY])
    ) as app:
        assert (await (await app.open("mine")).send(CANARY)).text == MARK
    assert not [raw for raw in stored("sqlite", tmp_path) if CANARY.encode() in raw]


async def test_an_adapter_over_a_store_that_redacts(tmp_path: Path) -> None:
    """Items of another framework are redacted in texts, arguments and results, and returned in its own form."""
    pytest.importorskip("agents")
    from perdure.adapters.openai_agents import PerdureSession

    store = perdure.redacting(url_of("sqlite", tmp_path), redactors.DEFAULT)
    session = PerdureSession("chat", store=store)
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": json.dumps({"q": CANARY})}
    result = {"type": "function_call_output", "call_id": "c1", "output": f"found {CANARY}"}
    await session.add_items([{"role": "user", "content": f"a {CANARY}"}, call, result])  # type: ignore[list-item]  # as items
    given = await session.get_items()
    assert json.loads(json.dumps(given).replace(MARK, CANARY))[0]["content"] == f"a {CANARY}"
    assert json.loads(given[1]["arguments"]) == {"q": MARK}  # type: ignore[typeddict-item]  # it is a call
    perdure.shared(store).close()
    assert not [raw for raw in stored("sqlite", tmp_path) if CANARY.encode() in raw]


class Reading:
    """A model that keeps the bytes of the files that it was sent."""

    def __init__(self) -> None:
        self.read: list[bytes] = []

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        for message in await request.messages_with_files():
            self.read += [part.data or b"" for part in message.parts if isinstance(part, Media)]
        return ModelReply(Message.assistant("read"))


@pytest.mark.parametrize("padding", [0, 9_000], ids=["inline", "apart"])
@pytest.mark.parametrize("media_type", ["text/plain", "TEXT/CSV; charset=utf-8", "application/json", "image/svg+xml"])
async def test_a_file_that_is_a_text_is_redacted(tmp_path: Path, media_type: str, padding: int) -> None:
    """It is stored, sent and named by the hash of its redacted bytes, also if it waits in an inbox."""
    model = Reading()
    note = Media(media_type, data=f"é {CANARY} 4111 1111 1111 1111{' ' * padding}".encode(), name="note")
    clean = f"é {MARK} [redacted:card-number]{' ' * padding}".encode()
    async with perdure.connect(url_of("sqlite", tmp_path), redact=redactors.DEFAULT, driver=model) as app:
        chat = await app.open("s")
        await chat.send("see", note, key="k")
        await chat.send("see", note, key="k")
        part = (await chat.history())[0].parts[1]
        assert isinstance(part, Media)
        assert (await chat.read(part)).data == clean
        assert part.hash in (None, hashlib.sha256(clean).hexdigest())
        assert (await app.record("s")).loops[0].redactions == {"api-key": 1, "card-number": 1}
        await chat.enqueue("again", note)
        for raw in (CANARY.encode(), base64.b64encode(note.data or b"")[:40]):
            assert raw not in b"".join(stored("sqlite", tmp_path))
    assert model.read == [clean]
    assert base64.b64encode(note.data or b"")[:40] not in b"".join(stored("sqlite", tmp_path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["copy", "import"])
async def test_a_redacted_file_is_shared_with_forks_and_copies(tmp_path: Path, kind: str, way: str) -> None:
    """A fork and a copy name the file by the hash of its redacted bytes, and keep it when the first session goes."""
    note = Media("text/plain", data=f"{CANARY}{' ' * 9_000}".encode(), name="note")
    clean = f"{MARK}{' ' * 9_000}".encode()
    async with (
        perdure.connect(url_of(kind, tmp_path), redact=redactors.DEFAULT, driver=Reading()) as app,
        perdure.connect(f"sqlite:///{tmp_path / 'other.db'}", redact=redactors.DEFAULT, driver=Reading()) as others,
    ):
        chat = await app.open("s")
        await chat.send("see", note)
        fork = await chat.fork("f")
        await fork.send("see again", note)
        if way == "copy":
            await copy(without_redactors(app.store), without_redactors(others.store))
        else:
            await app.export(tmp_path / "all.jsonl")
            await others.import_(tmp_path / "all.jsonl")
        for sessions in (app, others):
            await sessions.erase("s")
            files = [part for message in await sessions.history("f") for part in message.parts if type(part) is Media]
            assert [part.hash for part in files] == [hashlib.sha256(clean).hexdigest()] * 2
            assert [(await (await sessions.open("f")).read(part)).data for part in files] == [clean] * 2
            assert (await fsck(sessions.store)).is_sound
    for each in (kind, "sqlite"):
        assert CANARY.encode() not in b"".join(stored(each, tmp_path))


@pytest.mark.parametrize(
    ("media_type", "data"),
    [
        ("text/plain", b"\xff " + CANARY.encode()),
        ("text/plain", CANARY.encode("utf-16")),
        ("application/pdf", b"%PDF-" + CANARY.encode()),
    ],
)
async def test_other_files_are_stored_as_they_are(media_type: str, data: bytes) -> None:
    """Replacing bytes in them would break them."""
    async with perdure.connect("memory://", redact=redactors.DEFAULT, driver=Reading()) as app:
        chat = await app.open("s")
        await chat.send("see", Media(media_type, data=data))
        part = (await chat.history())[0].parts[1]
        assert isinstance(part, Media)
        assert (await chat.read(part)).data == data


async def test_a_small_file_in_an_import_is_redacted() -> None:
    """Its bytes are in the message itself, so no hash names them."""
    file = io.BytesIO()
    async with perdure.connect("memory://", driver=Reading()) as others:
        await (await others.open("other")).send("see", Media("text/plain", data=CANARY.encode()))
        await others.export(file)
    async with perdure.connect("memory://", redact=redactors.DEFAULT) as app:
        file.seek(0)
        await app.import_(file)
        part = (await app.history("other"))[0].parts[1]
        assert isinstance(part, Media)
        assert part.data == MARK.encode()
