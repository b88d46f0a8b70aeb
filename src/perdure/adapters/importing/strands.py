"""The directories of Strands' `FileSessionManager`: one session, or a folder of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.adapters.foreign import as_metadata
from perdure.adapters.forms.strands import FORM
from perdure.adapters.importing.arriving import Arrival, ImportReport, Piece, Pieces, Target
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


class _FirstAgent(msgspec.Struct, frozen=True):
    """A session with its first agent, which become one session. They stay two if they have arrived as two before."""

    session: Arrival
    agent: Arrival

    async def arrive(self, target: Target) -> ImportReport:
        if await target.store.load(target.id_of(*self.agent.names)) is not None:
            # Both arrived in the first layout, in which each agent is a child of its session.
            return await self.session.arrive(target) + await self.agent.arrive(target)
        metadata = {**self.session.metadata, **self.agent.metadata}
        return await replace(self.session, items=self.agent.items, metadata=metadata).arrive(target)


def _session(folder: Path) -> Iterator[Piece]:
    """Yield a session, which is the conversation of its first agent, then its other agents and its multi-agents."""
    kept = _read(folder / "session.json")
    session_id = read_text(kept.get("session_id"), f"{folder / 'session.json'}: session_id")
    created_at = read_time(kept.get("created_at"))
    names = (session_id,)
    session = Arrival(
        names=names,
        items=(),
        read=_message,
        name=session_id,
        metadata={"strands_session": as_metadata(kept)},
        created_at=created_at,
    )
    agents = _agents(folder, session_id)
    yield _FirstAgent(session, agents[0]) if agents else session
    yield from agents[1:]
    for path in sorted(folder.glob("multi_agents/multi_agent_*/multi_agent.json")):
        named = path.parent.name.removeprefix("multi_agent_")
        yield Arrival(
            names=(session_id, "multi-agent", named),
            items=(),
            read=_message,
            name=named,
            metadata={"strands_multi_agent": as_metadata(_read(path))},
            spawned_by=(names, named),
        )


def _agents(folder: Path, session_id: str) -> list[Arrival]:
    """Return the agents of a session, the first that was created first."""
    made = [_agent(path, session_id) for path in sorted(folder.glob("agents/agent_*/agent.json"))]
    return sorted(made, key=lambda each: each.created_at or datetime.max.replace(tzinfo=UTC))


def _agent(path: Path, session_id: str) -> Arrival:
    agent = _read(path)
    named = read_text(agent.get("agent_id"), f"{path}: agent_id")
    return Arrival(
        names=(session_id, named),
        items=_messages(path.parent / "messages"),
        read=_message,
        name=named,
        metadata={"strands_agent": as_metadata(agent)},
        spawned_by=((session_id,), named),
        created_at=read_time(agent.get("created_at")),
    )


def _messages(folder: Path) -> list[JSON]:
    numbered = [(int(found[1]), path) for path in folder.glob("*.json") if (found := _NUMBER.fullmatch(path.name))]
    return [_read(path) for _, path in sorted(numbered)]


def _read(path: Path) -> dict[str, Any]:
    return read_object(read_bytes(path), str(path))


def _message(item: JSON) -> Message:
    return FORM.message(item)
