"""Options that many commands share. They may be typed before the command or after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Settings:
    """The values of the shared options. One that was not typed is None."""

    # A plain class, since to import `dataclasses` would slow down the help.
    def __init__(self) -> None:
        self.store: str | None = None
        self.owner: str | None = None
        self.keys: str | None = None
        self.model: str | None = None
        self.agent: tuple[str, ...] = ()
        self.tools: tuple[str, ...] = ()
        self.mcp: tuple[str, ...] = ()
        self.redact = False
        self.redactor: tuple[str, ...] = ()
        self.telemetry: str | None = None
        self.telemetry_content = False
        self.debug = False


def settings_of(ctx: click.Context) -> Settings:
    """Return the settings of this call, from anywhere in its line."""
    return ctx.find_root().ensure_object(Settings)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    # Called before the command and after it: an option that is absent in one place must not undo the other. An empty
    # text is kept, and refused by the code that uses it.
    if (value or value == "") and param.name is not None:
        setattr(settings_of(ctx), param.name, value)


def _shared(*names: str, **attributes: Any) -> click.Option:
    return click.Option(names, expose_value=False, callback=_keep, **attributes)


STORE_OPTIONS = (
    _shared(
        "--store",
        metavar="URL",
        help="Where sessions are kept: sqlite:///file.db, file://directory, postgresql://… "
        "[PERDURE_STORE, perdure.toml, or a file in your data directory]",
    ),
    _shared("--owner", metavar="NAME", help="See this owner's sessions only."),
    _shared(
        "--keys", metavar="FILE", help="Key ring that the store is sealed with; its master key is in the environment."
    ),
    _shared("--debug", is_flag=True, help="Show the traceback of an error."),
)
"""The options that choose the store and the sessions of a command, and how much it tells about an error."""
_HIDDEN_OWNER = _shared("--owner", metavar="NAME", help="Refused: all owners' sessions are meant.", hidden=True)
AGENT_OPTIONS = (
    _shared(
        "--agent",
        metavar="FILE",
        multiple=True,
        help="File that defines the agent (.md, .yaml, .toml, .json). Further ones define its sub-agents.",
    ),
    _shared("--tools", metavar="FILE.py", multiple=True, help="Python file with tools; it is imported."),
    _shared("--mcp", metavar="COMMAND|URL", multiple=True, help="MCP server whose tools to use; a command is started."),
    _shared("--model", metavar="NAME", help="Ask this model, such as openai:gpt-5 or offline."),
    _shared(
        "--redact",
        is_flag=True,
        help="Replace keys, tokens and card numbers before anything is stored. [PERDURE_REDACT, perdure.toml]",
    ),
    _shared(
        "--redactor",
        metavar="NAME",
        multiple=True,
        help="As --redact, and replace what this one finds too: email, phone, …",
    ),
    _shared(
        "--telemetry",
        type=click.Choice(["console", "otlp", "global"]),
        help="Trace runs by OpenTelemetry: to stderr, to a collector, or as `opentelemetry-instrument` has set up.",
    ),
    _shared("--telemetry-content", is_flag=True, help="Trace what is said, called and returned, too."),
)
"""The options that choose the agent, its tools and its model."""
_JSON_OPTION = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON.")


def store_command(
    name: str | None = None, *, json: bool = False, agent: bool = False, owner: bool = True
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function, whose first argument is click's context.

    The shared options come after its own, in the same order everywhere: --json, those of an agent, those of a store.
    Without `owner`, the help does not show --owner, and the command has to refuse it."""

    def made(function: Callable[..., None]) -> click.Command:
        command = click.command(name)(click.pass_context(function))
        command.params += [*([_JSON_OPTION] if json else []), *(AGENT_OPTIONS if agent else ())]
        command.params += [each if owner or each.name != "owner" else _HIDDEN_OWNER for each in STORE_OPTIONS]
        return command

    return made


def _completed(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    from perdure.cli.session_ids import ids_beginning_with

    return ids_beginning_with(ctx, incomplete)


def session_argument(name: str = "session", **attributes: Any) -> Callable[[F], F]:
    """Return the argument for a session: its id, or a beginning or an end of it."""
    return click.argument(
        name, metavar=attributes.pop("metavar", name.upper()), shell_complete=_completed, **attributes
    )


status_option = click.option(
    "--status",
    type=click.Choice(["active", "suspended", "completed", "failed", "deleted"]),
    help="Only sessions of this status.",
)
agent_name_option = click.option("--agent-name", "agent", metavar="NAME", help="Only this agent's sessions.")


def last_option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """Return an option for the number of newest things wanted."""
    return click.option("--last", *names, type=click.IntRange(1), metavar="N", **attributes)


def version_option(help: str) -> Callable[[F], F]:
    """Return an option for the number of a version."""
    return click.option("--version", type=click.IntRange(1), metavar="N", help=help)


def _moment(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    from perdure.cli.durations import moment

    return moment(ctx, param, value)


def since_option(name: str, what: str) -> Callable[[F], F]:
    """Return an option for things that happened since a time, in the form that people type."""
    help_ = f"Only {what} since: 2h, 3d, or a date, local unless it says otherwise."
    return click.option("--since", name, callback=_moment, metavar="TIME", help=help_)


def _moment_to_come(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    from perdure.cli.durations import moment_to_come

    return moment_to_come(ctx, param, value)


def later_option(*names: str, help: str) -> Callable[[F], F]:
    """Return an option for a time in the future, in the form that people type."""
    return click.option(*names, callback=_moment_to_come, metavar="TIME", help=help)


def _span(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    from perdure.cli.durations import span

    return span(ctx, param, value)


def span_option(name: str, *, default: str, help: str) -> Callable[[F], F]:
    """Return an option for a span of time, in the form that people type."""
    help_ = f"{help} Units: s, min, h, d, w."
    return click.option(name, callback=_span, default=default, show_default=True, metavar="SPAN", help=help_)


def older_option(name: str) -> Callable[[F], F]:
    """Return an option for sessions that were not changed since a time, in the form that people type."""
    help_ = "Only sessions that were not changed for so long, or since: 12h, 30d, or a date (local)."
    return click.option("--older-than", "--until", name, callback=_moment, metavar="TIME", help=help_)


def limit_option(default: int, most: int | None = None) -> Callable[[F], F]:
    """Return an option for the most entries of a list."""
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=default, metavar="N", show_default=True, help="At most N.")
