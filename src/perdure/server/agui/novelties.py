"""The new messages in the input of a front end, which sends the whole conversation each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.errors import ConfigurationError, InvalidData
from perdure.loop.external import ExternalTool, external_tool, specs_of
from perdure.model.message import Message
from perdure.model.value import clean_text
from perdure.protocols import FindsMessages
from perdure.server.agui.inputs import ActivityMessage, ReasoningMessage, RunAgentInput, Said, ToolMessage, UserMessage
from perdure.server.agui.messages import BESIDE, session_messages
from perdure.sessions.sessions import Sessions
from perdure.sessions.viewing import View

New = list[tuple[str, Said]]
"""Messages, each with its path in the input."""


async def new_in(sessions: Sessions, view: View, given: RunAgentInput) -> New:
    """Return the messages after the last one that the session has, each with its path."""
    new: New = []
    for path, message in reversed(all_said(given)):
        if await _is_known(sessions, view, message, is_last=not new):
            _require_same(view, message, path)
            break
        new.append((path, message))
    return new[::-1]


def all_said(given: RunAgentInput) -> New:
    """Return the messages that are part of the conversation, each with its path.

    Activities belong to the front end, and the thoughts of a model came from this service.
    """
    numbered = enumerate(given.messages)
    return [
        (f"$.messages[{n}]", each) for n, each in numbered if not isinstance(each, ActivityMessage | ReasoningMessage)
    ]


def all_shown(view: View) -> Sequence[Message]:
    """Return what a front end shows of a thread, including what the run under way says and what waits for its turn."""
    return (*view.messages, *view.asked, *view.said, *view.queued)


async def _is_known(sessions: Sessions, view: View, message: Said, *, is_last: bool) -> bool:
    shown = all_shown(view)
    if any(each.id == message.id for each in shown):
        return True
    if isinstance(message, ToolMessage):  # the result of a call has an id of our own
        is_ours = any(each.id == message.tool_call_id for said in shown for each in said.tool_calls)
        return is_ours and not waits(view, message)
    if view.session.version == 1:
        return False
    if is_last and isinstance(message, UserMessage):  # its id is a key; one that was refused can be sent again
        journal = sessions.runtime.journal
        return journal is not None and await journal.find_key(view.session.id, message.id) is not None
    store = sessions.store
    places = await sessions.find(message.id) if isinstance(store, FindsMessages) else ()
    return any(place.session_id == view.session.id for place in places)


def _require_same(view: View, message: Said, path: str) -> None:
    """Raise InvalidData if a user's message is kept with another text: it would be ignored."""
    if not isinstance(message, UserMessage) or not isinstance(message.content, str):
        return
    kept = next((each for each in all_shown(view) if each.id == message.id), None)
    if kept is not None and kept.text != clean_text(message.content):
        raise InvalidData(
            f"{path}.id", "the message of this id says something else; give an edited one an id of its own"
        )


def waits(view: View, message: ToolMessage) -> bool:
    return any(call.external and call.id == message.tool_call_id for call in view.pending_calls)


def sendable(new: New, most: int) -> list[Message]:
    """Return new messages as those of a session. Raise InvalidData if there are too many, or nothing to answer."""
    if len(new) > most:
        raise InvalidData("$.messages", f"expected at most {most} new messages, got {len(new)}")
    path, last = new[-1] if new else ("$.messages", None)
    if not isinstance(last, UserMessage):
        raise InvalidData(path, "there is nothing to answer: the last message has to be a user's")
    return session_messages(new)


def tools_in(given: RunAgentInput) -> list[ExternalTool]:
    """Return the front end's tools. Raise InvalidData if one of them cannot be called, or there are too many."""
    tools = []
    for place, each in enumerate(given.tools or ()):
        try:
            tools.append(external_tool(each.name, each.description, each.parameters))
        except ConfigurationError as error:  # the front end has made the mistake, not the operator
            raise InvalidData(f"$.tools[{place}]", error.what) from None
    specs_of(tools)
    return tools


def options_in(given: RunAgentInput) -> dict[str, Any]:
    tools = tools_in(given)
    told = "\n\n".join(f"{each.description}:\n{each.value}" for each in given.context or ())
    ids = {"threadId": given.thread_id, "runId": given.run_id, "parentRunId": given.parent_run_id}
    options = {
        "external_tools": tools or None,
        "instructions": told or None,
        "context_data": given.forwarded_props or None,
        "metadata": {BESIDE: {name: value for name, value in ids.items() if value is not None}},
    }
    return {name: value for name, value in options.items() if value is not None}
