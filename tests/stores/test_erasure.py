"""Redaction and clearing up, seen from beneath: no byte of a store shows what was replaced."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Collection
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from tests.stores.files import names
from tests.stories import KINDS, opened

from perdure import (
    AgentDefinition,
    AgentSession,
    AutoCompaction,
    CompactTranscript,
    ErasedMeanwhile,
    FileStore,
    ForkSession,
    InjectMessage,
    LoopFactory,
    MemoryStore,
    Message,
    ModelConfig,
    ModelRequest,
    Redacted,
    SendMessage,
    SessionId,
    SessionRuntime,
    SqliteStore,
    StoreError,
    ToolCall,
    recover,
    tool,
)
from perdure.archive import copy, export_sessions, fsck, import_sessions
from perdure.errors import CorruptRecord, InvalidData
from perdure.loop.compaction.summary import INSTRUCTIONS
from perdure.model.ids import use
from perdure.protocols import Entry, Sketch
from perdure.stores.file import commit
from perdure.stores.file.document import encode_document
from perdure.stores.file.pledge import write_intent
from perdure.stores.folder import Folder
from perdure.stores.format.packing import unpack
from perdure.stores.jobs.redaction import Request
from perdure.stores.sqlite.erasure import Erasure
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver
from perdure.testing.parts.redaction import entries_with_secret, run_with_secret
from perdure.testing.samples import fork, new_session, note, say, texts

pytestmark = pytest.mark.sample(2, cases=True)  # make torture runs all

SECRET = "hunter2-4111-1111"
STORES: dict[str, Any] = {
    "memory": lambda where: MemoryStore(),
    "sqlite": lambda where: SqliteStore(where / "sessions.db"),
    "file": lambda where: FileStore(where / "sessions"),
}


@tool
def pay(card: str) -> str:
    """Pay by card."""
    if card.endswith("0"):
        raise ValueError(f"the card {card} was refused")
    return f"paid with {card}"


def bytes_of(where: Path) -> bytes:
    """Return every byte of a store, and its packed rows unpacked."""
    found = [path.read_bytes() for path in where.rglob("*") if path.is_file()]
    for path in where.rglob("sessions.db"):
        db = apsw.Connection(str(path))
        for (table,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            for row in db.execute(f'SELECT * FROM "{table}"').fetchall():
                found += [_unpacked(cell) if isinstance(cell, bytes) else str(cell).encode() for cell in row]
        db.close()
    return b"\n".join(found)


def _unpacked(body: bytes) -> bytes:
    try:
        return unpack(body)
    except InvalidData:
        return body


def remainders(where: Path) -> list[Path]:
    """Return the remainders of logs whose sessions are gone."""
    return list(where.glob("*@*.jsonl"))


@pytest.mark.parametrize("kind", STORES)
async def test_nothing_of_a_real_run_is_left(tmp_path: Path, kind: str) -> None:
    """A run with failed and successful tools, a compaction and a fork: all is replaced, and all still reads."""
    script: list[Any] = [
        Message.assistant(f"I try {SECRET}.", tool_calls=[ToolCall("pay", {"card": SECRET + "0"}, id="c1")]),
        Message.assistant("Once more.", tool_calls=[ToolCall("pay", {"card": SECRET}, id="c2")]),
        f"It is paid with {SECRET}.",
    ]
    async with STORES[kind](tmp_path) as store:
        runtime = SessionRuntime(store)
        loops = LoopFactory(tools=[pay], driver=ScriptedDriver(script))
        session = await runtime.create(AgentDefinition("payer"))
        session = await runtime.execute(session.id, SendMessage(f"Pay with {SECRET}, please", loops))
        assert [message.role for message in session.state.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
        await store.search("pay")
        ids = [message.id for message in session.state.messages]
        compact = CompactTranscript(compact_strategy="truncate", keep_last=1)
        session = await runtime.execute(session.id, compact)
        child = await store.create(fork(session))
        if kind != "memory":
            assert SECRET.encode() in bytes_of(tmp_path)
        assert await store.redact(session.id, ids) == 6
        assert SECRET.encode() not in bytes_of(tmp_path)
        for each in (session, child):
            events = [event async for event in runtime.events(each.id)]
            assert isinstance(events[-1], Redacted)
            assert events[-1].message_ids == tuple(ids)
            record = await runtime.record(each.id)
            assert SECRET not in str([events, record, await store.load(each.id)])
        loop = next(each for each in (await runtime.record(session.id)).loops)
        assert SECRET not in str(await runtime.loop(session.id, loop.loop_id))
        again = LoopFactory(driver=ScriptedDriver(["Fine."]))
        session = await runtime.execute(session.id, SendMessage("And now?", again))
        assert session.state.messages[-1].text == "Fine."


@pytest.mark.parametrize("how", ["erase", "redact"])
@pytest.mark.parametrize("kind", ["sqlite", "file"])
async def test_nothing_of_an_answer_under_way_is_left(tmp_path: Path, kind: str, how: str) -> None:
    """Neither an answer that was never finished nor the pieces of finished ones are left, among many other sessions."""
    secret = {3, 4, 29}
    async with STORES[kind](tmp_path) as store:
        sessions = [await store.create(new_session("hello", id=f"s{number}")) for number in range(30)]
        claims = [await store.claim(each.id, version=1, owner="me", entries=[Entry("start")]) for each in sessions]
        for piece in range(6):
            for number, (claim, begun) in enumerate(claims):
                text = f"{number:05d} {SECRET if number in secret else 'x' * len(SECRET)}" * 10
                await store.sketch(claim, Sketch("r", "m", text, piece * len(text), seq=begun.seq))
        for number in (*range(0, 29, 2), *range(1, 29, 2)):
            told = [Message.assistant("what was said", id="told")]
            appended = await store.append(claims[number][0], messages=told, entries=[Entry("said")])
            state = sessions[number].state.with_messages(*told)
            await store.save(sessions[number].with_state(state), claim=claims[number][0], written=appended.written)
        await store.release(claims[29][0], interrupted=True)
    assert SECRET.encode() in bytes_of(tmp_path)
    async with STORES[kind](tmp_path) as store:  # its file has taken in what was in its log
        for number in sorted(secret):
            if how == "erase":
                await store.delete(f"s{number}")
            else:
                session = await store.load(f"s{number}")
                await store.redact(session.id, [message.id for message in session.state.messages])
        assert SECRET.encode() not in bytes_of(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_runs_summary_comes_back_neither_by_search_nor_by_recovery(tmp_path: Path, kind: str) -> None:
    """A run that compacted and was killed is redacted before recovery: the model is not sent the redacted text."""
    clock = FrozenClock(tick=0.0001)
    with use(clock=clock):
        async with opened(kind, tmp_path) as store:
            runtime = SessionRuntime(store)
            session = await runtime.create(AgentDefinition("agent"))
            said = [Message.user(f"raspberry {SECRET}"), *(Message.user("y" * 1500) for _ in range(29))]
            await runtime.execute(session.id, InjectMessage(*said))
            await _killed_after_compacting(store, session.id)
            clock.advance(60)
            assert len(await store.search("strawberry")) == 1
            assert await store.redact(session.id, [said[0].id]) == 1
            assert await store.search("strawberry") == []
            driver = ScriptedDriver(lambda request: "Fine.")
            report = await recover(runtime, compacting(driver))
            assert report.resumed == (session.id,)
            assert "strawberry" not in str([driver.requests, await runtime.get_session(session.id)])
            events = [event async for event in runtime.events(session.id)]
            assert "strawberry" not in str(events)
            assert (await runtime.get_session(session.id)).state.messages[-1].text == "Fine."


def compacting(driver: ScriptedDriver) -> LoopFactory:
    model = ModelConfig("scripted", context_window=8_000)
    return LoopFactory(tools=[pay], driver=driver, model=model, compaction=AutoCompaction(compact_strategy="llm"))


async def _killed_after_compacting(store: Any, session_id: str) -> None:
    """Run until the view has been compacted; from then on nothing reaches the store, as after SIGKILL."""
    failing = FailingStore(store)

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == INSTRUCTIONS:
            return "They like strawberry."
        if request.step == 0:
            return ToolCall("pay", {"card": "5"}, id="c1")
        failing.crash(call=1)
        return "never stored"

    loops = compacting(ScriptedDriver(reply))
    with suppress(StoreError):
        await SessionRuntime(failing).execute(session_id, SendMessage("go", loops))


@pytest.mark.sample(3)
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_redacted_session_is_the_same_in_every_store(tmp_path: Path, kind: str, other: str) -> None:
    """A copy of a redacted session has no difference to report. Its own store takes its export for the same session."""
    async with opened(kind, tmp_path / "one") as store, opened(other, tmp_path / "two") as target:
        session = await store.create(new_session())
        user = Message.user(f"Pay with {SECRET}", metadata={"channel": "web"})
        ran = run_with_secret(session.with_state(session.state.with_messages(user)))
        claim, appended = await store.claim(session.id, version=1, owner="me", messages=[user])
        entries = entries_with_secret(user, ran)
        saved = await store.save(ran, claim=claim, written=appended.written, entries=entries)
        view = saved.state.transcript.cover(0, 1, [Message.assistant(f"sum of {SECRET}")], by="test")
        saved = await store.save(saved.with_state(saved.state.with_transcript(view)))
        await store.create(fork(saved))
        await store.redact(saved.id, [user.id, *(message.id for message in saved.state.messages)])
        for _ in range(2):
            report = await copy(store, target)
            assert (report.verified, report.differing) == (2, ())
        file = tmp_path / "export.jsonl"
        await export_sessions(store, file)
        for each in (store, target):
            assert (await import_sessions(each, file)).skipped == 2


@pytest.mark.parametrize("other", ["memory", "sqlite"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_earlier_release_has_redacted_is_the_same_session(
    tmp_path: Path, kind: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages are not in canonical form; its own store, and copies, still take their export for the same."""
    async with opened(kind, tmp_path / "one") as store, opened(other, tmp_path / "two") as target:
        said = Message.user(f"Pay with {SECRET}", metadata={"channel": "web"})
        result = Message.tool("c1", f"paid with {SECRET}", name="pay")
        session = new_session()
        session = await store.create(session.with_state(session.state.with_messages(said, result)))
        with monkeypatch.context() as earlier:
            earlier.setattr("perdure.stores.jobs.redaction.findings.codec.convert", lambda _, plain: plain)
            earlier.setattr("perdure.stores.jobs.redaction.findings.codec.encode_message", msgspec.json.encode)
            await store.redact(session.id, [said.id, result.id])
        await store.create(fork(session))
        for _ in range(2):
            assert (await copy(store, target)).differing == ()
        await export_sessions(store, tmp_path / "export.jsonl")
        for each in (store, target):
            assert (await import_sessions(each, tmp_path / "export.jsonl")).skipped == 2


FAMILY = {"s": None, "f": "s", "g": "f", "h": "s"}
"""Sessions, each with the session that it was forked from."""


async def a_family(store: Any) -> dict[str, bytes]:
    """Create a session with a secret, and its forks. Return a separate export of each."""
    made: dict[str, AgentSession] = {}
    for name, parent in FAMILY.items():
        new = new_session(f"Pay with {SECRET}", id=name) if parent is None else fork(made[parent], id=name)
        made[name] = await store.save(say(await store.create(new), f"{name} speaks"))
    exports = {}
    for name in FAMILY:
        file = io.BytesIO()
        await export_sessions(store, file, [SessionId(name)])
        exports[name] = file.getvalue()
    return exports


async def redacted_through(store: Any, name: str, present: Collection[str]) -> None:
    session = await store.load(name)
    assert await store.redact(name, [session.state.messages[0].id]) == 1
    for each in present:
        assert texts(await store.load(each))[0] == "[redacted]", f"{each}, through {name}"
    assert await store.search(SECRET) == []
    assert (await fsck(store)).problems == ()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "order", [*permutations(FAMILY, 2), *permutations(FAMILY, 3), *permutations(FAMILY)], ids="".join
)
async def test_copies_that_came_one_by_one_are_redacted_through_any_of_them(order: tuple[str, ...]) -> None:
    """Forks and parents that were imported one by one have copies of a message; a redaction through any reaches all."""
    async with MemoryStore() as source:
        exports = await a_family(source)
    for name in order:
        async with MemoryStore() as store:
            for each in order:
                await import_sessions(store, io.BytesIO(exports[each]))
            await redacted_through(store, name, order)


@pytest.mark.parametrize("kind", KINDS)
async def test_copies_are_redacted_in_every_store(tmp_path: Path, kind: str) -> None:
    """The copies are redacted even if the session they were copied from was erased before one of them came."""
    async with MemoryStore() as source:
        exports = await a_family(source)
    async with opened(kind, tmp_path) as store:
        for name in "hsf":
            await import_sessions(store, io.BytesIO(exports[name]))
        await store.delete("s")
        await redacted_through(store, "f", "hf")


@pytest.mark.parametrize("order", ["gf", "fg"])
async def test_copies_of_copies_are_redacted(order: str) -> None:
    """Forks that were copied twice, each time without their parent, are redacted."""
    async with MemoryStore() as source, MemoryStore() as between, MemoryStore() as store:
        exports = await a_family(source)
        for name in "fg":
            await import_sessions(between, io.BytesIO(exports[name]))
        for name in order:
            file = io.BytesIO()
            await export_sessions(between, file, [SessionId(name)])
            file.seek(0)
            await import_sessions(store, file)
        await redacted_through(store, "g", "fg")


async def test_another_message_of_the_same_id_is_not_redacted() -> None:
    """Callers may give the same id twice: only copies of one log have the same message at the same place."""
    async with MemoryStore() as store:
        for name in ("a", "b"):
            session = new_session(id=name)
            await store.create(session.with_state(session.state.with_messages(Message.user("Hi", id="0"))))
        assert await store.redact("a", ["0"]) == 1
        assert texts(await store.load("b")) == ["Hi"]


@pytest.mark.parametrize("kind", ["sqlite", "file"])
async def test_no_byte_of_a_redacted_message_is_left(tmp_path: Path, kind: str) -> None:
    """Many messages of all sizes, one redacted after another."""
    async with STORES[kind](tmp_path) as store:
        secrets = [f"secret{number}" + f"-{number:x}payload" * (7**number) for number in range(5)]
        session = await store.create(new_session(*(f"text {each}" for each in secrets)))
        for number in range(20):
            session = await store.save(say(session, f"filler {number} " * 20))
        await store.search("filler")
        for number, secret in enumerate(secrets):
            await store.redact(session.id, [session.state.messages[number].id])
            left = bytes_of(tmp_path)
            assert secret.encode() not in left
            assert f"secret{number}".encode() not in left


async def test_a_torn_tail_that_was_set_aside_goes_too(tmp_path: Path) -> None:
    """Files that killed writers have left may contain the message, and are removed."""
    async with FileStore(tmp_path) as store:
        session = await store.create(new_session(SECRET))
        (tmp_path / f"{session.id}.torn-1").write_text(f"half a line with {SECRET}")
        (tmp_path / f"{session.id}.json.tmp").write_text(f"half a document with {SECRET}")
        await store.redact(session.id, [session.state.messages[0].id])
        assert SECRET.encode() not in bytes_of(tmp_path)


@pytest.mark.parametrize("survived", range(8))
async def test_a_killed_redaction_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """A file store may be killed between two files: every session still loads, and a second redaction ends the work."""
    async with FileStore(tmp_path) as store:
        parent = await store.create(new_session(f"code {SECRET}", "ok"))
        child = await store.create(say(fork(parent), f"echo: code {SECRET}"))
        task = child.with_state(child.state.with_task(f"remember: code {SECRET}"))
        child = await store.save(task)
        left = survived

        def dying(original: Any) -> Any:
            def step(*given: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                return original(*given)

            return step

        with monkeypatch.context() as killing:
            killing.setattr(Folder, "replace", dying(Folder.replace))
            killing.setattr(Folder, "remove", dying(Folder.remove))
            killing.setattr("perdure.stores.file.commit.encode_document", dying(encode_document))
            killed = True
            try:
                await store.redact(child.id, [parent.state.messages[0].id])
                killed = False
            except KeyboardInterrupt:
                pass
    async with FileStore(tmp_path) as store:
        for session_id in (parent.id, child.id):
            assert await store.load(session_id) is not None
        assert len(await store.list()) == 2
        assert (await store.list()).damaged == ()
        if killed:
            await store.redact(child.id, [parent.state.messages[0].id])
        await store.redact(child.id, [child.state.messages[2].id])
        assert texts(await store.load(parent.id)) == ["[redacted]", "ok"]
        assert SECRET.encode() not in bytes_of(tmp_path)


@pytest.mark.parametrize("way", ["gc", "redact another", "delete", "open"])
@pytest.mark.parametrize("survived", range(1, 4))
async def test_a_redaction_that_was_cut_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int, way: str
) -> None:
    """A redaction that was killed between two logs is finished by the next open.

    A check reports one that an earlier release has left, or that cannot be finished at once. gc, the next redaction or
    a deletion finishes it.
    """
    async with FileStore(tmp_path) as store:
        parent = await store.create(new_session(f"code {SECRET}", "ok"))
        child = await store.create(say(fork(parent), "more"))
        left = survived

        def die(folder: Folder, name: str, put_in_place: Any = Folder.put_in_place) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            put_in_place(folder, name)

        monkeypatch.setattr(Folder, "put_in_place", die)
        with pytest.raises(KeyboardInterrupt):
            await store.redact(parent.id, [parent.state.messages[0].id], replacement="(gone)")
    monkeypatch.undo()
    if way != "open":
        (tmp_path / ".redactions" / parent.id).unlink()
    async with FileStore(tmp_path) as store:
        if way != "open":
            (problem,) = await store.check()
            assert (problem.session_id, problem.repair) == (parent.id, "Run `perdure gc`, which finishes it.")
        if way == "open":
            pass
        elif way == "gc":
            assert await store.gc() == (1 if survived < 3 else 0)
        elif way == "delete":
            await store.delete(parent.id)
        else:
            await store.redact(parent.id, [parent.state.messages[1].id], replacement="(gone)")
        assert texts(await store.load(child.id))[0] == "(gone)"
        assert SECRET.encode() not in bytes_of(tmp_path)
        assert names(tmp_path, ".redaction") == set()
        assert not any((tmp_path / ".redactions").iterdir())
        assert await store.check() == []


async def test_a_redaction_that_is_locked_or_gone_is_no_hindrance_to_open(tmp_path: Path) -> None:
    """Opening skips locked and missing sessions without waiting; gc finishes their redactions."""
    async with FileStore(tmp_path) as store:
        await store.create(new_session("a", id="s"))
        folder = Folder(tmp_path)
        for session_id in ("s", "gone"):
            write_intent(folder, session_id, Request.of(session_id, ["m"], "(gone)").pledge)
        (tmp_path / ".redactions" / "not an id").touch()
        with folder.locked(["s"], 0.0):
            async with asyncio.timeout(5), FileStore(tmp_path):
                pass
            assert names(tmp_path, ".redaction") == {"s.redaction", "gone.redaction"}
        folder.close()
        assert await store.gc() == 0
        assert names(tmp_path, ".redaction") == set()


async def test_a_hint_of_a_redaction_that_is_over_goes(tmp_path: Path) -> None:
    """A process may be killed after the redaction, before it removes the hint."""
    async with FileStore(tmp_path) as store:
        await store.create(new_session("a", id="s"))
    (tmp_path / ".redactions").mkdir()
    (tmp_path / ".redactions" / "s").touch()
    async with FileStore(tmp_path) as store:
        assert not any((tmp_path / ".redactions").iterdir())
        assert await store.check() == []


async def test_a_note_of_a_redaction_is_checked(tmp_path: Path) -> None:
    """A damaged note is reported and kept; a note without its session is removed."""
    async with FileStore(tmp_path) as store:
        session = await store.create(new_session("a", id="s"))
        write_intent(Folder(tmp_path), "gone", Request.of("gone", ["m"], "(gone)").pledge)
        (tmp_path / "s.redaction").write_bytes(b"0badc0de [[],3]\n")
        assert await store.gc() == 0
        assert names(tmp_path, ".redaction") == {"s.redaction"}
        assert [problem.what for problem in await store.check()] == ["its checksum does not match"]
        with pytest.raises(CorruptRecord):
            await store.redact("s", [session.state.messages[0].id])
        await store.delete("s")
        assert names(tmp_path, ".redaction") == set()


async def test_gc_erases_what_nobody_shows_in_sqlite(tmp_path: Path) -> None:
    """gc removes a log's rows that no session shows, and values that nobody uses."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        parent = await store.create(new_session("one", SECRET, "three"))
        child = await store.create(fork(parent))
        await store.search("one")
        await store.delete(parent.id)
        db = apsw.Connection(str(path))
        db.execute("UPDATE ref SET stop = 1")
        db.execute("INSERT INTO value (hash, body) VALUES ('x', ?)", (json.dumps(SECRET).encode(),))
        db.close()
        assert await store.gc() == 2
        assert await store.gc() == 0
        assert SECRET.encode() not in bytes_of(tmp_path)
        assert [hit.session_id for hit in await store.search("one")] == [child.id]
        assert await store.search("three") == []


async def test_gc_removes_the_traces_that_a_killed_deletion_has_left_in_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion killed between its commit and the scrubbing leaves text in the write-ahead log and the index."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session(f"code {SECRET}", "ok"))
        await store.create(new_session("another"))
        await store.search("another")
        with monkeypatch.context() as killing:

            async def die(*_: object) -> None:
                raise KeyboardInterrupt

            killing.setattr("perdure.stores.sqlite.engine.SqliteEngine._leave_no_trace", die)
            with pytest.raises(KeyboardInterrupt):
                await store.delete(session.id)
        assert SECRET.encode() in bytes_of(tmp_path)
        assert await store.gc() == 0
        assert SECRET.encode() not in bytes_of(tmp_path)
        assert len(await store.search("another")) == 1


async def test_a_log_that_a_killed_redaction_was_writing_goes_with_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unfinished log holds the messages that were not to be redacted."""
    async with FileStore(tmp_path) as store:
        session = await store.create(new_session("replace me", f"code {SECRET}"))
        with monkeypatch.context() as killing:

            def die(*_: object) -> None:
                raise KeyboardInterrupt

            killing.setattr(Folder, "put_in_place", die)
            with pytest.raises(KeyboardInterrupt):
                await store.redact(session.id, [session.state.messages[0].id])
    assert SECRET.encode() in bytes_of(tmp_path)
    async with FileStore(tmp_path) as store:
        await store.delete(session.id)
    assert SECRET.encode() not in bytes_of(tmp_path)


async def test_gc_erases_what_a_killed_deletion_has_left_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc removes a remainder that was not trimmed."""
    async with FileStore(tmp_path) as store:
        parent = await store.create(new_session("one", "two"))
        child = await store.create(fork(parent))
        await store.delete(parent.id)
        with monkeypatch.context() as killing:
            killing.setattr(commit, "trim", lambda *_: None)
            await store.delete(child.id)
        assert len(remainders(tmp_path)) == 1
        assert await store.gc() == 2
        assert remainders(tmp_path) == []
        assert await store.gc() == 0


@pytest.mark.parametrize("kind", STORES)
async def test_hidden_sessions_can_be_listed_for_a_purge(tmp_path: Path, kind: str) -> None:
    """They are found by status, and by the time of their last change."""
    async with STORES[kind](tmp_path) as store:
        hidden = await store.create(new_session("one"))
        hidden = await store.save(hidden.deleted())
        shown = await store.create(new_session("two"))
        assert (await store.list(status="deleted")).all() == (hidden.info,)
        before = shown.info.updated_at
        assert (await store.list(status="deleted", updated_before=before)).all() == (hidden.info,)
        assert (await store.list(updated_before=before)).all() == ()


async def test_many_are_erased_at_the_price_of_one(tmp_path: Path) -> None:
    """Forks stay whole, a running session is left, and the index forgets what is gone."""
    async with SqliteStore(tmp_path / "sessions.db") as store:
        made = [await store.create(new_session(f"word{number} shared", f"only{number}")) for number in range(20)]
        child = await store.create(fork(made[3]))
        await store.claim(made[5].id, version=1, owner="somebody")
        assert len(await store.search("shared")) == 20
        wanted = [*(session.id for session in made), "unknown"]
        assert set(await store.delete_many(wanted)) == {each.id for each in made} - {made[5].id}
        assert {hit.session_id for hit in await store.search("shared")} == {child.id, made[5].id}
        assert texts(await store.load(child.id)) == ["word3 shared", "only3"]
        for suffix in ("", "-wal", "-search"):
            path = tmp_path / f"sessions.db{suffix}"
            content = path.read_bytes() if path.exists() else b""
            assert b"only7" not in content
            assert b"word7" not in content


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
async def test_what_is_redacted_elsewhere_is_not_at_hand_here(tmp_path: Path, kind: str) -> None:
    """A redaction by another store is seen even in a session that is pinned in memory."""
    async with opened(kind, tmp_path) as here, opened(kind, tmp_path) as elsewhere:
        here.pin("talk")
        session = await here.create(new_session(SECRET, "fine", id="talk"))
        await elsewhere.redact("talk", [session.state.messages[0].id])
        shown = await here.load("talk")
        assert texts(shown) == ["[redacted]", "fine"]
        await here.save(say(shown, "more"))
        assert texts(await here.load("talk")) == ["[redacted]", "fine", "more"]


class ForkedTooLate:
    """A fork with a redaction by somebody else between its read and its creation."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.tries = 0

    async def execute_on(self, session: AgentSession, context: Any = None) -> AgentSession:
        self.tries += 1
        made = await ForkSession(dst="late").execute_on(session, context)
        if self.tries == 1:
            await self._store.redact(session.id, [session.state.messages[0].id])
        return made


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_that_was_read_before_a_redaction_is_made_again(tmp_path: Path, kind: str) -> None:
    """The fork is made again, since its own metadata could quote what was redacted."""
    async with opened(kind, tmp_path) as store:
        parent = await store.create(note(new_session(f"code {SECRET}", "ok"), "last", f"code {SECRET}"))
        action = ForkedTooLate(store)
        made = await SessionRuntime(store).branch(parent.id, action)
        assert action.tries == 2
        assert SECRET not in str(made.to_dict())
        assert SECRET not in str((await store.load("late")).to_dict())


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_made_before_an_erasure_is_not_created_after_it(tmp_path: Path, kind: str) -> None:
    async with opened(kind, tmp_path) as store:
        parent = await store.create(new_session(f"code {SECRET}", "ok"))
        seen = await store.erasures()
        made = await ForkSession(dst="late").execute_on(parent)
        await store.redact(parent.id, [parent.state.messages[0].id])
        with pytest.raises(ErasedMeanwhile, match="Make it again"):
            await store.create(made, erasures=seen)
        assert not await store.exists("late")
        await store.create(made, erasures=await store.erasures())


_SLOW = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 200000) SELECT max(x) FROM n"


@pytest.mark.parametrize("step", ["move_ahead", "freeze", "survey", "overwrite"])
async def test_an_erasure_that_is_cancelled_raises_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It ends once the step under way has, and the next erasure removes what it has left."""
    under_way, loop, original = asyncio.Event(), asyncio.get_running_loop(), getattr(Erasure, step)

    def slowly(erasure: Erasure, *given: Any) -> Any:
        loop.call_soon_threadsafe(under_way.set)
        erasure._own.execute(_SLOW).fetchall()
        return original(erasure, *given)

    async with SqliteStore(tmp_path / "sessions.db") as store:
        session = await store.create(new_session("canary word " * 500))
        with monkeypatch.context() as patched:
            patched.setattr(Erasure, step, slowly)
            erasing = asyncio.ensure_future(store.delete(session.id))
            await under_way.wait()
            erasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await erasing
        await store.delete_many([session.id])
        await store.gc()
    assert b"canary" not in (tmp_path / "sessions.db").read_bytes()
