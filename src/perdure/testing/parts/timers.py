"""Timers: items that go into an inbox at a given time, exactly once, whichever process rings or is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from perdure import codec
from perdure.errors import InvalidData, InvalidSessionId, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.message import Media, Message
from perdure.protocols import Archive, BulkErasure, Checkable, Entry, Erasure, Timer, is_queue
from perdure.testing.parts.waiting import QueueingStore, item, waits
from perdure.testing.processes import ask_all, processes
from perdure.testing.samples import fork, new_session, say, tell
from perdure.testing.scene import Contract, in_directory, in_store, refused

NOON = 1_750_000_000.0
PHOTO = bytes(range(256)) * 20


class TimingStore(Erasure, QueueingStore, Archive, Checkable, BulkErasure, Protocol):
    """A store with timers, and with every verb that removes them."""


class Timers(Contract):
    """A timer is kept with its session until it is rung."""

    @in_store
    async def test_a_timer_is_kept_and_found_when_it_is_due(self, store: TimingStore) -> None:
        """Due timers come earliest first. The timers of a session are listed in the order in which they were set."""
        await two_sessions(store)
        given = [timer("a", "late", NOON + 60), timer("a", "early", NOON - 60.5, priority=3), timer("b", "now", NOON)]
        kept = [await store.set_timer(each) for each in given]
        assert [replace(each, id=0) for each in kept] == given
        numbers = [each.id for each in kept]
        assert numbers == sorted(set(numbers))
        assert min(numbers) > 0
        assert [*await store.timers()] == kept
        assert [*await store.timers("a")] == kept[:2]
        assert [*await store.timers(limit=1)] == kept[:1]
        assert [*await store.timers(after=kept[0].id)] == kept[1:]
        assert [*await store.due(NOON - 61)] == []
        assert [*await store.due(NOON)] == [kept[1], kept[2]]
        assert [*await store.due(NOON + 100, limit=2)] == [kept[1], kept[2]]
        assert await waits(store) == []

    @in_store
    async def test_what_a_timer_holds_comes_back(self, store: TimingStore) -> None:
        """A timer comes back with its item, its schedule and time zone, or without an item if it only rings."""
        await two_sessions(store)
        body = {"text": "münchen 🎈\x00\n", "list": [1, 2.5, None, {"deep": True}], "": ""}
        for each in (
            timer("a", "odd name/\x00 'ä", entry=Entry("queue", body, "run-7"), priority=-4),
            timer("a", "digest", entry=item("weekly"), cron="0 7 * * MON", timezone="Europe/Oslo"),
            Timer(session_id=(await loaded(store, "a")).id, name="wake", due=NOON),
        ):
            kept = await store.set_timer(each)
            assert replace(kept, id=0) == each
            assert kept in await store.timers("a")

    @in_store
    async def test_the_same_timer_again_is_the_one_that_is_there(self, store: TimingStore) -> None:
        """Setting the same timer again does not move it. Another one of its name is refused, unless it replaces it."""
        await two_sessions(store)
        first = await store.set_timer(timer("a", "t"))
        assert await store.set_timer(timer("a", "t")) == first
        assert await store.set_timer(timer("a", "t", NOON + 60)) == first
        assert (await store.set_timer(timer("b", "t"))).id != first.id
        for other in (
            timer("a", "t", entry=item("other")),
            timer("a", "t", priority=1),
            timer("a", "t", cron="* * * * *"),
            timer("a", "t", entry=None),
        ):
            with refused(InvalidData):
                await store.set_timer(other)
        assert [*await store.timers("a")] == [first]
        second = await store.set_timer(timer("a", "t", entry=item("other")), replace=True)
        assert [*await store.timers("a")] == [second]
        assert second.id != first.id
        third = await store.set_timer(timer("a", "t", NOON + 60, entry=item("other")), replace=True)
        assert [*await store.timers("a")] == [third]
        assert (third.due, third.id != second.id) == (NOON + 60, True)
        assert await store.set_timer(timer("a", "t", NOON + 60, entry=item("other")), replace=True) == third
        assert not await store.ring(first)

    @in_store
    async def test_a_timer_rings_once(self, store: TimingStore) -> None:
        """A timer rings once: its item is in the inbox with its priority, and ringing it again does nothing."""
        await two_sessions(store)
        kept = await store.set_timer(timer("a", "t", entry=Entry("queue", {"n": 1}, "run-7"), priority=6))
        assert await store.ring(kept)
        assert not await store.ring(kept)
        assert [(each.kind, each.body, each.run) for each in await store.read("a", inbox=True)] == [
            ("queue", {"n": 1}, "run-7")
        ]
        assert [(each.session_id, each.priority, each.count) for each in await store.waiting()] == [("a", 6, 1)]
        assert [*await store.timers()] == []
        again = await store.set_timer(timer("a", "t"))
        assert again.id != kept.id
        assert not await store.ring(kept)

    @in_store
    async def test_a_schedule_rings_again_and_again(self, store: TimingStore) -> None:
        """A schedule stays under its number with another time. Each ringing may give an item of its own."""
        await two_sessions(store)
        kept = await store.set_timer(timer("a", "t", cron="0 * * * *", timezone="UTC"))
        for hour in range(1, 4):
            before, kept = kept, replace(kept, due=NOON + 3600.0 * hour)
            assert await store.ring(before, again=kept.due, entry=item(f"hour {hour}"))
            assert not await store.ring(before, again=kept.due + 1)
            assert [*await store.timers("a")] == [kept]
        said = [each.body["said"] for each in await store.read("a", inbox=True)]
        assert said == ["hour 1", "hour 2", "hour 3"]
        assert await store.ring(kept)
        assert [*await store.timers("a")] == []

    @in_store
    async def test_what_is_due_in_a_full_session_is_put_off(self, store: TimingStore) -> None:
        """If the inbox is full, a schedule skips this time, and a single message is tried again later."""
        await two_sessions(store)
        await store.post("a", item("first"))
        once = await store.set_timer(timer("a", "once"))
        daily = await store.set_timer(timer("a", "daily", cron="0 12 * * *"))
        assert await store.ring(once, most=1, later=NOON + 30) is None
        assert await store.ring(daily, again=NOON + 86_400, most=1, later=NOON + 30) is None
        assert {each.name: each.due for each in await store.timers("a")} == {"once": NOON + 30, "daily": NOON + 86_400}
        assert len(await store.read("a", inbox=True)) == 1
        assert not await store.ring(once, most=2, later=NOON + 60)  # somebody has put it off
        assert await store.ring(replace(once, due=NOON + 30), most=2, later=NOON + 60)
        assert len(await store.read("a", inbox=True)) == 2

    @in_store
    async def test_a_timer_without_an_item_only_rings(self, store: TimingStore) -> None:
        """A timer without an item puts nothing into the inbox."""
        await two_sessions(store)
        kept = await store.set_timer(timer("a", "t", entry=None))
        assert await store.ring(kept)
        assert not await store.ring(kept)
        assert await waits(store) == []
        assert [*await store.read("a", inbox=True)] == []

    @in_store
    async def test_of_those_who_ring_at_once_one_does(self, store: TimingStore) -> None:
        """Of several callers that ring a timer at once, one does it."""
        await two_sessions(store)
        kept = await store.set_timer(timer("a", "t"))
        rung = await asyncio.gather(*(store.ring(kept, again=NOON + 60) for _ in range(10)))
        assert rung.count(True) == 1
        assert len(await store.read("a", inbox=True)) == 1

    @in_store
    async def test_a_timer_rings_whoever_runs_the_session(self, store: TimingStore) -> None:
        """Ringing disturbs no claim and moves no version, and its item is taken like any other."""
        session, _ = await two_sessions(store)
        kept = await store.set_timer(timer("a", "t"))
        claim, _ = await store.claim("a", version=1, owner="ann")
        assert await store.ring(kept)
        saved = await store.save(say(session, "done"), claim=claim, taken=1)
        assert saved.version == 2
        assert await waits(store) == []

    @in_store
    async def test_an_item_of_a_timer_may_show_files(self, store: TimingStore) -> None:
        """A timer keeps the bytes of its files until it rings: the session may have erased them by then."""
        photo = Media("image/png", data=PHOTO, name="a.png")
        session = await store.create(tell(new_session(id="a"), Message.user("See:", photo)))
        shown = session.state.messages[0]
        other = Message.user("New:", Media("image/png", data=PHOTO[1:]))
        for name, message in (("mine", shown), ("new", other)):
            given = timer("a", name, entry=Entry("queue", {"messages": [message.to_dict()], "key": name}))
            assert await store.ring(await store.set_timer(given))
        found = [Message.from_dict(each.body["messages"][0]) for each in await store.read("a", inbox=True)]
        assert [message.parts[1].data for message in found] == [PHOTO, PHOTO[1:]]  # type: ignore[union-attr]  # images
        assert [*await store.check()] == []
        await store.create(new_session(id="stranger"))
        bare = Entry("queue", {"messages": [shown.to_dict()]})
        if shown.file_hashes:  # a store that keeps files apart: to know a hash is not enough
            with refused(InvalidData):
                await store.set_timer(timer("stranger", "t", entry=bare))

    @in_store
    async def test_a_timer_can_be_dropped(self, store: TimingStore) -> None:
        """A dropped timer rings no more. Dropping one that does not exist does nothing."""
        await two_sessions(store)
        kept = await store.set_timer(timer("a", "t"))
        await store.set_timer(timer("b", "t"))
        assert await store.drop_timer("a", "t")
        assert not await store.drop_timer("a", "t")
        assert not await store.drop_timer("a", "other")
        assert not await store.drop_timer("nobody", "t")
        assert not await store.ring(kept)
        assert [each.session_id for each in await store.timers()] == ["b"]

    @in_store
    async def test_timers_go_with_their_session(self, store: TimingStore) -> None:
        """Timers go with their session, however it is erased. New sessions of its id and forks have none of them."""
        for erase in (store.delete, store.delete_tree, lambda key: store.delete_many([key])):
            await two_sessions(store)
            kept = await store.set_timer(timer("a", "t"))
            await erase("a")
            assert [*await store.timers()] == []
            assert [*await store.due(NOON)] == []
            assert not await store.ring(kept)
            again = await store.create(new_session("Another", id="a"))
            assert not await store.ring(kept)
            assert [*await store.timers("a")] == []
            mine = await store.set_timer(timer("a", "t"))
            await store.create(say(fork(again, id="child"), "on"))
            assert [*await store.timers()] == [mine]
            assert [*await store.check()] == []
            for key in ("a", "b", "child"):
                await store.delete(key)

    @in_store
    async def test_timers_outlast_what_is_done_to_their_session(self, store: TimingStore) -> None:
        """Saves, redactions and forgotten versions leave timers as they are."""
        session, _ = await two_sessions(store)
        kept = await store.set_timer(timer("a", "t", cron="0 * * * *"))
        rung = await store.set_timer(timer("a", "rung"))
        assert await store.ring(rung)
        session = await store.save(say(session, "more"))
        await store.redact("a", [session.state.messages[0].id])
        assert [*await store.timers("a")] == [kept]
        forget = getattr(store, "forget", None)
        if forget is not None:
            assert (await forget("a", before=2)).versions >= 1
        assert [*await store.timers("a")] == [kept]
        assert await store.ring(kept, again=NOON + 60)
        assert len(await store.read("a", inbox=True)) == 2
        assert [*await store.check()] == []

    @in_store
    async def test_a_redaction_reaches_what_is_sent_again(self, store: TimingStore) -> None:
        """A redaction reaches schedules, which would bring the text back. A single item of the same text stays."""
        said = Message.user("Call 555-0100 and say hello.")
        session = await store.create(new_session(id="a"))
        await store.save(tell(session, said))
        for name, cron in (("digest", "0 7 * * *"), ("once", None), ("other", "5 7 * * *")):
            text = "Something else." if name == "other" else said.text
            item = Entry("queue", {"id": name, "messages": [plain(Message.user(text))]})
            await store.set_timer(Timer(SessionId("a"), name, 5.0, item, cron=cron))
        (digest,) = [each for each in await store.timers("a") if each.name == "digest"]
        assert await store.ring(digest, again=9.0)
        await store.redact("a", [said.id])
        texts = {each.name: _text_of(each) for each in await store.timers("a")}
        assert texts == {"digest": "[redacted]", "once": said.text, "other": "Something else."}
        (digest,) = [each for each in await store.timers("a") if each.name == "digest"]
        assert (digest.due, digest.cron) == (9.0, "0 7 * * *")
        assert await store.ring(digest, again=20.0)

    @in_store
    async def test_a_redaction_reaches_what_a_schedule_has_left(self, store: TimingStore) -> None:
        """A redaction reaches the items that a schedule has left, and no other items of the same text."""
        said = Message.user("Call 555-0100 and say hello.")
        await store.save(tell(await store.create(new_session(id="a")), said))
        for key in ("schedule:digest@2030-01-01", "evt-1", None):
            again = plain(Message.user(said.text))
            await store.post("a", Entry("queue", {"id": str(key), "key": key, "messages": [again]}))
        await store.post("a", Entry("cancel"))
        await store.redact("a", [said.id])
        *items, _ = await store.read("a", inbox=True)
        left = [each.body["messages"][0]["parts"][0]["text"] for each in items]
        assert left == ["[redacted]", said.text, said.text]

    @in_store
    async def test_a_redaction_reaches_the_message_itself(self, store: TimingStore) -> None:
        """A redaction reaches a timer's item if it is the redacted message itself."""
        said = Message.user("Call 555-0100.")
        await store.save(tell(await store.create(new_session(id="a")), said))
        item = Entry("queue", {"id": "it", "messages": [plain(said)]})
        await store.set_timer(Timer(SessionId("a"), "it", 5.0, item))
        await store.redact("a", [said.id])
        assert [_text_of(each) for each in await store.timers("a")] == ["[redacted]"]

    @in_directory
    async def test_an_archive_leaves_timers_behind(self, where: Path) -> None:
        """An archive has no timers, which would ring in both stores."""
        async with self.open_store(where / "one") as source, self.open_store(where / "two") as target:
            await two_sessions(source)
            kept = await source.set_timer(timer("a", "t"))
            await target.restore(await source.dump("a"))
            assert [*await target.timers()] == []
            assert [*await source.timers()] == [kept]

    @in_directory
    async def test_timers_are_there_when_the_store_is_opened_again(self, where: Path) -> None:
        """Timers and waiting items are there, with all their properties, when the store is opened again."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            await two_sessions(store)
            kept = await store.set_timer(timer("a", "t", priority=3, cron="0 * * * *", timezone="UTC"))
            await store.set_timer(timer("a", "gone"))
            await store.drop_timer("a", "gone")
            await store.post("b", item(), priority=2)
            (waiting,) = await store.waiting()
        async with self.open_store(where) as store:
            assert [*await store.timers()] == [kept]
            assert [*await store.waiting()] == [waiting]
            assert [*await store.due(NOON)] == [kept]
            assert await store.ring(kept, again=NOON + 60)
            assert await waits(store) == ["a", "b"]

    @in_directory
    async def test_of_processes_that_ring_at_once_one_does(self, where: Path) -> None:
        """Of several processes that ring at once, one does it, in every round."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            session, _ = await two_sessions(store)
            async with processes(self, where, session.id, "one", "two") as racers:
                for _ in range(8):
                    await store.set_timer(timer("a", "t"))
                    answers = await ask_all(racers, "ring")
                    assert sorted(answer["did"] for answer in answers) == [0, 1]
            assert len(await store.read("a", inbox=True)) == 8

    @in_directory
    async def test_a_killed_process_leaves_a_timer_rung_or_not(self, where: Path) -> None:
        """After a kill, the item is in the inbox exactly if the timer has moved on."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            session, _ = await two_sessions(store)
            kept = await store.set_timer(timer("a", "t", cron="* * * * *"))
            for delay in range(5):
                async with processes(self, where, session.id, "doomed") as (doomed,):
                    await doomed.tell("ring_on")
                    # Different moments, so that the kill does not always meet the same step.
                    await asyncio.sleep(0.01 + 0.013 * delay)
                    await doomed.kill()
                (left,) = await store.timers("a")
                rung = round(left.due - kept.due)
                assert len(await store.read("a", inbox=True)) == rung
                assert [*await store.check()] == []

    @in_store
    async def test_bad_input_is_refused(self, store: TimingStore) -> None:
        """Bad input is refused before anything is written."""
        await two_sessions(store)
        assert is_queue(store)
        odd: tuple[dict[str, Any], ...] = (
            *(
                {"due": "noon"},
                {"due": float("nan")},
                {"due": -1.0},
                {"due": 9e11},
                {"due": 1e13},
                {"name": 7},
                {"priority": 0.5},
            ),
            *({"entry": "queue"}, {"cron": 7}, {"timezone": b"UTC"}, {"id": -1}),
        )
        for fields in odd:
            with refused(InvalidData, of=str(fields)):
                Timer(**{"session_id": "a", "name": "t", "due": NOON, **fields})
        with refused(InvalidData):
            await store.set_timer(timer("a", "t", entry=Entry("queue", {"set": {1, 2}})))
        with refused(InvalidSessionId):
            await store.set_timer(Timer("no/id", "t", NOON))  # type: ignore[arg-type]  # which is what is refused
        with refused(SessionNotFound):
            await store.set_timer(timer("nobody", "t"))
        with refused(SessionNotFound):
            await store.timers("nobody")
        with refused(InvalidData):
            await store.set_timer("t")  # type: ignore[arg-type]  # which is what is refused
        kept = await store.set_timer(timer("a", "t"))
        for again in ("soon", float("inf")):
            with refused(InvalidData):
                await store.ring(kept, again=again)  # type: ignore[arg-type]  # which is what is refused
        assert [*await store.timers()] == [kept]


_HELLO = item()


def timer(
    session_id: str, name: str, due: float = NOON, *, entry: Entry | None = _HELLO, priority: int = 0, **schedule: str
) -> Timer:
    return Timer(session_id, name, due, entry, priority, **schedule)  # type: ignore[arg-type]  # a text is an id


async def two_sessions(store: Any) -> list[Any]:
    """Create the sessions `a` and `b`."""
    return [await store.create(new_session("Hello", id=name)) for name in ("a", "b")]


async def loaded(store: Any, session_id: str) -> Any:
    return await store.load(session_id)


def plain(message: Message) -> Any:
    return codec.decode_plain(codec.encode_message(message))


def _text_of(timer: Timer) -> str:
    """Return the text of the message that a timer sends."""
    assert timer.entry is not None
    (message,) = timer.entry.body["messages"]
    return str(message["parts"][0]["text"])
