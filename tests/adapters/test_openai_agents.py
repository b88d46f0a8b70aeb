"""Sessions of the OpenAI Agents SDK: its own protocol, perdure's verbs, and several writers."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents")

from agents import Agent, Runner
from agents.memory import Session, SessionSettings
from tests.adapters import openai_process
from tests.adapters.openai_process import Scripted, append, calling_agent, pairs

from perdure import InvalidData, MemoryStore, Message, SessionBusy, SessionConflict, SessionNotActive, shared
from perdure.adapters.openai_agents import PerdureSession

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
RACES = 100 if TORTURE else 1
KILLS = 50 if TORTURE else 3


@pytest.fixture(params=["memory", "sqlite", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return MemoryStore() if request.param == "memory" else f"{request.param}:///{tmp_path}/store"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    address = f"sqlite:///{tmp_path}/chats.db"
    yield address
    shared(address).close()


@pytest.fixture
def loop_of_run_sync() -> Iterator[None]:
    """An event loop for `Runner.run_sync`, which does not close a loop that it makes itself."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


def said(text: str, role: str = "user") -> Any:
    return {"role": role, "content": text}


ITEMS: list[Any] = [
    said("What is the weather?"),
    {"id": "rs_1", "summary": [{"text": "Look it up.", "type": "summary_text"}], "type": "reasoning"},
    {"arguments": '{"city": "Köln"}', "call_id": "call_1", "name": "weather", "type": "function_call", "id": "fc_1"},
    {"call_id": "call_1", "output": "sunny", "type": "function_call_output"},
    {
        "id": "msg_1",
        "content": [{"annotations": [], "text": "Sunny.", "type": "output_text", "logprobs": []}],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    },
    {"type": "of_next_year", "body": {"numbers": [1, 1.0, None], "text": "\x7f0\x7f"}},
]


async def test_items_come_back_as_they_were(store: Any) -> None:
    """Every item of any kind is the same again, in its order; the reader may change it."""
    session = PerdureSession("chat", store=store)
    assert isinstance(session, Session)
    assert await session.get_items() == []
    await session.add_items(ITEMS[:2])
    await session.add_items([])
    await session.add_items(ITEMS[2:])
    found: Any = await session.get_items()
    assert found == ITEMS
    assert [list(item) for item in found] == [list(item) for item in ITEMS]
    found[4]["content"][0]["text"] = "changed"
    assert await PerdureSession("chat", store=store).get_items() == ITEMS


async def test_a_limit_is_the_newest_items(store: Any) -> None:
    """The newest come oldest first. Zero is none, and less than zero is all, as in SQLiteSession."""
    session = PerdureSession("chat", store=store, session_settings=SessionSettings(limit=2))
    await session.add_items(ITEMS)
    assert await session.get_items() == ITEMS[-2:]
    for limit in (0, 1, 3, 6, 7):
        assert await session.get_items(limit=limit) == ITEMS[len(ITEMS) - min(limit, 6) :]
    assert await session.get_items(limit=-1) == ITEMS


async def test_items_can_be_taken_back_one_by_one(store: Any) -> None:
    """A popped or cleared item is not shown any more, and can be shown again."""
    session = PerdureSession("chat", store=store)
    assert await session.pop_item() is None
    await session.clear_session()
    await session.add_items(ITEMS[:3])
    assert await session.pop_item() == ITEMS[2]
    assert await session.get_items() == ITEMS[:2]
    await session.clear_session()
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.chat.undo()
    assert await session.get_items() == ITEMS[:2]


async def test_an_item_that_is_not_json_changes_nothing(store: Any) -> None:
    """It raises InvalidData, and none of the other items is added."""
    session = PerdureSession("chat", store=store)
    with pytest.raises(InvalidData, match="not JSON"):
        await session.add_items([said("Hi"), {"role": "user", "content": object()}])  # type: ignore[list-item]
    assert await session.get_items() == []


async def test_a_message_of_several_items_is_popped_item_by_item() -> None:
    """An answer of perdure's own agent is one message, and more than one item."""
    session = PerdureSession("chat", store=MemoryStore())
    await session.add_items(ITEMS[:1])
    answer = Message.of(
        {
            "role": "assistant",
            "content": "Sure.",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        }
    )
    await session.chat.inject(answer)
    shown = await session.get_items()
    assert [item.get("type", "message") for item in shown] == ["message", "message", "function_call"]
    assert await session.get_items(limit=1) == shown[-1:]
    assert [await session.pop_item() for _ in range(4)] == [*shown[::-1], None]


@pytest.mark.usefixtures("loop_of_run_sync")
def test_a_run_uses_several_event_loops(url: str) -> None:
    """`Runner.run_sync` and each `asyncio.run` have event loops of their own."""
    session = PerdureSession("chat", store=url)
    agent = calling_agent()
    assert Runner.run_sync(agent, "One", session=session).final_output == "done"
    for question in ("Two", "Three"):
        asyncio.run(Runner.run(agent, question, session=session))
    model = agent.model
    assert isinstance(model, Scripted)
    kinds = [item.get("type", item.get("role")) for item in model.sent[-1]]
    assert kinds == 2 * ["user", "function_call", "function_call_output", "message"] + [
        *("user", "function_call", "function_call_output")
    ]
    assert len(session.blocking_chat.history()) == 12


async def test_many_threads_and_loops_lose_nothing(url: str) -> None:
    """Threads with an event loop each append to one session through one object."""
    session = PerdureSession("chat", store=url)
    names = ["a", "b", "c", "d"]
    await asyncio.gather(*(asyncio.to_thread(asyncio.run, append(session, name, 20)) for name in names))
    assert_whole(await session.get_items(), names, 20)


def assert_whole(items: list[Any], names: list[str], count: int) -> None:
    """Assert that every batch is there once, in one piece, and each writer's in order."""
    texts = [item["content"] for item in items]
    assert [text[:-1] for text in texts[::2]] == [text[:-1] for text in texts[1::2]]
    for name in names:
        own = [batch[0]["content"] for batch in pairs(name, count)]
        assert [text for text in texts[::2] if text.split()[0] == name] == own
    assert len(texts) == 2 * count * len(names)


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, openai_process.__file__, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("number", range(RACES))
def test_processes_lose_nothing(tmp_path: Path, number: int) -> None:
    """Several append 50 times each: all items are kept, and each batch is in one piece."""
    url, names = f"sqlite:///{tmp_path}/chats.db", [f"p{n}" for n in range(4 if TORTURE else 2)]
    started = [start("append", url, name, "50") for name in names]
    for process in started:
        process.communicate(timeout=300)
    assert [process.returncode for process in started] == [0] * len(names)
    assert_whole(asyncio.run(PerdureSession("chat", store=url).get_items()), names, 50)
    shared(url).close()


def test_a_forked_child_goes_on(url: str) -> None:
    """A forked process has the same session, and appends to it."""
    session = PerdureSession("chat", store=url)
    asyncio.run(append(session, "parent", 2))
    child = os.fork()
    if not child:
        try:
            asyncio.run(append(session, "child", 2))
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(append(session, "parent", 1))
    assert [item["content"].split()[0] for item in asyncio.run(session.get_items())] == [  # type: ignore[union-attr]
        *["parent"] * 4,
        *["child"] * 4,
        *["parent"] * 2,
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_run_leaves_a_history_to_go_on_with(url: str, number: int) -> None:
    """Every answered question is there, the killed run's saved items are readable, and the next run answers."""
    process = start("run", url, "", "1000")
    assert process.stdout is not None
    wanted, answered = random.Random(number).randrange(1, 40), 0
    for line in process.stdout:
        answered += line.startswith("answered")
        wanted -= 1
        if not wanted:
            break
    process.kill()
    process.communicate()
    session = PerdureSession("chat", store=url)
    texts = [item.get("content") for item in asyncio.run(session.get_items())]
    assert [f"Question {n}" for n in range(answered)] == [
        text for text in texts if isinstance(text, str) and text.startswith("Question")
    ][:answered]
    assert asyncio.run(Runner.run(calling_agent(), "And now?", session=session)).final_output == "done"


def writers(store: Any, *, strict: bool) -> tuple[PerdureSession, PerdureSession]:
    one, other = (PerdureSession("chat", store=store, strict=strict) for _ in range(2))
    return one, other


async def test_strict_refuses_a_stale_writer(store: Any) -> None:
    """A writer that has read before another one wrote raises SessionConflict, and saves nothing."""
    one, other = writers(store, strict=True)
    await one.add_items([said("Hi")])
    for session in (one, other):
        assert len(await session.get_items()) == 1
    await other.add_items([said("Other")])
    for write in (lambda: one.add_items([said("One")]), one.pop_item, one.clear_session):
        with pytest.raises(SessionConflict, match=r"has read version 1.*Run again") as raised:
            await write()  # type: ignore[operator]
        assert (raised.value.expected, raised.value.found) == (1, 2)
    assert len(await one.get_items()) == 2
    await one.add_items([said("One")])
    await one.add_items([said("One again")])
    assert len(await other.get_items()) == 4


async def test_without_strict_appends_follow_each_other(store: Any) -> None:
    """By default a stale writer's items come behind the others'."""
    one, other = writers(store, strict=False)
    for session in (one, other):
        assert await session.get_items() == []
    await other.add_items([said("Other")])
    await one.add_items([said("One")])
    assert await one.get_items() == [said("Other"), said("One")]


@pytest.mark.parametrize("number", range(RACES))
async def test_strict_runs_of_one_session_object_are_told_apart(url: str, number: int) -> None:
    """Of runs that begin together one is kept whole, and the others raise."""
    together = asyncio.Barrier(4)

    class ReadTogether(PerdureSession):
        async def get_items(self, limit: int | None = None, *, wrapper: Any = None) -> Any:
            read = await super().get_items(limit, wrapper=wrapper)
            if not read:
                await together.wait()
            return read

    session = ReadTogether("chat", store=url, strict=True)

    def run() -> Any:
        return Runner.run(Agent("helper", model=Scripted(lambda items: "done")), "Hi", session=session)

    ended = await asyncio.gather(*(run() for _ in range(4)), return_exceptions=True)
    kept = [each for each in ended if not isinstance(each, BaseException)]
    assert all(isinstance(each, SessionConflict) for each in ended if isinstance(each, BaseException))
    assert len(await session.get_items()) == 2 * len(kept) > 0


async def test_a_cancelled_append_is_over_when_its_caller_hears_of_it(url: str) -> None:
    """An append that was begun is completed, and the next reader gets it."""
    session = PerdureSession("chat", store=url)
    for number in range(20):
        task = asyncio.create_task(session.add_items([said(str(number))]))
        await asyncio.sleep(random.random() / 500)
        task.cancel()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
        count = len(await session.get_items())
        await asyncio.sleep(0.005)
        assert len(await session.get_items()) == count
        assert ended is not None or count


async def test_what_verbs_change_is_what_the_sdk_reads(url: str) -> None:
    """A fork, an undo, a compaction and a redaction show in the SDK's own items."""
    session = PerdureSession("chat", store=url)
    for batch in pairs("turn", 10):
        await session.add_items(batch)
    whole = await session.get_items()
    forked = await session.fork("other", at=4)
    await forked.add_items([said("Another way")])
    assert await forked.get_items() == [*whole[:4], said("Another way")]
    assert await session.get_items() == whole
    await session.chat.trim(6)
    assert await session.get_items() == whole[-6:]
    await session.chat.undo()
    assert await session.get_items() == whole
    (hit,) = await session.chat.search("turn 3 a")
    assert await session.chat.redact([hit.message_id]) == 1
    assert (await session.get_items())[6] == said("[redacted]")
    assert (await session.chat.view()).messages[0].text == "turn 0 a"


async def test_masked_results_are_shown_again(url: str) -> None:
    """A compaction is a view of the same items; `uncompact` shows them again exactly."""
    session = PerdureSession("chat", store=url)
    for number in range(6):
        call = {**ITEMS[2], "call_id": f"call_{number}", "id": f"fc_{number}"}
        await session.add_items(
            [said(f"Question {number}"), call, {**ITEMS[3], "call_id": call["call_id"], "output": "x" * 900}]
        )
    whole = await session.get_items()
    await session.chat.compact(compact_strategy="observation_mask", keep_last=1)
    masked: Any = await session.get_items()
    assert masked != whole
    assert [item.get("call_id") for item in masked] == [item.get("call_id") for item in whole]
    await session.chat.uncompact()
    assert await session.get_items() == whole


async def test_the_sdks_compaction_replaces_the_end_and_can_be_taken_back(store: Any) -> None:
    """The items are replaced if they are still the last ones, and `uncompact` shows them again."""
    session = PerdureSession("chat", store=store)
    for batch in pairs("turn", 3):
        await session.add_items(batch)
    whole = await session.get_items()
    snapshot = await session._get_compaction_snapshot(4)
    assert snapshot is not None
    assert (snapshot.items, snapshot.complete) == (whole[-4:], False)
    assert await snapshot.replace_suffix(1, [said("In short", "assistant")])
    assert await session.get_items() == [*whole[:3], said("In short", "assistant")]
    await session.add_items([said("More")])
    assert not await snapshot.replace_suffix(0, [said("Late")])
    assert (await session.get_items())[-1] == said("More")
    await session.chat.uncompact()
    assert await session.get_items() == [*whole, said("More")]


async def test_a_compaction_drops_what_has_expired(store: Any) -> None:
    """EncryptedSession names items at the beginning that can no longer be decrypted."""
    session = PerdureSession("chat", store=store)
    await session.add_items([said("old"), said("old"), said("new"), said("old"), said("end")])
    snapshot = await session._get_compaction_snapshot(9, prune_prefix=lambda item: item == said("old"))
    assert snapshot is not None
    assert snapshot.complete
    assert await snapshot.replace_suffix(4, [said("End.")])
    assert await session.get_items() == [said("new"), said("old"), said("End.")]


async def test_a_subclass_that_changes_items_has_no_snapshot() -> None:
    """The SDK's compaction would bypass the subclass, so it gets no snapshot."""

    class Shouting(PerdureSession):
        async def add_items(self, items: Any, *, wrapper: Any = None) -> None:
            await super().add_items([said(item["content"].upper()) for item in items], wrapper=wrapper)

    session = Shouting("chat", store=MemoryStore())
    await session.add_items([said("Hi")])
    assert await session._get_compaction_snapshot(5) is None


async def test_a_deleted_session_is_refused_until_it_is_restored(store: Any) -> None:
    """A session that was deleted with perdure can be neither read nor written."""
    session = PerdureSession("chat", store=store)
    await session.add_items([said("Hi")])
    await session.chat.delete()
    for call in (session.get_items, lambda: session.add_items([said("Again")])):
        with pytest.raises(SessionNotActive):
            await call()  # type: ignore[operator]
    await session.chat.restore()
    await session.add_items([said("Again")])
    assert len(await session.get_items()) == 2


async def test_a_session_that_is_being_run_is_busy(url: str) -> None:
    """While perdure's own agent runs there, the SDK can read; a write raises SessionBusy."""
    session = PerdureSession("chat", store=url)
    await session.add_items([said("Hi")])
    store = shared(url)
    claim, _ = await store.claim("chat", version=1, owner="somebody")
    assert len(await session.get_items()) == 1
    with pytest.raises(SessionBusy):
        await session.add_items([said("Again")])
    await store.release(claim)
    await session.add_items([said("Again")])
    assert len(await session.get_items()) == 2


async def test_another_frameworks_session_is_refused(store: Any) -> None:
    """An id that belongs to another agent is not written into."""
    from perdure import AgentDefinition, SessionRuntime

    home = shared(store)
    await SessionRuntime(home).create(AgentDefinition("mine"), session_id="chat")
    session = PerdureSession("chat", store=store)
    for call in (session.get_items, lambda: session.add_items([said("Hi")])):
        with pytest.raises(SessionConflict, match="'mine', not to 'openai-agents'"):
            await call()  # type: ignore[operator]


async def test_owners_and_any_name(store: Any) -> None:
    """Two owners may use one name, and a name may be any text."""
    sessions = [PerdureSession("an order/№ 7", store=store, owner=owner) for owner in ("ada", "bob", None)]
    for number, session in enumerate(sessions):
        await session.add_items([said(str(number))])
    assert [await session.get_items() for session in sessions] == [[said("0")], [said("1")], [said("2")]]
    assert (await sessions[0].chat.session()).info.name == "an order/№ 7"


@pytest.mark.parametrize("session_id", ["", " ", None, 5])
def test_an_id_is_a_text_that_is_not_blank(session_id: Any) -> None:
    """It is refused at once, by the name of the argument."""
    with pytest.raises(InvalidData, match=r"\$\.session_id"):
        PerdureSession(session_id, store=MemoryStore())


async def test_an_id_may_be_as_long_as_it_likes(store: Any) -> None:
    """A list shows its beginning."""
    session = PerdureSession("an id " * 500, store=store)
    await session.add_items([said("Hello")])
    assert await PerdureSession("an id " * 500, store=store).get_items() == [said("Hello")]
    assert await PerdureSession("an id " * 501, store=store).get_items() == []
    assert ((await session.chat.session()).info.name or "").startswith("an id an id")


async def test_a_fork_needs_no_id(store: Any) -> None:
    """It gets a new one, also for an owner."""
    for owner in (None, "ada"):
        session = PerdureSession("chat", store=store, owner=owner)
        await session.add_items([said("Hello")])
        forked = await session.fork()
        assert await PerdureSession(forked.session_id, store=store, owner=owner).get_items() == [said("Hello")]


async def test_a_long_history_is_not_read_for_its_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit, a new process reads the last items and appends, without reading the rest."""
    session = PerdureSession("chat", store=url)
    await session.add_items([said(str(number)) for number in range(3_000)])
    shared(url).close()
    read = count_decoded(monkeypatch)
    assert await session.get_items(limit=50) == [said(str(number)) for number in range(2_950, 3_000)]
    for number in range(3_000, 3_003):
        await session.add_items([said(str(number))])
        assert (await session.get_items(limit=2))[-1] == said(str(number))
    assert sum(read) <= 60
    assert len(await session.get_items()) == 3_003
    assert sum(read) >= 3_000


async def test_an_append_to_a_long_history_reads_nothing_of_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only appends reads no messages, and all readers get its items."""
    session = PerdureSession("chat", store=url)
    await session.add_items([said(str(number)) for number in range(500)])
    shared(url).close()
    read = count_decoded(monkeypatch)
    await session.add_items([said("500")])
    assert sum(read) == 0
    shared(url).close()
    assert await session.get_items() == [said(str(number)) for number in range(501)]


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of messages of each read."""
    from perdure import codec

    counts: list[int] = []
    decode: Callable[..., Any] = codec.decode_messages

    def counted(bodies: Any) -> Any:
        counts.append(len(bodies))
        return decode(bodies)

    monkeypatch.setattr(codec, "decode_messages", counted)
    return counts
