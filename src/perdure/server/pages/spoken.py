"""Messages as pages show them: their texts, and every tool call in one box with what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from perdure.model.message import Envelope, Media, Message, Part, Text, Thinking, ToolCall, ToolResult
from perdure.server.pages.figures import brief, in_line, pretty

UNKNOWN = "OutcomeUnknown"
"""What the result of a call says whose process was killed before it was told the outcome."""


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call and its result."""

    name: str
    line: str
    """Its arguments on one line."""
    arguments: str
    result: str | None = None
    result_line: str = ""
    is_error: bool = False
    is_unknown: bool = False


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """A message: who said it, and what."""

    id: str
    role: str
    texts: tuple[str, ...] = ()
    thoughts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    others: tuple[str, ...] = ()
    """Parts that only a provider understands, as JSON."""
    is_incomplete: bool = False
    tokens: int | None = None
    """How many tokens it is estimated to be, with the results that are shown in it."""


def spoken(messages: Sequence[Message], tokens: Sequence[int] | None = None) -> list[Spoken]:
    """Return messages as they are shown. The results of calls stand with the calls, not in messages of their own."""
    sizes = [None] * len(messages) if tokens is None else tokens
    answers = {result.call_id: result for message in messages for result in message.tool_results}
    shown: list[Spoken] = []
    called: set[str] = set()
    for message, size in zip(messages, sizes, strict=True):
        left = [result for result in message.tool_results if result.call_id not in called]
        if message.role == "tool" and not left and shown:
            if size is not None:
                shown[-1] = msgspec.structs.replace(shown[-1], tokens=(shown[-1].tokens or 0) + size)
            continue
        called.update(call.id for call in message.tool_calls)
        shown.append(_shown(message, answers, left, size))
    return shown


def _shown(message: Message, answers: dict[str, ToolResult], alone: Iterable[ToolResult], size: int | None) -> Spoken:
    parts = message.parts
    return Spoken(
        id=message.id,
        role=message.role,
        texts=tuple(part.text for part in parts if isinstance(part, Text) and part.text),
        thoughts=tuple(part.text for part in parts if isinstance(part, Thinking) and part.text),
        files=tuple(part.label for part in parts if isinstance(part, Media)),
        boxes=(*(box_of(call, answers.get(call.id)) for call in message.tool_calls), *map(_alone, alone)),
        others=tuple(pretty(part) for part in parts if _is_other(part)),
        is_incomplete=message.is_incomplete,
        tokens=size,
    )


def _is_other(part: Part) -> bool:
    return not isinstance(part, Text | Thinking | Media | ToolCall | ToolResult | Envelope)


def box_of(call: ToolCall, result: ToolResult | None) -> Box:
    """Return a call with its result, if there is one."""
    box = Box(name=call.name, line=in_line(call.arguments), arguments=pretty(call.arguments))
    return box if result is None else _answered(box, result)


def _alone(result: ToolResult) -> Box:
    """Return a result whose call is not shown."""
    return _answered(Box(name=result.name or "result", line="", arguments=""), result)


def _answered(box: Box, result: ToolResult) -> Box:
    told = result.text if isinstance(result.content, str) else pretty(result.content)
    is_unknown = result.is_error and told.startswith(UNKNOWN)
    return msgspec.structs.replace(
        box,
        result=told,
        result_line="outcome unknown" if is_unknown else brief(result.text),
        is_error=result.is_error,
        is_unknown=is_unknown,
    )
