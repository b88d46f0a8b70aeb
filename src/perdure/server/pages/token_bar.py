"""A bar of what goes to the model with the next message, by its parts, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.errors import ConfigurationError
from perdure.loop.compaction.draft import MARK
from perdure.loop.compaction.options import STRATEGIES
from perdure.loop.tokens import TokenEstimator
from perdure.model.definition import AgentDefinition
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.protocols import ToolSpec
from perdure.sessions.sessions import Sessions

WIDTH = 1000
"""The width of the bar, in its own units."""


@dataclass(frozen=True)
class Share:
    """A part of what is sent."""

    kind: str
    name: str
    tokens: int
    x: float
    width: float


@dataclass(frozen=True)
class TokenBar:
    """The parts that are sent, and to which model."""

    shares: Sequence[Share]
    total: int
    is_estimate_of_all: bool
    """True if the messages beyond the window are estimated from those in it."""
    model: str | None


def token_bar(
    sessions: Sessions, session: AgentSession, messages: Sequence[Message], estimator: TokenEstimator
) -> TokenBar:
    """Return what the model would be sent. Of a long view only the window is counted, and the rest is estimated."""
    model = sessions.loops.named_model(session.definition, session.state)
    name = None if model is None else model.name
    tools = tools_here(sessions, session.definition)
    made = [each for each in messages if each.metadata.get(MARK) in STRATEGIES]
    said = [each for each in messages if each.metadata.get(MARK) not in STRATEGIES]
    beyond = len(session.state.transcript) - len(messages)
    of_said = estimator.messages(said, name)
    of_said += round(of_said / len(said) * beyond) if said and beyond > 0 else 0
    counted = [
        ("prompt", "system prompt", estimator.overhead(session.state.system_prompt, (), name)),
        ("tools", f"{len(tools)} tool{'' if len(tools) == 1 else 's'}", estimator.overhead("", tools, name)),
        ("summary", "summaries", estimator.messages(made, name)),
        ("messages", "messages", of_said),
    ]
    return TokenBar(shares_of(counted), sum(tokens for _, _, tokens in counted), beyond > 0, name)


def shares_of(counted: Sequence[tuple[str, str, int]]) -> list[Share]:
    """Return parts, each a kind, a name and its tokens, as stretches of the bar. What has no tokens is left out."""
    # Shares are divided by it, so it must not be 0.
    total = sum(tokens for _, _, tokens in counted) or 1
    shares, at = [], 0.0
    for kind, name, tokens in counted:
        width = round(WIDTH * tokens / total, 1)
        if tokens:
            shares.append(Share(kind, name, tokens, round(at, 1), width))
        at += width
    return shares


def tools_here(sessions: Sessions, definition: AgentDefinition) -> list[ToolSpec]:
    """Return the agent's tools, as far as this process knows them. A worker may have others."""
    try:
        known = sessions.loops.all_tools(definition, 0)
    except ConfigurationError:  # only workers know the agent's tools
        return []
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in known]
