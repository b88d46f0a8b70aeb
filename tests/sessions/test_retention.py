"""Sessions are kept as long as rules say, on every store; a hold keeps a session whatever the rules say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash.addresses import address_of, store_at
from tests.sessions.test_forgetting import HELPER, answer, pay

import perdure
from perdure import (
    ConfigurationError,
    HoldChanged,
    InvalidData,
    MemoryStore,
    Retention,
    RetentionPolicy,
    RetentionReport,
    SessionConflict,
    SessionHeld,
    SessionNotFound,
    Sessions,
    TagSession,
)
from perdure.archive import fsck
from perdure.model import ids
from perdure.testing import FrozenClock, ScriptedDriver
from perdure.testing.outcomes import Outcome, note

DAY = timedelta(days=1)
every_store = pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])


def store_of(kind: str, where: Path) -> Any:
    return MemoryStore() if kind == "memory" else store_at(address_of(kind, where))


@asynccontextmanager
async def connected(kind: str, where: Path, **options: Any) -> AsyncIterator[tuple[Sessions, FrozenClock]]:
    """Yield sessions whose clock moves by a millisecond at each look. In the end the store must have no problem."""
    clock = FrozenClock(tick=0.001)
    with ids.use(clock=clock):
        given = {"driver": ScriptedDriver(answer), "tools": [pay], "subagents": [HELPER], "compaction": None, **options}
        async with perdure.connect(store_of(kind, where), **given) as app:
            yield app, clock
            assert (await fsck(app.store)).problems == ()


def days(clock: FrozenClock, count: float) -> None:
    clock.advance(count * DAY.total_seconds())


async def applied(app: Sessions, policy: Any = None) -> RetentionReport:
    """Apply rules, after a dry run with the same report."""
    told = await app.apply_retention(policy, dry_run=True)
    report = await app.apply_retention(policy)
    for name in ("sessions", "versions", "messages", "bytes", "erased", "pruned", "left"):
        assert getattr(told, name) == getattr(report, name), name
    return report


async def names(app: Sessions) -> set[str]:
    return {str(info.id) for info in await app.headers()}


def why(report: RetentionReport) -> dict[str, str]:
    return {each.session_id: each.why.value for each in report.left}


@every_store
async def test_every_rule(kind: str, tmp_path: Path) -> None:
    """Rules limit age, idle time and the number of versions: for all, a tag, an owner or one session."""
    policy = RetentionPolicy(
        default=Retention(idle=30 * DAY),
        tags={"audit": Retention(age=100 * DAY), "brief": Retention(idle=5 * DAY), "vip": Retention()},
        owners={"ada": Retention(idle=60 * DAY, versions=2)},
    )
    async with connected(kind, tmp_path, keep=policy) as (app, clock):
        tagged = {"plain": (), "audit": ("audit",), "brief": ("brief",), "both": ("brief", "audit"), "vip": ("vip",)}
        for name, tags in tagged.items():
            await (await app.open(name, tags=tags)).send("hello")
        hers = await app.of("ada").open("hers")
        for text in "abcd":
            await hers.send(text)
        own = await app.open("own", tags=("brief",))
        await own.retain(Retention(idle=40 * DAY))
        short = await app.open("short", tags=("vip",))
        await short.retain(Retention(age=2 * DAY))
        hidden = await app.open("hidden")
        await hidden.send("hello")
        await hidden.delete()

        report = await applied(app)
        assert (report.erased, [*report.pruned], report.versions) == ((), [hers.id], 3)
        assert not (await applied(app)).pruned
        for moved, gone in [(3, {"short"}), (3, {"brief"}), (25, {"plain", "hidden"}), (10, {"own"}), (20, {hers.id})]:
            before = await names(app)
            days(clock, moved)
            report = await applied(app)
            assert {*report.erased} == gone
            assert await names(app) == before - gone
        assert await names(app) == {"audit", "both", "vip"}
        await (await app.open("audit")).send("still here")  # does not make it younger
        days(clock, 40)
        assert {*(await applied(app)).erased} == {"audit", "both"}
        assert not await app.store.exists("hidden")


@every_store
async def test_what_goes_on_stays_until_it_has_ended(kind: str, tmp_path: Path) -> None:
    """A session that waits for a person, or has messages or timers, is left and reported; the next round erases it."""
    async with connected(kind, tmp_path, keep=Retention(idle=DAY)) as (app, clock):
        waits = await app.open("approval")
        await waits.send("pay it")
        queued = await app.open("queued")
        await queued.suspend()
        await queued.enqueue("later")
        timed = await app.open("timed")
        await timed.enqueue("much later", at=clock() + 100 * DAY)
        caller = await app.open("caller")
        await caller.send("help me")
        await app.hold((await app.store.list(parent="caller")).all()[0].id, "case")
        days(clock, 2)
        report = await applied(app)
        assert report.erased == ()
        assert why(report) == {"approval": "approval", "queued": "queued", "timed": "timer", "caller": "hold"}
        await waits.deny("no")
        await app.drop_waiting("queued")
        await app.drop_timer("timed", (await app.timers())[0].name)
        days(clock, 2)
        assert {*(await applied(app)).erased} == {"approval", "queued", "timed"}


@every_store
async def test_forks_stay_whole(kind: str, tmp_path: Path) -> None:
    """Messages of an erased session that a fork shows are kept, until the last such fork is erased."""
    async with connected(kind, tmp_path, keep=Retention(idle=10 * DAY)) as (app, clock):
        parent = await app.open("parent")
        for text in ("one", "two"):
            await parent.send(text)
        days(clock, 6)
        fork = await parent.fork("fork")
        days(clock, 6)
        report = await applied(app)
        assert (report.erased, report.messages) == (("parent",), 0)
        assert [message.text for message in await fork.history()] == ["one", "About one", "two", "About two"]
        days(clock, 6)
        report = await applied(app)
        assert (report.erased, report.messages) == (("fork",), 4)


@every_store
async def test_a_hold_is_on_record(kind: str, tmp_path: Path) -> None:
    """The times when it was placed and lifted stay on record, though versions are forgotten in between."""
    async with connected(kind, tmp_path) as (app, _):
        chat = await app.open("s")
        await chat.send("one")
        await chat.hold("case-7")
        await chat.hold()
        await chat.send("two")
        with pytest.raises(SessionHeld) as caught:
            await chat.erase()
        assert "lift_hold('s')" in str(caught.value)
        with pytest.raises(InvalidData, match="it has hold:case-7, hold"):
            await chat.lift_hold("case-8")
        await chat.lift_hold("case-7")
        await app.execute("s", TagSession(remove=("hold",)))
        await chat.send("three")
        await chat.forget(before=(await chat.session()).version)
        told = [event async for event in chat.events() if isinstance(event, HoldChanged)]
        assert [(each.placed, each.lifted) for each in told] == [
            (("hold:case-7",), ()),
            (("hold",), ()),
            ((), ("hold:case-7",)),
            ((), ("hold",)),
        ]
        assert all(each.at.year == 2025 for each in told)
        assert await chat.erase() == ["s"]


async def test_a_fork_begins_with_its_parents_hold_and_rule(tmp_path: Path) -> None:
    """They are the fork's own then: a hold that is lifted from one session stays on the other."""
    async with connected("memory", tmp_path) as (app, _):
        parent = await app.open("parent")
        await parent.hold()
        await parent.retain(Retention(idle=DAY))
        fork = await parent.fork("fork")
        assert (await app.info("fork")).keep == Retention(idle=DAY)
        await parent.lift_hold()
        await parent.erase()
        with pytest.raises(SessionHeld):
            await fork.erase()


async def test_bulk_verbs_leave_what_is_under_hold_and_tell(tmp_path: Path) -> None:
    """The receipt of an erased owner names the session with the tag; a purge does not count it."""
    async with connected("sqlite", tmp_path) as (app, clock):
        ada = app.of("ada")
        for name in ("a", "b"):
            await (await ada.open(name)).send("help")
        held = (await ada.info("a")).id
        await app.hold(held, "case-7")
        receipt = await app.erase_owner("ada")
        child = (await app.store.list(parent=held)).all()[0].id
        assert receipt.held == {held: "hold:case-7", child: "hold:case-7"}
        assert {*receipt.left} == {held, child}
        assert not receipt.is_complete
        assert len(receipt.erased) == 2
        days(clock, 3)
        assert await app.purge(older_than=DAY) == 0
        assert await app.holds([held]) == {held: "hold:case-7"}
        await app.lift_hold(held, "case-7")
        assert (await app.erase_owner("ada")).is_complete


async def test_an_owner_reaches_only_its_own_sessions(tmp_path: Path) -> None:
    """An owner cannot set or apply rules for others, and cannot lift a hold."""
    async with connected("memory", tmp_path) as (app, clock):
        ada, bob = app.of("ada"), app.of("bob")
        hers, his = await ada.open("s"), await bob.open("s")
        for sessions, other in ((ada, his.id), (bob, hers.id)):
            for verb in (sessions.retain(other, None), sessions.hold(other), sessions.holds([other])):
                with pytest.raises(SessionNotFound):
                    await verb
        await hers.hold()
        with pytest.raises(ConfigurationError, match="without an owner"):
            await hers.lift_hold()
        with pytest.raises(ConfigurationError, match="cannot lift a hold"):
            await ada.execute("s", TagSession(remove=("hold",)))
        days(clock, 2)
        assert (await bob.apply_retention(Retention(idle=DAY))).erased == (his.id,)
        report = await ada.apply_retention(Retention(idle=DAY))
        assert (report.erased, why(report)) == ((), {hers.id: "hold"})
        await app.lift_hold(hers.id)


@every_store
async def test_two_at_once(kind: str, tmp_path: Path) -> None:
    """Two processes that apply the same rules erase each session once, and neither fails."""
    store = store_of(kind, tmp_path)
    async with connected(kind, tmp_path) as (app, clock):
        for number in range(8):
            await (await app.open(f"s{number}")).send("help")
        days(clock, 2)
        if kind == "memory":
            reports = await asyncio.gather(*(app.apply_retention(Retention(idle=DAY)) for _ in range(2)))
        else:
            async with perdure.connect(store) as other:
                reports = await asyncio.gather(*(each.apply_retention(Retention(idle=DAY)) for each in (app, other)))
        erased = [session_id for report in reports for session_id in report.erased]
        assert len(erased) == len({*erased}) == 16
        assert {each.why.value for report in reports for each in report.left} <= {"changed"}


async def test_one_that_is_used_meanwhile_stays(tmp_path: Path) -> None:
    """A message between the look and the erasure keeps a session."""
    async with connected("memory", tmp_path) as (app, clock):
        chat = await app.open("s")
        days(clock, 2)
        real = app.store.retire

        async def after_a_message(due: Any) -> Any:
            await chat.send("wait")
            return await real(due)

        app.store.retire = after_a_message  # type: ignore[attr-defined,method-assign]  # another process comes between
        report = await app.apply_retention(Retention(idle=DAY))
        assert (report.erased, why(report)) == ((), {"s": "changed"})


async def test_a_clock_that_is_set_back_erases_nothing(tmp_path: Path) -> None:
    """A session that seems to be from the future is not old."""
    async with connected("memory", tmp_path, keep=Retention(idle=DAY, age=DAY)) as (app, clock):
        await (await app.open("s")).send("one")
        days(clock, -400)
        report = await applied(app)
        assert (report.erased, report.left) == ((), ())


async def test_nothing_is_done_without_rules(tmp_path: Path) -> None:
    """Without rules, or with a rule that names nothing, everything is kept."""
    async with connected("memory", tmp_path) as (app, clock):
        await (await app.open("s")).send("one")
        days(clock, 4000)
        for policy in (None, Retention(), RetentionPolicy(), RetentionPolicy(tags={"x": Retention(idle=DAY)})):
            report = await applied(app, policy)
            assert (report.sessions, report.versions, report.left) == (0, 0, ())


async def test_wrong_rules_are_refused(tmp_path: Path) -> None:
    """InvalidData names what is wrong, before any session is read."""
    with pytest.raises(InvalidData, match=r"\$\.keep"):
        perdure.connect("memory://", keep="30d")  # type: ignore[arg-type]  # which is refused
    async with connected("memory", tmp_path) as (app, _):
        await app.open("s")
        for verb in (app.retain("s", "30d"), app.apply_retention(30), app.apply_retention(dry_run="yes")):  # type: ignore[arg-type]  # which are refused
            with pytest.raises(InvalidData):
                await verb
        with pytest.raises(SessionConflict):
            await app.expecting(7).retain("s", Retention())


def test_the_blocking_face_has_the_same() -> None:
    """No verb is awaited there."""
    with perdure.connect_blocking("memory://", model="offline", keep=Retention(idle=DAY)) as app:
        chat = app.open("s")
        chat.retain(Retention(idle=2 * DAY))
        chat.hold()
        assert app.apply_retention(dry_run=True).sessions == 0


def test_policy_files(tmp_path: Path) -> None:
    """A TOML file has the rules; an error in it names the file and the field."""
    file = tmp_path / "retention.toml"
    file.write_text('idle = "90d"\n[tags.audit]\nage = "7y"\n[owners."ada lovelace"]\nversions = 3\n')
    assert perdure.load_policy(file) == RetentionPolicy(
        default=Retention(idle=90 * DAY),
        tags={"audit": Retention(age=7 * 365 * DAY)},
        owners={"ada lovelace": Retention(versions=3)},
    )
    file.write_text('[tags.audit]\nage = "soon"\n')
    with pytest.raises(InvalidData) as caught:
        perdure.load_policy(file)
    assert caught.value.path == f"{file}: tags.audit.age"
    file.write_text("idle = \n")
    with pytest.raises(InvalidData, match="TOML"):
        perdure.load_policy(file)
    with pytest.raises(ConfigurationError, match="No such file"):
        perdure.load_policy(tmp_path / "none.toml")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.sampled_from([(), ("a",), ("b",), ("a", "b"), ("hold",)])),
        st.tuples(st.just("say"), st.integers(0, 5)),
        st.tuples(st.just("fork"), st.integers(0, 5)),
        st.tuples(st.just("trim"), st.integers(0, 5)),
        st.tuples(st.just("help"), st.integers(0, 5)),
        st.tuples(st.just("hold"), st.integers(0, 5)),
        st.tuples(st.just("lift"), st.integers(0, 5)),
        st.tuples(st.just("own"), st.integers(0, 5)),
        st.tuples(st.just("days"), st.integers(1, 9)),
        st.tuples(st.just("round"), st.just(0)),
    ),
    min_size=4,
    max_size=24,
)
POLICY = RetentionPolicy(
    default=Retention(idle=4 * DAY, versions=2),
    tags={"a": Retention(age=6 * DAY), "b": Retention(idle=8 * DAY, versions=1)},
)


@given(steps=STEPS)
async def test_nothing_is_lost_that_is_held_or_young(steps: list[tuple[str, Any]]) -> None:
    """A round erases what is over, and everything else shows what it has shown, whatever was done before."""
    async with connected("memory", Path()) as (app, clock):
        made: list[str] = []
        for number, (verb, value) in enumerate(steps):
            if verb == "days":
                days(clock, value)
            elif verb == "new":
                made.append(f"s{number}")
                await app.open(made[-1], tags=value)
            elif verb == "round":
                await _round(app)
            elif made and await app.exists(name := made[value % len(made)]):
                await _done(app, verb, name, number, made)
        days(clock, 5)
        await _round(app)
    note(Outcome(attack="retention of random stores", store="memory", rounds=1, failures=0))


async def _done(app: Sessions, verb: str, name: str, number: int, made: list[str]) -> None:
    chat = await app.open(name)
    info = await app.info(name)
    match verb:
        case "say":
            await chat.send(f"text {number}")
        case "help":
            await chat.send("help")
        case "fork":
            made.append(f"f{number}")
            await chat.fork(made[-1])
        case "trim":
            await chat.trim(2)
        case "own":
            await chat.retain(Retention(age=3 * DAY) if number % 2 else Retention())
        case "hold":
            await chat.hold()
        case "lift" if "hold" in info.tags:
            await chat.lift_hold()


async def _round(app: Sessions) -> None:
    infos = {info.id: info for info in await app.headers(limit=1000)}
    shown = {key: await _shown(app, key) for key in infos}
    said = {key: await app.history(key) for key in infos if "hold" in infos[key].tags}
    report = await applied(app, POLICY)
    for key, info in infos.items():
        root = infos[_root(info, infos)]
        is_held = any("hold" in each.tags for each in infos.values() if _root(each, infos) == root.id)
        assert (key in report.erased) == (POLICY.is_over(root, report.at) and not is_held), key
        if key not in report.erased:
            assert await _shown(app, key) == shown[key]
        if key in said:
            assert await app.history(key) == said[key]
            assert (await app.info(key)).version == info.version


async def _shown(app: Sessions, key: str) -> list[str]:
    return [message.id for message in (await app.session(key)).state.messages]


def _root(info: Any, infos: Any) -> Any:
    while info.spawn_ref is not None:
        info = infos[info.spawn_ref.parent_session_id]
    return info.id
