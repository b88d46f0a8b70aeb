"""The directories of Strands' `FileSessionManager`: one session, or a folder of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from perdure.adapters.foreign import as_metadata
from perdure.adapters.forms.strands import FORM
from perdure.adapters.importing.arriving import Arrival, Pieces
from perdure.adapters.importing.sources import read_bytes, read_object, read_text, read_time
from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.value import JSON

_NUMBER = re.compile(r"message_(\d+)\.json")


def pieces(source: Path) -> Pieces:
    """Return the sessions of a directory."""
    found = [source] if (source / "session.json").is_file() else sorted(source.glob("session_*"))
    folders = [path for path in found if (path / "session.json").is_file()]
    if not folders:
        raise InvalidData("$.source", f"{source} has no sessions of Strands: no folder session_… with a session.json")
    return [partial(_session, folder) for folder in folders]


def _session(folder: Path) -> Iterator[Arrival]:
    """Yield a session, which has no messages, then its agents and its multi-agents."""
    kept = _read(folder / "session.json")
    session_id = read_text(kept.get("session_id"), f"{folder / 'session.json'}: session_id")
    created_at = read_time(kept.get("created_at"))
    session = (session_id,)
    yield Arrival(
        names=session, items=(), read=_message, metadata={"strands_session": as_metadata(kept)}, created_at=created_at
    )
    for path in sorted(folder.glob("agents/agent_*/agent.json")):
        agent = _read(path)
        named = read_text(agent.get("agent_id"), f"{path}: agent_id")
        yield Arrival(
            names=(session_id, named),
            items=_messages(path.parent / "messages"),
            read=_message,
            name=named,
            metadata={"strands_agent": as_metadata(agent)},
            spawned_by=(session, named),
            created_at=read_time(agent.get("created_at")),
        )
    for path in sorted(folder.glob("multi_agents/multi_agent_*/multi_agent.json")):
        named = path.parent.name.removeprefix("multi_agent_")
        yield Arrival(
            names=(session_id, "multi-agent", named),
            items=(),
            read=_message,
            name=named,
            metadata={"strands_multi_agent": as_metadata(_read(path))},
            spawned_by=(session, named),
        )


def _messages(folder: Path) -> list[JSON]:
    numbered = [(int(found[1]), path) for path in folder.glob("*.json") if (found := _NUMBER.fullmatch(path.name))]
    return [_read(path) for _, path in sorted(numbered)]


def _read(path: Path) -> dict[str, Any]:
    return read_object(read_bytes(path), str(path))


def _message(item: JSON) -> Message:
    return FORM.message(item)
