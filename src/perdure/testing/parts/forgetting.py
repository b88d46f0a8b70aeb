"""Forgetting older versions: everything that only they show is gone, and everything else is as before.

The tests call `check`, which finds messages, files and values that nothing shows, and those that are missing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from perdure import codec
from perdure.errors import (
    ErasedMeanwhile,
    InvalidData,
    InvalidSessionId,
    RunInterrupted,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
    VersionForgotten,
)
from perdure.model.message import Media, Message
from perdure.model.session import AgentSession
from perdure.protocols import (
    FORGOTTEN,
    Archive,
    Attachments,
    BulkErasure,
    Checkable,
    CountsErasures,
    Entry,
    Erasure,
    FindsMessages,
    Forgets,
    Forgotten,
    Key,
    Lineage,
    Search,
    Versions,
)
from perdure.testing.parts.journal import JournaledStore, kinds
from perdure.testing.samples import fork, new_session, note, say, seen, show, tell, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused

PHOTO = bytes(range(256)) * 64
HASH = codec.hash_of_bytes(PHOTO)


class ForgettingStore(
    Erasure,
    JournaledStore,
    Forgets,
    Versions,
    Lineage,
    BulkErasure,
    Archive,
    Attachments,
    Search,
    FindsMessages,
    Checkable,
    Protocol,
):
    """A store with every port that forgetting a version touches."""


class Forgetting(Contract):
    """`forget` erases older versions, and everything that nothing else shows."""

    @in_store
    async def test_older_versions_are_erased(self, store: ForgettingStore) -> None:
        """Versions that stay load as before, and a new version says which one is the oldest."""
        kept = await _told(store, "s")
        erased = await store.forget("s", before=3)
        assert (erased.versions, erased.messages) == (2, 0)
        assert erased.bytes > 0
        for session in kept[2:]:
            assert seen(await store.load("s", session.version)) == seen(session)
        newest = await _loaded(store, "s")
        assert (newest.version, newest.info.first_version) == (6, 3)
        assert newest.state == kept[-1].state
        assert [head.info.version for head in await store.versions("s")] == [6, 5, 4, 3]
        await _assert_sound(store)

    @in_store
    async def test_a_forgotten_version_is_not_found(self, store: ForgettingStore) -> None:
        """A forgotten version raises VersionForgotten, with the oldest one left. An unknown version is None."""
        await _told(store, "s")
        await store.forget("s", before=4)
        for version in (1, 2, 3):
            with refused(VersionForgotten) as forgotten:
                await store.load("s", version)
            assert (forgotten.error.version, forgotten.error.oldest) == (version, 4)
        for version in (0, 7, 2**63):
            assert await store.load("s", version) is None

    @in_store
    async def test_the_newest_version_stays(self, store: ForgettingStore) -> None:
        """The newest version stays, however great the number is."""
        kept = await _told(store, "s")
        assert (await store.forget("s", before=10**9)).versions == 4
        assert seen(await store.load("s", 5)) == seen(kept[-1])
        await _assert_sound(store)

    @in_store
    async def test_nothing_happens_where_nothing_is_older(self, store: ForgettingStore) -> None:
        """`forget` makes no version if nothing is older, also when it is called again."""
        await _told(store, "s")
        assert await store.forget("s", before=1) == Forgotten()
        assert (await _loaded(store, "s")).version == 5
        await store.forget("s", before=3)
        for before in (1, 2, 3):
            assert await store.forget("s", before=before) == Forgotten()
        assert (await _loaded(store, "s")).version == 6

    @in_store
    async def test_what_only_they_show_is_gone(self, store: ForgettingStore) -> None:
        """Messages that no version shows any longer are gone, also from the search, and also the last one of a log."""
        session = await store.create(new_session("first", "second", id="s"))
        gone = session.state.messages[0]
        assert [place.position for place in await store.find_message(gone.id)] == [0]
        session = await store.save(say(session, "third"))
        session = await store.save(show(session, session.state.transcript.trim(1)))
        assert await _found(store, "first", "second", "third") == ["s", "s", "s"]
        assert (await store.forget("s", before=3)).messages == 2
        assert await _found(store, "first", "second", "third") == ["s"]
        session = await _loaded(store, "s")
        session = await store.save(show(session, session.state.transcript.reset()))
        assert (await store.forget("s", before=session.version)).messages == 1
        assert await _found(store, "first", "second", "third") == []
        assert not await store.find_message(gone.id)
        await _assert_sound(store)

    @in_store
    async def test_the_session_goes_on(self, store: ForgettingStore) -> None:
        """New messages are added behind the forgotten ones, and can be forgotten in their turn."""
        session = await store.create(new_session("one", id="s"))
        for text in ("two", "three", "four"):
            session = await store.save(show(session, session.state.transcript.reset()))
            session = await store.save(say(session, text))
            erased = await store.forget("s", before=session.version)
            assert (erased.messages, texts(await store.load("s"))) == (1, [text])
            session = await _loaded(store, "s")
        log, end = await store.log_of("s")
        assert [message.text for message in await store.messages(log, end - 1, end)] == ["four"]
        with refused(SessionNotFound):
            await store.messages(log, 0, 1)
        assert [*await store.kept_of_log("s")] == [(end - 1, end)]
        await _assert_sound(store)

    @in_store
    async def test_what_is_covered_stays(self, store: ForgettingStore) -> None:
        """A compaction can be undone after every version before it was forgotten."""
        session = await store.create(new_session("a", "b", "c", "d", id="s"))
        view = session.state.transcript.cover(0, 3, [Message.assistant("a to c")], by="test")
        session = await store.save(show(session, view))
        session = await store.save(say(session, "e"))
        assert (await store.forget("s", before=3)).messages == 0
        session = await _loaded(store, "s")
        again = await store.save(show(session, session.state.transcript.uncover()))
        assert texts(await store.load("s", again.version)) == ["a", "b", "c", "d", "e"]
        await _assert_sound(store)

    @in_store
    async def test_what_forks_show_stays_for_them(self, store: ForgettingStore) -> None:
        """Messages that forks show stay for them, and go with the last fork."""
        session = await store.create(new_session("shared", "own", id="s"))
        cut = show(session, session.state.transcript.trim(2).cut(0, 1))
        one, two = [await store.create(fork(cut, id=name)) for name in ("one", "two")]
        session = await store.save(say(show(session, session.state.transcript.reset()), "later"))
        assert (await store.forget("s", before=2)).messages == 1
        assert texts(await store.load("one", 1)) == texts(await store.load("two", 1)) == ["shared"]
        assert await _found(store, "shared", "own", "later") == ["one", "s"]
        shared = one.state.messages[0].id
        assert [place.session_id for place in await store.find_message(shared)] == ["one"]
        await store.save(say(one, "more"))
        await store.delete("one")
        assert await _found(store, "shared") == ["two"]
        assert [place.session_id for place in await store.find_message(shared)] == ["two"]
        await _assert_sound(store)
        # Nothing is left over for `gc`: erasing does all of it.
        assert await store.gc() == 0
        await store.delete(two.id)
        assert await _found(store, "shared") == []
        assert not await store.find_message(shared)
        assert texts(await store.load("s")) == ["later"]
        await _assert_sound(store)

    @in_store
    async def test_a_fork_forgets_what_it_began_with(self, store: ForgettingStore) -> None:
        """An erased parent's messages go with the last version that shows them. A living parent keeps its own."""
        parents = [await store.create(new_session("shared", id=name)) for name in ("gone", "there")]
        for parent in parents:
            session = await store.create(say(fork(parent, id=f"of-{parent.id}"), "own"))
            await store.save(show(session, session.state.transcript.trim(1)))
        await store.delete("gone")
        assert (await store.forget("of-gone", before=2)).messages == 1
        assert (await store.forget("of-there", before=2)).messages == 0
        assert texts(await store.load("there")) == ["shared"]
        await _assert_sound(store)

    @in_store
    async def test_a_fork_keeps_its_line(self, store: ForgettingStore) -> None:
        """A session's line of forks is known, whichever versions the sessions of the line have forgotten."""
        session = await store.create(new_session("0", id="f0"))
        for number in (1, 2):
            session = await store.create(say(fork(session, id=f"f{number}"), str(number)))
            session = await store.save(say(session, "more"))
        for name in ("f1", "f2"):
            await store.forget(name, before=2)
            assert [*await store.line_of("f2")] == ["f0", "f1"]
        assert [*await store.line_of("f1")] == ["f0"]

    @in_store
    async def test_forks_of_forks_have_all_that_they_show(self, store: ForgettingStore) -> None:
        """A fork of forks keeps all that it shows, whichever session of its line forgets or is erased."""
        line = [await store.create(new_session("0", id="f0"))]
        for number in range(1, 5):
            line.append(await store.create(say(fork(line[-1], id=f"f{number}"), str(number))))
        for session in line[1:4]:
            await store.save(show(session, session.state.transcript.reset()))
        await store.forget("f2", before=2)
        await store.forget("f1", before=2)
        await store.delete("f0")
        await store.forget("f3", before=2)
        assert texts(await store.load("f4")) == ["0", "1", "2", "3", "4"]
        await _assert_sound(store)
        await store.create(fork(await _loaded(store, "f4"), id="f5"))
        await store.delete_many(["f1", "f2", "f3", "f4"])
        assert texts(await store.load("f5")) == ["0", "1", "2", "3", "4"]
        await _assert_sound(store)

    @in_store
    async def test_a_new_fork_of_one_that_has_forgotten(self, store: ForgettingStore) -> None:
        """A new fork shows what is left, and keeps it when its parent is erased."""
        session = await store.create(new_session("old", id="s"))
        session = await store.save(say(show(session, session.state.transcript.reset()), "new"))
        await store.forget("s", before=2)
        await store.create(say(fork(await _loaded(store, "s", 2), id="child"), "more"))
        await store.delete("s")
        assert texts(await store.load("child")) == ["new", "more"]
        await _assert_sound(store)

    @in_store
    async def test_a_view_from_before_cannot_be_saved(self, store: ForgettingStore) -> None:
        """A view with forgotten messages is refused: as a save of an old version, as a new version, and as a fork."""
        session = old = await store.create(new_session("old", id="s"))
        session = stale = await store.save(say(show(session, session.state.transcript.reset()), "new"))
        # Counted now, as by a caller that reads the session, and forks it after it has forgotten.
        erasures = await store.erasures() if isinstance(store, CountsErasures) else 0
        await store.forget("s", before=2)
        with refused(SessionConflict):
            await store.save(say(stale, "too late"))
        current = await _loaded(store, "s")
        with refused(ErasedMeanwhile):
            await store.save(show(current, old.state.transcript))
        with refused(SessionNotFound, SessionConflict):
            await store.create(fork(old, id="child"))
        if isinstance(store, CountsErasures):
            with refused(ErasedMeanwhile):
                await store.create(fork(stale, id="child"), erasures=erasures)
        assert not await store.exists("child")
        assert texts(await store.save(say(show(current, stale.state.transcript), "on"))) == ["new", "on"]
        await _assert_sound(store)

    @in_store
    async def test_what_a_fork_has_kept_can_be_shown_again(self, store: ForgettingStore) -> None:
        """A session that adopts a fork has those messages again, also after the fork is erased."""
        session = await store.create(new_session("ancient", "words", id="s"))
        await store.create(say(fork(session, id="child"), "more"))
        session = await store.save(say(show(session, session.state.transcript.reset()), "new"))
        await store.forget("s", before=2)
        current, child = await _loaded(store, "s"), await _loaded(store, "child")
        adopted = await store.save(show(current, child.state.transcript))
        assert texts(adopted) == texts(await store.load("s")) == ["ancient", "words", "more"]
        await _assert_sound(store)
        await store.delete("child")
        assert texts(await store.load("s")) == ["ancient", "words", "more"]
        assert [hit.session_id for hit in await store.search("ancient")] == ["s"]
        await _assert_sound(store)
        again = await store.save(say(show(await _loaded(store, "s"), session.state.transcript), "again"))
        await store.forget("s", before=again.version)
        assert texts(await store.load("s")) == ["new", "again"]
        assert not await store.search("ancient")
        await _assert_sound(store)

    @in_store
    async def test_a_session_that_runs_is_left_alone(self, store: ForgettingStore) -> None:
        """`forget` raises SessionBusy while a claim is held, and RunInterrupted while a run waits to be recovered."""
        kept = await _told(store, "s")
        claim, _ = await store.claim("s", version=5, owner="ann")
        with refused(SessionBusy):
            await store.forget("s", before=3)
        await store.release(claim, interrupted=True)
        with refused(RunInterrupted):
            await store.forget("s", before=3)
        assert seen(await store.load("s", 1)) == seen(kept[0])

    @in_store
    async def test_runs_are_forgotten_with_what_they_said(self, store: ForgettingStore) -> None:
        """Entries of forgotten runs are empty and keep their numbers. Other runs are on record as before."""
        await store.create(new_session(id="s"))
        for run in ("one", "two", "three"):
            await _run(store, "s", run)
        session = await _loaded(store, "s")
        await store.save(show(session, session.state.transcript.trim(2)))
        before = await store.read("s")
        assert (await store.forget("s", before=5)).messages == 4
        after = await store.read("s")
        assert [entry.kind for entry in after] == [*[FORGOTTEN] * 6, "agent_start", "told", "agent_end"]
        assert [entry for entry in after if entry.run is not None] == [each for each in before if each.run == "three"]
        (left,) = await store.runs("s")
        assert left.loop_id == "three"
        assert [each.text for each in await store.messages(left.log, left.start, left.stop)][-1] == "said by three"
        assert not await store.read("s", run="one")
        assert await kinds(store, "s", last=2) == ["told", "agent_end"]
        await _assert_sound(store)
        await _run(store, "s", "four")
        assert [run.loop_id for run in await store.runs("s")] == ["three", "four"]
        await _assert_sound(store)

    @in_store
    async def test_a_run_stays_as_long_as_all_that_it_said_is_shown(self, store: ForgettingStore) -> None:
        """A run stays while all its messages are shown, also if the runs before and after it are gone."""
        await store.create(new_session(id="s"))
        views = [(await _run(store, "s", run)).state.transcript for run in ("one", "two", "three")]
        session = await _loaded(store, "s")
        await store.save(show(session, views[1].trim(2)))
        assert (await store.forget("s", before=5)).messages == 4
        await _run(store, "s", "four")
        assert [run.loop_id for run in await store.runs("s")] == ["two", "four"]
        for run in await store.runs("s"):
            said = [message.text for message in await store.messages(run.log, run.start, run.stop)]
            assert f"said by {run.loop_id}" in said
        await _assert_sound(store)

    @in_store
    async def test_what_was_noted_under_a_key_goes_with_its_version(self, store: ForgettingStore) -> None:
        """Entries noted under a key's name go with the key's version. An adapter names versions by keys."""
        session = await store.create(new_session(id="s"))
        for name in ("first", "second", "third"):
            session = await store.save(note(session, "at", name), key=Key(name, "parent"))
            await store.note("s", [Entry("writes", {"of": name}, name), Entry("more", {}, name)])
        await store.forget("s", before=3)
        assert await store.read("s", run="first") == []
        assert [entry.body for entry in await store.read("s", run="second", limit=1)] == [{"of": "second"}]
        assert [run.loop_id for run in await store.runs("s")] == ["second", "third"]
        await _assert_sound(store)

    @in_store
    async def test_what_was_noted_since_stays(self, store: ForgettingStore) -> None:
        """Entries noted since the forgotten runs stay, also earlier ones of their name. Older ones go with the runs."""
        await store.create(new_session(id="s"))
        await store.note("s", [Entry("early", {}, "past"), Entry("early", {}, "both")])
        for run in ("one", "two"):
            await _run(store, "s", run)
        await store.note("s", [Entry("late", {}, "both"), Entry("late", {})])
        session = await _loaded(store, "s")
        await store.save(show(session, session.state.transcript.trim(1)))
        await store.forget("s", before=4)
        assert await store.read("s", run="past") == []
        assert [entry.kind for entry in await store.read("s", run="both")] == ["early", "late"]
        assert await kinds(store, "s", last=1) == ["late"]
        await _assert_sound(store)

    @in_store
    async def test_keys_stay(self, store: ForgettingStore) -> None:
        """Keys stay, so that no request is answered twice. The version that answered it is forgotten."""
        session = await store.create(new_session(id="s"))
        session = await store.save(say(session, "answer"), key=Key("k", "digest"))
        await store.save(say(session, "more"))
        await store.forget("s", before=3)
        assert await store.find_key("s", "k") == (Key("k", "digest"), 2)
        with refused(VersionForgotten):
            await store.load("s", 2)
        await _assert_sound(store)

    @in_store
    async def test_files_go_with_their_messages(self, store: ForgettingStore) -> None:
        """A file goes once no message that stays has it, in a log or in an inbox."""
        photo = Message.user("See:", Media("image/png", data=PHOTO, name="a.png"))
        session = await store.create(tell(new_session(id="s"), photo))
        other = await store.create(tell(new_session(id="other"), replace(photo, id="another")))
        await store.save(show(session, session.state.transcript.reset()))
        await store.forget("s", before=2)
        with refused(InvalidData):
            await store.attachments("s", [HASH])
        assert await store.attachments("other", [HASH]) == {HASH: PHOTO}
        await store.save(show(other, other.state.transcript.reset()))
        assert (await store.forget("other", before=2)).bytes >= len(PHOTO)
        await _assert_sound(store)

    @in_store
    async def test_what_was_taken_from_the_inbox_is_emptied(self, store: ForgettingStore) -> None:
        """Items taken from the inbox are emptied, since they quote messages. Waiting items stay."""
        session = await store.create(new_session(id="s"))
        for text in ("dealt with", "waiting"):
            await store.post("s", Entry("queued", {"message": text}))
        session = await store.save(say(session, "dealt with"), taken=1)
        await store.save(show(session, session.state.transcript.reset()))
        await store.forget("s", before=3)
        waiting = await store.read("s", inbox=True)
        assert [(entry.seq, entry.body) for entry in waiting] == [(2, {"message": "waiting"})]
        assert await store.post("s", Entry("queued", {})) == 3
        await _assert_sound(store)

    @in_directory
    async def test_it_moves_as_it_is(self, where: Path) -> None:
        """A session that has forgotten can be dumped, and restored in another store or in the same one."""
        for name in ("1", "2"):
            (where / name).mkdir()
        async with self.open_store(where / "1") as store, self.open_store(where / "2") as other:
            await store.create(new_session(id="s"))
            for run in ("one", "two", "three"):
                await _run(store, "s", run)
            early = await _loaded(store, "s", 2)
            await store.create(fork(early, id="child"))
            session = await _loaded(store, "s")
            await store.save(show(session, session.state.transcript.trim(2)))
            await store.forget("s", before=5)
            for name in ("s", "child"):
                archived = await store.dump(name)
                assert await other.restore(archived) is True
                assert await other.restore(archived) is False
            assert [*await other.kept_of_log("s")] == [*await store.kept_of_log("s")]
            for version in (5, 6):
                assert texts(await other.load("s", version)) == texts(await store.load("s", version))
            with refused(VersionForgotten):
                await other.load("s", 4)
            assert texts(await other.load("child")) == texts(early)
            assert [*await other.read("s")] == [*await store.read("s")]
            await _assert_sound(other)
            await _run(other, "s", "four")
            assert (await other.forget("s", before=99)).versions == 2
            await _assert_sound(other)

    @in_directory
    async def test_another_instance_sees_it(self, where: Path) -> None:
        """Another instance shows nothing of the forgotten versions, although it had them in its cache."""
        if not self.shared:
            return
        async with self.open_store(where) as first, self.open_store(where) as second:
            session = await first.create(new_session("old", id="s"))
            await second.load("s", 1)
            session = await first.save(say(show(session, session.state.transcript.reset()), "new"))
            at_hand = await _loaded(second, "s")
            await first.forget("s", before=2)
            with refused(VersionForgotten):
                await second.load("s", 1)
            with refused(SessionConflict):
                await second.save(say(at_hand, "stale"))
            assert (await _loaded(second, "s")).info.first_version == 2
            await second.save(say(await _loaded(second, "s"), "on"))
            assert texts(await first.load("s")) == ["new", "on"]

    @in_store
    async def test_forks_made_meanwhile_show_nothing_that_is_gone(self, store: ForgettingStore) -> None:
        """A fork made meanwhile comes first, and keeps what it shows, or it is refused."""
        session = await store.create(new_session("old", id="s"))
        early = session
        await store.save(say(show(session, session.state.transcript.reset()), "new"))

        async def branch(number: int) -> bool:
            try:
                await store.create(fork(early, id=f"f{number}"))
            except (SessionNotFound, SessionConflict):
                return False
            return True

        *made, _ = await asyncio.gather(*map(branch, range(4)), store.forget("s", before=2))
        for number, was_made in enumerate(made):
            if was_made:
                assert texts(await store.load(f"f{number}")) == ["old"]
        await _assert_sound(store)

    @in_store
    async def test_only_a_session_that_is_there_can_forget(self, store: ForgettingStore) -> None:
        """Only a session that is there can forget, and only by a version number of 1 or more."""
        await _told(store, "s")
        with refused(SessionNotFound):
            await store.forget("nobody", before=2)
        with refused(InvalidSessionId):
            await store.forget("../up", before=2)
        for odd in (0, -1, 1.5, "2", None, True):
            with refused(InvalidData):
                await store.forget("s", before=odd)  # type: ignore[arg-type]  # which is what is tried


async def _told(store: ForgettingStore, session_id: str) -> list[AgentSession]:
    """Create a session, and return its five versions, each of which shows one more message."""
    kept = [await store.create(new_session("1", id=session_id))]
    for number in range(2, 6):
        kept.append(await store.save(note(say(kept[-1], str(number)), "state", f"{number}" * 400)))
    return kept


async def _run(store: ForgettingStore, session_id: str, run: str) -> AgentSession:
    """Return a session after a run with a question and an answer."""
    session = await _loaded(store, session_id)
    asked, answer = Message.user(f"asked of {run}"), Message.assistant(f"said by {run}")
    start = Entry("agent_start", {"base_version": session.version, "message": {"id": asked.id}}, run)
    claim, first = await store.claim(
        session_id, version=session.version, owner="ann", messages=[asked], entries=[start]
    )
    told = Entry("told", {"message": {"id": answer.id}}, run)
    second = await store.append(claim, messages=[answer], entries=[told])
    return await store.save(
        tell(session, asked, answer),
        claim=claim,
        written={**first.written, **second.written},
        entries=[Entry("agent_end", {}, run)],
    )


async def _loaded(store: Any, session_id: str, version: int | None = None) -> AgentSession:
    session = await store.load(session_id, version)
    assert session is not None
    return session  # type: ignore[no-any-return]  # any store's


async def _found(store: ForgettingStore, *words: str) -> list[str]:
    """Return the sessions in which words are found."""
    return [hit.session_id for word in words for hit in await store.search(word)]


async def _assert_sound(store: Any) -> None:
    """Check that nothing is missing that something shows, and that nothing is left that nothing shows."""
    assert [*await store.check()] == []
    page = await store.list()
    for info in page:
        await store.dump(info.id)
    assert page.damaged == ()
