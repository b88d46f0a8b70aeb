"""Pydantic AI's conversations in perdure behave as in its own store, and have perdure's verbs too."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic_ai.conversation_store")

import asyncio
import dataclasses
import multiprocessing
import os
import random
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.conversation import Conversation, ConversationTypeAdapter
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    ConversationStore,
    InMemoryConversationStore,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    BinaryImage,
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests
from pydantic_ai.usage import RunUsage
from tests.adapters.pydantic_process import write

from perdure import (
    ClearSession,
    InvalidData,
    MemoryStore,
    Message,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SessionRuntime,
    connect,
    shared,
)
from perdure.adapters.pydantic_ai import PerdureConversationStore

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
STEPS, KILLS, RACES = (2_500, 50, 100) if TORTURE else (100, 3, 5)


def said(chance: random.Random) -> ModelMessage:
    """Return a message of any kind, with values that JSON lacks or can write in several ways."""
    number = chance.randrange(10**6)
    arguments: list[Any] = ['{"a":1,  "b": [1.0, null]}', {"a": {"b": number}}, '{"cut', "", None, '{"ü":"\\u00fc"}']
    kinds: list[Callable[[], ModelMessage]] = [
        lambda: ModelRequest(parts=[UserPromptPart(f"Question {number}\x7f0\x7f")]),
        lambda: ModelRequest(parts=[SystemPromptPart("Be brief."), UserPromptPart(["Look:", _picture(number)])]),
        lambda: ModelResponse(parts=[ThinkingPart("Hm.", signature="sig", provider_name="x"), TextPart(f"A {number}")]),
        lambda: ModelResponse(
            parts=[ToolCallPart("add", chance.choice(arguments), f"call-{number}")],
            usage=dataclasses.replace(ModelResponse(parts=[]).usage, input_tokens=number),
            model_name="toy",
        ),
        lambda: ModelRequest(parts=[ToolReturnPart("add", {"sum": [number, 1.0, None]}, f"call-{number}")]),
        lambda: ModelRequest(parts=[ToolReturnPart("add", "Again.", f"call-{number}", outcome="retried")]),
    ]
    return chance.choice(kinds)()


def _picture(number: int) -> BinaryImage:
    return BinaryImage(data=b"\xff\x00" + number.to_bytes(4, "big"), media_type="image/png")


async def outcome(work: Awaitable[Any]) -> Any:
    """Return the value of some work, or the class of its error."""
    try:
        return await work
    except (UserError, LookupError) as error:
        return type(error)


class LockStep:
    """The same operations on two stores, whose ids differ: the contents under the ids are compared."""

    def __init__(self, ours: ConversationStore, seed: int) -> None:
        self.stores = (InMemoryConversationStore(), ours)
        self.chance = random.Random(seed)
        self.names: list[str] = []
        self.stale: list[tuple[Conversation, Conversation]] = []

    async def both(self, work: Callable[[ConversationStore, int], Awaitable[Any]]) -> tuple[Any, Any]:
        theirs, ours = [await outcome(work(store, side)) for side, store in enumerate(self.stores)]
        assert isinstance(theirs, type) == isinstance(ours, type), (theirs, ours)
        assert theirs is ours or not isinstance(theirs, type), (theirs, ours)
        return theirs, ours

    def name(self) -> str:
        if not self.names or self.chance.random() < 0.05:
            self.names.append(self.chance.choice(["chat {}", "chat-{}", "Grüße/{}"]).format(len(self.names)))
        return self.chance.choice(self.names)

    async def step(self) -> None:
        verbs = [self.add] * 5 + [self.rewrite, self.branch, self.branch_back, self.fork, self.old, self.delete]
        await self.chance.choice([*verbs, self.window, self.serialized, self.listed, self.deferred])()

    async def loaded(self, **kwargs: Any) -> tuple[Conversation, Conversation]:
        name = self.name()

        async def load(store: ConversationStore, _: int) -> Conversation:
            found = await store.load(name, **kwargs)
            return found or Conversation(conversation_id=name)

        theirs, ours = await self.both(load)
        assert (theirs.messages, theirs.usage) == (ours.messages, ours.usage)
        assert theirs.deferred_tool_requests == ours.deferred_tool_requests
        assert (theirs.revision is None, theirs.new_message_index) == (ours.revision is None, ours.new_message_index)
        return theirs, ours

    async def save(self, pair: tuple[Conversation, Conversation], scope: str | None = None) -> None:
        async def save(store: ConversationStore, side: int) -> list[ModelMessage]:
            return [entry.message for entry in await store.save(pair[side], scope=scope)]

        theirs, ours = await self.both(save)
        assert theirs == ours
        await self.same(pair[0].conversation_id)

    async def add(self) -> None:
        """Add a message; now and then in a scope, which may be another's."""
        pair = await self.loaded()
        if self.chance.random() < 0.2:
            self.stale.append(await self.loaded())
        new = [said(self.chance) for _ in range(self.chance.randrange(4))]
        for conversation in pair:
            conversation.messages.extend(new)
            conversation.usage.incr(RunUsage(requests=1, input_tokens=len(new), details={"x": 1}))
        await self.save(pair, self.chance.choice([None, None, None, "ada", "bob " * 100]))

    async def window(self) -> None:
        """Continue from the newest messages alone."""
        pair = await self.loaded(limit=self.chance.randrange(5))
        new = said(self.chance)
        for conversation in pair:
            conversation.messages.append(new)
        await self.save(pair)

    async def rewrite(self) -> None:
        """Replace a message by another: the messages after it become a branch that is left."""
        pair = await self.loaded()
        place, new = self.chance.randrange(len(pair[0].messages) + 1), said(self.chance)
        for conversation in pair:
            conversation.messages = [*conversation.messages[:place], new]
        await self.save(pair)

    async def serialized(self) -> None:
        """Save a conversation after a round trip through JSON: the store compares it with its own."""
        pair = await self.loaded(limit=self.chance.choice([None, 3]))
        away = [ConversationTypeAdapter.validate_json(ConversationTypeAdapter.dump_json(each)) for each in pair]
        new = said(self.chance)
        for conversation in away:
            conversation.messages.append(new)
        await self.save((away[0], away[1]))

    async def old(self) -> None:
        """Save a conversation that was loaded earlier."""
        if self.stale:
            pair = self.stale.pop(self.chance.randrange(len(self.stale)))
            new = said(self.chance)
            for conversation in pair:
                conversation.messages.append(new)
            await self.save(pair)

    async def deferred(self) -> None:
        """Pause for an approval."""
        pair = await self.loaded()
        call = ToolCallPart("pay", {"cents": 7}, "call-7")
        asked = DeferredToolRequests(approvals=[call], metadata={"call-7": {"why": ["so"]}})
        for conversation in pair:
            conversation.deferred_tool_requests = asked
        await self.save(pair)

    async def branch(self) -> None:
        """Go back to an earlier message."""
        pair = await self.loaded()
        at, is_old = self.chance.randrange(-1, len(pair[0].messages) + 2), self.chance.random() < 0.1
        await self._branch(pair, is_old, lambda side: {"at": at})

    async def branch_back(self) -> None:
        """Go back to any entry of a branch that was left, or of the history."""
        pair = await self.loaded()
        name = pair[0].conversation_id
        lines = [await self.lines(store, name) for store in self.stores]
        if lines[0]:
            line = self.chance.randrange(len(lines[0]))
            place = self.chance.randrange(len(lines[0][line])) if lines[0][line] else -1
            if place >= 0:
                await self._branch(pair, False, lambda side: {"from_entry": lines[side][line][place].id})

    async def _branch(self, pair: Any, is_old: bool, point: Callable[[int], dict[str, Any]]) -> None:
        name = pair[0].conversation_id

        def branch(store: ConversationStore, side: int) -> Awaitable[Conversation]:
            revision = "old" if is_old else pair[side].revision
            return store.branch(name, expected_revision=revision, **point(side))

        theirs, ours = await self.both(branch)
        if not isinstance(theirs, type):
            assert (theirs.messages, theirs.usage) == (ours.messages, ours.usage)
        await self.same(name)

    async def fork(self) -> None:
        """Begin another conversation from any point of one."""
        pair, name, scope = await self.loaded(), self.name(), self.chance.choice([None, "eve"])
        source = pair[0].conversation_id
        lines = [await self.lines(store, source) for store in self.stores]
        line = self.chance.randrange(len(lines[0])) if lines[0] else 0
        place = self.chance.randrange(len(lines[0][line])) if lines[0] and lines[0][line] else None
        by_entry = place is not None and self.chance.random() < 0.7

        def fork(store: ConversationStore, side: int) -> Awaitable[Conversation]:
            point = {"from_entry": lines[side][line][place].id} if by_entry else {"at": place}  # type: ignore[index]
            return store.fork(source, new_conversation_id=name, scope=scope, **point)

        theirs, ours = await self.both(fork)
        if not isinstance(theirs, type):
            assert (theirs.messages, theirs.usage) == (ours.messages, ours.usage)
        await self.same(name)

    async def delete(self) -> None:
        """Delete a conversation, unless the scope is another's."""
        name, scope = self.name(), self.chance.choice([None, "ada", "nobody"])
        if self.chance.random() < 0.3:
            await self.both(lambda store, _: store.delete(name, scope=scope))
            await self.same(name)

    async def listed(self) -> None:
        """List some, newest first."""
        scope, limit = self.chance.choice([None, "ada", "bob " * 100]), self.chance.choice([None, 0, 3, -1])

        async def listed(store: ConversationStore, _: int) -> list[Any]:
            records = await store.list_conversations(scope=scope, limit=limit)
            return [(each.conversation_id, each.usage, each.scope, each.forked_from) for each in records]

        theirs, ours = await self.both(listed)
        assert theirs == ours

    async def lines(self, store: ConversationStore, name: str) -> list[list[ConversationEntry]]:
        """Return the history of a conversation, and the branches that it has left."""
        record = await store.read_record(name)
        return [] if record is None else [await store.read_history(tip) for tip in (record.head_id, *record.branches)]

    async def same(self, name: str) -> None:
        """Compare the conversation's whole content in both stores."""
        records = [await store.read_record(name) for store in self.stores]
        assert (records[0] is None) == (records[1] is None)
        if records[0] is None or records[1] is None:
            return
        lines = [await self.lines(store, name) for store in self.stores]
        assert _shapes(lines[0]) == _shapes(lines[1])
        ids = [{entry.id: place for place, entry in enumerate(chain.from_iterable(each))} for each in lines]
        assert _facts(records[0], ids[0]) == _facts(records[1], ids[1])
        if lines[0][0]:
            place = self.chance.randrange(len(lines[0][0]))
            theirs, ours = [await outcome(s.read_entry(lines[side][0][place].id)) for side, s in enumerate(self.stores)]
            assert theirs.message == ours.message
            assert (theirs.parent_id is None) == (ours.parent_id is None)


def _shapes(lines: list[list[ConversationEntry]]) -> list[Any]:
    """Return histories, with each parent by its place: it must be the entry before."""
    return [
        [
            (entry.message, entry.kind, entry.parent_id == (line[place - 1].id if place else None))
            for place, entry in enumerate(line)
        ]
        for line in lines
    ]


_COMPARED = ("usage", "deferred_tool_requests", "scope", "forked_from", "format_version")


def _facts(record: ConversationRecord, ids: dict[str, int]) -> Any:
    places = [ids.get(each or "") for each in (record.head_id, record.forked_at, *record.branches)]
    told = dataclasses.asdict(record)
    return places, {
        key: told[key] for key in ("usage", "deferred_tool_requests", "scope", "forked_from", "format_version")
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["memory", "sqlite", "file", "sqlite owned"])
def test_it_keeps_step_with_pydantics_own_store(kind: str, tmp_path: Path) -> None:
    """Random operations, 10,000 of them in a torture run, have the same outcome in both stores."""
    urls = {"memory": MemoryStore(), "file": f"file://{tmp_path}/f"}
    owner = "ada" if "owned" in kind else None
    ours = PerdureConversationStore(store=urls.get(kind, f"sqlite:///{tmp_path}/a.db"), owner=owner)

    async def play() -> None:
        many = STEPS * 4 if TORTURE and kind == "sqlite" else STEPS
        steps = LockStep(ours, seed=many)
        for _ in range(many):
            await steps.step()

    asyncio.run(play())


def asked(text: str) -> ModelRequest:
    return ModelRequest(parts=[UserPromptPart(text)])


def answered(text: str) -> ModelResponse:
    return ModelResponse(parts=[TextPart(text)], model_name="toy")


def texts(messages: list[ModelMessage]) -> list[str]:
    return [str(getattr(part, "content", "")) for message in messages for part in message.parts]


async def with_texts(store: ConversationStore, name: str, *said: str) -> Conversation:
    """Save a conversation once for each text."""
    conversation = await store.load(name) or Conversation(conversation_id=name)
    for place, text in enumerate(said):
        conversation.messages.append(answered(text) if place % 2 else asked(text))
        await store.save(conversation)
    return conversation


async def test_an_agent_goes_on_where_it_was(tmp_path: Path) -> None:
    """A run begins with the messages of the last one, and usage keeps counting."""

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        return answered(f"I know {len(messages)} messages.")

    agent = Agent(FunctionModel(model))
    url = f"sqlite:///{tmp_path}/a.db"
    for round in range(3):
        store = PerdureConversationStore(store=url)
        conversation = await store.load("chat 1") or Conversation(conversation_id="chat 1")
        result = await agent.run("And now?", conversation=conversation)
        assert result.output == f"I know {2 * round + 1} messages."
        await store.save(result)
        assert result.conversation.usage.requests == round + 1
    async with connect(url) as sessions:
        (info,) = await sessions.list()
        assert (info.title, info.agent_name, info.message_count, info.version) == ("chat 1", "pydantic-ai", 6, 3)


async def test_an_entry_is_found_by_its_id_alone(tmp_path: Path) -> None:
    """A process that has read no record finds entries, branches that were left, and forks of both."""
    url = f"sqlite:///{tmp_path}/a.db"
    first = PerdureConversationStore(store=url)
    conversation = await with_texts(first, "a", "1", "2", "3", "4")
    entries = await first.load_entries("a") or []
    await first.branch("a", at=2, expected_revision=conversation.revision)
    await with_texts(first, "a", "5", "6")
    fork = await first.fork("a", from_entry=entries[2].id)
    other = PerdureConversationStore(store=url)
    found = [await other.read_entry(entry.id) for entry in entries]
    assert found == entries
    assert texts([entry.message for entry in await other.read_history(entries[3].id)]) == ["1", "2", "3", "4"]
    await first.delete("a")
    assert texts((await PerdureConversationStore(store=url).load(fork.conversation_id)).messages) == ["1", "2", "3"]  # type: ignore[union-attr]
    assert await PerdureConversationStore(store=url).read_entry(entries[1].id) == entries[1]
    with pytest.raises(LookupError, match=entries[3].id):
        await PerdureConversationStore(store=url).read_entry(entries[3].id)


async def test_a_fork_copies_nothing(tmp_path: Path) -> None:
    """It shows its parent's messages in place, and costs the same for any number of them."""
    path = tmp_path / "a.db"
    store = PerdureConversationStore(store=f"sqlite:///{path}")
    await store.save(Conversation(conversation_id="long", messages=[asked("x" * 1_000) for _ in range(1_000)]))
    shared(f"sqlite:///{path}").close()
    before = path.stat().st_size
    for _ in range(10):
        await store.fork("long", at=900)
    shared(f"sqlite:///{path}").close()
    assert path.stat().st_size - before < 60_000
    async with connect(f"sqlite:///{path}") as sessions:
        assert [info.parent_id for info in await sessions.list(limit=10)] == ["long"] * 10


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_of_many_who_save_one_wins(kind: str, tmp_path: Path) -> None:
    """Every other save raises ConversationConflict, and each acknowledged message is kept."""
    store = PerdureConversationStore(store=MemoryStore() if kind == "memory" else f"sqlite:///{tmp_path}/a.db")
    await with_texts(store, "a", "0")
    kept = ["0"]
    for round in range(RACES):
        loaded = [await store.load("a") for _ in range(8)]
        for number, each in enumerate(loaded):
            assert each is not None
            each.messages.append(asked(f"{round}/{number}"))
        done = await asyncio.gather(*(store.save(each) for each in loaded if each), return_exceptions=True)  # type: ignore[misc]
        won = [number for number, each in enumerate(done) if not isinstance(each, BaseException)]
        assert len(won) == 1
        assert all(isinstance(each, ConversationConflict) for place, each in enumerate(done) if place not in won)
        kept.append(f"{round}/{won[0]}")
    found = await store.load("a")
    assert found is not None
    assert texts(found.messages) == kept


async def test_of_many_who_begin_delete_or_branch_one_wins() -> None:
    """The same holds for a conversation that begins, for one that is deleted, and for a branch."""
    store = PerdureConversationStore(store=MemoryStore())
    for round in range(RACES):
        begun = await asyncio.gather(
            *(store.save(Conversation(conversation_id="a", messages=[asked(str(n))])) for n in range(6)),
            return_exceptions=True,
        )
        assert sum(not isinstance(each, BaseException) for each in begun) == 1
        found = await store.load("a")
        assert found is not None
        revision = found.revision or ""
        deleted = await asyncio.gather(
            store.delete_record("a", expected_revision=revision),
            store.branch("a", at=0, expected_revision=revision),
            store.delete_record("a", expected_revision=revision),
            return_exceptions=True,
        )
        assert sum(not isinstance(each, BaseException) for each in deleted) == 1, (round, deleted)
        await store.delete("a")


def test_several_loops_and_threads_share_it(tmp_path: Path) -> None:
    """Each `asyncio.run` and each thread has another event loop: a conversation saved in one loads in another."""
    store = PerdureConversationStore(store=f"sqlite:///{tmp_path}/a.db")

    async def add(text: str) -> None:
        while True:
            try:
                await with_texts(store, "a", text)
                return
            except ConversationConflict:
                continue

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: asyncio.run(add(str(number))), range(12)))
    found = asyncio.run(store.load("a"))
    assert found is not None
    assert sorted(texts(found.messages), key=int) == [str(number) for number in range(12)]


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.adapters.pydantic_process"])


def _writer(url: str, name: str, rounds: int) -> tuple[Any, Any]:
    """Start a process that runs an agent in the conversation; return it with a pipe of its reports."""
    heard, told = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=write, args=(url, name, rounds, told), daemon=True)
    process.start()
    told.close()
    return process, heard


def _rest_of(heard: Any) -> list[str]:
    """Return all reports of a process until its end."""
    told: list[str] = []
    with heard:
        while True:
            try:
                told.append(heard.recv())
            except (EOFError, OSError):
                return told


def _questions(messages: list[ModelMessage]) -> list[str]:
    return [str(part.content) for each in messages for part in each.parts if isinstance(part, UserPromptPart)]


def test_processes_lose_nothing(tmp_path: Path) -> None:
    """Runs of several processes in one conversation are all kept, in the order of each, and none is torn."""
    url = f"sqlite:///{tmp_path}/a.db"
    rounds = 20 if TORTURE else 3
    writers = [_writer(url, name, rounds) for name in "xyz"]
    for name, (process, heard) in zip("xyz", writers, strict=True):
        assert _rest_of(heard) == [f"{name} {round}" for round in range(rounds)]
        process.join()
    found = asyncio.run(PerdureConversationStore(store=url).load("a"))
    assert found is not None
    for name in "xyz":
        mine = [each for each in _questions(found.messages) if each.startswith(name)]
        assert mine == [f"{name} {round}" for round in range(rounds)]
    assert len(found.messages) == 4 * 3 * rounds


def test_a_killed_process_leaves_whole_runs(tmp_path: Path) -> None:
    """Acknowledged runs are there, no run is there in part, and the next process can continue."""
    url = f"sqlite:///{tmp_path}/a.db"
    chance = random.Random(7)
    acknowledged: list[str] = []
    for round in range(KILLS):
        process, heard = _writer(url, f"r{round}", 10**6)
        acknowledged += [heard.recv() for _ in range(chance.randrange(1, 4))]
        time.sleep(chance.random() / 50)
        process.kill()
        acknowledged += _rest_of(heard)
        process.join()
        found = asyncio.run(PerdureConversationStore(store=url).load("a"))
        assert found is not None
        assert set(acknowledged) <= set(_questions(found.messages))
        assert len(found.messages) == 4 * len(_questions(found.messages))


class TestBesidePerdure:
    """Pydantic AI sees the result of perdure's own verbs on a conversation, and a stale save is refused."""

    def store(self) -> PerdureConversationStore:
        return PerdureConversationStore(store=MemoryStore())

    async def test_undo_and_inject(self) -> None:
        """The history ends where perdure's view ends, under another revision."""
        store = self.store()
        old = await with_texts(store, "a", "1", "2", "3", "4")
        assert await store.chat("a").undo() == 3
        await store.chat("a").inject(Message.user("mine"))
        found = await store.load("a")
        assert found is not None
        assert texts(found.messages) == ["1", "2", "3", "mine"]
        old.messages.append(asked("stale"))
        with pytest.raises(ConversationConflict):
            await store.save(old)
        found.messages.append(answered("yours"))
        await store.save(found)
        assert [each.text for each in (await store.chat("a").session()).state.messages][-2:] == ["mine", "yours"]

    async def test_what_was_undone_can_be_branched_back_to(self) -> None:
        """A branch that is left after a verb of perdure is found, too."""
        store = self.store()
        await with_texts(store, "a", "1", "2")
        await store.chat("a").inject(Message.user("mine"))
        found = await store.load("a")
        assert found is not None
        branched = await store.branch("a", at=1, expected_revision=found.revision)
        record = await store.read_record("a")
        assert record is not None
        back = await store.branch("a", from_entry=record.branches[-1], expected_revision=branched.revision)
        assert texts(back.messages) == ["1", "2", "mine"]

    async def test_a_compaction(self) -> None:
        """The agent is shown less and continues from there, and the rest comes back."""
        store = self.store()
        await with_texts(store, "a", *map(str, range(20)))
        chat = store.chat("a")
        await chat.compact(compact_strategy="truncate", keep_last=4)
        found = await store.load("a")
        assert found is not None
        assert len(found.messages) < 10
        assert texts(found.messages)[-4:] == ["16", "17", "18", "19"]
        found.messages.append(asked("20"))
        await store.save(found)
        await chat.uncompact()
        again = await store.load("a")
        assert again is not None
        assert texts(again.messages) == [str(number) for number in range(21)]

    async def test_a_redaction(self) -> None:
        """Its content is gone from the history and from the branches, and the ids stay."""
        store = self.store()
        conversation = await with_texts(store, "a", "the card is 4111-1111", "fine", "more")
        entries = await store.load_entries("a") or []
        await store.branch("a", at=2, expected_revision=conversation.revision)
        await store.chat("a").redact([entries[0].id])
        record = await store.read_record("a")
        assert record is not None
        for tip in (record.head_id, *record.branches):
            history = await store.read_history(tip)
            assert texts([entry.message for entry in history])[0] == "[redacted]"
            assert history[0].id == entries[0].id
        found = await store.load("a")
        assert found is not None
        found.messages.append(asked("goes on"))
        await store.save(found)

    async def test_a_fork(self) -> None:
        """A fork that perdure has made is a conversation under its id, and names its parent."""
        store = self.store()
        conversation = await with_texts(store, "a", "1", "2", "3")
        conversation.usage.incr(RunUsage(requests=4))
        await store.save(conversation)
        await store.chat("a").fork("b")
        await store.chat("a").fork("c", at=1)
        whole, part = await store.load("b"), await store.load("c")
        assert whole is not None
        assert part is not None
        assert (texts(whole.messages), texts(part.messages)) == (["1", "2", "3"], ["1"])
        assert (whole.usage.requests, part.usage.requests) == (4, 0)
        records = {each.conversation_id: each for each in await store.list_conversations()}
        assert {name: each.forked_from for name, each in records.items()} == {"a": None, "b": "a", "c": "a"}
        assert records["c"].forked_at == (await store.load_entries("a") or [])[0].id
        for fork in (whole, part):
            fork.messages.append(asked("goes on"))
            await store.save(fork)
        assert {each.forked_from for each in await store.list_conversations()} == {None, "a"}

    async def test_a_conversation_that_was_cleared(self) -> None:
        """It begins again, without the record's messages."""
        kept = MemoryStore()
        store = PerdureConversationStore(store=kept)
        await with_texts(store, "a", "1", "2")
        await SessionRuntime(shared(kept)).execute("a", ClearSession())
        found = await store.load("a")
        assert found is not None
        assert (found.messages, found.usage) == ([], RunUsage())
        found.messages.append(asked("again"))
        await store.save(found)
        assert [each.conversation_id for each in await store.list_conversations()] == ["a"]

    async def test_a_deleted_conversation(self) -> None:
        """A deleted conversation is neither shown nor written, until it is restored."""
        store = self.store()
        await with_texts(store, "a", "1")
        await store.chat("a").delete()
        assert await store.list_conversations() == []
        with pytest.raises(SessionNotActive, match="restore"):
            await store.load("a")
        await store.chat("a").restore()
        assert await store.load("a") is not None

    async def test_a_claimed_conversation(self) -> None:
        """While perdure runs in it, it can be read, but neither saved nor deleted."""
        kept = MemoryStore()
        store = PerdureConversationStore(store=kept)
        conversation = await with_texts(store, "a", "1")
        claim, _ = await shared(kept).claim("a", version=conversation_version(kept), owner="me", lease=60)
        found = await store.load("a")
        assert found is not None
        found.messages.append(asked("2"))
        with pytest.raises(SessionBusy):
            await store.save(found)
        with pytest.raises(SessionBusy):
            await store.delete("a")
        await shared(kept).release(claim)
        await store.save(found)
        assert conversation.revision != found.revision

    async def test_another_agents_session(self) -> None:
        """An id that another agent has is refused, and nothing is written there."""
        kept = MemoryStore()
        async with connect(shared(kept), model="offline") as sessions:
            await (await sessions.open("a")).send("Hi")
            store = PerdureConversationStore(store=kept)
            for work in (store.load("a"), store.save(Conversation(conversation_id="a")), store.delete("a")):
                with pytest.raises(SessionConflict, match="'pydantic-ai'"):
                    await work
            assert await store.list_conversations() == []

    async def test_owners(self) -> None:
        """Two owners have conversations of the same name, and none sees the other's."""
        kept = MemoryStore()
        ada, bob = (PerdureConversationStore(store=kept, owner=owner) for owner in ("ada", "bob"))
        await with_texts(ada, "a", "ada's")
        assert await bob.load("a") is None
        await with_texts(bob, "a", "bob's")
        await ada.chat("a").fork("b")
        assert [each.conversation_id for each in await ada.list_conversations()] == ["b", "a"]
        assert [each.conversation_id for each in await bob.list_conversations()] == ["a"]
        entry = (await ada.load_entries("a") or [])[0]
        with pytest.raises(LookupError):
            await PerdureConversationStore(store=kept, owner="bob").read_entry(entry.id)


def conversation_version(kept: MemoryStore) -> int:
    session = shared(kept).wait(shared(kept).load("a"))
    assert session is not None
    return session.version


async def test_entries_off_the_history_are_refused() -> None:
    """An entry that no record ends with could not be found again, so it is not written."""
    store = PerdureConversationStore(store=MemoryStore())
    entries = [ConversationEntry(id=name, parent_id=None, message=asked(name)) for name in "xy"]
    record = ConversationRecord(conversation_id="a", head_id="x")
    with pytest.raises(InvalidData, match="each branch by itself"):
        await store.write_record(record, new_entries=entries, expected_revision=None)
    assert await store.load("a") is None
    lost = ConversationRecord(conversation_id="a", head_id="nowhere")
    with pytest.raises(ConversationConflict):
        await store.write_record(lost, expected_revision=None)


async def test_half_characters_come_back() -> None:
    """A text with half a character is kept unchanged."""
    store = PerdureConversationStore(store=MemoryStore())
    await with_texts(store, "a", "half \ud83d")
    found = await store.load("a")
    assert found is not None
    assert texts(found.messages) == ["half \ud83d"]
