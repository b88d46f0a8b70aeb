"""Conversations: sessions that several responses are a part of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec

from perdure.actions.metadata import WriteMetadata
from perdure.model.message import Message, ToolCall
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.server.call import Call
from perdure.server.making import Seed, make_session
from perdure.server.openai.asking import check_metadata
from perdure.server.openai.errors import invalid, not_found
from perdure.server.openai.finding import journal_of, reached
from perdure.server.openai.ids import conversation_id, key_of, session_of
from perdure.server.openai.inputs import read_input
from perdure.server.openai.items import IsOutside, Item, input_items
from perdure.server.openai.paging import ListForm, page_of
from perdure.sessions.sessions import Sessions

_METADATA = "openai"
"""The metadata key of what clients keep with a conversation."""


class NewConversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ChangedConversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    metadata: dict[str, str] | None


class NewItems(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    items: list[dict[str, Any]]


class ConversationForm(TypedDict):
    id: str
    object: str
    created_at: int
    metadata: dict[str, str]


class DeletedForm(TypedDict):
    id: str
    object: str
    deleted: bool


async def create_conversation(call: Call) -> ConversationForm:
    """Create a conversation. Its agent is that of the first response that names one."""
    wanted: NewConversation = call.body
    check_metadata(wanted.metadata)
    # The id is made of the key: any process finds what the same request has made.
    name = None if call.key is None else f"v1c-{key_of(call.key, call.caller.owner)}"
    kept = {_METADATA: wanted.metadata} if wanted.metadata else {}
    agent = next(iter(call.service.agents.values()))
    info, _ = await make_session(call, name, Seed(agent=agent, messages=_said(call, wanted.items), metadata=kept))
    return await _form(call.sessions, info)


async def get_conversation(call: Call) -> ConversationForm:
    return await _form(call.sessions, await _found(call))


async def update_conversation(call: Call) -> ConversationForm:
    """Keep other metadata with a conversation."""
    info, wanted = await _found(call), call.body
    check_metadata(wanted.metadata)
    await call.sessions.execute(info.id, WriteMetadata(_METADATA, wanted.metadata or {}))
    return await _form(call.sessions, info)


async def delete_conversation(call: Call) -> DeletedForm:
    """Hide a conversation, and what is in it. `DELETE /api/sessions/{id}?erase=true` erases it."""
    info = await _found(call)
    await call.sessions.delete(info.id)
    return {"id": conversation_id(info.id), "object": "conversation.deleted", "deleted": True}


async def list_items(call: Call) -> ListForm:
    """Return what was said in a conversation, as the model is shown it."""
    return page_of(await _items(call), call.query, call.service.settings.limits.page)


async def create_items(call: Call) -> ListForm:
    """Add items to a conversation, without an answer."""
    info = await _found(call)
    said = _said(call, call.body.items)
    if not said:
        raise invalid("items", "there is nothing to add")
    before = {item["id"] for item in await _items(call)}
    await call.sessions.inject(info.id, said)
    added = [item for item in await _items(call) if item["id"] not in before]
    first, last = (added[0]["id"], added[-1]["id"]) if added else ("", "")
    return {"object": "list", "data": added, "first_id": first, "last_id": last, "has_more": False}


async def get_item(call: Call) -> Item:
    """Return one item of a conversation."""
    given = call.path("item")
    for item in await _items(call):
        if item["id"] == given:
            return item
    raise not_found("Item", given)


async def _found(call: Call) -> AgentSessionInfo:
    given = call.path("conversation")
    session_id = session_of(given)
    info = None if session_id is None else await reached(call.sessions, session_id)
    if info is None:
        raise not_found("Conversation", given)
    return info


async def _form(sessions: Sessions, info: AgentSessionInfo) -> ConversationForm:
    kept = (await sessions.session(info.id)).state.metadata.get(_METADATA)
    metadata = {str(name): str(value) for name, value in kept.items()} if isinstance(kept, dict) else {}
    return {
        "id": conversation_id(info.id),
        "object": "conversation",
        "created_at": int(info.created_at.timestamp()),
        "metadata": metadata,
    }


def _said(call: Call, items: Sequence[dict[str, Any]] | None) -> list[Message]:
    """Return items as messages. Raise a Problem for decisions and compactions, which belong to a response."""
    given = read_input(items or [], call.service.settings.limits.messages)
    if given.decides or given.compaction is not None:
        raise invalid("items", "decisions on calls are the input of a response; give messages")
    return given.messages


async def _items(call: Call) -> list[Item]:
    session = await call.sessions.session((await _found(call)).id)
    shown = [message for message in session.state.messages if _is_said(message)]
    results = {result.call_id: result for message in shown for result in message.tool_results}
    is_outside = await _outside(call.sessions, session, shown)
    return [item for message in shown for item in input_items(message, is_outside, results)]


def _is_said(message: Message) -> bool:
    """Tell whether a message is part of the conversation, and not a run's note to its model."""
    is_note = message.is_trace and message.role not in ("assistant", "tool")
    return not is_note and not message.is_superseded


async def _outside(sessions: Sessions, session: AgentSession, shown: Sequence[Message]) -> IsOutside:
    """Return a function that tells if a client has made a call: it brought the tool, or told of the call itself."""
    journal = journal_of(sessions)
    # A message that was injected has no run, and `str` makes "None" of that.
    runs = {str(message.metadata.get("execution_id")) for message in shown if message.tool_calls} - {"None"}
    brought: dict[str, set[str]] = {}
    for run in runs:
        for found in await journal.runs(session.id, run=run):
            brought[run] = {spec["name"] for spec in found.first.body.get("external_tools") or ()}

    def is_outside(message: Message, call: ToolCall) -> bool:
        run = message.metadata.get("execution_id")
        return run is None or call.name in brought.get(str(run), ())

    return is_outside
