"""The key that a tool gives to a service: one for each call, the same at every attempt."""

from __future__ import annotations

from typing import Any

import perdure
from perdure import MemoryStore, Message, StoreError, ToolCall, ToolContext, tool
from perdure.model.ids import use
from perdure.model.message import Text
from perdure.protocols import ModelReply
from perdure.testing import FailingStore, FrozenClock, ScriptedDriver


class Numbering:
    """A model that calls a tool for each message, under an id that each run gives again."""

    async def respond(self, request: Any, on_delta: Any) -> ModelReply:
        is_asked = request.messages[-1].role == "user"
        part = ToolCall("charge", {}, "call-1") if is_asked else Text("Done.")
        return ModelReply(Message("assistant", (part,)))


class Card:
    """A card that is charged, and notes the keys its tool was given."""

    def __init__(self) -> None:
        self.asked: list[ToolContext] = []
        self.charge = tool(idempotent=True, name="charge")(self._charge)
        self.fails = lambda: None

    def _charge(self, caller: ToolContext) -> str:
        self.asked.append(caller)
        self.fails()
        return "taken"

    def options(self) -> dict[str, Any]:
        return {"tools": [self.charge], "driver": Numbering()}

    @property
    def keys(self) -> list[str]:
        return [each.idempotency_key for each in self.asked]


async def test_calls_of_other_sessions_forks_and_runs_have_other_keys() -> None:
    """Their models may give the same call ids."""
    card = Card()
    async with perdure.connect("memory://", **card.options()) as app:
        ada, ben = await app.open("ada"), await app.open("ben")
        await ada.send("Pay.")
        await ben.send("Pay.")
        forks = [await ada.fork(version=1), await ada.fork(version=1)]
        for each in forks:
            await each.send("Pay.")
        await ben.undo()
        await ben.send("Pay.")
    assert {each.call_id for each in card.asked[:4]} == {"call-1"}
    assert len(set(card.keys)) == 5


async def test_calls_of_one_step_have_keys_of_their_own() -> None:
    card = Card()
    script = ScriptedDriver([[ToolCall("charge"), ToolCall("charge")], "Done."])
    async with perdure.connect("memory://", tools=[card.charge], driver=script) as app:
        await (await app.open("ada")).send("Pay.")
    assert len(set(card.keys)) == 2


async def test_a_call_that_is_made_again_after_a_crash_has_the_same_key() -> None:
    card, kept, clock = Card(), MemoryStore(), FrozenClock()
    failing = FailingStore(kept)
    card.fails = lambda: failing.crash(call=1) if len(card.asked) == 1 else None
    with use(clock=clock):
        doomed = perdure.connect(failing, **card.options())
        await doomed.__aenter__()
        chat = await doomed.open("ada")
        try:
            await chat.send("Pay.")
        except StoreError:
            clock.advance(60)
        async with perdure.connect(kept, **card.options()) as app:
            assert (await app.recover()).resumed == ("ada",)
    first, again = card.keys
    assert first == again


async def test_a_sub_agents_calls_have_keys_of_their_own() -> None:
    """Two calls of one sub-agent are two sessions whose models give the same ids."""
    card = Card()

    def model(request: Any) -> Any:
        is_first = request.messages[-1].role == "user"
        if request.system_prompt == "clerk":
            return ToolCall("charge", {}, "call-1") if is_first else "Done."
        return [ToolCall("clerk", {"prompt": "Pay."}, f"c{number}") for number in "12"] if is_first else "Done."

    clerk = perdure.AgentDefinition("clerk", system_prompt="clerk")
    options = {"driver": ScriptedDriver(model), "subagents": [clerk]}
    async with perdure.connect("memory://", tools=[card.charge], **options) as app:
        await (await app.open("ada")).send("Pay.")
    assert len(card.keys) == 2 == len(set(card.keys))
