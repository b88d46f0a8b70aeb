"""Look at sessions: what they show, what was said, what ran, where they come from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from msgspec.structs import replace

from perdure.aio import in_slices
from perdure.errors import InvalidData, SessionNotFound
from perdure.model.checks import expect
from perdure.model.ids import SessionId
from perdure.model.loop_events import AnyLoopEvent
from perdure.model.message import Media, Message
from perdure.model.session import AgentSession, AgentSessionInfo, ListedSession, SessionInfoList
from perdure.protocols import (
    Attachments,
    Filters,
    FindsMessages,
    MessagePlace,
    Preview,
    Previews,
    Search,
    SearchHit,
    SessionHead,
    Versions,
)
from perdure.sessions.attaching import type_by_beginning
from perdure.sessions.reach import Reach, cannot

if TYPE_CHECKING:
    from perdure.model.record import LoopRecord, SessionRecord
    from perdure.sessions.lineage import Ancestry, Diff
    from perdure.sessions.viewing import View

UNTYPED = "application/octet-stream"
"""The type of bytes that do not tell what they are."""


class Looking(Reach):
    """The verbs that change nothing."""

    async def exists(self, session_id: str) -> bool:
        """Return whether a session exists within reach, hidden ones included."""
        self._require_open()
        if self.owner is None:
            return await self.store.exists(SessionId(session_id))
        return await self._find(session_id) is not None

    async def session(self, session_id: str, version: int | None = None) -> AgentSession:
        """Return the session itself, as of a `version`, by default the newest."""
        return await self.runtime.get_session(await self._reach(session_id), version=version)

    async def versions(self, session_id: str, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        """Return a page of a session's versions, newest first: headers, definitions and metadata, without messages.

        For the next page, give the version of the last one as `before`.
        """
        key = (await self.info(session_id)).id
        store = self.store
        if not isinstance(store, Versions):
            raise cannot(store, "list versions")
        return await store.versions(key, before=before, limit=limit)

    async def view(self, session_id: str) -> View:
        """Return a conversation for a page that is being loaded, from any process.

        It has the messages, the calls that wait for a person, and the queued messages. Of the run under way, it has
        the messages it was sent and what it has said so far. `follow(after=…)` continues from its `cursor`. All of it
        is one consistent state.
        """
        from perdure.sessions.viewing import view_of, view_without_journal

        key, journal = (await self.info(session_id)).id, self.runtime.journal
        if journal is None:
            is_running = self.live.is_running(key)
            return view_without_journal(await self.session(key), is_running=is_running)

        async def version() -> int:
            return (await self.runtime.get_session_info(key)).version

        return await view_of(journal, partial(self.runtime.get_session, key), version)

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList[ListedSession]:
        """Return a page of sessions, the newest first, or by `order="updated"` the last updated first.

        With an owner, these are the owner's sessions. `owner=None` asks for sessions without an owner. Each has a
        title, its last words, and the number of messages that it shows.
        """
        page = await self.headers(**filters)
        store = self.store
        found = await store.previews([info.id for info in page]) if page and isinstance(store, Previews) else {}
        damaged = [*page.damaged, *(each.damage for each in found.values() if each.damage is not None)]
        listed = [_listed(info, found.get(info.id)) for info in page]
        return SessionInfoList(listed, next=page.next, damaged=damaged)

    async def headers(self, **filters: Unpack[Filters]) -> SessionInfoList:
        """Return the same page as headers alone. That costs less, because no message is read."""
        self._require_open()
        self._require_declared(filters.get("metadata"))
        if self.owner is not None:
            if filters.get("owner", self.owner) != self.owner:
                return SessionInfoList(())
            filters["owner"] = self.owner
        return await self.store.list(**filters)

    def _require_declared(self, metadata: object) -> None:
        declared = self.runtime.filters
        for key in metadata if isinstance(metadata, Mapping) else ():
            if key not in declared:
                known = f"declared are {', '.join(declared)}" if declared else "none is declared"
                problem = f"lists are not indexed by {key!r}; {known}. Name it in connect(filters=(…))"
                raise InvalidData("$.metadata", problem)

    async def length(self, session_id: str) -> int:
        """Return how many messages the model is shown."""
        return len((await self.session(session_id)).state.transcript)

    async def snapshot(self, session_id: str) -> dict[str, Any] | None:
        """Return a copy of what the model is shown, as plain data, or None if the session does not exist."""
        try:
            session = await self.session(session_id)
        except SessionNotFound:
            return None
        said = session.state.transcript
        messages = [message.to_dict() async for some in in_slices(said) for message in some]
        return {
            "id": str(session.id),
            "version": session.version,
            "status": session.status.value,
            "agent": session.info.agent_name,
            "system_prompt": session.state.context.system_prompt,
            "metadata": dict(session.state.metadata),
            "messages": messages,
        }

    async def history(self, session_id: str) -> Sequence[Message]:
        """Return all that was said, including messages that are covered, trimmed or rewound."""
        from perdure.sessions.history import all_said

        session = await self.session(session_id)
        return await all_said(self.runtime.journal, session, partial(self.session, session_id))

    async def read(self, session_id: str, part: Media | str) -> Media:
        """Return an image or a file, a `part` of a message, with its bytes in `data`. One on the web stays as it is.

        Bytes of more than a few KB are not loaded with a session. They are read when they are sent, or by this verb.
        The part's `hash` may be given in its place. What is returned then has no name, and the type that its first
        bytes tell, or `application/octet-stream`.
        """
        if isinstance(part, str):
            file = await self.read(session_id, Media(UNTYPED, hash=part, size=0))
            return replace(file, media_type=type_by_beginning(file.data or b"") or UNTYPED)
        expect(part, Media, "$.part")
        key = (await self.info(session_id)).id
        if part.hash is None:
            return part
        store = self.store
        if not isinstance(store, Attachments):
            raise cannot(store, "keep images and files")
        found = await store.attachments(key, [part.hash])
        return replace(part, data=found[part.hash], hash=None, size=None)

    async def ancestry(self, session_id: str) -> Ancestry:
        """Return what a session was forked from, what was forked from it, and the first of its line."""
        from perdure.sessions.lineage import ancestry_of

        return await ancestry_of(self.store, await self.info(session_id))

    async def diff(self, left: str, right: str) -> Diff:
        """Return what two sessions, `left` and `right`, have in common from their beginning, and how each continues."""
        from perdure.sessions.lineage import diff_of

        return diff_of(await self.session(left), await self.session(right))

    async def search(self, text: str, *, session_id: str | None = None, limit: int = 20) -> Sequence[SearchHit]:
        """Return the messages that have every word of a `text`, best first, including covered and trimmed ones.

        With a `session_id`, only that session is searched. The page Search has the queries.
        """
        self._require_open()
        store = self.store
        if not isinstance(store, Search):
            raise cannot(store, "search messages")
        key = None if session_id is None else (await self.info(session_id)).id
        return await store.search(text, owner=self.owner, session_id=key, limit=limit)

    async def find(self, message_id: str, *, limit: int = 10) -> Sequence[MessagePlace]:
        """Return the places of the messages with a `message_id`, in any session, those in the newest sessions first.

        Covered, trimmed and rewound messages are found, too. An id that was given twice leads to several places.
        """
        self._require_open()
        store = self.store
        if not isinstance(store, FindsMessages):
            raise cannot(store, "find messages by their ids")
        return await store.find_message(message_id, owner=self.owner, limit=limit)

    async def record(self, session_id: str, *, limit: int | None = None, before: int | None = None) -> SessionRecord:
        """Return what ran in a session: the headers of its loops, in the order in which they began.

        With a `limit` only the last loops are returned. With `before`, the `cursor` of an event, they began before it.
        """
        return await self.runtime.record((await self.info(session_id)).id, limit=limit, before=before)

    async def loop(self, session_id: str, loop_id: str) -> LoopRecord:
        """Return the whole record of one run, by its `loop_id`."""
        return await self.runtime.loop((await self.info(session_id)).id, loop_id)

    async def events(
        self, session_id: str, *, after: int | None = None, last: int | None = None, follow: bool = False
    ) -> AsyncIterator[AnyLoopEvent]:
        """Yield the events on record, and with `follow` those to come, from any process.

        It begins after the event whose `cursor` is given as `after`, or with the `last` events.
        """
        key = (await self.info(session_id)).id
        async for event in self.runtime.events(key, after=after, last=last, follow=follow):
            yield event


def _listed(info: AgentSessionInfo, preview: Preview | None) -> ListedSession:
    header = {name: getattr(info, name) for name in info.__struct_fields__}
    if preview is None:  # the store has none to give
        return ListedSession(**header, title=info.name)
    header["usage"] = preview.usage
    return ListedSession(
        **header, title=preview.title, last_words=preview.last_words, message_count=preview.message_count
    )
