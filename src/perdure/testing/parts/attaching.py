"""Images and files: their bytes are kept once, apart from the messages, while any message shows them.

The tests call `check`, which finds bytes that no message shows, and messages whose bytes are gone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, SessionNotFound
from perdure.model.message import Media, Message
from perdure.model.session import AgentSession
from perdure.protocols import Archive, Attachments, Checkable, Entry, Erasure
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.samples import fork, new_session, say, show, tell
from perdure.testing.scene import Contract, in_directory, in_store, refused

PHOTO = bytes(range(256)) * 64
SCAN = PHOTO[::-1]
HASH = codec.hash_of_bytes(PHOTO)


class AttachingStore(Erasure, JournaledStore, Attachments, Archive, Checkable, Protocol):
    """A store with every port that deals with images and files."""


def photo(text: str = "See:", body: bytes = PHOTO, **named: Any) -> Message:
    return Message.user(text, Media("image/png", data=body, name="a.png"), **named)


async def bytes_of(store: Any, session_id: str, *hashes: str) -> list[bytes]:
    """Return the bytes of a session's files with these hashes."""
    found = await store.attachments(session_id, hashes or (HASH,))
    return [found[key] for key in hashes or (HASH,)]


def files_in(session: AgentSession | None) -> list[Media]:
    """Return the images and files that a session shows."""
    assert session is not None, "the session is not there"
    return [part for message in session.state.messages for part in message.parts if isinstance(part, Media)]


class Attaching(Contract):
    """Files that a message shows are there, and files that no message shows are not."""

    @in_store
    async def test_large_bytes_are_named_by_their_hash(self, store: AttachingStore) -> None:
        """Saves and loads return large files by their hash. Small files and addresses stay in the message."""
        assert isinstance(store, Attachments)
        # The largest size that stays in the message.
        small = Media("image/gif", data=PHOTO[:4096])
        linked = Media("image/png", url="https://a.example/b.png")
        said = Message.user("See:", Media("image/png", data=PHOTO, name="a.png"), small, linked)
        kept = await store.create(tell(new_session(id="it"), said))
        expected = [Media("image/png", name="a.png", hash=HASH, size=len(PHOTO)), small, linked]
        assert files_in(kept) == files_in(await store.load("it")) == expected
        assert await store.load("it") == kept
        assert await bytes_of(store, "it") == [PHOTO]
        assert [*await store.check()] == []

    @in_directory
    async def test_they_are_there_when_the_store_is_opened_again(self, where: Path) -> None:
        """Files written by a save, an append or a claim are there when the store is opened again."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            kept = await store.create(new_session("Hello", id="it"))
            claim, first = await store.claim("it", version=1, owner="me", messages=[photo(id="one")])
            then = await store.append(claim, messages=[photo("And:", SCAN, id="two"), photo(id="three")])
            branch = await store.append(claim, messages=[photo("Aside", PHOTO[1:], id="four")], log="loop-1")
            ahead = tell(kept, photo(id="one"), photo("And:", SCAN, id="two"), photo(id="three"), photo("last", id="5"))
            written = {**first.written, **then.written}
            saved = await store.save(ahead, claim=claim, written=written)
            assert [each.hash for each in files_in(saved)] == [HASH, codec.hash_of_bytes(SCAN), HASH, HASH]
        async with self.open_store(where) as store:
            assert await store.load("it") == saved
            hashes = (HASH, codec.hash_of_bytes(SCAN), codec.hash_of_bytes(PHOTO[1:]))
            assert await bytes_of(store, "it", *hashes) == [PHOTO, SCAN, PHOTO[1:]]
            (said,) = await store.messages(branch.written["four"].log, 0, 1)
            assert said.parts[1].hash == hashes[2]
            assert [*await store.check()] == []

    @in_store
    async def test_they_stay_until_the_last_message_that_shows_them_is_erased(self, store: AttachingStore) -> None:
        """Bytes stay while any message shows them, in the same session, in another one, or in a fork."""
        one = await store.create(tell(new_session(id="one"), photo(), photo("Again")))
        await store.create(tell(new_session(id="two"), photo()))
        early = await store.create(fork(one, id="early"))
        await store.create(fork(show(early, early.state.transcript.trim(1)), id="late"))
        for gone, left in (("one", ("two", "early", "late")), ("early", ("two", "late")), ("two", ("late",))):
            await store.delete(gone)
            assert [*await store.check()] == [], gone
            assert [await bytes_of(store, each) for each in left] == [[PHOTO]] * len(left)
            with refused(SessionNotFound):
                await bytes_of(store, gone)
        await store.delete("late")
        assert [*await store.check()] == []
        assert await store.gc() == 0

    @in_store
    async def test_erasing_what_a_fork_does_not_show_takes_its_files(self, store: AttachingStore) -> None:
        """Erasing a session takes the files that its fork does not show, and leaves the others."""
        one = await store.create(tell(new_session(id="one"), photo()))
        await store.create(fork(one, id="two"))
        await store.save(tell(one, photo("Later", SCAN)))
        await store.delete("one")
        assert [*await store.check()] == []
        assert await bytes_of(store, "two") == [PHOTO]
        with refused(InvalidData):
            await bytes_of(store, "two", codec.hash_of_bytes(SCAN))
        assert [*(await store.dump("two")).blobs] == [HASH]

    @in_store
    async def test_a_redacted_message_takes_its_files_along(self, store: AttachingStore) -> None:
        """A redacted message takes its files along, unless something else shows them."""
        one = await store.create(tell(new_session(id="one"), photo(id="p1"), photo("And", SCAN, id="p2")))
        await store.create(tell(new_session(id="other"), photo()))
        assert await store.redact("one", ["p1", "p2"]) == 2
        assert files_in(await store.load("one")) == files_in(await store.load("one", one.version)) == []
        assert [*await store.check()] == []
        for key in (HASH, codec.hash_of_bytes(SCAN)):
            with refused(InvalidData):
                await bytes_of(store, "one", key)
        assert await bytes_of(store, "other") == [PHOTO]
        assert [*(await store.dump("one")).blobs] == []

    @in_directory
    async def test_one_is_erased_while_another_is_sent(self, where: Path) -> None:
        """If bytes are erased in one place and sent in another at the same time, those that were sent are there."""
        if not self.shared:
            return
        async with self.open_store(where) as one, self.open_store(where) as other:
            # Several times, since the two rarely meet in the same instant.
            for number in range(12):
                await one.create(tell(new_session(id=f"old-{number}"), photo()))
                erased = one.delete(f"old-{number}")
                await asyncio.gather(erased, other.create(tell(new_session(id=f"new-{number}"), photo())))
                assert await bytes_of(one, f"new-{number}") == [PHOTO]
                assert [*await one.check()] == []
                await asyncio.gather(other.delete(f"new-{number}"), one.gc())
                assert [*await other.check()] == []

    @in_store
    async def test_to_know_a_hash_is_not_enough(self, store: AttachingStore) -> None:
        """Knowing a hash is not enough to read the bytes, or to write a message with them. Nothing is changed."""
        await store.create(tell(new_session(id="theirs"), photo()))
        mine = await store.create(new_session("Hello", id="mine"))
        named = Message.user("See:", Media("image/png", hash=HASH, size=len(PHOTO)))
        unknown = Message.user("See:", Media("image/png", hash="0" * 64, size=1))
        claim, _ = await store.claim("mine", version=1, owner="me")
        for message in (named, unknown):
            with refused(InvalidData):
                await store.create(tell(new_session(id="new"), message))
            with refused(InvalidData):
                await store.append(claim, messages=[message])
            with refused(InvalidData):
                await store.save(tell(mine, message), claim=claim)
            with refused(InvalidData):
                await store.post("mine", Entry("queue", {"messages": [message.to_dict()]}))
        with refused(InvalidData):
            await bytes_of(store, "mine")
        await store.release(claim)
        assert await store.load("mine") == mine
        assert not await store.exists("new")
        assert [*await store.check()] == []

    @in_store
    async def test_what_a_session_shows_may_be_said_again_by_its_hash(self, store: AttachingStore) -> None:
        """A session and its forks may show a file again by its hash. The bytes stay while any of them does."""
        one = await store.create(tell(new_session(id="one"), photo()))
        (shown,) = files_in(one)
        two = await store.create(fork(one, id="two"))
        claim, _ = await store.claim("one", version=1, owner="me")
        again = await store.append(claim, messages=[Message.user(shown, id="again")])
        one = await store.save(tell(one, Message.user(shown, id="again")), claim=claim, written=again.written)
        two = await store.save(tell(two, Message.user("Mine:", shown)))
        await store.delete("one")
        assert [*await store.check()] == []
        assert await bytes_of(store, "two") == [PHOTO]
        await store.delete("two")
        assert [*await store.check()] == []

    @in_store
    async def test_what_is_posted_keeps_its_files(self, store: AttachingStore) -> None:
        """An inbox item comes back as it was posted. Its bytes go with the session, or with a redaction."""
        await store.create(new_session("Hello", id="it"))
        posted = Entry("queue", {"id": "d1", "messages": [photo(id="p1").to_dict(), photo("2", SCAN).to_dict()]})
        await store.post("it", Entry("cancel"))
        assert await store.post("it", posted) == 2
        (_, found) = await store.read("it", inbox=True)
        assert (found.kind, [Message.from_dict(each) for each in found.body["messages"]]) == (
            "queue",
            [Message.from_dict(each) for each in posted.body["messages"]],
        )
        assert await bytes_of(store, "it") == [PHOTO]
        assert [*await store.check()] == []
        claim, first = await store.claim("it", version=1, owner="me", messages=[photo(id="p1")])
        await store.append(claim, taken=2)
        await store.release(claim)
        assert await store.redact("it", ["p1"]) == 1
        assert [*await store.check()] == []
        with refused(InvalidData):
            await bytes_of(store, "it")
        assert await bytes_of(store, "it", codec.hash_of_bytes(SCAN)) == [SCAN]
        await store.delete("it")
        assert [*await store.check()] == []
        assert first.written

    @in_directory
    async def test_they_move_with_their_sessions(self, where: Path) -> None:
        """Files move with a session's messages, with those it shows of others, and with its inbox."""
        for name in ("one", "other"):
            (where / name).mkdir()
        async with self.open_store(where / "one") as source, self.open_store(where / "other") as target:
            one = await source.create(tell(new_session(id="one"), photo()))
            await source.create(tell(fork(one, id="two"), photo("Mine", SCAN)))
            await source.post("two", Entry("queue", {"messages": [photo("Wait", PHOTO[1:]).to_dict()]}))
            for session_id, alone in (("two", True), ("one", False), ("two", False)):
                archived = await source.dump(session_id, alone=alone)
                assert await target.restore(archived) is (alone or session_id == "one")
            assert sorted((await source.dump("two", alone=True)).blobs) == sorted((await target.dump("two")).blobs)
            for key, body in ((HASH, PHOTO), (codec.hash_of_bytes(SCAN), SCAN)):
                assert await bytes_of(target, "two", key) == [body]
            assert await target.read("two", inbox=True) == await source.read("two", inbox=True)
            assert [*await target.check()] == []
            for session_id in ("one", "two"):
                await target.delete(session_id)
                assert [*await target.check()] == []

    @in_directory
    async def test_an_archive_without_them_is_refused(self, where: Path) -> None:
        """An archive without its files, or with other bytes in their place, is refused. Nothing is written."""
        for name in ("one", "other"):
            (where / name).mkdir()
        async with self.open_store(where / "one") as source, self.open_store(where / "other") as target:
            await source.create(tell(new_session(id="one"), photo()))
            archived = await source.dump("one")
            for blobs in ({}, {HASH: SCAN}):
                with refused(InvalidData):
                    await target.restore(replace(archived, blobs=blobs))
            assert not await target.exists("one")
            assert [*await target.check()] == []

    @in_store
    async def test_files_within_messages_are_taken_out_when_they_move(self, store: AttachingStore) -> None:
        """Files within messages, as earlier releases stored them, are kept apart. It is still the same session."""
        await store.create(tell(new_session(id="one"), photo(id="p1")))
        archived = await store.dump("one")
        inline = msgspec.json.encode(photo(id="p1"))
        assert codec.detached_raw(inline)[0] == archived.logs["one"][0]
        assert codec.decode_message(inline) == photo(id="p1")
        assert await store.restore(archived) is False

    @in_store
    async def test_other_bytes_than_were_written_are_never_given_out(self, store: AttachingStore) -> None:
        """An unknown session, an unknown hash and a text that is not a hash are errors."""
        await store.create(say(new_session(id="it"), "Hello"))
        with refused(SessionNotFound):
            await store.attachments("nobody", [HASH])
        # The first is a good hash, of bytes that no session here has shown.
        for wrong in ([HASH], ["x"], [""]):
            with refused(InvalidData, CorruptRecord):
                await store.attachments("it", wrong)
        assert await store.attachments("it", []) == {}
