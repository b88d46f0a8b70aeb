"""Connect: from a URL to sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from perdure.errors import ConfigurationError
from perdure.loop.factory import Capability, LoopFactory, MakeContext, MakeTitle, require_provider
from perdure.loop.filters import InputFilter
from perdure.loop.subagents import SubagentPolicy
from perdure.loop.tool_use import Concurrency
from perdure.model.checks import expect
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.retention import Retention, RetentionPolicy
from perdure.protocols import Driver, KeyRing, SessionController, SessionStore, Terms, Tool, Toolset
from perdure.runtime.bus import EventBus
from perdure.sessions.sessions import Sessions
from perdure.stores.urls import store_of

if TYPE_CHECKING:
    from perdure.loop.compaction.auto import AutoCompaction
    from perdure.loop.drivers.pacing import Pace, Rate
    from perdure.redaction.redactors import Redactor
    from perdure.redaction.texts import Redaction, TextFunction
    from perdure.sessions.blocking import BlockingSessions
    from perdure.telemetry.telemetry import Telemetry


class LoopOptions(TypedDict, total=False):
    """The options of the `LoopFactory` that runs agents."""

    tools: Iterable[Tool | Toolset | Callable[..., Any]]
    """Tools, toolsets such as `mcp(…)`, and plain functions, which become tools."""
    model: ModelConfig | str | None
    """The model for sessions that are created here, by name or as a `ModelConfig`."""
    driver: Driver | None
    """A driver of your own, in place of the one that the model's provider has."""
    capabilities: Mapping[str, Capability] | None
    """Capabilities by the names that definitions use: each adds tools, guards or interceptors to a run."""
    subagents: Sequence[AgentDefinition]
    """Definitions of agents that other agents may call as tools."""
    subagent_policy: SubagentPolicy | None
    """The limits for agents that call agents."""
    interceptors: Sequence[Any]
    """Objects that see, change or block model calls and tool calls. See `Interceptor`."""
    input_filters: Sequence[InputFilter]
    """Functions that may reject or mark what a user says before a model is asked."""
    concurrency: Concurrency
    """The way in which the tool calls of one step are made: "parallel", "sequential", or how many at once."""
    keep_traces: bool
    """False to leave the tool calls of earlier runs out of prompts."""
    max_result_chars: int
    """The number of characters of a tool's result that the model is shown."""
    compaction: AutoCompaction | None
    """An `AutoCompaction` that shortens the view when the model's window fills."""
    context: MakeContext | None
    """A function of the session and the `context_data`. It makes the context if the caller is gone."""
    title: MakeTitle | None
    """A function of the session after its first answer, which returns its name."""
    telemetry: Telemetry | None
    """A `Telemetry` by which runs are traced and measured."""


def connect(
    url: str | SessionStore,
    *,
    owner: str | None = None,
    live: int = 128,
    events: EventBus | None = None,
    controller: SessionController | None = None,
    grace: float = 5.0,
    filters: Iterable[str] = (),
    recover: bool = False,
    lease: float = 30.0,
    per_owner: int | None = None,
    rate: Rate | None = None,
    keep: Retention | RetentionPolicy | None = None,
    redact: Iterable[Redactor | TextFunction] = (),
    keys: KeyRing | None = None,
    **options: Unpack[LoopOptions],
) -> Sessions:
    """Return the sessions in a store. The `url` is `memory://`, `file://directory`, `sqlite:///file.db` or `postgresql://…`.

    A store object is accepted in place of a URL. Use the sessions with `async with`. With an `owner`, every verb sees
    only that owner's sessions. `live` is the number of open sessions that are kept in memory. `events` is called with
    every event. `controller` is called at every stage of creating, loading and saving a session. When the connection is
    closed, runs have `grace` seconds to end. After that they are interrupted, to be recovered later. `filters` are the
    keys of sessions' metadata by which `list(metadata=…)` can filter.

    With `recover`, killed runs are continued in the background, when the connection opens and while it is open. A
    message or a decision for such a session waits until that has ended. `perdure.recovery` logs what was continued, and
    what cannot be. A run whose process gives no sign of life for `lease` seconds counts as killed. `per_owner` is the
    number of sessions of one owner that may be run at once. Beyond that, sending a message raises OwnerBusy. `rate`
    limits how often models are asked with one key, by all users of the store. It is "60/m", a `RateLimit`, or a mapping
    of these by provider. A model call waits for its turn, and raises RateLimited if the run's time is up before.

    `keep` says how long sessions are kept. Workers and `apply_retention()` erase those whose time is over; connecting
    erases nothing. `redact` are redactors and functions over texts, such as `perdure.redactors.DEFAULT`. They change
    every text before it is stored, emitted, or sent to the model. With `keys`, a `FileKeyRing` or a class of your own,
    all content is sealed with a key for each owner.

    The other options are for the `LoopFactory` that runs agents. `context` is a function of the session and the
    `context_data` that a caller left. It makes `ToolContext.context` for tools if the caller is gone. `title` is a
    function of the session after its first answer. Its result becomes the session's name, unless the session has one or
    the function takes more than 10 seconds. With `telemetry`, a `Telemetry`, runs are traced and
    measured by OpenTelemetry.

    A `model` is stored with sessions that are created here. An existing session that keeps another model is changed to
    it when it is first sent to, by a `ChangeModel` on record. A definition's own model stays.
    """
    for name in options.keys() - LoopOptions.__annotations__.keys():
        own = ("owner", "live", "events", "controller", "grace", "filters", "recover", "lease", "per_owner", "rate")
        known = ", ".join((*own, "keep", "redact", "keys", *LoopOptions.__annotations__))
        raise ConfigurationError(f"connect() has no option {name!r}. It has: {known}.")
    bus = EventBus() if events is None else expect(events, EventBus, "$.events")
    store, redaction = _redacted(store_of(url, cache=live, keys=keys), redact)
    loops = LoopFactory(events=bus, pace=_pace(rate, store), redact=redaction, **options)
    if loops.model is not None and options.get("driver") is None:
        require_provider(loops.model)
    return Sessions(
        store,
        loops,
        events=bus,
        owner=owner,
        live=live,
        model=loops.model,
        controller=controller,
        grace=grace,
        filters=filters,
        recover=recover,
        terms=Terms(lease=lease, per_owner=per_owner),
        keep=keep,
    )


def _redacted(store: SessionStore, redact: Iterable[Redactor | TextFunction]) -> tuple[SessionStore, Redaction | None]:
    """Return the store, behind redactors if any are given, and the redaction that they apply."""
    there: Redaction | None = getattr(store, "redaction", None)
    if redact == ():  # the default, for which nothing is imported
        return store, there
    from perdure.redaction.texts import Redaction
    from perdure.stores.redacting import RedactingStore

    redaction = Redaction.of(redact)
    if redaction is None:
        return store, there
    if there is not None:
        raise ConfigurationError("This store redacts already. Give all redactors to it, or to connect(redact=…).")
    return RedactingStore(store, redaction), redaction


def _pace(rate: Rate | None, store: SessionStore) -> Pace | None:
    if rate is None:
        return None
    from perdure.loop.drivers.pacing import Pace

    return Pace(rate, store)


def connect_blocking(
    url: str | SessionStore,
    *,
    owner: str | None = None,
    live: int = 128,
    events: EventBus | None = None,
    controller: SessionController | None = None,
    grace: float = 5.0,
    filters: Iterable[str] = (),
    recover: bool = False,
    lease: float = 30.0,
    per_owner: int | None = None,
    rate: Rate | None = None,
    keep: Retention | RetentionPolicy | None = None,
    redact: Iterable[Redactor | TextFunction] = (),
    keys: KeyRing | None = None,
    **options: Unpack[LoopOptions],
) -> BlockingSessions:
    """Return the same sessions for scripts and notebooks. Use it with `with`; no verb is awaited.

    The options are those of `connect`. A SQLite file is opened with `commit_in_loop`, unless its URL says otherwise.
    """
    from perdure.sessions.blocking import BlockingSessions

    # The thread's loop has no other work, so a commit may block it. That is faster than another thread.
    store = store_of(url, cache=live, commit_in_loop=True, keys=keys)
    shared: dict[str, Any] = {"owner": owner, "live": live, "grace": grace, "filters": filters, "recover": recover}
    shared |= {"lease": lease, "per_owner": per_owner, "rate": rate, "keep": keep, "redact": redact}
    return BlockingSessions(connect(store, events=events, controller=controller, **shared, **options))
