"""Items as the frameworks write them, dumped from their own types; and a way to make many more of them."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

AI = {
    "content": [
        {"type": "thinking", "thinking": "Look it up.", "signature": "c2ln"},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"order": 7}},
    ],
    "additional_kwargs": {},
    "response_metadata": {"model_name": "claude", "stop_reason": "tool_use"},
    "type": "ai",
    "name": None,
    "id": "run--1",
    "tool_calls": [{"name": "look_up", "args": {"order": 7}, "id": "toolu_1", "type": "tool_call"}],
    "invalid_tool_calls": [],
    "usage_metadata": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
}
HUMAN = {
    "content": "Where is my order?",
    "additional_kwargs": {},
    "response_metadata": {},
    "type": "human",
    "name": None,
    "id": "h-1",
}
TOOL = {
    **HUMAN,
    "content": "It broke.",
    "type": "tool",
    "id": "t-1",
    "tool_call_id": "toolu_1",
    "artifact": None,
    "status": "error",
}
TOOL_BLOCKS = {
    **TOOL,
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    "status": "success",
}


def _event(parts: list[Any], role: str, **more: Any) -> dict[str, Any]:
    return {
        "content": {"parts": parts, "role": role},
        "invocation_id": "e-1",
        "author": "user" if role == "user" else "bot",
        "actions": {
            "state_delta": {"seen": 1},
            "artifact_delta": {},
            "requested_auth_configs": {},
            "requested_tool_confirmations": {},
        },
        "node_info": {"path": ""},
        "id": f"0d965fda-{role}",
        "timestamp": 1794919649.404608,
        **more,
    }


def _entry(kind: str, uuid: str, **more: Any) -> dict[str, Any]:
    return {
        "parentUuid": "b7c0" if uuid != "u-1" else None,
        "isSidechain": False,
        "userType": "external",
        "cwd": "/home/ada/project",
        "sessionId": "5a1f",
        "version": "2.1.0",
        "gitBranch": "main",
        "type": kind,
        **more,
        "uuid": uuid,
        "timestamp": "2026-01-01T00:00:00.000Z",
    }


_PART = {"provider_name": None, "provider_details": None, "id": None}
_AT = "2026-01-01T00:00:00Z"
_RESULT = {"tool_kind": None, "metadata": None, "timestamp": _AT, "retry": None, "part_kind": "tool-return"}


def _request(*parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "parts": list(parts),
        "timestamp": _AT,
        "instructions": None,
        "kind": "request",
        "run_id": "r-1",
        "conversation_id": None,
        "metadata": None,
        "state": "complete",
    }


def _session_message(role: str, content: list[Any], number: int) -> dict[str, Any]:
    return {
        "message": {"role": role, "content": content},
        "message_id": number,
        "redact_message": None,
        "created_at": "2026-01-01T00:00:00+00:00",
        "updated_at": "2026-01-01T00:00:01+00:00",
    }


ITEMS: dict[str, list[dict[str, Any]]] = {
    "openai": [
        {"role": "user", "content": "Where is my order?"},
        {"role": "developer", "content": "Be brief."},
        {"content": "Where?", "role": "user", "type": "message"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "See:"},
                {"type": "input_image", "image_url": "data:image/png;base64,QUJDREVG", "detail": "auto"},
            ],
        },
        {
            "id": "rs_1",
            "summary": [{"text": "Look it up.", "type": "summary_text"}],
            "type": "reasoning",
            "encrypted_content": "c2ln",
        },
        {"id": "rs_2", "summary": [], "type": "reasoning", "encrypted_content": "c2ln"},
        {
            "arguments": '{"order": 7, "to": "Zoë"}',
            "call_id": "call_1",
            "name": "look_up",
            "type": "function_call",
            "id": "fc_1",
            "status": "completed",
        },
        {"call_id": "call_1", "output": "sent", "type": "function_call_output"},
        {
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}],
            "type": "function_call_output",
        },
        {
            "id": "msg_1",
            "content": [
                {
                    "annotations": [{"type": "file_path", "file_id": "f", "index": 1}],
                    "text": "Sent.",
                    "type": "output_text",
                }
            ],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        },
        {
            "id": "msg_2",
            "content": [{"annotations": [], "text": "Sent.", "type": "output_text"}],
            "role": "assistant",
            "status": "completed",
            "type": "message",
        },
        {
            "id": "ws_1",
            "action": {"type": "search", "query": "orders"},
            "status": "completed",
            "type": "web_search_call",
        },
        {
            "id": "mcp_1",
            "arguments": "{}",
            "name": "list",
            "server_label": "shop",
            "type": "mcp_call",
            "output": None,
            "error": {"type": "http_error", "code": 404, "message": "no such shop"},
        },
        {
            "id": "ci_1",
            "code": "1 + 1",
            "container_id": "c",
            "outputs": [{"type": "logs", "logs": "2"}],
            "status": "completed",
            "type": "code_interpreter_call",
        },
        {"call_id": "call_3", "input": "print(1)", "name": "python", "type": "custom_tool_call"},
        {"call_id": "call_3", "output": "1", "type": "custom_tool_call_output"},
        {"call_id": "call_4", "action": {"commands": ["ls"]}, "type": "shell_call"},
        {
            "call_id": "call_4",
            "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
            "type": "shell_call_output",
        },
        {
            "id": "cu_1",
            "call_id": "call_5",
            "action": {"type": "click", "button": "left", "x": 1, "y": 2},
            "pending_safety_checks": [],
            "status": "completed",
            "type": "computer_call",
        },
        {
            "call_id": "call_5",
            "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,QUJDREVG"},
            "type": "computer_call_output",
        },
        {"id": "ig_1", "result": "QUJDREVG", "status": "completed", "type": "image_generation_call"},
    ],
    "langchain": [
        *({"type": data["type"], "data": data} for data in (HUMAN, AI, TOOL, TOOL_BLOCKS)),
        HUMAN,
        AI,
        {**HUMAN, "type": "system", "id": None, "content": [{"type": "text", "text": "Be brief."}]},
    ],
    "adk": [
        _event([{"text": "Where is my order?"}], "user"),
        _event(
            [
                {"text": "Look it up.", "thought": True, "thought_signature": "AQI="},
                {"function_call": {"id": "adk-1", "args": {"order": 7}, "name": "look_up"}},
            ],
            "model",
        ),
        _event([{"function_response": {"id": "adk-1", "name": "look_up", "response": {"error": "gone"}}}], "user"),
        _event([{"functionCall": {"args": {}, "name": "look_up"}}, {"text": "Wait."}], "model", invocationId="e-2"),
        {key: value for key, value in _event([], "model").items() if key != "content"},
    ],
    "claude": [
        _entry("user", "u-1", message={"role": "user", "content": "Where is my order?"}),
        _entry(
            "assistant",
            "u-2",
            message={
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "claude",
                "content": [
                    {"type": "thinking", "thinking": "Look it up.", "signature": "c2ln"},
                    {"type": "text", "text": "One moment."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                ],
                "stop_reason": None,
                "usage": {"input_tokens": 1, "output_tokens": 2},
            },
            requestId="req_1",
        ),
        _entry(
            "user",
            "u-3",
            message={
                "role": "user",
                "content": [{"tool_use_id": "toolu_1", "type": "tool_result", "content": "a.txt", "is_error": True}],
            },
            toolUseResult={"stdout": "a.txt", "stderr": "", "interrupted": False},
        ),
        _entry(
            "user",
            "u-4",
            message={
                "role": "user",
                "content": [
                    {
                        "tool_use_id": "toolu_2",
                        "type": "tool_result",
                        "content": [
                            {"type": "text", "text": "one"},
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": "QUJDREVG"},
                            },
                            {"type": "text", "text": "two"},
                        ],
                    }
                ],
            },
        ),
        _entry("system", "u-5", content="Conversation compacted", subtype="compact_boundary", level="info"),
        {"type": "summary", "summary": "Where the order is", "leafUuid": "u-4"},
        {"type": "file-history-snapshot", "messageId": "u-1", "snapshot": {"trackedFileBackups": {}}},
    ],
    "pydantic-ai": [
        _request(
            {"content": "Be brief.", "timestamp": _AT, "dynamic_ref": None, "part_kind": "system-prompt"},
            {"content": "Where is my order?", "timestamp": _AT, "part_kind": "user-prompt"},
        ),
        _request({"content": "Be brief.", "timestamp": _AT, "dynamic_ref": None, "part_kind": "system-prompt"}),
        {
            "parts": [
                {**_PART, "content": "Look it up.", "signature": "s", "provider_name": "p", "part_kind": "thinking"},
                {**_PART, "content": "One moment.", "part_kind": "text"},
                {
                    **_PART,
                    "tool_name": "look_up",
                    "args": '{"order":7}',
                    "tool_call_id": "t1",
                    "part_kind": "tool-call",
                },
                {**_PART, "tool_name": "look_up", "args": {"order": 8}, "tool_call_id": "t2", "part_kind": "tool-call"},
            ],
            "usage": {"input_tokens": 1, "output_tokens": 2, "details": {}},
            "model_name": "gpt",
            "timestamp": _AT,
            "kind": "response",
            "provider_name": "openai",
            "provider_details": None,
            "run_id": "r-1",
        },
        _request(
            {**_RESULT, "tool_name": "look_up", "content": {"at": "door"}, "tool_call_id": "t1", "outcome": "success"},
            {**_RESULT, "tool_name": "look_up", "content": "gone", "tool_call_id": "t2", "outcome": "failed"},
        ),
        _request(
            {
                "content": ["See:", {"url": "https://a.example/b.png", "kind": "image-url"}],
                "timestamp": _AT,
                "part_kind": "user-prompt",
            },
            {
                "content": "bad",
                "tool_name": "look_up",
                "tool_call_id": "t3",
                "timestamp": _AT,
                "part_kind": "retry-prompt",
            },
        ),
    ],
    "strands": [
        _session_message("user", [{"text": "Where is my order?"}], 0),
        _session_message(
            "assistant",
            [
                {"reasoningContent": {"reasoningText": {"text": "Look it up.", "signature": "s"}}},
                {"text": "One moment."},
                {"toolUse": {"toolUseId": "t1", "name": "look_up", "input": {"order": 7}}},
            ],
            1,
        ),
        _session_message(
            "user",
            [{"toolResult": {"toolUseId": "t1", "status": "error", "content": [{"text": "one"}, {"json": {"a": 1}}]}}],
            2,
        ),
        _session_message(
            "user", [{"toolResult": {"toolUseId": "t1", "status": "success", "content": [{"json": {"a": 1}}]}}], 3
        ),
        {
            **_session_message("assistant", [], 4),
            "message": {
                "role": "assistant",
                "content": [{"text": "On its way."}],
                "metadata": {"usage": {"inputTokens": 1, "outputTokens": 2}, "metrics": {"latencyMs": 1.5}},
                "tracking_id": "7c1f",
            },
        },
        {
            **_session_message("user", [{"text": "My card is 4111."}], 5),
            "redact_message": {"role": "user", "content": [{"text": "[blocked]"}]},
        },
    ],
    "agno": [
        {"id": "m-1", "content": "Where is my order?", "from_history": False, "role": "user", "created_at": 1767322800},
        {
            "id": "m-2",
            "content": "One moment.",
            "reasoning_content": "Look it up.",
            "role": "assistant",
            "tool_calls": [
                {"id": "c-1", "type": "function", "function": {"name": "look_up", "arguments": '{"order": 7}'}}
            ],
            "metrics": {"input_tokens": 10, "duration": 0.5},
        },
        {
            "id": "m-3",
            "content": "lost",
            "role": "tool",
            "tool_call_id": "c-1",
            "tool_name": "look_up",
            "tool_call_error": True,
        },
        {"id": "m-4", "content": ["a", {"b": 1}], "role": "user", "images": [{"url": "https://a.example/b.png"}]},
    ],
}

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["", "\x7f", "a\ud83d", 10**30, -(2**63), 2**64, 1.0, 1, -0.0, '{"a": 1}', '{"a":1e5}', "\x00"])
)
_keys = st.sampled_from(["\x7f0\x7f", "\x7f", "type", "text", "id", "a", "\udc00", "content", "~"]) | st.text(
    max_size=5
)
json_items = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=8
)
_holes = st.sampled_from(
    ["\x7f0\x7f", "\x7f0j1\x7f", "\x7f\x7f", "\x7ff\x7f", "\x7f1.id\x7f", "\x7f9\x7f", "\x7f", "a\x7fb"]
)


@st.composite
def changed_items(draw: st.DrawFn, name: str) -> Any:
    """A real item in which a few values are replaced by others, such as texts that look like a hole."""
    item = copy.deepcopy(draw(st.sampled_from(ITEMS[name])))
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.sampled_from(list(_places(item))))
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        place[key] = draw(json_items | _holes)
        if isinstance(place, dict) and draw(st.booleans()):
            place[draw(_keys)] = draw(_holes)
    return item


def _places(value: Any) -> Any:
    if isinstance(value, dict | list) and value:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _places(each)
