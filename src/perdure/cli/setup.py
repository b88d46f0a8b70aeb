"""The way from options, environment and config files to open sessions."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import click

from perdure.cli.options import settings_of
from perdure.errors import ConfigurationError
from perdure.sessions.default_store import Chosen, as_url, configured, default_store, path_of

if TYPE_CHECKING:
    from perdure.actions.definition import ChangeModel
    from perdure.keys import FileKeyRing
    from perdure.loop.drivers.pacing import Pace
    from perdure.loop.mcp.server import McpServer
    from perdure.model.definition import AgentDefinition
    from perdure.model.retention import RetentionPolicy
    from perdure.model.session import AgentSession
    from perdure.protocols import SessionStore, Toolset
    from perdure.redaction.texts import Redaction
    from perdure.sessions.chat import Chat
    from perdure.sessions.sessions import Sessions
    from perdure.telemetry.telemetry import Telemetry

T = TypeVar("T")
_OF_OPERATORS = ("worker", "queue", "schedule", "serve")
"""The commands of operators, who may never have talked to an agent."""
_OF_KEEPERS = ("backup", "fsck", "purge", "copy", "export")
"""The commands that would do nothing in a new store, and would look as if all was well."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Carry out a command's work."""
    return asyncio.run(work)


def on_sessions(
    ctx: click.Context,
    work: Callable[[Sessions], Awaitable[T]],
    *,
    must_exist: bool = True,
    begins: bool = False,
    filters: Iterable[str] = (),
) -> T:
    """Carry out work on the sessions that the options name."""

    async def opened_and_done() -> T:
        async with opened(ctx, must_exist=must_exist, begins=begins, filters=filters) as sessions:
            return await work(sessions)

    return run(opened_and_done())


def opened(
    ctx: click.Context,
    *,
    must_exist: bool = False,
    begins: bool = False,
    filters: Iterable[str] = (),
    serves: bool = False,
    rate: str | None = None,
    grace: float = math.inf,
    tools: Iterable[Toolset] = (),
    keep: RetentionPolicy | None = None,
) -> Sessions:
    """Return the sessions that the options name, to be used with `async with`.

    `must_exist` refuses to make a new store. `begins` is for a new session: the first --agent is its agent. `serves` is
    for a command that runs many sessions at once. `rate` limits how often models are asked. `grace` is how long runs
    may take at the end. `tools` are added to those that the options name. `keep` says how long sessions are kept.
    """
    from perdure.cli.tool_files import context_of, read_tool_file
    from perdure.loop.factory import LoopFactory
    from perdure.runtime.bus import EventBus
    from perdure.sessions.sessions import Sessions
    from perdure.stores.urls import store_of

    url = store_url(ctx).value
    require_kind(url)
    if must_exist:
        require_store(ctx)
    chosen, agents = model_name(ctx), typed_agents(ctx)
    # Most commands have nothing else to do while they wait for the disk, so they commit in the event loop's own thread.
    store = store_of(url, commit_in_loop=not serves, keys=keys_in(ctx))
    redaction = _redaction(ctx)
    if redaction is not None:
        from perdure.stores.redacting import RedactingStore

        store = RedactingStore(store, redaction)
    bus, files = EventBus(), [read_tool_file(file) for file in settings_of(ctx).tools]
    loops = LoopFactory(
        model=chosen.value if chosen else None,
        tools=[*(tool for file in files for tool in file.tools), *_mcp_servers(ctx), *tools],
        context=context_of(files),
        subagents=_each_once([*(agents[1:] if begins else agents), *(one for file in files for one in file.subagents)]),
        events=bus,
        pace=None if rate is None else _pace(rate, store),
        redact=redaction,
        telemetry=_telemetry(ctx),
    )
    # Not by connect(), which changes the model of sessions. A default in a file must not do that: use_model() does.
    # By default, a command first sends the messages that others have queued behind its run, however long that takes.
    # Ctrl-C ends it.
    return Sessions(store, loops, events=bus, owner=owner_of(ctx), grace=grace, filters=filters, keep=keep)


def _each_once(agents: Iterable[AgentDefinition]) -> list[AgentDefinition]:
    """Return sub-agents that an --agent and a file of --tools both name as one, if the two are the same."""
    from perdure.cli.tool_files import SUBAGENTS

    found: dict[str, AgentDefinition] = {}
    for agent in agents:
        if found.setdefault(agent.name, agent) != agent:
            raise ConfigurationError(
                f"Two sub-agents are named {agent.name!r}, and they differ. "
                f"Name it once: with --agent, or in the list {SUBAGENTS} of a file of --tools."
            )
    return list(found.values())


def _pace(rate: str, store: SessionStore) -> Pace:
    from perdure.loop.drivers.pacing import Pace, rate_of

    return Pace(rate_of(rate), store)


def _redaction(ctx: click.Context) -> Redaction | None:
    """Return the redaction of texts before they are stored, as options, the environment or a config file name it.

    An option adds to the others, and never takes a redactor away.
    """
    settings = settings_of(ctx)
    is_typed = settings.redact or bool(settings.redactor)
    chosen = _chosen_names(ctx, is_typed=is_typed)
    if chosen is None and not is_typed:
        return None
    names = [] if chosen is None else [each.strip() for each in chosen.value.split(",")]
    if chosen is None or settings.redact:
        names.insert(0, "default")
    from perdure.redaction.redactors import named
    from perdure.redaction.texts import Redaction

    return Redaction.of(named(*filter(None, (*names, *settings.redactor))))


def _chosen_names(ctx: click.Context, *, is_typed: bool) -> Chosen | None:
    """Return the names in the environment or in a config file. An empty text is refused, unless an option is typed."""
    value = os.environ.get("PERDURE_REDACT")
    chosen = configured("redact") if value is None else Chosen(value, "PERDURE_REDACT")
    if chosen is None or chosen.value.strip(", "):
        return chosen
    if is_typed:
        return None
    # An empty name would quietly mean that nothing is replaced.
    where = chosen.by if value is not None else f"The line redact in {chosen.by}"
    advice = "Name redactors, such as default,email, or leave it out to store texts as they are."
    raise click.UsageError(f"{where} is empty. {advice}", ctx)


def _telemetry(ctx: click.Context) -> Telemetry | None:
    settings = settings_of(ctx)
    if settings.telemetry is None:
        if settings.telemetry_content:
            raise click.UsageError("--telemetry-content says what is traced. Add --telemetry console or otlp.", ctx)
        return None
    from perdure.cli.tracing import telemetry_to

    return telemetry_to(settings.telemetry, content=settings.telemetry_content)


def _mcp_servers(ctx: click.Context) -> list[McpServer]:
    if not settings_of(ctx).mcp:
        return []
    from perdure.loop.mcp.server import mcp

    return [mcp(each) for each in settings_of(ctx).mcp]


def store_url(ctx: click.Context) -> Chosen:
    """Return the store's URL: of --store, PERDURE_STORE, a config file, or a file in the user's data directory."""
    given = _typed(ctx, "store")
    return default_store() if given is None else Chosen(as_url(given), "--store")


def ring_path(ctx: click.Context) -> str | None:
    """Return the path of the key ring, if one is named: by --keys, PERDURE_KEYS, or a config file."""
    # An empty variable is most often a mistake in a script, and would quietly leave everything unsealed.
    if _typed(ctx, "keys") is None and os.environ.get("PERDURE_KEYS") == "":
        raise click.UsageError("PERDURE_KEYS is empty. Name a key ring, or unset it to write what nobody has sealed.")
    chosen = _chosen(ctx, "keys", "PERDURE_KEYS")
    return chosen.value if chosen else None


def keys_in(ctx: click.Context) -> FileKeyRing | None:
    """Return the key ring that the options name, or None."""
    path = ring_path(ctx)
    if path is None:
        return None
    from perdure.keys import ring_at

    return ring_at(path)


def owner_of(ctx: click.Context) -> str | None:
    """Return the owner whose sessions a command sees. None means those of everybody."""
    # An empty name would quietly mean everybody.
    if _typed(ctx, "owner") is None and os.environ.get("PERDURE_OWNER") == "":
        raise click.UsageError("PERDURE_OWNER is empty. Name an owner, or unset it to see everybody's sessions.")
    chosen = _chosen(ctx, "owner", "PERDURE_OWNER")
    if chosen is not None and not chosen.value:
        raise click.UsageError(f"The owner in {chosen.by} is empty. Name one, or take the line out.")
    return chosen.value if chosen else None


def model_name(ctx: click.Context) -> Chosen | None:
    return _chosen(ctx, "model", "PERDURE_MODEL")


def typed_agents(ctx: click.Context) -> list[AgentDefinition]:
    """Return the agents that --agent names, in order."""
    from perdure.definition_files import load_definition

    files = settings_of(ctx).agent
    if "" in files:
        raise click.UsageError("--agent is empty. Name a file, or leave it out.", ctx)
    return [load_definition(file) for file in files]


def agent_of(ctx: click.Context) -> AgentDefinition | None:
    """Return the agent of a new session: the first of --agent, or a config file's. None means the plain assistant.

    If --model is given, it is the agent's model.
    """
    from msgspec.structs import replace

    from perdure.definition_files import load_definition

    typed, default = typed_agents(ctx), configured("agent")
    agent = typed[0] if typed else load_definition(default.value) if default else None
    if agent is not None and settings_of(ctx).model:
        agent = replace(agent, model=settings_of(ctx).model)
    return agent


async def begun(ctx: click.Context, sessions: Sessions, session_id: str | None = None) -> Chat:
    """Return a new session. Raise ConfigurationError, and create none, if its model is missing or unknown."""
    from perdure.sessions.talking import ASSISTANT

    agent = agent_of(ctx)
    # Before the session exists, or a first try with a wrong name would leave an empty session behind.
    await sessions.loops.require_known(sessions.loops.model_of(agent or ASSISTANT))
    return await sessions.open(session_id, agent)


async def continued(ctx: click.Context, sessions: Sessions, session_id: str) -> Chat:
    """Return an existing session. If --agent names files, one of them has to define its agent."""
    agents = typed_agents(ctx)
    own = (await sessions.info(session_id)).agent_name
    return await sessions.open(session_id, next((each for each in agents if each.name == own), (*agents, None)[0]))


async def use_model(ctx: click.Context, sessions: Sessions, session_id: str) -> None:
    """Make an existing session use the model that is named for it, from now on."""
    change = _model_change(ctx, sessions, await sessions.session(session_id))
    if change is not None:
        await sessions.execute(session_id, change)


def use_model_in_run(ctx: click.Context, sessions: Sessions) -> None:
    """Make the next run of a session use the model that is named for it. A run that is refused changes nothing."""
    sessions._connection.model_for = partial(_model_change, ctx, sessions)


def _model_change(ctx: click.Context, sessions: Sessions, session: AgentSession) -> ChangeModel | None:
    """Return the change to the model that --model names, if a session keeps another one.

    A model of the environment or of a config file is for sessions that keep none.
    """
    from perdure.actions.definition import ChangeModel
    from perdure.model.definition import ModelConfig

    wanted, default = settings_of(ctx).model, sessions.loops.model
    if wanted is None and default is None:
        return None
    kept = session.state.model_for(session.definition)
    if wanted is not None and (kept is None or kept.name != wanted):
        return ChangeModel(ModelConfig(wanted))
    return ChangeModel(default, as_default=True) if kept is None else None


def shown_url(url: str) -> str:
    """Return a store's URL without the password that it may contain. Of its options only the schema is shown."""
    try:
        parts = urlsplit(url)
        if parts.password is None and not parts.query:
            return url
        host = parts.netloc.rpartition("@")[2]
        user = f"{parts.username}:…@" if parts.password else f"{parts.username}@" if parts.username else ""
        options = parts.query.split("&") if parts.query else []
        schema = [each for each in options if each.startswith("schema=")]
        shown = "&".join([*schema, *(["…"] if len(options) > len(schema) else [])])
        return urlunsplit((parts.scheme, user + host, parts.path, shown, ""))
    except ValueError:
        return url.partition("://")[0] + "://…"


def _chosen(ctx: click.Context, name: str, variable: str) -> Chosen | None:
    given = _typed(ctx, name)
    if given is not None:
        return Chosen(given, f"--{name}")
    value = os.environ.get(variable)
    return Chosen(value, variable) if value else configured(name)


def _typed(ctx: click.Context, name: str) -> str | None:
    given: str | None = getattr(settings_of(ctx), name)
    if given == "":
        raise click.UsageError(f"--{name} is empty. Name one, or leave it out.", ctx)
    return given


def require_store(ctx: click.Context) -> None:
    """Refuse to make a new store when the name of an existing one was probably mistyped."""
    from perdure.cli.hints import command
    from perdure.errors import RestoreUnfinished
    from perdure.stores.engine import unfinished

    chosen = store_url(ctx)
    path = path_of(chosen.value)
    if path is None or path.exists():
        return
    if path.name and unfinished(path).exists():
        raise RestoreUnfinished(path, unfinished(path))
    if chosen.by == "default" and ctx.info_name in _OF_KEEPERS:
        raise ConfigurationError(f"No store is at {path}, the default. Name yours: --store URL, or set PERDURE_STORE.")
    if chosen.by != "default":
        if ctx.info_name in _OF_OPERATORS:
            leave = command("send", "--new", "TEXT", "--no-wait", begins=True)
            leave += "" if settings_of(ctx).model or settings_of(ctx).agent else " --model MODEL"
            begin = f"Check --store and PERDURE_STORE. The first process that connects to it makes it: {leave}"
            raise ConfigurationError(f"No store is at {path}. {begin}")
        begin = f"Check its name, or begin one there: {command('chat', begins=True)}"
        raise ConfigurationError(f"No store is at {path}. {begin}")


def require_kind(url: str) -> None:
    """Explain that a file was named as a directory, or the other way round. SQLite's own message does not tell that."""
    path = path_of(url)
    if path is not None and url.startswith("sqlite:") and path.is_dir():
        raise ConfigurationError(
            f"{path} is a directory, not a SQLite file. If sessions are in it: --store file://{path}"
        )
    if path is not None and url.startswith("file:") and path.is_file():
        raise ConfigurationError(f"{path} is a file, not a directory. If it is a SQLite file: --store sqlite:///{path}")


def may_write(ctx: click.Context) -> bool:
    """Tell whether the store can be written to, as far as the permissions of its files show."""
    url = store_url(ctx).value
    path = path_of(url)
    if path is None:
        return True
    needed = [path, path.parent] if url.startswith("sqlite:") else [path]  # SQLite puts files beside its own
    return all(os.access(each, os.W_OK) for each in needed if each.exists())
