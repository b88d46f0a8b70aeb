"""Connections that break, and a server that restarts: nothing is lost, written twice or reported wrongly."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests import postgres_server
from tests.loop.scenes import loops_of
from tests.stores.test_postgres import cut_off, schema, sql, store_in

from perdure import AgentDefinition, PostgresStore, SendMessage, SessionRuntime, ToolCall, tool
from perdure.errors import SessionConflict, StoreError
from perdure.model.message import Message
from perdure.protocols import Entry, Key
from perdure.stores.postgres import inbox, link
from perdure.stores.postgres.writer import Writer
from perdure.testing import ScriptedDriver
from perdure.testing.parts.journal import entries, kinds, messages, spoken
from perdure.testing.samples import fork, new_session, note, say, tell, texts

__all__ = ["schema"]


class Breaking:
    """A fault that breaks the connection at the next writes: before the server gets them, or before it answers."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._execute = Writer._execute
        self.plan: list[str] = []
        patch.setattr(Writer, "_execute", lambda writer, *args, **how: self._break(writer, *args, **how))

    async def _break(self, writer: Writer, connection: Any, batch: Any, **how: Any) -> Any:
        when = self.plan.pop(0) if self.plan else "never"
        if when == "before":
            await connection.close()
        answers = await self._execute(writer, connection, batch, **how)
        if when == "after":
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                await connection.execute("COMMIT")
            await connection.close()
            for order in batch:
                order.may_have_been_made = True
            raise psycopg.OperationalError("the connection is lost")
        return answers


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    return Breaking(monkeypatch)


PLANS = (["before"], ["after"], ["before", "after"], ["after", "before"], ["after", "after", "before"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", PLANS, ids="-".join)
async def test_a_write_whose_answer_was_lost_is_looked_up(schema: str, breaking: Breaking, plan: list[str]) -> None:
    """Create, save, claim, append and the save that ends a run are each made once, and the caller learns so."""
    async with store_in(schema) as store, store_in(schema) as other:
        breaking.plan = [*plan]
        session = await store.create(new_session("a"))
        breaking.plan = [*plan]
        child = await store.create(say(fork(session), "forked"))
        breaking.plan = [*plan]
        session = await store.save(say(session, "b"))
        assert (session.version, texts(await other.load(session.id))) == (2, ["a", "b"])
        said = messages("one", "two", "aside")
        breaking.plan = [*plan]
        claim, first = await store.claim(
            session.id, version=2, owner="ann", messages=said[:1], entries=entries("start")
        )
        breaking.plan = [*plan]
        second = await store.append(claim, messages=said[1:2], entries=entries("on"))
        breaking.plan = [*plan]
        aside = await store.append(claim, messages=said[2:], entries=entries("aside"), log="branch")
        written = {**first.written, **second.written, **aside.written}
        for message in said:
            assert await spoken(other, written[message.id]) == [message.text]
        breaking.plan = [*plan]
        session = await store.save(
            tell(session, *said, Message.assistant("end")),
            claim=claim,
            written=written,
            entries=entries("end"),
            key=Key("k", "d"),
        )
        assert breaking.plan == []
        assert session.version == 3
        loaded = await other.load(session.id)
        assert loaded == session
        assert texts(loaded) == ["a", "b", "one", "two", "aside", "end"]
        assert await kinds(other, session.id) == ["start", "on", "aside", "end"]
        assert texts(await other.load(child.id)) == ["a", "forked"]
        assert (await store.save(say(session, "more"))).version == 4


async def test_a_load_between_a_lost_answer_and_the_next_attempt_moves_nothing(schema: str, breaking: Breaking) -> None:
    """The load sees the write that was made. The second attempt reports the place of that write, not the next one."""
    async with store_in(schema) as store:
        session = await store.create(new_session(id="s"))
        claim, _ = await store.claim("s", version=1, owner="me")
        said = messages("one", "two")
        breaking.plan.append("after")
        writing = asyncio.ensure_future(store.append(claim, messages=said))
        await asyncio.sleep(0.03)
        store.evict("s")
        await store.load("s")
        told = (await writing).written
        assert [told[message.id].position for message in said] == [0, 1]
        saved = session.with_state(session.state.with_messages(*said))
        await store.save(saved, claim=claim, written=told)
        store.evict("s")
        assert texts(await store.load("s")) == ["one", "two"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_answer_never_hides_a_conflict(schema: str, breaking: Breaking, when: str) -> None:
    """Of two saves of one version, one raises a conflict, even if the answer to either is lost."""
    async with store_in(schema) as one, store_in(schema) as two:
        session = await one.create(new_session())
        for round in range(1, 13):
            breaking.plan = [when, "never"] if round % 2 else ["never", when]
            attempts = [
                one.save(note(say(session, "one"), "by", "one")),
                two.save(note(say(session, "two"), "by", "two")),
            ]
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            kept = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
            assert [type(each) for each in outcomes if isinstance(each, BaseException)] == [SessionConflict]
            session = kept[0]
            assert session.version == round + 1
            assert await one.load(session.id) == await two.load(session.id) == session


async def test_a_batch_whose_answer_was_lost(schema: str, breaking: Breaking) -> None:
    """All its changes are made once, and the refused one raises its error."""
    async with store_in(schema) as store, store_in(schema) as other:
        sessions = [await store.create(new_session(id=f"s{n}")) for n in range(12)]
        await other.save(say(sessions[5], "another's"))
        breaking.plan = ["after"]
        saves = [store.save(say(session, session.id)) for session in sessions]
        outcomes = await asyncio.gather(*saves, return_exceptions=True)
        assert isinstance(outcomes.pop(5), SessionConflict)
        for outcome in outcomes:
            assert (outcome.version, texts(outcome)) == (2, [str(outcome.id)])
            assert await other.load(outcome.id) == outcome


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", PLANS, ids="-".join)
async def test_a_post_whose_answer_was_lost_is_looked_up(
    schema: str, plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The item is in the inbox once, and the caller gets its number; others' items are not taken for it."""
    todo: list[str] = []
    fetched = link.fetched

    async def lossy(connection: Any, query: str, values: Any) -> Any:
        when = todo.pop(0) if todo and query == inbox._POST else "never"
        if when == "before":
            await connection.close()
        answer = await fetched(connection, query, values)
        if when == "after":
            await connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return answer

    monkeypatch.setattr(link, "fetched", lossy)
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session())
        for number in (1, 3, 5):
            todo[:] = ["never", *plan] if number == 1 else [*plan]
            assert await store.post(session.id, Entry("steer", run="r")) == number
            assert len(todo) < len(plan)
            todo.clear()
            assert await other.post(session.id, Entry("other's")) == number + 1
        assert await kinds(store, session.id, inbox=True) == ["steer", "other's"] * 3


def lose_commits(
    monkeypatch: pytest.MonkeyPatch, plan: list[str], meanwhile: Callable[[], Awaitable[object]] | None = None
) -> None:
    """Lose the connection before or after the next commits, as planned. Do something before the error is raised."""
    commit = psycopg.AsyncTransaction.__aexit__

    async def lossy(self: Any, *error: Any) -> Any:
        is_lost = bool(plan) and error[0] is None
        if is_lost and plan.pop() == "before":
            await self.connection.close()
        result = await commit(self, *error)
        if is_lost:
            await self.connection.close()
            if meanwhile is not None:
                await meanwhile()
            raise psycopg.OperationalError("the connection is lost")
        return result

    monkeypatch.setattr(psycopg.AsyncTransaction, "__aexit__", lossy)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_note_whose_answer_was_lost_is_made_once(
    schema: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets its number, though another has written behind it by then."""
    plan: list[str] = []
    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session())
        lose_commits(monkeypatch, plan, lambda: other.note(session.id, entries("other's", run="task")))
        plan += [when]
        number = await store.note(session.id, entries("noted", run="task"))
        assert plan == []
        found = await kinds(other, session.id)
        assert sorted(found) == ["noted", "other's"]
        assert found[number - 1] == "noted"


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", PLANS, ids="-".join)
async def test_a_note_hides_no_write_whose_answer_was_lost(
    schema: str, breaking: Breaking, plan: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's append loses its answer while another process notes something: it is sent again, and is there once."""
    send = Writer._send

    async def noting(writer: Writer, *args: Any, **how: Any) -> Any:
        try:
            return await send(writer, *args, **how)
        except psycopg.OperationalError:
            await other.note(session.id, entries("noted", run="task"))
            raise

    async with store_in(schema) as store, store_in(schema) as other:
        session = await store.create(new_session())
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start"))
        monkeypatch.setattr(Writer, "_send", noting)
        breaking.plan = [*plan]
        said = messages("one", "two")
        appended = await store.append(claim, messages=said, entries=entries("on"))
        found = await store.read(session.id)
        assert found[appended.seq - 1].kind == "on"
        assert [entry.kind for entry in found if entry.run == "run-1"] == ["start", "on"]
        assert len([entry for entry in found if entry.run == "task"]) == len(plan)
        assert [await spoken(other, appended.written[each.id]) for each in said] == [["one"], ["two"]]
        breaking.plan = [*plan]
        saved = await store.save(tell(session, *said), claim=claim, written=appended.written, entries=entries("end"))
        assert await other.load(session.id) == saved
        assert [entry.kind for entry in await other.read(session.id, run="run-1")] == ["start", "on", "end"]


async def test_an_erasure_survives_a_cut(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An erasure whose answer was lost is not done again."""
    commit = psycopg.AsyncTransaction.__aexit__
    plan: list[str] = []

    async def lossy(self: Any, *error: Any) -> Any:
        result = await commit(self, *error)
        if plan and error[0] is None:
            plan.pop()
            await self.connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return result

    monkeypatch.setattr(psycopg.AsyncTransaction, "__aexit__", lossy)
    async with store_in(schema) as store:
        session = await store.create(new_session())
        plan += ["lost"]
        await store.delete(session.id)
        assert plan == []
        assert not await store.exists(session.id)


async def test_a_job_in_a_thread_whose_answer_was_lost_is_not_done_again(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import still reports its session as new, and an erasure of many reports the sessions that it has erased."""
    commit = psycopg.Transaction.__exit__
    plan: list[str] = []

    def lossy(self: Any, *error: Any) -> Any:
        if plan and plan.pop() == "before":
            self.connection.close()
        result = commit(self, *error)
        if plan and error[0] is None:
            plan.pop()
            self.connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return result

    monkeypatch.setattr(psycopg.Transaction, "__exit__", lossy)
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        archived = await store.dump(session.id)
        plan += ["lost", "after"]
        assert await store.delete_many([session.id]) == [session.id]
        plan += ["lost", "after"]
        assert await store.restore(archived)
        plan += ["before"]
        assert not await store.restore(archived)
        assert plan == []
        assert texts(await store.load(session.id)) == ["a"]


async def test_connections_that_are_cut_again_and_again(schema: str) -> None:
    """While every connection is cut over and over, 16 sessions get every one of their messages, once."""
    async with store_in(schema) as store, sql(schema) as execute:
        done = asyncio.Event()

        async def cut() -> None:
            for _ in range(5):
                await asyncio.sleep(0.2)
                await cut_off(execute)
            done.set()

        async def converse(name: str) -> int:
            session = await store.create(new_session(id=name))
            while not done.is_set():
                session = await store.save(say(session, f"{session.version}"))
                assert await store.load(name) == session
            return session.version

        *versions, _ = await asyncio.gather(*(converse(f"s{n}") for n in range(16)), cut())
    async with store_in(schema) as store:
        for n, version in enumerate(versions):
            loaded = await store.load(f"s{n}")
            assert (texts(loaded), loaded.version) == ([f"{turn}" for turn in range(1, version)], version)


async def test_a_server_that_stays_away_is_said_to_be_unknown(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server does not come back in time, the error says that the write may or may not have been made."""
    monkeypatch.setattr(link, "PATIENCE", 0.3)

    async def lost(*_: Any, **__: Any) -> Any:
        raise psycopg.OperationalError("gone")

    async with store_in(schema) as store:
        session = await store.create(new_session())
        with monkeypatch.context() as patch:
            patch.setattr(psycopg.AsyncConnection, "execute", lost)
            with pytest.raises(StoreError, match="not known"):
                await store.save(say(session, "a"))
            with pytest.raises(StoreError):
                await store.list()
        assert (await store.save(say(session, "b"))).version == 2


async def test_a_cancellation_that_the_pool_swallows_is_heard(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 the pool loses a cancellation that arrives with the connection; the task would never end."""
    async with store_in(schema) as store:
        connection = store._engine.opened.link._pool.connection

        @asynccontextmanager
        async def swallowing() -> AsyncIterator[Any]:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            async with connection() as found:
                yield found

        monkeypatch.setattr(store._engine.opened.link._pool, "connection", swallowing)
        task = asyncio.create_task(store.list())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        assert (await store.list()).all() == ()


STOPPED = """
import asyncio, os, signal, sys
from perdure import PostgresStore
from perdure.stores.jobs import erasing
from perdure.testing.samples import new_session

forget = erasing.forget_unused

def stopped(*given):
    erasing.forget_unused = forget
    print("stopped", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    yield from forget(*given)

async def main():
    async with PostgresStore(sys.argv[1], schema=sys.argv[2]) as store:
        await store.create(new_session("mine", id="mine"))
        erasing.forget_unused = stopped
        await store.delete("mine")
        print(await store.exists("mine"), flush=True)

asyncio.run(main())
"""


@contextmanager
def stopped_in_an_erasure(schema: str) -> Iterator[subprocess.Popen[str]]:
    """Stop a client in the middle of a transaction, while it has the lock that all others share."""
    dsn = psycopg.conninfo.make_conninfo(postgres_server.dsn(), options="-c idle_in_transaction_session_timeout=500ms")
    arguments = [sys.executable, "-c", STOPPED, dsn, schema]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stopped\n"
            yield process
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()


async def test_a_client_that_stops_holds_nobody_for_long(schema: str) -> None:
    """Saves, forks and deletions wait until the server ends its transaction; the client repeats that later."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        spare = await store.create(new_session("b"))
        with stopped_in_an_erasure(schema) as process:
            async with asyncio.timeout(20):
                session = await store.save(say(session, "c"))
                await store.create(fork(session))
                await store.delete(spare.id)
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "False\n"


async def test_a_lock_that_is_held_for_ever_is_a_typed_error(schema: str) -> None:
    """A wait for a lock beyond the limit raises StoreError, and nothing is written."""
    dsn = psycopg.conninfo.make_conninfo(postgres_server.dsn(), options="-c lock_timeout=200ms")
    async with PostgresStore(dsn, schema=schema) as store, sql(schema) as execute:
        session = await store.create(new_session("a"))
        await execute("BEGIN")
        await execute("SELECT 1 FROM session FOR UPDATE")
        with pytest.raises(StoreError, match="held a lock"):
            await store.save(say(session, "b"))
        with pytest.raises(StoreError, match="held a lock"):
            await store.delete(session.id)
        await execute("ROLLBACK")
        assert (await store.save(say(session, "c"))).version == 2


class Proxy:
    """A proxy that passes bytes to the server, until it falls silent for the connections that are open then."""

    def __init__(self) -> None:
        self._silent: list[asyncio.Event] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent = asyncio.Event()
        self._silent.append(silent)
        server_reader, server_writer = await _reach_server()
        try:
            await asyncio.gather(_pass_on(reader, server_writer, silent), _pass_on(server_reader, writer, silent))
        finally:
            server_writer.close()
            writer.close()

    def fall_silent(self) -> None:
        for each in self._silent:
            each.set()


async def _reach_server() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    given = psycopg.conninfo.conninfo_to_dict(postgres_server.dsn())
    host, port = str(given.get("host") or "localhost"), str(given.get("port") or 5432)
    if host.startswith("/"):
        return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
    return await asyncio.open_connection(host, int(port))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            if not silent.is_set():
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_a_line_that_falls_silent_is_given_up(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save and a load whose connections no longer answer are made on new ones."""
    monkeypatch.setattr(link, "PATIENCE", 1.0)
    proxy = Proxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    dsn = psycopg.conninfo.make_conninfo(postgres_server.dsn(), host="127.0.0.1", port=port)
    async with PostgresStore(dsn, schema=schema) as store:
        session = await store.create(new_session("a"))
        await asyncio.gather(*(store.load(session.id) for _ in range(8)))
        proxy.fall_silent()
        async with asyncio.timeout(20):
            saved, loaded = await asyncio.gather(store.save(say(session, "b")), store.list())
        assert (saved.version, len(loaded)) == (2, 1)
        proxy.fall_silent()
        async with asyncio.timeout(20):
            assert texts(await store.load(session.id)) == ["a", "b"]
    server.close()


async def test_a_writer_that_somebody_has_cancelled_is_started_again(schema: str) -> None:
    """A shutdown that cancels all tasks ends the saves under way with a typed error, and none after them hangs."""
    async with store_in(schema) as store, sql(schema) as execute:
        session = await store.create(new_session("a"))
        await execute("BEGIN")
        await execute("LOCK TABLE head")
        saves = [asyncio.create_task(store.save(say(session, text))) for text in "bc"]
        await asyncio.sleep(0.05)
        _task_of(store).cancel()
        async with asyncio.timeout(20):
            for save in saves:
                with pytest.raises(StoreError, match="cancelled"):
                    await save
            await execute("ROLLBACK")
            assert (await store.save(say(session, "d"))).version == 2


def _task_of(store: PostgresStore) -> asyncio.Task[None]:
    task = store._engine.opened.writer._lanes[0].task
    assert task is not None
    assert not task.done()
    return task


async def test_a_writer_that_is_cancelled_before_it_begins_answers_too(schema: str) -> None:
    """A save that was only just requested gets an answer as well."""
    async with store_in(schema) as store:
        session = await store.create(new_session("a"))
        save = asyncio.create_task(store.save(say(session, "b")))
        await asyncio.sleep(0)
        _task_of(store).cancel()
        async with asyncio.timeout(20):
            with pytest.raises(StoreError, match="cancelled"):
                await save
            assert (await store.save(say(session, "c"))).version == 2


@pytest.fixture
def own_server() -> Iterator[Any]:
    """Yield a server that this test may restart."""
    home = Path(tempfile.mkdtemp(prefix="perdure-restarted-")) / "data"
    server = postgres_server.start(home, settings="fsync = off\n")
    yield server
    server.cleanup()
    shutil.rmtree(home.parent, ignore_errors=True)


async def test_a_restart_of_the_server_loses_nothing(own_server: Any) -> None:
    """In the middle of 64 running sessions: every run ends, every tool was called once, every message is there."""
    called: list[str] = []

    @tool
    async def work(text: str) -> str:
        called.append(text)
        await asyncio.sleep(0.02)
        return f"did {text}"

    def script(name: str) -> list[Any]:
        return [*(ToolCall("work", {"text": f"{name}/{n}"}) for n in range(3)), f"done {name}"]

    async def restart() -> None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(own_server.stop)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_server.start)

    async with PostgresStore(own_server.get_uri()) as store:
        runtime = SessionRuntime(store)
        agent = AgentDefinition("agent", tools=("work",))
        sessions = [await runtime.create(agent) for _ in range(64)]
        runs = [
            runtime.execute(session.id, SendMessage("Go.", loops_of(ScriptedDriver(script(session.id)), work)))
            for session in sessions
        ]
        *ended, _ = await asyncio.gather(*runs, restart())
        assert sorted(called) == sorted(f"{session.id}/{n}" for session in sessions for n in range(3))
    async with PostgresStore(own_server.get_uri()) as store:
        for session in ended:
            loaded = await store.load(session.id)
            assert loaded == session
            assert loaded.state.messages[-1].text == f"done {session.id}"
        assert await store.lapsed() == []
