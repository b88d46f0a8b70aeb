"""An MCP server of 2025, written by hand: it knows only the handshake, and lists one tool a page.

Run as `python old_served.py`. It also sends lines that are not JSON, and answers that fit no request.
"""

from __future__ import annotations

import json
import sys
from typing import Any

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOLS = ["first", "second.part", "learn", "refuse", "nonsense", "unlisted_answer"]


def listed(name: str) -> dict[str, Any]:
    return {"name": name, "inputSchema": SCHEMA}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            return {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "old", "version": "1"},
            }
        case "tools/list":
            at = int(params.get("cursor", 0))
            more = {"nextCursor": str(at + 1)} if at + 1 < len(TOOLS) else {}
            return {"tools": [listed(TOOLS[at])], **more}
        case "tools/call":
            return called(params["name"], params.get("arguments") or {})
    raise LookupError(-32601, f"no method {method}")


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "refuse":
        raise LookupError(-32602, "I will not")
    if name == "nonsense":
        return {"content": "not a list"}
    if name == "learn":
        TOOLS.append(arguments["name"])
        say({"method": "notifications/tools/list_changed"})
    return {"content": [{"type": "text", "text": f"{name} was called"}]}


def say(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    try:
        say({"id": request["id"], "result": answer(request["method"], request.get("params") or {})})
    except LookupError as error:
        code, message = error.args
        say({"id": request["id"], "error": {"code": code, "message": message}})
