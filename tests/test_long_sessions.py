"""A long session: whatever is done with it, the event loop goes on. Counted in turns, threads and pages."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from tests.turns import counted_turns

import perdure
from perdure import CompactTranscript, MemoryStore, Message, ToolCall, codec
from perdure.aio import AT_ONCE
from perdure.archive import fsck
from perdure.archive.lines import encode_session, first_line
from perdure.archive.moving import export_sessions, import_sessions
from perdure.loop.tokens import TokenEstimator
from perdure.model.session import AgentSession
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
    """Tokens are counted, and messages looked at, a slice at a time."""
    session = long_session()
    async with counted_turns() as turns:
        made: Any = await CompactTranscript(**options).execute_on(session)
        assert turns.count >= LENGTH // AT_ONCE
    assert made.state.transcript.pieces != session.state.transcript.pieces


async def test_a_sum_in_slices_is_the_same_sum() -> None:
    """Whichever way tokens are counted, there are as many."""
    tokens, messages = TokenEstimator(), said(LENGTH)
    assert await tokens.count(messages) == tokens.messages(messages)
    assert sum(await tokens.count_each(messages)) == tokens.messages(messages)


async def test_others_have_turns_while_a_history_is_put_together() -> None:
    """Of a session that is nothing but its own log, and of a fork, whose history begins in another's."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.store.create(long_session(id="long"))
        for chat in (await sessions.open("long"), await sessions.fork("long")):
            async with counted_turns() as turns:
                history = await chat.history()
                assert turns.count >= LENGTH // AT_ONCE
            assert [message.text for message in history] == [message.text for message in said(LENGTH)]


async def test_a_history_without_branches_is_read_once() -> None:
    """What the view shows is in the log: it is not read a second time, nor compared with itself."""
    async with perdure.connect("memory://", driver=ScriptedDriver(["yes"])) as sessions:
        await sessions.store.create(long_session(id="long"))
        read: list[tuple[int, int]] = []
        messages = sessions.store.messages  # type: ignore[attr-defined]

        async def counted(log: Any, start: int, stop: int) -> Any:
            read.append((start, stop))
            return await messages(log, start, stop)

        sessions.store.messages = counted  # type: ignore[attr-defined]
        assert len(await sessions.history("long")) == LENGTH
        assert read == [(0, LENGTH)]


class Target(io.BytesIO):
    """A file that notes in which thread it was written to, and how many lines at once."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.pages: list[int] = []

    def write(self, raw: Any) -> int:
        self.threads.add(threading.get_ident())
        self.pages.append(bytes(raw).count(b"\n"))
        return super().write(raw)


async def test_an_export_is_written_in_pages_by_another_thread() -> None:
    """No page is long, all together are what was said, and they are taken in again."""
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


async def test_an_export_is_the_same_bytes_as_ever() -> None:
    """Pages change nothing: lines are in one order, and the last of a session sums up all before it."""
    async with MemoryStore() as store:
        await store.create(new_session("hi", id="short"))
        target = io.BytesIO()
        await export_sessions(store, target)
        lines = target.getvalue().splitlines(keepends=True)
        assert lines[0] == first_line()
        assert b"".join(lines[1:-1]) == b"".join(encode_session(await store.dump("short")))


async def test_a_check_decodes_a_little_at_a_time_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own thread decodes none of the messages that a check looks at."""
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
