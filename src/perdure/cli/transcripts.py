"""Messages as lines of text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from perdure.cli.terminal import console, is_terminal, line, safe, say
from perdure.model.message import Media, Message, Part, Text, Thinking, ToolCall, ToolResult

_STYLES = {"user": "bold cyan", "assistant": "bold green", "tool": "bold yellow", "system": "bold magenta"}
_WIDTH = 2000


def print_messages(messages: Iterable[Message], *, mark: str = "") -> None:
    """Each message under the name of who said it; a mark may stand before every line."""
    for message in messages:
        _print_head(f"{mark}{message.role}", message)
        for part in message.parts:
            for text in _lines_of(part):
                say(f"{mark}  {text}")


def _print_head(title: str, message: Message) -> None:
    if not is_terminal():
        say(f"{title}  {message.id}")
        return
    from rich.text import Text as Styled

    head = Styled(safe(title), style=_STYLES[message.role])
    head.append(f"  {line(message.id)}", style="dim")
    console().print(head, soft_wrap=True)


def _lines_of(part: Part) -> list[str]:
    match part:
        case Text():
            return part.text.split("\n")
        case ToolCall():
            return [f"→ {part.name}({_arguments(part)})"]
        case ToolResult():
            return [("✗ " if part.is_error else "← ") + line(part.text, _WIDTH)]
        case Thinking():
            return [f"(thinks) {text}" for text in part.text.split("\n")]
        case Media():
            return [f"[{part.media_type} {part.name or part.url or ''}]"]
    return [f"[{type(part).__name__}]"]


def _arguments(call: ToolCall) -> str:
    return ", ".join(f"{name}={_brief(value)}" for name, value in call.arguments.items())


def _brief(value: Any) -> str:
    return line(json.dumps(value, ensure_ascii=False, default=str), 200)
