"""The JSON forms of what commands print. They are documented in docs/cli.md: add fields, never change one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perdure.model.execution import PendingCall
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, ListedSession
from perdure.model.usage import Usage
from perdure.protocols import SearchHit, SessionHead
from perdure.sessions.reply import Reply


def of_info(info: AgentSessionInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "name": info.name,
        "agent": info.agent_name,
        "status": info.status.value,
        "version": info.version,
        "first_version": info.first_version,
        "owner": info.owner,
        "tags": list(info.tags),
        "parent": info.parent_id,
        "spawned_by": info.spawn_ref and info.spawn_ref.to_dict(),
        "created_at": info.created_at,
        "updated_at": info.updated_at,
    }


def of_listed(listed: ListedSession) -> dict[str, Any]:
    return {
        **of_info(listed),
        "title": listed.title,
        "last_words": listed.last_words,
        "message_count": listed.message_count,
        "usage": listed.usage and of_usage(listed.usage),
    }


def of_head(head: SessionHead) -> dict[str, Any]:
    return {
        **of_info(head.info),
        "metadata": dict(head.metadata),
        "usage": head.info.usage and of_usage(head.info.usage),
    }


def of_session(session: AgentSession, messages: Iterable[Message]) -> dict[str, Any]:
    model = session.state.model_for(session.definition)
    execution = session.state.execution
    return {
        **of_info(session.info),
        "model": model and model.name,
        "system_prompt": session.state.context.system_prompt,
        "task": session.state.task,
        "metadata": dict(session.state.metadata),
        "pending_calls": of_calls(execution.pending_calls if execution else ()),
        "messages": [message.to_dict() for message in messages],
    }


def of_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost": usage.cost,
        "unpriced_tokens": usage.unpriced_tokens,
    }


def of_calls(calls: Iterable[PendingCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "name": call.name,
            "arguments": dict(call.arguments),
            "digest": call.digest,
            "session": call.session_id,
            "waits_for": of_calls(call.waits_for),
        }
        for call in calls
    ]


def of_reply(reply: Reply[Any]) -> dict[str, Any]:
    session = reply.session
    return {
        "session": session.id,
        "version": session.version,
        "status": session.status.value,
        "text": reply.text,
        "stop_reason": reply.stop_reason and reply.stop_reason.value,
        "pending_calls": of_calls(reply.pending_calls),
        "usage": of_usage(reply.usage),
        "queued": reply.queued,
    }


def of_hit(hit: SearchHit) -> dict[str, Any]:
    return {
        "session": hit.session_id,
        "message": hit.message_id,
        "role": hit.role,
        "snippet": hit.snippet,
        "matches": [list(match) for match in hit.matches],
        "score": hit.score,
        "created_at": hit.created_at,
    }
