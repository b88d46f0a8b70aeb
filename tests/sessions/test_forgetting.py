"""A conversation that has forgotten its older versions: every verb works with what is left, or says what is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import perdure
from perdure import (
    AgentDefinition,
    Chat,
    InvalidData,
    LongestAnswer,
    MemoryStore,
    SendMessage,
    SendParallel,
    SessionBusy,
    SessionRuntime,
    Sessions,
    StoreError,
    ToolCall,
    VersionForgotten,
    tool,
)
from perdure.archive import fsck
from perdure.testing import FailingStore, ScriptedDriver

HELPER = AgentDefinition("helper", system_prompt="helper")


@tool(needs_approval=True)
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def answer(request: Any) -> Any:
    asked = request.messages[-1].text
    if request.step or request.system_prompt == "helper":
        return "done"
    if "pay" in asked:
        return ToolCall("pay", {"amount": 7})
    return ToolCall("helper", {"prompt": "Help."}) if "help" in asked else f"About {asked}"


@asynccontextmanager
async def connected() -> AsyncIterator[Sessions]:
    driver = ScriptedDriver(answer)
    async with perdure.connect(MemoryStore(), driver=driver, tools=[pay], subagents=[HELPER], compaction=None) as app:
        yield app
        assert (await fsck(app.store)).problems == ()


async def said(chat: Chat) -> list[str]:
    return [message.text for message in await chat.history()]


async def newest(chat: Chat) -> int:
    return (await chat.session()).version


async def talked(app: Sessions, *texts: str) -> Chat:
    chat = await app.open("chat")
    for text in texts:
        await chat.send(text)
    return chat


async def test_what_is_shown_stays_and_can_be_gone_on_with() -> None:
    """Only the versions are gone if the newest shows all that was said."""
    async with connected() as app:
        chat = await talked(app, "one", "two", "three")
        before, record = await said(chat), await chat.record()
        erased = await chat.forget(before=await newest(chat))
        assert (erased.versions, erased.messages) == (3, 0)
        assert await said(chat) == before
        assert await chat.record() == record
        assert (await chat.send("four")).text == "About four"
        assert await said(chat) == [*before, "four", "About four"]
        assert [head.info.version for head in await chat.versions()] == [6, 5, 4]


async def test_what_was_trimmed_is_gone_from_history_record_and_search() -> None:
    """The runs that are left are reported as before."""
    async with connected() as app:
        chat = await talked(app, "one", "two", "three")
        await chat.trim(2)
        await chat.send("four")
        await chat.trim(2)
        await chat.send("five")
        loops = [loop.loop_id for loop in (await chat.record()).loops]
        assert (await chat.forget(before=await newest(chat))).messages == 6
        assert await said(chat) == ["four", "About four", "five", "About five"]
        assert [loop.loop_id for loop in (await chat.record()).loops] == loops[3:]
        assert {event.loop_id async for event in chat.events()} == {*loops[3:]}
        assert [message.text for message in (await app.loop("chat", loops[-1])).messages] == ["five", "About five"]
        assert await chat.search("one") == []
        assert [hit.session_id for hit in await chat.search("five")] == ["chat", "chat"]


async def test_versions_that_are_gone_are_named_as_such() -> None:
    """Every verb that takes a version says so."""
    async with connected() as app:
        chat = await talked(app, "one", "two", "three")
        await chat.forget(before=3)
        for verb in (lambda: chat.session(2), lambda: chat.rewind(2), lambda: chat.fork(version=2)):
            with pytest.raises(VersionForgotten, match="oldest that is kept is 3"):
                await verb()
        first = (await chat.record()).loops[0].loop_id
        with pytest.raises(VersionForgotten):
            await chat.fork(loop=first)
        assert [message.text for message in (await chat.session(3)).state.messages][-1] == "About two"
        assert await (await chat.fork(version=3)).length() == 4
        assert await chat.rewind(3) == 4


async def test_undo_goes_as_far_back_as_versions_are_kept() -> None:
    """It goes no further, even if things were undone before."""
    async with connected() as app:
        chat = await talked(app, "one", "two", "three")
        await chat.forget(before=3)
        assert await chat.undo() == 4
        with pytest.raises(InvalidData, match="versions before 3 were forgotten"):
            await chat.undo()
        await chat.send("four")
        await chat.undo()
        await chat.forget(before=await newest(chat))
        with pytest.raises(InvalidData, match="nothing to undo"):
            await chat.undo()


async def test_compactions_can_be_taken_back() -> None:
    """The covered messages are needed for that, and stay."""
    async with connected() as app:
        chat = await talked(app, "one", "two", "three")
        await chat.compact(compact_strategy="truncate", keep_last=1)
        assert (await chat.forget(before=await newest(chat))).messages == 0
        assert await chat.uncompact() == 6


async def test_the_last_run_can_be_retried() -> None:
    """The version before the run is gone, so the run's messages are cut from the view."""
    async with connected() as app:
        chat = await talked(app, "one", "two")
        await chat.forget(before=await newest(chat))
        assert (await chat.retry()).text == "About two"
        assert [message.text for message in (await chat.session()).state.messages] == [
            *("one", "About one"),
            *("two", "About two"),
        ]


async def test_a_key_never_runs_twice() -> None:
    """Its answer is forgotten; the error says so, and no model is asked."""
    async with connected() as app:
        chat = await app.open("chat")
        await chat.send("one", key="k1")
        await chat.send("two", key="k2")
        await chat.forget(before=3)
        with pytest.raises(VersionForgotten):
            await chat.send("one", key="k1")
        with pytest.raises(VersionForgotten):
            await chat.result("k1")
        again = await chat.send("two", key="k2")
        assert again.text == "About two"
        assert await newest(chat) == 4


async def test_a_run_that_waits_for_a_person_goes_on() -> None:
    """It continues, whatever others have said while it waited."""
    async with connected() as app:
        chat = await talked(app, "one")
        assert (await chat.send("pay")).pending_calls
        for text in ("aside", "more"):
            await chat.inject({"role": "user", "content": text})
        await chat.forget(before=await newest(chat))
        assert (await chat.approve()).text == "done"
        waited = (await chat.record()).loops[-1].loop_id
        assert [message.text for message in (await app.loop("chat", waited)).messages][-1] == "done"


async def test_a_run_that_comes_after_it_can_be_recovered() -> None:
    """Its messages follow a gap in the log, left by the ones that were undone."""
    async with connected() as app:
        chat = await talked(app, "one", "two")
        for _ in range(2):
            await chat.undo()
        await chat.forget(before=await newest(chat))
        await interrupted(app, SendMessage("three", app.loops))
        assert (await app.recover()).resumed == ("chat",)
        assert await said(chat) == ["three", "About three"]


async def test_a_group_that_comes_after_it_can_be_recovered() -> None:
    async with connected() as app:
        chat = await talked(app, "one", "two")
        for _ in range(2):
            await chat.undo()
        await chat.forget(before=await newest(chat))
        await interrupted(app, SendParallel("three", app.loops, configs=["a", "b"], strategy=LongestAnswer()))
        assert (await app.recover()).resumed == ("chat",)
        assert (await said(chat))[:2] == ["three", "About three"]


async def interrupted(app: Sessions, action: Any) -> None:
    """Run an action that cannot be saved."""
    failing = FailingStore(app.store)
    failing.fail("save")
    with pytest.raises(StoreError):
        await SessionRuntime(failing).execute("chat", action)


async def test_branches_of_a_group_stay_together_or_go_together() -> None:
    """None of them looks unfinished; the log of a branch that nobody shows is removed."""
    async with connected() as app:
        chat = await app.open("chat")
        asked = SendParallel("side by side", app.loops, configs=["a", "b"], strategy=LongestAnswer())
        await app.execute("chat", asked)
        loops = (await chat.record()).loops
        assert len(loops) == 2
        await chat.send("later")
        await chat.forget(before=await newest(chat))
        assert [loop.status for loop in (await chat.record()).loops][:2] == [loop.status for loop in loops]
        await chat.trim(2)
        await chat.send("later still")
        await chat.trim(2)
        await chat.send("at last")
        assert (await chat.forget(before=await newest(chat))).messages > 0
        assert not {loop.loop_id for loop in loops} & {loop.loop_id for loop in (await chat.record()).loops}
        assert "side by side" not in await said(chat)


async def test_sub_agents_keep_their_sessions() -> None:
    """They have sessions of their own, which are found under their parent."""
    async with connected() as app:
        chat = await talked(app, "help", "one", "two")
        await chat.trim(2)
        await chat.send("three")
        await chat.trim(2)
        await chat.send("four")
        await chat.forget(before=await newest(chat))
        (child,) = await app.list(parent="chat")
        assert child.spawn_ref is not None
        assert (await app.session(child.id)).state.messages[-1].text == "done"


async def test_forks_and_adoptions_keep_their_places() -> None:
    """An adopted message keeps the place in the history where the oldest version showed it."""
    async with connected() as app:
        chat = await talked(app, "one")
        branch = await chat.fork("branch")
        await branch.send("two")
        await chat.adopt(branch)
        await chat.send("three")
        before = await said(chat)
        assert before == [text for word in ("one", "two", "three") for text in (word, f"About {word}")]
        await chat.forget(before=await newest(chat))
        assert await said(chat) == before
        await branch.erase()
        assert await said(chat) == before
        await (await chat.fork("again")).forget(before=9)
        assert await said(await app.open("again")) == before


async def test_a_list_shows_the_first_words_that_are_left() -> None:
    """Forgotten words do not become a title."""
    async with connected() as app:
        chat = await talked(app, "one", "two")
        assert [info.title for info in await app.list()] == ["one"]
        await chat.trim(2)
        await chat.send("three")
        await chat.trim(2)
        await chat.send("four")
        await chat.forget(before=await newest(chat))
        assert [info.title for info in await app.list()] == ["three"]
        await chat.reset()
        await chat.forget(before=await newest(chat))
        assert [info.title for info in await app.list()] == [None]


async def test_a_session_that_runs_cannot_forget() -> None:
    """It raises SessionBusy."""
    async with connected() as app:
        chat = await talked(app, "one")
        assert app.runtime.journal is not None
        await app.runtime.journal.claim("chat", version=2, owner="another process")
        with pytest.raises(SessionBusy):
            await chat.forget(before=2)


async def test_a_deleted_session_is_restored_as_what_is_left_says() -> None:
    """If no version says what it was before, it is active."""
    async with connected() as app:
        chat = await talked(app, "one")
        await chat.delete()
        await chat.forget(before=9)
        await chat.restore()
        assert (await chat.session()).status == "active"


async def test_adopting_a_fork_brings_back_what_it_has_kept() -> None:
    """The session has forgotten those messages, and the fork shows them. The session keeps them without the fork."""
    async with connected() as app:
        chat = await app.open("s")
        await chat.send("one")
        fork = await chat.fork("fork")
        await chat.reset()
        await chat.send("two")
        await chat.forget(before=(await chat.session()).version)
        assert "About one" not in await said(chat)
        await app.adopt("s", "fork")
        await fork.erase()
        await chat.send("three")
        shown = [message.text for message in (await chat.session()).state.messages]
        assert shown == ["one", "About one", "three", "About three"]
        assert {"About one", "About three"} <= {*await said(chat)}
