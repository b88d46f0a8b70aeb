"""Checks of requests by OpenAI's and Anthropic's rules, as their references give them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from perdure import Message, Text
from perdure.protocols import ModelRequest

_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def problems_of(request: ModelRequest) -> list[str]:
    """Return the reasons for which a provider would refuse a request."""
    messages = tuple(request.messages)
    return [*_blocks(messages), *_calls(messages), *_turns(messages)]


def _blocks(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if not message.parts:
            yield f"a {message.role} message is empty"
        for part in message.parts:
            if isinstance(part, Text) and not part.text.strip():
                yield f"a {message.role} message has a blank text"
        for call in (*message.tool_calls,):
            if not _CALL_ID.fullmatch(call.id):
                yield f"a call has the id {call.id!r}"
        if message.tool_calls and message.role != "assistant":
            yield f"a {message.role} message makes a call"


def _calls(messages: Sequence[Message]) -> Iterator[str]:
    """Check that every call has exactly one result, directly after its message, and that no result is elsewhere."""
    place = 0
    while place < len(messages):
        wanted = [call.id for call in messages[place].tool_calls]
        if len(set(wanted)) < len(wanted):
            yield f"two calls of one message have one id: {wanted}"
        if messages[place].role == "tool" or messages[place].tool_results:
            yield f"a result stands alone: {[result.call_id for result in messages[place].tool_results]}"
        place += 1
        found: list[str] = []
        while wanted and place < len(messages) and messages[place].role == "tool":
            found += [result.call_id for result in messages[place].tool_results]
            place += 1
        if sorted(found) != sorted(wanted):
            yield f"calls {wanted} are followed by results {found}"


def _turns(messages: Sequence[Message]) -> Iterator[str]:
    """Check Anthropic's turns: a user begins, results are a user's, and the model does not continue its own turn."""
    turns = ["assistant" if message.role == "assistant" else "user" for message in messages if message.role != "system"]
    if not turns:
        yield "there is no message"
    elif turns[0] != "user":
        yield "it begins with an assistant's message"
    elif turns[-1] != "user":
        yield "it ends with an assistant's message"
