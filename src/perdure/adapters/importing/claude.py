"""Claude's transcripts: the files below `~/.claude/projects`, one project of them, or one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from perdure.adapters.foreign import as_metadata
from perdure.adapters.forms.claude import FORM
from perdure.adapters.importing.arriving import Arrival, Pieces
from perdure.adapters.importing.sources import read_lines, read_time
from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.model.indexed import LONGEST
from perdure.model.message import Message
from perdure.model.value import JSON
from perdure.redaction.replacement import DERIVED

_LINES = ".jsonl"
_TOOL = "Agent"
# These follow the SDK's own summaries. They are repeated here because the SDK need not be installed.
_COMMAND = re.compile(r"<command-name>(.*?)</command-name>")
_NOT_ASKED = re.compile(
    r"^(?:<local-command-stdout>|<session-start-hook>|<tick>|<goal>|\[Request interrupted by user[^\]]*\]|"
    r"\s*<ide_opened_file>[\s\S]*</ide_opened_file>\s*$|\s*<ide_selection>[\s\S]*</ide_selection>\s*$)"
)
_LAST_OF = {
    "customTitle": "custom_title",
    "aiTitle": "ai_title",
    "lastPrompt": "last_prompt",
    "summary": "summary_hint",
    "gitBranch": "git_branch",
}
_LONGEST_PROMPT = 200


def pieces(source: Path) -> Pieces:
    """Return the transcripts of a file, of a project, or of all projects."""
    if source.is_file():
        return [partial(_transcripts, source)]
    found = sorted(source.glob(f"*{_LINES}")) or sorted(source.glob(f"*/*{_LINES}"))
    if not found:
        raise InvalidData(
            "$.source", f"{source} has no transcripts: neither *{_LINES} nor a project's folder with them"
        )
    return [partial(_transcripts, path) for path in found]


def _transcripts(path: Path) -> Iterator[Arrival]:
    """Yield a transcript, and those of its sub-agents."""
    project, session_id = path.absolute().parent.name, path.stem
    entries = _once(read_lines(path))
    metadata: dict[str, Any] = {
        "claude": {"project_key": project, "session_id": session_id},
        "claude_summary": {DERIVED: len(entries), "data": as_metadata(_summary(entries))},
        "claude_project": project if len(project) <= LONGEST else str(SessionId.of(project)),
    }
    main = (session_id, project)
    times = (read_time(entry.get("timestamp")) for entry in entries)
    created_at = next((time for time in times if time is not None), None)
    yield Arrival(
        names=main,
        items=entries,
        read=_message,
        metadata=metadata,
        indexed=("claude_project",),
        created_at=created_at,
    )
    folder = path.with_suffix("")
    for file in sorted((folder / "subagents").rglob(f"*{_LINES}")):
        subpath = file.relative_to(folder).as_posix().removesuffix(_LINES)
        key = {"project_key": project, "session_id": session_id, "subpath": subpath}
        yield Arrival(
            names=(*main, subpath),
            items=_once([*read_lines(file), *_beside(file)]),
            read=_message,
            name=subpath,
            metadata={"claude": key},
            spawned_by=(main, _TOOL),
        )


def _beside(file: Path) -> list[JSON]:
    """Return Claude's notes beside the transcript of a sub-agent, as the entry that the SDK makes of them."""
    # The file is optional. The transcript is imported without it, too.
    with suppress(OSError, ValueError):
        noted = json.loads(file.with_suffix(".meta.json").read_bytes())
        if isinstance(noted, dict):
            return [{**noted, "type": "agent_metadata"}]
    return []


def _message(entry: JSON) -> Message:
    return FORM.message(entry)


def _once(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries without those that repeat a uuid."""
    seen: set[str] = set()
    kept: list[dict[str, Any]] = []
    for entry in entries:
        named = entry.get("uuid")
        if not isinstance(named, str) or named not in seen:
            kept.append(entry)
        if isinstance(named, str):
            seen.add(named)
    return kept


def _summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of a transcript for lists, as the SDK's `fold_session_summary` makes it."""
    data: dict[str, Any] = {}
    for entry in entries:
        data.setdefault("is_sidechain", entry.get("isSidechain") is True)
        at = read_time(entry.get("timestamp")) if isinstance(entry.get("timestamp"), str) else None
        if at is not None:
            data.setdefault("created_at", int(at.timestamp() * 1000))
        if isinstance(entry.get("cwd"), str) and entry["cwd"]:
            data.setdefault("cwd", entry["cwd"])
        _find_prompt(data, entry)
        data.update({name: entry[key] for key, name in _LAST_OF.items() if isinstance(entry.get(key), str)})
        if entry.get("type") == "tag":
            data.pop("tag", None)
            data.update({"tag": entry["tag"]} if isinstance(entry.get("tag"), str) and entry["tag"] else {})
    return data


def _find_prompt(data: dict[str, Any], entry: dict[str, Any]) -> None:
    """Note the first prompt that a person has written."""
    if "first_prompt_locked" in data or entry.get("type") != "user":
        return
    if entry.get("isMeta") is True or entry.get("isCompactSummary") is True:
        return
    for text in _texts(entry):
        asked = text.replace("\n", " ").strip()
        command = _COMMAND.search(asked)
        if command is not None:
            data["command_fallback"] = data.get("command_fallback") or command[1]
        elif asked and not _NOT_ASKED.match(asked):
            short = asked[:_LONGEST_PROMPT].rstrip() + "…" if len(asked) > _LONGEST_PROMPT else asked
            data.update(first_prompt=short, first_prompt_locked=True)
            return


def _texts(entry: dict[str, Any]) -> list[str]:
    message = entry.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [content]
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    # The entry of a tool's answer has the type "user" too.
    if any(block.get("type") == "tool_result" for block in blocks):
        return []
    return [block["text"] for block in blocks if block.get("type") == "text" and isinstance(block.get("text"), str)]
