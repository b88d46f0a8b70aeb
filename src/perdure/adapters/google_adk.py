"""Google ADK's sessions kept by perdure: `Runner(…, session_service=PerdureSessionService())`.

| ADK | perdure |
|---|---|
| a session: app, user and id | a session; its owner is the user, and the app is a tag |
| an event | a message with the event's id, and a version of the session |
| the state of a session | its metadata |
| the state of an app, and of a user of it | a session each, without messages |
| the revision that tells a stale writer | the session's version |
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from perdure.adapters.extras import extra

with extra("google-adk"):
    from google.adk.errors import StaleSessionError
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events import Event
    from google.adk.platform import time as platform_time
    from google.adk.platform import uuid as platform_uuid
    from google.adk.sessions import BaseSessionService, Session, State
    from google.adk.sessions._session_util import extract_json_safe_state_delta
    from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse

from msgspec.structs import replace

from perdure.adapters.forms.adk import FORM
from perdure.adapters.google_adk_events import RememberedEvents, after, is_kept, message_of
from perdure.adapters.google_adk_state import state_in, with_state
from perdure.adapters.home import Home
from perdure.errors import (
    ConfigurationError,
    InvalidData,
    InvalidSessionId,
    SessionConflict,
    SessionNotActive,
    SessionNotFound,
)
from perdure.model.ids import SessionId, new_id
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo
from perdure.protocols import Change, Filters, SessionHead, SessionStore
from perdure.runtime.repository import SessionFactory
from perdure.sessions.blocking import BlockingChat
from perdure.sessions.chat import Chat

FRAMEWORK = "google-adk"
FORKED = "perdure:"
"""The prefix of ADK's id for a fork that perdure has made. The fork's id in perdure follows."""
SCHEMES = ("perdure", *(f"perdure+{kind}" for kind in ("sqlite", "file", "memory", "postgresql", "postgres")))
_NAMES = "adk"
"""The metadata key of a session's names in ADK, and of the time of its last event."""
_LOOKED_AT = 256
"""The number of newest events that are searched for one that is delivered again."""
_LOOKED_UP = 1024
_LONGEST_TAG = 200
_PAGE = 500
_Deltas = Mapping[str, Mapping[str, Any]]
_Metadata = Mapping[str, Mapping[str, Any]]


class Names(NamedTuple):
    """The names of a session in ADK: its app, its user and its id."""

    app: str
    user: str
    id: str

    @classmethod
    def of(cls, app: str, user: str, session_id: str | None) -> Names:
        """Return the names of a session. One without an id gets a new one."""
        return cls(app, user, (session_id or "").strip() or platform_uuid.new_uuid())


class PerdureSessionService(BaseSessionService):
    """A session service of ADK in a perdure store.

    `store` is a URL, a store, or None for the store that the command line uses. A session belongs to its user. If you
    give an `owner`, all sessions belong to that owner.
    """

    def __init__(self, *, store: str | SessionStore | None = None, owner: str | None = None) -> None:
        self._home = Home(FRAMEWORK, store, owner=owner)
        self._events = RememberedEvents()
        self._locks: WeakValueDictionary[tuple[int, SessionId], asyncio.Lock] = WeakValueDictionary()

    def id_of(self, app_name: str, user_id: str, session_id: str) -> SessionId:
        """Return the id of a session in perdure, for the command line and for `perdure.connect`."""
        return self._id_of(Names.of(app_name, user_id, session_id))

    def chat(self, app_name: str, user_id: str, session_id: str) -> Chat:
        """Return a chat with every perdure verb for a session: fork, undo, compact, search, redact and the rest."""
        return self._home_of(user_id).chat(self.id_of(app_name, user_id, session_id))

    def blocking_chat(self, app_name: str, user_id: str, session_id: str) -> BlockingChat:
        """Return the same verbs for code without an event loop."""
        return self._home_of(user_id).blocking_chat(self.id_of(app_name, user_id, session_id))

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        """Create a session. Raise AlreadyExistsError if there is one with that id."""
        names = Names.of(app_name, user_id, session_id)
        if names.id.startswith(FORKED):
            problem = f"an id that begins with {FORKED!r} names a fork that perdure has made; use another"
            raise InvalidData("$.session_id", problem)
        deltas = extract_json_safe_state_delta(state or {})
        return await self._home.run(self._create(names, deltas, platform_time.get_time()))

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """Return a session with its events, or with those that `config` asks for. Return None if there is none."""
        names = Names.of(app_name, user_id, session_id)
        found = await self._home.run(self._look_up(names))
        if found is None:
            return None
        session, shared = found
        events = self._events.of(session, _asked_for(session, config))
        return _session(names, session.info, session.state.metadata, shared, events)

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """Return the sessions of an app, or of one user of it, with their state and without events, newest last."""
        found, metadata = await self._home.run(self._list(app_name, user_id))
        made = [_session(names, head.info, head.metadata, self._merged(names, metadata)) for names, head in found]
        made.sort(key=lambda session: (session.last_update_time, session.user_id, session.id))
        return ListSessionsResponse(sessions=made)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Erase a session for good. Do nothing if there is none."""
        names = Names.of(app_name, user_id, session_id)
        await self._home.run(self._delete(names))
        self._events.forget(self._id_of(names))

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """Return the state that a user of an app has, without the prefix of its keys."""
        _, scope = self._scopes(Names(app_name, user_id, ""))
        metadata = await self._home.run(self._metadata_of([scope.id]))
        return state_in(metadata.get(scope.id, {}))

    async def fork_session(
        self,
        *,
        app_name: str,
        user_id: str,
        session_id: str,
        at: int | str | None = None,
        version: int | None = None,
    ) -> Session:
        """Return a new session that begins with the events of another, and copies nothing.

        `at` is the number of events that it has, or the id of the last of them. With `version`, it has the events and
        the state of that version: a new session is at version 1, and each event makes the next.
        """
        names = Names.of(app_name, user_id, session_id)
        if await self._home.run(self._found(names)) is None:
            raise SessionNotFoundError(_not_found(names))
        fork = await self.chat(*names).fork(at=at, version=version)
        made = await self.get_session(app_name=app_name, user_id=user_id, session_id=FORKED + fork.id)
        assert made is not None
        return made

    async def append_event(self, session: Session, event: Event) -> Event:
        """Store an event and its changes of all states, or nothing.

        Raise StaleSessionError if another writer has changed the session in the store. An event that is delivered
        again is not stored again. The session object changes after the store has.
        """
        if event.partial:
            return event
        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        # These take time. They run here, and not in the event loop that all sessions of the process share.
        deltas = extract_json_safe_state_delta(event.actions.state_delta)
        message = message_of(event)
        await self._home.run(self._append(session, event, message, deltas))
        return event

    async def _create(self, names: Names, deltas: _Deltas, at: float) -> Session:
        metadata = with_state({_NAMES: _named(names, at)}, deltas["session"])
        new = self._new(self._id_of(names), self._owner_of(names.user), metadata, tags=[_tag_of(names.app)])
        exists = AlreadyExistsError(f"Session with id {names.id} already exists.")
        created = await self._keep(names, new, deltas, exists)
        return _session(names, created.info, created.state.metadata, await self._shared_state(names))

    async def _look_up(self, names: Names) -> tuple[AgentSession, dict[str, Any]] | None:
        found, shared = await asyncio.gather(self._found(names), self._shared_state(names))
        return None if found is None else (found, shared)

    async def _found(self, names: Names) -> AgentSession | None:
        """Return a session, or None if there is none or somebody has deleted it."""
        try:
            found = await self._home.load(self._id_of(names))
        except SessionNotActive:
            return None
        except SessionConflict:
            # The id in perdure belongs to a session of another agent, so ADK has no such fork.
            if names.id.startswith(FORKED):
                return None
            raise
        if found is None or not names.id.startswith(FORKED):
            return found
        known = _names_in(found.state.metadata)  # a fork has the names of the session it was made of
        return found if known is not None and known[:2] == names[:2] else None

    async def _list(self, app: str, user: str | None) -> tuple[list[tuple[Names, SessionHead]], _Metadata]:
        """Return the sessions of an app, and the metadata of the sessions that keep their shared state."""
        found = [(names, head) async for head in self._heads(app, user) if (names := self._names_of(head)) is not None]
        asked = [(names, head) for names, head in found if names.app == app and user in (None, names.user)]
        scopes = {scope.id for names, _ in asked for scope in self._scopes(names)}
        return asked, await self._metadata_of(scopes)

    async def _heads(self, app: str, user: str | None) -> AsyncIterator[SessionHead]:
        """Yield the heads of all sessions that may be of an app and a user. The caller checks."""
        filters: Filters = {"agent": FRAMEWORK, "tag": _tag_of(app), "limit": _PAGE}
        if user is not None or self._home.owner is not None:
            filters["owner"] = self._owner_of(user or "")
        page = await self._home.store.list(**filters)
        while True:
            for head in (await self._home.store.heads([info.id for info in page])).values():
                yield head
            if page.next is None:
                return
            filters["after"] = page.next
            page = await self._home.store.list(**filters)

    def _names_of(self, head: SessionHead) -> Names | None:
        """Return the names of a session in ADK. A fork has those of its original, and an id of its own."""
        names = _names_in(head.metadata)
        if names is None or self._id_of(names) == head.info.id:
            return names
        return names._replace(id=FORKED + head.info.id)

    async def _delete(self, names: Names) -> None:
        if await self._found(names) is not None:
            await self._home.store.delete_tree(self._id_of(names))

    async def _append(self, session: Session, event: Event, message: Message, deltas: _Deltas) -> None:
        names = Names(session.app_name, session.user_id, session.id)
        # Branches that run in parallel append through one session object, one after the other.
        async with self._lock(self._id_of(names)):
            found = await self._found(names)
            if found is None:
                raise SessionNotFoundError(_not_found(names))
            _require_current(session, found)
            newest = islice(reversed(found.state.transcript), _LOOKED_AT)
            namesakes = [other for other in newest if other.id == message.id]
            if namesakes:
                if is_kept(namesakes, event):
                    return
                # Another event has this id, so the message gets one of its own.
                message = message_of(event, new_id())
            changed = _with_event(found, names, message, event.timestamp, deltas["session"])
            saved = await self._keep(names, changed, deltas, StaleSessionError(_STALE))
            # Done here, so that the session object agrees with the store even if the caller has stopped waiting.
            session._storage_update_marker = _marker(saved.info)
            session.last_update_time = event.timestamp
            self._commit_event_to_session(session, event)

    async def _keep(self, names: Names, session: AgentSession, deltas: _Deltas, refusal: Exception) -> AgentSession:
        """Save or create a session in one commit with the changed states of its app and its user.

        Concurrent changes of those states are kept. Raise `refusal` if another writer has saved the session itself.
        """
        while True:
            states = await self._changed_states(names, deltas) if deltas["app"] or deltas["user"] else []
            try:
                saved = await self._home.store.save_all([Change(each) for each in (session, *states)])
            except SessionConflict as error:
                # A conflict on a shared state is not the caller's: the state is read and changed again.
                if error.session_id == session.id:
                    raise refusal from error
            except SessionNotFound as error:
                raise SessionNotFoundError(_not_found(names)) from error
            else:
                return saved[0]

    async def _changed_states(self, names: Names, deltas: _Deltas) -> list[AgentSession]:
        changed = []
        for scope in self._scopes(names):
            if deltas[scope.kind]:
                state = await self._home.load(scope.id) or self._new(scope.id, scope.owner, {}).with_name(scope.name)
                changed.append(_with_metadata(state, with_state(state.state.metadata, deltas[scope.kind])))
        return changed

    async def _shared_state(self, names: Names) -> dict[str, Any]:
        """Return the state that a session shares with others, with the prefixes of its keys."""
        return self._merged(names, await self._metadata_of([scope.id for scope in self._scopes(names)]))

    def _merged(self, names: Names, metadata: _Metadata) -> dict[str, Any]:
        return {
            scope.prefix + key: value
            for scope in self._scopes(names)
            for key, value in state_in(metadata.get(scope.id, {})).items()
        }

    async def _metadata_of(self, session_ids: Iterable[str]) -> _Metadata:
        heads = await self._home.store.heads(session_ids)
        return {session_id: head.metadata for session_id, head in heads.items()}

    def _scopes(self, names: Names) -> tuple[Scope, Scope]:
        return _scopes(self._home.owner, names.app, names.user)

    def _owner_of(self, user: str) -> str | None:
        return self._home.owner or user or None

    def _id_of(self, names: Names) -> SessionId:
        return _id_of(self._home.owner, names)

    def _home_of(self, user: str) -> Home:
        return Home(FRAMEWORK, self._home.shared, owner=self._owner_of(user))

    def _new(
        self, session_id: SessionId, owner: str | None, metadata: Mapping[str, Any], tags: Sequence[str] = ()
    ) -> AgentSession:
        new = SessionFactory().create(self._home.agent, session_id=session_id, owner=owner, tags=tags)
        return _with_metadata(new, metadata)

    def _lock(self, session_id: SessionId) -> asyncio.Lock:
        """Return the lock of a session. A process made by fork() gets another: the parent's may be held for ever."""
        return self._locks.setdefault((os.getpid(), session_id), asyncio.Lock())


class Scope(NamedTuple):
    """A state that several sessions share: the key of its deltas, and the session that keeps it."""

    kind: str
    prefix: str
    id: SessionId
    owner: str | None
    name: str


@lru_cache(_LOOKED_UP)
def _scopes(owner: str | None, app: str, user: str) -> tuple[Scope, Scope]:
    """Return the state that all sessions of an app share, and the one that those of a user share."""
    one = owner or user or None
    of_app = _under(owner, SessionId.of(FRAMEWORK, "state", "app", app))
    of_user = _under(one, SessionId.of(FRAMEWORK, "state", "user", app, user))
    return (
        Scope("app", State.APP_PREFIX, of_app, owner, f"state of the app {app}"),
        Scope("user", State.USER_PREFIX, of_user, one, f"state of {user} in the app {app}"),
    )


@lru_cache(_LOOKED_UP)
def _id_of(owner: str | None, names: Names) -> SessionId:
    if names.id.startswith(FORKED):
        try:
            return SessionId(names.id.removeprefix(FORKED))
        except InvalidSessionId:
            pass  # no fork has such an id, so it is an ordinary one
    if owner is None and names.user:
        return _under(names.user, SessionId.of(names.app, names.id))
    return _under(owner, SessionId.of(*names))


def register() -> None:
    """Let ADK's command line take `--session_service_uri perdure+sqlite:///…`. Call it in the agents' services.py."""
    # Imported here, for programs that do not use ADK's command line.
    from google.adk.cli.service_registry import get_service_registry

    for scheme in SCHEMES:
        get_service_registry().register_session_service(scheme, service_at)


def service_at(uri: str, **options: Any) -> PerdureSessionService:
    """Return the service that a URI of ADK's command line names. `perdure://` is perdure's default store.

    In a services.yaml, write `class: perdure.adapters.google_adk.service_at`.
    """
    # ADK's command line passes it to every service, and this one has no use for it.
    options.pop("agents_dir", None)
    scheme, _, rest = uri.partition("://")
    if scheme == "perdure" and rest:
        raise ConfigurationError("perdure:// has nothing behind it. Name a file as perdure+sqlite:///file.db.")
    return PerdureSessionService(store=uri.removeprefix("perdure+") if rest else None, **options)


_STALE = (
    "The session has been modified in storage since it was loaded. "
    "Load it again with get_session, and append the event to that."
)


def _not_found(names: Names) -> str:
    return f"Session {names.id} not found."


def _require_current(session: Session, found: AgentSession) -> None:
    """Raise StaleSessionError unless a session object is up to date with the store."""
    marker = session._storage_update_marker
    if marker is not None:
        is_current = marker == _marker(found.info)
    else:  # it was made by hand, and only its time and its events tell
        last = FORM.id_of(found.state.messages[-1]) if found.state.messages else None
        is_current = _updated(found.info, found.state.metadata) <= session.last_update_time or last == (
            session.events[-1].id if session.events else None
        )
    if not is_current:
        raise StaleSessionError(_STALE)


def _marker(info: AgentSessionInfo) -> str:
    """Return a text that only one version of a session has, even if an erased session had the same id."""
    return f"{info.version} of {info.created_at.isoformat()}"


def _asked_for(session: AgentSession, config: GetSessionConfig | None) -> Sequence[Message]:
    view = session.state.messages
    recent, since = (config.num_recent_events, config.after_timestamp) if config else (None, None)
    if recent == 0:
        return ()
    shown = view if since is None else after(session, view, since)
    return shown if recent is None else shown[-recent:]


def _with_event(
    found: AgentSession, names: Names, message: Message, timestamp: float, delta: Mapping[str, Any]
) -> AgentSession:
    metadata = with_state({**found.state.metadata, _NAMES: _named(names, timestamp)}, delta)
    return _with_metadata(found.with_state(found.state.with_messages(message)), metadata)


def _with_metadata(session: AgentSession, metadata: Mapping[str, Any]) -> AgentSession:
    return session.with_state(session.state.with_context(replace(session.state.context, metadata=metadata)))


def _session(
    names: Names,
    info: AgentSessionInfo,
    metadata: Mapping[str, Any],
    shared: Mapping[str, Any],
    events: Sequence[Event] = (),
) -> Session:
    made = Session(
        app_name=names.app,
        user_id=names.user,
        id=names.id,
        state={**state_in(metadata), **shared},
        events=list(events),
        last_update_time=_updated(info, metadata),
    )
    made._storage_update_marker = _marker(info)
    return made


def _named(names: Names, updated: float) -> dict[str, Any]:
    return {**names._asdict(), "updated": updated}


def _names_in(metadata: Mapping[str, Any]) -> Names | None:
    named = metadata.get(_NAMES)
    return Names(named["app"], named["user"], named["id"]) if isinstance(named, Mapping) else None


def _updated(info: AgentSessionInfo, metadata: Mapping[str, Any]) -> float:
    """Return the time of a session's last event, or else of its last change in perdure."""
    named = metadata.get(_NAMES)
    return float(named["updated"]) if isinstance(named, Mapping) else info.updated_at.timestamp()


def _tag_of(app: str) -> str:
    """Return the tag of an app's sessions: its name, or an id made of a name that cannot be a tag."""
    return app if app.isprintable() and 0 < len(app) <= _LONGEST_TAG else SessionId.of(FRAMEWORK, app)


def _under(owner: str | None, session_id: SessionId) -> SessionId:
    return session_id if owner is None else SessionId.under(owner, session_id)
