"""All that a user may implement, on one page, and the values that pass through it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    TypeGuard,
    TypeVar,
    Unpack,
    runtime_checkable,
)

import msgspec

from perdure.errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidData,
    InvalidSessionFile,
    KeyUnavailable,
    UnreadableFile,
)
from perdure.model.checks import expect, expect_count, expect_number, expect_text
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.ids import SessionId, key_of_call
from perdure.model.indexed import check_asked, marks_of
from perdure.model.message import Message
from perdure.model.retention import Retention
from perdure.model.session import (
    AgentSession,
    AgentSessionInfo,
    SessionInfoList,
    SessionStatus,
    check_name,
    check_owner,
)
from perdure.model.state import AgentState
from perdure.model.step import InferenceResponse
from perdure.model.transcript import LogRef
from perdure.model.usage import Usage
from perdure.model.value import EMPTY, JSON, Value, brief, freeze

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# Seconds, about 32 years: the end of a lease stays a time that can be computed.
_LONGEST_LEASE = 10**9
_SHORTEST_LEASE = 1


class SessionStage(StrEnum):
    """The points of the runtime's pipelines at which a controller is called."""

    BEFORE_CREATE = "before_create"
    AFTER_CREATE = "after_create"
    AFTER_LOAD = "after_load"
    AFTER_ACTION = "after_action"
    BEFORE_SAVE = "before_save"
    AFTER_SAVE = "after_save"


class SessionController(Protocol):
    """A hook that is called at each stage. The pipeline continues with the session it returns.

    A plain function works too.
    """

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession | Awaitable[AgentSession]: ...


class ClaimingRecord(Protocol):
    """A record whose first write claims a session."""

    @property
    def was_claimed(self) -> bool: ...

    async def leave(self) -> None:
        """Give the claim back without a save. A run that has no end on record is left for recovery."""
        ...


class Sequel(Protocol):
    """Work that follows an action once its session is free. No caller waits for it."""

    async def is_needed(self) -> bool: ...

    async def carry_out(self) -> None: ...


class UnderWay(Protocol):
    """The work that a runtime has begun and not ended."""

    @property
    def is_closing(self) -> bool:
        """Return True while the runtime is being closed: runs must be left for recovery."""
        ...

    def cancellable(self, work: asyncio.Future[Any]) -> AbstractContextManager[None]:
        """Cancel `work` if the runtime is closed while the block lasts."""
        ...


def check_lease(lease: object) -> None:
    """Raise InvalidData unless a lease is a number of seconds that can be added to the time."""
    if expect_number(lease, "$.lease") > _LONGEST_LEASE:
        raise InvalidData("$.lease", f"a lease lasts at most {_LONGEST_LEASE} seconds, not {brief(lease)}")


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms on which a runtime claims sessions."""

    lease: float = 30.0
    """Seconds that a claim is valid without a heartbeat. A killed run can be taken over after that time."""
    per_owner: int | None = None
    """The most sessions of one owner that may run at once."""

    def __post_init__(self) -> None:
        check_lease(self.lease)
        if self.per_owner is not None:
            expect_count(self.per_owner, "$.per_owner", least=1)


DEFAULT_TERMS = Terms()


class Kept(Protocol):
    """The place where sessions and their record can be read. An action's context has it, and so has `Sessions`."""

    @property
    def store(self) -> SessionStore: ...

    @property
    def journal(self) -> Journal | None: ...


@dataclass(frozen=True, slots=True)
class ActionContext:
    """The context that the runtime gives an action. Most actions ignore it, and none can change it."""

    store: SessionStore
    """The store of the session."""
    emit: Callable[[object], Awaitable[None]]
    """The function that tells subscribers of an event."""
    execute: Callable[[str, Action], Awaitable[AgentSession]]
    """The function that executes an action on another session, by its id."""
    create: Callable[[AgentSession], Awaitable[AgentSession]]
    """Keeps a new session. It goes through the same stages as every other."""
    journal: Journal | None
    """The store's journal, which is the store itself. None if the store has no journal and records no runs."""
    under_way: UnderWay
    """The work that is under way in this process."""
    hold: Callable[[ClaimingRecord, Sequel | None], None]
    """Hands a claim to the runtime, which gives it back unless the action's result is saved with it.

    The sequel is carried out once the claim is given back, in either case."""
    terms: Terms = DEFAULT_TERMS
    """The lease of claims, and the limit for each owner."""

    @property
    def is_closing(self) -> bool:
        """Return True if a cancelled run must be left for recovery instead of ended."""
        return self.under_way.is_closing


class Next(msgspec.Struct, frozen=True):
    """The result of an action: the next version of the session, and what is saved with it.

    An action that has nothing to add returns the session alone.
    """

    session: AgentSession
    """The next version."""
    saving: Saving | None = None
    """The claim of a run, and the part of it that is on record already."""
    tells: Sequence[object] = ()
    """Events that are emitted once the session is saved."""


class Answer(msgspec.Struct, frozen=True):
    """The result of an action that makes no new version. Nothing is saved, and the caller gets this session."""

    session: AgentSession
    """The session that the caller gets."""
    sequel: Sequel | None = None
    """Work that follows, in a task of the runtime's own."""


ActionResult = AgentSession | Next | Answer
"""The values that an action may return. Without a context it always returns a session."""


class Interrupted(asyncio.CancelledError):
    """The cancellation of an action that has something to save first. The runtime saves it, then cancels."""

    def __init__(self, made: Next) -> None:
        self.made = made
        super().__init__()


@runtime_checkable
class Action(Protocol):
    """A change that turns a session into the next one. Anything with this method is an action.

    It returns the next session, a `Next` if the save has to carry more, or an `Answer` if there is nothing to save.
    It is executed once. Only a `Repeatable` action is applied again after a conflict with another save.
    """

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult: ...


@runtime_checkable
class Repeatable(Protocol):
    """An action that says whether `on_conflict="retry"` may apply it again, as `may_be_repeated = True` on its class.

    An action that does nothing except make the next session may. One that asks a model, or writes elsewhere, may not.
    """

    @property
    def may_be_repeated(self) -> bool: ...


@runtime_checkable
class EndsInterruption(Protocol):
    """An action that deals with a run that was killed. If the action fails, the error is its own, not the run's."""

    @property
    def ends_interruption(self) -> bool: ...


class SessionManager(Protocol):
    """The part of a runtime that `recover` needs: it creates, reads and changes sessions. `SessionRuntime` is one."""

    @property
    def journal(self) -> Journal | None:
        """The store's journal; None if its runs are unrecorded."""
        ...

    async def create(
        self,
        definition: AgentDefinition,
        *,
        seed: AgentState | None = None,
        session_id: str | None = None,
        owner: str | None = None,
        tags: Iterable[str] = (),
    ) -> AgentSession: ...

    async def execute(
        self, session_id: str, action: Action, *, on_conflict: Literal["raise", "retry", "fork"] = "raise"
    ) -> AgentSession: ...

    async def get_session(self, session_id: str, *, version: int | None = None) -> AgentSession: ...

    async def get_session_info(self, session_id: str) -> AgentSessionInfo: ...

    async def list_sessions(self, **filters: Unpack[Filters]) -> SessionInfoList: ...


class Loop(Protocol):
    """A loop that runs an agent's state to the end of an execution."""

    async def run(self, state: AgentState) -> AgentState: ...


class LoopBuilder(Protocol):
    """A builder of the loops that agents run in. `LoopFactory` is one."""

    def build(self, definition: AgentDefinition, state: AgentState | None = None, *, depth: int = 0) -> Loop:
        """Return the loop for an agent. `depth` counts the agents that have called each other so far."""
        ...


class EventHandler(Protocol):
    """A receiver that takes events and passes them on. `EventBus` is one."""

    async def emit(self, event: object) -> None: ...


class ToolSpec(msgspec.Struct, frozen=True):
    """The description of a tool that a model is given."""

    name: str
    """The name of the tool."""
    description: str
    """A text for the model about when to call it."""
    parameters: Mapping[str, Any]
    """The JSON schema of the arguments."""


ReadFiles = Callable[[Collection[str]], Awaitable[Mapping[str, bytes]]]
"""A function that reads images and files by their hashes, as `Attachments` does for one session."""


class ModelRequest(msgspec.Struct, frozen=True):
    """One model call: a valid list of messages, in which every tool call has exactly one result.

    The bytes of images and files may be in a store, apart from the messages. A driver that sends them has to await
    `messages_with_files()` instead of reading `messages`.
    """

    model: ModelConfig
    """The model that is asked."""
    messages: Sequence[Message]
    system_prompt: str = ""
    """The instructions that it is told first."""
    tools: tuple[ToolSpec, ...] = ()
    """The tools that it may call."""
    response_format: Mapping[str, Any] | None = None
    """The JSON schema of the answer, if one is wanted."""
    step: int = 0
    """The index of the step within its run. A recovered run continues to count where it stopped."""
    read_files: ReadFiles | None = None
    """The function that reads the bytes of images and files that the messages name by hash."""
    deadline: datetime | None = None
    """The time at which the run's time is up. A driver need not wait for an answer that comes later."""

    async def messages_with_files(self) -> Sequence[Message]:
        """Return the messages with the bytes of all images and files that they show."""
        wanted = {key for message in self.messages for key in message.file_hashes}
        if not wanted:
            return self.messages
        if self.read_files is None:
            raise ConfigurationError(
                "A message names a file by its hash, with no store to read it from. Run it in a session."
            )
        bodies = await self.read_files(sorted(wanted))
        return tuple(message.with_files(bodies) if message.file_hashes else message for message in self.messages)


class Delta(Value, frozen=True):
    """A streamed piece of an answer: of its text, its thinking, or a tool call's arguments."""

    kind: Literal["text", "thinking", "tool_call", "restart"]
    """`restart` means that all earlier pieces are void: the answer begins again."""
    text: str
    """The piece."""
    call_id: str | None = None
    """The tool call that the piece belongs to."""
    name: str | None = None
    """The name of the tool, if the piece belongs to a call."""


class ModelReply(msgspec.Struct, frozen=True):
    """A whole answer: the assistant's message, and what the provider told about it."""

    message: Message
    """The message."""
    response: InferenceResponse = InferenceResponse()
    """The facts about the answer."""


OnDelta = Callable[[Delta], Awaitable[None]]


class Driver(Protocol):
    """A way to ask a model. One call asks once: the caller makes the retries.

    It raises DriverError if the call fails for good.
    """

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply: ...


async def _unheard(progress: JSON) -> None:
    """Drop the progress of a tool that is called outside a run: nobody follows it."""


if TYPE_CHECKING:
    # With a default, a plain `ToolContext` is complete for type checkers. Python has them from 3.13 on.
    from typing_extensions import TypeVar as TypeVarWithDefault

    C = TypeVarWithDefault("C", default=Any)
else:
    C = TypeVar("C")


class ToolContext(msgspec.Struct, Generic[C], frozen=True):
    """The facts about a call that its tool may know. A parameter of this type is filled in, and hidden from the model.

    A parameter of the type `ToolContext[Request]` says that the tool needs a context, and that it is a `Request`.
    """

    call_id: str
    """The id of the call. It is unique within the run only: models of other sessions give the same ids."""
    execution_id: str
    """The id of the run that makes the call. A run that is recovered keeps it. All calls of the run share it."""
    agent_id: str
    """The agent that makes it."""
    session_id: str | None = None
    """The session of the run."""
    progress: Callable[[JSON], Awaitable[None]] = _unheard
    """Tells the followers of the run how far the call has come."""
    spawn: Callable[..., Awaitable[Any]] | None = None
    """Runs a sub-agent in a session of its own. None if the run belongs to no session."""
    owner: str | None = None
    """The owner of the session."""
    metadata: Mapping[str, Any] = EMPTY
    """The session's metadata, as `WriteMetadata` wrote it."""
    context: C = None  # type: ignore[assignment]  # a tool that says what it needs is not called without it
    """The object given to `send(…, context=…)`, or the one that `connect(context=…)` made. It is never stored."""
    context_data: Mapping[str, Any] | None = None
    """The JSON given to `send(…, context_data=…)`. It is stored with the run."""
    messages: Sequence[Message] = ()
    """The messages that the model was shown when it made the call, and those that came since."""
    store: SessionStore | None = None
    """The store that the session is in, with the sessions of all owners. None if the run belongs to no session."""

    @property
    def idempotency_key(self) -> str:
        """The key of this call for a service that makes each request once: 32 hexadecimal digits.

        It is the same at every attempt of the call, after a crash and in another process too. No other call has it,
        in any session, fork or run.
        """
        return key_of_call(self.session_id, self.execution_id, self.call_id)


@runtime_checkable
class Tool(Protocol):
    """Something that a model may call. `perdure.tool` makes a tool from a function."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments."""
        ...

    @property
    def timeout(self) -> float | None: ...
    @property
    def idempotent(self) -> bool: ...
    @property
    def on_unknown(self) -> Literal["error", "rerun", "ask"]:
        """The policy for a call whose outcome is unknown after a crash."""
        ...

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool: ...

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments, converted to the types that the tool takes. Raise ToolError if they do not fit."""
        ...

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> JSON: ...


@runtime_checkable
class NeedsContext(Protocol):
    """A tool that says whether it can be called without a context."""

    @property
    def needs_context(self) -> bool: ...


@runtime_checkable
class Toolset(Protocol):
    """Tools that are known only after a connection is made. `perdure.mcp` makes a toolset from an MCP server.

    A toolset may be given to several connections and factories. Each opens it for itself.
    """

    def open_tools(self) -> OpenToolset:
        """Return the toolset as one connection uses it. Nothing is started yet."""
        ...


def is_toolset(given: object) -> TypeIs[Toolset]:
    """Tell whether something is a toolset. A class is not, even if its objects are."""
    return isinstance(given, Toolset) and not isinstance(given, type)


class OpenToolset(Protocol):
    """A toolset as the runs of one connection use it."""

    async def tools(self) -> Sequence[Tool]:
        """Return the tools there are now. It is called before every run, and connects if needed.

        Raise ConfigurationError if they cannot be reached. Then no run begins.
        """
        ...

    async def close(self) -> None:
        """Disconnect. It is called once the runs have ended. A later call of `tools` connects again."""
        ...


class Filters(TypedDict, total=False):
    """The filters of a list of sessions. Deleted sessions are listed only if you ask for them.

    `owner=None` asks for sessions without an owner. The keys of `metadata` must have been declared when the sessions
    were saved. `top_level` leaves out the sessions of sub-agents. `order` is "created" by default. A page's `next`
    belongs to the order of its list.
    """

    id: str
    """Only the session with this id."""
    agent: str
    """Only sessions of the agent with this name."""
    status: SessionStatus | str
    """Only sessions with this status."""
    owner: str | None
    """Only sessions of this owner."""
    tag: str
    """Only sessions with this tag."""
    metadata: Mapping[str, str | int | bool]
    """Only sessions with these values in their metadata."""
    parent: str
    """Only forks of this session, and sessions that its runs have spawned."""
    top_level: bool
    """True to leave out the sessions of sub-agents."""
    created_after: datetime
    """Only sessions that were created later."""
    created_before: datetime
    """Only sessions that were created earlier."""
    updated_after: datetime
    """Only sessions that were updated later."""
    updated_before: datetime
    """Only sessions that were updated earlier."""
    order: Literal["created", "updated"]
    """"created" or "updated". The newest come first."""
    limit: int
    """The number of sessions on a page at most."""
    after: str | None
    """The `next` of the page before."""


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filters of a list, after they were checked."""

    id: str | None = None
    agent: str | None = None
    status: SessionStatus | None = None
    owner: str | msgspec.UnsetType | None = msgspec.UNSET
    """None asks for sessions without an owner, UNSET for those of everybody."""
    tag: str | None = None
    metadata: Mapping[str, str | int | bool] = EMPTY
    parent: str | None = None
    top_level: bool = False
    created_after: datetime | None = None
    created_before: datetime | None = None
    updated_after: datetime | None = None
    updated_before: datetime | None = None
    order: Literal["created", "updated"] = "created"
    limit: int = 50
    after: str | None = None

    @classmethod
    def of(cls, filters: Mapping[str, Any]) -> SessionQuery:
        for name in filters:
            if name not in cls.__struct_fields__:
                raise InvalidData(f"$.{name}", f"no such filter; there are {', '.join(cls.__struct_fields__)}")
        try:
            # None means that a filter was not given, except for the owner, where it asks for sessions without one.
            given = {name: value for name, value in filters.items() if value is not None or name == "owner"}
            query = msgspec.convert(given, cls, dec_hook=_as_text)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise _wrong_filter(given, error) from None
        check_asked(query.metadata)
        if not 1 <= query.limit <= 1000:
            raise InvalidData("$.limit", f"a page holds 1 to 1000 sessions, not {query.limit}")
        for name in ("created_after", "created_before", "updated_after", "updated_before"):
            time = getattr(query, name)
            if time is not None and time.tzinfo is None:
                raise InvalidData(f"$.{name}", "a time needs a time zone")
        return query

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what the tags of a session have to contain: the tag, and marks for its metadata."""
        return (*(() if self.tag is None else (self.tag,)), *marks_of(self.metadata))

    @property
    def shows_deleted(self) -> bool:
        return self.status is not None or self.id is not None


def _wrong_filter(given: Mapping[str, Any], error: Exception) -> InvalidData:
    """Return an error that names the filter, and its values if they are few."""
    # msgspec names the field only in the text of its message, as in "… - at `$.status`".
    what, _, where = str(error).partition(" - at `$.")
    name = where.rstrip("`").partition(".")[0].partition("[")[0]
    if name in _CHOICES and isinstance(given.get(name), str):
        return InvalidData(f"$.{name}", f"unknown {name} {brief(given[name])}; use one of {_CHOICES[name]}")
    return InvalidData(f"$.{name}" if name in given else "$", f"a filter has the wrong type or value: {what}")


_CHOICES = {"status": ", ".join(SessionStatus), "order": "created, updated"}


def _as_text(kind: type, value: Any) -> Any:
    return str(value)


@runtime_checkable
class SessionStore(Protocol):
    """A store that keeps sessions. It compares versions inside the commit: see `perdure.testing.StoreContract`."""

    async def create(self, session: AgentSession) -> AgentSession:
        """Store a session of version 0 as version 1. Raise SessionConflict if the id is taken."""
        ...

    async def save(self, session: AgentSession) -> AgentSession:
        """Store the next version. Raise SessionConflict unless the session's version is the stored one."""
        ...

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        """Return the session as of a version, by default the newest. Return None if it is not there."""
        ...

    async def exists(self, session_id: str) -> bool:
        """Return whether there is a session with a `session_id`, hidden ones included."""
        ...

    async def delete(self, session_id: str) -> None:
        """Erase this one session. Nothing of it is left, except what versions of other sessions show.

        The sessions of its sub-agents stay: `Sessions.erase` erases them too. Raise SessionNotFound if the session
        does not exist, SessionBusy while it is being run.
        """
        ...

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        """Return a page of headers, newest first. No transcript is read."""
        ...


class Preview(msgspec.Struct, frozen=True):
    """The few words that a list shows of a session. A part that could not be read is None."""

    title: str | None = None
    """The session's name, or else the first words of the first text of a user."""
    last_words: str | None = None
    """The beginning of the last text of a user or the assistant that the session shows."""
    message_count: int | None = None
    """The number of messages that the session shows."""
    usage: Usage | None = None
    """The usage of all runs of the session so far. It is zero if the session has never run."""
    damage: CorruptRecord | KeyUnavailable | None = None
    """The reason why a part could not be read."""


@runtime_checkable
class Previews(Protocol):
    """A store that reads a few words of each of many sessions, without loading any of them."""

    async def previews(self, session_ids: Iterable[str]) -> Mapping[str, Preview]:
        """Return a preview of each session. A missing one is left out. A damaged one does not stop the others."""
        ...


Damage = CorruptRecord | InvalidSessionFile | UnreadableFile | KeyUnavailable
"""The reasons why a session that exists could not be read."""


class SessionHead(msgspec.Struct, frozen=True):
    """A session without its messages: its header, its definition and its metadata."""

    info: AgentSessionInfo
    """The header."""
    definition: AgentDefinition
    """The definition of the agent."""
    metadata: Mapping[str, Any] = EMPTY
    """The session's metadata."""

    def __post_init__(self) -> None:
        freeze(self, "metadata")


class SessionHeads(dict[str, SessionHead]):
    """The heads of sessions by their ids, and the errors of those that could not be read."""

    def __init__(self, heads: Mapping[str, SessionHead] = EMPTY, damaged: Mapping[str, Damage] = EMPTY) -> None:
        super().__init__(heads)
        self.damaged = damaged
        """The errors of the sessions that could not be read, by their ids."""


@runtime_checkable
class Heads(Protocol):
    """A store that reads sessions without their messages. The cost does not grow with the length of the sessions."""

    async def heads(self, session_ids: Iterable[str]) -> SessionHeads:
        """Return the newest head of each session, in the order of the ids.

        A missing session is left out. A damaged one is in `damaged` instead, and does not stop the others.
        """
        ...


@runtime_checkable
class CountsErasures(Protocol):
    """A store that counts erasures and redactions. A fork that read a session before one of them is refused."""

    async def erasures(self) -> int:
        """Return the number of erasures and redactions so far."""
        ...

    async def create(self, session: AgentSession, *, erasures: int | None = None) -> AgentSession:
        """Store a session of version 0 as version 1. Raise ErasedMeanwhile if the count has changed."""
        ...


@runtime_checkable
class Opened(Protocol):
    """A store that can be opened once for several users. The one that opened it closes it."""

    @property
    def is_open(self) -> bool: ...


@runtime_checkable
class Cache(Protocol):
    """A store that keeps sessions in memory, and can be told which."""

    def pin(self, session_id: str) -> None:
        """Keep a session in memory until `unpin`, even if nobody asks for it."""
        ...

    def unpin(self, session_id: str) -> None: ...

    def evict(self, session_id: str) -> None:
        """Drop a session from memory, unless it is pinned."""
        ...


@runtime_checkable
class KnowsWaiting(Protocol):
    """A store that sees during a save whether something waits in the session's inbox."""

    def is_waited_for(self, session_id: str) -> bool | None:
        """Tell whether the last save of this process left items in the inbox. Return None if that is not known."""
        ...


def knows_waiting(store: object) -> TypeGuard[KnowsWaiting]:
    """Tell whether a store is a KnowsWaiting. `isinstance` would walk the protocol's members at every claim."""
    return callable(getattr(store, "is_waited_for", None))


@runtime_checkable
class Lineage(Protocol):
    """A store that reads a line of forks in one query, however long it is."""

    async def line_of(self, session_id: str) -> Sequence[SessionId]:
        """Return the sessions that a session was forked from, the oldest first and its parent last.

        If the beginning of the line was erased, it begins with the oldest session whose id is known.
        """
        ...


@runtime_checkable
class Immediate(Protocol):
    """A store whose verbs never wait. No other task can run between their beginning and their end."""

    @property
    def never_waits(self) -> bool: ...


def is_immediate(store: object) -> bool:
    """Tell whether a store is an Immediate whose `never_waits` is true."""
    return bool(getattr(store, "never_waits", False))


SHORTEST_SUFFIX = 4
"""The fewest characters of the end of an id that sessions can be found by. Indexes have that many characters."""


@runtime_checkable
class Names(Protocol):
    """A store that finds sessions by the beginning or the end of their id. The cost follows what is found."""

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        """Return the ids that begin with a text, in the order of text. With `owner`, only ids of that owner's sessions.

        `deleted` asks for the ids of deleted sessions instead of all others. Damaged sessions are found too.
        """
        ...

    async def ids_with_suffix(
        self, suffix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        """Return the ids that end with a text. The arguments are those of `ids_with_prefix`.

        Raise InvalidData if the text has fewer than four characters.
        """
        ...


class StoredAt(msgspec.Struct, frozen=True):
    """The place of a message that is in a log of the store already."""

    log: LogRef
    position: int


class Claim(msgspec.Struct, frozen=True):
    """The right to run one session. The store compares `epoch` on every write made under it."""

    session_id: SessionId
    """The session."""
    epoch: int
    version: int
    """The version that was claimed."""
    owner: str
    """The name of the process that holds the claim."""
    lease: float
    """Seconds without a sign of life after which the claim lapses."""

    def __post_init__(self) -> None:
        expect(self.session_id, str, "$.session_id")
        expect_count(self.epoch, "$.epoch")
        expect_count(self.version, "$.version")
        expect(self.owner, str, "$.owner")
        check_lease(self.lease)


class Entry(Value, frozen=True):
    """Something to put on record: an event of a run, or an item for an inbox."""

    kind: str
    """The kind, such as the tag of an event."""
    body: JSON = None
    """The rest, as plain data."""
    run: str | None = None
    """The run that it belongs to, or None."""

    def __post_init__(self) -> None:
        # The types are tested here first: each event of a run makes an entry, and this saves two calls for each.
        if not isinstance(self.kind, str):
            expect(self.kind, str, "$.kind")
        if self.run is not None and not isinstance(self.run, str):
            expect(self.run, str, "$.run")


class JournalEntry(msgspec.Struct, frozen=True):
    """An entry that is on record, with its place in the session's sequence."""

    seq: int
    """The place in the session's sequence."""
    kind: str
    """The kind, such as the tag of an event."""
    body: JSON
    """The rest, as plain data."""
    run: str | None = None
    """The run that it belongs to, or None."""


def check_page(limit: object, before: object) -> None:
    """Raise InvalidData unless a page of runs is asked for by whole numbers. Every journal calls this first."""
    for name, number in (("limit", limit), ("before", before)):
        if number is not None:
            expect_count(number, f"$.{name}")


def checked_version(version: int | None) -> int | None:
    """Return the number of a version, which need not exist. Raise InvalidData if it is not a whole number."""
    if version is not None and type(version) is not int:  # not isinstance: True is an int too
        raise InvalidData("$.version", f"a version is a whole number, not {brief(version)}; the newest has none")
    return version


class RunOnRecord(msgspec.Struct, frozen=True):
    """A run as the journal has it: its first and last entry, and the stretch of log that holds its messages."""

    loop_id: str
    first: JournalEntry
    last: JournalEntry
    log: LogRef
    start: int
    stop: int


class Key(msgspec.Struct, frozen=True):
    """An idempotency key, and a digest of its request."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        expect_text(self.name, "$.key")
        expect_text(self.digest, "$.digest")


def check_key(key: object) -> None:
    """Raise InvalidData unless a value can be the key of a message."""
    if not 1 <= len(expect_text(key, "$.key")) <= _MOST_IN_KEY:
        raise InvalidData("$.key", f"a key is a text of 1 to {_MOST_IN_KEY} characters")


_MOST_IN_KEY = 500


class Saving(msgspec.Struct, frozen=True):
    """The data that a run's save carries: its claim, the messages already written, and the entries still to write."""

    claim: Claim
    written: Mapping[str, StoredAt] = EMPTY
    entries: Sequence[Entry] = ()
    taken: int = 0
    """The number of the last inbox item that the run has dealt with."""
    key: Key | None = None


NOTHING_WRITTEN: Mapping[str, StoredAt] = EMPTY


class Change(msgspec.Struct, frozen=True):
    """A session to save together with others, with its key and entries. A session of version 0 is created."""

    session: AgentSession
    """The session."""
    key: Key | None = None
    """The idempotency key that the change answers."""
    entries: Sequence[Entry] = ()
    """The entries that go on record with it."""


@runtime_checkable
class SavesTogether(Protocol):
    """A store that can save several sessions in one commit."""

    async def save_all(self, changes: Sequence[Change]) -> Sequence[AgentSession]:
        """Save the next version of each session, all or none. Return the sessions in the same order.

        A session of version 0 is created. The version of any other is compared with the stored one. If a session is
        refused, raise what `create` or `save` raises for the first of them, and save nothing. Raise InvalidData if one
        session is given twice.
        """
        ...


class Appended(msgspec.Struct, frozen=True):
    """The result of an append: the place of each message, and the last sequence number."""

    written: Mapping[str, StoredAt]
    seq: int
    posted: int | None = None
    """The number of the last item in the session's inbox at that moment. None if the store does not tell."""


@runtime_checkable
class Journal(Protocol):
    """The write-ahead log of runs. With a store that has one, another process can continue a killed run."""

    async def create(
        self, session: AgentSession, *, written: Mapping[str, StoredAt] = NOTHING_WRITTEN, key: Key | None = None
    ) -> AgentSession:
        """Store a session of version 0 as version 1, with references to the messages already written.

        An idempotency key is stored in the same commit. Raise SessionConflict if the id is taken.
        """
        ...

    async def save(
        self,
        session: AgentSession,
        *,
        claim: Claim | None = None,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
    ) -> AgentSession:
        """Store the next version. The arguments are the fields of `Saving`.

        The save is fenced by the claim, refers to the messages already written, appends the entries, and releases the
        claim, all in one commit. Without a claim, raise SessionBusy while the session has a valid claim, and
        RunInterrupted while it has a lapsed one.
        """
        ...

    async def claim(
        self,
        session_id: str,
        *,
        version: int,
        owner: str,
        lease: float = 30.0,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        take_over: bool = False,
        per_owner: int | None = None,
    ) -> tuple[Claim, Appended]:
        """Take the session at this version, with the run's first entries in the same commit.

        Raise SessionBusy if another claim on the session is valid, and SessionConflict if the version has moved. Raise
        RunInterrupted if a lapsed claim is on it, unless `take_over` is set.

        With `per_owner`, raise OwnerBusy if that many claims on other sessions of the same owner are valid. They are
        counted in the same commit. A session without an owner is not counted, and not limited.
        """
        ...

    async def heartbeat(self, claim: Claim) -> None:
        """Extend the claim by its lease. Raise ClaimLost if it was released or taken over."""
        ...

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        """Give the claim back without saving. Do nothing if it was lost.

        With `interrupted` the claim stays on the session and lapses at once: its run waits to be recovered.
        """
        ...

    async def append(
        self,
        claim: Claim,
        *,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        log: str = "",
        taken: int = 0,
    ) -> Appended:
        """Put messages and entries on record in one commit. Raise ClaimLost if the claim was lost.

        `log` names a branch's own log. The default is the session's log. `taken` is the number of the last inbox item
        that was dealt with. An append also extends the claim.
        """
        ...

    async def read(
        self,
        session_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        last: int | None = None,
        run: str | None = None,
        inbox: bool = False,
    ) -> Sequence[JournalEntry]:
        """Return the entries after a sequence number, in order.

        They are those of the record, or with `inbox` the items not taken yet. Return at most `limit` of them, only the
        last `last`, or only those of one `run`.
        """
        ...

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        """Return the newest runs on record, oldest first.

        With `before`, only those that began before a sequence number. With `run`, only the run of that id.
        """
        ...

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        """Return a session's log, or its branch log of that name, and the position after its last message."""
        ...

    async def lapsed(self) -> Sequence[SessionId]:
        """Return the sessions with a lapsed claim: their runs were killed, or could not be saved."""
        ...

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        """Return messages of a log, even if no version shows them. Raise SessionNotFound if they were erased."""
        ...

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        """Return the idempotency key of that name, and the version that its run has saved.

        Return None if the key or the session does not exist."""
        ...

    async def is_claimed(self, session_id: str) -> bool:
        """Tell whether the session has a valid claim."""
        ...

    async def is_interrupted(self, session_id: str) -> bool:
        """Tell whether the session has a lapsed claim: its run was killed, or could not be saved."""
        ...

    async def post(
        self,
        session_id: str,
        entry: Entry,
        *,
        priority: int = 0,
        most: int | None = None,
        most_of_owner: int | None = None,
    ) -> int:
        """Put an item into a session's inbox, whether or not the session is claimed. Return the item's number.

        A session that waits has the highest priority of the items posted to it since its inbox was last empty. Raise
        QueueFull, and write nothing, if `most` items wait in the session, or `most_of_owner` in all sessions of its
        owner. The items are counted in the same commit.
        """
        ...

    async def note(self, session_id: str, entries: Sequence[Entry]) -> int:
        """Put entries on a session's record without a claim, in one commit. Return the number of the last on record.

        It moves no version and looks at no claim: entries may come while the session is being run. `read(run=…)` reads
        them by their run. That should be a name of the caller's own: an entry voids the pieces of an answer that a
        Sketchbook keeps for the same run. Raise SessionNotFound if the session does not exist.
        """
        ...


class Sketch(msgspec.Struct, frozen=True):
    """A piece of the text of an answer that is not whole yet."""

    run: str
    """The run that writes the answer."""
    message_id: str
    """The message that the piece belongs to."""
    text: str
    """The piece."""
    start: int = 0
    """The number of characters of the answer that come before it."""
    attempt: int = 0
    """The number of times that the model had begun the answer again."""
    seq: int = 0
    """The end of the session's record when the answer was begun. The run's next entry on record voids the piece."""

    def __post_init__(self) -> None:
        for name in ("run", "message_id", "text"):
            expect_text(getattr(self, name), f"$.{name}")
        for name in ("start", "attempt", "seq"):
            expect_count(getattr(self, name), f"$.{name}")


def said_in(pieces: Sequence[Sketch]) -> str:
    """Return the text that pieces add up to, up to the first gap."""
    text = ""
    for piece in pieces:
        # Pieces of another message, or of an earlier attempt at this one, are void: they are of another text.
        same = (piece.message_id, piece.attempt) == (pieces[0].message_id, pieces[0].attempt)
        if not same or piece.start != len(text):
            break
        text += piece.text
    return text


class RunProgress(msgspec.Struct, frozen=True):
    """The state of a session between two messages: the end of its record, its claim, and the answer being written."""

    seq: int
    """The number of the last entry on record."""
    is_claimed: bool
    """True if a run is under way."""
    is_interrupted: bool
    """True if a run was killed, or waits to be continued."""
    sketches: Sequence[Sketch] = ()
    """The pieces of the answer that the record does not have yet, in order."""


@runtime_checkable
class Sketchbook(Protocol):
    """A journal that keeps the text of an answer while the model still writes it."""

    async def sketch(self, claim: Claim, piece: Sketch) -> bool:
        """Keep a piece until its answer is whole. Raise ClaimLost if the claim was lost.

        Return False, and keep nothing, if the record ends before the piece's `seq`, or has an entry of the same run
        after it. Entries of other runs, such as those of `note`, do not count.

        A piece that starts at 0 replaces all others of the session. The append of a message, a save, a release under
        the claim, a redaction and an erasure drop the pieces. An archive leaves them out.
        """
        ...

    async def progress(self, session_id: str, *, after: int = 0) -> RunProgress:
        """Return how far a session's run has come, with the first piece and those from a character on.

        A damaged piece is left out, with all that follow it.
        """
        ...


def is_sketchbook(journal: object) -> TypeGuard[Sketchbook]:
    """Tell whether a journal is a Sketchbook. `isinstance` would walk the protocol's members for every run."""
    return callable(getattr(journal, "sketch", None))


class Waiting(msgspec.Struct, frozen=True):
    """A session with items in its inbox that no run has taken."""

    session_id: SessionId
    owner: str | None
    priority: int
    since: float
    """The time at which the inbox stopped being empty, in seconds since 1970."""
    count: int


class Running(msgspec.Struct, frozen=True):
    """A claim on a session: its holder, and whether it has lapsed."""

    session_id: SessionId
    owner: str | None
    """The owner of the session."""
    holder: str
    since: float | None
    """The time at which it was taken, in seconds since 1970 by the holder's clock. None if an older release took it."""
    expires: float
    lapsed: bool
    """True if its lease has run out, or its holder was a process of this machine that has ended."""


PARKED = "parked"
"""The tag of parked sessions, and the kind of the entry on record that says why."""


class Parked(msgspec.Struct, frozen=True):
    """Why a session is parked, and since when."""

    reason: str
    tries: int
    at: str


SCHEDULE = "schedule:"
"""The beginning of the name of a timer that is a schedule, and of the key of each message that it sends."""


class Timer(msgspec.Struct, frozen=True):
    """An item that is put into a session's inbox at a time. One that repeats has a schedule."""

    session_id: SessionId
    """The session."""
    name: str
    """Its name. No other timer of the session has the same."""
    due: float
    """The time at which it has to ring, in seconds since 1970."""
    entry: Entry | None = None
    """The item. A timer without one puts nothing into the inbox."""
    priority: int = 0
    """The priority of the item. Higher ones are sent first."""
    cron: str | None = None
    """The times at which it rings again, such as `0 7 * * MON`."""
    timezone: str | None = None
    """The time zone that `cron` is in, such as `Europe/Oslo`."""
    id: int = 0
    """The number that the store gave it. A timer that is replaced gets another."""

    def __post_init__(self) -> None:
        expect_text(self.session_id, "$.session_id")
        expect_text(self.name, "$.name")
        check_time(self.due, "$.due")
        if self.entry is not None:
            expect(self.entry, Entry, "$.entry")
        check_priority(self.priority)
        for name in ("cron", "timezone"):
            if getattr(self, name) is not None:
                expect_text(getattr(self, name), f"$.{name}")
        expect_count(self.id, "$.id")


FARTHEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
"""The last time at which something can be due. A later one could not be shown in every time zone."""
# The largest `integer` of PostgreSQL. procrastinate keeps the priority of a job in a column of that type.
_MOST_PRIORITY = 2**31 - 1
RECOVERY = _MOST_PRIORITY
"""The priority of sessions with killed runs. They do not wait behind messages that have just arrived."""


def check_priority(priority: object) -> None:
    """Raise InvalidData unless a value is a whole number that every store can keep."""
    if type(priority) is not int or abs(priority) > _MOST_PRIORITY:
        problem = f"a priority is a whole number from {-_MOST_PRIORITY} to {_MOST_PRIORITY}, not {brief(priority)}"
        raise InvalidData("$.priority", problem)


def check_time(time: object, path: str) -> None:
    """Raise InvalidData unless a value is a time in seconds since 1970."""
    if expect_number(time, path) > FARTHEST:
        raise InvalidData(path, f"expected a time in seconds since 1970, got {brief(time)}")


@runtime_checkable
class Queue(Protocol):
    """A journal that lists what waits and what is run, rings timers, and shares rates between processes."""

    async def waiting(self, limit: int = 100, *, idle_only: bool = True) -> Sequence[Waiting]:
        """Return active sessions with items in their inboxes, the most urgent first, then the longest waiting.

        Sessions with a valid claim are left out, unless `idle_only` is False. Those with a lapsed claim are included.
        """
        ...

    async def held(self, limit: int = 100) -> Sequence[Waiting]:
        """Return suspended sessions with items in their inboxes: they wait for a person, or for a pause to end."""
        ...

    async def in_turn(
        self, limit: int = 100, *, after: str | None = None, skip: Collection[str] = (), not_of: Collection[str] = ()
    ) -> Sequence[Waiting]:
        """Return active sessions with items in their inboxes that nobody runs, the most urgent first.

        Of equal priority, the longest waiting session of each owner comes first, then the second of each. The first
        owner is the one whose name follows `after`. All sessions without an owner count as those of one owner.

        Sessions in `skip` and those of owners in `not_of` are left out. The cost follows what is returned, however
        many sessions wait.
        """
        ...

    async def has_waiting(self, session_id: str) -> bool:
        """Tell whether items wait in a session's inbox. Raise SessionNotFound if the session does not exist.

        It is looked up under the lock that a post takes. So a post that was under way has been committed by then.
        """
        ...

    async def running(self) -> Sequence[Running]:
        """Return all claims, valid or lapsed, the oldest session first."""
        ...

    async def set_timer(self, timer: Timer, *, replace: bool = False) -> Timer:
        """Store a timer. Return it with its number, or return the existing one that asks for the same.

        Raise InvalidData if a timer of that name asks for something else, unless `replace` is set. `due` alone makes no
        difference: a repeated request does not put a timer off. Raise SessionNotFound if the session does not exist.
        """
        ...

    async def timers(self, session_id: str | None = None, *, limit: int = 100, after: int = 0) -> Sequence[Timer]:
        """Return the timers of one session or of all, in the order of their numbers, from the one after `after`."""
        ...

    async def due(self, at: float, *, limit: int = 100) -> Sequence[Timer]:
        """Return the timers that are due at a time, the earliest first. A damaged one is left out."""
        ...

    async def ring(
        self,
        timer: Timer,
        *,
        again: float | None = None,
        entry: Entry | None = None,
        most: int | None = None,
        later: float | None = None,
    ) -> bool | None:
        """Put a timer's item into its session's inbox. Return False, and do nothing, if another process has rung it.

        The same commit removes the timer or, with `again`, sets it to ring at that time. `entry` replaces the timer's
        own item: one that repeats needs another key each time. If several processes ring a timer, only one succeeds,
        since its number and `due` are compared.

        If `most` items wait in the inbox already, put the timer off to `again`, or else to `later`, and return None.
        """
        ...

    async def drop_timer(self, session_id: str, name: str) -> bool:
        """Remove a timer. Return False if the timer or the session does not exist."""
        ...

    async def reserve(self, name: str, *, cost: float, burst: float, most: float | None = None) -> float:
        """Take the next place in a rate that all processes share. Return how many seconds to wait for it.

        If the wait is longer than `most` seconds, no place is taken. Each place costs `cost` seconds. After a silence,
        places for `burst` seconds may be taken at once. For 10 a second with at most 20 at once, use
        `cost=0.1, burst=2.0`.
        """
        ...


_DIGEST = re.compile("[0-9a-f]{64}")


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An access token without its secret: the sessions it gives access to, and the rights it gives.

    A stored token with a field that this release does not know is refused: the field may forbid something.
    """

    digest: str
    """The SHA-256 of the secret, in hexadecimal."""
    owner: str | None
    """The owner whose sessions it gives access to. None is an operator's token, for the sessions of all owners."""
    may_write: bool
    """True if sessions may be changed with it. Otherwise they may only be read."""
    created_at: datetime
    expires_at: datetime | None = None
    name: str | None = None
    """A note for people about what it is for."""

    def __post_init__(self) -> None:
        check_digest(self.digest)
        check_owner(self.owner)
        expect(self.may_write, bool, "$.may_write")
        check_moment(self.created_at, "$.created_at")
        if self.expires_at is not None:
            check_moment(self.expires_at, "$.expires_at")
            if self.is_expired(self.created_at):
                raise InvalidData("$.expires_at", "the time is over already; name one that is to come")
        if self.name is not None:
            check_name(expect_text(self.name, "$.name"))

    @property
    def id(self) -> str:
        """Return the beginning of the digest. People list and revoke the token by it. It does not tell the secret."""
        return self.digest[:12]

    def is_expired(self, at: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= at


def check_digest(digest: object) -> None:
    """Raise InvalidData unless a value is a SHA-256 in hexadecimal. The error does not quote it: it may be a secret."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidData("$.digest", "expected a SHA-256, as 64 hexadecimal digits in lower case")


def check_moment(time: object, path: str) -> None:
    """Raise InvalidData unless a value is a time with a time zone."""
    if expect(time, datetime, path).tzinfo is None:
        raise InvalidData(path, "a time needs a time zone")


@runtime_checkable
class TokenBook(Protocol):
    """A store that keeps access tokens: their digests and rights, never a secret."""

    async def add_token(self, token: Token) -> None:
        """Store a token. Raise InvalidData if a token has its id already."""
        ...

    async def token(self, digest: str) -> Token | None:
        """Return the token of a digest, expired or not, or None. Raise CorruptRecord if it is damaged."""
        ...

    async def tokens(self, owner: str | None = None) -> Sequence[Token]:
        """Return all tokens, or those of an owner, the oldest first. Expired ones are included."""
        ...

    async def drop_token(self, token_id: str) -> bool:
        """Erase a token by its id, even if it is damaged. Return False if there is none."""
        ...


def is_token_book(store: object) -> TypeGuard[TokenBook]:
    """Tell whether a store is a TokenBook. `isinstance` would walk the protocol's members each time."""
    return callable(getattr(store, "add_token", None))


class Outcome(StrEnum):
    """The outcome of a look at a session."""

    DONE = "done"
    """Nothing is left to do."""
    WAITS = "waits"
    """It waits for a person. Once the person decides or opens it again, a worker looks at it again."""
    BUSY = "busy"
    """Another process is running it: look again soon."""
    OWNER_BUSY = "owner_busy"
    """Its owner has as many runs as are allowed: look again soon, at one session of that owner."""
    FAILED = "failed"
    """It could not be run here: look again later."""
    PARKED = "parked"
    """It is closed until an operator opens it again."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker."""

    concurrency: int = 16
    """The most sessions that it runs at once."""
    lease: float = 20.0
    """Seconds that its claim on a session is valid without a heartbeat. At least 1."""
    drain: float = 60.0
    """Seconds that runs have to end when the worker is told to stop."""
    tries: int = 3
    """The number of times that a run may die with its process until its session is parked."""
    per_owner: int | None = None
    """The most sessions of one owner that may run at once, in all workers together."""
    least_priority: int | None = None
    """The lowest priority of messages that the worker takes. It leaves less urgent sessions alone."""
    retain_every: float | None = 600.0
    """Seconds between two rounds of retention by all workers together, above 0. None leaves retention to others."""

    def __post_init__(self) -> None:
        expect_count(self.concurrency, "$.concurrency", least=1)
        check_lease(self.lease)
        if self.lease < _SHORTEST_LEASE:  # it could not be renewed in time, and a run would be taken from a live worker
            problem = f"a worker's lease lasts at least {_SHORTEST_LEASE} second, not {brief(self.lease)}"
            raise InvalidData("$.lease", problem)
        expect_number(self.drain, "$.drain")
        expect_count(self.tries, "$.tries", least=1)
        if self.per_owner is not None:
            expect_count(self.per_owner, "$.per_owner", least=1)
        if self.least_priority is not None:
            check_priority(self.least_priority)
        if self.retain_every is not None:
            check_time(self.retain_every, "$.retain_every")
            if not self.retain_every:  # the worker would do nothing else
                raise InvalidData("$.retain_every", "the time between two rounds of retention is more than 0 seconds")

    def takes(self, priority: int) -> bool:
        """Tell whether messages of a `priority` are urgent enough for this worker."""
        return self.least_priority is None or priority >= self.least_priority


Advance = Callable[[str], Awaitable[Outcome]]


class Dispatcher(Protocol):
    """The part that decides which worker looks at a session, and when.

    The store says what has to be done there, and who may do it. A dispatcher hands out ids of sessions, and nothing
    else. If an id is lost, doubled, early or late, the worst is a delay: workers also look for forgotten sessions.
    """

    async def wake(self, session_id: str, *, priority: int = 0, owner: str | None = None) -> None:
        """Have a worker look at a session soon.

        `session_id` names the session, `priority` is how urgent it is, and `owner` is its owner.
        """
        ...

    async def work(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        """Hand sessions to this process until `stopped` is set. Then wait for those that are under way.

        `advance` is called with the id of each session. After `options.drain` seconds, return even if some still run:
        the caller takes care of those.
        """
        ...


@runtime_checkable
class Looks(Protocol):
    """A dispatcher that finds by itself what waits in the store. It only has to be told that something waits."""

    def look(self) -> None:
        """Look for what waits now."""
        ...


async def tell_of(dispatcher: Dispatcher, session_id: str, *, priority: int, owner: str | None = None) -> None:
    """Tell a dispatcher that something was put into a session's inbox."""
    # `wake` would put the session before all others, and break the order of urgency.
    if isinstance(dispatcher, Looks):
        dispatcher.look()
    else:
        await dispatcher.wake(session_id, priority=priority, owner=owner)


def is_queue(journal: object) -> TypeGuard[Queue]:
    """Tell whether a journal is a Queue. `isinstance` would walk the protocol's members each time."""
    return callable(getattr(journal, "waiting", None))


@runtime_checkable
class Ear(Protocol):
    """A journal that can be listened to. It tells at once when a session's record has grown, or a piece was kept."""

    def listening(self, session_id: str) -> AbstractAsyncContextManager[Callable[[float], Awaitable[None]]]:
        """Listen to what is written while the block lasts.

        The block gets a function, which takes the most seconds to wait. It returns once something was written since its
        last return, or since the block began."""
        ...


class Adopted(msgspec.Struct, frozen=True):
    """The messages that a session took over from a branch at one time."""

    at: int
    """The number of messages in the session's own log at that time."""
    stretches: tuple[tuple[LogRef, int, int], ...]
    """The new stretches of logs, in the order of the view: not part of its beginning, nor of an earlier adoption."""


@runtime_checkable
class Chronicle(Protocol):
    """A journal that tells which other logs a session's history is made of. The cost follows what it returns."""

    async def branches(self, session_id: str) -> Sequence[RunOnRecord]:
        """Return the runs that have logs of their own, oldest first."""
        ...

    async def adoptions(self, session_id: str, version: int) -> Sequence[Adopted]:
        """Return the adoption that a version records, and all before it, oldest first."""
        ...

    async def names_of(self, logs: Collection[LogRef]) -> Mapping[LogRef, str]:
        """Return names of logs that mean the same in every store, as in an `ArchivedSession`.

        An unknown log has no name. A copy that a session keeps of another's log has the name of that log, and its
        messages have the same positions.
        """
        ...


@runtime_checkable
class Watch(Protocol):
    """A journal that tells when it has grown, so that nobody has to poll it."""

    async def changed(self, session_id: str, after: int, most: float) -> None:
        """Return once a session's record has an entry after the number `after`, or after at most `most` seconds."""
        ...


@runtime_checkable
class Versions(Protocol):
    """A store that lists the versions of a session. It reads no message, so the cost follows the page."""

    async def versions(self, session_id: str, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        """Return at most `limit` versions, newest first: the newest of all, or those older than the number `before`.

        For the next page, give the number of the last one as `before`. A damaged version is left out. Raise
        SessionNotFound if the session does not exist.
        """
        ...


FORGOTTEN = "forgotten"
"""The kind of entries that replace those of forgotten runs. Also the id of the message that ends a log whose last
message was forgotten. New entries and messages are numbered after them."""


class Forgotten(msgspec.Struct, frozen=True):
    """The amount of data that was erased with the older versions of a session."""

    versions: int = 0
    """The number of versions."""
    messages: int = 0
    """The erased messages: nothing shows them any more."""
    bytes: int = 0
    """The size of the erased rows: of versions, messages, files, values and the record."""


@runtime_checkable
class Forgets(Protocol):
    """A store that can erase the older versions of a session, and all that only they show or need."""

    async def forget(self, session_id: str, *, before: int) -> Forgotten:
        """Erase for good the versions older than `before`. The newest always stays.

        Messages that no remaining version, fork or run shows are erased too. So are the runs of these messages, their
        files, and their words in the search index. Idempotency keys stay.

        If anything was erased, the session gets one new version. Its `info.first_version` is the oldest version that is
        left: to load an older one raises VersionForgotten.

        Raise SessionBusy while the session is being run, and RunInterrupted while its last run waits to be recovered.
        Raise CorruptRecord if a version that stays is damaged.
        """
        ...

    async def kept_of_log(self, session_id: str) -> Sequence[tuple[int, int]]:
        """Return the stretches of a session's log that are left: all of it, unless older versions were forgotten."""
        ...


class ArchivedSession(msgspec.Struct, frozen=True, kw_only=True):
    """One whole session, as it moves between stores. The names of its logs mean the same in every store.

    A log's name is its session's id, or `id/branch` for a branch's log. The rest of a log whose session was erased has
    a name with a colon, which no session id contains.
    """

    session_id: SessionId
    heads: tuple[bytes, ...]
    """The versions, oldest first, as `stores.format.heads` writes them, with logs by name and no operation id.

    The first is version 1, unless older ones were forgotten. Then it is the `first_version` of the newest."""
    values: Mapping[str, bytes]
    """The values that the heads name by hash."""
    logs: Mapping[str, Mapping[int, bytes]]
    """The messages of the session's own logs by position, shown by a version or not. Forgotten ones are missing."""
    lent: Mapping[str, Mapping[int, bytes]] = EMPTY
    """The messages of other sessions' logs that its versions name, if they are carried along."""
    blobs: Mapping[str, bytes] = EMPTY
    """The images and files that these messages and the inbox items name, by the SHA-256 of their bytes."""
    owners: Mapping[str, float] = EMPTY
    """The existing sessions whose logs its versions name, with the time of creation in seconds since 1970."""
    entries: tuple[Entry, ...] = ()
    """The record. Its first entry has the sequence number 1."""
    inbox: tuple[Entry, ...] = ()
    """The items of the inbox that are not taken yet. The new store numbers them again, from 1."""
    keys: Mapping[str, tuple[str, int]] = EMPTY
    """The idempotency keys: the digest of each, and the version that its run has saved."""
    interrupted: bool = False
    """True if its last run was killed: it has a claim that was not given back."""


@runtime_checkable
class Attachments(Protocol):
    """A store that keeps images and files apart from the messages that show them, each once under its hash."""

    async def attachments(self, session_id: str, hashes: Collection[str]) -> Mapping[str, bytes]:
        """Return the bytes that messages of a session, or those that it shows of others, name by their SHA-256.

        Raise InvalidData if none of these messages names one of the hashes: to know a hash is not enough. Raise
        CorruptRecord, with the place of the message, if bytes are missing or do not match their hash.
        """
        ...


def keeps_files(store: object) -> TypeGuard[Attachments]:
    """Tell whether a store is an Attachments. `isinstance` would walk the protocol's members at every run."""
    return callable(getattr(store, "attachments", None))


@runtime_checkable
class Archive(Protocol):
    """A store that can export and import whole sessions. `stores.jobs.archive` does it for every engine."""

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        """Return a session as it is now, read in one snapshot.

        Messages that it shows of erased sessions are always carried along as `lent`. Those of existing sessions are
        only carried along with `alone`. A session with a lapsed claim is `interrupted`.

        Raise SessionNotFound if the session does not exist, and CorruptRecord if it is damaged. Raise SessionBusy while
        it has a valid claim: a run that continues here must not be recovered elsewhere too.
        """
        ...

    async def restore(self, archived: ArchivedSession) -> bool:
        """Write a whole session in one commit: versions, times, positions, record and keys.

        If it was interrupted, it gets a lapsed claim. Return False if the same session exists already. Raise
        SessionConflict if another session has its id.

        A stretch of another session's log is linked if that session is here and has these very messages. It has to have
        the same id and time of creation. Otherwise the stretch is copied from `lent` into a log of this session under
        the name `~name`.
        If `lent` does not have it, raise SessionNotFound. A later dump names such a log without the `~`, as `lent`, so
        moving the session again changes nothing.
        """
        ...


@runtime_checkable
class ArchivingStore(SessionStore, Archive, Protocol):
    """A store whose sessions can be moved."""


class Problem(msgspec.Struct, frozen=True):
    """Something that is wrong in a store: the place, the problem, and the repair."""

    session_id: str | None
    where: str
    what: str
    repair: str
    needs_key: bool = False
    """True if this could not be checked because a key is missing, and for no other reason."""


MEND_FIRST = (
    "An index repeats what its table says, and can be made again: `perdure fsck --repair`. Other problems of this "
    "report may come from it, so check again afterwards."
)
"""The repair of a problem that may cause others in the same report."""


@runtime_checkable
class Checkable(Protocol):
    """A store that can check what is below its sessions: files, indexes, and rows that belong to no session."""

    async def check(self) -> Sequence[Problem]:
        """Return the problems found. Nothing is changed, and damage raises no error."""
        ...


class SearchHit(Value, frozen=True):
    """A message that a search has found, with the piece of its text around the first word that matched."""

    session_id: SessionId
    """The session whose log holds it. If that one was erased, one that still shows it."""
    message_id: str
    """The message."""
    role: str
    """The role of its sender."""
    snippet: str
    """The piece of its text."""
    matches: tuple[tuple[int, int], ...] = ()
    """The start and end of each matching word in the snippet."""
    score: float = 0.0
    """The rank. A higher one is a better match."""
    position: int = 0
    """Its place in the log."""
    created_at: datetime | None = None
    """The time at which the message was made, if its id tells. The ids that perdure makes do."""


@runtime_checkable
class Search(Protocol):
    """A store in which messages can be searched."""

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        """Return the messages that have every word of a text, the best first. Of equal ones, the newest come first.

        `"quoted words"` have to be next to each other. A word that ends in `*` matches all words that begin with it.
        All else is plain text. Covered, trimmed and rewound messages are found too. Those of sessions with the status
        deleted are not. Of more than 10,000 matches only the newest are ranked. Raise InvalidData if the text is blank.
        """
        ...


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a memory has found. Others have said it, so it is data, and never an instruction."""

    text: str
    """The text that was remembered, or the piece of it that fits the question."""
    session_id: str | None = None
    """The session in which it was said."""
    message_id: str | None = None
    """The message that says it."""
    role: str | None = None
    """The role of its sender."""
    created_at: datetime | None = None
    """The time at which it was said."""
    score: float | None = None
    """A number for how well it fits, if that is known. More is better."""
    metadata: Mapping[str, Any] = EMPTY
    """The metadata that it was remembered with."""


@runtime_checkable
class Memory(Protocol):
    """A memory of other sessions for an agent. The memories of one owner are never found for another.

    `owner=None` means sessions without an owner, and not those of everybody.
    """

    async def remember(self, text: str, *, owner: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> str:
        """Store a `text`. Return its id.

        A text with the same `session_id`, `execution_id` and `call_id` in its `metadata` is stored once.
        """
        ...

    async def recall(self, query: str, *, owner: str | None = None, limit: int = 10) -> Sequence[Remembered]:
        """Return the memories that fit a `query`, at most `limit`, the best first. Raise InvalidData if it is blank."""
        ...


class MessagePlace(msgspec.Struct, frozen=True):
    """The place of a message."""

    session_id: SessionId
    """The session whose log holds it. If that one was erased or is hidden, one that still shows it."""
    log: LogRef
    """The log that has the message."""
    position: int
    """Its place in that log."""


@runtime_checkable
class FindsMessages(Protocol):
    """A store that finds a message by its id in any session."""

    async def find_message(
        self, message_id: str, *, owner: str | None = None, limit: int = 10
    ) -> Sequence[MessagePlace]:
        """Return the places of the messages with an id, those in the newest sessions first.

        Covered, trimmed and rewound messages are found too, and those of a run that is not saved yet. Those of sessions
        with the status deleted are not. Most ids have one place, since forks share their parent's messages. With an
        `owner`, only places in that owner's sessions are returned.
        """
        ...


@runtime_checkable
class Indexed(Search, Protocol):
    """A store that searches by an index. The index lags behind what is saved, and catches up at the next search."""

    async def index(self, *, rebuild: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring the index up to date, or rebuild it from nothing. Return the number of messages indexed.

        `progress` is called with the number done and the number of all. If it is cancelled, what is done is kept.
        """
        ...


@runtime_checkable
class Erasure(Protocol):
    """A store that can replace what was said, and clear up after erasures."""

    async def delete(self, session_id: str, *, expected: AgentSessionInfo | None = None) -> None:
        """Erase a session. Raise SessionConflict if it has changed since the header `expected` was read.

        A session that was erased and created again under the same id is not the expected one.
        """
        ...

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace the content of messages in a session's history for good. Return how many were replaced.

        Messages that were replaced before do not count. The content is replaced in every version, in every session that
        shows it, in the summaries that cover it, and in the records of runs. Roles, ids, the names of tools, and times
        stay. Every session concerned gets an entry `redacted` on its record.

        Raise InvalidData, and change nothing, if one of the ids is unknown. Raise SessionBusy while one of the sessions
        is being run.
        """
        ...

    async def gc(self) -> int:
        """Erase the messages in logs that nothing points to. Return how many there were."""
        ...


@runtime_checkable
class BulkErasure(Protocol):
    """A store that can erase many sessions at once, which costs less than one by one."""

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        """Erase sessions, except those that are being run, under hold, or missing. Return the ids erased."""
        ...

    async def delete_tree(self, session_id: str) -> Sequence[SessionId]:
        """Erase a session with those of its sub-agents, and of theirs, in one commit. Return the ids, its own last.

        Raise SessionNotFound if it does not exist, SessionBusy while one of them is being run, and SessionHeld if a
        hold is on one of them. Then nothing was erased.
        """
        ...


class Due(msgspec.Struct, frozen=True):
    """A session whose time is over, as it was when it was found."""

    session_id: SessionId
    version: int
    created: float

    @classmethod
    def of(cls, info: AgentSessionInfo) -> Due:
        return cls(info.id, info.version, info.created_at.timestamp())


class WhyLeft(StrEnum):
    """The reason why a session whose time is over stays for now, with those of its sub-agents."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Its run was killed, and waits to be continued."""
    APPROVAL = "approval"
    """Its run waits for a person, or for a result from outside."""
    QUEUED = "queued"
    """Messages wait in its inbox."""
    TIMER = "timer"
    """It has a timer: a message to send later, or the end of a pause."""
    HOLD = "hold"
    CHANGED = "changed"
    """It was changed, or erased, since it was found."""
    DAMAGED = "damaged"
    """It cannot be read: it is damaged, or sealed with a key that is not there."""


class Left(msgspec.Struct, frozen=True):
    """A session that stays for now, although its time is over."""

    session_id: SessionId
    why: WhyLeft
    detail: str = ""
    """The session of a sub-agent that it stays for, the tag of a hold and its session, or the damage."""


class Erased(msgspec.Struct, frozen=True):
    """The sessions and versions that retention has erased, or would erase."""

    erased: Sequence[SessionId] = ()
    """The sessions that were erased, with those of sub-agents."""
    left: Sequence[Left] = ()
    versions: int = 0
    messages: int = 0
    """The erased messages: nothing shows them any more."""
    bytes: int = 0
    """The size of the erased rows: of versions, messages, files, values and the record."""
    pruned: Sequence[SessionId] = ()
    """The sessions whose older versions were erased."""

    @classmethod
    def joined(cls, several: Iterable[Erased]) -> Erased:
        every = list(several)
        return cls(
            [session_id for each in every for session_id in each.erased],
            [left for each in every for left in each.left],
            sum(each.versions for each in every),
            sum(each.messages for each in every),
            sum(each.bytes for each in every),
            [session_id for each in every for session_id in each.pruned],
        )


@runtime_checkable
class Retains(Protocol):
    """A store that keeps sessions for as long as rules say, and respects legal holds.

    A session with a tag `hold` or `hold:…` is under hold, and so are those of its sub-agents. No verb of such a store
    erases, forgets or redacts anything of them: it raises SessionHeld. `delete_many` and `retire` skip them.
    """

    async def holds(self, session_ids: Iterable[str]) -> Mapping[SessionId, str]:
        """Return the sessions under hold among those given, each with the tag, which may be that of its caller."""
        ...

    async def own_rules(self) -> Sequence[Retention]:
        """Return every rule that some session has of its own, each once.

        `list(tag=keep_mark(rule))` lists the sessions with a rule.
        """
        ...

    async def overgrown(
        self, versions: int, *, after: str = "", limit: int = 200
    ) -> tuple[Sequence[AgentSessionInfo], str | None]:
        """Return a page of sessions with more than `versions` versions before the newest, and the cursor of the next.

        Sessions of sub-agents are left out. A page may be short or empty although others follow.
        """
        ...

    async def retire(self, due: Sequence[Due]) -> Erased:
        """Erase sessions, with those of their sub-agents, in one commit. Sessions in use stay.

        A session stays if it has changed since it was found, is being run, or has a killed run. It also stays if it
        waits for a person, has messages in its inbox or a timer, or is under hold. The same holds if one of its
        sub-agents' sessions is in use. `left` says which sessions stay, and why.
        """
        ...

    async def prune(self, due: Due, *, before: int) -> Erased:
        """Forget the versions before a number. Do nothing if the session has changed, or `forget` would refuse."""
        ...

    async def rehearse(self, batches: Sequence[Sequence[Due]], prunes: Sequence[tuple[Due, int]] = ()) -> Erased:
        """Return what `retire` of all batches, and then `prune`, would erase. Nothing is changed."""
        ...


class DataKey(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A key that rows are sealed with. Its id is stored with each row. Its secret is never shown."""

    id: bytes
    """Eight bytes, never used for another key."""
    secret: bytes
    """32 bytes, from which the keys that seal, name and index are derived."""

    # The default would show the secret, and a repr easily ends up in a log or a traceback.
    def __repr__(self) -> str:
        return f"DataKey({self.id.hex()})"


@runtime_checkable
class KeyRing(Protocol):
    """The keys that a store is sealed with, kept outside the store. Each owner has a data key of their own.

    Sessions without an owner share one, whose owner is None. The methods are called in any thread, at every read and
    write, so they should answer from memory where they can. A key must be safe on disk before it is returned.
    """

    def current(self, owner: str | None) -> DataKey:
        """Return the key for what an owner writes now. Make one if there is none."""
        ...

    def first(self, owner: str | None) -> DataKey | None:
        """Return the oldest key of an owner, or None. Names and the words of the search index are derived from it."""
        ...

    def find(self, key_id: bytes) -> DataKey:
        """Return a key by its id. Raise KeyMissing, KeyForgotten or WrongKey if it cannot be used."""
        ...

    def owners(self) -> Sequence[str | None]:
        """Return the owners that have a key."""
        ...

    def forget(self, owner: str | None) -> int:
        """Destroy all keys of an owner. Return how many there were."""
        ...

    def losses(self) -> int:
        """Return how many keys this object has given out and can no longer find, because they were forgotten.

        A store asks at each load. When the number has grown, it drops the sessions and keys that it has in memory.
        """
        ...


@runtime_checkable
class SealedStore(Protocol):
    """A store that can have keys."""

    @property
    def keys(self) -> KeyRing | None:
        """Return the key ring that the store seals with, or None."""
        ...

    async def held_beside(self, owner: str) -> Mapping[SessionId, str]:
        """Return the sessions of others under hold that need an owner's keys, each with the tag.

        They show messages of the owner, or of sessions that were erased: nothing tells whose those were.
        """
        ...

    async def drop_hold(self, session_id: str, tag: str) -> None:
        """Take the tag of a hold away from a session whose key was forgotten, so that its rest can be erased.

        Raise InvalidData if the session can be read: then a hold is lifted by a save without the tag.
        """
        ...


def keys_of(store: SessionStore) -> KeyRing | None:
    """Return the key ring that a store was opened with, or None."""
    return store.keys if isinstance(store, SealedStore) else None
