"""The model of a world: it follows the first word of the last message, and checks its requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from random import Random
from typing import Protocol

from tests.pairs.model import TEMPERED, Model, words_in
from tests.pairs.request_form import problems_of

from perdure import DriverError, Message, ToolCall, Usage
from perdure.model.step import InferenceResponse
from perdure.protocols import Delta, ModelReply, ModelRequest, OnDelta

ASKS = ("ask", "ask", "ask", "charge", "pay", "clerk", "slow")
"""The words with which a caller's message may begin."""
MOST_STEPS = 3
_ASKED = re.compile(r"^(\w+) ([wt]\d+x\d+)")


class Quirk:
    """The oddities of one case's model: how it names its calls, whether it fails, whether it is silent."""

    def __init__(self, chance: Random) -> None:
        (self.ids,) = chance.choices(("new", "again", "odd"), (60, 33, 7))
        (self.fails, self.blank) = chance.choices(((0.0, False), (0.15, False), (0.0, True)), (78, 15, 7))[0]


class Surroundings(Protocol):
    """The parts of a world that a model needs."""

    seed: int
    quirk: Quirk
    model: Model

    def new_word(self, kind: str) -> str: ...

    async def take_time(self) -> None: ...


class Mind:
    """A driver. Its answers contain a word of their own and none of the caller's, so that a redaction can be seen."""

    def __init__(self, world: Surroundings, require_alive: Callable[[], None]) -> None:
        self._world = world
        self._require_alive = require_alive
        self.requests = 0

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        self._require_alive()
        self.requests += 1
        for problem in problems_of(request):
            self._world.model.note("broken", what=f"4: {problem}")
        if not request.tools:
            return _reply(Message.assistant("summary of " + " ".join(sorted(_words_of(request)))))
        asked, word = _asked(request)
        if word in self._world.model.tempered and request.model.temperature != TEMPERED:
            self._world.model.note("broken", what=f"4: {word} was asked with {request.model.temperature}")
        chance = Random(f"{self._world.seed}/{word}/{request.step}")
        await self._take_time(asked, chance)
        if Random(f"{self.requests}/{word}").random() < self._world.quirk.fails:
            raise DriverError("The model was told to fail.")
        calls = self._calls(asked, word, request, chance)
        if calls:
            return await self._streamed(Message.assistant(tool_calls=calls), [], on_delta)
        if self._world.quirk.blank and chance.random() < 0.3:
            return await self._streamed(Message("assistant", Message.user(" ").parts), [], on_delta)
        pieces = ["answer ", self._world.new_word("t"), " and", " so on"]
        return await self._streamed(Message.assistant("".join(pieces)), pieces, on_delta)

    async def _take_time(self, asked: str, chance: Random) -> None:
        for _ in range(chance.randint(5, 30) if asked == "slow" else 0):
            await self._world.take_time()
        self._require_alive()

    def _calls(self, asked: str, word: str, request: ModelRequest, chance: Random) -> list[ToolCall]:
        offered = [tool.name for tool in request.tools]
        if not word or request.step >= MOST_STEPS:
            return []
        often = [1 if name in ("pay", "clerk") else 4 for name in offered]
        if request.step == 0 and asked in offered:
            names = [asked, *chance.choices(offered, often, k=chance.choice((0, 0, 1)))]
        else:
            names = chance.choices(offered, often, k=chance.choice((0, 0, 1, 1, 2)))
        return [self._call(name, place, word, request.step, chance) for place, name in enumerate(names)]

    def _call(self, name: str, place: int, word: str, step: int, chance: Random) -> ToolCall:
        about = f"{step}.{place}.{_disguised(word)}"
        arguments: dict[str, object] = {"about": about}
        if name == "clerk":
            arguments = {"prompt": f"{chance.choice(('pay', 'pay', 'ask'))} {self._world.new_word('t')}"}
        elif name in ("charge", "pay"):
            arguments["amount"] = chance.randint(1, 9)
        match self._world.quirk.ids:
            case "again":
                return ToolCall(name, arguments, id=f"call_{place}")
            case "odd":
                return ToolCall(name, arguments, id=f"call:{step}/{place} é")
        return ToolCall(name, arguments)

    async def _streamed(self, message: Message, pieces: list[str], on_delta: OnDelta) -> ModelReply:
        for piece in pieces:
            await on_delta(Delta("text", piece))
            await asyncio.sleep(0)
        self._require_alive()
        return _reply(message)


def _asked(request: ModelRequest) -> tuple[str, str]:
    """Return the request of the last user's message, and its word; nothing if it was redacted or covered."""
    said = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
    found = _ASKED.match(said)
    return (found[1], found[2]) if found else ("", "")


def _words_of(request: ModelRequest) -> set[str]:
    return {word for message in request.messages for word in words_in(message.text)}


def _disguised(word: str) -> str:
    """Return a name for a word that is not the word: calls are not redacted with the message that asks for them."""
    return word.translate(str.maketrans("0123456789", "abcdefghij"))


def _reply(message: Message) -> ModelReply:
    reason = "tool_call" if message.tool_calls else "stop"
    return ModelReply(message, InferenceResponse(reason, Usage(10, 5), model="mind", provider="mind"))
