"""The parts of a history beside a session's own log, and the beginning of a line of forks."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from perdure.errors import SessionNotFound
from perdure.model.lineage import Adoption, SpawnRef
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef
from perdure.protocols import Adopted, Chronicle, Lineage
from perdure.testing.parts.journal import JournaledStore, entries, messages
from perdure.testing.parts.logs import log_of
from perdure.testing.samples import fork, new_session, say, show
from perdure.testing.scene import Contract, in_store, refused


class TellingStore(JournaledStore, Chronicle, Lineage, Protocol):
    """A store that tells of branches, adoptions and lines."""


class Chronicles(Contract):
    """Branches, adoptions and lines are found without reading everything that was said."""

    @in_store
    async def test_the_runs_with_logs_of_their_own_are_told(self, store: TellingStore) -> None:
        """Runs with logs of their own are listed oldest first. Runs that write into the session's log are not."""
        session = await store.create(new_session("Hello"))
        assert not await store.branches(session.id)
        claim, _ = await store.claim(session.id, version=1, owner="ann", entries=entries("start", run="main"))
        for name in ("x", "c"):
            await store.append(claim, messages=messages("aside"), entries=entries("step", run=name), log=name)
        await store.append(claim, messages=messages("here"), entries=entries("end", run="main"))
        found = await store.branches(session.id)
        assert [run.loop_id for run in found] == ["x", "c"]
        assert [*found] == [run for run in await store.runs(session.id) if run.loop_id != "main"]
        with refused(SessionNotFound):
            await store.branches("nobody")

    @in_store
    async def test_an_adoption_tells_what_it_was_the_first_to_show(self, store: TellingStore) -> None:
        """An adoption has the messages that it added, covered ones too, in the order of the view."""
        root = await store.create(new_session("root", id="root"))
        session = await store.create(say(fork(root, id="s"), "own"))
        one = await store.create(say(fork(session, id="one"), "1", "2"))
        session = await store.save(_adopted(session, one, 0))
        one = await store.save(say(one, "3"))
        view = one.state.transcript.cover(2, 4, [Message.user("of 1 and 2")], by="test")
        one = await store.save(show(one, view))
        session = await store.save(say(session, "more"))
        session = await store.save(_adopted(session, one, 2))
        there, own = log_of(await _as_of(store, "one", 2)), (await store.log_of("s"))[0]
        found = [*await store.adoptions("s", session.version)]
        assert found == [Adopted(1, ((there, 0, 2),)), Adopted(2, ((there, 3, 4), (there, 2, 3)))]
        assert [*await store.adoptions("s", 2)] == found[:1]
        assert own not in [stretch[0] for each in found for stretch in each.stretches]
        assert not await store.adoptions("s", 1)

    @in_store
    async def test_logs_have_names_that_mean_the_same_in_every_store(self, store: TellingStore) -> None:
        """A branch's log is named by its session and its run. An unknown log has no name."""
        session = await store.create(new_session("Hello", id="s"))
        claim, _ = await store.claim("s", version=1, owner="ann", entries=entries("start", run="main"))
        await store.append(claim, messages=messages("aside"), entries=entries("step", run="x"), log="x")
        own, aside = (await store.log_of("s"))[0], (await store.log_of("s", "x"))[0]
        stranger = LogRef("another store", own.key)
        assert log_of(session) == own
        assert await store.names_of([own, aside, stranger]) == {own: "s", aside: "s/x"}
        assert await store.names_of([]) == {}

    @in_store
    async def test_a_line_of_forks_begins_where_its_first_session_is_known(self, store: TellingStore) -> None:
        """A line begins with the first session that is known, if only by its name. A sub-agent begins a line."""
        forks = [f"fork-{number}" for number in range(5)]
        session = await store.create(new_session("first", id="first"))
        for number in range(5):
            session = await store.create(say(fork(session, id=f"fork-{number}"), f"said {number}"))
        silent = await store.create(fork(session, id="silent"))
        spawned = say(fork(silent, id="spawned"), "task")
        info = replace(spawned.info, spawn_ref=SpawnRef("silent", "loop", "call", "tool"))
        spawned = await store.create(replace(spawned, info=info))
        assert [*await store.line_of("first")] == []
        assert [*await store.line_of(silent.id)] == ["first", *forks]
        assert [*await store.line_of("spawned")] == []
        assert [*await store.line_of((await store.create(fork(spawned))).id)] == ["spawned"]
        await store.delete("fork-2")
        assert [*await store.line_of("fork-1")] == ["first", "fork-0"]
        assert [*await store.line_of(silent.id)] == ["fork-2", "fork-3", "fork-4"]
        with refused(SessionNotFound):
            await store.line_of("nobody")


def _adopted(session: AgentSession, branch: AgentSession, before: int) -> AgentSession:
    own = 1 if not before else 2
    adoption = Adoption(session.version + 1, own, before)
    return session.with_state(session.state.with_adopted(branch.state.transcript, adoption))


async def _as_of(store: TellingStore, session_id: str, version: int) -> AgentSession:
    session = await store.load(session_id, version)
    assert session is not None, "the session is not there"
    return session
