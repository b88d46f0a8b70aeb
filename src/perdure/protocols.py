"""All that a user may implement, on one page, and the values that pass through it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
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
from perdure.model.ids import SessionId
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

_LONGEST_LEASE = 10**9
_SHORTEST_LEASE = 1


class SessionStage(StrEnum):
    """Where in the runtime's pipelines a controller is called."""

    BEFORE_CREATE = "before_create"
    AFTER_CREATE = "after_create"
    AFTER_LOAD = "after_load"
    AFTER_ACTION = "after_action"
    BEFORE_SAVE = "before_save"
    AFTER_SAVE = "after_save"


class SessionController(Protocol):
    """Called at each stage with the session; what it returns goes on. A plain function may serve as well."""

    def on_stage(self, stage: SessionStage, session: AgentSession) -> AgentSession | Awaitable[AgentSession]: ...


class ClaimingRecord(Protocol):
    """A record whose first write claims a session."""

    @property
    def was_claimed(self) -> bool: ...

    async def leave(self) -> None:
        """Give the claim back without a save; a run that is on record without its end is left for recovery."""
        ...


class Sequel(Protocol):
    """What follows an action, once its session is free, for nobody who waits."""

    async def is_needed(self) -> bool: ...

    async def carry_out(self) -> None: ...


class UnderWay(Protocol):
    """What a runtime has begun and not ended."""

    @property
    def is_closing(self) -> bool:
        """Tell whether runs are to be left for recovery: the runtime is being closed."""
        ...

    def cancellable(self, work: asyncio.Future[Any]) -> AbstractContextManager[None]:
        """While the block lasts, cancel `work` if the runtime is closed."""
        ...


def check_lease(lease: object) -> None:
    """Raise InvalidData unless a lease is a number of seconds that can be added to the time."""
    if expect_number(lease, "$.lease") > _LONGEST_LEASE:
        raise InvalidData("$.lease", f"a lease lasts at most {_LONGEST_LEASE} seconds, not {brief(lease)}")


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms a runtime claims sessions."""

    lease: float = 30.0
    """For how many seconds a claim stands without a sign of life. A run that was killed is taken over that late."""
    per_owner: int | None = None
    """How many sessions of one owner may be run at once."""

    def __post_init__(self) -> None:
        check_lease(self.lease)
        if self.per_owner is not None:
            expect_count(self.per_owner, "$.per_owner", least=1)


DEFAULT_TERMS = Terms()


class Kept(Protocol):
    """Where sessions and their record can be read: what an action is given has it, and so have `Sessions`."""

    @property
    def store(self) -> SessionStore: ...

    @property
    def journal(self) -> Journal | None: ...


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What the runtime gives an action beside the session. Most actions ignore it, and none can change it."""

    store: SessionStore
    emit: Callable[[object], Awaitable[None]]
    execute: Callable[[str, Action], Awaitable[AgentSession]]
    create: Callable[[AgentSession], Awaitable[AgentSession]]
    """Keeps a new session, through the stages that every other goes through."""
    journal: Journal | None
    """The store again, if it has one; None if its runs are unrecorded."""
    under_way: UnderWay
    hold: Callable[[ClaimingRecord, Sequel | None], None]
    """Makes the runtime see to a claim: it is left unless the action's result is saved with it. The sequel is carried
    out once the claim is given back, however that came."""
    terms: Terms = DEFAULT_TERMS

    @property
    def is_closing(self) -> bool:
        """Tell whether a cancelled run is to be left for recovery instead of ended."""
        return self.under_way.is_closing


class Next(msgspec.Struct, frozen=True):
    """What an action has made: the next version of the session, and what goes with its save.

    An action that has nothing to add returns the session alone.
    """

    session: AgentSession
    saving: Saving | None = None
    """What the save of a run carries: its claim, and what is on record already."""
    tells: Sequence[object] = ()
    """Events that are emitted once the session is saved."""


class Answer(msgspec.Struct, frozen=True):
    """What an action came to without a new version: nothing is saved, and the caller is given this session."""

    session: AgentSession
    sequel: Sequel | None = None
    """What follows in a task of the runtime's own."""


ActionResult = AgentSession | Next | Answer
"""What an action may return. Without a context it is always a session."""


class Interrupted(asyncio.CancelledError):
    """The cancellation of an action that has something to be saved first. The runtime saves it, then cancels."""

    def __init__(self, made: Next) -> None:
        self.made = made
        super().__init__()


@runtime_checkable
class Action(Protocol):
    """Turns a session into the next one. Anything with this method is an action.

    It returns the next session, a `Next` where more goes with the save, or an `Answer` where there is nothing to save.
    It is executed once: only a `Repeatable` one is applied again where somebody else has saved meanwhile.
    """

    async def execute_on(self, session: AgentSession, context: ActionContext | None = None) -> ActionResult: ...


@runtime_checkable
class Repeatable(Protocol):
    """An action that says whether `on_conflict="retry"` may apply it again, as `may_be_repeated = True` on its class.

    It may be if it does nothing but make the next session. One that asks a model, or writes elsewhere, may not.
    """

    @property
    def may_be_repeated(self) -> bool: ...


@runtime_checkable
class EndsInterruption(Protocol):
    """An action that deals with a run that was killed: what it fails with is not that run."""

    @property
    def ends_interruption(self) -> bool: ...


class SessionManager(Protocol):
    """Creates, reads and changes sessions: what `recover` needs of a runtime. `SessionRuntime` is one."""

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
    """Runs an agent's state to the end of an execution."""

    async def run(self, state: AgentState) -> AgentState: ...


class LoopBuilder(Protocol):
    """Builds the loop that an agent of a definition runs in. `LoopFactory` is one."""

    def build(self, definition: AgentDefinition, state: AgentState | None = None, *, depth: int = 0) -> Loop:
        """Return a loop; `depth` is how many agents have called each other to get there."""
        ...


class EventHandler(Protocol):
    """Takes events and passes them on; an `EventBus` is one."""

    async def emit(self, event: object) -> None: ...


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool as a model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, Any]


ReadFiles = Callable[[Collection[str]], Awaitable[Mapping[str, bytes]]]
"""Reads images and files by their hashes, as `Attachments` does for one session."""


class ModelRequest(msgspec.Struct, frozen=True):
    """One model call: a valid list of messages, in which every tool call has exactly one result.

    Bytes of images and files may be in a store, apart from the messages: a driver that sends them awaits
    `messages_with_files()` instead of reading `messages`.
    """

    model: ModelConfig
    messages: Sequence[Message]
    system_prompt: str = ""
    tools: tuple[ToolSpec, ...] = ()
    response_format: Mapping[str, Any] | None = None
    step: int = 0
    """The index of the step within its run; a run that was recovered goes on counting where it was."""
    read_files: ReadFiles | None = None
    """Reads the bytes of images and files that the messages name by hash."""
    deadline: datetime | None = None
    """When the time of its run is up: an answer that cannot come before is not worth waiting for."""

    async def messages_with_files(self) -> Sequence[Message]:
        """Return the messages with the bytes of all images and files that they show."""
        wanted = {key for message in self.messages for key in message.file_hashes}
        if not wanted:
            return self.messages
        if self.read_files is None:
            raise ConfigurationError(
                "A message names a file by its hash, and there is no store to read it from. Run it in a session."
            )
        bodies = await self.read_files(sorted(wanted))
        return tuple(message.with_files(bodies) if message.file_hashes else message for message in self.messages)


class Delta(Value, frozen=True):
    """A piece of an answer as it comes: of its text, its thinking, or a tool call's arguments."""

    kind: Literal["text", "thinking", "tool_call", "restart"]
    """`restart`: what came so far is void, the answer begins anew."""
    text: str
    call_id: str | None = None
    name: str | None = None


class ModelReply(msgspec.Struct, frozen=True):
    """A whole answer: an assistant's message, and what came with it."""

    message: Message
    response: InferenceResponse = InferenceResponse()


OnDelta = Callable[[Delta], Awaitable[None]]


class Driver(Protocol):
    """One model call. DriverError when it fails for good; retries are made by whoever calls the driver."""

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply: ...


async def _unheard(progress: JSON) -> None:
    """Nobody follows a tool that is called outside of a run."""


if TYPE_CHECKING:
    # With a default, a plain `ToolContext` is complete for type checkers. Python has them from 3.13 on.
    from typing_extensions import TypeVar as TypeVarWithDefault

    C = TypeVarWithDefault("C", default=Any)
else:
    C = TypeVar("C")


class ToolContext(msgspec.Struct, Generic[C], frozen=True):
    """What a tool may know of the call it serves: a parameter of this type is filled in, and hidden from the model.

    A parameter of the type `ToolContext[Request]` says that the tool needs a context, which is a `Request`.
    """

    call_id: str
    execution_id: str
    agent_id: str
    session_id: str | None = None
    progress: Callable[[JSON], Awaitable[None]] = _unheard
    """Tells those who follow the run how far the call has come."""
    spawn: Callable[..., Awaitable[Any]] | None = None
    """Runs a sub-agent in a session of its own; None where the run belongs to no session."""
    owner: str | None = None
    """Whose session it is."""
    metadata: Mapping[str, Any] = EMPTY
    """The session's metadata, as `WriteMetadata` wrote it."""
    context: C = None  # type: ignore[assignment]  # a tool that says what it needs is not called without it
    """What `send(…, context=…)` was given, or what `connect(context=…)` has made of the session. It is never stored."""
    context_data: Mapping[str, Any] | None = None
    """What `send(…, context_data=…)` was given: JSON, stored with the run."""
    messages: Sequence[Message] = ()
    """What the model was shown when it made the call, and what has come since."""
    store: SessionStore | None = None
    """The store that the session is in; None where the run belongs to no session. It has the sessions of all owners."""


@runtime_checkable
class Tool(Protocol):
    """Something the model may have called. `perdure.tool` makes one of a function."""

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
        """What becomes of a call whose outcome is unknown after a crash."""
        ...

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool: ...

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments, fitted to the tool; ToolError if they do not fit."""
        ...

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> JSON: ...


@runtime_checkable
class NeedsContext(Protocol):
    """A tool that says whether it can be called without a context."""

    @property
    def needs_context(self) -> bool: ...


@runtime_checkable
class Toolset(Protocol):
    """Tools that have to be connected to before they are known. `perdure.mcp` makes one of an MCP server.

    One may be given to several connections and factories: each opens it for itself.
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
        """Return the tools there are now. It is called before every run, and connects if nobody has.

        Raise ConfigurationError if they cannot be reached: then no run begins.
        """
        ...

    async def close(self) -> None:
        """Disconnect. It is called once the runs have ended; a later call of `tools` connects again."""
        ...


class Filters(TypedDict, total=False):
    """What a list of sessions can be narrowed to. Sessions that are deleted show only when asked for.

    `owner=None` asks for sessions without an owner. `metadata` has values under keys that were declared for it when the
    sessions were saved. `top_level` leaves out the sessions of sub-agents. `order` is
    "created" unless it is given; a page's `next` belongs to the order of its list.
    """

    id: str
    agent: str
    status: SessionStatus | str
    owner: str | None
    tag: str
    metadata: Mapping[str, str | int | bool]
    parent: str
    top_level: bool
    created_after: datetime
    created_before: datetime
    updated_after: datetime
    updated_before: datetime
    order: Literal["created", "updated"]
    limit: int
    after: str | None


class SessionQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The filters of a list, checked."""

    id: str | None = None
    agent: str | None = None
    status: SessionStatus | None = None
    owner: str | msgspec.UnsetType | None = msgspec.UNSET
    """None asks for sessions without an owner; UNSET for everybody's."""
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
        """Return what a session has to be found by among tags: the tag, and marks for its metadata."""
        return (*(() if self.tag is None else (self.tag,)), *marks_of(self.metadata))

    @property
    def shows_deleted(self) -> bool:
        return self.status is not None or self.id is not None


def _wrong_filter(given: Mapping[str, Any], error: Exception) -> InvalidData:
    """Return an error that names the filter, and where there are few values, which."""
    what, _, where = str(error).partition(" - at `$.")
    name = where.rstrip("`").partition(".")[0].partition("[")[0]
    if name in _CHOICES and isinstance(given.get(name), str):
        return InvalidData(f"$.{name}", f"there is no {name} {brief(given[name])}; use one of {_CHOICES[name]}")
    return InvalidData(f"$.{name}" if name in given else "$", f"a filter has the wrong type or value: {what}")


_CHOICES = {"status": ", ".join(SessionStatus), "order": "created, updated"}


def _as_text(kind: type, value: Any) -> Any:
    return str(value)


@runtime_checkable
class SessionStore(Protocol):
    """Keeps sessions. Versions are compared inside the commit; see `perdure.testing.StoreContract`."""

    async def create(self, session: AgentSession) -> AgentSession:
        """Keep a session of version 0 as version 1; SessionConflict if the id is taken."""
        ...

    async def save(self, session: AgentSession) -> AgentSession:
        """Keep the next version; SessionConflict unless the session's version is the stored one."""
        ...

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        """The session as of a version (the newest by default), or None."""
        ...

    async def exists(self, session_id: str) -> bool: ...

    async def delete(self, session_id: str) -> None:
        """Erase this one session: nothing of it is left, except what other sessions' versions show.

        The sessions of its sub-agents stay: `Sessions.erase` erases them with it. Raise SessionNotFound if there is
        none, SessionBusy while it is being run.
        """
        ...

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        """A page of headers, newest first. Never reads a transcript."""
        ...


class Preview(msgspec.Struct, frozen=True):
    """What a list shows of what is said in a session. A part that could not be read is None."""

    title: str | None = None
    """The session's name, or else the first words of the first text that a user has said in it."""
    last_words: str | None = None
    """The beginning of the last text of a user or the assistant that the session shows."""
    message_count: int | None = None
    """How many messages the session shows."""
    usage: Usage | None = None
    """What all runs of the session have used so far. A session that has never run has used nothing."""
    damage: CorruptRecord | KeyUnavailable | None = None
    """Why a part could not be read."""


@runtime_checkable
class Previews(Protocol):
    """A store that reads a few words of each of many sessions, without loading any of them."""

    async def previews(self, session_ids: Iterable[str]) -> Mapping[str, Preview]:
        """Return a preview of each session. One that is not there is left out; a damaged one stops no other."""
        ...


Damage = CorruptRecord | InvalidSessionFile | UnreadableFile | KeyUnavailable
"""Why a session that is there could not be read."""


class SessionHead(msgspec.Struct, frozen=True):
    """A session without what it shows: its header, its definition and its metadata."""

    info: AgentSessionInfo
    definition: AgentDefinition
    metadata: Mapping[str, Any] = EMPTY

    def __post_init__(self) -> None:
        freeze(self, "metadata")


class SessionHeads(dict[str, SessionHead]):
    """Heads of sessions by their ids, and what is wrong with those that could not be read."""

    def __init__(self, heads: Mapping[str, SessionHead] = EMPTY, damaged: Mapping[str, Damage] = EMPTY) -> None:
        super().__init__(heads)
        self.damaged = damaged
        """The sessions that are there and damaged, by their ids."""


@runtime_checkable
class Heads(Protocol):
    """A store that reads sessions without their views: the cost follows the heads, however long the sessions are."""

    async def heads(self, session_ids: Iterable[str]) -> SessionHeads:
        """Return the newest head of each session, in the order of the ids.

        One that is not there is left out. So is a damaged one, which `damaged` has instead: it stops no other.
        """
        ...


@runtime_checkable
class CountsErasures(Protocol):
    """A store that counts what is erased or redacted in it, so that a fork cannot keep what it had read before."""

    async def erasures(self) -> int:
        """Return how often something was erased or redacted so far."""
        ...

    async def create(self, session: AgentSession, *, erasures: int | None = None) -> AgentSession:
        """Keep a session of version 0 as version 1; ErasedMeanwhile if the count is another by then."""
        ...


@runtime_checkable
class Opened(Protocol):
    """A store that can be opened once for several who use it: whoever opened it closes it."""

    @property
    def is_open(self) -> bool: ...


@runtime_checkable
class Cache(Protocol):
    """A store that keeps sessions at hand, and can be told which."""

    def pin(self, session_id: str) -> None:
        """Keep a session at hand, however long nobody asks for it."""
        ...

    def unpin(self, session_id: str) -> None: ...

    def evict(self, session_id: str) -> None:
        """Let go of what is held of a session, unless it is pinned."""
        ...


@runtime_checkable
class KnowsWaiting(Protocol):
    """A store that has seen, when it saved a session, whether something waited in the inbox."""

    def is_waited_for(self, session_id: str) -> bool | None:
        """Tell whether the last save from here left items in the inbox; None if that is not known any more."""
        ...


def knows_waiting(store: object) -> TypeGuard[KnowsWaiting]:
    """Tell whether a store is a KnowsWaiting. `isinstance` would walk the protocol's members at every claim."""
    return callable(getattr(store, "is_waited_for", None))


@runtime_checkable
class Lineage(Protocol):
    """A store that reads a line of forks at once, however long it is."""

    async def line_of(self, session_id: str) -> Sequence[SessionId]:
        """Return what a session was forked from: the first of its line first, its parent last.

        A line whose beginning is erased begins with the oldest that is known by name.
        """
        ...


@runtime_checkable
class Immediate(Protocol):
    """A store whose verbs never wait: nothing can come between their beginning and their end."""

    @property
    def never_waits(self) -> bool: ...


def is_immediate(store: object) -> bool:
    """Tell whether a store is an Immediate that says so of itself."""
    return bool(getattr(store, "never_waits", False))


SHORTEST_SUFFIX = 4
"""The fewest characters that sessions are found by where only the end of their id is known: indexes go by as many."""


@runtime_checkable
class Names(Protocol):
    """A store that finds sessions by the beginning or the end of their id, at the cost of what it finds."""

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        """Return the ids that begin so, in the order of text: of this owner's sessions if one is given.

        They are those of deleted sessions, or of all others. A damaged session has its id still.
        """
        ...

    async def ids_with_suffix(
        self, suffix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        """Return the ids that end so, as `ids_with_prefix` does those that begin so.

        InvalidData if it has fewer than four characters.
        """
        ...


class StoredAt(msgspec.Struct, frozen=True):
    """Where a message already stands in a log of a store."""

    log: LogRef
    position: int


class Claim(msgspec.Struct, frozen=True):
    """The right to run one session. The store compares `epoch` on every write made under it."""

    session_id: SessionId
    epoch: int
    version: int
    owner: str
    lease: float

    def __post_init__(self) -> None:
        expect(self.session_id, str, "$.session_id")
        expect_count(self.epoch, "$.epoch")
        expect_count(self.version, "$.version")
        expect(self.owner, str, "$.owner")
        check_lease(self.lease)


class Entry(Value, frozen=True):
    """Something to be put on record: an event of a run, or an item for its inbox."""

    kind: str
    body: JSON = None
    run: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            expect(self.kind, str, "$.kind")
        if self.run is not None and not isinstance(self.run, str):
            expect(self.run, str, "$.run")


class JournalEntry(msgspec.Struct, frozen=True):
    """An entry as it stands on record, with its place in the session's sequence."""

    seq: int
    kind: str
    body: JSON
    run: str | None = None


def check_page(limit: object, before: object) -> None:
    """Raise InvalidData unless a page of runs is asked for by whole numbers. Every journal does so first."""
    for name, number in (("limit", limit), ("before", before)):
        if number is not None:
            expect_count(number, f"$.{name}")


def checked_version(version: int | None) -> int | None:
    """Return the number of a version, which may be one that is not there; InvalidData if it is not a number."""
    if version is not None and type(version) is not int:
        raise InvalidData("$.version", f"a version is a whole number, not {brief(version)}; the newest has none")
    return version


class RunOnRecord(msgspec.Struct, frozen=True):
    """A run as the journal knows it: its first and last entry, and the stretch of log that holds its messages."""

    loop_id: str
    first: JournalEntry
    last: JournalEntry
    log: LogRef
    start: int
    stop: int


class Key(msgspec.Struct, frozen=True):
    """An idempotency key, and a digest of the request that it stands for."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        expect_text(self.name, "$.key")
        expect_text(self.digest, "$.digest")


def check_key(key: object) -> None:
    """Raise InvalidData unless it can be the key of a message."""
    if not 1 <= len(expect_text(key, "$.key")) <= _MOST_IN_KEY:
        raise InvalidData("$.key", f"a key is a text of 1 to {_MOST_IN_KEY} characters")


_MOST_IN_KEY = 500


class Saving(msgspec.Struct, frozen=True):
    """What goes with the save of a run: its claim, what is written already, and what is still to be put on record."""

    claim: Claim
    written: Mapping[str, StoredAt] = EMPTY
    entries: Sequence[Entry] = ()
    taken: int = 0
    """The last item of the inbox that the run has dealt with."""
    key: Key | None = None


NOTHING_WRITTEN: Mapping[str, StoredAt] = EMPTY


class Change(msgspec.Struct, frozen=True):
    """A session to be kept together with others, and what goes with it. One of version 0 is created."""

    session: AgentSession
    key: Key | None = None
    entries: Sequence[Entry] = ()


@runtime_checkable
class SavesTogether(Protocol):
    """A store that keeps several sessions in one commit."""

    async def save_all(self, changes: Sequence[Change]) -> Sequence[AgentSession]:
        """Keep the next version of each session, all or none. Return the sessions in the same order.

        Each is created if its version is 0, and else compared with the stored version. Raise what `create` or `save`
        raises of the first session that is refused; then nothing was kept. InvalidData if one session is there twice.
        """
        ...


class Appended(msgspec.Struct, frozen=True):
    """What an append came to: where each message now stands, and the last sequence number."""

    written: Mapping[str, StoredAt]
    seq: int
    posted: int | None = None
    """The number of the last item in the session's inbox at that moment; None if the store does not tell."""


@runtime_checkable
class Journal(Protocol):
    """The write-ahead log of runs. A store that has it lets a killed run go on elsewhere."""

    async def create(
        self, session: AgentSession, *, written: Mapping[str, StoredAt] = NOTHING_WRITTEN, key: Key | None = None
    ) -> AgentSession:
        """Keep a session of version 0 as version 1, with references to the messages already written.

        An idempotency key is kept in the same commit. SessionConflict if the id is taken.
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
        """Keep the next version. These are the fields of `Saving`.

        The save is fenced by the claim, refers to the messages already written, appends the entries, and releases the
        claim, all in one commit. A save without a claim is refused while one lies on the session: with SessionBusy
        while it stands, with RunInterrupted once it has lapsed.
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

        SessionBusy while somebody else's claim stands; RunInterrupted if one lies there that has lapsed, unless it is
        to be taken over; SessionConflict if the version has moved. With `per_owner`, raise OwnerBusy if as many claims
        on other sessions of the same owner stand. They are counted in the same commit. A session that has no owner is
        not counted, and not limited.
        """
        ...

    async def heartbeat(self, claim: Claim) -> None:
        """Extend the claim by its lease; ClaimLost if it is no longer held."""
        ...

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        """Give the claim back without saving; nothing happens if it is no longer held.

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
        """Put messages and entries on record in one commit; ClaimLost if the claim is no longer held.

        `log` names a branch's own log; the session's log by default. `taken` is the last item of the inbox that has
        been dealt with. An append also extends the claim.
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
        """Entries after a sequence number, in order: of the record, or of the inbox those not taken yet.

        `limit` takes the first so many, `last` the last so many, `run` those of one run.
        """
        ...

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        """The newest runs on record, oldest first; those that began before a sequence number; or one, by its id."""
        ...

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        """A session's log, or the branch log of that name, and the position after its last message."""
        ...

    async def lapsed(self) -> Sequence[SessionId]:
        """Return the sessions whose claim has lapsed: their runs were killed, or could not be saved."""
        ...

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        """Messages of a log, whether or not a version shows them. SessionNotFound if they have been erased."""
        ...

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        """The idempotency key of that name and the version that its run has saved; None if there is none, or no such
        session."""
        ...

    async def is_claimed(self, session_id: str) -> bool:
        """Whether somebody's claim on the session stands."""
        ...

    async def is_interrupted(self, session_id: str) -> bool:
        """Tell whether the session has a claim that has lapsed: its run was killed, or could not be saved."""
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
        """Put an item into a session's inbox, claim or no claim. Return its sequence number.

        A session that waits has the highest priority of the items posted to it since nothing waited. Raise QueueFull,
        and write nothing, if `most` items wait in the session already, or `most_of_owner` in all sessions of its owner.
        They are counted in the same commit.
        """
        ...

    async def note(self, session_id: str, entries: Sequence[Entry]) -> int:
        """Put entries on a session's record without a claim, in one commit. Return the number of the last on record.

        It moves no version and looks at no claim: entries may come while somebody runs the session. `read(run=…)`
        reads them by their run, whose name should be the caller's own: the pieces that a Sketchbook keeps of an answer
        are void once an entry of the same run is on record. Raise SessionNotFound if there is no such session.
        """
        ...


class Sketch(msgspec.Struct, frozen=True):
    """A piece of the text of an answer that is not whole yet."""

    run: str
    message_id: str
    text: str
    start: int = 0
    """How many characters of the answer come before it."""
    attempt: int = 0
    """How often the model had begun the answer again."""
    seq: int = 0
    """Where the session's record ended when the answer was begun. What its run puts on record next voids the piece."""

    def __post_init__(self) -> None:
        for name in ("run", "message_id", "text"):
            expect_text(getattr(self, name), f"$.{name}")
        for name in ("start", "attempt", "seq"):
            expect_count(getattr(self, name), f"$.{name}")


def said_in(pieces: Sequence[Sketch]) -> str:
    """Return the text that pieces add up to, as far as one follows the other."""
    text = ""
    for piece in pieces:
        same = (piece.message_id, piece.attempt) == (pieces[0].message_id, pieces[0].attempt)
        if not same or piece.start != len(text):
            break
        text += piece.text
    return text


class RunProgress(msgspec.Struct, frozen=True):
    """How a session stands between two messages: where its record ends, who runs it, what is being said."""

    seq: int
    """The number of the last entry on record."""
    is_claimed: bool
    is_interrupted: bool
    sketches: Sequence[Sketch] = ()
    """The pieces of the answer that the record does not have yet, in order."""


@runtime_checkable
class Sketchbook(Protocol):
    """A journal that keeps the text of an answer while the model still writes it."""

    async def sketch(self, claim: Claim, piece: Sketch) -> bool:
        """Keep a piece until its answer is whole. Raise ClaimLost if the claim is no longer held.

        Return False, and keep nothing, if the record does not reach to where the piece says, or has an entry of its
        run behind that. Entries of other runs, as `note` puts them there, do not count. A piece that starts at 0
        replaces all others of the session. They are dropped by the append of a message, by a save and by a release
        under the claim, by a redaction and by an erasure; an archive leaves them out.
        """
        ...

    async def progress(self, session_id: str, *, after: int = 0) -> RunProgress:
        """Tell how far a session's run has come. Of the pieces, return the first and those from a character on.

        A piece that is damaged is left out, with all that follow it.
        """
        ...


def is_sketchbook(journal: object) -> TypeGuard[Sketchbook]:
    """Tell whether a journal is a Sketchbook. `isinstance` would walk the protocol's members for every run."""
    return callable(getattr(journal, "sketch", None))


class Waiting(msgspec.Struct, frozen=True):
    """A session with items in its inbox that nobody has taken."""

    session_id: SessionId
    owner: str | None
    priority: int
    since: float
    """When the first item came since nothing waited, in seconds since 1970."""
    count: int


class Running(msgspec.Struct, frozen=True):
    """A claim on a session: who holds it, and whether it has lapsed."""

    session_id: SessionId
    owner: str | None
    """Whose session it is."""
    holder: str
    since: float | None
    """When it was taken, in seconds since 1970 by the holder's clock; None if an older release has taken it."""
    expires: float
    lapsed: bool
    """Whether its lease has run out, or its holder was a process of this machine that has ended."""


PARKED = "parked"
"""The tag of sessions that are parked, and the kind of the entry on record that says why."""


class Parked(msgspec.Struct, frozen=True):
    """Why a session is parked, and since when."""

    reason: str
    tries: int
    at: str


SCHEDULE = "schedule:"
"""What the name of a timer begins with that is a schedule, and the key of each message that it sends."""


class Timer(msgspec.Struct, frozen=True):
    """An item that goes into a session's inbox at a time. One that repeats has a schedule."""

    session_id: SessionId
    name: str
    """Its name, which no other timer of the session has."""
    due: float
    """When it is to ring, in seconds since 1970."""
    entry: Entry | None = None
    """The item. A timer without one puts nothing into the inbox."""
    priority: int = 0
    cron: str | None = None
    timezone: str | None = None
    id: int = 0
    """The number that the store has given it. A timer that is replaced gets another."""

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


_FARTHEST = 10**12
_MOST_PRIORITY = 2**31 - 1
RECOVERY = _MOST_PRIORITY
"""The priority of sessions whose runs were killed: they do not wait behind messages that have just come."""


def check_priority(priority: object) -> None:
    """Raise InvalidData unless it is a whole number that every store can keep."""
    if type(priority) is not int or abs(priority) > _MOST_PRIORITY:
        problem = f"a priority is a whole number from {-_MOST_PRIORITY} to {_MOST_PRIORITY}, not {brief(priority)}"
        raise InvalidData("$.priority", problem)


def check_time(time: object, path: str) -> None:
    """Raise InvalidData unless it is a time in seconds since 1970."""
    if expect_number(time, path) > _FARTHEST:
        raise InvalidData(path, f"expected a time in seconds since 1970, got {brief(time)}")


@runtime_checkable
class Queue(Protocol):
    """A journal that tells what waits and what is run, rings timers, and shares rates between processes."""

    async def waiting(self, limit: int = 100, *, idle_only: bool = True) -> Sequence[Waiting]:
        """Return active sessions with items in their inboxes, the most urgent first, then the longest waiting.

        Those on which a claim stands are left out, unless `idle_only` is False. One whose claim has lapsed is there.
        """
        ...

    async def held(self, limit: int = 100) -> Sequence[Waiting]:
        """Return suspended sessions with items in their inboxes: those that wait behind a pause or a person."""
        ...

    async def in_turn(
        self, limit: int = 100, *, after: str | None = None, skip: Collection[str] = (), not_of: Collection[str] = ()
    ) -> Sequence[Waiting]:
        """Return active sessions with items in their inboxes that nobody runs, the most urgent first.

        Those of equal priority come owner by owner: the longest waiting of each, then the second of each. It begins
        with the owner whose name is next behind `after`; sessions without an owner count as those of one. Sessions in
        `skip` and those of owners in `not_of` are left out. It costs what it returns, however many wait.
        """
        ...

    async def has_waiting(self, session_id: str) -> bool:
        """Tell whether items wait in a session's inbox. Raise SessionNotFound if there is no such session.

        It is looked up under the lock that a post takes: a post that was under way has been committed by then.
        """
        ...

    async def running(self) -> Sequence[Running]:
        """Return every claim there is, those that have lapsed too, the oldest session first."""
        ...

    async def set_timer(self, timer: Timer, *, replace: bool = False) -> Timer:
        """Keep a timer. Return it with its number, or the one that is there already and asks for the same.

        Raise InvalidData if one of its name asks for something else, unless it is to be replaced. `due` alone makes no
        difference: a repeated request does not put a timer off. Raise SessionNotFound if there is no such session.
        """
        ...

    async def timers(self, session_id: str | None = None, *, limit: int = 100, after: int = 0) -> Sequence[Timer]:
        """Return timers in the order of their numbers: of one session or of all, those behind the number `after`."""
        ...

    async def due(self, at: float, *, limit: int = 100) -> Sequence[Timer]:
        """Return the timers that are to ring at or before a time, the earliest first. A damaged one is left out."""
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
        """Put a timer's item into its session's inbox. Return False, and do nothing, if somebody else has rung it.

        In the same commit the timer goes or, with `again`, is set to ring at that time. `entry` takes the place of the
        timer's own: an item that repeats needs a key of its own each time. Of several who ring a timer one puts it in,
        since its number and `due` are compared.

        If `most` items wait in the inbox already, the timer is put off instead: to `again`, or else to the time
        `later`. None is returned then.
        """
        ...

    async def drop_timer(self, session_id: str, name: str) -> bool:
        """Remove a timer. Return False if there is none of that name, or no such session."""
        ...

    async def reserve(self, name: str, *, cost: float, burst: float, most: float | None = None) -> float:
        """Take the next place in a rate that all processes share. Return how many seconds to wait for it.

        If that is longer than `most` seconds, no place is taken.
        Each place costs so many seconds; places for `burst` seconds may be taken at once after a silence. 10 a second
        with at most 20 at once is `cost=0.1, burst=2.0`.
        """
        ...


_DIGEST = re.compile("[0-9a-f]{64}")


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An access token, without its secret: whose sessions it reaches, and what may be done to them.

    A stored token with a field that this release does not know is refused: the field may forbid something.
    """

    digest: str
    """The SHA-256 of the secret, in hexadecimal."""
    owner: str | None
    """Whose sessions it reaches. None is an operator's token, which reaches everybody's."""
    may_write: bool
    """Whether sessions may be changed with it. Without that, they may only be read."""
    created_at: datetime
    expires_at: datetime | None = None
    name: str | None = None
    """A note that tells people what it is for."""

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
        """Return what people list and revoke it by: the beginning of its digest, which tells nobody the secret."""
        return self.digest[:12]

    def is_expired(self, at: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= at


def check_digest(digest: object) -> None:
    """Raise InvalidData unless it is a SHA-256 in hexadecimal. What was given is not repeated: it may be a secret."""
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidData("$.digest", "expected a SHA-256, as 64 hexadecimal digits in lower case")


def check_moment(time: object, path: str) -> None:
    """Raise InvalidData unless it is a time with a time zone."""
    if expect(time, datetime, path).tzinfo is None:
        raise InvalidData(path, "a time needs a time zone")


@runtime_checkable
class TokenBook(Protocol):
    """A store that keeps access tokens: their digests and what each may do, never a secret."""

    async def add_token(self, token: Token) -> None:
        """Keep a token. Raise InvalidData if there is one of its id already."""
        ...

    async def token(self, digest: str) -> Token | None:
        """Return the token of a digest, expired or not; None if there is none. Raise CorruptRecord if it is damaged."""
        ...

    async def tokens(self, owner: str | None = None) -> Sequence[Token]:
        """Return all tokens, or those of an owner, the oldest first. Expired ones are among them."""
        ...

    async def drop_token(self, token_id: str) -> bool:
        """Erase a token by its id, sound or damaged. Return False if there is none."""
        ...


def is_token_book(store: object) -> TypeGuard[TokenBook]:
    """Tell whether a store is a TokenBook. `isinstance` would walk the protocol's members each time."""
    return callable(getattr(store, "add_token", None))


class Outcome(StrEnum):
    """What has come of looking at a session."""

    DONE = "done"
    """Nothing is left to do."""
    WAITS = "waits"
    """For a person: who decides, or opens it again, has it looked at again."""
    BUSY = "busy"
    """Another process is running it: look again soon."""
    OWNER_BUSY = "owner_busy"
    """Its owner has as many runs as may be: look again soon, at one session of that owner."""
    FAILED = "failed"
    """It could not be run here: look again later."""
    PARKED = "parked"
    """It is closed until an operator opens it again."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker works."""

    concurrency: int = 16
    """How many sessions it runs at once."""
    lease: float = 20.0
    """For how many seconds a session is its own without a sign of life. At least 1."""
    drain: float = 60.0
    """How many seconds runs have to end when it is told to stop."""
    tries: int = 3
    """How often a run may die with its process until it is parked."""
    per_owner: int | None = None
    """How many sessions of one owner may be run at once, by all workers together."""
    least_priority: int | None = None
    """Leave sessions alone whose messages are less urgent."""
    retain_every: float | None = 600.0
    """How many seconds there are between two looks, by all workers together, for sessions whose time is over. None
    leaves that to others."""

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

    def takes(self, priority: int) -> bool:
        """Tell whether messages of a priority are urgent enough for this worker."""
        return self.least_priority is None or priority >= self.least_priority


Advance = Callable[[str], Awaitable[Outcome]]


class Dispatcher(Protocol):
    """Decides who looks at a session, and when. The store says what is to be done there, and who may do it.

    What it hands out is the id of a session, and nothing else. If that is lost, doubled, early or late, the worst is a
    delay: a worker looks for sessions that nobody was handed.
    """

    async def wake(self, session_id: str, *, priority: int = 0, owner: str | None = None) -> None:
        """Have somebody look at a session soon."""
        ...

    async def work(self, advance: Advance, options: WorkerOptions, stopped: asyncio.Event) -> None:
        """Hand sessions to this process until it is to stop, then wait for those that are under way.

        After `options.drain` seconds it returns all the same: the caller takes care of what is left.
        """
        ...


@runtime_checkable
class Looks(Protocol):
    """A dispatcher that finds by itself what waits in the store: to be told that something does is enough."""

    def look(self) -> None:
        """Look for what waits now."""
        ...


async def tell_of(dispatcher: Dispatcher, session_id: str, *, priority: int, owner: str | None = None) -> None:
    """Tell a dispatcher that something was put into a session's inbox.

    One that looks by itself keeps the order of what waits: a session that it is made to look at would come first.
    """
    if isinstance(dispatcher, Looks):
        dispatcher.look()
    else:
        await dispatcher.wake(session_id, priority=priority, owner=owner)


def is_queue(journal: object) -> TypeGuard[Queue]:
    """Tell whether a journal is a Queue. `isinstance` would walk the protocol's members each time."""
    return callable(getattr(journal, "waiting", None))


@runtime_checkable
class Ear(Protocol):
    """A journal that can be listened to: it tells at once that a session's record has grown, or a piece was kept."""

    def listening(self, session_id: str) -> AbstractAsyncContextManager[Callable[[float], Awaitable[None]]]:
        """While the block lasts, hear what is written. What it gives is called with the seconds to wait at most; it
        returns once something was written since it returned last, or since the block began."""
        ...


class Adopted(msgspec.Struct, frozen=True):
    """What a session took over from a branch at one time."""

    at: int
    """How many messages stood in the session's own log by then."""
    stretches: tuple[tuple[LogRef, int, int], ...]
    """The stretches of logs that it had not named in an earlier adoption, nor begun with, in the order of its view."""


@runtime_checkable
class Chronicle(Protocol):
    """A journal that tells what else than a session's own log its history is made of, at the cost of what it tells."""

    async def branches(self, session_id: str) -> Sequence[RunOnRecord]:
        """The runs that have logs of their own, oldest first."""
        ...

    async def adoptions(self, session_id: str, version: int) -> Sequence[Adopted]:
        """What was adopted by a version that tells of an adoption, and before it, oldest first."""
        ...

    async def names_of(self, logs: Collection[LogRef]) -> Mapping[LogRef, str]:
        """The names of logs that mean the same in every store, as in an `ArchivedSession`; none for an unknown log.

        A copy that a session keeps of another's log has the name of that log, and its messages have the same positions.
        """
        ...


@runtime_checkable
class Watch(Protocol):
    """A journal that tells when it has grown, so that nobody has to look again and again."""

    async def changed(self, session_id: str, after: int, most: float) -> None:
        """Return once a session's record goes beyond a number, or after at most so many seconds in any case."""
        ...


@runtime_checkable
class Versions(Protocol):
    """A store that lists the versions of a session at the cost of the page: no message is read."""

    async def versions(self, session_id: str, *, before: int | None = None, limit: int = 50) -> Sequence[SessionHead]:
        """Return at most `limit` versions, newest first: the newest of all, or those older than the number `before`.

        The page after that is asked for with the version of its last one. A version that is damaged is left out.
        Raise SessionNotFound if there is no such session.
        """
        ...


FORGOTTEN = "forgotten"
"""The kind of entries that stand in for those of forgotten runs, and the id of the message that ends a log which has
forgotten its last one: numbers go on behind them."""


class Forgotten(msgspec.Struct, frozen=True):
    """What was erased with the older versions of a session."""

    versions: int = 0
    messages: int = 0
    """Those that nothing shows any more."""
    bytes: int = 0
    """What the erased rows held: of versions, messages, files, values and the record."""


@runtime_checkable
class Forgets(Protocol):
    """A store that can erase the older versions of a session, and all that only they show or need."""

    async def forget(self, session_id: str, *, before: int) -> Forgotten:
        """Erase for good the versions older than `before`; the newest stays in any case.

        With them go the messages that nothing shows any more: no version that stays, no fork, no run that stays. So do
        the runs of these messages, their files, and their words in the search index. Idempotency keys stay.

        If anything was erased the session moves on by one version, which says in `info.first_version` which is the
        oldest now: to load an older one raises VersionForgotten. SessionBusy while the session is being run,
        RunInterrupted while its last run waits to be recovered, CorruptRecord if a version that stays is damaged.
        """
        ...

    async def kept_of_log(self, session_id: str) -> Sequence[tuple[int, int]]:
        """Return the stretches of a session's log that it has: all of it, unless older versions were forgotten."""
        ...


class ArchivedSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session whole, as it moves between stores. Its logs are named so that the names mean the same anywhere.

    A log's name is its session's id, or `id/branch` for a branch's log. What is left of a log whose session has been
    erased has a name with a colon in it, which no session's has.
    """

    session_id: SessionId
    heads: tuple[bytes, ...]
    """The versions, oldest first, as `stores.format.heads` writes them, with logs by name and no operation id.

    The first is version 1, unless older ones were forgotten: then it is the `first_version` of the newest."""
    values: Mapping[str, bytes]
    """What the heads name by hash."""
    logs: Mapping[str, Mapping[int, bytes]]
    """Messages by position: of the session's own logs, shown by a version or not. Forgotten ones are missing."""
    lent: Mapping[str, Mapping[int, bytes]] = EMPTY
    """Messages of others' logs that its versions name, if those are carried along."""
    blobs: Mapping[str, bytes] = EMPTY
    """The images and files that these messages, and the items of its inbox, name by the SHA-256 of their bytes."""
    owners: Mapping[str, float] = EMPTY
    """The living sessions whose logs its versions name, and when they were created, in seconds since 1970."""
    entries: tuple[Entry, ...] = ()
    """The record; the first entry has sequence number 1."""
    inbox: tuple[Entry, ...] = ()
    """The items of the inbox that are not taken yet. They are numbered anew from 1."""
    keys: Mapping[str, tuple[str, int]] = EMPTY
    """Idempotency keys: each one's digest, and the version that its run has saved."""
    interrupted: bool = False
    """Whether its last run was killed: a claim lies on it that nobody gave back."""


@runtime_checkable
class Attachments(Protocol):
    """A store that keeps images and files apart from the messages that show them, each once under its hash."""

    async def attachments(self, session_id: str, hashes: Collection[str]) -> Mapping[str, bytes]:
        """Return the bytes that messages of a session, or those that it shows of others, name by their SHA-256.

        InvalidData if none of them names one of the hashes: to know a hash is not enough. CorruptRecord, with the
        place of the message, if bytes are missing or are others.
        """
        ...


def keeps_files(store: object) -> TypeGuard[Attachments]:
    """Tell whether a store is an Attachments. `isinstance` would walk the protocol's members at every run."""
    return callable(getattr(store, "attachments", None))


@runtime_checkable
class Archive(Protocol):
    """A store that gives out and takes in sessions whole. `stores.jobs.archive` does it for every engine."""

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        """A session as it stands, read in one snapshot; SessionNotFound if there is none, CorruptRecord if damaged.

        SessionBusy while its claim stands: a run that goes on here must not be recovered elsewhere too. A claim that
        has lapsed makes it `interrupted`. What it shows of erased sessions is always carried along as `lent`; what
        it shows of living ones only if it is to stand `alone`.
        """
        ...

    async def restore(self, archived: ArchivedSession) -> bool:
        """Write a session whole, in one commit: versions, times, positions, record, keys, and a lapsed claim if it
        was interrupted. False if it is there already and the same; SessionConflict if it is there and another.

        A stretch of another's log is linked if that session is here (the same id and time of creation) and holds
        these very messages; else it is kept, from `lent`, as a log of this session's own under the name `~name`;
        else SessionNotFound. A dump names such a log by what follows the `~`, as `lent`: moving on changes nothing.
        """
        ...


@runtime_checkable
class ArchivingStore(SessionStore, Archive, Protocol):
    """A store whose sessions can be moved."""


class Problem(msgspec.Struct, frozen=True):
    """Something that is wrong in a store: with what, what it is, and what to do about it."""

    session_id: str | None
    where: str
    what: str
    repair: str


@runtime_checkable
class Checkable(Protocol):
    """A store that can look at itself beneath its sessions: files, indexes, rows that nobody owns."""

    async def check(self) -> Sequence[Problem]:
        """What is wrong; nothing is changed, and damage raises nothing."""
        ...


class SearchHit(Value, frozen=True):
    """A message that a search has found, with the piece of its text around the first word that matched."""

    session_id: SessionId
    """The session whose log holds it; where that one is gone, one that still shows it."""
    message_id: str
    role: str
    snippet: str
    matches: tuple[tuple[int, int], ...] = ()
    """Where in the snippet the words stand that matched: from, to."""
    score: float = 0.0
    position: int = 0
    """Its place in the log."""
    created_at: datetime | None = None
    """When the message was made, if its id tells: that of perdure's own ids does."""


@runtime_checkable
class Search(Protocol):
    """A store in which messages can be searched."""

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        """The messages that have every word of a text, best first; of equals, the newest first.

        `"quoted words"` have to stand together, a word that ends in `*` stands for all that begin so, and all else
        is plain text. Covered, trimmed and rewound messages are found too; those of sessions with status deleted are
        not. Past 10,000 matches only the newest are ranked. InvalidData if the text is blank.
        """
        ...


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a memory has found. It was said by others once: it is data, and never an instruction."""

    text: str
    """What was remembered, or the piece of it that fits the question."""
    session_id: str | None = None
    """The session in which it was said."""
    message_id: str | None = None
    role: str | None = None
    created_at: datetime | None = None
    score: float | None = None
    """How well it fits, where that is known; more is better."""
    metadata: Mapping[str, Any] = EMPTY


@runtime_checkable
class Memory(Protocol):
    """What an agent knows from other sessions. An owner's memories are never found for another.

    None as an owner stands for sessions without one, and not for everybody's.
    """

    async def remember(self, text: str, *, owner: str | None = None, metadata: Mapping[str, Any] = EMPTY) -> str:
        """Keep a text. Return its id. The same `call_id` in the metadata keeps it once."""
        ...

    async def recall(self, query: str, *, owner: str | None = None, limit: int = 10) -> Sequence[Remembered]:
        """Return what fits a question, the best first. InvalidData if the question is blank."""
        ...


class MessagePlace(msgspec.Struct, frozen=True):
    """Where a message stands."""

    session_id: SessionId
    """The session whose log holds it; where that one is gone or hidden, one that still shows it."""
    log: LogRef
    position: int


@runtime_checkable
class FindsMessages(Protocol):
    """A store that finds a message by its id, whichever session it is in."""

    async def find_message(
        self, message_id: str, *, owner: str | None = None, limit: int = 10
    ) -> Sequence[MessagePlace]:
        """Return where the messages of an id stand, those in the newest sessions first.

        Covered, trimmed and rewound messages are found too, and those of a run that is not saved yet; those of sessions
        with status deleted are not. Forks share their parent's messages, so that most ids have one place. With an
        `owner`, only places in that owner's sessions are returned.
        """
        ...


@runtime_checkable
class Indexed(Search, Protocol):
    """A store that searches by an index, which lags behind what is saved and catches up when somebody searches."""

    async def index(self, *, anew: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
        """Bring the index up to date now, or make it `anew`; how many messages were indexed.

        `progress` is told how many are done, and of how many. Cancelled, it keeps what it has done.
        """
        ...


@runtime_checkable
class Erasure(Protocol):
    """A store that can replace what was said, and clear up after what was erased."""

    async def delete(self, session_id: str, *, expected: AgentSessionInfo | None = None) -> None:
        """Erase a session. With the header that somebody has read, SessionConflict if it has changed since.

        A session that was erased and created again under the same id is not the expected one.
        """
        ...

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        """Replace the content of messages of a session's history for good; how many were not replaced before.

        It goes from every version, from every session that shows them, from the summaries that cover them and from
        what runs have recorded of them. Roles, ids, the names of tools, and times stay. Every session concerned has
        an entry `redacted` put on its record. InvalidData, and nothing is changed, if one of the ids is unknown;
        SessionBusy while one of the sessions is being run.
        """
        ...

    async def gc(self) -> int:
        """Erase what stands in logs and nothing points to; how many messages that were."""
        ...


@runtime_checkable
class BulkErasure(Protocol):
    """A store that erases many sessions at once, at less cost than one by one."""

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        """Erase sessions, except those that are being run, under hold, or not there. Return the ids erased."""
        ...

    async def delete_tree(self, session_id: str) -> Sequence[SessionId]:
        """Erase a session with those of its sub-agents, and of theirs, in one commit. Return the ids, its own last.

        Raise SessionNotFound if there is none, SessionBusy while one of them is being run, SessionHeld if a hold is on
        one of them; then nothing was erased.
        """
        ...


class Due(msgspec.Struct, frozen=True):
    """A session as it was when it was found to have been kept for long enough."""

    session_id: SessionId
    version: int
    created: float

    @classmethod
    def of(cls, info: AgentSessionInfo) -> Due:
        return cls(info.id, info.version, info.created_at.timestamp())


class WhyLeft(StrEnum):
    """Why a session that has been kept for long enough stays for now, and those of its sub-agents with it."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Its run was killed, and waits to be continued."""
    APPROVAL = "approval"
    """Its run waits for a person, or for a result from outside."""
    QUEUED = "queued"
    """Messages wait in its inbox."""
    TIMER = "timer"
    """Something is to be sent later, or a pause is to end."""
    HOLD = "hold"
    CHANGED = "changed"
    """It was changed, or erased, since it was found."""
    DAMAGED = "damaged"


class Left(msgspec.Struct, frozen=True):
    """A session that stays for now, though it has been kept for long enough."""

    session_id: SessionId
    why: WhyLeft
    detail: str = ""
    """The session of a sub-agent that it stays for, the tag of a hold and who has it, or what is damaged."""


class Erased(msgspec.Struct, frozen=True):
    """What retention has erased, or would."""

    erased: Sequence[SessionId] = ()
    """The sessions that are gone, sub-agents' included."""
    left: Sequence[Left] = ()
    versions: int = 0
    messages: int = 0
    """Those that nothing shows any more."""
    bytes: int = 0
    """What the erased rows held: of versions, messages, files, values and the record."""
    pruned: Sequence[SessionId] = ()
    """The sessions whose older versions are gone."""

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
    """A store that keeps sessions for as long as rules say, and knows of holds.

    No verb of such a store erases, forgets or redacts anything of a session that has a tag `hold` or `hold:…`, nor of
    those of its sub-agents: it raises SessionHeld. `delete_many` and `retire` leave such sessions.
    """

    async def holds(self, session_ids: Iterable[str]) -> Mapping[SessionId, str]:
        """Return those of some sessions that a hold is on, by a tag of their own or of their caller's, with the tag."""
        ...

    async def own_rules(self) -> Sequence[Retention]:
        """Return every rule that a session has of its own, each once. `list(tag=keep_mark(rule))` lists those."""
        ...

    async def overgrown(
        self, versions: int, *, after: str = "", limit: int = 200
    ) -> tuple[Sequence[AgentSessionInfo], str | None]:
        """Return a page of sessions that have more than so many versions before the newest, and where the next begins.

        It has no sub-agents' sessions. The page may be short, or empty, and others follow.
        """
        ...

    async def retire(self, due: Sequence[Due]) -> Erased:
        """Erase sessions, with those of their sub-agents, in one commit. Those stay in which something goes on.

        One stays that is another, or of another version, than when it was found; that is being run, or whose run was
        killed; that waits for a person, has messages in its inbox, or a timer; or that a hold is on. So does one if
        any of this is so of one of its sub-agents' sessions. `left` says which and why.
        """
        ...

    async def prune(self, due: Due, *, before: int) -> Erased:
        """Forget the versions of a session before one, as `forget` does, unless it has changed or `forget` refuses."""
        ...

    async def rehearse(self, batches: Sequence[Sequence[Due]], prunes: Sequence[tuple[Due, int]] = ()) -> Erased:
        """Return what `retire` and then `prune` would come to, all of it one after the other. Nothing is changed."""
        ...


class DataKey(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A key that rows are sealed with. Its id is stored with each of them; its secret is never shown."""

    id: bytes
    """Eight bytes, never used for another key."""
    secret: bytes
    """32 bytes, from which the keys that seal, name and index are derived."""

    def __repr__(self) -> str:
        return f"DataKey({self.id.hex()})"


@runtime_checkable
class KeyRing(Protocol):
    """The keys that a store is sealed with, kept outside of it. Each owner has a data key of their own.

    Sessions without an owner share one, whose owner is None. Its methods are called in any thread and at every read and
    write: they answer from memory where they can. A key that was returned must already be safe on its disk.
    """

    def current(self, owner: str | None) -> DataKey:
        """Return the key that is used for what an owner writes now. Make one if there is none."""
        ...

    def first(self, owner: str | None) -> DataKey | None:
        """Return the oldest key of an owner, which names and words are derived from; None if there is none."""
        ...

    def find(self, key_id: bytes) -> DataKey:
        """Return a key by its id. Raise KeyMissing, KeyForgotten or WrongKey if it cannot be used."""
        ...

    def owners(self) -> Sequence[str | None]:
        """Return the owners who have a key."""
        ...

    def forget(self, owner: str | None) -> int:
        """Destroy all keys of an owner. Return how many there were."""
        ...


@runtime_checkable
class SealedStore(Protocol):
    """A store that can have keys."""

    @property
    def keys(self) -> KeyRing | None:
        """Return the ring that what it writes is sealed with; None if it has none."""
        ...


def keys_of(store: SessionStore) -> KeyRing | None:
    """Return the keys that a store was opened with; None if it has none."""
    return store.keys if isinstance(store, SealedStore) else None
