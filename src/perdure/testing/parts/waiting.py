"""Lists of waiting sessions and of running ones, limits that are counted in the commit, and shared rates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from perdure.errors import InvalidData, OwnerBusy, QueueFull, SessionBusy, SessionNotFound
from perdure.model import ids
from perdure.model.session import SessionStatus
from perdure.protocols import Archive, Entry, Queue, Running, is_queue
from perdure.testing.clock import FrozenClock
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.processes import ask_all, processes
from perdure.testing.samples import new_session, say
from perdure.testing.scene import Contract, in_directory, in_store, refused

LEASE = 30.0


class QueueingStore(JournaledStore, Queue, Archive, Protocol):
    """A store that lists the sessions that wait."""


def item(text: str = "hello") -> Entry:
    return Entry("queue", {"said": text})


class Waits(Contract):
    """Sessions with something in their inboxes are listed in the order in which they must be served."""

    @in_store
    async def test_the_most_urgent_comes_first_then_the_longest_waiting(self, store: QueueingStore) -> None:
        """A session waits since its inbox was last empty, with the highest priority that was posted since."""
        assert isinstance(store, Queue)
        assert is_queue(store)
        clock = FrozenClock(tick=0.0)
        with ids.use(clock=clock):
            began = clock().timestamp()
            for name in ("early", "urgent", "late", "quiet"):
                await store.create(new_session("Hello", id=name, owner=f"of-{name}"))
            assert await waits(store) == []
            for second, (name, priority) in enumerate(
                [("early", 0), ("late", 0), ("urgent", 1), ("early", -3), ("late", 0), ("urgent", 7)]
            ):
                clock.advance(1.0 if second else 0.0)
                await store.post(name, item(), priority=priority)
        found = await store.waiting()
        assert [(each.session_id, each.priority, each.since - began, each.count) for each in found] == [
            ("urgent", 7, 2.0, 2),
            ("early", 0, 0.0, 2),
            ("late", 0, 1.0, 2),
        ]
        assert [each.owner for each in found] == ["of-urgent", "of-early", "of-late"]
        assert await waits(store, limit=2) == ["urgent", "early"]

    @in_store
    async def test_what_was_taken_waits_no_more(self, store: QueueingStore) -> None:
        """An item that a save or an append took waits no more. Later items have their own priority and time."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello", id="it"))
            await store.post("it", item(), priority=9)
            await store.post("it", item("again"), priority=9)
            session = await store.save(say(session, "one"), taken=1)
            assert [(each.priority, each.count) for each in await store.waiting()] == [(9, 1)]
            claim, _ = await store.claim("it", version=2, owner="ann")
            await store.append(claim, taken=2)
            assert await waits(store, idle_only=False) == []
            clock.advance(60.0)
            await store.post("it", item("later"))
            await store.release(claim)
            (found,) = await store.waiting()
            assert (found.priority, found.since, found.count) == (0, clock().timestamp(), 1)
        assert await store.load("it") == session

    @in_store
    async def test_a_session_that_is_run_is_left_to_its_run(self, store: QueueingStore) -> None:
        """A session is not listed while its claim is in force, unless `idle_only=False`. A lapsed one is listed."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            for name in ("a", "b", "c"):
                await store.create(new_session("Hello", id=name))
                await store.post(name, item())
                clock.advance(1.0)
            claim, _ = await store.claim("a", version=1, owner="ann", lease=LEASE)
            killed, _ = await store.claim("c", version=1, owner="ben", lease=LEASE)
            assert await waits(store) == ["b"]
            assert await waits(store, idle_only=False) == ["a", "b", "c"]
            await store.release(killed, interrupted=True)
            assert await waits(store) == ["b", "c"]
            assert await waits(store, limit=1) == ["b"]
            clock.advance(LEASE + 1)
            assert await waits(store) == ["a", "b", "c"]
            await store.release(claim)
            assert await waits(store, limit=2) == ["a", "b"]

    @in_store
    async def test_owners_take_turns(self, store: QueueingStore) -> None:
        """Of equal priority, each owner's first session comes before any second one, however many an owner has."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            for owner, many in (("ann", 5), ("ben", 1), ("eve", 2), (None, 2)):
                for number in range(many):
                    name = f"{owner}-{number}"
                    await store.create(new_session("Hello", id=name, owner=owner))
                    await store.post(name, item())
        names = [each.session_id for each in await store.in_turn(20)]
        assert names[:4] == ["ann-0", "ben-0", "eve-0", "None-0"]
        assert names[4:] == ["ann-1", "eve-1", "None-1", "ann-2", "ann-3", "ann-4"]
        assert await turns(store, 3, after="ann") == ["ben-0", "eve-0", "None-0"]
        assert await turns(store, 4, after="eve") == ["None-0", "ann-0", "ben-0", "eve-0"]
        assert await turns(store, 2, after="zoe") == ["None-0", "ann-0"]
        assert await turns(store, 3, not_of=["ann"]) == ["ben-0", "eve-0", "None-0"]
        assert await turns(store, 2, skip=["ann-0", "ann-1", "ben-0"]) == ["ann-2", "eve-0"]
        assert await turns(store, 1, after="ann", skip=["ben-0"], not_of=["eve"]) == ["None-0"]

    @in_store
    async def test_the_urgent_do_not_wait_for_their_turn(self, store: QueueingStore) -> None:
        """The most urgent comes first between owners, too. Sessions that cannot run now delay no other."""
        for name, owner, priority in (("a1", "ann", 0), ("a2", "ann", 7), ("a3", "ann", 7), ("b", "ben", 7)):
            await store.create(new_session("Hello", id=name, owner=owner))
            await store.post(name, item(), priority=priority)
        assert await turns(store, 9) == ["a2", "b", "a3", "a1"]
        assert await turns(store, 9, after="ann") == ["b", "a2", "a3", "a1"]
        assert await turns(store, 9, skip=["a2", "a3", "b"]) == ["a1"]
        claim, _ = await store.claim("b", version=1, owner="x")
        session = await store.load("a3")
        assert session is not None
        await store.save(session.with_status(SessionStatus.SUSPENDED))
        assert await turns(store, 9) == ["a2", "a1"]
        await store.release(claim)
        assert await turns(store, 9, not_of=["ann"]) == ["b"]
        wrong: tuple[dict[str, Any], ...] = ({"limit": 0}, {"limit": 1, "after": ""}, {"limit": 1, "after": 3})
        for given in wrong:
            with refused(InvalidData):
                await store.in_turn(**given)

    @in_store
    async def test_a_session_that_is_not_active_does_not_wait(self, store: QueueingStore) -> None:
        """A session that is not active does not wait. Its items stay, and wait again once it is active."""
        session = await store.create(new_session("Hello", id="it"))
        await store.post("it", item())
        session = await store.save(session.with_status(SessionStatus.SUSPENDED))
        assert await waits(store, idle_only=False) == []
        assert await store.has_waiting("it")
        await store.post("it", item("while it is suspended"), priority=4)
        await store.save(session.with_status(SessionStatus.ACTIVE))
        assert [(each.session_id, each.priority, each.count) for each in await store.waiting()] == [("it", 4, 2)]

    @in_store
    async def test_what_waits_in_a_suspended_session_is_held(self, store: QueueingStore) -> None:
        """Suspended sessions with items are listed apart, in the same order, until they are active again."""
        for name in ("a", "b", "c"):
            made = await store.create(new_session("Hello", id=name, owner=f"of-{name}"))
            await store.save(made if name == "c" else made.suspended())
        await store.post("a", item())
        await store.post("b", item(), priority=3)
        await store.post("c", item())
        assert [(each.session_id, each.owner, each.count) for each in await store.held()] == [
            ("b", "of-b", 1),
            ("a", "of-a", 1),
        ]
        assert [each.session_id for each in await store.held(1)] == ["b"]
        assert await waits(store) == ["c"]
        held = await store.load("b")
        assert held is not None
        await store.save(held.activated())
        assert [each.session_id for each in await store.held()] == ["a"]

    @in_store
    async def test_the_last_look_sees_what_was_posted(self, store: QueueingStore) -> None:
        """`has_waiting` tells whether something waits in a session, and refuses an unknown one."""
        session = await store.create(new_session("Hello", id="it"))
        assert not await store.has_waiting("it")
        posts = asyncio.gather(*(store.post("it", item(str(n))) for n in range(5)))
        await posts
        assert await store.has_waiting("it")
        await store.save(say(session, "done"), taken=5)
        assert not await store.has_waiting("it")
        with refused(SessionNotFound):
            await store.has_waiting("nobody")

    @in_store
    async def test_an_erased_session_does_not_wait(self, store: QueueingStore) -> None:
        """An erased session does not wait, and neither does a new one of the same id."""
        await store.create(new_session("Hello", id="it"))
        await store.post("it", item(), priority=5)
        await store.delete("it")
        assert await waits(store) == []
        await store.create(new_session("Another", id="it"))
        assert await waits(store) == []
        await store.post("it", item())
        assert [(each.session_id, each.priority) for each in await store.waiting()] == [("it", 0)]

    @in_directory
    async def test_what_was_brought_over_waits_there(self, where: Path) -> None:
        """A restored session waits since its last change, with priority 0: an archive has neither."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            async with self.open_store(where / "one") as source, self.open_store(where / "two") as target:
                await source.create(new_session("Hello", id="it"))
                changed = clock().timestamp()
                clock.advance(5.0)
                await source.post("it", item(), priority=3)
                await target.restore(await source.dump("it"))
                (found,) = await target.waiting()
                assert (found.session_id, found.priority, found.since, found.count) == ("it", 0, changed, 1)

    @in_store
    async def test_a_full_inbox_takes_nothing(self, store: QueueingStore) -> None:
        """A post to a full inbox is refused, and the error says how long to wait. Only waiting items count."""
        session = await store.create(new_session("Hello", id="it", owner="ada"))
        for n in range(2):
            assert await store.post("it", item(), most=2) == n + 1
        with refused(QueueFull) as full:
            await store.post("it", item("too much"), most=2)
        error = full.error
        assert (error.session_id, error.owner, error.limit, error.retry_after > 0) == ("it", None, 2, True)
        assert len(await store.read("it", inbox=True)) == 2
        await store.save(say(session, "done"), taken=1)
        assert await store.post("it", item(), most=2) == 3
        assert await store.post("it", item()) == 4  # who sets no limit has none
        with refused(QueueFull):
            await store.post("it", item(), most=0)

    @in_store
    async def test_an_owner_has_a_limit_over_all_sessions(self, store: QueueingStore) -> None:
        """The limit of an owner counts the items in all their sessions, whatever their status, and no others."""
        for name, owner in (("a", "ada"), ("b", "ada"), ("c", "ben"), ("d", None)):
            await store.create(new_session("Hello", id=name, owner=owner))
        for name in ("a", "a", "b"):
            await store.post(name, item(), most_of_owner=3)
        for name in ("a", "b"):
            with refused(QueueFull) as full:
                await store.post(name, item("too much"), most_of_owner=3)
            assert (full.error.session_id, full.error.owner, full.error.limit) == (name, "ada", 3)
        assert await store.post("c", item(), most_of_owner=1) == 1
        for _ in range(3):
            await store.post("d", item(), most_of_owner=1)
        assert {each.session_id: each.count for each in await store.waiting()} == {"a": 2, "b": 1, "c": 1, "d": 3}

    @in_store
    async def test_limits_hold_for_those_who_post_at_once(self, store: QueueingStore) -> None:
        """Limits are counted in the commit: of twenty posts at once, as many are taken as there is room for."""
        for name in ("a", "b", "c"):
            await store.create(new_session("Hello", id=name, owner="ada"))
        same = await asyncio.gather(*(store.post("a", item(), most=5) for _ in range(20)), return_exceptions=True)
        assert sorted(type(each).__name__ for each in same) == ["QueueFull"] * 15 + ["int"] * 5
        posts = (store.post("abc"[n % 3], item(), most_of_owner=8) for n in range(20))
        several = await asyncio.gather(*posts, return_exceptions=True)
        assert sorted(type(each).__name__ for each in several) == ["QueueFull"] * 17 + ["int"] * 3
        assert sum(each.count for each in await store.waiting()) == 8

    @in_store
    async def test_bad_input_is_refused(self, store: QueueingStore) -> None:
        """Bad input is refused before anything is written."""
        await store.create(new_session("Hello", id="it"))
        odd: tuple[dict[str, Any], ...] = (
            *({"priority": 1.5}, {"priority": True}, {"priority": 2**31}, {"most": -1}, {"most": "1"}),
            {"most_of_owner": 1.0},
        )
        for options in odd:
            with refused(InvalidData, of=str(options)):
                await store.post("it", item(), **options)
        for limit in (0, -1, 1.5, None):
            with refused(InvalidData, of=str(limit)):
                await store.waiting(limit)  # type: ignore[arg-type]  # which is what is refused
        with refused(InvalidData):
            await store.claim("it", version=1, owner="ann", per_owner=0)
        assert not await store.has_waiting("it")


class Runners(Contract):
    """Running sessions are listed, and an owner's runs at once are limited."""

    @in_store
    async def test_every_claim_is_listed(self, store: QueueingStore) -> None:
        """Every claim is listed with its holder, its beginning, its end, and whether it has lapsed."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            for name, owner in (("a", "ada"), ("b", None), ("c", "ada")):
                await store.create(new_session("Hello", id=name, owner=owner))
            assert [*await store.running()] == []
            began = clock().timestamp()
            claim, _ = await store.claim("a", version=1, owner="host:1", lease=LEASE)
            other, _ = await store.claim("b", version=1, owner="host:2", lease=LEASE)
            clock.advance(5.0)
            await store.heartbeat(claim)
            await store.release(other, interrupted=True)
            assert [*await store.running()] == [
                Running(claim.session_id, "ada", "host:1", began, began + 5.0 + LEASE, False),
                Running(other.session_id, None, "host:2", began, 0.0, True),
            ]
            clock.advance(LEASE + 1.0)
            assert [each.lapsed for each in await store.running()] == [True, True]
            await store.release(claim)
            assert [each.session_id for each in await store.running()] == ["b"]

    @in_store
    async def test_an_owner_has_so_many_runs_at_once(self, store: QueueingStore) -> None:
        """A run over the owner's limit is refused, and nothing is written. Lapsed claims do not count."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            for name, owner in (("a", "ada"), ("b", "ada"), ("c", "ada"), ("d", "ben"), ("e", None), ("f", None)):
                await store.create(new_session("Hello", id=name, owner=owner))
            one, _ = await store.claim("a", version=1, owner="me", lease=LEASE)
            await store.claim("b", version=1, owner="me", lease=LEASE, per_owner=2)
            with refused(OwnerBusy) as busy:
                await store.claim("c", version=1, owner="me", per_owner=2, entries=[Entry("start")])
            error = busy.error
            assert issubclass(OwnerBusy, SessionBusy)
            assert (error.session_id, error.owner, error.limit) == ("c", "ada", 2)
            assert not await store.is_claimed("c")
            assert [*await store.read("c")] == []
            for free in ("d", "e", "f"):
                await store.claim(free, version=1, owner="me", per_owner=1)
            await store.release(one, interrupted=True)
            again, _ = await store.claim("c", version=1, owner="me", lease=LEASE, per_owner=2)
            await store.release(again)
            with refused(OwnerBusy):
                await store.claim("c", version=1, owner="me", per_owner=1)
            clock.advance(LEASE + 1.0)
            await store.claim("a", version=1, owner="me", per_owner=1, take_over=True)

    @in_store
    async def test_the_limit_holds_for_those_who_claim_at_once(self, store: QueueingStore) -> None:
        """The limit is counted in the commit: of eight claims at once, three are taken."""
        for n in range(8):
            await store.create(new_session("Hello", id=f"s{n}", owner="ada"))
        claims = (store.claim(f"s{n}", version=1, owner="me", per_owner=3) for n in range(8))
        found = await asyncio.gather(*claims, return_exceptions=True)
        assert sorted(type(each).__name__ for each in found) == ["OwnerBusy"] * 5 + ["tuple"] * 3
        assert len(await store.running()) == 3

    @in_store
    async def test_a_rate_gives_places_one_behind_the_other(self, store: QueueingStore) -> None:
        """A rate gives as many places at once as the burst holds, and after a silence as many again."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            waits = [await store.reserve("key", cost=0.5, burst=1.5) for _ in range(5)]
            assert waits == [0.0, 0.0, 0.0, 0.5, 1.0]
            assert await store.reserve("other", cost=0.5, burst=0.5) == 0.0
            clock.advance(1.0)
            # The last place that was given is now. The next one is half a second behind it.
            assert await store.reserve("key", cost=0.5, burst=1.5) == 0.5
            clock.advance(3600.0)
            assert [await store.reserve("key", cost=0.5, burst=1.5) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
            assert await store.reserve("key", cost=2.25, burst=1.5) == 2.75

    @in_store
    async def test_a_place_that_is_too_far_off_is_not_taken(self, store: QueueingStore) -> None:
        """A caller that cannot wait that long is told how long it would be, and takes no place."""
        with ids.use(clock=FrozenClock(tick=0.0)):
            assert await store.reserve("key", cost=2.0, burst=1.0, most=0.5) == 1.0
            assert await store.reserve("key", cost=2.0, burst=2.0, most=0.0) == 0.0
            for most in (0.0, 1.9):
                assert await store.reserve("key", cost=2.0, burst=2.0, most=most) == 2.0
            assert await store.reserve("key", cost=2.0, burst=2.0, most=2.0) == 2.0
            assert await store.reserve("key", cost=2.0, burst=2.0, most=2.0) == 4.0
            assert await store.reserve("key", cost=2.0, burst=2.0) == 4.0
        odd: tuple[dict[str, Any], ...] = ({"cost": -1.0, "burst": 1.0}, {"cost": "1", "burst": 1.0})
        for options in (*odd, {"cost": 1.0, "burst": None}):
            with refused(InvalidData, of=str(options)):
                await store.reserve("key", **options)

    @in_store
    async def test_places_are_given_once(self, store: QueueingStore) -> None:
        """Twenty callers that ask at once get twenty different places."""
        with ids.use(clock=FrozenClock()):
            places = await asyncio.gather(*(store.reserve("key", cost=0.25, burst=0.25) for _ in range(20)))
        assert sorted(places) == [n * 0.25 for n in range(20)]

    @in_directory
    async def test_processes_share_a_rate(self, where: Path) -> None:
        """Two processes that take fifty places of 20 ms cannot be quicker than the rate allows."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            session = await store.create(new_session("Hello"))
            async with processes(self, where, session.id, "one", "two") as racers:
                started = asyncio.get_running_loop().time()
                waits = [answer["did"] for _ in range(25) for answer in await ask_all(racers, "reserve")]
                took = asyncio.get_running_loop().time() - started
        assert max(waits) + took >= 48 * 0.02 - 0.001  # two may come at once
        # A place is free at once only in the burst, or if its time has come while the others were asking.
        assert waits.count(0.0) <= 3 + took / 0.02

    @in_directory
    async def test_the_claim_of_a_process_that_is_gone_does_not_count(self, where: Path) -> None:
        """The claim of a killed process is listed as lapsed, and counts for no limit. Its session waits again."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            for name in ("a", "b"):
                await store.create(new_session("Hello", id=name, owner="ada"))
            await store.post("a", item())
            async with processes(self, where, "a", "doomed") as (doomed,):
                await doomed.ask("load")
                assert "did" in await doomed.ask("claim")
                with refused(OwnerBusy):
                    await store.claim("b", version=1, owner="me", per_owner=1)
                assert await waits(store) == []
                await doomed.kill()
            assert [(each.session_id, each.holder, each.lapsed) for each in await store.running()] == [
                ("a", "doomed", True)
            ]
            assert await waits(store) == ["a"]
            await store.claim("b", version=1, owner="me", per_owner=1)


async def turns(store: Any, limit: int, **options: Any) -> list[str]:
    """Return the ids of the sessions whose turn it is, in order."""
    return [each.session_id for each in await store.in_turn(limit, **options)]


async def waits(store: Any, **options: Any) -> list[str]:
    """Return the ids of the sessions that wait, in order."""
    return [each.session_id for each in await store.waiting(**options)]
