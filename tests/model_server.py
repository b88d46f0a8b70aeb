"""A stand-in for Ollama, vLLM and similar servers: a real HTTP server on 127.0.0.1 with OpenAI's chat completions.

It repeats the last message. If the message asks what is open and there is a tool, it calls the first tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@contextmanager
def model_server() -> Iterator[str]:
    """Serve until the block is left. Yield the server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in _chunks(asked):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _chunks(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shared = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": asked["model"]}
    delta, finish = _answer(asked)
    yield {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
    yield {**shared, "choices": [], "usage": usage}


def _answer(asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
    last = asked["messages"][-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": f"It is {last['content']}."}, "stop"
    if asked.get("tools") and "open" in last["content"]:
        call = {"name": asked["tools"][0]["function"]["name"], "arguments": '{"day": "Sunday"}'}
        calls = [{"index": 0, "id": "call_1", "type": "function", "function": call}]
        return {"role": "assistant", "tool_calls": calls}, "tool_calls"
    return {"role": "assistant", "content": f"You said: {last['content']}"}, "stop"
