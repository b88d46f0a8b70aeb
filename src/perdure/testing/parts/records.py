"""The record of a run and the inbox: sequences of entries beside a session's versions."""

from __future__ import annotations

import asyncio
from typing import Any

from perdure.errors import InvalidSessionId, SessionConflict, SessionNotFound
from perdure.model.session import AgentSession
from perdure.protocols import Entry, JournalEntry, Key
from perdure.testing.parts.journal import JournaledStore, entries, kinds, messages
from perdure.testing.parts.payloads import ODD_TEXTS
from perdure.testing.parts.versions import PATH_LIKE
from perdure.testing.samples import fork, new_session, say
from perdure.testing.scene import Contract, for_a_while, in_store, refused


class Records(Contract):
    """Entries are numbered from 1, stay in order, and move no version."""

    @in_store
    async def test_a_record_reads_back_in_order(self, store: JournaledStore) -> None:
        """The entries of claims, appends and saves form one sequence."""
        session = await store.create(new_session("Hello"))
        claim, first = await store.claim(session.id, version=1, owner="ann", entries=entries("start", "ask"))
        second = await store.append(claim, entries=entries("answer"))
        nothing = await store.append(claim)
        await store.save(say(session, "done"), claim=claim, entries=entries("end"))
        assert (first.seq, second.seq, nothing.seq) == (2, 3, 3)
        assert await store.read(session.id) == [
            JournalEntry(seq, kind, {"said": kind}, "run-1")
            for seq, kind in enumerate(("start", "ask", "answer", "end"), start=1)
        ]

    @in_store
    async def test_a_record_is_read_in_parts(self, store: JournaledStore) -> None:
        """`after` and `limit` choose a stretch of the sequence."""
        session = await store.create(new_session())
        await store.claim(session.id, version=1, owner="ann", entries=entries(*"abcdef"))
        assert await kinds(store, session.id, after=2) == [*"cdef"]
        assert await kinds(store, session.id, after=2, limit=2) == [*"cd"]
        assert await kinds(store, session.id, limit=1) == ["a"]
        assert await kinds(store, session.id, after=6) == []
        # More than a database's integer holds: there is nothing behind it, which is not an error.
        assert await kinds(store, session.id, after=2**63) == []
        assert await kinds(store, session.id, last=2) == [*"ef"]
        assert await kinds(store, session.id, after=4, last=9) == [*"ef"]
        assert await kinds(store, session.id, last=0) == await kinds(store, session.id, limit=0) == []

    @in_store
    async def test_a_record_is_read_by_run(self, store: JournaledStore) -> None:
        """`run` chooses one run's entries, however the runs interleave."""
        session = await store.create(new_session())
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("a", "b", run="one"))
        await store.append(claim, entries=[*entries("c", run="two"), *entries("d", run="one"), *entries("e", run=None)])
        await store.append(claim, entries=entries("f", run="two"))
        assert await kinds(store, session.id, run="one") == ["a", "b", "d"]
        assert await kinds(store, session.id, run="two") == ["c", "f"]
        assert await kinds(store, session.id, run="two", after=3) == ["f"]
        assert await kinds(store, session.id, run="one", last=1) == ["d"]
        assert await kinds(store, session.id, run="one", limit=1) == ["a"]
        assert await kinds(store, session.id, run="three") == []
        assert [entry.run for entry in await store.read(session.id)] == ["one", "one", "two", "one", None, "two"]

    @in_store
    async def test_runs_are_found_on_the_record(self, store: JournaledStore) -> None:
        """Runs are listed oldest first. Each has its first and last entry, and the log with its messages."""
        session = await store.create(new_session("Hello"))
        claim, ahead = await store.claim(
            session.id, version=1, owner="ann", messages=messages("m"), entries=entries("a", "b", run="one")
        )
        aside = await store.append(claim, messages=messages("x"), entries=entries("c", run="two"), log="two")
        await store.append(claim, entries=[*entries("d", run="one"), *entries("e", run=None)])
        first, second = await store.runs(session.id)
        assert [(run.loop_id, run.first.kind, run.last.kind) for run in (first, second)] == [
            ("one", "a", "d"),
            ("two", "c", "c"),
        ]
        for run, appended in ((first, ahead), (second, aside)):
            (place,) = appended.written.values()
            assert (run.log, run.start <= place.position < run.stop) == (place.log, True)
        assert [run.loop_id for run in await store.runs(session.id, limit=1)] == ["two"]
        assert [run.loop_id for run in await store.runs(session.id, before=second.first.seq)] == ["one"]
        assert [*await store.runs(session.id, run="one")] == [first]
        assert [*await store.runs(session.id, run="three")] == []
        with refused(SessionNotFound):
            await store.runs("nobody")

    @in_store
    async def test_bodies_survive(self, store: JournaledStore) -> None:
        """Any JSON comes back as it went in, with or without a run."""
        session = await store.create(new_session())
        bodies: list[Any] = [None, True, 0, -0.5, "", [], {}, {"a": [1, {"b": None}]}, *ODD_TEXTS, {"k": [*ODD_TEXTS]}]
        given = [Entry("kind / \x00é", body, None if n % 2 else f"run {n}") for n, body in enumerate(bodies)]
        await store.claim(session.id, version=1, owner="ann", entries=given)
        for entry in given:
            await store.post(session.id, entry)
        expected = [JournalEntry(n, each.kind, each.body, each.run) for n, each in enumerate(given, start=1)]
        assert await store.read(session.id) == expected
        assert await store.read(session.id, inbox=True) == expected

    @in_store
    async def test_the_inbox_keeps_order_and_moves_no_version(self, store: JournaledStore) -> None:
        """Items are numbered as they come, claim or no claim, apart from the record."""
        session = await store.create(new_session())
        assert await store.post(session.id, Entry("steer", "left")) == 1
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start"))
        assert await store.post(session.id, Entry("cancel")) == 2
        await store.append(claim, entries=entries("on"))
        assert await kinds(store, session.id, inbox=True) == ["steer", "cancel"]
        assert await kinds(store, session.id, inbox=True, after=1) == ["cancel"]
        assert await kinds(store, session.id) == ["start", "on"]
        loaded = await store.load(session.id)
        assert loaded == session

    @in_store
    async def test_items_that_were_taken_are_not_read_again(self, store: JournaledStore) -> None:
        """An append or a save says how much of the inbox was taken, and that number never goes back."""
        session = await store.create(new_session())
        for kind in "abcd":
            await store.post(session.id, Entry(kind))
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        await store.append(claim, taken=2)
        assert [(item.seq, item.kind) for item in await store.read(session.id, inbox=True)] == [(3, "c"), (4, "d")]
        await store.append(claim, taken=1)
        assert await kinds(store, session.id, inbox=True, limit=1) == ["c"]
        await store.save(session, claim=claim, taken=3)
        assert await kinds(store, session.id, inbox=True) == ["d"]
        assert await store.post(session.id, Entry("e")) == 5

    @in_store
    async def test_a_key_leads_to_the_version_it_saved(self, store: JournaledStore) -> None:
        """An idempotency key leads to the version of the save that it came with, and a refused save keeps no key."""
        session = await store.create(new_session())
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        session = await store.save(session, claim=claim, key=Key("k-1", "digest 1"))
        session = await store.save(session)
        claim, _ = await store.claim(session.id, version=3, owner="ann")
        with refused(SessionConflict):
            stale = AgentSession.reconstitute(session, version=1, updated_at=session.info.updated_at)
            await store.save(stale, claim=claim, key=Key("k-3", "digest 3"))
        session = await store.save(session, claim=claim, key=Key("k-2", "digest 2"))
        assert await store.find_key(session.id, "k-1") == (Key("k-1", "digest 1"), 2)
        assert await store.find_key(session.id, "k-2") == (Key("k-2", "digest 2"), 4)
        assert await store.find_key(session.id, "k-3") is None
        await store.delete(session.id)
        await store.create(new_session(id=session.id))
        assert await store.find_key(session.id, "k-1") is None

    @in_store
    async def test_a_key_may_come_with_a_new_session(self, store: JournaledStore) -> None:
        """A key given to `create` leads to version 1. A second session of the same id is refused, with its key."""
        for said in ODD_TEXTS[:2]:
            parent = await store.create(new_session("Hi"), key=Key(f"k{said}", said))
            child = await store.create(fork(parent), key=Key("k", "other"))
            for session in (parent, child):
                with refused(SessionConflict):
                    await store.create(new_session(id=session.id), key=Key("late", "d"))
                assert await store.find_key(session.id, "late") is None
            assert await store.find_key(parent.id, f"k{said}") == (Key(f"k{said}", said), 1)
            assert await store.find_key(child.id, "k") == (Key("k", "other"), 1)
            assert (await store.save(say(parent, "more"), key=Key("k2", "d"))).version == 2
            assert await store.find_key(parent.id, "k2") == (Key("k2", "d"), 2)

    @in_store
    async def test_many_may_post_at_once(self, store: JournaledStore) -> None:
        """Every posted item gets a number of its own, and none is lost."""
        session = await store.create(new_session())
        numbers = await asyncio.gather(*(store.post(session.id, Entry(f"k{n}")) for n in range(20)))
        found = await store.read(session.id, inbox=True)
        assert sorted(numbers) == [entry.seq for entry in found] == [*range(1, 21)]
        assert {entry.seq: entry.kind for entry in found} == {seq: f"k{n}" for n, seq in enumerate(numbers)}

    @in_store
    async def test_an_unknown_session_has_no_record(self, store: JournaledStore) -> None:
        """Reading and posting need a session. A session without entries reads as empty."""
        session = await store.create(new_session())
        assert await store.read(session.id) == await store.read(session.id, inbox=True) == []
        for inbox in (False, True):
            with refused(SessionNotFound):
                await store.read("nobody", inbox=inbox)
        with refused(SessionNotFound):
            await store.post("nobody", Entry("steer"))

    @in_store
    async def test_a_record_goes_with_its_session(self, store: JournaledStore) -> None:
        """After an erasure there is neither record nor inbox, and a new session of the same id begins with none."""
        session = await store.create(new_session(id="again"))
        claim, _ = await store.claim("again", version=1, owner="ann", entries=entries("start"))
        await store.post("again", Entry("steer"))
        await store.release(claim)
        await store.delete(session.id)
        with refused(SessionNotFound):
            await store.read("again")
        await store.create(new_session(id="again"))
        assert await store.read("again") == await store.read("again", inbox=True) == []
        assert await store.post("again", Entry("steer")) == 1

    @in_store
    async def test_ids_that_look_like_paths_are_refused_here_too(self, store: JournaledStore) -> None:
        """The journal's verbs refuse an id that looks like a path."""
        for odd in PATH_LIKE:
            with refused(InvalidSessionId):
                await store.claim(odd, version=1, owner="ann")
            with refused(InvalidSessionId):
                await store.read(odd)
            with refused(InvalidSessionId):
                await store.post(odd, Entry("steer"))

    @in_store
    async def test_a_cancelled_append_is_whole_or_not_at_all(self, store: JournaledStore) -> None:
        """A runner that is cancelled while it appends leaves the messages with their entries, or neither."""
        session = await store.create(new_session())
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        for delay in range(16):
            attempt = asyncio.create_task(
                store.append(claim, messages=messages(f"m{delay}"), entries=entries(f"e{delay}", f"f{delay}"))
            )
            await for_a_while(delay)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
        last = await store.append(claim, messages=messages("last"), entries=entries("last"))
        (place,) = last.written.values()
        found = await store.read(session.id)
        assert [entry.seq for entry in found] == [*range(1, last.seq + 1)]
        ends = [int(entry.kind[1:]) for entry in found if entry.kind.startswith("e")]
        assert [entry.kind for entry in found] == [f"{kind}{n}" for n in ends for kind in "ef"] + ["last"]
        written = await store.messages(place.log, 0, place.position + 1)
        assert [message.text for message in written] == [*(f"m{n}" for n in ends), "last"]
