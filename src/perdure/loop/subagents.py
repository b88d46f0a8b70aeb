"""Agents as tools: a definition that another agent may call, in a session of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from perdure.errors import ConfigurationError, ToolError
from perdure.loop.tool_use import Outcome
from perdure.model.definition import AgentDefinition
from perdure.model.execution import ExecutionStatus
from perdure.model.message import Message
from perdure.model.state import AgentState
from perdure.model.value import ErrorRecord
from perdure.protocols import LoopBuilder, ToolContext

if TYPE_CHECKING:
    from perdure.loop.factory import LoopFactory


class SubagentPolicy(msgspec.Struct, frozen=True):
    """The limit on how deep agents may call agents. At the last level, sub-agents are not among the tools."""

    max_depth: int = 3
    """The number of levels of sub-agents below the first agent."""

    def __post_init__(self) -> None:
        if type(self.max_depth) is not int or self.max_depth < 0:
            raise ConfigurationError(f"max_depth is a whole number of at least 0, not {self.max_depth!r}.")


class SubagentTool:
    """A tool that calls an agent with a prompt. The caller is shown the final text and nothing else."""

    timeout: float | None = None
    idempotent = True
    on_unknown: Literal["error", "rerun", "ask"] = "rerun"
    """Calling again repeats nothing: a child session under way is found by its id and continued."""

    def __init__(self, definition: AgentDefinition, loops: LoopFactory, depth: int) -> None:
        self.definition = definition
        self.depth = depth
        # Any text may name an agent; providers take only these characters, and 64 of them, in a tool's name.
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", definition.name)[:64]
        self.description = definition.description or f"Ask the agent {definition.label or definition.name}."
        self.parameters: Mapping[str, Any] = {
            "type": "object",
            "properties": {"prompt": {"type": "string", "description": "What the agent is to do."}},
            "required": ["prompt"],
            "additionalProperties": False,
        }
        self._loops = loops

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        return False

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        prompt = arguments.get("prompt")
        if set(arguments) != {"prompt"} or not isinstance(prompt, str) or not prompt.strip():
            raise ToolError(f"{self.name} takes one argument, prompt, a text that is not blank.")
        return arguments

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Outcome:
        if context.spawn is not None:
            spawned: Outcome = await context.spawn(self, arguments["prompt"], context)
            return spawned
        await self._loops.connect_tools(self.definition)
        state = AgentState.of(self.definition).with_parent_agent(context.agent_id)
        asked = state.with_messages(Message.user(arguments["prompt"]))
        return outcome_of(self.name, await run_alone(self._loops, self.definition, asked, self.depth))

    @property
    def loops(self) -> LoopFactory:
        return self._loops


async def run_alone(loops: LoopBuilder, definition: AgentDefinition, state: AgentState, depth: int) -> AgentState:
    """Run a sub-agent that belongs to no session. Return the state at its end."""
    return await loops.build(definition, depth=depth).run(state)


def outcome_of(name: str, state: AgentState) -> Outcome:
    """Return the outcome of a sub-agent's run for its caller: the final text, or an error if there is none."""
    response = state.final_response
    if response is not None and state.status is not ExecutionStatus.FAILED:
        return Outcome(response.text, usage=state.usage)
    said = "".join(message.text for message in state.current_response if message.is_incomplete)
    left = f" It was cut off after: {said}" if said else ""
    error = ErrorRecord("SubagentFailed", f"Agent {name} gave no answer: {_why(state)}.{left}")
    return Outcome(error=error, usage=state.usage)


def _why(state: AgentState) -> str:
    execution = state.execution
    if execution is not None and execution.pending_calls:
        return "it waits for an approval, which can only be given to an agent in a session"
    cause = execution.cause if execution is not None else None
    reason = state.stop_reason.value if state.stop_reason else "unknown"
    return f"{reason}, {cause.message.rstrip('.')}" if cause else reason
