"""Sketches: pieces of an answer that is being written, kept under the claim until the record moves on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from perdure.errors import ClaimLost, InvalidData, SessionNotFound
from perdure.model import ids
from perdure.protocols import Archive, Claim, Erasure, RunProgress, Sketch, Sketchbook, said_in
from perdure.testing.clock import FrozenClock
from perdure.testing.parts.journal import JournaledStore, entries, messages
from perdure.testing.samples import new_session, say
from perdure.testing.scene import Contract, in_directory, in_store, refused

LEASE = 30.0


class SketchingStore(Erasure, JournaledStore, Sketchbook, Archive, Protocol):
    """A store that keeps the text of an answer while it is being written."""


class Sketches(Contract):
    """Pieces of an answer are kept for its followers until the whole answer is on record."""

    @in_store
    async def test_pieces_add_up(self, store: SketchingStore) -> None:
        """Pieces are read in order, or from a character on, and then with the first piece."""
        assert isinstance(store, Sketchbook)
        claim, seq = await begun(store)
        assert await store.progress("it") == RunProgress(seq, True, False)
        texts = ("Once ", "upon a ", "tïme\n\x00", "\U0001f600 there", "x" * 200_000)
        for text in texts:
            assert await sketch(store, claim, seq, text)
        found = await store.progress("it")
        assert said_in(found.sketches) == "".join(texts)
        assert {(each.run, each.message_id, each.attempt, each.seq) for each in found.sketches} == {
            ("run-1", "m", 0, seq)
        }
        later = await store.progress("it", after=found.sketches[3].start)
        assert [each.text for each in later.sketches] == [texts[0], *texts[3:]]
        assert [each.text for each in (await store.progress("it", after=10**9)).sketches] == [texts[0]]

    @in_store
    async def test_a_first_piece_replaces_all(self, store: SketchingStore) -> None:
        """A first piece replaces all: the model has begun again. A longer piece replaces the one at its place."""
        claim, seq = await begun(store)
        for text in ("a ", "b ", "c"):
            await sketch(store, claim, seq, text)
        await store.sketch(claim, Sketch("run-1", "m", "anew", attempt=1, seq=seq))
        assert [(each.text, each.attempt) for each in (await store.progress("it")).sketches] == [("anew", 1)]
        await store.sketch(claim, Sketch("run-1", "m", " and", start=4, attempt=1, seq=seq))
        await store.sketch(claim, Sketch("run-1", "m", " and on", start=4, attempt=1, seq=seq))
        assert said_in((await store.progress("it")).sketches) == "anew and on"

    @in_store
    async def test_a_piece_is_fenced(self, store: SketchingStore) -> None:
        """A piece is fenced by the claim and by the end of the record. A late piece is not kept."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            claim, seq = await begun(store)
            assert await sketch(store, claim, seq, "one")
            assert not await store.sketch(claim, Sketch("run-1", "m", "other", seq=seq + 1))
            appended = await store.append(claim, entries=entries("step"))
            assert not await store.sketch(claim, Sketch("run-1", "m", "late", seq=seq))
            assert await store.sketch(claim, Sketch("run-1", "n", "next", seq=appended.seq))
            clock.advance(LEASE + 1)
            new, _ = await store.claim("it", version=1, owner="ben", take_over=True)
            with refused(ClaimLost):
                await store.sketch(claim, Sketch("run-1", "n", "mine", seq=appended.seq))
            assert said_in((await store.progress("it")).sketches) == "next"
            await store.release(new)
            with refused(ClaimLost):
                await store.sketch(new, Sketch("run-1", "n", "mine", seq=appended.seq))
        with refused(SessionNotFound):
            await store.progress("nobody")

    @in_store
    async def test_a_whole_answer_takes_their_place(self, store: SketchingStore) -> None:
        """Pieces are gone with the append of the message, and void once their run puts anything on record."""
        claim, seq = await begun(store)
        await sketch(store, claim, seq, "half")
        appended = await store.append(claim, messages=messages("half of it"), entries=entries("said"))
        assert await store.progress("it") == RunProgress(appended.seq, True, False)
        await store.sketch(claim, Sketch("run-1", "n", "more", seq=appended.seq))
        appended = await store.append(claim, entries=entries("step"))
        assert await store.progress("it", after=2) == RunProgress(appended.seq, True, False)

    @in_store
    async def test_what_others_note_voids_no_piece(self, store: SketchingStore) -> None:
        """A piece stays valid until its own run puts something on record, by an append or by a note."""
        claim, seq = await begun(store)
        assert await sketch(store, claim, seq, "one ")
        end = await store.note("it", entries("noted", run="task"))
        assert await sketch(store, claim, seq, "two ")
        end = await store.note("it", entries("noted", run=None))
        assert await sketch(store, claim, seq, "three")
        found = await store.progress("it")
        assert (found.seq, said_in(found.sketches)) == (end, "one two three")
        assert [each.text for each in (await store.progress("it", after=8)).sketches] == ["one ", "three"]
        assert not await store.sketch(claim, Sketch("run-1", "m", "beyond", seq=end + 1))
        await store.release(claim, interrupted=True)
        assert said_in((await store.progress("it")).sketches) == "one two three"
        claim, _ = await store.claim("it", version=1, owner="ben", take_over=True)
        await store.note("it", entries("noted", run="run-1"))
        assert (await store.progress("it")).sketches == ()
        assert not await store.sketch(claim, Sketch("run-1", "m", "late", seq=seq))
        appended = await store.append(claim, entries=entries("step"))
        assert await store.sketch(claim, Sketch("run-1", "n", "next", seq=appended.seq))
        await store.note("it", entries("noted", run="task"))
        appended = await store.append(claim, messages=messages("next of it"), entries=entries("said"))
        assert await store.progress("it") == RunProgress(appended.seq, True, False)

    @in_store
    async def test_they_end_with_the_claim(self, store: SketchingStore) -> None:
        """Pieces end with a save or a release. Those of an interrupted run wait for its recovery."""
        claim, seq = await begun(store)
        await sketch(store, claim, seq, "half")
        await store.release(claim, interrupted=True)
        assert await store.progress("it") == RunProgress(seq, False, True, (Sketch("run-1", "m", "half", seq=seq),))
        claim, _ = await store.claim("it", version=1, owner="ben", take_over=True)
        assert said_in((await store.progress("it")).sketches) == "half"
        await store.release(claim)
        assert await store.progress("it") == RunProgress(seq, False, False)
        claim, _ = await store.claim("it", version=1, owner="cy")
        assert (await store.progress("it")).sketches == ()
        await sketch(store, claim, seq, "other half")
        session = await store.load("it")
        assert session is not None
        await store.save(say(session, "whole"), claim=claim)
        claim, _ = await store.claim("it", version=2, owner="dee")
        assert (await store.progress("it")).sketches == ()

    @in_store
    async def test_erasure_takes_them(self, store: SketchingStore) -> None:
        """A new session of the same id has no pieces, and a redaction leaves none."""
        claim, seq = await begun(store)
        await sketch(store, claim, seq, "secret")
        await store.release(claim, interrupted=True)
        session = await store.load("it")
        assert session is not None
        await store.redact("it", [session.state.messages[0].id])
        claim, appended = await store.claim("it", version=1, owner="ben", take_over=True)
        assert (await store.progress("it")).sketches == ()
        await store.sketch(claim, Sketch("run-1", "m", "secret", seq=appended.seq))
        await store.release(claim, interrupted=True)
        await store.delete("it")
        claim, _ = await begun(store)
        assert (await store.progress("it")).sketches == ()

    @in_store
    async def test_an_archive_leaves_them_out(self, store: SketchingStore) -> None:
        """An archive leaves pieces out, and a restored session is recovered without them."""
        claim, seq = await begun(store)
        await store.release(claim, interrupted=True)
        without = await store.dump("it")
        claim, _ = await store.claim("it", version=1, owner="ben", take_over=True)
        await sketch(store, claim, seq, "half")
        await store.release(claim, interrupted=True)
        archived = await store.dump("it")
        assert archived == without
        await store.delete("it")
        assert await store.restore(archived)
        assert await store.progress("it") == RunProgress(seq, False, True)

    @in_directory
    async def test_others_see_them(self, where: Path) -> None:
        """Other instances of the store see pieces as soon as they are kept."""
        async with self.open_store(where) as store, self.open_store(where) as other:
            claim, seq = await begun(store)
            if self.shared:
                for text in ("one ", "two"):
                    await sketch(store, claim, seq, text)
                    assert (await other.progress("it")).sketches[-1].text == text
                await store.append(claim, messages=messages("one two"), entries=entries("said"))
                assert (await other.progress("it")).sketches == ()

    @in_store
    async def test_what_is_no_piece_is_refused(self, store: SketchingStore) -> None:
        claim, seq = await begun(store)
        given: Any
        for given in (None, "half", {"text": "half"}):
            with refused(InvalidData):
                await store.sketch(claim, given)
        with refused(InvalidData):
            await store.sketch("it", Sketch("run-1", "m", "half", seq=seq))  # type: ignore[arg-type]
        for given in (-1, 1.5, None, "0"):
            with refused(InvalidData):
                await store.progress("it", after=given)
        assert (await store.progress("it")).sketches == ()


async def begun(store: SketchingStore) -> tuple[Claim, int]:
    """Create a session and begin a run. Return its claim, and the end of its record."""
    await store.create(new_session("Hello", id="it"))
    claim, appended = await store.claim("it", version=1, owner="ann", lease=LEASE, entries=entries("start"))
    return claim, appended.seq


async def sketch(store: SketchingStore, claim: Claim, seq: int, text: str) -> bool:
    """Keep a piece behind those that are there."""
    start = len(said_in((await store.progress(claim.session_id)).sketches))
    return await store.sketch(claim, Sketch("run-1", "m", text, start=start, seq=seq))
