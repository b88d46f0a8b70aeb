"""Rules and holds: no verb erases a session under hold, and sessions that are due are erased unless they are in use."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Protocol

from msgspec.structs import replace

from perdure.errors import InvalidData, PerdureError, SessionHeld
from perdure.model.lineage import SpawnRef
from perdure.model.message import Message
from perdure.model.retention import Retention, keep_mark
from perdure.model.session import AgentSession
from perdure.protocols import (
    BulkErasure,
    Checkable,
    Due,
    Entry,
    Erased,
    Erasure,
    Forgets,
    Queue,
    Retains,
    Timer,
    Versions,
    WhyLeft,
)
from perdure.testing.parts.journal import JournaledStore
from perdure.testing.samples import fork, new_session, say, texts
from perdure.testing.scene import Contract, in_store, refused

HOLD = "hold:case-7"


class RetainingStore(Erasure, JournaledStore, Retains, Forgets, BulkErasure, Versions, Queue, Checkable, Protocol):
    """A store with every verb that erases, and with holds."""


class Retaining(Contract):
    """A hold protects a session from every verb that erases. `retire` erases due sessions, and says which stay."""

    @in_store
    async def test_no_verb_erases_what_is_under_hold(self, store: RetainingStore) -> None:
        """Every verb raises SessionHeld, which names the tag, or leaves the session as it is."""
        held = await _grown(store, "s", tags=(HOLD,))
        said = held.state.messages[0].id
        for verb in (
            lambda: store.delete("s"),
            lambda: store.delete("s", expected=held.info),
            lambda: store.delete_tree("s"),
            lambda: store.forget("s", before=3),
            lambda: store.redact("s", [said]),
        ):
            with refused(SessionHeld) as caught:
                await verb()
            assert (caught.error.session_id, caught.error.tag, caught.error.holder) == ("s", HOLD, "s")
        assert list(await store.delete_many(["s"])) == []
        assert _reasons(await store.retire([Due.of(held.info)])) == {"s": WhyLeft.HOLD}
        assert _reasons(await store.prune(Due.of(held.info), before=3)) == {"s": WhyLeft.HOLD}
        await store.gc()
        assert texts(await store.load("s", 1)) == ["one"]
        assert texts(await store.load("s")) == ["one", "two", "three"]
        assert await store.check() == []

    @in_store
    async def test_a_hold_that_is_lifted_holds_nothing(self, store: RetainingStore) -> None:
        """Once the tag is removed, every verb erases again."""
        held = await _grown(store, "s", tags=("hold",))
        lifted = await store.save(held.with_tags(()))
        assert await store.redact("s", [lifted.state.messages[0].id]) == 1
        assert (await store.forget("s", before=3)).versions == 2
        assert await store.delete_tree("s") == ["s"]

    @in_store
    async def test_only_the_tags_of_a_hold_hold(self, store: RetainingStore) -> None:
        """Only `hold` and tags that begin with `hold:` hold a session, not tags that look like them."""
        for tag in ("holding", "on-hold", "Hold", "vip"):
            await store.create(new_session("one", id=tag, tags=(tag,)))
        assert sorted(await store.delete_many(["holding", "on-hold", "Hold", "vip"])) == [
            *("Hold", "holding", "on-hold", "vip")
        ]

    @in_store
    async def test_a_hold_holds_sub_agents(self, store: RetainingStore) -> None:
        """A caller's hold is also on the sessions that it has spawned, and on theirs. The error names its holder."""
        await store.create(new_session("one", id="root", tags=(HOLD,)))
        child = await store.create(_child_of("root", "child", "two", "three"))
        await store.create(_child_of("child", "grandchild", "four"))
        for session_id in ("child", "grandchild"):
            with refused(SessionHeld) as caught:
                await store.delete(session_id)
            assert (caught.error.session_id, caught.error.holder) == (session_id, "root")
        with refused(SessionHeld):
            await store.redact("child", [child.state.messages[0].id])
        with refused(SessionHeld):
            await store.forget("child", before=5)
        assert list(await store.delete_many(["grandchild", "child", "root"])) == []
        assert await store.holds(["root", "child", "grandchild"]) == dict.fromkeys(
            ("root", "child", "grandchild"), HOLD
        )

    @in_store
    async def test_a_hold_on_a_sub_agent_keeps_the_tree(self, store: RetainingStore) -> None:
        """A hold on a sub-agent protects the tree from verbs that erase trees. The caller alone can be erased."""
        root = await store.create(new_session("one", id="root"))
        await store.create(_child_of("root", "child", "two", tags=(HOLD,)))
        assert [*await store.delete_many(["child", "root"])] == []
        with refused(SessionHeld) as caught:
            await store.delete_tree("root")
        assert caught.error.session_id == "child"
        left = (await store.retire([Due.of(root.info)])).left
        assert [(each.session_id, each.why, "child" in each.detail) for each in left] == [("root", WhyLeft.HOLD, True)]
        assert await store.holds(["root", "child"]) == {"child": HOLD}
        await store.delete("root")
        assert texts(await store.load("child")) == ["two"]

    @in_store
    async def test_a_running_sub_agent_keeps_its_callers(self, store: RetainingStore) -> None:
        """`delete_many` leaves a session that is being run, its caller, and the caller of that. Others are erased."""
        await store.create(new_session("one", id="root"))
        await store.create(_child_of("root", "child", "two"))
        running = await store.create(_child_of("child", "grandchild", "three"))
        await store.create(_child_of("root", "sibling", "four"))
        claim, _ = await store.claim(running.id, version=1, owner="a runner")
        asked = ["root", "grandchild", "child", "sibling"]
        assert list(await store.delete_many(asked)) == ["sibling"]
        assert [texts(await store.load(each)) for each in ("root", "child", "grandchild")] == [
            ["one"],
            ["two"],
            ["three"],
        ]
        assert await store.check() == []
        await store.release(claim)
        assert sorted(await store.delete_many(asked)) == ["child", "grandchild", "root"]

    @in_store
    async def test_a_hold_on_a_fork(self, store: RetainingStore) -> None:
        """The parent of a held fork can be erased, and the fork keeps all that it shows. None of it can be redacted."""
        parent = await _grown(store, "parent")
        held = await store.create(replace(fork(parent, id="fork"), info=_tagged(fork(parent, id="fork"))))
        shared = parent.state.messages[0].id
        with refused(SessionHeld) as caught:
            await store.redact("parent", [shared])
        assert caught.error.session_id == "fork"
        await store.save(say(parent, "own"))
        await store.forget("parent", before=4)
        await store.delete("parent")
        await store.gc()
        assert texts(await store.load("fork")) == texts(held) == ["one", "two", "three"]
        assert await store.check() == []

    @in_store
    async def test_a_hold_on_a_parent(self, store: RetainingStore) -> None:
        """A fork of a held parent can be erased, and the parent keeps all. The parent's messages are not redacted."""
        parent = await _grown(store, "parent", tags=(HOLD,))
        branch = await store.create(fork(parent, id="fork"))
        branch = await store.save(say(branch, "mine"))
        with refused(SessionHeld):
            await store.redact("fork", [parent.state.messages[0].id])
        assert await store.redact("fork", [branch.state.messages[-1].id]) == 1
        assert await store.delete_tree("fork") == ["fork"]
        assert texts(await store.load("parent")) == ["one", "two", "three"]
        assert await store.check() == []

    @in_store
    async def test_a_hold_or_an_erasure_comes_first(self, store: RetainingStore) -> None:
        """If a hold and an erasure come at the same time, one of them is refused."""
        for number in range(6):
            made = await store.create(new_session("one", id=f"s{number}"))
            verbs = (store.save(made.with_tags((HOLD,))), store.delete_tree(made.id))
            # Both orders: the one that is started first usually comes first.
            outcomes = await asyncio.gather(*(verbs if number % 2 else verbs[::-1]), return_exceptions=True)
            assert sum(isinstance(each, PerdureError) for each in outcomes) == 1, outcomes
            assert await store.exists(made.id) == any(isinstance(each, SessionHeld) for each in outcomes)

    @in_store
    async def test_rules_of_sessions_are_found(self, store: RetainingStore) -> None:
        """Each rule of sessions is listed once, however many sessions have it, and leads to its sessions."""
        month, year = Retention(idle=timedelta(days=30)), Retention(age=timedelta(days=365), versions=3)
        for number, rule in enumerate((month, year, month, None, month)):
            await store.create(new_session("one", id=f"s{number}", keep=rule, tags=("vip",)))
        assert sorted(await store.own_rules(), key=repr) == sorted((month, year), key=repr)
        assert sorted(info.id for info in await store.list(tag=keep_mark(month))) == ["s0", "s2", "s4"]
        [info] = await store.list(id="s1")
        assert (info.keep, info.tags) == (year, ("vip",))
        session = await store.load("s1")
        assert session is not None
        await store.save(session.with_keep(None))
        assert list(await store.own_rules()) == [month]
        assert await store.check() == []

    @in_store
    async def test_sessions_with_many_versions_are_found(self, store: RetainingStore) -> None:
        """Sessions with more older versions than a number are listed in pages. Forgotten versions do not count."""
        for name, count in (("a", 2), ("b", 6), ("c", 9), ("d", 9)):
            session = await store.create(new_session("one", id=name))
            for _ in range(count - 1):
                session = await store.save(say(session, "more"))
        await store.forget("c", before=8)
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page, after = await store.overgrown(3, after=after, limit=2)
            found += [info.id for info in page]
        assert found == ["b", "d"]
        with refused(InvalidData):
            await store.overgrown(-1)

    @in_store
    async def test_what_is_due_goes(self, store: RetainingStore) -> None:
        """Due sessions go with those of their sub-agents. Messages that forks show stay."""
        root = await store.create(new_session("one", "two", id="root"))
        await store.create(_child_of("root", "child", "three"))
        other = await _grown(store, "other")
        await store.create(fork(root, id="fork"))
        erased = await store.retire([Due.of(root.info), Due.of(other.info)])
        assert sorted(erased.erased) == ["child", "other", "root"]
        assert (erased.versions, erased.messages, list(erased.left)) == (5, 4, [])
        assert erased.bytes > 0
        assert texts(await store.load("fork")) == ["one", "two"]
        assert [info.id for info in await store.list()] == ["fork"]
        assert await store.check() == []

    @in_store
    async def test_what_goes_on_stays(self, store: RetainingStore) -> None:
        """A session stays if it runs, waits for anything or has changed, or if one of its sub-agents' sessions does."""
        due: list[Due] = []
        for name in ("running", "interrupted", "queued", "timer", "approval", "changed", "gone", "caller", "goes"):
            session = await store.create(new_session("one", id=name))
            if name == "approval":
                session = await store.save(session.with_state(session.state.with_execution_started()).suspended())
            due.append(Due.of(session.info))
        await store.claim("running", version=1, owner="runner")
        claim, _ = await store.claim("interrupted", version=1, owner="runner")
        await store.release(claim, interrupted=True)
        await store.post("queued", Entry("message", {"text": "hi"}))
        await store.set_timer(Timer(session_id="timer", name="later", due=4_000_000_000.0))  # type: ignore[arg-type]
        changed = await store.load("changed")
        assert changed is not None
        await store.save(say(changed, "two"))
        await store.delete("gone")
        await store.create(_child_of("caller", "busy", "two"))
        await store.claim("busy", version=1, owner="runner")
        erased = await store.retire(due)
        assert list(erased.erased) == ["goes"]
        assert _reasons(erased) == {
            "running": WhyLeft.RUNNING,
            "interrupted": WhyLeft.INTERRUPTED,
            "queued": WhyLeft.QUEUED,
            "timer": WhyLeft.TIMER,
            "approval": WhyLeft.APPROVAL,
            "changed": WhyLeft.CHANGED,
            "gone": WhyLeft.CHANGED,
            "caller": WhyLeft.RUNNING,
        }
        assert await store.exists("busy")

    @in_store
    async def test_a_rehearsal_tells_what_will_be(self, store: RetainingStore) -> None:
        """A rehearsal has the figures of the real run, also for sessions that share messages, and changes nothing."""
        batches, prunes = await _tangle(store)
        before = await _seen_of(store)
        told = await store.rehearse(batches, prunes)
        assert await _seen_of(store) == before
        assert told.versions > 8
        assert told.messages > 3
        real = [await store.retire(batch) for batch in batches]
        real += [await store.prune(due, before=version) for due, version in prunes]
        assert Erased.joined(real) == told
        assert await store.check() == []

    @in_store
    async def test_older_versions_go(self, store: RetainingStore) -> None:
        """`prune` forgets older versions, unless the session has changed."""
        session = await _grown(store, "s")
        due = Due.of(session.info)
        assert _reasons(await store.prune(replace(due, version=1), before=2)) == {"s": WhyLeft.CHANGED}
        pruned = await store.prune(due, before=3)
        assert (list(pruned.pruned), pruned.versions) == (["s"], 2)
        [info] = await store.list(id="s")
        assert (info.first_version, info.version) == (3, 4)
        assert _reasons(await store.prune(due, before=3)) == {"s": WhyLeft.CHANGED}


def _reasons(erased: Erased) -> dict[str, WhyLeft]:
    return {each.session_id: each.why for each in erased.left}


def _tagged(session: AgentSession) -> Any:
    return replace(session.info, tags=(HOLD,))


async def _grown(store: RetainingStore, session_id: str, **info: Any) -> AgentSession:
    """Create a session with three versions, each of which shows one more message."""
    session = await store.create(new_session("one", id=session_id, **info))
    for text in ("two", "three"):
        session = await store.save(say(session, text))
    return session


def _child_of(parent: str, session_id: str, *said: str, **info: Any) -> AgentSession:
    spawn = SpawnRef(parent_session_id=parent, parent_loop_id="loop", tool_call_id="call", tool_name="clerk")
    return new_session(*said, id=session_id, parent_id=parent, spawn_ref=spawn, **info)


async def _tangle(store: RetainingStore) -> tuple[list[list[Due]], list[tuple[Due, int]]]:
    """Create sessions that show each other's messages. Return the due ones in batches, and those to prune."""
    first = await _grown(store, "first")
    second = await store.create(fork(first, id="second"))
    second = await store.save(say(second, "own", "words"))
    third = await store.create(fork(second, id="third"))
    kept = await store.create(fork(first, id="kept"))
    kept = await store.save(say(kept, *("long words " * 20).split()))
    for text in ("more", "of", "it"):
        kept = await store.save(say(kept.with_state(kept.state.with_transcript(kept.state.transcript.trim(2))), text))
    await store.create(_child_of("second", "child", "asked", "told"))
    held = await store.create(new_session("held", id="held", tags=(HOLD,)))
    lone = await store.create(new_session("alone", id="lone"))
    lone = await store.save(lone.with_state(lone.state.with_messages(Message.user("file"))))
    batches = [[Due.of(first.info), Due.of(held.info)], [Due.of(second.info)], [Due.of(third.info), Due.of(lone.info)]]
    return batches, [(Due.of(kept.info), kept.version), (Due.of(held.info), 1)]


async def _seen_of(store: RetainingStore) -> list[tuple[str, int, list[str]]]:
    found = [(str(info.id), info.version, texts(await store.load(info.id))) for info in await store.list()]
    return sorted(found)
