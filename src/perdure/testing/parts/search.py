"""Searching: the hits, their order, and their snippets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perdure.errors import InvalidData
from perdure.model.message import Message, ToolCall
from perdure.protocols import Search, SearchHit
from perdure.testing.samples import fork, new_session, say, show, tell
from perdure.testing.scene import Contract, in_directory, in_store, refused

# Syntax of full-text queries, of SQL and of the index's own columns. None of it may reach a parser.
HOSTILE = (
    '"', '""', '"open', "*", "**", "a*b*", "()", "(", "NOT", "AND OR", "NEAR(a b)", "text:a", "place:l1", "^a",
    "{text}", "-a", "+", "a AND", "'; DROP TABLE msg; --", "\\", "%", "\x00", "a\x00b", "\ud800", "🙂", "\u0301",
    "a" * 5000, "a " * 3000, '"' * 99, "l1", "score(message)", "rank", "\n\t x", "½ ﬁ ẞ", "{", "}:", "a:b:c",
)  # fmt: skip


def found(hits: Iterable[SearchHit]) -> list[str]:
    return [hit.message_id for hit in hits]


class Searching(Contract):
    """The contract of `perdure.protocols.Search`."""

    @in_store
    async def test_words_are_found_whatever_their_case_and_accents(self, store: Any) -> None:
        """A message is found by its words, and the snippet says where they are."""
        assert issubclass(type(store), Search)
        session = await store.create(new_session("Où est le Café Crème?", "nothing", "CAFÉ!", "cafe\u0301s"))
        first, _, third, fourth = session.state.messages
        hits = await store.search("cafe")
        assert set(found(hits)) == {first.id, third.id}
        assert found(await store.search("CRÈME café")) == [first.id]
        assert set(found(await store.search("caf*"))) == {first.id, third.id, fourth.id}
        (hit,) = await store.search("creme")
        assert (hit.session_id, hit.message_id, hit.role, hit.position) == (session.id, first.id, "user", 0)
        assert hit.snippet == "Où est le Café Crème?"
        assert [hit.snippet[start:stop] for start, stop in hit.matches] == ["Crème"]
        assert hit.created_at is not None

    @in_store
    async def test_all_words_are_needed_and_phrases_stand_together(self, store: Any) -> None:
        """All words must match. Quotation marks keep them in order, and a star matches any ending."""
        session = await store.create(new_session("red green blue", "blue green", "greenish red"))
        a, b, c = (message.id for message in session.state.messages)
        assert set(found(await store.search("green blue"))) == {a, b}
        assert found(await store.search('"green blue"')) == [a]
        assert set(found(await store.search("green* red"))) == {a, c}
        assert found(await store.search('"red gre"*')) == [a]
        assert found(await store.search("red-green")) == [a]
        assert found(await store.search("red purple")) == []

    @in_store
    async def test_better_matches_come_first_then_newer_ones(self, store: Any) -> None:
        """A word that is repeated, or in a shorter text, ranks higher. Equal hits come newest first."""
        # A word weighs less in a longer text.
        padding = "and so on " * 20
        first = await store.create(new_session(f"kettle {padding}", "kettle kettle", f"no {padding}"))
        second = await store.create(new_session("a pot", "a kettle"))
        third = await store.create(new_session("a kettle"))
        long, double, _ = (message.id for message in first.state.messages)
        older, newer = second.state.messages[1].id, third.state.messages[0].id
        hits = await store.search("kettle")
        assert found(hits) == [double, newer, older, long]
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert found(await store.search("kettle", limit=2)) == [double, newer]

    @in_store
    async def test_everything_said_is_found_covered_or_cut(self, store: Any) -> None:
        """Trimmed, covered and summarising messages, tool calls and their results are all found."""
        call = ToolCall("look_up", {"city": "Valparaiso"}, id="c1")
        session = await store.create(new_session("one apple", "two pear"))
        said = (Message.assistant("", tool_calls=[call]), Message.tool("c1", {"weather": "drizzle"}))
        session = await store.save(tell(session, *said))
        session = await store.save(show(session, session.state.transcript.trim(2)))
        view = session.state.transcript.cover(0, 2, [Message.assistant("in summary, plum")], by="test")
        session = await store.save(show(session, view))
        for word in ("apple", "pear", "valparaiso", "look_up", "drizzle", "plum"):
            hits = await store.search(word)
            assert [hit.session_id for hit in hits] == [session.id], word

    @in_store
    async def test_a_long_text_is_cut_around_the_first_match(self, store: Any) -> None:
        """A snippet is short, shows that it was cut, and keeps control characters as they are."""
        text = "word " * 500 + "\x1b[31m needle\x07 " + "more " * 500
        await store.create(new_session(text))
        (hit,) = await store.search("needle")
        assert len(hit.snippet) < 260
        assert hit.snippet.startswith("…")
        assert hit.snippet.endswith("…")
        assert "\x07" in hit.snippet
        assert [hit.snippet[start:stop] for start, stop in hit.matches] == ["needle"]

    @in_store
    async def test_a_message_is_its_own_sessions_unless_that_is_gone(self, store: Any) -> None:
        """A hit names the session that said it. Once that is hidden or erased, it names a fork that shows it."""
        parent = await store.create(new_session("shared words"))
        child = await store.create(say(fork(parent), "words of its own"))
        later = await store.create(new_session("words of nobody else"))
        by_text = {hit.snippet: hit.session_id for hit in await store.search("words")}
        assert by_text["shared words"] == parent.id
        assert by_text["words of its own"] == child.id
        hidden = await store.save(later.deleted())
        assert {hit.session_id for hit in await store.search("words")} == {parent.id, child.id}
        parent = await store.save(say(parent, "words unshared").deleted())
        assert {hit.session_id for hit in await store.search("words")} == {child.id}
        await store.delete(parent.id)
        await store.delete(hidden.id)
        hits = await store.search("words", session_id=child.id)
        assert {hit.snippet for hit in hits} == {"shared words", "words of its own"}
        await store.delete(child.id)
        assert await store.search("words") == []

    @in_store
    async def test_what_an_erased_session_has_left_is_the_oldest_forks(self, store: Any) -> None:
        """A hit of an erased session names the fork that was created first, whatever the forks' names."""
        parent = await store.create(new_session("shared words"))
        for name in ("zoe", "ann", "mia"):
            await store.create(fork(parent, id=name))
        await store.delete(parent.id)
        assert [hit.session_id for hit in await store.search("shared")] == ["zoe"]

    @in_store
    async def test_a_search_can_be_narrowed(self, store: Any) -> None:
        """A search is narrowed to an owner or to a session, and never shows another owner's sessions."""
        ann = await store.create(new_session("tea time", owner="ann"))
        bob = await store.create(new_session("tea time", owner="bob"))
        await store.create(new_session("tea time"))
        assert [hit.session_id for hit in await store.search("tea", owner="ann")] == [ann.id]
        assert [hit.session_id for hit in await store.search("tea", session_id=bob.id)] == [bob.id]
        assert await store.search("tea", owner="ann", session_id=bob.id) == []
        assert await store.search("tea", owner="o' OR 1") == []
        assert await store.search("tea", session_id="unknown") == []
        assert len(await store.search("tea")) == 3

    @in_store
    async def test_new_messages_are_found_at_once(self, store: Any) -> None:
        """A search sees everything that was saved before it, also by a run under way."""
        session = await store.create(new_session("begin"))
        for round in range(5):
            session = await store.save(say(session, f"round{round}", f"answer{round}"))
            assert len(await store.search(f"round{round}")) == 1
        claim, _ = await store.claim(session.id, version=session.version, owner="me", messages=[Message.user("ahead")])
        assert [hit.session_id for hit in await store.search("ahead")] == [session.id]
        await store.release(claim)

    @in_store
    async def test_what_is_erased_is_found_no_more(self, store: Any) -> None:
        """Erased words are not found, and a new message is not taken for an erased one."""
        for round in range(4):
            session = await store.create(new_session("alpha", f"beta{round}"))
            assert len(await store.search("alpha")) == 1
            await store.delete(session.id)
            assert await store.search("alpha") == []
            assert await store.search(f"beta{round}") == []
        kept = await store.create(new_session("gamma"))
        assert [hit.session_id for hit in await store.search("gamma")] == [kept.id]

    @in_store
    async def test_no_text_is_syntax(self, store: Any) -> None:
        """Every text is taken as words. Only a blank text or a wrong limit is refused."""
        await store.create(new_session("a NOT b", "text:a", "½"))
        for text in HOSTILE:
            for hit in await store.search(text):
                assert hit.matches, text
        for blank in ("", " \n", None, 7):
            with refused(InvalidData):
                await store.search(blank)
        for limit in (0, -1, 1001, True, "3"):
            with refused(InvalidData):
                await store.search("a", limit=limit)
        assert len(await store.search("NOT a")) == 1

    @in_directory
    async def test_instances_find_what_others_have_said_and_erased(self, where: Path) -> None:
        """Two instances of one store find the same."""
        if not self.shared:
            return
        async with self.open_store(where) as first, self.open_store(where) as second:
            one = await first.create(new_session("seen by both"))
            two = await second.create(new_session("seen by both too"))
            for store in (first, second):
                assert {hit.session_id for hit in await store.search("both")} == {one.id, two.id}
            await first.delete(one.id)
            for store in (second, first):
                assert [hit.session_id for hit in await store.search("seen")] == [two.id]
            three = await second.create(new_session("seen again"))
            assert {hit.session_id for hit in await first.search("seen")} == {two.id, three.id}
