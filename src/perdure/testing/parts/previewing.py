"""Previews: a few words of each of many sessions, read from their messages."""

from __future__ import annotations

from typing import Any, Protocol

from perdure.errors import InvalidData, InvalidSessionId
from perdure.model.message import Message, ToolCall
from perdure.model.transcript import Transcript
from perdure.model.usage import Usage
from perdure.protocols import Erasure, Preview, Previews
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.samples import fork, new_session, run_of, say, show, tell
from perdure.testing.scene import Contract, in_store, refused


class PreviewingStore(Erasure, JournaledStore, Previews, Protocol):
    """A store that previews sessions."""


class Previewing(Contract):
    """A preview is read, not stored: it shows what the session's messages say now."""

    @in_store
    async def test_a_preview_has_the_first_and_the_last_words(self, store: PreviewingStore) -> None:
        """A preview has the user's first text, the last text, and the number of messages that are shown."""
        assert isinstance(store, Previews)
        await store.create(new_session(id="empty"))
        await store.create(new_session("Where is order 7?", "It was sent.", "Thanks\nand bye", id="said"))
        await store.create(new_session("Hello", id="named").with_name("Order 7"))
        await store.save(run_of(await store.create(new_session("Is it there?", id="ran"))))
        found = await store.previews(["said", "nobody", "ran", "empty", "named", "said"])
        assert found == {
            "said": Preview("Where is order 7?", "Thanks and bye", 3, Usage()),
            "ran": Preview("Is it there?", "It was sent.", 4, Usage(20, 8, cost=0.25)),
            "empty": Preview(None, None, 0, Usage()),
            "named": Preview("Order 7", "Hello", 1, Usage()),
        }
        assert await store.previews([]) == {}

    @in_store
    async def test_no_verb_changes_the_first_words(self, store: PreviewingStore) -> None:
        """A session keeps its title when it is trimmed, compacted or emptied, and so does a fork of it."""
        session = await store.create(new_session("First words", "a", "b", "c", id="it"))
        for view in (_trimmed, _covered, _emptied, _small_blocks):
            session = await store.save(view(session))
            assert await _title(store, "it") == "First words", view
        session = await store.save(say(session, "Later", "d", "e", "f"))
        branch = await store.create(fork(session, id="branch"))
        assert await _title(store, "branch") == "First words"
        branch = await store.save(say(branch, "The branch's own", "g"))
        await store.save(_trimmed(branch))
        assert await _seen(store, "branch") == ("First words", "g", 1)

    @in_store
    async def test_a_session_of_others_messages_has_their_first_words(self, store: PreviewingStore) -> None:
        """A session with no message of its own takes its title from those that it shows."""
        session = await store.create(new_session("First words", "a", "b", id="it"))
        other = await store.create(new_session(id="other"))
        other = await store.save(show(other, session.state.transcript))
        assert await _seen(store, "other") == ("First words", "b", 3)
        await store.save(_emptied(other))
        assert await _seen(store, "other") == (None, None, 0)

    @in_store
    async def test_the_last_words_are_among_those_shown(self, store: PreviewingStore) -> None:
        """The last words are among the messages shown, and are never those of a tool."""
        session = await store.create(new_session("One", "Two", "Three", "Four", id="it"))
        session = await store.save(show(session, session.state.transcript[:2]))
        assert await _seen(store, "it") == ("One", "Two", 2)
        calls = [ToolCall("look", {}, id=f"c{number}") for number in range(3)]
        busy = [Message.assistant("", tool_calls=calls), *(Message.tool(call.id, "found") for call in calls)]
        session = await store.save(tell(session, *busy))
        assert await _seen(store, "it") == ("One", "Two", 6)
        # More messages than a preview looks at from the end of the view: it then has no last words.
        session = await store.save(tell(session, *(Message.tool("c0", "more") for _ in range(40))))
        assert await _seen(store, "it") == ("One", None, 46)
        session = await store.save(_covered(session))
        assert await _seen(store, "it") == ("One", "What was said.", 1)
        await store.save(_emptied(session))
        assert await _seen(store, "it") == ("One", None, 0)

    @in_store
    async def test_a_view_of_many_pieces_is_counted(self, store: PreviewingStore) -> None:
        """The messages of a view are counted, however many blocks and stretches it has."""
        session = await store.create(new_session(*(f"Text {number}" for number in range(300)), id="it"))
        session = await store.save(_small_blocks(session))
        assert await _seen(store, "it") == ("Text 0", "Text 299", len(session.state.transcript))
        branch = await store.create(fork(session, id="branch"))
        for number in range(70):
            branch = await store.save(say(branch, f"Said {number}"))
            session = await store.save(say(session, f"Beside {number}"))
        assert await _title(store, "branch") == "Text 0"
        assert (await store.previews(["branch"]))["branch"].message_count == len(branch.state.transcript)

    @in_store
    async def test_texts_are_cut_behind_a_word(self, store: PreviewingStore) -> None:
        """A title comes from the first message with a text. It is one line, without control characters."""
        long = "word " * 100_000
        await store.create(tell(new_session(id="long"), Message.user(long), Message.assistant("y" * 500)))
        odd = Message.user("  \n\x1b[31mHello\u202e\n\tthere\x00 ")
        await store.create(tell(new_session(id="odd"), Message.system("Be kind."), Message.user(""), odd))
        assert await _seen(store, "long") == ("word " * 11 + "word…", "y" * 119 + "…", 2)
        assert await _seen(store, "odd") == ("[31mHello there", "[31mHello there", 3)

    @in_store
    async def test_what_is_redacted_or_erased_is_not_previewed(self, store: PreviewingStore) -> None:
        """Redacted words are replaced in every preview. A fork of an erased session begins with what is left."""
        session = await store.create(new_session("Secret one", "Secret two", "Kept", id="it"))
        branch = await store.create(fork(show(session, session.state.transcript[1:]), id="branch"))
        assert await _title(store, "branch") == "Secret one"
        await store.redact("it", [session.state.messages[0].id])
        assert {await _title(store, "it"), await _title(store, "branch")} == {"[redacted]"}
        await store.delete("it")
        assert {*await store.previews(["it", "branch"])} == {"branch"}
        assert await _seen(store, "branch") == ("Kept", "Kept", 2)
        assert branch.state.messages[0].text == "Secret two"

    @in_store
    async def test_wrong_ids_are_refused(self, store: PreviewingStore) -> None:
        """A text in place of several ids is refused, and so is an invalid id."""
        with refused(InvalidData):
            await store.previews("it")
        with refused(InvalidSessionId):
            await store.previews(["../it"])


async def _seen(store: PreviewingStore, session_id: str) -> tuple[str | None, str | None, int | None]:
    found = (await store.previews([session_id]))[session_id]
    return found.title, found.last_words, found.message_count


async def _title(store: PreviewingStore, session_id: str) -> str | None:
    return (await _seen(store, session_id))[0]


def _trimmed(session: Any) -> Any:
    return show(session, session.state.transcript.trim(1))


def _emptied(session: Any) -> Any:
    return show(session, session.state.transcript.reset())


def _covered(session: Any) -> Any:
    view: Transcript = session.state.transcript
    return show(session, view.cover(0, len(view), [Message.assistant("What was said.")], by="summary"))


def _small_blocks(session: Any) -> Any:
    """Return the session with many blocks in one view."""
    view: Transcript = tell(session, *(Message.user(f"Text {number}") for number in range(8))).state.transcript
    if len(session.state.transcript) > 8:
        view = session.state.transcript
    for place in range(0, len(view) - 2, 3):
        view = view.cover(place, place + 2, [Message.user("x" * 200), Message.user("y")], by="mask")
    return show(session, view)
