"""Pydantic AI's conversations in perdure do what they do in its own store, and more."""

from __future__ import annotations

import pytest

pytest.importorskip("pydantic_ai.conversation_store")

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
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

from perdure import (
    FileStore,
    MemoryStore,
    Message,
    SessionBusy,
    SessionConflict,
    SessionNotActive,
    SqliteStore,
    connect,
    shared,
)
from perdure.adapters.pydantic_ai import PerdureConversationStore

TORTURE = bool(os.environ.get("PERDURE_TORTURE"))
STEPS, KILLS = (2_500, 50) if TORTURE else (100, 3)


def said(chance: random.Random) -> ModelMessage:
    """A message of any kind, with what JSON has no word for and what it may spell in several ways."""
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
    """What work comes to: its value, or the class of its error."""
    try:
        return await work
    except (UserError, LookupError) as error:
        return type(error)


class LockStep:
    """The same operations on two stores, whose ids differ: they are compared by what stands under them."""

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
        """Say something more; now and then in a scope, which may be another's."""
        pair = await self.loaded()
        if self.chance.random() < 0.2:
            self.stale.append(await self.loaded())
        new = [said(self.chance) for _ in range(self.chance.randrange(4))]
        for conversation in pair:
            conversation.messages.extend(new)
            conversation.usage.incr(RunUsage(requests=1, input_tokens=len(new), details={"x": 1}))
        await self.save(pair, self.chance.choice([None, None, None, "ada", "bob " * 100]))

    async def window(self) -> None:
        """Go on from the newest messages alone."""
        pair = await self.loaded(limit=self.chance.randrange(5))
        new = said(self.chance)
        for conversation in pair:
            conversation.messages.append(new)
        await self.save(pair)

    async def rewrite(self) -> None:
        """Put another message in the place of one: what follows becomes a branch that is left."""
        pair = await self.loaded()
        place, new = self.chance.randrange(len(pair[0].messages) + 1), said(self.chance)
        for conversation in pair:
            conversation.messages = [*conversation.messages[:place], new]
        await self.save(pair)

    async def serialized(self) -> None:
        """Save what has been through JSON: the store compares it with what it has."""
        pair = await self.loaded(limit=self.chance.choice([None, 3]))
        away = [ConversationTypeAdapter.validate_json(ConversationTypeAdapter.dump_json(each)) for each in pair]
        new = said(self.chance)
        for conversation in away:
            if self.chance.random() < 2:
                conversation.messages.append(new)
        await self.save((away[0], away[1]))

    async def old(self) -> None:
        """Save what was loaded a while ago."""
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
        """The history of a conversation, and the branches that it has left."""
        record = await store.read_record(name)
        return [] if record is None else [await store.read_history(tip) for tip in (record.head_id, *record.branches)]

    async def same(self, name: str) -> None:
        """Compare all that the stores have of a conversation."""
        records = [await store.read_record(name) for store in self.stores]
        assert (records[0] is None) == (records[1] is None)
        if records[0] is None or records[1] is None:
            return
        lines = [await self.lines(store, name) for store in self.stores]
        assert _shapes(lines[0]) == _shapes(lines[1])
        ids = [{entry.id: place for place, entry in enumerate(sum(each, []))} for each in lines]
        assert _facts(records[0], ids[0]) == _facts(records[1], ids[1])
        if lines[0][0] and hasattr(MemoryStore, "find_message"):
            place = self.chance.randrange(len(lines[0][0]))
            theirs, ours = [await outcome(s.read_entry(lines[side][0][place].id)) for side, s in enumerate(self.stores)]
            assert theirs.message == ours.message
            assert (theirs.parent_id is None) == (ours.parent_id is None)


def _shapes(lines: list[list[ConversationEntry]]) -> list[Any]:
    """Histories, with each parent by its place: it has to be the entry before."""
    return [
        [
            (entry.message, entry.kind, entry.parent_id == (line[place - 1].id if place else None))
            for place, entry in enumerate(line)
        ]
        for line in lines
    ]


def _facts(record: ConversationRecord, ids: dict[str, int]) -> Any:
    places = [ids.get(each or "") for each in (record.head_id, record.forked_at, *record.branches)]
    told = dataclasses.asdict(record)
    return places, {key: told[key] for key in ("usage", "deferred_tool_requests", "scope", "forked_from", "format_version")}


@pytest.mark.parametrize("kind", ["memory", "sqlite", "file", "sqlite owned"])
def test_it_keeps_step_with_pydantics_own_store(kind: str, tmp_path: Path) -> None:
    """Random operations, 10,000 of them in a torture run, have the same outcome in both stores."""
    urls = {"memory": MemoryStore(), "file": f"file://{tmp_path}/f"}
    owner = "ada" if "owned" in kind else None
    ours = PerdureConversationStore(store=urls.get(kind, f"sqlite:///{tmp_path}/a.db"), owner=owner)

    async def play() -> None:
        steps = LockStep(ours, seed=STEPS)
        for _ in range(STEPS):
            await steps.step()

    asyncio.run(play())
