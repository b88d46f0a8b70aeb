"""The costs of a verb as a session grows: constant, or in proportion to its result. They are counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.counted import CountingStore, Counts

import perdure
from perdure import MemoryStore, Message, SendParallel, Sessions, Transcript, Undo, WriteMetadata, codec
from perdure.actions.inbox import OLDER_AT_ONCE, QUEUE, STEER, Inbox, item_of
from perdure.actions.send import waiting_messages
from perdure.testing import ScriptedDriver
from perdure.testing.samples import new_session, say, show


def connected(store: CountingStore) -> Sessions:
    return perdure.connect(store, driver=ScriptedDriver(lambda _: "yes"))


async def _record(runs: int, groups: int = 0) -> Counts:
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        for number in range(runs):
            await chat.send(f"say {number}")
        for number in range(groups):
            action = SendParallel(f"which {number}?", sessions.loops, configs=["offline", "offline"])
            await sessions.execute("a", action)
        with store.counted() as counts:
            record = await chat.record()
        assert len(record.loops) == runs + 2 * groups
    return counts


async def test_a_record_takes_as_many_statements_for_many_runs_as_for_few() -> None:
    """The ends of all runs of a page are read together."""
    few, many = await _record(5), await _record(50)
    assert many.statements == few.statements
    assert many.read.total() < 11 * few.read.total()


async def test_a_record_of_parallel_runs_takes_as_many_statements_for_many_groups_as_for_few() -> None:
    """The selected branches are read for all groups together."""
    few, many = await _record(2, groups=2), await _record(2, groups=20)
    assert many.statements == few.statements


async def _drained(queued: int) -> Counts:
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        inbox = Inbox(store, "a")
        for number in range(queued):
            await inbox.post(QUEUE, item_of([Message.user(f"say {number}")]))
        waiting = waiting_messages(sessions.runtime, "a", sessions.loops)
        assert waiting is not None
        with store.counted() as counts:
            await sessions.runtime.follow(waiting)
            await sessions.runtime.idle()
        assert [message.text for message in await chat.history()][::2] == [f"say {number}" for number in range(queued)]
    return counts


async def test_a_queued_message_costs_the_same_however_many_wait_behind_it() -> None:
    """No run reads the whole inbox: it reads the next items, once when it begins and once between two steps."""
    few, many = await _drained(40), await _drained(200)
    assert many.statements / 200 <= 1.1 * few.statements / 40
    assert many.read["inbox"] <= 200 * (2 * OLDER_AT_ONCE + 8)


async def test_a_steering_message_behind_a_long_queue_is_sent_once() -> None:
    """A run that does not reach it leaves it to be sent in its turn."""
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        inbox, queued = Inbox(store, "a"), 2 * OLDER_AT_ONCE + 3
        for number in range(queued):
            await inbox.post(QUEUE, item_of([Message.user(f"say {number}")]))
        await inbox.post(STEER, item_of([Message.user("look left")]))
        waiting = waiting_messages(sessions.runtime, "a", sessions.loops)
        assert waiting is not None
        await sessions.runtime.follow(waiting)
        await sessions.runtime.idle()
        said = [message.text for message in await chat.history() if message.role == "user"]
        assert [text for text in said if text != "look left"] == [f"say {number}" for number in range(queued)]
        assert said.count("look left") == 1
        assert not await inbox.items()


async def _undone(versions: int) -> Counts:
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        for text in ("one", "two"):
            await chat.inject({"role": "user", "content": text})
        for number in range(versions):
            await sessions.execute("a", WriteMetadata("number", number))
        with store.counted() as counts:
            assert await chat.undo() == 1
    return counts


async def test_an_undo_costs_the_same_however_many_versions_show_the_view() -> None:
    """Each version names the one that its view is from."""
    few, many = await _undone(2), await _undone(60)
    assert many.statements == few.statements


async def test_an_undo_looks_for_a_view_that_a_version_does_not_name() -> None:
    """Versions of an older release name none; each of these is read, as before."""
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        for text in ("one", "two"):
            await chat.inject({"role": "user", "content": text})
        for _ in range(3):
            session = await chat.session()
            await store.save(replace(session, state=replace(session.state, shown_since=0)))
        assert await chat.undo() == 1
        assert await chat.undo() == 0


async def test_an_undo_does_not_trust_a_state_that_was_made_past_its_methods() -> None:
    """Such a state may name a version with another view."""
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        for text in ("one", "two"):
            await chat.inject({"role": "user", "content": text})
        session = await chat.session()
        view = Transcript.of([Message.user("three")])
        context = replace(session.state.context, transcript=view)
        await store.save(replace(session, state=replace(session.state, context=context)))
        after = await sessions.execute("a", Undo())
        assert [message.text for message in after.state.messages] == ["one", "two"]


async def _nested(levels: int) -> CountingStore:
    """Return a store with a session whose beginning is covered that number of times."""
    store = CountingStore()
    session = await store.create(new_session("A secret.", "Noted.", id="a"))
    for level in range(levels):
        session = say(session, f"said at {level}")
        view = session.state.transcript
        summary = [Message.user(f"summary {level}")]
        session = await store.save(show(session, view.cover(0, len(view) - 1, summary, by="test")))
    return store


async def _dump(store: CountingStore) -> None:
    await store.dump("a")


async def _restore(store: CountingStore) -> None:
    assert await MemoryStore().restore(await store.dump("a"))


async def _check(store: CountingStore) -> None:
    assert not await store.check()


async def _redact(store: CountingStore) -> None:
    first = (await store.messages((await store.log_of("a"))[0], 0, 1))[0]
    assert await store.redact("a", [first.id]) == 1


@pytest.mark.parametrize("verb", [_dump, _restore, _check, _redact])
async def test_nested_compactions_cost_what_they_are(verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is read once, for any number of versions that show it and blocks that cover it."""
    decoded, decode_plain = 0, codec.decode_plain

    def counting(raw: bytes) -> Any:
        nonlocal decoded
        decoded += len(raw)
        return decode_plain(raw)

    async def cost(levels: int) -> int:
        nonlocal decoded
        store = await _nested(levels)
        decoded = 0
        await verb(store)
        return decoded

    monkeypatch.setattr(codec, "decode_plain", counting)
    assert await cost(240) < 4 * 1.2 * await cost(60)


async def _history(sessions: Sessions, store: CountingStore) -> tuple[Counts, int]:
    with store.counted() as counts:
        said = await sessions.history("a")
    return counts, len(said)


async def _history_of_runs(runs: int) -> Counts:
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        for number in range(runs):
            await chat.send(f"say {number}")
        counts, said = await _history(sessions, store)
        assert said == 2 * runs
    return counts


async def test_a_history_reads_no_run_that_has_no_log_of_its_own() -> None:
    few, many = await _history_of_runs(3), await _history_of_runs(60)
    assert many.statements == few.statements
    assert not many.read["run"]
    assert not many.read["batch"]


async def _history_of_adoptions(adoptions: int) -> Counts:
    store = CountingStore()
    async with connected(store) as sessions:
        chat = await sessions.open("a")
        await chat.inject({"role": "user", "content": "first"})
        for number in range(adoptions):
            branch = await chat.fork()
            await branch.inject({"role": "user", "content": f"there {number}"})
            await chat.adopt(branch)
            await chat.inject({"role": "user", "content": f"here {number}"})
        store.evict("a")
        counts, said = await _history(sessions, store)
        assert said == 1 + 2 * adoptions
    return counts


async def test_a_history_with_adoptions_costs_what_it_returns() -> None:
    """An adopted view is not read whole: it repeats all views before it."""
    few, many = await _history_of_adoptions(10), await _history_of_adoptions(100)
    assert many.statements < 10 * 1.1 * few.statements
    assert many.read["msg"] < 10 * 1.2 * few.read["msg"]


async def _line(sessions: Sessions, depth: int) -> str:
    """Make a fork of a fork of a fork, each with a message. Return the id of the last."""
    last = (await sessions.open("a")).id
    for number in range(depth):
        await sessions.inject(last, {"role": "user", "content": f"say {number}"})
        last = (await sessions.fork(last)).id
    await sessions.inject(last, {"role": "user", "content": "last"})
    return last


async def _forked(depth: int) -> tuple[Counts, Counts]:
    store = CountingStore()
    async with connected(store) as sessions:
        last = await _line(sessions, depth)
        with store.counted() as forking:
            fork = await sessions.fork(last)
        assert await fork.length() == depth + 1
        with store.counted() as looking:
            found = await sessions.ancestry(fork.id)
        assert (found.root, found.line[-1], len(found.line)) == ("a", last, depth + 1)
    return forking, looking


async def test_a_fork_and_its_ancestry_take_as_many_statements_however_long_the_line_is() -> None:
    """The parts of all ancestors in a fork's view are read together."""
    few, many = await _forked(4), await _forked(40)
    assert many[0].statements <= few[0].statements + 1
    assert many[1].statements <= few[1].statements + 2


async def test_a_fork_writes_as_much_however_long_the_line_is() -> None:
    """It notes only its part of the last fork; older parts are noted there. A long view also has a value."""
    few, many = await _forked(5), await _forked(60)
    assert many[0].written <= few[0].written + 2
    assert many[0].bytes < few[0].bytes + 256


async def test_the_line_of_a_session_that_was_made_anew_ends() -> None:
    """It may be a fork of its own fork."""
    async with connected(CountingStore()) as sessions:
        await sessions.open("a")
        await sessions.fork("a", "b")
        await sessions.erase("a")
        await sessions.fork("b", "a")
        assert (await sessions.ancestry("a")).root == "b"
