"""The verbs of a session: one path each, whose body has the verb's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from perdure.actions.metadata import RenameSession, TagSession
from perdure.errors import InvalidData
from perdure.server.api.sessions import tagged
from perdure.server.call import Answer, Call
from perdure.sessions.json_forms import of_info


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Nothing(_Body):
    """A verb without arguments."""


class Fork(_Body):
    id: str | None = None
    at: int | str | None = None
    version: int | None = None
    run: str | None = None


class Rewind(_Body):
    to: int | str


class Trim(_Body):
    keep_last: int


class Compact(_Body):
    """The options that docs/compaction.md describes, except those that are functions."""

    keep_last: int | None = None
    token_threshold: int | None = None
    tool_output_max_chars: int | None = None
    compact_strategy: str | None = None
    hard_limit_tokens: int | None = None
    hard_limit_strategy: str | None = None


class Uncompact(_Body):
    block: str | None = None


class Suspend(_Body):
    until: datetime | None = None


class Rename(_Body):
    name: str | None


class Tag(_Body):
    add: list[str] = []
    remove: list[str] = []


class Inject(_Body):
    messages: list[dict[str, Any]]


async def _after(call: Call) -> Answer:
    """Return the session's header as it is after a verb."""
    # Without the condition of `If-Match`: the verb has made another version.
    info = await call.service.sessions_of(call.caller).info(call.session_id)
    return Answer(of_info(info), headers=tagged(info.version))


async def fork(call: Call) -> Answer:
    """Begin a new session from this one: from its end, a message, an older version, or the end of a run."""
    asked: Fork = call.body
    chat = await call.sessions.fork(call.session_id, asked.id, at=asked.at, version=asked.version, loop=asked.run)
    info = await call.sessions.info(chat.id)
    return Answer(of_info(info), 201, {**tagged(info.version), "Location": f"/api/sessions/{info.id}"})


async def undo(call: Call) -> Answer:
    """Take back the last change of what is shown."""
    await call.sessions.undo(call.session_id)
    return await _after(call)


async def rewind(call: Call) -> Answer:
    """Go back to a version, or to a message."""
    await call.sessions.rewind(call.session_id, call.body.to)
    return await _after(call)


async def trim(call: Call) -> Answer:
    """Show the model the last messages only."""
    await call.sessions.trim(call.session_id, call.body.keep_last)
    return await _after(call)


async def reset(call: Call) -> Answer:
    """Show the model nothing of what was said so far."""
    await call.sessions.reset(call.session_id)
    return await _after(call)


async def compact(call: Call) -> Answer:
    """Show the model a summary, or less, of what is older."""
    asked: Compact = call.body
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not None}
    await call.sessions.compact(call.session_id, **given)
    return await _after(call)


async def uncompact(call: Call) -> Answer:
    """Show again what a compaction covers."""
    await call.sessions.uncompact(call.session_id, call.body.block)
    return await _after(call)


async def suspend(call: Call) -> Answer:
    """Close a session to messages until it is resumed: by hand, or at a time."""
    await call.sessions.suspend(call.session_id, until=call.body.until)
    return await _after(call)


async def resume(call: Call) -> Answer:
    """Open a session that was suspended, completed or failed."""
    await call.sessions.resume(call.session_id)
    return await _after(call)


async def restore(call: Call) -> Answer:
    """Show a session that was hidden again."""
    await call.sessions.restore(call.session_id)
    return await _after(call)


async def rename(call: Call) -> Answer:
    """Give a session a name for people, or none."""
    await call.sessions.execute(call.session_id, RenameSession(call.body.name))
    return await _after(call)


async def tag(call: Call) -> Answer:
    """Add tags to a session, or take some away."""
    asked: Tag = call.body
    if not asked.add and not asked.remove:
        raise InvalidData("$.add", "name a tag to add or to remove")
    await call.sessions.execute(call.session_id, TagSession(*asked.add, remove=tuple(asked.remove)))
    return await _after(call)


async def inject(call: Call) -> Answer:
    """Append messages without running the agent."""
    most = call.service.settings.limits.messages
    given: Sequence[dict[str, Any]] = call.body.messages
    if not 1 <= len(given) <= most:
        raise InvalidData("$.messages", f"expected 1 to {most} messages, got {len(given)}")
    await call.sessions.inject(call.session_id, list(given))
    return await _after(call)
