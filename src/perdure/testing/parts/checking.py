"""Checks: a store finds nothing wrong with what it has written."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, Protocol

from perdure.model.message import Media, Message
from perdure.protocols import Checkable, Entry, Key, Sketch, Timer, Token, is_queue, is_sketchbook, is_token_book
from perdure.testing.parts.journal import JournaledStore, entries, messages
from perdure.testing.samples import fork, new_session, note, say, show, tell
from perdure.testing.scene import Contract, in_store


class CheckedStore(JournaledStore, Checkable, Protocol):
    """A store whose runs are on record, and that can check itself."""


class Checking(Contract):
    """Nothing that a store does by itself is ever reported as a problem."""

    @in_store
    async def test_a_sound_store_has_no_problems(self, store: CheckedStore) -> None:
        """A sound store has no problems, whatever was done to it, and can be used after the check."""
        assert isinstance(store, Checkable)
        assert [*await store.check()] == []
        await fill(store)
        assert [*await store.check()] == []
        talk = await store.load("talk")
        assert talk is not None
        assert (await store.save(say(talk, "on"))).version == talk.version + 1

    @in_store
    async def test_what_is_left_of_erased_sessions_is_no_problem(self, store: CheckedStore) -> None:
        """Remains of erased sessions that others show are sound. When the others are gone, nothing is left."""
        await fill(store)
        for session_id in ("talk", "child", "views", "killed", "orphan", "album"):
            await store.delete(session_id)
            assert [*await store.check()] == [], session_id
        assert (await store.list()).all() == ()

    @in_store
    async def test_a_session_under_way_is_no_problem(self, store: CheckedStore) -> None:
        """Messages that a run has written ahead, and that no version shows yet, are sound."""
        session = await store.create(new_session("hello"))
        claim, _ = await store.claim(
            session.id, version=1, owner="me", messages=messages("ahead"), entries=entries("start")
        )
        await store.append(claim, messages=messages("a branch"), entries=entries("step", run="b"), log="b")
        assert [*await store.check()] == []

    @in_store
    async def test_what_others_do_meanwhile_is_no_problem(self, store: CheckedStore) -> None:
        """A check finds no problem while sessions are created, saved, forked and erased."""

        async def live(number: int) -> None:
            for round in range(4):
                session = await store.create(new_session("hello", id=f"s{number}-{round}", tags=("t",)))
                session = await store.save(note(say(session, "more"), "long", str(round) * 500))
                child = await store.create(say(fork(session), "other"))
                await store.delete(session.id)
                await store.post(child.id, Entry("note", {"text": "x"}))

        others = asyncio.gather(*map(live, range(3)))
        while not others.done():
            assert [*await store.check()] == []
            await asyncio.sleep(0)
        await others
        assert [*await store.check()] == []


async def fill(store: Any) -> None:
    """Create sessions of many kinds: run, forked, compacted, interrupted, left by a parent, and with an image."""
    # Other contracts know these sessions by their names.
    talk = await store.create(new_session("Hello", id="talk", owner="ada", tags=("vip", "münchen")))
    run = messages("one", "two")
    claim, ahead = await store.claim(
        "talk", version=1, owner="me", messages=run, entries=[Entry("agent_start", {"messages": 1}, "run-1")]
    )
    branch = await store.append(claim, messages=messages("aside"), entries=entries("step", run="b"), log="b")
    written = {**ahead.written, **branch.written}
    talk = talk.with_state(talk.state.with_messages(*run))
    end = [Entry("agent_end", {}, "run-1")]
    talk = await store.save(talk, claim=claim, written=written, entries=end, key=Key("first", "digest"))
    await store.post("talk", Entry("note", {"text": "dealt with"}))
    talk = await store.save(note(talk, "notes", "x" * 500), taken=1)
    await store.post("talk", Entry("note", {"text": "waits"}))
    await store.create(say(fork(talk, id="child"), "Another way."))
    views = await store.create(new_session(*(f"m{number}" for number in range(60)), id="views"))
    covered = views.state.transcript.cover(0, 40, [Message.user("forty")], by="test")
    await store.save(show(views, covered))
    gone = await store.create(new_session("to", "be", "erased", id="gone"))
    await store.create(say(fork(show(gone, gone.state.transcript.trim(1)), id="orphan"), "left alone"))
    await store.delete("gone")
    await store.create(new_session("Hello", id="killed"))
    claim, ahead = await store.claim("killed", version=1, owner="me", entries=entries("start"))
    if is_sketchbook(store):
        for start, text in enumerate("abc"):
            await store.sketch(claim, Sketch("run-1", "m", text, start, seq=ahead.seq))
    await store.release(claim, interrupted=True)
    if is_queue(store):
        for name, at in (("wake", 1.0), ("digest", 2.0)):
            await store.set_timer(Timer(talk.id, name, at, Entry("queue", {"text": "in time"})))
        await store.reserve("a key", cost=1.0, burst=1.0)
    if is_token_book(store):
        for owner in ("ada", None):
            digest = hashlib.sha256(str(owner).encode()).hexdigest()
            await store.add_token(Token(digest=digest, owner=owner, may_write=True, created_at=talk.info.created_at))
    photo = Media("image/png", data=bytes(range(256)) * 20, name="a.png")
    await store.create(tell(new_session(id="album"), Message.user("See:", photo), Message.user("Again:", photo)))
