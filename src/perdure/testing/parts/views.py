"""Transcripts: the messages that a session shows, and those that its versions have shown."""

from __future__ import annotations

from pathlib import Path

from perdure.model.message import Message, ToolCall
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.protocols import SessionStore
from perdure.testing.samples import fork, new_session, say, show, tell, texts
from perdure.testing.scene import Contract, in_directory, in_store

LETTERS = [*"abcdefghij"]


class Views(Contract):
    """A view hides and shows messages, and nothing that was said is lost."""

    @in_store
    async def test_a_conversation_grows(self, store: SessionStore) -> None:
        """Messages come back in the order in which they were said, over many saves."""
        session = await store.create(new_session())
        for number in range(40):
            session = await store.save(say(session, f"q{number}", f"a{number}"))
        expected = [f"{kind}{number}" for number in range(40) for kind in "qa"]
        assert texts(await store.load(session.id)) == texts(session) == expected
        for version in (1, 2, 21, 41):
            assert texts(await store.load(session.id, version)) == expected[: 2 * (version - 1)]

    @in_store
    async def test_trim_and_reset_hide_and_lose_nothing(self, store: SessionStore) -> None:
        """After a trim or a reset, older versions still show all that they showed."""
        full = await store.create(new_session(*LETTERS))
        trimmed = await store.save(show(full, full.state.transcript.trim(3)))
        empty = await store.save(show(trimmed, trimmed.state.transcript.reset()))
        await store.save(say(empty, "k"))
        shown = [texts(await store.load(full.id, version)) for version in (1, 2, 3, 4)]
        assert shown == [LETTERS, LETTERS[-3:], [], ["k"]]

    @in_store
    async def test_a_cut_view_goes_on(self, store: SessionStore) -> None:
        """Messages after a cut follow those that the cut has left."""
        session = await store.create(new_session(*LETTERS))
        session = await store.save(show(session, session.state.transcript.cut(0, 4)))
        session = await store.save(say(session, "E", "F"))
        session = await store.save(show(session, session.state.transcript.cut(2, 5)))
        session = await store.save(say(session, "g"))
        assert texts(await store.load(session.id)) == texts(session) == ["c", "d", "E", "g"]

    @in_store
    async def test_an_older_view_can_be_taken_up_again(self, store: SessionStore) -> None:
        """A session can show again what an earlier version showed."""
        first = await store.create(new_session(*LETTERS))
        empty = await store.save(show(first, Transcript()))
        said = await store.save(say(empty, "other"))
        older = await store.load(first.id, 1)
        assert older is not None
        back = await store.save(show(said, older.state.transcript.append(Message.user("k"))))
        assert texts(await store.load(first.id)) == [*LETTERS, "k"]
        assert texts(await store.load(first.id, back.version - 1)) == ["other"]

    @in_store
    async def test_cover_and_uncover_survive(self, store: SessionStore) -> None:
        """A block shows its summary in place of the messages that it covers, until it is taken off."""
        full = await store.create(new_session(*LETTERS))
        covered = await store.save(_covered(full, 0, 6, "a to f"))
        again = await store.save(_covered(say(covered, "k"), 0, 3, "a to h"))
        loaded = await store.load(full.id)
        assert loaded is not None
        assert texts(loaded) == texts(again) == ["a to h", "i", "j", "k"]
        assert [len(block.covered) for block in loaded.state.transcript.blocks()] == [2, 1]
        inner = await store.save(show(loaded, loaded.state.transcript.uncover()))
        assert texts(await store.load(full.id)) == texts(inner) == ["a to f", *LETTERS[6:], "k"]
        loaded = await store.load(full.id)
        assert loaded is not None
        await store.save(show(loaded, loaded.state.transcript.uncover()))
        shown = [texts(await store.load(full.id, version)) for version in range(1, 6)]
        assert shown[0] == LETTERS
        assert shown[1] == ["a to f", *LETTERS[6:]]
        assert shown[2] == ["a to h", "i", "j", "k"]
        assert shown[4] == [*LETTERS, "k"]

    @in_directory
    async def test_blocks_come_off_after_reopening(self, where: Path) -> None:
        """Messages under a block are still there for an instance that has never read them."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            full = await store.create(new_session(*LETTERS))
            await store.save(_covered(full, 2, 8, "c to h"))
        async with self.open_store(where) as store:
            loaded = await store.load(full.id)
            assert texts(loaded) == ["a", "b", "c to h", "i", "j"]
            assert loaded is not None
            (block,) = loaded.state.transcript.blocks()
            assert (block.by, len(block)) == ("test", 1)
            open_again = await store.save(say(show(loaded, loaded.state.transcript.uncover()), "k"))
            assert texts(open_again) == texts(await store.load(full.id)) == [*LETTERS, "k"]

    @in_store
    async def test_a_trim_keeps_results_with_their_calls(self, store: SessionStore) -> None:
        """A trim keeps tool results with their calls, and loads as it was made."""
        call = ToolCall("look_up", id="c-1")
        session = tell(new_session("a", "b"), Message.assistant(tool_calls=[call]), Message.tool("c-1", "done"))
        kept = await store.create(session)
        kept = await store.save(show(kept, kept.state.transcript.trim(1)))
        loaded = await store.load(kept.id)
        assert loaded is not None
        assert [message.role for message in loaded.state.messages] == ["assistant", "tool"]

    @in_store
    async def test_a_fork_goes_its_own_way(self, store: SessionStore) -> None:
        """Messages said after the fork, in the fork or in its parent, are in that session only."""
        parent = await store.create(new_session("a", "b"))
        left, right = await store.create(fork(parent)), await store.create(fork(parent))
        parent = await store.save(say(parent, "parent"))
        left = await store.save(say(left, "left"))
        right = await store.save(say(right, "right"))
        deep = await store.create(say(fork(left), "deep"))
        shown = [texts(await store.load(session.id)) for session in (parent, left, right, deep)]
        assert shown == [["a", "b", "parent"], ["a", "b", "left"], ["a", "b", "right"], ["a", "b", "left", "deep"]]
        assert left.info.parent_id == parent.id

    @in_store
    async def test_a_fork_of_an_older_version(self, store: SessionStore) -> None:
        """A fork can begin with any older version."""
        session = await store.create(new_session("a"))
        await store.save(say(session, "b"))
        older = await store.load(session.id, 1)
        assert older is not None
        branch = await store.create(say(fork(older), "B"))
        assert texts(await store.load(branch.id)) == ["a", "B"]

    @in_store
    async def test_values_that_are_shared_stay_apart(self, store: SessionStore) -> None:
        """Two sessions made from one value do not see each other's messages, and the value sees neither's."""
        common = new_session("a", id="one")
        first = await store.create(common)
        second = await store.create(say(fork(common, id="two"), "B"))
        await store.save(say(first, "b"))
        assert texts(common) == ["a"]
        assert texts(await store.load("one")) == ["a", "b"]
        assert texts(await store.load("two")) == texts(second) == ["a", "B"]

    @in_store
    async def test_many_pieces(self, store: SessionStore) -> None:
        """A view of very many pieces loads whole, and can be continued."""
        session = await store.create(new_session(*(str(n) for n in range(200))))
        # A hundred pieces: a head has no more than 32 of them in it, and the rest by hash.
        every_other = Transcript(
            piece for n in range(0, 200, 2) for piece in session.state.transcript.cut(n, n + 1).pieces
        )
        session = await store.save(show(session, every_other))
        session = await store.save(say(session, "more"))
        assert texts(await store.load(session.id)) == [*(str(n) for n in range(0, 200, 2)), "more"]
        assert texts(await store.load(session.id, 2)) == [str(n) for n in range(0, 200, 2)]


def _covered(session: AgentSession, start: int, stop: int, summary: str) -> AgentSession:
    view = session.state.transcript.cover(start, stop, [Message.assistant(summary)], by="test", tokens_before=100)
    return show(session, view)
