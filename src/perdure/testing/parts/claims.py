"""Claims: each session has one runner, fenced by an epoch, until its lease or its process ends."""

from __future__ import annotations

import sys
from pathlib import Path

from perdure.errors import ClaimLost, InvalidData, RunInterrupted, SessionBusy, SessionConflict, SessionNotFound
from perdure.model import ids
from perdure.protocols import Claim, Entry
from perdure.testing.clock import FrozenClock
from perdure.testing.parts.journal import JournaledStore, entries, kinds, messages, spoken
from perdure.testing.parts.together import ROUNDS
from perdure.testing.processes import ask_all, processes
from perdure.testing.samples import new_session, note, say, texts
from perdure.testing.scene import Contract, in_directory, in_store, refused

LEASE = 30.0
NAN = float("nan")


class Claims(Contract):
    """A session has one runner at a time, and a runner that was taken over can write nothing."""

    @in_store
    async def test_a_claim_says_what_was_taken(self, store: JournaledStore) -> None:
        """A claim has the session, version, owner and lease, and its epoch grows from claim to claim."""
        session = await store.create(new_session("Hello"))
        first, appended = await store.claim(session.id, version=1, owner="ann", lease=LEASE)
        assert (first.session_id, first.version, first.owner, first.lease) == (session.id, 1, "ann", LEASE)
        assert (dict(appended.written), appended.seq) == ({}, 0)
        await store.release(first)
        second, _ = await store.claim(session.id, version=1, owner="ben")
        assert second.epoch > first.epoch

    @in_store
    async def test_what_cannot_be_claimed(self, store: JournaledStore) -> None:
        """An unknown session is not found. A version that has moved is a conflict, and nothing is written."""
        session = await store.save(await store.create(new_session("Hello")))
        with refused(SessionNotFound):
            await store.claim("nobody", version=1, owner="ann")
        for version in (0, 1, 3):
            with refused(SessionConflict):
                await store.claim(
                    session.id, version=version, owner="ann", messages=messages("x"), entries=entries("start")
                )
        assert await store.read(session.id) == []
        assert (await store.save(say(session, "free"))).version == 3

    @in_store
    async def test_a_claimed_session_is_busy(self, store: JournaledStore) -> None:
        """While a run holds a session, others can neither claim, save nor erase it. They can read it."""
        session = await store.create(new_session("Hello"))
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        with refused(SessionBusy) as busy:
            await store.claim(session.id, version=1, owner="ben", messages=messages("x"), entries=entries("start"))
        assert busy.error.owner == "ann"
        with refused(SessionBusy):
            await store.save(say(session, "no"))
        with refused(SessionBusy):
            await store.delete(session.id)
        assert await store.load(session.id) == session
        assert (await store.list()).all() == (session.info,)
        assert await store.read(session.id) == []
        await store.heartbeat(claim)

    @in_store
    async def test_a_released_session_is_free(self, store: JournaledStore) -> None:
        """After `release`, others can claim and save, and the old claim can write nothing."""
        session = await store.create(new_session("Hello"))
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        # Twice: a caller may not know whether its first release has arrived.
        await store.release(claim)
        await store.release(claim)
        await _assert_lost(store, claim)
        assert (await store.save(say(session, "free"))).version == 2

    @in_store
    async def test_a_run_given_up_is_left_to_be_recovered(self, store: JournaledStore) -> None:
        """`release(interrupted=True)` leaves a lapsed claim: the run is found and taken over, and blocks all others."""
        session = await store.create(new_session("Hello"))
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start"))
        await store.release(claim, interrupted=True)
        assert (await store.is_claimed(session.id), await store.is_interrupted(session.id)) == (False, True)
        assert list(await store.lapsed()) == [session.id]
        with refused(RunInterrupted):
            await store.save(say(session, "meanwhile"))
        with refused(RunInterrupted):
            await store.claim(session.id, version=1, owner="ben")
        taken, _ = await store.claim(session.id, version=1, owner="ben", take_over=True)
        await store.release(claim, interrupted=True)
        assert await store.is_claimed(session.id)
        await store.release(taken)
        await store.release(taken, interrupted=True)
        assert not await store.is_interrupted(session.id)

    @in_store
    async def test_a_late_release_frees_nobody_elses_claim(self, store: JournaledStore) -> None:
        """Releasing a claim that was lost leaves the new one in force."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            old, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE)
            clock.advance(LEASE + 1)
            new, _ = await store.claim(session.id, version=1, owner="ben", lease=LEASE, take_over=True)
            await store.release(old)
            with refused(SessionBusy):
                await store.save(session)
            await store.heartbeat(new)

    @in_store
    async def test_a_claim_lapses_with_its_lease(self, store: JournaledStore) -> None:
        """A claim lapses when its lease ends. Heartbeats and appends extend the lease."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE)
            for extend in (lambda: store.heartbeat(claim), lambda: store.append(claim, entries=entries("on"))):
                clock.advance(LEASE - 1)
                await extend()
                clock.advance(LEASE - 1)
                with refused(SessionBusy):
                    await store.claim(session.id, version=1, owner="ben")
            clock.advance(2)
            taken, _ = await store.claim(session.id, version=1, owner="ben", take_over=True)
            assert taken.epoch > claim.epoch

    @in_store
    async def test_a_claim_without_a_lease_has_lapsed_when_it_is_there(self, store: JournaledStore) -> None:
        """A claim with a lease of 0 lapses at once. Its entries are on record, and its run can be taken over."""
        session = await store.create(new_session("Hello"))
        claim, _ = await store.claim(session.id, version=1, owner="ann", lease=0.0, entries=entries("start"))
        assert (await store.is_claimed(session.id), await store.is_interrupted(session.id)) == (False, True)
        assert await store.lapsed() == [session.id]
        with refused(RunInterrupted):
            await store.save(session)
        taken, _ = await store.claim(session.id, version=1, owner="ben", lease=LEASE, take_over=True)
        await store.release(claim, interrupted=True)
        assert await store.is_claimed(session.id)
        await _assert_lost(store, claim)
        assert await kinds(store, session.id) == ["start"]
        await store.release(taken)

    @in_store
    async def test_a_lapsed_claim_that_nobody_took_still_holds(self, store: JournaledStore) -> None:
        """A lease decides when others may take over. Until somebody does, a slow runner can continue."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE)
            clock.advance(10 * LEASE)
            # The epoch is still the newest, and the epoch fences, not the time.
            await store.append(claim, messages=messages("late"))
            with refused(SessionBusy):
                await store.claim(session.id, version=1, owner="ben")
            clock.advance(10 * LEASE)
            assert (await store.save(say(session, "done"), claim=claim)).version == 2

    @in_store
    async def test_who_was_taken_over_can_write_nothing(self, store: JournaledStore) -> None:
        """Append, heartbeat and save raise ClaimLost under an old epoch, and write nothing."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            old, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE, entries=entries("start"))
            clock.advance(LEASE + 1)
            new, _ = await store.claim(
                session.id, version=1, owner="ben", lease=LEASE, entries=entries("again"), take_over=True
            )
            await _assert_lost(store, old)
            with refused(ClaimLost):
                await store.save(say(session, "no"), claim=old, entries=entries("no"))
            assert await kinds(store, session.id) == ["start", "again"]
            assert await store.load(session.id) == session
            appended = await store.append(new, messages=messages("mine"))
            assert await spoken(store, *appended.written.values()) == ["mine"]

    @in_store
    async def test_a_killed_run_is_not_passed_over(self, store: JournaledStore) -> None:
        """After the lease, neither a save nor another run can ignore the claim: the killed run's work would be lost."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE, entries=entries("start"))
            clock.advance(LEASE + 1)
            with refused(RunInterrupted):
                await store.save(say(session, "meanwhile"))
            with refused(RunInterrupted):
                await store.claim(session.id, version=1, owner="ben", entries=entries("another"))
            assert await store.load(session.id) == session
            assert await kinds(store, session.id) == ["start"]
            late = await store.save(say(session, "late"), claim=claim)
            assert (await store.save(say(late, "after it"))).version == 3

    @in_store
    async def test_who_takes_over_takes_what_is_there(self, store: JournaledStore) -> None:
        """`take_over` also claims a free session, and is refused while another claim is in force."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE, take_over=True)
            with refused(SessionBusy):
                await store.claim(session.id, version=1, owner="ben", take_over=True)
            await store.heartbeat(claim)

    @in_store
    async def test_a_lapsed_claim_gives_way_to_erasure(self, store: JournaledStore) -> None:
        """After the lease the session can be erased. The old claim is lost, also on a new session of the same id."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello", id="again"))
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE)
            clock.advance(LEASE + 1)
            await store.delete(session.id)
            await _assert_lost(store, claim)
            anew = await store.create(new_session("anew", id="again"))
            await _assert_lost(store, claim)
            taken, _ = await store.claim("again", version=1, owner="ben", lease=LEASE)
            await _assert_lost(store, claim)
            await store.release(claim)
            await store.heartbeat(taken)
            with refused(ClaimLost, SessionConflict):
                await store.save(note(anew, "by", "ann"), claim=claim)
            assert await store.read("again") == []

    @in_store
    async def test_whether_a_session_is_claimed(self, store: JournaledStore) -> None:
        """A session is claimed until the claim is released or its lease ends. In the latter case it is lapsed."""
        clock = FrozenClock()
        with ids.use(clock=clock):
            session = await store.create(new_session("Hello"))
            await store.create(new_session("never claimed"))
            assert await store.is_claimed(session.id) is False
            assert await store.is_interrupted(session.id) is False
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE)
            assert (await store.is_claimed(session.id), [*await store.lapsed()]) == (True, [])
            assert await store.is_interrupted(session.id) is False
            clock.advance(LEASE + 1)
            assert (await store.is_claimed(session.id), [*await store.lapsed()]) == (False, [session.id])
            assert await store.is_interrupted(session.id) is True
            await store.release(claim)
            assert await store.is_interrupted(session.id) is False
            assert await store.is_interrupted("nobody") is False
            assert (await store.is_claimed(session.id), [*await store.lapsed()]) == (False, [])
            with refused(SessionNotFound):
                await store.is_claimed("nobody")

    @in_store
    async def test_bad_content_is_refused_and_nothing_is_taken(self, store: JournaledStore) -> None:
        """A claim, append, save or post with content that is not JSON raises InvalidData, and writes nothing."""
        session = await store.create(new_session("Hello"))
        bad_entry, bad_message = entries("fine", "bad"), messages("fine", "bad")
        bad_entry[1] = Entry("bad", {"cost": NAN})
        bad_message[1] = bad_message[1].with_metadata(cost=NAN)
        with refused(InvalidData):
            await store.claim(session.id, version=1, owner="ann", entries=bad_entry)
        with refused(InvalidData):
            await store.claim(session.id, version=1, owner="ann", messages=bad_message)
        claim, _ = await store.claim(session.id, version=1, owner="ann")
        with refused(InvalidData):
            await store.append(claim, messages=messages("fine"), entries=bad_entry)
        with refused(InvalidData):
            await store.append(claim, messages=bad_message, entries=entries("fine"))
        with refused(InvalidData):
            await store.save(session, claim=claim, entries=bad_entry)
        for odd in (bad_entry[1], Entry("half \ud800"), Entry("kind", run="half \ud800"), Entry("kind", object())):
            with refused(InvalidData):
                await store.post(session.id, odd)
            with refused(InvalidData):
                await store.append(claim, entries=[odd])
        assert await store.read(session.id) == await store.read(session.id, inbox=True) == []
        assert await store.load(session.id) == session
        saved = await store.save(say(session, "fine"), claim=claim)
        assert texts(saved) == ["Hello", "fine"]

    @in_directory
    async def test_instances_respect_each_others_claims(self, where: Path) -> None:
        """A claim holds in every instance, and each instance sees what was written under it."""
        if not self.shared:
            return
        async with self.open_store(where) as one, self.open_store(where) as two:
            session = await one.create(new_session("Hello"))
            assert await two.load(session.id) == session
            claim, _ = await one.claim(session.id, version=1, owner="ann", entries=entries("start"))
            with refused(SessionBusy):
                await two.save(say(session, "no"))
            with refused(SessionBusy):
                await two.claim(session.id, version=1, owner="ben")
            await two.post(session.id, entries("cancel")[0])
            assert await kinds(one, session.id, inbox=True) == ["cancel"]
            assert await kinds(two, session.id) == ["start"]
            saved = await one.save(say(session, "done"), claim=claim)
            assert await two.load(session.id) == saved
            await two.claim(session.id, version=2, owner="ben")

    @in_directory
    async def test_of_processes_that_claim_at_once_one_wins(self, where: Path) -> None:
        """If several processes claim a session, one gets it, and the others are told that it is busy."""
        if not self.shared:
            return
        async with self.open_store(where) as store:
            session = await store.create(new_session("Hello"))
            async with processes(self, where, session.id, "one", "two") as racers:
                epochs = []
                for _ in range(ROUNDS):
                    assert await ask_all(racers, "load") == [{"did": 1}] * 2
                    answers = await ask_all(racers, "claim")
                    assert sorted(answer.get("error", "won") for answer in answers) == ["SessionBusy", "won"]
                    epochs += [answer["did"] for answer in answers if "did" in answer]
                    await ask_all(racers, "release")
                assert epochs == sorted(set(epochs))

    @in_directory
    async def test_the_claim_of_a_process_that_is_gone_lapses_at_once(self, where: Path) -> None:
        """The claim of a process killed on this machine lapses at once (on Linux, where that can be found out)."""
        if not self.shared or not sys.platform.startswith("linux"):
            return
        async with self.open_store(where) as store:
            session = await store.create(new_session("Hello"))
            async with processes(self, where, session.id, "doomed") as (doomed,):
                await doomed.ask("load")
                assert "did" in await doomed.ask("claim")
                with refused(SessionBusy):
                    await store.claim(session.id, version=1, owner="ann", lease=LEASE, take_over=True)
                assert [*await store.lapsed()] == []
                await doomed.kill()
            assert (await store.is_claimed(session.id), [*await store.lapsed()]) == (False, [session.id])
            with refused(RunInterrupted):
                await store.save(say(session, "free"))
            with refused(RunInterrupted):
                await store.claim(session.id, version=1, owner="ann", lease=LEASE)
            claim, _ = await store.claim(session.id, version=1, owner="ann", lease=LEASE, take_over=True)
            assert (await store.save(say(session, "mine"), claim=claim)).version == 2


async def _assert_lost(store: JournaledStore, claim: Claim) -> None:
    with refused(ClaimLost):
        await store.append(claim, messages=messages("no"), entries=entries("no"))
    with refused(ClaimLost):
        await store.heartbeat(claim)
