"""The JSON forms of what commands print and the service returns. docs/cli.md has them: add fields, never change one."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict

from perdure.model.execution import PendingCall
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, ListedSession
from perdure.model.usage import Usage
from perdure.protocols import SearchHit, SessionHead, Timer, Token, Waiting
from perdure.sessions.reply import Reply

if TYPE_CHECKING:
    from perdure.sessions.operating import Backlog


class UsageForm(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    cost: float
    unpriced_tokens: int


class InfoForm(TypedDict):
    id: str
    name: str | None
    agent: str
    status: str
    version: int
    first_version: int
    owner: str | None
    tags: list[str]
    parent: str | None
    spawned_by: dict[str, Any] | None
    created_at: datetime
    updated_at: datetime


class ListedForm(InfoForm):
    title: str | None
    last_words: str | None
    message_count: int | None
    usage: UsageForm | None


class HeadForm(InfoForm):
    metadata: dict[str, Any]
    usage: UsageForm | None


class CallForm(TypedDict):
    id: str
    name: str
    arguments: dict[str, Any]
    digest: str
    session: str | None
    waits_for: list[CallForm]
    external: bool
    outcome_unknown: bool
    begun_at: str | None


class SessionForm(InfoForm):
    model: str | None
    system_prompt: str
    task: str | None
    metadata: dict[str, Any]
    pending_calls: list[CallForm]
    messages: list[dict[str, Any]]


class ReplyForm(TypedDict):
    session: str
    version: int
    status: str
    text: str
    stop_reason: str | None
    pending_calls: list[CallForm]
    usage: UsageForm
    queued: bool


class HitForm(TypedDict):
    session: str
    message: str
    role: str
    snippet: str
    matches: list[list[int]]
    score: float
    created_at: datetime | None


class WaitingForm(TypedDict):
    session: str
    owner: str | None
    priority: int
    count: int
    since: datetime


class RunningForm(TypedDict):
    session: str
    owner: str | None
    holder: str
    since: datetime | None
    expires: datetime | None
    """When the lease ends; None if it was given up at once."""
    killed: bool
    handed_over: bool


class TimerForm(TypedDict):
    session: str
    name: str
    due: datetime
    priority: int
    cron: str | None
    timezone: str | None
    text: str | None


class ParkedForm(TypedDict):
    session: str
    owner: str | None
    reason: str | None
    tries: int | None
    at: str | None
    waiting: int


class BacklogForm(TypedDict):
    waiting: list[WaitingForm]
    held: list[WaitingForm]
    running: list[RunningForm]
    delayed: list[TimerForm]
    parked: list[ParkedForm]


def of_info(info: AgentSessionInfo) -> InfoForm:
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
        "spawned_by": info.spawn_ref.to_dict() if info.spawn_ref is not None else None,
        "created_at": info.created_at,
        "updated_at": info.updated_at,
    }


def of_listed(listed: ListedSession) -> ListedForm:
    return {
        **of_info(listed),
        "title": listed.title,
        "last_words": listed.last_words,
        "message_count": listed.message_count,
        "usage": of_usage(listed.usage) if listed.usage is not None else None,
    }


def of_head(head: SessionHead) -> HeadForm:
    return {
        **of_info(head.info),
        "metadata": dict(head.metadata),
        "usage": of_usage(head.info.usage) if head.info.usage is not None else None,
    }


def of_session(session: AgentSession, messages: Iterable[Message]) -> SessionForm:
    model = session.state.model_for(session.definition)
    execution = session.state.execution
    return {
        **of_info(session.info),
        "model": model.name if model is not None else None,
        "system_prompt": session.state.context.system_prompt,
        "task": session.state.task,
        "metadata": dict(session.state.metadata),
        "pending_calls": of_calls(execution.pending_calls if execution else ()),
        "messages": [message.to_dict() for message in messages],
    }


def of_usage(usage: Usage) -> UsageForm:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost": usage.cost,
        "unpriced_tokens": usage.unpriced_tokens,
    }


def of_calls(calls: Iterable[PendingCall]) -> list[CallForm]:
    return [
        {
            "id": call.id,
            "name": call.name,
            "arguments": dict(call.arguments),
            "digest": call.digest,
            "session": call.session_id,
            "waits_for": of_calls(call.waits_for),
            "external": call.external,
            "outcome_unknown": call.outcome_unknown,
            "begun_at": None if call.begun_at is None else call.begun_at.isoformat(),
        }
        for call in calls
    ]


def of_reply(reply: Reply[Any]) -> ReplyForm:
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


def of_hit(hit: SearchHit) -> HitForm:
    return {
        "session": hit.session_id,
        "message": hit.message_id,
        "role": hit.role,
        "snippet": hit.snippet,
        "matches": [list(match) for match in hit.matches],
        "score": hit.score,
        "created_at": hit.created_at,
    }


def of_backlog(found: Backlog) -> BacklogForm:
    return {
        "waiting": [_of_waiting(each) for each in found.waiting],
        "held": [_of_waiting(each) for each in found.held],
        "running": [
            {
                "session": each.session_id,
                "owner": each.owner,
                "holder": each.holder,
                "since": None if each.since is None else moment_of(each.since),
                "expires": moment_of(each.expires) if each.expires else None,
                "killed": each.lapsed and each.session_id not in found.handed_over,
                "handed_over": each.session_id in found.handed_over,
            }
            for each in found.running
        ],
        "delayed": [of_timer(each) for each in found.delayed],
        "parked": [
            {
                "session": each.session_id,
                "owner": each.owner,
                "reason": each.why.reason if each.why else None,
                "tries": each.why.tries if each.why else None,
                "at": each.why.at if each.why else None,
                "waiting": each.waiting,
            }
            for each in found.parked
        ],
    }


def _of_waiting(each: Waiting) -> WaitingForm:
    return {
        "session": each.session_id,
        "owner": each.owner,
        "priority": each.priority,
        "count": each.count,
        "since": moment_of(each.since),
    }


def of_timer(timer: Timer) -> TimerForm:
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


def of_token(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "owner": token.owner,
        "may_write": token.may_write,
        "name": token.name,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
    }


def moment_of(seconds: float) -> datetime:
    """Return the time that is this number of seconds after the beginning of 1970."""
    return datetime.fromtimestamp(seconds, UTC)
