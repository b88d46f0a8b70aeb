"""Sessions that move between stores as a whole: `dump` exports one, `restore` imports it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import asdict, replace

from perdure.errors import InvalidData, RunInterrupted, SessionBusy, SessionConflict, SessionNotFound
from perdure.protocols import Archive, ArchivedSession, Entry
from perdure.testing.parts.checking import fill
from perdure.testing.parts.journal import JournaledStore, entries, kinds, messages
from perdure.testing.samples import fork, new_session, note, say, seen, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused

FILLED = ("talk", "child", "views", "orphan", "killed", "album")


class ArchivingStore(JournaledStore, Archive, Protocol):
    """A store whose runs are on record, and that can export and import sessions."""


class Archiving(Contract):
    """A restored session is the session that was dumped."""

    @asynccontextmanager
    async def _two(self, where: Path) -> AsyncIterator[tuple[Any, Any]]:
        """Open two stores that know nothing of each other."""
        for name in ("one", "other"):
            (where / name).mkdir()
        async with self.open_store(where / "one") as source, self.open_store(where / "other") as target:
            yield source, target

    @in_directory
    async def test_what_was_dumped_is_restored_whole(self, where: Path) -> None:
        """Versions, times, record, inbox and keys are restored. A second restore writes nothing."""
        async with self._two(where) as (source, target):
            await fill(source)
            for session_id in FILLED:
                archived = await source.dump(session_id)
                assert await target.restore(archived) is True
                assert await target.restore(archived) is False
                assert _without_lent(await target.dump(session_id)) == _without_lent(archived)
                newest = await source.load(session_id)
                for version in range(1, newest.version + 1):
                    expected = seen(await source.load(session_id, version))
                    assert seen(await target.load(session_id, version)) == expected
                assert await target.read(session_id) == await source.read(session_id)
            assert [each.body for each in await target.read("talk", inbox=True)] == [{"text": "waits"}]
            assert [each.seq for each in await target.read("talk", inbox=True)] == [1]
            assert await target.find_key("talk", "first") == await source.find_key("talk", "first")
            assert [info.id for info in await target.list(tag="vip", owner="ada")] == ["talk"]

    @in_directory
    async def test_runs_find_their_messages_where_they_were_taken_to(self, where: Path) -> None:
        """Restored runs find their messages, in the session's own log and in that of a branch."""
        async with self._two(where) as (source, target):
            session = await source.create(new_session("Hello", id="it"))
            run, aside = messages("one", "two"), messages("aside")
            shown = [Entry("message_end", {"message": {"id": each.id}}, "run-1") for each in run]
            claim, _ = await source.claim("it", version=1, owner="me", messages=run, entries=shown)
            start = Entry("message_end", {"message": {"id": aside[0].id}, "group": "g"}, "b")
            await source.append(claim, messages=aside, entries=[start], log="b")
            await source.save(say(session, "done"), claim=claim)
            await target.restore(await source.dump("it"))
            for loop, expected in (("run-1", ["one", "two"]), ("b", ["aside"])):
                (found,) = await target.runs("it", run=loop)
                said = [message.text for message in await target.messages(found.log, found.start, found.stop)]
                assert [text for text in said if text in expected] == expected

    @in_directory
    async def test_an_interrupted_run_is_recovered_where_it_was_taken_to(self, where: Path) -> None:
        """An interrupted run is dumped with a lapsed claim, and recovered where it is restored."""
        async with self._two(where) as (source, target):
            await fill(source)
            archived = await source.dump("killed")
            assert archived.interrupted
            await target.restore(archived)
            assert await target.lapsed() == ["killed"]
            with refused(RunInterrupted):
                await target.claim("killed", version=1, owner="me")
            claim, _ = await target.claim("killed", version=1, owner="me", take_over=True, entries=entries("on"))
            assert await kinds(target, "killed") == ["start", "on"]
            await target.save(say(await target.load("killed"), "done"), claim=claim)
            assert await target.lapsed() == []

    @in_directory
    async def test_a_restored_session_goes_on_like_any_other(self, where: Path) -> None:
        """A restored session can be saved, forked and erased, and its fork keeps what it shows."""
        async with self._two(where) as (source, target):
            await fill(source)
            for session_id in FILLED:
                await target.restore(await source.dump(session_id))
            talk = await target.save(say(await target.load("talk"), "more"))
            assert texts(await target.load("talk")) == texts(talk)
            shown = texts(await target.load("child"))
            await target.delete("talk")
            assert texts(await target.load("child")) == shown
            late = await target.create(fork(await target.load("child"), id="late"))
            assert texts(await target.load("late")) == texts(late)
            await target.post("views", Entry("note", {"text": "waits"}))
            assert [each.seq for each in await target.read("views", inbox=True)] == [1]

    @in_directory
    async def test_a_fork_goes_without_its_parent(self, where: Path) -> None:
        """A fork is dumped alone with what it shows of its parent, also from a store where it was restored."""
        async with self._two(where) as (source, target):
            await fill(source)
            with refused(SessionNotFound):
                await target.restore(await source.dump("child"))
            alone = await source.dump("child", alone=True)
            assert alone.lent
            assert await target.restore(alone) is True
            assert await target.restore(alone) is False
            assert texts(await target.load("child")) == texts(await source.load("child"))
            (where / "third").mkdir()
            async with self.open_store(where / "third") as third:
                await third.restore(await target.dump("child", alone=True))
                assert texts(await third.load("child")) == texts(await source.load("child"))

    @in_directory
    async def test_what_an_erased_session_left_goes_along(self, where: Path) -> None:
        """The messages of an erased parent always go along, since nobody else could bring them."""
        async with self._two(where) as (source, target):
            await fill(source)
            await target.restore(await source.dump("orphan"))
            assert texts(await target.load("orphan")) == texts(await source.load("orphan")) == ["erased", "left alone"]

    @in_directory
    async def test_a_fork_is_linked_to_its_parent_only_if_that_is_the_same(self, where: Path) -> None:
        """A fork is linked only to the same parent. One that was continued otherwise lends it nothing."""
        async with self._two(where) as (source, target):
            await source.create(new_session("one", "two", id="parent"))
            await target.restore(await source.dump("parent"))
            await source.save(say(await source.load("parent"), "three here"))
            await target.save(say(await target.load("parent"), "three there"))
            await source.create(fork(await source.load("parent"), id="child"))
            await target.restore(await source.dump("child", alone=True))
            assert texts(await target.load("child")) == ["one", "two", "three here"]
            assert texts(await target.load("parent")) == ["one", "two", "three there"]

    @in_directory
    async def test_another_session_of_the_same_id_is_a_conflict(self, where: Path) -> None:
        """A different session of the same id is a conflict, and nothing is overwritten."""
        async with self._two(where) as (source, target):
            await source.create(new_session("hello", id="same"))
            archived = await source.dump("same")
            await target.restore(archived)
            await target.save(note(await target.load("same"), "changed", True))
            with refused(SessionConflict):
                await target.restore(archived)
            assert (await target.load("same")).version == 2

    @in_directory
    async def test_of_those_who_bring_in_the_same_session_one_writes_it(self, where: Path) -> None:
        """Of several callers that restore the same session, one writes it, and the others find it there."""
        async with self._two(where) as (source, target):
            await source.create(new_session("one", id="it"))
            archived = await source.dump("it")
            outcomes = await asyncio.gather(*(target.restore(archived) for _ in range(5)))
            assert sorted(outcomes) == [False] * 4 + [True]
            assert (await target.load("it")).version == 1

    @in_store
    async def test_a_session_under_way_is_not_dumped(self, store: ArchivingStore) -> None:
        """A running session is not dumped: it would be recovered elsewhere while it runs here."""
        await store.create(new_session("hello", id="busy"))
        claim, _ = await store.claim("busy", version=1, owner="runner 7")
        with refused(SessionBusy) as busy:
            await store.dump("busy")
        assert "being run by runner 7" in str(busy.error)
        await store.release(claim)
        assert (await store.dump("busy")).session_id == "busy"

    @in_store
    async def test_an_unknown_session_is_not_dumped(self, store: ArchivingStore) -> None:
        """An unknown session is not dumped, nor is one that was erased."""
        assert isinstance(store, Archive)
        await store.create(new_session("hello", id="gone"))
        await store.delete("gone")
        for session_id in ("nobody", "gone"):
            with refused(SessionNotFound):
                await store.dump(session_id)

    @in_directory
    async def test_an_archive_that_is_not_whole_changes_nothing(self, where: Path) -> None:
        """An archive with missing or wrong parts is refused before anything is written."""
        async with self._two(where) as (source, target):
            await source.create(new_session("one", id="it"))
            archived = await source.dump("it")
            wrong: tuple[dict[str, Any], ...] = (
                *({"logs": {}}, {"values": {}}, {"heads": ()}, {"keys": {"k": ("d", 7)}}, {"logs": {"x": {}}}),
                {"logs": {"it": {**archived.logs["it"], 2: archived.logs["it"][0]}}},
                # A position that no database can hold.
                {"logs": {"it": {**archived.logs["it"], 2**64: archived.logs["it"][0]}}},
            )
            for fields in wrong:
                with refused(InvalidData, of=str(fields)):
                    await target.restore(ArchivedSession(**{**asdict(archived), **fields}))
            assert len(await target.list()) == 0
            assert await target.restore(archived)

    @in_directory
    async def test_entries_of_any_form_are_brought_over(self, where: Path) -> None:
        """Entries of any form are brought over: a record may have some that only their writer understands."""
        given = (
            Entry("agent_start", {"messages": 5}, "a"),
            Entry("message_end", {"message": {"id": 7}, "shown": 7}, "a"),
            Entry("agent_start", "no object", "b"),
        )
        async with self._two(where) as (source, target):
            await source.create(new_session("one", id="it"))
            assert await target.restore(replace(await source.dump("it"), entries=given))
            found = await target.read("it")
            assert [(each.kind, each.body, each.run) for each in found] == [(e.kind, e.body, e.run) for e in given]
            assert [run.loop_id for run in await target.runs("it")] == ["a", "b"]


def _without_lent(archived: ArchivedSession) -> ArchivedSession:
    """Return an archive without the messages of other sessions: each store names their logs differently."""
    return replace(archived, lent={})
