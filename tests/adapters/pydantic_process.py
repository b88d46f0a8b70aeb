"""A process that runs an agent of Pydantic AI in one conversation, over and over, to be raced or killed."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

from pydantic_ai import Agent
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import ConversationConflict
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.usage import UsageLimits

from perdure.adapters.pydantic_ai import PerdureConversationStore


def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Look once, then answer: a run has four messages."""
    if isinstance(messages[-1].parts[0], ToolReturnPart):
        return ModelResponse(parts=[TextPart("done")])
    return ModelResponse(parts=[ToolCallPart("look", {"at": len(messages)})])


agent = Agent(FunctionModel(model))


@agent.tool_plain
def look(at: int) -> str:
    """Return what was seen."""
    return f"seen {at}"


def write(url: str, name: str, rounds: int, told: Connection) -> None:
    """Run the agent that number of times, and report each question whose run is saved."""
    asyncio.run(_write(PerdureConversationStore(store=url), name, rounds, told))


async def _write(store: PerdureConversationStore, name: str, rounds: int, told: Connection) -> None:
    done = 0
    while done < rounds:
        conversation = await store.load("a") or Conversation(conversation_id="a")
        question = f"{name} {done}"
        result = await agent.run(question, conversation=conversation, usage_limits=UsageLimits(request_limit=None))
        try:
            await store.save(result)
        except ConversationConflict:
            continue
        told.send(question)
        done += 1
