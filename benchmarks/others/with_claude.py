"""Claude Agent SDK: the file of lines that Claude writes, and perdure's store, into which the SDK copies them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from benchmarks.others.library import OnPerdure, Store
from benchmarks.others.turns import TOOL, Turn
from perdure.adapters.claude_agent_sdk import PerdureSessionStore

PROJECT = "-home-ada-shop"
SESSION = "3f0d3c5e-93f5-4f5c-8a51-0a5d2b8f7c11"


def entries(turn: Turn) -> list[Any]:
    """Return a turn in Claude's form, with all fields of every line."""
    use = {"type": "tool_use", "id": turn.call_id, "name": TOOL, "input": turn.arguments}
    result = {"type": "tool_result", "tool_use_id": turn.call_id, "content": turn.result}
    said: list[tuple[str, Any]] = [
        ("user", {"role": "user", "content": turn.question}),
        ("assistant", _answer(turn, [use], "tool_use")),
        ("user", {"role": "user", "content": [result]}),
        ("assistant", _answer(turn, [{"type": "text", "text": turn.answer}], "end_turn")),
    ]
    return list(_lines(turn, said))


def _answer(turn: Turn, content: list[Any], reason: str) -> Any:
    usage = {"input_tokens": 900, "cache_read_input_tokens": 0, "output_tokens": 120, "service_tier": "standard"}
    said = {"model": "claude-sonnet-5", "id": f"msg_{turn.number}", "type": "message", "role": "assistant"}
    return {**said, "content": content, "stop_reason": reason, "stop_sequence": None, "usage": usage}


def _lines(turn: Turn, said: Sequence[tuple[str, Any]]) -> Iterator[Any]:
    before = _uuid(turn.number - 1, len(said) - 1)
    for place, (kind, message) in enumerate(said):
        own = _uuid(turn.number, place)
        where = {"cwd": "/home/ada/shop", "sessionId": SESSION, "version": "2.0.14", "gitBranch": "main"}
        at = {"uuid": own, "timestamp": "2026-03-01T09:00:00.000Z"}
        yield {"parentUuid": before, "isSidechain": False, "userType": "external", **where, "type": kind} | {
            "message": message,
            **at,
        }
        before = own


def _uuid(turn: int, place: int) -> str:
    return str(uuid5(NAMESPACE_URL, f"{turn}/{place}"))


class Lines(Store):
    """Claude's own file: one line for each entry, without fsync."""

    name = "Claude Agent SDK, its file of lines"

    async def open(self, folder: Path) -> None:
        self.folder = folder

    async def close(self) -> None:
        """No file is open between two writes."""

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        for turn in turns:
            await self.append_turn(session_id, turn)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        with (self.folder / f"{session_id}.jsonl").open("a") as file:
            for entry in entries(turn):
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
                file.flush()


class Kept(OnPerdure, Store):
    """A copy by the SDK: four entries in one call."""

    name = "Claude Agent SDK, PerdureSessionStore"

    async def open(self, folder: Path) -> None:
        self.folder = folder
        self.store = PerdureSessionStore(store=self.url)

    async def fill(self, session_id: str, turns: Sequence[Turn]) -> None:
        await self._append(session_id, [entry for turn in turns for entry in entries(turn)])

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self._append(session_id, entries(turn))

    async def _append(self, session_id: str, said: list[Any]) -> None:
        await self.store.append({"project_key": PROJECT, "session_id": session_id}, said)
