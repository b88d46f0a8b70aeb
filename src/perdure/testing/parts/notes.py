"""Notes: entries that are put on record without a claim, also while somebody runs the session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from perdure.errors import InvalidData, InvalidSessionId, RunInterrupted, SessionBusy, SessionNotFound
from perdure.model import ids
from perdure.model.transcript import LogRef
from perdure.protocols import Archive, Checkable, Entry, JournalEntry, Watch
from perdure.testing.clock import FrozenClock
from perdure.testing.parts.journal import JournaledStore, entries, kinds, messages
from perdure.testing.parts.versions import PATH_LIKE
from perdure.testing.samples import fork, new_session, say, texts
from perdure.testing.scene import Contract, for_a_while, in_directory, in_store, refused

LEASE = 30.0


class Notes(Contract):
    """A note is an entry on record like any other, and changes nothing else."""

    @in_store
    async def test_a_note_is_read_by_its_run(self, store: JournaledStore) -> None:
        """Notes are numbered with all other entries. One call may have entries of several runs, or of none."""
        session = await store.create(new_session("Hello"))
        assert await store.note(session.id, entries("a", "b", run="task-1")) == 2
        assert await store.note(session.id, [*entries("c", run="task-2"), *entries("d", run=None)]) == 4
        assert await store.note(session.id, entries("e", run="task-1")) == 5
        assert await store.note(session.id, []) == 5
        assert await kinds(store, session.id) == [*"abcde"]
        assert await store.read(session.id, run="task-1") == [
            JournalEntry(seq, kind, {"said": kind}, "task-1") for seq, kind in ((1, "a"), (2, "b"), (5, "e"))
        ]
        assert await kinds(store, session.id, run="task-2") == ["c"]
        assert [(run.loop_id, run.first.seq, run.last.seq) for run in await store.runs(session.id)] == [
            ("task-1", 1, 5),
            ("task-2", 3, 3),
        ]

    @in_store
    async def test_a_note_moves_no_version(self, store: JournaledStore) -> None:
        """A session that was loaded before a note can still be saved, and looks as it did."""
        session = await store.create(new_session("Hello"))
        listed = [*await store.list()]
        await store.note(session.id, entries("a"))
        assert await store.load(session.id) == session
        assert [*await store.list()] == listed
        saved = await store.save(say(session, "done"), entries=entries("b"))
        assert saved.version == 2
        assert await store.note(session.id, entries("c")) == 3
        assert await kinds(store, session.id) == [*"abc"]

    @in_store
    async def test_a_note_disturbs_nobody_who_runs_the_session(self, store: JournaledStore) -> None:
        """A note does not extend the claim. What its holder writes next goes behind the note, and can be saved."""
        session = await store.create(new_session("Hello"))
        clock = FrozenClock()
        with ids.use(clock=clock):
            claim, begun = await store.claim(
                session.id, version=1, owner="ann", lease=LEASE, messages=messages("m"), entries=entries("start")
            )
            assert await store.note(session.id, entries("noted", run="task")) == 2
            ahead = await store.append(claim, messages=messages("n"), entries=entries("on"))
            assert ahead.seq == 3
            (place,) = ahead.written.values()
            assert place.position == begun.written[next(iter(begun.written))].position + 1
            clock.advance(LEASE - 1)
            await store.note(session.id, entries("late", run="task"))
            clock.advance(2)
            await store.note(session.id, entries("later", run="task"))
            assert not await store.is_claimed(session.id)  # a note extends no lease
            await store.heartbeat(claim)
            with refused(SessionBusy):
                await store.save(say(session, "other"))
            saved = await store.save(say(session, "done"), claim=claim, entries=entries("end"))
        assert texts(saved) == ["Hello", "done"]
        assert await kinds(store, session.id) == ["start", "noted", "on", "late", "later", "end"]
        assert await kinds(store, session.id, run="run-1") == ["start", "on", "end"]
        assert not await store.is_claimed(session.id)

    @in_store
    async def test_a_note_leaves_a_killed_run_to_recovery(self, store: JournaledStore) -> None:
        """A lapsed claim stays, and the process that takes it over finds the run as it was."""
        session = await store.create(new_session("Hello"))
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start"))
        await store.release(claim, interrupted=True)
        await store.note(session.id, entries("noted", run="task"))
        assert await store.is_interrupted(session.id)
        assert [*await store.lapsed()] == [session.id]
        with refused(RunInterrupted):
            await store.claim(session.id, version=1, owner="ben")
        taken, appended = await store.claim(session.id, version=1, owner="ben", take_over=True)
        assert appended.seq == 2
        assert await kinds(store, session.id, run="run-1") == ["start"]
        await store.release(taken)

    @in_store
    async def test_a_note_under_the_name_of_a_run_leaves_its_messages(self, store: JournaledStore) -> None:
        """A note under a run's name extends the run to the note, and leaves its messages in their log."""
        session = await store.create(new_session("Hello"))
        claim, ahead = await store.claim(
            session.id, version=1, owner="ann", messages=messages("m"), entries=entries("a", run="one")
        )
        aside = await store.append(claim, messages=messages("x"), entries=entries("b", run="two"), log="two")
        await store.append(claim, messages=messages("n", "o", "p"), entries=entries("c", run="one"))
        await store.note(session.id, [*entries("d", run="two"), *entries("e", run="one")])
        one, two = await store.runs(session.id)
        assert (one.last.kind, two.last.kind) == ("e", "d")
        for run, appended in ((one, ahead), (two, aside)):
            (place,) = appended.written.values()
            assert (run.log, run.start <= place.position < run.stop) == (place.log, True)
            await store.messages(run.log, run.start, run.stop)

    @in_store
    async def test_a_note_of_a_run_of_its_own_has_the_messages_saved_since(self, store: JournaledStore) -> None:
        """Messages saved between the first and the last note of a name are the messages of that run."""
        session = await store.create(new_session("Hello"))
        await store.note(session.id, entries("start", run="theirs"))
        session = await store.save(say(session, "question"))
        await store.note(session.id, entries("end", run="theirs"))
        (run,) = await store.runs(session.id, run="theirs")
        assert "question" in [message.text for message in await store.messages(run.log, run.start, run.stop)]

    @in_store
    async def test_notes_from_all_sides_are_all_there(self, store: JournaledStore) -> None:
        """Notes made at once, beside a run that appends, are each there once, whole, and in one sequence."""
        session = await store.create(new_session())
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start"))

        async def run() -> None:
            for step in range(12):
                await store.append(claim, messages=messages(f"m{step}"), entries=entries(f"step-{step}"))

        # Each note is two entries, so that one torn by another's would show.
        numbers, *_ = await asyncio.gather(_noted(store, session.id, "task", 12), run(), _read(store, session.id))
        found = await store.read(session.id)
        assert [entry.seq for entry in found] == [*range(1, 1 + 1 + 12 + 24)]
        assert [entry.kind for entry in found if entry.run == "run-1"] == ["start", *(f"step-{n}" for n in range(12))]
        own = [(entry.seq, entry.kind) for entry in found if entry.run == "task"]
        assert own[1::2] == sorted((seq, f"b{n}") for n, seq in enumerate(numbers))
        saved = await store.save(session, claim=claim, entries=entries("end"))
        assert saved.version == 2

    @in_directory
    async def test_others_notes_do_not_disturb_a_run(self, where: Path) -> None:
        """An append works after notes of another instance, of which this one has not heard."""
        if not self.shared:
            return
        async with self.open_store(where) as store, self.open_store(where) as other:
            session = await store.create(new_session())
            claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start"))
            for step in range(4):
                noted = await other.note(session.id, entries(f"note-{step}", run="task"))
                appended = await store.append(claim, messages=messages("m"), entries=entries(f"step-{step}"))
                assert (noted, appended.seq) == (2 * step + 2, 2 * step + 3)
            await asyncio.gather(
                _noted(other, session.id, "task", 8),
                *(store.append(claim, entries=entries(f"more-{step}")) for step in range(8)),
            )
            assert len(await store.read(session.id, run="task")) == 4 + 16
            saved = await store.save(say(session, "done"), claim=claim, entries=entries("end"))
            assert await other.load(session.id) == saved
            assert len(await other.read(session.id)) == 1 + 8 + 16 + 8 + 1

    @in_store
    async def test_a_note_is_heard(self, store: JournaledStore) -> None:
        """A store that reports the growth of a record reports notes, too."""
        session = await store.create(new_session())
        if isinstance(store, Watch):
            heard = asyncio.create_task(store.changed(session.id, 0, 30.0))
            # Time for the other task to begin its wait: a note made before would end it at once, and prove nothing.
            await asyncio.sleep(0.3)
            await store.note(session.id, entries("noted"))
            async with asyncio.timeout(10):
                await heard

    @in_store
    async def test_notes_go_with_their_session(self, store: JournaledStore) -> None:
        """A fork has no notes of its parent's, nor has a new session of the same id. An archive has them all."""
        session = await store.create(new_session("Hello", id="it"))
        await store.note("it", [*entries("a", "b", run="task"), Entry("c", [1, {"d": None}])])
        copy = await store.create(fork(session))
        assert await store.read(copy.id) == []
        found = await store.read("it")
        archived = await store.dump("it") if isinstance(store, Archive) else None
        await store.delete("it")
        with refused(SessionNotFound):
            await store.note("it", entries("a"))
        if isinstance(store, Archive) and archived is not None:
            assert await store.restore(archived)
            assert await store.read("it") == found
            assert await store.note("it", entries("more", run="task")) == 4
            await store.delete("it")
        await store.create(new_session(id="it"))
        assert await store.read("it") == []
        assert await store.note("it", entries("a")) == 1
        if isinstance(store, Checkable):
            assert await store.check() == []

    @in_store
    async def test_what_is_no_note_is_refused(self, store: JournaledStore) -> None:
        """An invalid note is refused, and nothing is written."""
        session = await store.create(new_session())
        given: Any
        for given in (None, "a", Entry("a"), ["a"], [Entry("a"), None], [Entry("a", float("nan"))], [Entry("\ud800")]):
            with refused(InvalidData, of=repr(given)):
                await store.note(session.id, given)
        for odd in PATH_LIKE:
            with refused(InvalidSessionId):
                await store.note(odd, entries("a"))
        for name in ("nobody", "Nobody"):
            with refused(SessionNotFound):
                await store.note(name, entries("a"))
            with refused(SessionNotFound):
                await store.note(name, [])
        assert await store.read(session.id) == []

    @in_store
    async def test_a_cancelled_note_is_whole_or_not_at_all(self, store: JournaledStore) -> None:
        session = await store.create(new_session())
        for delay in range(16):
            attempt = asyncio.create_task(store.note(session.id, entries(f"e{delay}", f"f{delay}", run="task")))
            await for_a_while(delay)
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
        last = await store.note(session.id, entries("last"))
        found = await store.read(session.id)
        assert [entry.seq for entry in found] == [*range(1, last + 1)]
        noted = [int(entry.kind[1:]) for entry in found if entry.kind.startswith("e")]
        assert [entry.kind for entry in found] == [f"{kind}{n}" for n in noted for kind in "ef"] + ["last"]
        (run,) = await store.runs(session.id, run="task") if noted else (None,)
        assert run is None or isinstance(run.log, LogRef)


async def _noted(store: JournaledStore, session_id: str, run: str, count: int) -> list[int]:
    """Make many notes of two entries each at once, and return their numbers, in the order of the notes."""
    return await asyncio.gather(
        *(store.note(session_id, entries(f"a{n}", f"b{n}", run=run)) for n in range(count)),
    )


async def _read(store: JournaledStore, session_id: str) -> None:
    """Read while others write, and check that the entries are whole at every moment."""
    for _ in range(12):
        found = await store.read(session_id)
        assert [entry.seq for entry in found] == [*range(1, len(found) + 1)]
        await store.runs(session_id)
