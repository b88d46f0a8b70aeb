"""The request of one step, as a page shows it: prompt, tools and messages, with the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from perdure.errors import VersionForgotten
from perdure.loop.tokens import TokenEstimator
from perdure.model.message import Message
from perdure.model.record import LoopRecord
from perdure.protocols import ToolSpec
from perdure.server.pages.conversation import SaidBox, boxes_of
from perdure.server.pages.texts import indented
from perdure.server.pages.token_bar import Share, shares_of, tools_here
from perdure.sessions.sent import Sent, sent_in
from perdure.sessions.sessions import Sessions

_SHOWN = 200
"""The number of messages that are shown: the last ones."""


class ToolTold(msgspec.Struct, frozen=True):
    """A tool as a model is told of it."""

    name: str
    description: str
    parameters: str
    tokens: int


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a model. Tokens are estimates."""

    prompt: str = ""
    instructions: str = ""
    tools: tuple[ToolTold, ...] = ()
    form: str = ""
    """The JSON schema of the answer, if it was to have a form."""
    messages: tuple[tuple[SaidBox, int], ...] = ()
    """The messages, each with its tokens. Those of a result count for the message that has the call."""
    earlier: int = 0
    """The number of messages that are not shown, since there are too many."""
    shares: tuple[Share, ...] = ()
    missing: str = ""
    """The reason why nothing is known about it."""

    @property
    def total(self) -> int:
        return sum(share.tokens for share in self.shares)


async def what_was_sent(sessions: Sessions, loop: LoopRecord, step_id: str) -> ModelCall:
    """Return the request of a step's model call as the record has it, or the reason why the record has none."""
    try:
        found = await sent_in(sessions, loop, step_id)
    except VersionForgotten:
        return ModelCall(missing="The version that this run set out from was forgotten, so it cannot be told any more.")
    if found is None:
        return ModelCall(missing="The record does not tell from which version this run set out.")
    return await _told(sessions, found, None if loop.config is None else loop.config.model)


async def _told(sessions: Sessions, found: Sent, model: str | None) -> ModelCall:
    estimate, execution = TokenEstimator(), found.state.execution
    own = execution.external_tools if execution is not None else ()
    tools = [*tools_here(sessions, found.definition)]
    tools += [ToolSpec(tool.name, tool.description, tool.parameters) for tool in own]
    sizes = await estimate.count_each(found.messages, model)
    earlier = max(0, len(found.messages) - _SHOWN)
    form = found.state.response_format or found.definition.output
    counted = [
        ("prompt", "system prompt", estimate.overhead(found.state.system_prompt, (), model)),
        ("tools", "tools", estimate.overhead("", tools, model)),
        ("messages", "messages", sum(sizes)),
    ]
    return ModelCall(
        prompt=found.state.context.system_prompt,
        instructions=(execution.instructions or "") if execution is not None else "",
        tools=tuple(_tool(each, estimate.overhead("", [each], model)) for each in tools),
        form="" if form is None else indented(form),
        messages=_sized(found.messages[earlier:], sizes[earlier:]),
        earlier=earlier,
        shares=tuple(shares_of(counted)),
    )


def _tool(tool: ToolSpec, tokens: int) -> ToolTold:
    return ToolTold(tool.name, tool.description, indented(tool.parameters), tokens)


def _sized(messages: Sequence[Message], sizes: Sequence[int]) -> tuple[tuple[SaidBox, int], ...]:
    """Return the boxes of messages with their tokens. A message without a box is a result that is shown in another."""
    boxes, tokens = boxes_of(messages), [0]
    for message, size in zip(messages, sizes, strict=True):
        place = len(tokens) - 1
        if place < len(boxes) and boxes[place].id == message.id:
            tokens.append(0)
        tokens[-1] += size
    return tuple(zip(boxes, tokens[1:], strict=True))
