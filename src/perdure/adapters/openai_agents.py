"""Sessions of the OpenAI Agents SDK: `Runner.run(agent, "…", session=PerdureSession("chat-1"))`.

An item is a message, and `add_items` makes one version. `pop_item`, `clear_session` and the SDK's own compaction show
less and delete nothing: `chat.undo()` and `chat.uncompact()` take them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from perdure.adapters.extras import extra

with extra("openai-agents"):
    from agents.items import TResponseInputItem
    from agents.memory.session_settings import SessionSettings, coerce_session_settings, resolve_session_limit
    from agents.run_context import RunContextWrapper

from perdure.adapters.forms.openai import FORM
from perdure.adapters.home import Home, check_session_id
from perdure.aio import finish_despite_cancel
from perdure.errors import SessionConflict
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Transcript
from perdure.protocols import SessionStore
from perdure.sessions.blocking import BlockingChat
from perdure.sessions.chat import Chat

if TYPE_CHECKING:
    from agents.memory.session import _CompactionSnapshot

Change = Callable[[AgentSession], AgentSession]
"""A change of a session. It may be called several times. If it returns its argument, nothing is saved."""
Run = RunContextWrapper[Any] | None
"""The run that a method is called for. The SDK names it to sessions whose methods take a `wrapper`."""
BY = "openai-agents"
_STALE = "Session {id!r} is at version {found}, and this run has read version {seen}: somebody else has written since."
_AGAIN = "Nothing was saved. Run again: it reads what is there now. `strict=False` appends all the same."


class PerdureSession:
    """A session of the OpenAI Agents SDK in a store of perdure, for any event loop, thread or process.

    Appends of several runs come one after the other. With `strict`, a run gets SessionConflict if another writer has
    written between its read and its write.
    """

    session_id: str
    session_settings: SessionSettings | None

    def __init__(
        self,
        session_id: str,
        *,
        store: str | SessionStore | None = None,
        owner: str | None = None,
        strict: bool = False,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        check_session_id(session_id)
        self._home = Home(BY, store, owner=owner)
        self._id: SessionId = self._home.id_of(session_id)
        self._strict = strict
        self._seen = Seen()
        self.session_id = session_id
        self.session_settings = (
            SessionSettings() if session_settings is None else coerce_session_settings(session_settings)
        )

    @property
    def chat(self) -> Chat:
        """A chat with every perdure verb for this session. `get_items` returns what they change."""
        return self._home.chat(self._id)

    @property
    def blocking_chat(self) -> BlockingChat:
        """The same verbs for code without an event loop, such as around `Runner.run_sync`."""
        return self._home.blocking_chat(self._id)

    async def fork(
        self, session_id: str | None = None, *, at: int | str | None = None, version: int | None = None
    ) -> PerdureSession:
        """Return a new session that begins with what this one shows. Nothing is copied.

        Without an id it gets a new one. `at` is the number of messages that it begins with, or the id of the last of
        them. With `version`, it begins from an older view.
        """
        forked = PerdureSession(
            SessionId.generate() if session_id is None else session_id,
            store=self._home.shared,
            owner=self._home.owner,
            strict=self._strict,
            session_settings=self.session_settings,
        )
        await self.chat.fork(forked._id, at=at, version=version)
        return forked

    async def get_items(self, limit: int | None = None, *, wrapper: Run = None) -> list[TResponseInputItem]:
        """Return the items that are shown, or the newest of them, oldest first. `limit` works as in SQLiteSession."""
        most = resolve_session_limit(limit, self.session_settings)
        if most is None or most < 0:
            return _items(await self._view(wrapper))
        view = await self._view(wrapper, last=most)
        items = _items(view[max(0, len(view) - most) :])
        if len(items) < most < len(view):  # some messages have no items
            items = _items(await self._view(wrapper))
        return items[max(0, len(items) - most) :]

    async def add_items(self, items: Sequence[TResponseInputItem], *, wrapper: Run = None) -> None:
        """Append items, all of them or none."""
        if items:
            await self._write(Appending(_messages(items)), wrapper)

    async def pop_item(self, *, wrapper: Run = None) -> TResponseInputItem | None:
        """Remove the newest item from what is shown and return it. Return None if nothing is shown."""
        popping = Popping()
        await self._write(popping, wrapper)
        return popping.popped

    async def clear_session(self, *, wrapper: Run = None) -> None:
        """Hide all items. `chat.undo()` shows them again, and `chat.erase()` erases them for good."""
        await self._write(_cleared, wrapper)

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> _CompactionSnapshot | None:
        """Return the newest items, and a function that replaces the last of them if they are still the last then.

        The SDK's compaction asks sessions for it. Items that are added meanwhile are not lost.
        """
        # The snapshot is a private class of the SDK. It is imported only when the SDK itself asks for one.
        from agents.memory.session import _CompactionSnapshot

        kind = type(self)
        if kind.get_items is not PerdureSession.get_items or kind.add_items is not PerdureSession.add_items:
            return None  # a subclass may change items when it reads and writes them
        view = await self._view(None)
        # One more than asked for tells whether there are more.
        shown = [*islice(_newest(view), limit + 1)][::-1]
        newest = shown[-limit:]

        async def replace_suffix(start: int, output: list[TResponseInputItem]) -> bool:
            if not newest[start:]:
                return False
            replacing = Replacing(newest[start:], _messages(output), prune_prefix)
            await self._write(replacing, None)
            return replacing.is_done

        return _CompactionSnapshot([each.item for each in newest], len(shown) <= limit, replace_suffix)

    async def _view(self, run: Run, *, last: int | None = None) -> Transcript:
        """Return what is shown. With `last`, only its end has to be read. Note the version that the run has seen."""
        session = await self._home.read(self._id, last=last)
        self._seen.note(run, 0 if session is None else session.version)
        return Transcript() if session is None else session.state.transcript

    async def _write(self, change: Change, run: Run) -> None:
        """Change the session and save it. If the caller is cancelled, it hears of that only after the save."""
        await finish_despite_cancel(self._home.run(self._written(change, run)))

    async def _written(self, change: Change, run: Run) -> None:
        while True:
            session = await self._home.read(self._id, last=0 if isinstance(change, Appending) else None)
            if self._strict:
                self._require_seen(session, run)
            before = self._home.new(self._id, name=self.session_id) if session is None else session
            after = change(before)
            if after is before:
                return
            try:
                kept = await self._home.keep(after, whole=False)
            except SessionConflict:
                continue  # a conflict with another writer: apply the change to the newer version
            self._seen.note(run, kept.version)
            return

    def _require_seen(self, session: AgentSession | None, run: Run) -> None:
        seen, found = self._seen.by(run), 0 if session is None else session.version
        if seen is not None and seen != found:
            raise SessionConflict(self._id, seen, found, _STALE.format(id=self._id, found=found, seen=seen), _AGAIN)


class Seen:
    """The versions that runs have last read or written."""

    def __init__(self) -> None:
        self._by_run: WeakKeyDictionary[RunContextWrapper[Any], int] = WeakKeyDictionary()
        self._outside: int | None = None

    def note(self, run: Run, version: int) -> None:
        if run is None:
            self._outside = version
        else:
            self._by_run[run] = version

    def by(self, run: Run) -> int | None:
        """Return the version that a run relies on, or None if it has read nothing yet."""
        return self._outside if run is None else self._by_run.get(run)


class Shown(NamedTuple):
    """An item that a view shows. Most messages have one item, and some have several."""

    item: TResponseInputItem
    message: Message
    place: int
    """Its index among the message's items."""
    from_end: int
    """The number of messages from here to the end of the view, including this one."""


def _newest(view: Transcript) -> Iterator[Shown]:
    """Yield the items that a view shows, the newest first. Only as many messages are read as are needed."""
    for from_end, message in enumerate(reversed(view), 1):
        items: list[Any] = FORM.items(message)
        for place in range(len(items) - 1, -1, -1):
            yield Shown(items[place], message, place, from_end)


def _items(messages: Iterable[Message]) -> list[TResponseInputItem]:
    items: list[Any] = []
    for message in messages:
        items += FORM.items(message)
    return items


def _messages(items: Iterable[Any]) -> tuple[Message, ...]:
    return tuple(map(FORM.message, items))


def _showing(session: AgentSession, view: Transcript) -> AgentSession:
    """Return a session with a shorter view. A run that waited is dropped, since it may need what is gone."""
    return session.with_state(session.state.for_next_execution().with_transcript(view))


def _left_of(shown: Shown) -> tuple[Message, ...]:
    """Return the items before this one in the same message, each as a message of its own."""
    return _messages(FORM.items(shown.message)[: shown.place])


def _cleared(session: AgentSession) -> AgentSession:
    return _showing(session, session.state.transcript.reset()) if session.state.transcript else session


class Appending:
    """The change that appends messages."""

    def __init__(self, messages: tuple[Message, ...]) -> None:
        self._messages = messages

    def __call__(self, session: AgentSession) -> AgentSession:
        return session.with_state(session.state.with_messages(*self._messages))


class Popping:
    """The change that removes the last item. Messages without items that follow it are removed too."""

    popped: TResponseInputItem | None = None

    def __call__(self, session: AgentSession) -> AgentSession:
        view = session.state.transcript
        last = next(_newest(view), None)
        self.popped = None if last is None else last.item
        return (
            session
            if last is None
            else _showing(session, view.cut(0, len(view) - last.from_end).append(*_left_of(last)))
        )


class Replacing:
    """The change that replaces the last items, if they are still the last. `chat.uncompact()` takes it back."""

    is_done = False

    def __init__(
        self,
        replaced: Sequence[Shown],
        messages: tuple[Message, ...],
        is_expired: Callable[[TResponseInputItem], bool] | None,
    ) -> None:
        self._replaced = replaced
        self._messages = messages
        self._is_expired = is_expired

    def __call__(self, session: AgentSession) -> AgentSession:
        view, first = session.state.transcript, self._replaced[0]
        start = len(view) - first.from_end
        self.is_done = start >= 0 and self._is_end_of(view)
        if not self.is_done:
            return session
        shown = (*_left_of(first), *self._messages)
        begin = self._expired(view.cut(0, start))
        if view.edge_from(start) == start:
            return _showing(session, view.cover(start, len(view), shown, by=BY).cut(begin, len(view)))
        return _showing(session, view.cut(begin, start).append(*shown))

    def _is_end_of(self, view: Transcript) -> bool:
        now = list(islice(_newest(view), len(self._replaced)))[::-1]
        return [(each.message, each.place) for each in now] == [(each.message, each.place) for each in self._replaced]

    def _expired(self, view: Transcript) -> int:
        """Return how many messages at the beginning of a view have only expired items."""
        is_expired = self._is_expired
        if is_expired is None:
            return 0
        return sum(1 for _ in takewhile(lambda message: all(map(is_expired, FORM.items(message))), view))
