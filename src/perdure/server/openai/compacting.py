"""Make a long conversation short: `POST /v1/responses/compact`."""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

from perdure.model.ids import now
from perdure.model.usage import Usage
from perdure.server.call import Call
from perdure.server.openai.asking import agent_of, in_progress
from perdure.server.openai.errors import invalid, unsupported
from perdure.server.openai.finding import find
from perdure.server.openai.ids import handle_of
from perdure.server.openai.inputs import read_input
from perdure.server.openai.objects import usage_of


class Compact(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    prompt_cache_key: str | None = None


class CompactedForm(TypedDict):
    id: str
    object: str
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


async def compact(call: Call) -> CompactedForm:
    """Compact a conversation, and return an item that stands for it in the input of later responses.

    The item has a summary of what is older. The conversation itself stays as it is: a fork is compacted.
    """
    wanted: Compact = call.body
    if not call.service.runs_here:
        raise unsupported("input", "no agent is run by this service, so no model can write a summary")
    if wanted.instructions:
        raise unsupported("instructions", "what a summary has to say is the agent's; leave it out")
    session_id = await _begun(call, wanted)
    await call.sessions.compact(session_id)
    info = await call.sessions.info(session_id)
    handle = handle_of(info.id, info.version)
    item = {"id": f"cmp_{info.id}", "type": "compaction", "encrypted_content": handle}
    used = usage_of(await _used(call, info.id))
    return {
        "id": f"resp_{info.id}",
        "object": "response.compaction",
        "created_at": int(now().timestamp()),
        "output": [item],
        "usage": used,
    }


async def _begun(call: Call, wanted: Compact) -> str:
    """Return the id of a new session with the conversation to compact."""
    sessions = call.sessions
    given = read_input(wanted.input or [], call.service.settings.limits.messages)
    if given.decides or given.compaction is not None:
        raise invalid("input", "messages can be compacted; give decisions to the response that waits for them")
    if wanted.previous_response_id is not None:
        found = await find(sessions, wanted.previous_response_id)
        if wanted.model is not None and agent_of(call, wanted.model).name != found.info.agent_name:
            raise invalid("model", f"the conversation is that of {found.info.agent_name}; name it, or leave it out")
        if found.state != "over" or found.refusal is not None:
            raise in_progress(wanted.previous_response_id)
        chat = await sessions.fork(found.info.id, version=found.version)
    elif not given.messages:
        raise invalid("input", "there is nothing to compact; give an input, or a previous_response_id")
    else:
        agents = call.service.agents
        agent = next(iter(agents.values())) if wanted.model is None else agent_of(call, wanted.model)
        chat = await sessions.open(None, agent)
    if given.messages:
        await sessions.inject(chat.id, given.messages)
    return chat.id


async def _used(call: Call, session_id: str) -> Usage:
    """Return what the model has used for the summary."""
    record = await call.sessions.record(session_id)
    return sum((loop.compaction_usage for loop in record.loops), start=Usage())
