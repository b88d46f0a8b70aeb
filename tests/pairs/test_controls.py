"""The harness itself: in an honest world it finds nothing, and it notices each promise that is broken on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.pairs.case import PAIRS, Case, _alone, _is_busy, broken_by
from tests.pairs.mind import Mind
from tests.pairs.model import Model
from tests.pairs.promises import broken_in
from tests.pairs.request_form import problems_of
from tests.pairs.settling import settle
from tests.pairs.steps import enqueue, key, kill_a_run, note, ring, say, undo
from tests.pairs.world import MAIN, World, opened

from perdure import AgentState, Message, ModelConfig, SessionBusy, ToolCall, Usage
from perdure.protocols import Entry, ModelRequest

Play = Callable[[World], Awaitable[None]]


async def played(folder: Path, *plays: Play, after: Play | None = None, **options: Any) -> set[str]:
    """Play in a world of a sound model, settle it, and return the numbers of the promises that it broke."""
    world = World(7, "memory", folder, **options)
    world.quirk.ids, world.quirk.fails, world.quirk.blank = "new", 0.0, False
    async with opened(world):
        for play in plays:
            await play(world)
        await settle(world)
        if after is not None:
            await after(world)
        return {line.partition(":")[0] for line in await broken_in(world)}


def said(asks: str) -> Play:
    async def play(world: World) -> None:
        await say(world, await world.process(), world.new_text(asks))

    return play


async def redacted(world: World) -> None:
    at = await world.process()
    first = (await at.sessions.history(MAIN))[0]
    (word,) = world.model.said[MAIN] & set(first.text.split())
    await at.sessions.redact(MAIN, [first.id])
    world.model.note("redacted", word=word)


async def reset(world: World) -> None:
    await (await world.process()).sessions.reset(MAIN)


async def keyed(world: World) -> None:
    world.model.note("key", key="key-0", text=world.new_text("charge"))
    await key(world, await world.process())


async def killed(world: World) -> None:
    await kill_a_run(world, await world.process())


ALL: tuple[Play, ...] = (said("charge"), said("pay"), redacted, killed)


async def test_an_honest_world_breaks_nothing(tmp_path: Path) -> None:
    """Without the controls below, none of their faults is there."""
    assert await played(tmp_path, *ALL) == set()
    assert await played(tmp_path, keyed, reset) == set()


async def test_a_case_plays_the_same_each_time(tmp_path: Path) -> None:
    """One number is enough to see a failure again."""
    for seed in (5, 40, 77, 300):
        first, second = [await broken_by(Case(seed), tmp_path / each) for each in "ab"]
        assert first == second


async def test_cases_reach_what_they_are_about(tmp_path: Path) -> None:
    """Runs are steered and cancelled, payments approved, processes killed, stores and hooks made to fail."""
    seen: Counter[str] = Counter()

    async def show(world: World) -> None:
        for loop in (await world.face.record(MAIN)).loops if await world.look.exists(MAIN) else ():
            messages = (await world.face.loop(MAIN, loop.loop_id)).messages
            seen["steered"] += sum(message.role == "user" for message in messages) > 1
            seen["cancelled"] += loop.stop_reason == "user_requested"
        for process in world.processes:
            seen["died"] += process.wire.is_dead
            seen["store failed"] += process.wire.has_failed
            seen["hook raised"] += process.hook.has_raised
        seen["paid"] += sum(made.tool == "pay" for made in world.model.made)
        seen["redacted"] += len(world.model.redacted)
        seen["forked"] += len(world.model.forks)
        seen["erased"] += len(world.model.erased)

    for seed in range(0, len(PAIRS), 31):
        await broken_by(Case(seed), tmp_path / str(seed), show=show)
    wanted = ("steered", "cancelled", "died", "store failed", "hook raised", "paid", "redacted", "forked", "erased")
    assert [each for each in wanted if not seen[each]] == []


async def test_a_lost_text_is_noticed(tmp_path: Path) -> None:
    """1: a log that gives out all but its first message."""

    async def forgetful(real: Any, *place: Any) -> Any:
        return (await real(*place))[1:]

    assert "1" in await played(tmp_path, said("ask"), reset, tampers={"messages": forgetful})


async def test_a_lost_note_is_noticed(tmp_path: Path) -> None:
    """1: a record that takes a note, and does not keep it."""

    async def noted(world: World) -> None:
        await note(world, await world.process())

    async def deaf(real: Any, session_id: str, entries: Any) -> int:
        return int(await real(session_id, []))

    assert await played(tmp_path, said("ask"), noted) == set()
    assert await played(tmp_path, said("ask"), noted, tampers={"note": deaf}) == {"1"}


async def test_a_message_that_a_timer_loses_is_noticed(tmp_path: Path) -> None:
    """1: a bell that rings, and puts nothing into the inbox; a timer that is not kept; a post that is not."""

    async def left(world: World) -> None:
        at = await world.process()
        text = world.new_text("ask")
        await at.sessions.enqueue(MAIN, text, at=world.clock() + timedelta(seconds=5))
        world.model.note("said", session=MAIN, words=[text.split()[1]])
        await ring(world, at)
        await enqueue(world, at)

    async def dumb(real: Any, timer: Any, **options: Any) -> bool:
        return bool(await real(replace(timer, entry=None), **{**options, "entry": Entry("cancel", {})}))

    async def lost(real: Any, timer: Any, **options: Any) -> Any:
        return timer

    async def deaf(real: Any, session_id: str, entry: Any, **options: Any) -> int:
        return 1

    assert await played(tmp_path, left) == set()
    for tampers in ({"ring": dumb}, {"set_timer": lost}, {"post": deaf}):
        assert "1" in await played(tmp_path, left, tampers=tampers)


async def test_a_schedule_that_keeps_redacted_text_is_noticed(tmp_path: Path) -> None:
    """8: a timer that a redaction does not reach."""

    async def scheduled(world: World) -> None:
        at = await world.process()
        (first, *_) = await at.sessions.history(MAIN)
        await at.sessions.schedule("news", first.text, cron="* * * * *", session_id=MAIN)

    async def kept(world: World) -> None:
        at = await world.process()
        await at.sessions.schedule("news", " ".join(world.model.redacted), cron="* * * * *", session_id=MAIN)

    assert await played(tmp_path, said("ask"), scheduled, redacted) == set()
    assert await played(tmp_path, said("ask"), redacted, after=kept) == {"8"}


async def test_a_repeated_effect_is_noticed(tmp_path: Path) -> None:
    """2: a ledger that has each charge twice."""

    class Twice(Model):
        def _note_made(self, **call: Any) -> None:
            super()._note_made(**call)
            super()._note_made(**call)

    assert await played(tmp_path, said("charge"), model=Twice()) == {"2"}


async def test_a_completed_call_made_again_is_noticed(tmp_path: Path) -> None:
    """2: a call whose result is on record."""

    class Recorded(Model):
        def _note_made(self, **call: Any) -> None:
            super()._note_made(**{**call, "recorded": True})

    assert await played(tmp_path, said("charge"), model=Recorded()) == {"2"}


async def test_an_undecided_call_is_noticed(tmp_path: Path) -> None:
    """3: a payment that waits, and is made once nobody asks for an approval any more."""

    async def unasked(world: World) -> None:
        world.limit = 9

    async def made(world: World) -> None:
        at = await world.process()
        await at.sessions.approve(MAIN)

    assert await played(tmp_path, said("pay"), made) == {"3"}
    assert await played(tmp_path, unasked, said("pay")) == set()


async def test_an_invalid_request_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4: a request that has lost its tool results."""
    respond = Mind.respond

    async def without_results(self: Mind, request: ModelRequest, on_delta: Any) -> Any:
        left = [message for message in request.messages if message.role != "tool"]
        return await respond(self, replace(request, messages=left), on_delta)

    monkeypatch.setattr(Mind, "respond", without_results)
    assert await played(tmp_path, said("charge")) == {"4"}


async def test_a_run_without_an_end_is_noticed(tmp_path: Path) -> None:
    """5: a store that loses how runs end."""

    async def endless(real: Any, *args: Any, entries: Any = (), **kwargs: Any) -> Any:
        return await real(*args, entries=[each for each in entries if each.kind != "agent_end"], **kwargs)

    assert "5" in await played(tmp_path, said("ask"), tampers={"save": endless, "append": endless})


@pytest.mark.parametrize("lapsed", [False, True])
async def test_a_claim_that_is_left_is_noticed(tmp_path: Path, lapsed: bool) -> None:
    """6: a claim that nobody holds any more, standing or lapsed."""

    async def claimed(world: World) -> None:
        session = await world.shown()
        assert session is not None
        await world.look.claim(MAIN, version=session.version, owner="nobody")
        world.clock.advance(61 if lapsed else 0)

    assert "6" in await played(tmp_path, said("ask"), after=claimed)


async def test_a_forgotten_key_is_noticed(tmp_path: Path) -> None:
    """7 and 2: a store that forgets keys has their requests run, and charged for, again."""

    async def unknown(real: Any, *args: Any) -> None:
        return None

    assert await played(tmp_path, keyed, tampers={"find_key": unknown}) == {"2", "7"}


async def test_text_left_by_a_redaction_is_noticed(tmp_path: Path) -> None:
    """8: a redaction that does nothing."""

    async def idle(real: Any, *args: Any, **kwargs: Any) -> int:
        return 1

    assert await played(tmp_path, said("ask"), redacted, tampers={"redact": idle}) == {"8"}


async def test_a_version_that_does_not_load_is_noticed(tmp_path: Path) -> None:
    """9: a store that has lost its first version."""

    async def lost(real: Any, session_id: str, version: int | None = None) -> Any:
        return None if version == 2 else await real(session_id, version)

    assert "9" in await played(tmp_path, said("ask"), tampers={"load": lost})


async def test_an_untyped_error_is_noticed(tmp_path: Path) -> None:
    """0: an error that no caller can expect."""

    async def raises(real: Any, *args: Any, **kwargs: Any) -> None:
        raise KeyError("main")

    async def verb(world: World) -> None:
        await _alone(world, "redact", await world.process())

    assert "0" in await played(tmp_path, said("ask"), verb, tampers={"redact": raises})


async def test_a_refusal_that_changes_something_is_noticed(tmp_path: Path) -> None:
    """0: a verb that is refused once it is done."""

    async def too_late(real: Any, session: Any, **kwargs: Any) -> None:
        await real(session, **kwargs)
        raise SessionBusy(session.id)

    async def verb(world: World) -> None:
        at = await world.process()
        at.wire._tampers = {"save": too_late}
        await _alone(world, "reset", at)
        at.wire._tampers = {}

    assert "0" in await played(tmp_path, said("ask"), verb)


async def test_an_undo_that_goes_astray_is_noticed(tmp_path: Path) -> None:
    """0: a view that is not the one before the last change."""

    async def verb(world: World) -> None:
        await world.follow()
        await undo(world, await world.process())
        await said("ask")(world)
        await world.compare_undo(None)

    assert "0" in await played(tmp_path, said("ask"), said("ask"), verb)


CALL = ToolCall("note", {}, id="c1")
ASKED, CALLED, DONE = Message.user("do it"), Message.assistant(tool_calls=[CALL]), Message.tool("c1", "done")


@pytest.mark.parametrize(
    ("messages", "is_valid"),
    [
        ([ASKED], True),
        ([ASKED, CALLED, DONE], True),
        ([Message.system("be brief"), ASKED, CALLED, DONE, ASKED], True),
        ([], False),
        ([CALLED, DONE], False),
        ([ASKED, CALLED], False),
        ([ASKED, DONE], False),
        ([ASKED, CALLED, ASKED, DONE], False),
        ([ASKED, CALLED, DONE, DONE], False),
        ([ASKED, Message.assistant("no"), DONE], False),
        ([Message.user(" ")], False),
        ([Message("user", ())], False),
        ([ASKED, Message.assistant("that is all")], False),
        ([ASKED, Message.assistant(tool_calls=[ToolCall("note", {}, id="c 1")]), Message.tool("c 1", "done")], False),
        ([ASKED, Message.assistant(tool_calls=[CALL, CALL]), DONE, DONE], False),
    ],
)
def test_requests_are_judged_as_providers_do(messages: list[Message], is_valid: bool) -> None:
    """A valid request is accepted by OpenAI and Anthropic; a wrong one is refused by either."""
    assert (problems_of(ModelRequest(ModelConfig("m"), messages)) == []) is is_valid


@pytest.mark.parametrize("begins", range(4))
async def test_a_run_that_begins_between_two_looks_is_seen(begins: int) -> None:
    """A queued message waits until the run that answers it has the claim: at any moment one of the two is seen."""
    looks = 0

    def has_begun() -> bool:
        nonlocal looks
        looks += 1
        return looks > begins

    async def is_claimed(_: str) -> bool:
        return has_begun()

    async def waiting_in(_: str) -> list[int]:
        return [] if has_begun() else [1]

    async def exists(_: str) -> bool:
        return True

    async def is_interrupted(_: str) -> bool:
        has_begun()
        return False

    look = SimpleNamespace(exists=exists, is_claimed=is_claimed, is_interrupted=is_interrupted)
    world: Any = SimpleNamespace(main=MAIN, look=look, waiting_in=waiting_in)
    assert await _is_busy(world)


async def test_what_is_not_counted_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10: a state that forgets what a run has used as soon as another begins."""
    assert await played(tmp_path, said("ask"), said("ask")) == set()
    monkeypatch.setattr(AgentState, "_spent_before", lambda state, _: state.spent or Usage())
    assert await played(tmp_path, said("ask"), said("ask")) == {"10"}
