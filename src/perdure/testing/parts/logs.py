"""Logs: each message is stored once, in the log to which it was first written, and referred to afterwards."""

from __future__ import annotations

from pathlib import Path

from perdure.errors import SessionNotFound
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.protocols import StoredAt
from perdure.testing.parts.journal import JournaledStore, entries, messages, places, spoken
from perdure.testing.samples import fork, new_session, note, run_of, say, show, tell, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused


def log_of(session: AgentSession) -> LogRef:
    """Return the log that has a stored session's last message."""
    ref = [*session.state.transcript.spans()][-1].tape.ref
    assert ref is not None
    return ref


class Logs(Contract):
    """Messages are written once. Saves, forks and steps name their places."""

    @in_store
    async def test_written_messages_belong_to_no_version(self, store: JournaledStore) -> None:
        """Messages that a run writes ahead can be read from the log, and no load shows them."""
        session = await store.create(new_session("Hello"))
        ahead = messages("thinking", "acting")
        claim, first = await store.claim(session.id, version=1, owner="ann", messages=ahead[:1])
        second = await store.append(claim, messages=ahead[1:])
        assert [*first.written, *second.written] == [message.id for message in ahead]
        place = first.written[ahead[0].id]
        assert second.written[ahead[1].id] == StoredAt(place.log, place.position + 1)
        assert await spoken(store, place, count=2) == ["thinking", "acting"]
        assert await store.load(session.id) == session
        assert await store.load(session.id, 2) is None

    @in_store
    async def test_a_save_refers_to_what_is_written(self, store: JournaledStore) -> None:
        """The save that ends a run stores only what is new, and releases the claim."""
        session = await store.create(new_session("Hello"))
        ahead = messages("one", "two")
        claim, first = await store.claim(session.id, version=1, owner="ann", messages=ahead[:1])
        second = await store.append(claim, messages=ahead[1:], entries=entries("on"))
        written = {**first.written, **second.written}
        final = Message.assistant("three")
        session = await store.save(tell(session, *ahead, final), claim=claim, written=written, entries=entries("end"))
        loaded = await store.load(session.id)
        assert loaded == session
        assert texts(loaded) == ["Hello", "one", "two", "three"]
        shown = places(loaded.state.transcript)
        assert shown[1:3] == [(written[message.id].log.key, written[message.id].position) for message in ahead]
        assert len(set(shown)) == 4
        await _assert_ends(store, log_of(session), 4)
        taken, _ = await store.claim(session.id, version=2, owner="ben")
        assert taken.epoch > claim.epoch

    @in_store
    async def test_what_was_written_by_a_lost_run_stays_out(self, store: JournaledStore) -> None:
        """Positions that a lost run wrote stay taken, and later messages come after them."""
        session = await store.create(new_session("Hello"))
        claim, lost = await store.claim(session.id, version=1, owner="ann", messages=messages("lost"))
        await store.release(claim)
        session = await store.save(say(session, "kept"))
        assert texts(await store.load(session.id)) == ["Hello", "kept"]
        assert await spoken(store, *lost.written.values()) == ["lost"]
        await _assert_ends(store, log_of(session), 3)
        session = await store.save(say(session, "more"))
        assert texts(await store.load(session.id)) == ["Hello", "kept", "more"]

    @in_store
    async def test_a_run_writes_each_message_once(self, store: JournaledStore) -> None:
        """Steps name the messages of the transcript, and store no copies."""
        session = await store.create(run_of(new_session("Where is order 7?")))
        for _ in range(2):
            loaded = await store.load(session.id)
            assert loaded is not None
            shown = places(loaded.state.transcript)
            outputs = [place for step in loaded.state.steps for place in places(step.output_messages)]
            assert outputs == shown[1:4]
            session = await store.save(note(loaded, "key", "value"))
        await _assert_ends(store, log_of(session), 4)

    @in_store
    async def test_saves_write_only_what_is_new(self, store: JournaledStore) -> None:
        """After many versions of a conversation, its log has each message once."""
        session = await store.create(new_session("a"))
        for turn in range(10):
            session = await store.save(note(say(session, str(turn)), "turn", turn))
        session = await store.save(show(session, session.state.transcript.trim(2)))
        await _assert_ends(store, log_of(session), 11)

    @in_store
    async def test_a_fork_copies_nothing(self, store: JournaledStore) -> None:
        """A fork's first messages are in its parent's log, and those of a fork's fork in both."""
        parent = await store.create(new_session("a", "b"))
        child = await store.create(say(fork(parent), "c"))
        grandchild = await store.create(fork(child))
        shown = places(parent.state.transcript)
        for session, count in ((child, 3), (grandchild, 3)):
            loaded = await store.load(session.id)
            assert loaded is not None
            assert places(loaded.state.transcript)[:2] == shown
            assert len(places(loaded.state.transcript)) == count
        assert places(grandchild.state.transcript) == places(child.state.transcript)
        await _assert_ends(store, log_of(parent), 2)
        await _assert_ends(store, log_of(child), 1)

    @in_store
    async def test_branches_write_to_logs_of_their_own(self, store: JournaledStore) -> None:
        """Each branch counts from 0, and the session's own log is not touched."""
        session = await store.create(new_session("Hello"))
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        left, right, more = messages("left", "right", "left more")
        one = await store.append(claim, messages=[left], log="left")
        two = await store.append(claim, messages=[right], log="right")
        three = await store.append(claim, messages=[more], log="left")
        written = {**one.written, **two.written, **three.written}
        assert [written[message.id].position for message in (left, right, more)] == [0, 0, 1]
        assert written[left.id].log == written[more.id].log
        assert len({log_of(session), written[left.id].log, written[right.id].log}) == 3
        session = await store.save(tell(session, left, more), claim=claim, written=written)
        assert texts(await store.load(session.id)) == ["Hello", "left", "left more"]
        assert await spoken(store, written[right.id]) == ["right"]
        await _assert_ends(store, log_of(await store.create(new_session("x"))), 1)
        session = await store.save(say(session, "after"))
        assert texts(await store.load(session.id)) == ["Hello", "left", "left more", "after"]

    @in_store
    async def test_a_log_is_found_by_its_session(self, store: JournaledStore) -> None:
        """`log_of` returns the log of a session or a branch, and its end."""
        session = await store.create(new_session("a", "b"))
        claim, ahead = await store.claim(session.id, version=1, owner="ann", messages=messages("c"))
        branch = await store.append(claim, messages=messages("x"), log="branch")
        (place,), (aside,) = ahead.written.values(), branch.written.values()
        assert await store.log_of(session.id) == (place.log, 3)
        assert await store.log_of(session.id, "branch") == (aside.log, 1)
        empty = await store.create(new_session())
        assert (await store.log_of(empty.id))[1] == 0
        for missing in (("nobody", ""), (session.id, "no such branch")):
            with refused(SessionNotFound):
                await store.log_of(*missing)

    @in_store
    async def test_a_lost_run_can_be_kept_as_a_fork(self, store: JournaledStore) -> None:
        """`create` may name messages that a run has written, and keep the rest in a log of its own."""
        session = await store.create(new_session("Hello"))
        ahead = messages("written")
        claim, appended = await store.claim(session.id, version=1, owner="ann", messages=ahead)
        await store.release(claim)
        kept = tell(fork(session), *ahead, Message.assistant("unsaved"))
        created = await store.create(kept, written=appended.written)
        loaded = await store.load(created.id)
        assert texts(loaded) == ["Hello", "written", "unsaved"]
        assert loaded is not None
        (place,) = appended.written.values()
        assert places(loaded.state.transcript)[1] == (place.log.key, place.position)
        await store.delete(session.id)
        assert texts(await store.load(created.id)) == ["Hello", "written", "unsaved"]

    @in_store
    async def test_erased_messages_are_not_found(self, store: JournaledStore) -> None:
        """After its session is erased, a log returns only the messages that other sessions still show."""
        parent = await store.create(new_session("a", "b", "c"))
        log = log_of(parent)
        child = await store.create(show(fork(parent), parent.state.transcript.cut(1, 2)))
        claim, branch = await store.claim(parent.id, version=1, owner="ann", messages=messages("ahead"))
        side = await store.append(claim, messages=messages("aside"), log="branch")
        await store.release(claim)
        await store.delete(parent.id)
        assert [message.text for message in await store.messages(log, 1, 2)] == ["b"]
        for start, stop in ((0, 1), (0, 3), (2, 3)):
            with refused(SessionNotFound):
                await store.messages(log, start, stop)
        for place in (*branch.written.values(), *side.written.values()):
            with refused(SessionNotFound):
                await spoken(store, place)
        await store.delete(child.id)
        with refused(SessionNotFound):
            await store.messages(log, 1, 2)

    @in_store
    async def test_a_fork_of_erased_words_is_refused(self, store: JournaledStore) -> None:
        """A fork that would begin with messages that nobody shows any longer is refused."""
        parent = await store.create(new_session("a", "b", "c"))
        whole, part = fork(parent), show(fork(parent), parent.state.transcript.cut(1, 2))
        await store.create(show(fork(parent), parent.state.transcript.cut(1, 3)))
        await store.delete(parent.id)
        with refused(SessionNotFound):
            await store.create(whole)
        assert not await store.exists(whole.id)
        assert texts(await store.create(part)) == ["b"]

    @in_store
    async def test_logs_of_other_stores_are_not_found(self, store: JournaledStore) -> None:
        """A place in a log of another store is not found, although the numbers are the same."""
        session = await store.create(new_session("a"))
        with refused(SessionNotFound):
            await store.messages(LogRef("elsewhere", log_of(session).key), 0, 1)

    @in_directory
    async def test_a_session_moves_between_stores(self, where: Path) -> None:
        """A session from one store can be created in another, with all that it shows."""
        async with self.open_store(where / "one") as one, self.open_store(where / "two") as two:
            await two.create(new_session("a stranger's", "words"))
            session = await one.create(run_of(new_session("a", "b")))
            moved = await two.create(fork(session))
            assert texts(await two.load(moved.id)) == texts(session)
            assert texts(await two.save(say(moved, "more"))) == [*texts(session), "more"]
            assert places(moved.state.transcript)
            await one.delete(session.id)
            assert texts(await two.load(moved.id)) == [*texts(session), "more"]


async def _assert_ends(store: JournaledStore, log: LogRef, end: int) -> None:
    """Check that the log has this many messages, and no more."""
    assert len(await store.messages(log, 0, end)) == end
    with refused(SessionNotFound):
        await store.messages(log, end, end + 1)
