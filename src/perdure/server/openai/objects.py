"""The Response object, with all the fields that OpenAI's and Open Responses' clients require."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.model.execution import ExecutionStatus, ModelOptions
from perdure.model.state import AgentState
from perdure.model.stop import StopReason
from perdure.model.usage import Usage
from perdure.server.openai.finding import Found, Outcome
from perdure.server.openai.ids import conversation_id

_INCOMPLETE = {
    StopReason.LENGTH: "max_output_tokens",
    StopReason.TOKEN_LIMIT_REACHED: "max_output_tokens",
    StopReason.CONTENT_FILTER: "content_filter",
}
ENDS = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # OpenAI has no event for it
}
"""The last event of a stream, by the status of its response."""


def opened(found: Found) -> dict[str, Any]:
    """Return a response that has not ended."""
    kept = found.kept
    previous = str(found.previous) if found.previous is not None else kept.get("previous")
    conversation = kept.get("conversation")
    return {
        **unanswered(found.asked, kept, agent=found.info.agent_name),
        "id": str(found.id),
        "created_at": int(found.created_at),
        "status": "queued" if found.state == "queued" else "in_progress",
        "background": bool(kept.get("background")),
        "previous_response_id": previous,
        "conversation": {"id": conversation_id(found.info.id)} if conversation else None,
        "store": True,
    }


def unanswered(asked: Mapping[str, Any], kept: Mapping[str, Any], *, agent: str) -> dict[str, Any]:
    """Return the fields that tell what was asked, and how the model is asked."""
    config = asked.get("config") or {}
    options = {name: value for name, value in _plain(asked.get("model_options")).items() if value is not None}
    config = {**config, **{"thinking_level" if name == "thinking" else name: value for name, value in options.items()}}
    temperature, top_p = config.get("temperature"), config.get("top_p")
    effort = "none" if config.get("thinking_level") == "off" else config.get("thinking_level")
    return {
        "object": "response",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "model": agent,
        "output": [],
        "tools": _tools(asked.get("external_tools") or (), kept.get("strict") or ()),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "text": {"format": _format(kept.get("format") or {}, asked), "verbosity": "medium"},
        "temperature": 1.0 if temperature is None else temperature,  # the provider's own
        "top_p": 1.0 if top_p is None else top_p,
        "top_logprobs": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "reasoning": {"effort": None if effort == "on" else effort, "summary": None},
        "max_output_tokens": config.get("max_tokens"),
        "max_tool_calls": None,
        "service_tier": "default",
        "metadata": dict(kept.get("metadata") or {}),
        "user": kept.get("user"),
        "safety_identifier": kept.get("safety"),
        "prompt_cache_key": kept.get("cache"),
        "usage": None,
    }


def ended(response: Mapping[str, Any], outcome: Outcome, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a response that is over, with its outcome."""
    state = outcome.session.state
    status = status_of(state)
    execution = state.execution
    completed = execution.completed_at if execution is not None else None
    is_done = status == "completed"
    return {
        **response,
        "status": status,
        "output": list(output),
        "completed_at": int((completed or outcome.session.info.updated_at).timestamp()) if is_done else None,
        "error": _error(state) if status == "failed" else None,
        "incomplete_details": {"reason": _reason(state)} if status == "incomplete" else None,
        "usage": usage_of(outcome.usage),
    }


def refused(response: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """Return a response that was never begun: its message was taken back, or could not be sent."""
    if found.was_taken_back:
        return {**response, "status": "cancelled"}
    return {**response, "status": "failed", "error": {"code": "invalid_prompt", "message": str(found.refusal)}}


def status_of(state: AgentState) -> str:
    """Return the status of a run. One that waits is complete: the client has to do something."""
    execution = state.execution
    if execution is None or execution.pending_calls:
        return "completed"
    if state.stop_reason is StopReason.USER_REQUESTED:
        return "cancelled"
    if state.status is ExecutionStatus.FAILED or _rejection(state) is not None:
        return "failed"
    return "completed" if state.stop_reason in _NATURAL else "incomplete"


_NATURAL = (None, StopReason.COMPLETED, StopReason.FINISH_REASON_RECEIVED, StopReason.STOP_REQUESTED)


def _rejection(state: AgentState) -> str | None:
    from perdure.loop.filters import rejection_in

    return None if state.execution is None else rejection_in(state.execution.continuation.stop_signals)


def _reason(state: AgentState) -> str:
    reason = state.stop_reason or StopReason.UNKNOWN
    return _INCOMPLETE.get(reason, reason.value)


def _error(state: AgentState) -> dict[str, Any]:
    rejection = _rejection(state)
    if rejection is not None:
        return {"code": "invalid_prompt", "message": rejection}
    cause = state.execution.cause if state.execution else None
    return {"code": "server_error", "message": cause.message if cause else str(state.stop_reason)}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return tokens as OpenAI counts them."""
    details = {"cached_tokens": usage.cache_read_tokens, "cache_write_tokens": usage.cache_write_tokens}
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _tools(specs: Sequence[Mapping[str, Any]], strict: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "name": spec["name"],
            "description": spec.get("description") or None,
            "parameters": spec.get("parameters"),
            "strict": spec["name"] in strict,
        }
        for spec in specs
    ]


def _format(about: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    schema = asked.get("output") or asked.get("response_format")
    if about.get("type") != "json_schema" or schema is None:
        return {"type": about.get("type", "text")}
    return {"name": "answer", **about, "schema": schema}


def _plain(options: Any) -> Mapping[str, Any]:
    return options.to_dict() if isinstance(options, ModelOptions) else options or {}
