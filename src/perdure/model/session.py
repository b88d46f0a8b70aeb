"""A session: what the agent is, what it has done, and the header under which both are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import force_setattr

from perdure.errors import (
    CorruptRecord,
    IllegalStatusChange,
    InvalidData,
    InvalidSessionFile,
    KeyUnavailable,
    UnreadableFile,
)
from perdure.model.checks import expect, expect_text
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId, Time, now
from perdure.model.indexed import MARK, indexed_in, marks_of
from perdure.model.lineage import SpawnRef
from perdure.model.retention import Retention, keep_mark
from perdure.model.state import AgentState
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, Value, brief, freeze, plain_text


class SessionStatus(StrEnum):
    """The status of a conversation. It changes only when an action or a controller changes it."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    DELETED = "deleted"


_S = SessionStatus
STATUS_MOVES: dict[SessionStatus, frozenset[SessionStatus]] = {
    _S.ACTIVE: frozenset({_S.SUSPENDED, _S.COMPLETED, _S.FAILED, _S.DELETED}),
    _S.SUSPENDED: frozenset({_S.ACTIVE, _S.COMPLETED, _S.FAILED, _S.DELETED}),
    _S.COMPLETED: frozenset({_S.ACTIVE, _S.DELETED}),
    _S.FAILED: frozenset({_S.ACTIVE, _S.DELETED}),
    _S.DELETED: frozenset(),
}


class AgentSessionInfo(Value, frozen=True):
    """The header of a session: all that a list shows."""

    id: SessionId
    """The id."""
    agent_name: str
    """The name of the agent."""
    status: SessionStatus = SessionStatus.ACTIVE
    """The status."""
    version: int = 0
    """The number of the version. It is 0 before the first save."""
    created_at: Time = msgspec.field(default_factory=now)
    """The time at which the session was created."""
    updated_at: Time = msgspec.field(default_factory=now)
    """The time at which this version was made."""
    parent_id: SessionId | None = None
    """The session that it is a fork of, or whose run has spawned it."""
    spawn_ref: SpawnRef | None = None
    """The call that has spawned it, if it is a sub-agent's."""
    owner: str | None = None
    """The owner, or None."""
    tags: tuple[str, ...] = ()
    """The tags, in order."""
    name: str | None = None
    """The name for people, or None."""
    usage: Usage | None = None
    """The usage of all runs of the session so far. None if there were none, or if an older release did not count it."""
    indexed: Mapping[str, str | int | bool] = EMPTY
    """The metadata that lists can be narrowed by: what was declared for it when this version was saved."""
    first_version: int = 1
    """The oldest version that is kept: those before it were forgotten."""
    keep: Retention | None = None
    """The session's own rule for how long it is kept, if it has one."""

    def __post_init__(self) -> None:
        if type(self.id) is not SessionId:
            force_setattr(self, "id", SessionId(self.id))
        if self.parent_id is not None:
            force_setattr(self, "parent_id", SessionId(self.parent_id))
        if self.owner is not None:
            force_setattr(self, "owner", plain_text(expect(self.owner, str, "$.owner")))
        if self.name is not None:
            force_setattr(self, "name", plain_text(expect(self.name, str, "$.name")))
        if self.indexed is not EMPTY:
            freeze(self, "indexed")
        if self.tags:
            for place, tag in enumerate(self.tags):
                expect(tag, str, f"$.tags[{place}]")


class ListedSession(AgentSessionInfo, frozen=True):
    """A session in a list: its header, and a few words of what is said in it.

    A field that the store does not tell, or that is damaged, is None. So is the `usage` of a session that has run under
    a release that did not count it. A session that has never run has used nothing.
    """

    title: str | None = None
    """The session's name, or else the first words of the first text that a user has said in it."""
    last_words: str | None = None
    """The beginning of the last text of a user or the assistant that the session shows."""
    message_count: int | None = None
    """The number of messages that the session shows."""


class AgentSession(Value, frozen=True):
    """A session as of one version. Every change makes a new value; a store makes it the next version."""

    info: AgentSessionInfo
    """The header."""
    definition: AgentDefinition
    """The definition of the agent."""
    state: AgentState
    """The state of the agent: what was said and done."""

    @classmethod
    def reconstitute(cls, session: AgentSession, *, version: int, updated_at: datetime) -> AgentSession:
        """Return the session as a store hands it back: the same, at the version and time at which it was saved.

        A new view is shown since this version: see `AgentState.shown_since`.
        """
        state = session.state
        usage = None if state.spent is None else state.total_usage
        info = msgspec.structs.replace(session.info, version=version, updated_at=updated_at, usage=usage)
        if info.indexed:  # from the metadata as it is now, whichever code has changed that
            info = msgspec.structs.replace(info, indexed=indexed_in(state.metadata, info.indexed))
        return msgspec.structs.replace(session, info=info, state=state.kept_as(version))

    @property
    def id(self) -> SessionId:
        return self.info.id

    @property
    def version(self) -> int:
        return self.info.version

    @property
    def status(self) -> SessionStatus:
        return self.info.status

    def _with_info(self, **changes: Any) -> AgentSession:
        return msgspec.structs.replace(self, info=msgspec.structs.replace(self.info, **changes))

    def with_state(self, state: AgentState) -> AgentSession:
        """Return the session with another state. Its status is left alone."""
        info = msgspec.structs.replace(self.info, updated_at=now())
        return msgspec.structs.replace(self, state=state, info=info)

    def forked(self, session_id: SessionId, state: AgentState) -> AgentSession:
        """Return a new session, of version 0 and active, with this one as its parent."""
        at = now()
        info = AgentSessionInfo(
            id=session_id,
            agent_name=self.info.agent_name,
            created_at=at,
            updated_at=at,
            parent_id=self.id,
            owner=self.info.owner,
            tags=self.info.tags,
            indexed=self.info.indexed,
            keep=self.info.keep,
        )
        return msgspec.structs.replace(self, info=info, state=state.for_another_session())

    def with_definition(self, definition: AgentDefinition) -> AgentSession:
        info = msgspec.structs.replace(self.info, agent_name=definition.name, updated_at=now())
        return msgspec.structs.replace(self, definition=definition, info=info)

    def with_tags(self, tags: Iterable[str]) -> AgentSession:
        return self._with_info(tags=check_tags(tags), updated_at=now())

    def with_indexed(self, keys: Iterable[str]) -> AgentSession:
        """Return the session with metadata indexed for lists: under these keys, and under those indexed before."""
        found = indexed_in(self.state.metadata, dict.fromkeys((*self.info.indexed, *keys)))
        if marks_of(found) == marks_of(self.info.indexed):
            return self
        return msgspec.structs.replace(self, info=msgspec.structs.replace(self.info, indexed=found))

    def with_name(self, name: str | None) -> AgentSession:
        return self._with_info(name=name, updated_at=now())

    def with_keep(self, rule: Retention | None) -> AgentSession:
        """Return the session with a rule of its own for how long it is kept, or without one."""
        return self._with_info(keep=rule, updated_at=now())

    def with_status(self, status: SessionStatus) -> AgentSession:
        """Return the session with a new status, if the table of moves allows it. The same status changes nothing."""
        try:
            status = SessionStatus(status)
        except ValueError:
            raise InvalidData("$.status", f"{brief(status)} is not a status; use one of {', '.join(_S)}") from None
        if status is self.status:
            return self
        allowed = STATUS_MOVES[self.status]
        if status not in allowed:
            raise IllegalStatusChange(self.id, self.status.value, status.value, (s.value for s in allowed))
        return self._with_info(status=status, updated_at=now())

    def activated(self) -> AgentSession:
        return self.with_status(SessionStatus.ACTIVE)

    def suspended(self) -> AgentSession:
        return self.with_status(SessionStatus.SUSPENDED)

    def completed(self) -> AgentSession:
        return self.with_status(SessionStatus.COMPLETED)

    def failed(self) -> AgentSession:
        return self.with_status(SessionStatus.FAILED)

    def deleted(self) -> AgentSession:
        return self.with_status(SessionStatus.DELETED)

    def restored(self, status: SessionStatus) -> AgentSession:
        """Return the session as it was before it was deleted: no other move leads out of that status."""
        if self.status is not SessionStatus.DELETED:
            raise IllegalStatusChange(
                self.id, self.status.value, status.value, (s.value for s in STATUS_MOVES[self.status])
            )
        return self._with_info(status=SessionStatus(status), updated_at=now())


def forked_from(info: AgentSessionInfo) -> SessionId | None:
    """Return the session that this one is a fork of. A sub-agent's session has a parent too, but is not its fork."""
    return info.parent_id if info.spawn_ref is None else None


def check_owner(owner: object) -> None:
    """Raise InvalidData unless an owner is a text, or None."""
    if owner is not None and not expect_text(owner, "$.owner"):
        raise InvalidData("$.owner", "an owner is a text that is not empty, or None")


def check_name(name: object) -> None:
    """Raise InvalidData unless a name for people is a text of some length, or None."""
    if name is not None and (not isinstance(name, str) or not name.strip() or len(name) > 500):
        raise InvalidData("$.name", "a name is a text of 1 to 500 characters, or None")


def check_spawn(spawn: SpawnRef | None, parent_id: SessionId | None) -> None:
    """Raise InvalidData unless what spawned a session is a call of the session's parent, or None."""
    if spawn is None:
        return
    expect(spawn, SpawnRef, "$.spawn")
    for field in ("parent_session_id", "parent_loop_id", "tool_call_id", "tool_name"):
        expect_text(getattr(spawn, field), f"$.spawn.{field}")
    if parent_id is None:
        raise InvalidData("$.spawn", "a session that was spawned has a parent; give parent= too")
    if spawn.parent_session_id != parent_id:
        raise InvalidData("$.spawn.parent_session_id", f"it is not the parent, {parent_id!r}")


def check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return tags in order and without repeats. Raise InvalidData if one is not a tag."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise InvalidData("$.tags", f"expected several tags, got one {type(tags).__name__}; write ('vip',)")
    kept: dict[str, None] = {}
    for place, tag in enumerate(tags):
        if not isinstance(tag, str) or not tag or len(tag) > 200 or tag.startswith(MARK):
            raise InvalidData(f"$.tags[{place}]", "a tag is a text of 1 to 200 characters that begins with no U+001F")
        kept[plain_text(tag)] = None
    return tuple(kept)


if TYPE_CHECKING:
    # With a default, a plain `SessionInfoList` is complete for type checkers. Python has them from 3.13 on.
    from typing_extensions import TypeVar as TypeVarWithDefault

    I_co = TypeVarWithDefault("I_co", bound=AgentSessionInfo, default=AgentSessionInfo, covariant=True)
else:
    I_co = TypeVar("I_co", covariant=True)


def tag_rows(info: AgentSessionInfo) -> tuple[str, ...]:
    """Return what lists find a session by: its tags, and marks for its indexed metadata and its own rule."""
    if not info.indexed and info.keep is None:
        return tuple(info.tags)
    own = () if info.keep is None else (keep_mark(info.keep),)
    # A tag that looks like a mark is left out: it must not be found as one.
    return (*(tag for tag in info.tags if not tag.startswith(MARK)), *marks_of(info.indexed), *own)


class SessionInfoList(Sequence[I_co]):
    """One page of headers, newest first. `next` goes into `after=` for the next page; None at the end.

    `infos` are the headers. `damaged` names the sessions of this page with an unreadable header. They do not stop the
    list of the others.
    """

    def __init__(
        self,
        infos: Iterable[I_co] = (),
        *,
        next: str | None = None,
        damaged: Iterable[CorruptRecord | InvalidSessionFile | UnreadableFile | KeyUnavailable] = (),
    ) -> None:
        self._infos = tuple(infos)
        self.next = next
        self.damaged = tuple(damaged)

    def all(self) -> tuple[I_co, ...]:
        """Return the headers of the page as a tuple."""
        return self._infos

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[I_co]:
        return iter(self._infos)

    def __getitem__(self, index: Any) -> Any:
        return self._infos[index]

    def __repr__(self) -> str:
        return f"<SessionInfoList of {len(self)}{', more follow' if self.next else ''}>"
