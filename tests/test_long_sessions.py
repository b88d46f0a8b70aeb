"""Long sessions: no operation on one blocks the event loop. Counted in turns, threads and pages."""

from __future__ import annotations

import asyncio
import gc
import io
import math
import threading
from typing import Any

import pytest
from msgspec.structs import replace
from tests.turns import counted_turns

import perdure
from perdure import CompactTranscript, InvalidData, MemoryStore, Message, Sessions, ToolCall, Transcript, codec
from perdure.aio import AT_ONCE
from perdure.archive import fsck
from perdure.archive.lines import Pages, encode_session, first_line, message_count
from perdure.archive.moving import export_sessions, import_sessions
from perdure.loop.tokens import TokenEstimator
from perdure.model.session import AgentSession
from perdure.model.transcript import Tape
from perdure.sessions import history
from perdure.stores import checked
from perdure.stores.jobs import saving
from perdure.testing import ScriptedDriver
from perdure.testing.samples import new_session

LENGTH = 4_000


def long_session(**facts: Any) -> AgentSession:
    """A session with calls and results in it."""
    session = new_session(**facts)
    return session.with_state(session.state.with_messages(*said(LENGTH)))


def said(length: int) -> list[Message]:
    turns = [
        (
            Message.user(f"question {at}"),
            Message.assistant(tool_calls=[ToolCall("look", {"at": at}, id=f"call-{at}")]),
            Message.tool(f"call-{at}", "found " * 20, name="look"),
            Message.assistant(f"answer {at}"),
        )
        for at in range(length // 4)
    ]
    return [message for turn in turns for message in turn]


@pytest.mark.parametrize("options", [{}, {"compact_strategy": "observation_mask"}, {"hard_limit_tokens": 100_000}])
async def test_others_have_turns_while_a_view_is_compacted(options: dict[str, Any]) -> None:
    """Tokens are counted, and messages read, a slice at a time."""
    session = long_session()
    async with counted_turns() as turns:
        made: Any = await CompactTranscript(**options).execute_on(session)
        assert turns.count >= LENGTH // AT_ONCE
    assert made.state.transcript.pieces != session.state.transcript.pieces


async def test_a_sum_in_slices_is_the_same_sum() -> None:
    """Both ways of counting give the same number of tokens."""
    tokens, messages = TokenEstimator(), said(LENGTH)
    assert await tokens.count(messages) == tokens.messages(messages)
    assert sum(await tokens.count_each(messages)) == tokens.messages(messages)


async def test_others_have_turns_while_a_history_is_read() -> None:
    """The history of a session with only its own log comes a slice at a time."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.store.create(long_session(id="long"))
        async with counted_turns() as turns:
            found = await sessions.history("long")
            assert turns.count >= LENGTH // AT_ONCE
        assert [message.text for message in found] == [message.text for message in said(LENGTH)]


async def test_a_history_of_several_logs_is_put_together_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork's history begins in its parent's log: the parts are put together beside the loop."""
    threads: set[int] = set()
    said_once = history._said_once

    def noted(placed: Any) -> list[Message]:
        threads.add(threading.get_ident())
        return said_once(placed)

    monkeypatch.setattr(history, "_said_once", noted)
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.store.create(long_session(id="long"))
        all_said = await (await sessions.fork("long")).history()
    assert [message.text for message in all_said] == [message.text for message in said(LENGTH)]
    assert len(threads - {threading.get_ident()}) == 1


async def pages_read(sessions: Sessions) -> list[tuple[int, int]]:
    """Return the pages of its log from which the history of a long session is read."""
    read: list[tuple[int, int]] = []
    messages = sessions.store.messages  # type: ignore[attr-defined]

    async def counted(log: Any, start: int, stop: int) -> Any:
        read.append((start, stop))
        return await messages(log, start, stop)

    sessions.store.messages = counted  # type: ignore[attr-defined]
    found = await sessions.history("long")
    assert [message.text for message in found] == [message.text for message in said(LENGTH)]
    return read


async def test_a_history_that_the_view_shows_is_not_read_again() -> None:
    """All of it was loaded with the session."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.store.create(long_session(id="long"))
        sessions.store.evict("long")  # type: ignore[attr-defined]
        assert await pages_read(sessions) == []


async def test_a_covered_history_is_read_once_and_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown part is in memory, and not read again. Another reader waits for one page at most."""
    monkeypatch.setattr("perdure.sessions.history._PAGE", 1_000)
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"]), compaction=None) as sessions:
        await sessions.store.create(long_session(id="long"))
        await sessions.compact("long", compact_strategy="truncate", keep_last=12)
        sessions.store.evict("long")  # type: ignore[attr-defined]
        read = await pages_read(sessions)
    assert sorted(at for start, stop in read for at in range(start, stop)) == list(range(LENGTH - 12))
    assert len(read) == math.ceil(LENGTH / 1_000)


async def test_a_history_with_gaps_in_its_view_is_whole() -> None:
    """Messages trimmed from the middle of a view are read from the log, in their place."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        session = await sessions.store.create(long_session(id="long"))
        view = session.state.transcript
        gaps = Transcript((*view[8:16].pieces, *view[2_000:3_000].pieces, *view[4:12].pieces))
        context = replace(session.state.context, transcript=gaps)
        await sessions.store.save(session.with_state(replace(session.state, context=context)))
        read = await pages_read(sessions)
    assert read == [(0, 4), (16, 2_000), (3_000, LENGTH)]


async def test_the_collector_is_spared_a_long_session() -> None:
    """Frozen JSON cannot be in a cycle, so it need not bring on a full collection, for which all threads wait."""
    deep = ToolCall("look", {"at": {"x": [1, {"y": 2}]}}, id="deep", opaque={"signature": [1]})
    messages = [*said(8_000), Message.assistant(tool_calls=[deep], metadata={"seen": ["a"]})]
    messages.append(Message.tool("deep", {"found": [{"a": "b"}]}, name="look"))
    async with MemoryStore() as store:
        session = new_session(id="long")
        await store.create(session.with_state(session.state.with_messages(*messages)))
        store.evict("long")
        await store.load("long")  # imports modules
        store.evict("long")
        gc.collect()
        before = len(gc.get_objects())
        loaded = await store.load("long")
        gc.collect()
        assert len(gc.get_objects()) - before < 500
    assert loaded is not None
    assert list(loaded.state.messages) == messages
    call, result = loaded.state.messages[-2].tool_calls[0], loaded.state.messages[-1].tool_results[0]
    found = (call.arguments, call.arguments["at"]["x"], call.opaque, result.content, loaded.state.messages[-2].metadata)
    assert not any(map(gc.is_tracked, found))
    copied: Any = call.arguments.copy()  # type: ignore[attr-defined]
    copied["self"] = copied  # a caller's copy may be in a cycle, and is tracked like any other object
    assert gc.is_tracked(copied)


class Target(io.BytesIO):
    """A file that notes the threads that write to it, and the number of lines at once."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.pages: list[int] = []

    def write(self, raw: Any) -> int:
        self.threads.add(threading.get_ident())
        self.pages.append(bytes(raw).count(b"\n"))
        return super().write(raw)


async def test_an_export_is_written_in_pages_by_another_thread() -> None:
    """No page is long, all together are the whole session, and they can be imported again."""
    async with MemoryStore() as store, MemoryStore() as other:
        await store.create(long_session(id="long"))
        target = Target()
        report = await export_sessions(store, target)
        assert threading.get_ident() not in target.threads
        assert max(target.pages) <= 1_024 < LENGTH
        assert (report.bytes, report.messages) == (len(target.getvalue()), LENGTH)
        target.seek(0)
        await import_sessions(other, target)
        assert await other.dump("long") == await store.dump("long")


async def test_an_archive_is_freed_page_by_page() -> None:
    """Freeing all messages at once would keep every thread waiting."""
    async with MemoryStore() as store:
        await store.create(long_session(id="long"))
        archived = await store.dump("long")
        pages = Pages(archived)
        async with counted_turns() as turns:
            await pages.let_go()
            assert turns.count >= LENGTH // 1_024
    assert message_count(archived) == LENGTH  # another user of it still has it whole


async def test_an_import_writes_its_rows_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No list of rows is long: one of 100,000 would bring on collections for which all threads wait."""
    rows: list[int] = []
    write = saving.write_messages

    def counted(log: Any, start: int, bodies: Any) -> Any:
        rows.append(len(bodies))
        return write(log, start, bodies)

    monkeypatch.setattr(saving, "write_messages", counted)
    async with MemoryStore() as store, MemoryStore() as other:
        await store.create(long_session(id="long"))
        rows.clear()
        assert await other.restore(await store.dump("long"))
        assert (sum(rows), max(rows)) == (LENGTH, 1_000)
        assert await other.dump("long") == await store.dump("long")


async def test_what_an_import_is_given_is_checked_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message of it is checked outside of the loop's thread."""
    threads: list[int] = []
    check = checked.restore

    def noted(archived: Any) -> None:
        threads.append(threading.get_ident())
        check(archived)

    monkeypatch.setattr(checked, "restore", noted)
    async with MemoryStore() as store:
        await store.create(long_session(id="long"))
        archived = await store.dump("long")
        assert await store.restore(archived) is False
        bad = replace(archived, logs={"long": {**archived.logs["long"], 7: "no bytes"}})  # type: ignore[dict-item]
        with pytest.raises(InvalidData, match=r"bytes.*\$\.archived"):
            await store.restore(bad)
    assert threading.get_ident() not in threads


async def test_a_compaction_leaves_nothing_to_the_garbage_collector() -> None:
    """The earlier view is freed once it is not used: a collection would stop all threads for it."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"]), compaction=None) as sessions:
        await sessions.store.create(long_session(id="long"))
        sessions.store.evict("long")  # type: ignore[attr-defined]
        gc.collect()
        gc.disable()
        try:
            await sessions.compact("long", compact_strategy="truncate", keep_last=12)
            sessions.store.evict("long")  # type: ignore[attr-defined]
            left = [each for each in gc.get_objects() if type(each) is Tape and len(each.items or ()) == LENGTH]
            assert not left
        finally:
            gc.enable()


async def test_an_export_is_the_same_bytes_as_ever() -> None:
    """Pages change no byte: lines are in one order, and the last of a session sums up all before it."""
    async with MemoryStore() as store:
        await store.create(new_session("hi", id="short"))
        target = io.BytesIO()
        await export_sessions(store, target)
        lines = target.getvalue().splitlines(keepends=True)
        assert lines[0] == first_line()
        assert b"".join(lines[1:-1]) == b"".join(encode_session(await store.dump("short")))


async def test_a_check_decodes_a_little_at_a_time_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own thread decodes none of the messages of a check."""
    seen: list[tuple[int, int]] = []
    decode = codec.decode_messages

    def counted(raws: Any) -> list[Message]:
        seen.append((threading.get_ident(), len(raws)))
        return decode(raws)

    async with MemoryStore() as store:
        await store.create(long_session(id="long"))
        monkeypatch.setattr("perdure.archive.checking.codec.decode_messages", counted)
        assert (await fsck(store)).messages == LENGTH
    aside = [count for thread, count in seen if thread != threading.get_ident()]
    assert (sum(aside), max(aside)) == (LENGTH, 256)


async def test_others_have_turns_while_memory_is_read() -> None:
    """A long session is loaded, and dumped, a thousand rows at a time."""
    async with MemoryStore() as store:
        await store.create(long_session(id="long"))
        store.evict("long")
        async with counted_turns() as turns:
            loaded = await store.load("long")
            assert turns.count >= LENGTH // 1_024
    assert loaded is not None
    assert len(loaded.state.messages) == LENGTH


async def test_what_is_written_while_memory_is_read_is_read_whole_or_not_at_all() -> None:
    """A read that was overtaken begins again, and at last runs in one go: it sees one state."""
    async with MemoryStore() as store:
        saved = await store.create(long_session(id="long"))
        store.evict("long")

        async def keep_writing() -> None:
            nonlocal saved
            for _ in range(20):
                await asyncio.sleep(0)
                messages = [Message.user("more") for _ in range(10)]
                saved = await store.save(saved.with_state(saved.state.with_messages(*messages)))
                store.evict("long")

        writing = asyncio.create_task(keep_writing())
        while not writing.done():
            loaded = await store.load("long")
            assert loaded is not None
            assert len(loaded.state.messages) == LENGTH + 10 * (loaded.version - 1)
            store.evict("long")
            await asyncio.sleep(0)
        await writing


async def test_a_snapshot_is_made_in_slices() -> None:
    """It copies all shown messages, as plain data."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.store.create(long_session(id="long"))
        async with counted_turns() as turns:
            snapshot = await sessions.snapshot("long")
            assert turns.count >= LENGTH // AT_ONCE
    assert snapshot is not None
    assert len(snapshot["messages"]) == LENGTH
