"""The text of an unfinished answer is saved seldom, and never for a short one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import perdure
from perdure import LoopFactory, MemoryStore, SendMessage, SessionRuntime, StoreError
from perdure.errors import ClaimLost
from perdure.loop.cut_off import CutOffAnswer
from perdure.protocols import Claim, Delta, Sketch, said_in
from perdure.sketching import EVERY, Sketcher, pulse_here
from perdure.testing import Chunks, Delay, FailingStore, ScriptedDriver

CLAIM = Claim(perdure.SessionId("s"), 1, 1, "me", 30.0)


class Book:
    """Takes down each saved piece, or raises the given error."""

    def __init__(self) -> None:
        self.pieces: list[Sketch] = []
        self.times: list[float] = []
        self.failures: list[Exception] = []
        self.is_moved = False

    async def sketch(self, claim: Claim, piece: Sketch) -> bool:
        self.times.append(asyncio.get_running_loop().time())
        if self.failures:
            raise self.failures.pop()
        self.pieces += [] if self.is_moved else [piece]
        return not self.is_moved

    async def progress(self, session_id: str, *, after: int = 0) -> Any:
        raise NotImplementedError


def answer() -> tuple[CutOffAnswer, Any]:
    """Return an answer, and the listener that a driver calls with its pieces."""
    written = CutOffAnswer("step", "m")

    async def tell(delta: Delta) -> None:
        return None

    return written, written.listening(None, tell)  # type: ignore[arg-type]  # not used here


async def test_short_answers_are_not_kept_and_leave_no_timer() -> None:
    store = FailingStore(MemoryStore())
    runtime = SessionRuntime(store)
    session = await runtime.create(perdure.AgentDefinition("agent"))
    for _ in range(20):
        await runtime.execute(session.id, SendMessage("Go.", LoopFactory(driver=ScriptedDriver(["Done."]))))
    assert store.calls["sketch"] == 0
    await asyncio.sleep(2.5 * EVERY)
    assert not pulse_here().is_set
    assert not pulse_here().asked


async def test_pieces_are_gathered_between_two_writes() -> None:
    """At most one write in a tenth of a second has all text since the last; the rest comes with the answer."""
    book = Book()
    sketcher, (written, say) = Sketcher(book, CLAIM), answer()
    sketcher.begin("run", written, 7)
    began = time.monotonic()
    for number in range(200):
        await say(Delta("text", f"{number} "))
        await asyncio.sleep(0.004)
    sketcher.end()
    await sketcher.idle()
    assert len(book.pieces) <= (time.monotonic() - began) / EVERY + 1
    assert all(later - before > 0.9 * EVERY for before, later in zip(book.times, book.times[1:], strict=False))
    text = said_in(book.pieces)
    assert written.text.startswith(text)
    assert len(text) > len(written.text) / 2
    assert {(each.run, each.message_id, each.seq) for each in book.pieces} == {("run", "m", 7)}


async def test_an_answer_that_begins_again_is_kept_from_its_beginning() -> None:
    book = Book()
    sketcher, (written, say) = Sketcher(book, CLAIM), answer()
    sketcher.begin("run", written, 0)
    for text in ("one", "two"):
        await say(Delta("restart", ""))
        await say(Delta("text", text))
        await asyncio.sleep(3 * EVERY)
    sketcher.end()
    assert [(each.text, each.start, each.attempt) for each in book.pieces] == [("one", 0, 0), ("two", 0, 1)]


@pytest.mark.parametrize("how", ["moved", "lost"])
async def test_what_the_record_or_the_claim_has_overtaken_is_not_tried_again(how: str) -> None:
    book = Book()
    book.is_moved, book.failures = how == "moved", [ClaimLost("s", 1)] if how == "lost" else []
    sketcher, (written, say) = Sketcher(book, CLAIM), answer()
    sketcher.begin("run", written, 0)
    for _ in range(4):
        await say(Delta("text", "more "))
        await asyncio.sleep(EVERY)
    assert len(book.times) == 1
    assert not pulse_here().asked


async def test_what_could_not_be_kept_is_kept_with_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.sketching._AFTER_FAILURE", 0.0)
    book = Book()
    book.failures = [StoreError("busy"), StoreError("busy")]
    sketcher, (written, say) = Sketcher(book, CLAIM), answer()
    sketcher.begin("run", written, 0)
    for number in range(6):
        await say(Delta("text", f"{number} "))
        await asyncio.sleep(EVERY)
    sketcher.end()
    assert len(book.times) > 2
    assert book.pieces[0].start == 0
    assert written.text.startswith(said_in(book.pieces))


async def test_half_characters_are_kept_as_the_message_will_have_them() -> None:
    book = Book()
    sketcher, (written, say) = Sketcher(book, CLAIM), answer()
    sketcher.begin("run", written, 0)
    await say(Delta("text", "half \ud800, whole \U0001f600"))
    await asyncio.sleep(3 * EVERY)
    sketcher.end()
    assert said_in(book.pieces) == perdure.Message.assistant(written.text).text == "half \ufffd, whole \U0001f600"


async def test_an_answer_that_takes_long_is_dropped_when_it_is_whole() -> None:
    store = MemoryStore()
    async with perdure.connect(store, driver=ScriptedDriver([Chunks(["so ", Delay(0.35, "far")])])) as app:
        run = await (await app.open("s")).start("Go.")
        await asyncio.sleep(0.3)
        assert said_in((await store.progress("s")).sketches) == "so "
        await run.result()
        assert [*await store.check()] == []
        assert (await store.progress("s")).sketches == ()
