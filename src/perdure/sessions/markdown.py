"""A conversation as Markdown for people. A message's text cannot imitate another message or a heading.

Each message is a quote under a heading, so that a heading inside it, or a fence that is never closed, ends with it.
HTML is shown as text, and links and images are shown as they were written instead of followed or loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from perdure.model.message import Envelope, Media, Message, Opaque, Part, Text, Thinking, ToolCall, ToolResult
from perdure.model.openai_form import described
from perdure.model.session import AgentSession

_FENCE = re.compile(r" {0,3}(?:(?P<ticks>`{3,})(?P<info>[^`]*)|(?P<tildes>~{3,})(?P<more>.*))")
"""The beginning of a block of code. Nothing else may begin one here, or HTML behind it would not be escaped."""
_LANGUAGE = re.compile(r"[A-Za-z0-9+#_.-]{1,30}")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u0080-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that are not visible, or change the order of those that are. Tabs and line feeds stay."""


def transcript(session: AgentSession, messages: Iterable[Message]) -> str:
    """Return messages of a session as a Markdown document."""
    info = session.info
    lines = [f"# {inline(info.name or info.id)}", "", f"Session {code(info.id)}, agent {code(info.agent_name)}."]
    if session.state.context.system_prompt.strip():
        lines += ["", "## System prompt", "", *quoted(session.state.context.system_prompt)]
    for message in messages:
        lines += [] if message.is_sealed else ["", *_message(message)]
    return "\n".join(lines) + "\n"


def _message(message: Message) -> Iterator[str]:
    yield f"## {message.role.capitalize()}{' (incomplete)' if message.is_incomplete else ''}"
    for part in message.parts:
        shown = list(_part(part))
        if shown:
            yield ""
            yield from shown


def _part(part: Part) -> Iterator[str]:
    match part:
        case Text():
            yield from quoted(part.text) if part.text.strip() else ()
        case Thinking():
            yield "*Thought:*"
            yield ""
            yield from quoted(part.text or "(encrypted)")
        case Media():
            yield code(described(part))
        case ToolCall():
            arguments = msgspec.json.format(msgspec.json.encode(part.arguments), indent=2).decode()
            yield f"*Calls* {code(part.name)} *as* {code(part.id)}:"
            yield ""
            yield from fenced(arguments, "json")
        case ToolResult():
            yield f"*{'Error' if part.is_error else 'Result'} of* {code(part.call_id)}:"
            yield ""
            yield from fenced(part.text)
        case Opaque():
            yield f"*For* {code(part.provider)} *only.*"
        case Envelope():
            pass
        case _:
            yield "*A part that this release does not know.*"


def quoted(text: str) -> Iterator[str]:
    """Yield the lines of a quote that shows a text. Blocks of code in it stay blocks of code."""
    lines = iter(_plain(text).split("\n"))
    for line in lines:
        fence = _FENCE.fullmatch(line)
        shown = _block(lines, fence) if fence else [inline(line)]
        for each in shown:
            yield f"> {each}".rstrip()


def _block(lines: Iterator[str], fence: re.Match[str]) -> Iterator[str]:
    """Take the lines of a block of code up to its end, and yield them in a fence of our own."""
    mark, info = fence["ticks"] or fence["tildes"], fence["info"] or fence["more"] or ""
    end = re.compile(rf" {{0,3}}{re.escape(mark[0])}{{{len(mark)},}}[ \t]*")
    body: list[str] = []
    for line in lines:
        if end.fullmatch(line):
            break
        body.append(line)
    language = _LANGUAGE.match(info.strip())
    return fenced("\n".join(body), language[0] if language else "")


def fenced(text: str, language: str = "") -> Iterator[str]:
    """Yield a block of code whose fence is longer than anything in it that looks like one."""
    text = _plain(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield fence + language
    yield from text.split("\n")
    yield fence


def code(text: str) -> str:
    """Return a text as code within a line."""
    text = _plain(text).replace("\n", " ").strip() or "?"
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    mark = "`" * (longest + 1)
    pad = " " if "`" in text else ""
    return f"{mark}{pad}{text}{pad}{mark}"


# The order matters: an escaped character stays as it is, and a run of backticks counts as one.
_SPECIAL = re.compile(r"\\[!-/:-@\[-`{-~]|`+|[<&]|\](?=[(:])")


def inline(line: str) -> str:
    """Return a line of text in which HTML, entities and links are shown as they were written.

    Code spans stay. A backtick that has no partner in its line is escaped. Otherwise one in a later line would become
    its partner, and what looks like code there would not be code.
    """
    made, at, line = [], 0, _plain(line).replace("\n", " ")
    while (found := _SPECIAL.search(line, at)) is not None:
        made.append(line[at : found.start()])
        token, at = found[0], found.end()
        if token.startswith("`"):
            partner = re.compile(rf"(?<!`){token}(?!`)").search(line, at)
            stop = partner.end() if partner else at
            made.append(line[found.start() : stop] if partner else "\\`" * len(token))
            at = stop
        else:
            made.append(_ESCAPED.get(token, token))
    return "".join([*made, line[at:]])


# The backslash after `]` escapes the `(` or `:` that follows, so that no link and no reference begins there.
_ESCAPED = {"<": "&lt;", "&": "&amp;", "]": "]\\"}


def _plain(text: str) -> str:
    """Return a text with invisible characters replaced by U+FFFD, and with one kind of line end."""
    return _CONTROLS.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
