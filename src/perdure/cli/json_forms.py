"""The JSON forms of what commands print. They are documented in docs/cli.md: add fields, never change one."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from perdure.model.execution import PendingCall
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, ListedSession
from perdure.model.usage import Usage
from perdure.protocols import SearchHit, SessionHead, Timer
from perdure.sessions.reply import Reply

if TYPE_CHECKING:
    from perdure.sessions.operating import Backlog


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
            "external": call.external,
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


def of_backlog(found: Backlog) -> dict[str, Any]:
    return {
        "waiting": [
            {
                "session": each.session_id,
                "owner": each.owner,
                "priority": each.priority,
                "count": each.count,
                "since": moment_of(each.since),
            }
            for each in found.waiting
        ],
        "running": [
            {
                "session": each.session_id,
                "owner": each.owner,
                "holder": each.holder,
                "since": None if each.since is None else moment_of(each.since),
                "expires": moment_of(each.expires),
                "killed": each.lapsed,
            }
            for each in found.running
        ],
        "delayed": [of_timer(each) for each in found.delayed],
        "parked": [
            {
                "session": each.session_id,
                "owner": each.owner,
                "reason": each.why and each.why.reason,
                "tries": each.why and each.why.tries,
                "at": each.why and each.why.at,
                "waiting": each.waiting,
            }
            for each in found.parked
        ],
    }


def of_timer(timer: Timer) -> dict[str, Any]:
    said = timer.entry.body.get("messages", ()) if timer.entry is not None else ()
    return {
        "session": timer.session_id,
        "name": timer.name,
        "due": moment_of(timer.due),
        "priority": timer.priority,
        "cron": timer.cron,
        "timezone": timer.timezone,
        "text": " ".join(Message.from_dict(each).text for each in said) or None,
    }


def moment_of(seconds: float) -> datetime:
    """Return the time that is so many seconds after the beginning of 1970."""
    return datetime.fromtimestamp(seconds, UTC)
