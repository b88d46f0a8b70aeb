"""Streams in the providers' formats: OpenAI chat completions, OpenAI responses, Anthropic and Gemini."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any


def sse(data: Any, event: str | None = None) -> bytes:
    named = f"event: {event}\n" if event else ""
    return f"{named}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def chat(*deltas: dict[str, Any], finish: str | None = "stop", usage: dict[str, Any] | None = None) -> list[bytes]:
    """An OpenAI chat completion: one chunk for each delta, then the finish reason, the usage and the end mark."""

    def chunk(**fields: Any) -> bytes:
        shared = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "gpt-4o"}
        return sse({**shared, **fields})

    events = [chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    if finish:
        events.append(chunk(choices=[{"index": 0, "delta": {}, "finish_reason": finish}]))
    if usage:
        events.append(chunk(choices=[], usage=usage))
    return [*events, sse("[DONE]")]


def chat_calls(*calls: tuple[str, str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return deltas of tool calls (id, name, pieces of their arguments), interleaved as parallel calls may be."""
    starts = [
        {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        for index, (call_id, name, _) in enumerate(calls)
    ]
    longest = max(len(pieces) for _, _, pieces in calls)
    pieces = [
        {"index": index, "function": {"arguments": pieces[turn]}}
        for turn in range(longest)
        for index, (_, _, pieces) in enumerate(calls)
        if turn < len(pieces)
    ]
    return [{"tool_calls": [each]} for each in [*starts, *pieces]]


def claude(*blocks: dict[str, Any], stop: str | None = "end_turn", **usage: int) -> list[bytes]:
    """An Anthropic message: its blocks, each cut in two where it is text, thinking or input."""
    counted = {"input_tokens": 10, "output_tokens": 1, **usage}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-haiku-4-5", "content": []}
    started = {**message, "stop_reason": None, "stop_sequence": None, "usage": counted}
    events = [sse({"type": "message_start", "message": started}, "message_start")]
    for index, block in enumerate(blocks):
        events += [sse({**each, "index": index}, each["type"]) for each in _block_events(block)]
    if stop:
        ended = {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": counted}
        events += [sse(ended, "message_delta"), sse({"type": "message_stop"}, "message_stop")]
    return events


def _block_events(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}
    yield {"type": "content_block_start", "content_block": {**block, **empty.get(block["type"], {})}}
    for delta in _block_deltas(block):
        yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def _block_deltas(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    match block:
        case {"type": "text", "text": text}:
            yield from ({"type": "text_delta", "text": half} for half in _halves(text))
        case {"type": "thinking", "thinking": text, "signature": signature}:
            yield from ({"type": "thinking_delta", "thinking": half} for half in _halves(text))
            yield {"type": "signature_delta", "signature": signature}
        case {"type": "tool_use", "input": arguments}:
            yield from ({"type": "input_json_delta", "partial_json": half} for half in _halves(json.dumps(arguments)))


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def responses(*items: dict[str, Any]) -> list[bytes]:
    """An answer of the OpenAI responses API: each item added and done, its text or arguments in one delta."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": _response([], "in_progress")}]
    for index, item in enumerate(items):
        events += [{**each, "output_index": index} for each in _item_events(item)]
    events.append({"type": "response.completed", "response": _response(list(items), "completed")})
    return [sse({**each, "sequence_number": number}, each["type"]) for number, each in enumerate(events)]


def _item_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    about = {"item_id": item["id"]}
    match item:
        case {"type": "message", "content": [{"text": text}]}:
            yield {"type": "response.output_item.added", "item": {**item, "content": []}}
            place = {**about, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": {**item["content"][0], "text": ""}}
            yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}
            yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
        case {"type": "function_call", "arguments": arguments}:
            yield {"type": "response.output_item.added", "item": {**item, "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **about, "delta": arguments}
            yield {"type": "response.function_call_arguments.done", **about, "arguments": arguments}
        case {"type": "reasoning", "summary": [{"text": text}]}:
            yield {"type": "response.output_item.added", "item": {**item, "summary": []}}
            place = {**about, "summary_index": 0}
            yield {
                "type": "response.reasoning_summary_part.added",
                **place,
                "part": {"type": "summary_text", "text": ""},
            }
            yield {"type": "response.reasoning_summary_text.delta", **place, "delta": text}
            yield {"type": "response.reasoning_summary_text.done", **place, "text": text}
    yield {"type": "response.output_item.done", "item": item}


def _response(output: list[dict[str, Any]], status: str) -> dict[str, Any]:
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 40},
        "output_tokens": 30,
        "output_tokens_details": {"reasoning_tokens": 20},
        "total_tokens": 130,
    }
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1_700_000_000,
        "model": "gpt-5",
        "status": status,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage if status == "completed" else None,
    }


def gemini(*chunks: list[dict[str, Any]], finish: str = "STOP") -> list[bytes]:
    """An answer of the Gemini API: the parts of each chunk, the last with finish reason and usage."""
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "thoughtsTokenCount": 3, "totalTokenCount": 18}
    bodies: list[dict[str, Any]] = [
        {"candidates": [{"content": {"role": "model", "parts": parts}, "index": 0}], "modelVersion": "gemini-3-pro"}
        for parts in chunks
    ]
    bodies[-1]["candidates"][0]["finishReason"] = finish
    return [sse({**body, "usageMetadata": usage, "responseId": "gem-1"}) for body in bodies]
