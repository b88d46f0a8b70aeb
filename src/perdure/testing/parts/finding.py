"""Messages found by their ids, in any session."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.session import SessionStatus
from perdure.protocols import Archive, Erasure, FindsMessages
from perdure.testing.parts.journal import JournaledStore, entries
from perdure.testing.samples import fork, new_session, show, tell
from perdure.testing.scene import Contract, in_directory, in_store, refused

# A message's id may be any text.
ODD_IDS = ('with "quotes"', "back\\slash", "naïve-\U0001f600", "nul\x00nul", "line\nbreak", " ", "x" * 300, "7", "null")


class FindingStore(Erasure, JournaledStore, FindsMessages, Archive, Protocol):
    """A store that finds messages by their ids."""


class Finding(Contract):
    """An id leads to the messages that have it, and to no others."""

    @in_store
    async def test_a_message_is_found_by_its_id(self, store: FindingStore) -> None:
        """A message is found as soon as it is saved, also if no view shows it, and in the log of a branch."""
        assert isinstance(store, FindsMessages)
        session = await store.create(tell(new_session(id="it"), *_messages("a", "b", "c", "d")))
        await store.create(tell(new_session(id="other"), *_messages("e"), Message.user("It quotes a and b.", id="f")))
        assert await _found(store, "c") == [("it", "c")]
        view = session.state.transcript
        session = await store.save(show(session, view.cover(0, 2, [Message.assistant("Sum", id="sum")], by="summary")))
        session = await store.save(show(session, session.state.transcript.reset()))
        claim, _ = await store.claim("it", version=3, owner="ann", messages=_messages("g"), entries=entries("start"))
        await store.append(claim, messages=_messages("h"), entries=entries("aside", run="two"), log="two")
        for message_id in "abcdgh":
            assert await _found(store, message_id) == [("it", message_id)], message_id
        assert await _found(store, "sum") == [("it", "Sum")]
        assert await _found(store, "e") == [("other", "e")]
        assert await _found(store, "nobody") == []
        assert await _found(store, "user") == []

    @in_store
    async def test_odd_ids_are_found(self, store: FindingStore) -> None:
        said = [Message.user(f"text {place}", id=each) for place, each in enumerate(ODD_IDS)]
        await store.create(tell(new_session(id="it"), *said))
        for place, message_id in enumerate(ODD_IDS):
            assert await _found(store, message_id) == [("it", f"text {place}")], message_id

    @in_store
    async def test_a_fork_shares_its_parents_messages(self, store: FindingStore) -> None:
        """Shared messages are the parent's. Once that is hidden or erased, those that the fork shows are the fork's."""
        session = await store.create(tell(new_session(id="it"), *_messages("a", "b", "c")))
        await store.create(fork(show(session, session.state.transcript[:2]), id="branch"))
        assert await _found(store, "b") == [("it", "b")]
        await store.save(session.with_status(SessionStatus.DELETED))
        assert await _found(store, "b") == [("branch", "b")]
        assert await _found(store, "c") == []
        await store.delete("it")
        assert await _found(store, "b") == [("branch", "b")]
        assert await _found(store, "c") == []
        await store.delete("branch")
        assert await _found(store, "b") == []
        await store.create(tell(new_session(id="it"), *_messages("b", "d")))
        assert await _found(store, "b") == [("it", "b")]
        assert await _found(store, "d") == [("it", "d")]

    @in_store
    async def test_a_redacted_message_keeps_its_id(self, store: FindingStore) -> None:
        await store.create(tell(new_session(id="it"), *_messages("a", "b")))
        assert await _found(store, "a") == [("it", "a")]
        await store.redact("it", ["a"])
        assert await _found(store, "a") == [("it", "[redacted]")]
        assert await _found(store, "b") == [("it", "b")]

    @in_store
    async def test_messages_that_share_an_id_are_all_found(self, store: FindingStore) -> None:
        """All messages of an id are found, newest sessions first, up to `limit`. An owner finds only their own."""
        for number in range(4):
            owner = ("ann", "ben")[number % 2]
            said = [Message.user(f"first {number}", id="same"), *_messages(f"own {number}")]
            session = await store.create(tell(new_session(id=f"s{number}", owner=owner), *said))
        await store.save(tell(session, Message.user("again", id="same")))
        everywhere = [("s3", "again"), *((f"s{number}", f"first {number}") for number in (3, 2, 1, 0))]
        assert await _found(store, "same") == everywhere
        assert await _found(store, "same", limit=2) == everywhere[:2]
        assert await _found(store, "same", owner="ann") == [("s2", "first 2"), ("s0", "first 0")]
        assert await _found(store, "same", owner="ann", limit=1) == [("s2", "first 2")]
        assert await _found(store, "own 1", owner="ann") == []
        assert await _found(store, "same", owner="nobody") == []

    @in_directory
    async def test_what_was_taken_in_is_found(self, where: Path) -> None:
        """A restored session's messages are found, with those that it shows of a session that was not brought along."""
        for name in ("one", "other"):
            (where / name).mkdir()
        async with self.open_store(where / "one") as source, self.open_store(where / "other") as target:
            session = await source.create(tell(new_session(id="it"), *_messages("a", "b")))
            child = await source.create(fork(session, id="child"))
            await source.save(tell(child, *_messages("c")))
            assert await _found(target, "a") == []
            await target.restore(await source.dump("child", alone=True))
            assert await _found(target, "c") == [("child", "c")]
            assert await _found(target, "a") == [("child", "a")]

    @in_store
    async def test_what_is_no_id_is_refused(self, store: FindingStore) -> None:
        given: Any
        for given in (None, 7, b"a", "\ud800"):
            with refused(InvalidData, of=repr(given)):
                await store.find_message(given)
        for given in (0, -1, True, 1.5, None, "1"):
            with refused(InvalidData, of=repr(given)):
                await store.find_message("a", limit=given)
        for given in ("", 7):
            with refused(InvalidData, of=repr(given)):
                await store.find_message("a", owner=given)


def _messages(*names: str) -> list[Message]:
    """Return messages whose texts are their ids."""
    return [Message.user(name, id=name) for name in names]


async def _found(store: FindingStore, message_id: str, **options: Any) -> list[tuple[str, str]]:
    """Return the sessions that an id leads to, each with the text of its message."""
    found = []
    for place in await store.find_message(message_id, **options):
        (message,) = await store.messages(place.log, place.position, place.position + 1)
        assert message.id == message_id
        found.append((str(place.session_id), message.text))
    return found
