"""The gate that erasures shut: it is shut for little work, and what was read before it is still true behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.loop.scenes import loops_of
from tests.stores.test_postgres import schema, sql, store_in

from perdure import AgentDefinition, AgentSession, PostgresStore, SendMessage, SessionRuntime, ToolCall, tool
from perdure.errors import SessionNotFound
from perdure.stores.jobs import erasing
from perdure.stores.jobs.redaction import held, redacting
from perdure.stores.postgres import link
from perdure.testing import ScriptedDriver
from perdure.testing.samples import fork, new_session, note, say, texts

__all__ = ["schema"]

SECRET = "The secret word is swordfish, and nobody is to know it."


@tool
async def work(text: str) -> str:
    """Do something."""
    return f"did {text}"


async def run_often(store: PostgresStore, times: int) -> AgentSession:
    """Return a session with `times` runs on record, each with a tool call."""
    runtime = SessionRuntime(store)
    session = await runtime.create(AgentDefinition("agent", tools=("work",)))
    for turn in range(times):
        script = [ToolCall("work", {"text": f"{turn}"}), f"done {turn}"]
        session = await runtime.execute(session.id, SendMessage(f"Go {turn}.", loops_of(ScriptedDriver(script), work)))
    return session


@contextmanager
def behind_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the list of the statements that jobs in threads send while the gate is shut."""
    sent: list[str] = []
    fetched = link._fetched_at_once

    def noting(connection: Any, query: str, values: Any) -> list[Any]:
        if sent or "pg_advisory_xact_lock(" in query:
            sent.append(query)
        return fetched(connection, query, values)

    with monkeypatch.context() as patch:
        patch.setattr(link, "_fetched_at_once", noting)
        yield sent


async def test_a_redaction_reads_before_it_shuts_the_gate(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same few statements are sent behind the gate however many runs there are, and none reads them all."""
    counts = []
    async with store_in(schema) as store:
        for times in (2, 9):
            session = await run_often(store, times)
            with behind_gate(monkeypatch) as sent:
                assert await store.redact(session.id, [session.state.messages[0].id]) == 1
            assert not any(table in query for query in sent for table in ("SELECT pos", "SELECT last", "FROM head"))
            counts.append(len(sent))
        assert counts[0] == counts[1] < 30
        assert await store.check() == []


async def test_an_erasure_shuts_the_gate_last(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions, record and messages are deleted before it; only a few checks and values are left for behind it."""
    counts = []
    async with store_in(schema) as store:
        for times in (2, 9):
            session = await run_often(store, times)
            with behind_gate(monkeypatch) as sent:
                assert await store.delete_many([session.id]) == [session.id]
            assert not any(f"DELETE FROM {table}" in query for query in sent for table in ("msg", "head", "batch"))
            counts.append(len(sent))
        assert counts[0] == counts[1] < 15


def meanwhile(patch: pytest.MonkeyPatch, module: Any, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Let others do something once before the gate is shut, after a job's part of that name has ended."""
    loop, original = asyncio.get_running_loop(), getattr(module, name)
    todo = [work]

    def wrapped(*args: Any) -> Any:
        result = yield from original(*args)
        if todo:
            asyncio.run_coroutine_threadsafe(todo.pop()(), loop).result(20)
        return result

    patch.setattr(module, name, wrapped)


async def test_what_is_said_while_a_redaction_reads_is_not_lost(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a save and a fork in between, the redaction reads again, and replaces what they show."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session(SECRET, "b", id="s"))
        secret = session.state.messages[0].id

        async def work() -> None:
            saved = await other.save(note(say(session, "c"), "said", SECRET))
            await other.create(note(fork(saved, id="child"), "said", SECRET))

        meanwhile(monkeypatch, redacting, "_planned", work)
        assert await store.redact("s", [secret]) == 1
        for session_id in ("s", "child"):
            loaded = await other.load(session_id)
            assert loaded is not None
            assert texts(loaded) == ["[redacted]", "b", "c"]
            assert loaded.state.metadata["said"] == "[redacted]"
        assert await store.check() == []


async def test_a_fork_that_is_erased_while_a_redaction_reads(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The redaction succeeds without the fork."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session("secret", id="s"))
        await store.create(fork(session, id="child"))

        async def work() -> None:
            await other.delete("child")

        meanwhile(monkeypatch, redacting, "_planned", work)
        assert await store.redact("s", [session.state.messages[0].id]) == 1
        assert texts(await store.load("s")) == ["[redacted]"]


async def test_a_session_that_is_erased_while_a_redaction_reads(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The redaction raises SessionNotFound."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session("secret", id="s"))

        async def work() -> None:
            await other.delete("s")

        meanwhile(monkeypatch, redacting, "_planned", work)
        with pytest.raises(SessionNotFound):
            await store.redact("s", [session.state.messages[0].id])


async def test_a_fork_that_comes_while_a_session_is_erased(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The erasure begins again, and keeps what the fork shows."""
    async with store_in(schema) as store, store_in(schema) as other, sql(schema) as execute:
        session = await store.create(new_session("a", "b", id="s"))
        session = await store.save(say(session, "c"))

        async def work() -> None:
            loaded = await other.load("s", 1)
            assert loaded is not None
            await other.create(fork(loaded, id="child"))

        meanwhile(monkeypatch, erasing, "_shown_of", work)
        assert await store.delete_many(["s"]) == ["s"]
        assert not await other.exists("s")
        assert texts(await other.load("child")) == ["a", "b"]
        assert await execute("SELECT count(*) FROM msg") == [(2,)]
        assert await store.check() == []


async def test_a_session_that_is_erased_while_a_redaction_reads_is_not_found(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is SessionNotFound, not one about a missing message."""
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session(SECRET, id="s"))

        async def work() -> None:
            await other.delete("s")

        meanwhile(monkeypatch, held, "own_stretches", work)
        with pytest.raises(SessionNotFound):
            await store.redact("s", [session.state.messages[0].id])


async def test_the_last_fork_goes_while_its_parent_is_erased(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No session shows the fork's messages any more, so they are erased too."""
    async with store_in(schema) as store, store_in(schema) as other, sql(schema) as execute:
        session = await store.create(new_session("a", "b", id="s"))
        await store.create(fork(session, id="child"))

        async def work() -> None:
            await other.delete("child")

        meanwhile(monkeypatch, erasing, "_shown_of", work)
        assert await store.delete_many(["s"]) == ["s"]
        for table in ("session", "msg", "log", "ref", "value", "uses"):
            assert await execute(f"SELECT count(*) FROM {table}") == [(0,)], table


async def test_erasures_redactions_and_forks_at_once(schema: str) -> None:
    """Two stores fork, save, redact and erase the same sessions: nothing is left over, and nothing is missing."""
    async with store_in(schema) as store, store_in(schema) as other:
        for _ in range(4):
            made = [await store.create(new_session("secret", "b")) for _ in range(6)]
            answers = await asyncio.gather(
                other.delete_many([session.id for session in made[:3]]),
                *(store.create(say(fork(session), "forked")) for session in made),
                *(other.redact(session.id, [session.state.messages[0].id]) for session in made),
                *(store.save(note(session, "long", f"{session.id}" * 50)) for session in made),
                other.gc(),
                return_exceptions=True,
            )
            odd = [each for each in answers if isinstance(each, BaseException)]
            assert all(type(each).__name__ in ("SessionNotFound", "SessionConflict") for each in odd), odd
            assert await store.check() == []
