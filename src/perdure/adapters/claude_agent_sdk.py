"""Transcripts of the Claude Agent SDK in a store: `ClaudeAgentOptions(session_store=PerdureSessionStore())`.

A transcript is a session, and a sub-agent's transcript is a child session. An entry is a message whose id is the
entry's uuid.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

from perdure.adapters.extras import extra

with extra("claude"):
    import anyio
    import sniffio
    from claude_agent_sdk import fold_session_summary, project_key_for_directory
    from claude_agent_sdk.types import (
        SessionKey,
        SessionListSubkeysKey,
        SessionStoreEntry,
        SessionStoreListEntry,
        SessionSummaryEntry,
    )
    from claude_agent_sdk.types import SessionStore as ClaudeSessionStore

from perdure.adapters.claude_agent_sdk_entries import Histories, Made
from perdure.adapters.foreign import as_metadata, of_metadata
from perdure.adapters.forms.claude import FORM
from perdure.adapters.home import Home
from perdure.errors import SessionConflict, SessionNotActive, SessionNotFound
from perdure.model.ids import SessionId, mark_of
from perdure.model.indexed import LONGEST
from perdure.model.lineage import SpawnRef
from perdure.model.message import Envelope, Message
from perdure.model.session import AgentSession, AgentSessionInfo, forked_from
from perdure.model.transcript import Transcript
from perdure.model.value import JSON
from perdure.paging import all_infos
from perdure.protocols import SessionHead, SessionStore
from perdure.redaction.replacement import DERIVED
from perdure.stores.cache import LRU

if TYPE_CHECKING:
    from perdure.sessions.chat import Chat

T = TypeVar("T")
_KEY, _PROJECT, _SUMMARY = "claude", "claude_project", "claude_summary"
"""The metadata keys of a transcript's key, of the project that lists find it by, and of its summary."""
_TOOL = "Agent"
"""The tool that starts a sub-agent of Claude."""
_MOST_FOLDED = 1_000
"""The number of sessions whose recomputed summary an adapter remembers."""
_SHARED = ("isSidechain", "userType", "cwd", "sessionId", "version", "gitBranch", "agentId", "timestamp")
"""The fields that an entry made by perdure copies from the entry before it."""


class PerdureSessionStore(ClaudeSessionStore):
    """A session store that keeps the transcripts of the Claude Agent SDK, for asyncio and trio."""

    def __init__(self, *, store: str | SessionStore | None = None, owner: str | None = None) -> None:
        self._home = Home("claude-agent-sdk", store, owner=owner)
        self._histories = Histories(self._home.store)
        self._folded: LRU[SessionId, tuple[int, JSON]] = LRU(_MOST_FOLDED)
        self._appending: WeakValueDictionary[tuple[int, SessionId], asyncio.Lock] = WeakValueDictionary()

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add entries to a transcript in one commit. Entries that it already has are left out."""
        if entries:
            await self._run(self._append, key, entries)

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return the entries that a transcript shows now, or None if nothing was ever appended to it."""
        found = self._home.at_hand(self._id_of(key))
        shown = await self._run(self._load, key) if found is None else _entries_of(found, key)
        return cast("list[SessionStoreEntry] | None", shown)

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Return the transcripts of a project, without those of sub-agents. The newest comes first."""
        found = await self._run(self._summaries, project_key)
        return [{"session_id": each["session_id"], "mtime": each["mtime"]} for each in found]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Return the summaries of these transcripts. One is read only if a perdure verb has removed some of it."""
        return await self._run(self._summaries, project_key)

    async def delete(self, key: SessionKey) -> None:
        """Erase a transcript and those of its sub-agents in one commit. Its forks keep what they show of it."""
        await self._run(self._delete, key)

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the subpaths of the transcripts of a session's sub-agents."""
        return await self._run(self._subkeys, key)

    def chat(self, session_id: str, *, project_key: str | None = None, subpath: str | None = None) -> Chat:
        """Return a chat with every perdure verb for a transcript, to be awaited under asyncio.

        Without `project_key`, the project is that of the working directory.
        """
        key = SessionKey(project_key=project_key or project_key_for_directory(), session_id=session_id)
        if subpath is not None:
            key["subpath"] = subpath
        found = self._home.wait(self._find(key))
        return self._home.chat(self._id_of(key) if found is None else found.id)

    async def _run(self, verb: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a verb and return its result. If the caller is cancelled, the verb continues."""
        if sniffio.current_async_library() == "asyncio":
            return await self._home.run(verb(*args))
        # trio cannot await a future of asyncio, so a thread waits for the store's event loop.
        return await anyio.to_thread.run_sync(lambda: self._home.wait(verb(*args)), abandon_on_cancel=True)

    def _id_of(self, key: SessionKey) -> SessionId:
        # The session's id comes first, so that people find the session by it.
        return self._home.id_of(key["session_id"], key["project_key"], *_subpath(key))

    async def _find(self, key: SessionKey) -> AgentSession | None:
        found = await self._home.load(self._id_of(key))
        return found if found is not None or _subpath(key) else await self._find_fork(key)

    async def _find_fork(self, key: SessionKey) -> AgentSession | None:
        """Return the fork that has this id in perdure, if it belongs to the same project."""
        found = None
        with suppress(SessionConflict):  # raised if a session of another agent has the id
            found = await self._home.load(self._home.id_of(key["session_id"]))
        if found is None or forked_from(found.info) is None:
            return None
        return found if _key_of(found.state.metadata, "project_key") == key["project_key"] else None

    async def _append(self, key: SessionKey, entries: Sequence[SessionStoreEntry]) -> None:
        # Appends run in the order in which they were called. A process made by fork() has locks of its own.
        lock = self._appending.setdefault((os.getpid(), self._id_of(key)), asyncio.Lock())
        async with lock:
            while not await self._appended(key, entries):
                pass

    async def _appended(self, key: SessionKey, entries: Sequence[SessionStoreEntry]) -> bool:
        """Append what is not there yet. Return False if another writer has saved the session meanwhile."""
        session = await self._find(key) or await self._new(key)
        history = await self._histories.of(session)
        new, at = history.new_among([Made.of(cast("JSON", entry)) for entry in entries])
        if new:
            view = session.state.transcript
            changed = session.with_state(session.state.with_transcript(view.append(*(each.message for each in new))))
            if not _subpath(key):
                changed = _summarised(changed, key, [cast("SessionStoreEntry", each.entry) for each in new])
            if not await self._kept(changed):
                return False
        history.at = at
        return True

    async def _kept(self, session: AgentSession) -> bool:
        try:
            await self._home.keep(session)
        except SessionConflict as error:
            # No retry helps if the id belongs to a session of another agent.
            if error.agent is not None:
                raise
            return False
        return True

    async def _new(self, key: SessionKey) -> AgentSession:
        metadata = {_KEY: dict(key)}
        if not _subpath(key):
            return self._home.new(self._id_of(key), metadata=metadata)
        parent = await self._parent_of(key)
        spawn = SpawnRef(parent, "", "", _TOOL)
        return self._home.new(self._id_of(key), name=key["subpath"], metadata=metadata, parent=parent, spawn=spawn)

    async def _parent_of(self, key: SessionKey) -> SessionId:
        """Return the session that a sub-agent belongs to. One that has to be created is not listed."""
        main = _main(key)
        found = await self._find(main)
        while found is None:
            await self._kept(await self._new(main))
            found = await self._find(main)
        return found.id

    async def _load(self, key: SessionKey) -> list[dict[str, Any]] | None:
        session = await self._find(key)
        return None if session is None else _entries_of(session, key)

    async def _summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        asked = {_PROJECT: _indexed(project_key)}
        infos = await all_infos(
            self._home.store.list, agent=self._home.agent.name, owner=self._home.owner, metadata=asked, top_level=True
        )
        ids = [info.id for info in infos]
        heads, previews = await self._home.store.heads(ids), await self._home.store.previews(ids)
        found: list[SessionSummaryEntry] = []
        # Oldest first: each time is pushed past the one before it, so that no two are the same.
        for head in sorted(heads.values(), key=lambda head: (head.info.updated_at, head.info.created_at)):
            preview = previews.get(head.info.id)
            data = await self._data(head, None if preview is None else preview.message_count, project_key)
            found.append(self._summary(head, data, after=found[-1]["mtime"] if found else 0))
        return found[::-1]

    async def _data(self, head: SessionHead, count: int | None, project_key: str) -> Any:
        """Return the summary of a session. If a verb has changed what it shows, read it, once for each version."""
        session_id, version = head.info.id, head.info.version
        if _is_current(head.metadata.get(_SUMMARY), count):
            return _data_of(head.metadata[_SUMMARY])
        known = self._folded.recall(session_id)
        if known is None or known[0] != version:
            session = await self._home.store.load(session_id, version)
            key = SessionKey(project_key=project_key, session_id=self._session_id(head.info, head.metadata))
            known = (version, {} if session is None else _folded(session, key))
            self._folded.keep(session_id, known)
        # A copy, since the caller may change it and this one is remembered.
        return deepcopy(known[1])

    def _summary(self, head: SessionHead, data: Any, *, after: int) -> SessionSummaryEntry:
        # Both lists use one clock: the time at which the store kept this version. The SDK sorts by it in milliseconds,
        # and one millisecond may have several.
        at = max(int(head.info.updated_at.timestamp() * 1000), after + 1)
        return {"session_id": self._session_id(head.info, head.metadata), "mtime": at, "data": data}

    def _session_id(self, info: AgentSessionInfo, metadata: Mapping[str, Any]) -> str:
        """Return the id by which the SDK knows a session. A fork is known by its id in perdure."""
        if forked_from(info) is None:
            return _key_of(metadata, "session_id")
        return info.id if self._home.owner is None else info.id.removeprefix(mark_of(self._home.owner))

    async def _delete(self, key: SessionKey) -> None:
        try:
            found = await self._find(key)
        except SessionNotActive as hidden:  # hidden, but still in the store
            session_id: SessionId | None = SessionId(hidden.session_id)
        else:
            session_id = None if found is None else found.id
        if session_id is not None:
            with suppress(SessionNotFound):
                await self._home.store.delete_tree(session_id)

    async def _subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        session = await self._find(_main(key))
        if session is None:
            return []
        infos = await all_infos(self._home.store.list, agent=self._home.agent.name, parent=session.id)
        heads = await self._home.store.heads([info.id for info in infos if info.spawn_ref is not None])
        return [_key_of(head.metadata, "subpath") for head in heads.values()]


def _subpath(key: SessionKey) -> tuple[str, ...]:
    """Return a key's subpath as a tuple, which is empty for a main transcript."""
    subpath = key.get("subpath")
    return () if subpath is None else (subpath,)


def _main(key: SessionKey | SessionListSubkeysKey) -> SessionKey:
    return {"project_key": key["project_key"], "session_id": key["session_id"]}


def _key_of(metadata: Mapping[str, Any], name: str) -> str:
    key = metadata.get(_KEY)
    return str(key.get(name, "")) if isinstance(key, Mapping) else ""


def _indexed(project_key: str) -> str:
    """Return the value that lists find a project by: its key, or an id made of a key that is too long for an index."""
    return project_key if len(project_key) <= LONGEST else str(SessionId.of(project_key))


def _summarised(session: AgentSession, key: SessionKey, new: list[SessionStoreEntry]) -> AgentSession:
    """Return a session whose summary includes the new entries at its end, listed under its project."""
    state, count = session.state, len(session.state.transcript)
    kept = state.metadata.get(_SUMMARY)
    before = _data_of(kept) if _is_current(kept, count - len(new)) else None
    if before is None:
        data = _folded(session, key)
    else:
        data = fold_session_summary({"session_id": key["session_id"], "mtime": 0, "data": {**before}}, key, new)["data"]
    if before is None or data != before:
        state = state.with_metadata(_SUMMARY, {DERIVED: count, "data": as_metadata(data)})
    if _PROJECT not in state.metadata:
        state = state.with_metadata(_PROJECT, _indexed(key["project_key"]))
    return session.with_state(state).with_indexed((_PROJECT,))


def _folded(session: AgentSession, key: SessionKey) -> dict[str, Any]:
    """Return the summary of what a session shows now."""
    return fold_session_summary(None, key, cast("list[SessionStoreEntry]", _shown(session.state.transcript)))["data"]


def _is_current(kept: Any, count: int | None) -> bool:
    """Tell whether a summary still fits what a session shows, by the number of messages shown.

    If there are fewer than the summary was made of, a verb has removed some. To store more than their number would
    cost every append a new value. A summary without a number is taken as it is.
    """
    made_of = kept.get(DERIVED) if isinstance(kept, Mapping) else None
    return kept is not None and (made_of is None or count is None or made_of <= count)


def _data_of(kept: Any) -> Any:
    return of_metadata(kept["data"] if DERIVED in kept else kept)


def _entries_of(session: AgentSession, key: SessionKey) -> list[dict[str, Any]] | None:
    """Return the entries that a transcript shows, or None if nothing was ever appended to it."""
    # A main transcript without a project was only created as the parent of a sub-agent's.
    if not (_subpath(key) or _PROJECT in session.state.metadata):
        return None
    shown = _shown(session.state.transcript)
    if forked_from(session.info):  # its entries name the session in which they were written
        for entry in shown:
            if "sessionId" in entry:
                entry["sessionId"] = key["session_id"]
    return shown


def _shown(view: Transcript) -> list[dict[str, Any]]:
    """Return the entries that a view shows. Entries that perdure has made are linked into their chain."""
    entries = [(entry, _is_made(message)) for message in view for entry in FORM.items(message)]
    if any(is_made for _, is_made in entries):
        chain = _Chain(next((entry for entry, is_made in entries if not is_made and "parentUuid" in entry), {}))
        for entry, is_made in entries:
            chain.link(entry, is_made=is_made)
    return [entry for entry, _ in entries]


def _is_made(message: Message) -> bool:
    """Tell whether perdure has made a message, such as a summary. What is left of a redacted entry is not."""
    last = message.parts[-1] if message.parts else None
    return not FORM.frame(message) and not (isinstance(last, Envelope) and last.format == FORM.name)


class _Chain:
    """The chain of entries that Claude follows, from the last one by its parent back to the first.

    An entry made by perdure follows the one before it in the view. Entries that followed that one now follow the new
    entry. So does the next entry, if its own parent is not shown any more.
    """

    def __init__(self, like: Mapping[str, Any]) -> None:
        self._like = like
        self._last: str | None = None
        self._shown: set[str] = set()
        self._instead: dict[str, str] = {}
        self._made: str | None = None

    def link(self, entry: dict[str, Any], *, is_made: bool) -> None:
        if is_made:
            self._insert(entry)
        elif "parentUuid" in entry and isinstance(entry.get("uuid"), str):
            self._follow(entry)
            self._like = entry
        else:
            return
        self._last = entry["uuid"]
        self._shown.add(entry["uuid"])

    def _insert(self, entry: dict[str, Any]) -> None:
        entry.update({name: self._like[name] for name in _SHARED if name in self._like}, parentUuid=self._last)
        if self._last is not None:
            self._instead[self._last] = entry["uuid"]
        self._made = entry["uuid"]

    def _follow(self, entry: dict[str, Any]) -> None:
        parent = entry["parentUuid"]
        if self._made is not None and parent is not None and parent not in self._shown:
            entry["parentUuid"] = self._made
        while entry["parentUuid"] in self._instead:
            entry["parentUuid"] = self._instead[entry["parentUuid"]]
        self._made = None
