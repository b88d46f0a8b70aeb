"""The command that serves sessions over HTTP: to programs, and to people in a browser."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.hints import command
from perdure.cli.log_lines import log_lines
from perdure.cli.options import settings_of, span_option, store_command
from perdure.cli.setup import agent_of, opened, owner_of, run, shown_url, store_url, typed_agents
from perdure.cli.terminal import counted, print_json, say
from perdure.cli.working import command_apart, end_despite_threads
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.model.definition import AgentDefinition
    from perdure.server.listening import HttpServer
    from perdure.server.service import Service
    from perdure.server.settings import Settings
    from perdure.sessions.sessions import Sessions
    from perdure.workers.worker import Worker

_log = logging.getLogger("perdure.cli")
_PORT = 7433
_CONCURRENCY = 16
"""The most sessions that run at once if agents or tools are given, and --workers is not."""
_WORK: dict[str, Any] = {"lease": 20.0, "tries": 3, "per_owner": None, "rate": None}
"""The other settings of the worker inside the service. They are the defaults of `perdure worker`."""


@store_command(json=True, agent=True)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_PORT,
    show_default=True,
    metavar="N",
    help="Port to listen on; 0 for any that is free.",
)
@click.option(
    "--workers",
    "concurrency",
    type=click.IntRange(0),
    metavar="N",
    help=f"Answer messages here, N sessions at once. [{_CONCURRENCY} with --agent, --tools, --mcp or --model, else 0]",
)
@click.option(
    "--known-as",
    "names",
    multiple=True,
    metavar="NAME",
    help="Further name by which it is reached, as browsers see it.",
)
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="URL", help="Let the pages of another site use the API."
)
@click.option("--owner-header", metavar="HEADER", help="Header in which the proxy of --trust-proxy names the owner.")
@click.option("--trust-proxy", "proxy", metavar="ADDRESS", help="Proxy that has signed users in.")
@span_option("--drain", default="60s", help="How long runs may still take when it is told to stop.")
@click.option("--open/--no-open", "opens", default=None, help="Open a browser. [if there is a terminal and a display]")
def serve(
    ctx: click.Context, /, as_json: bool, concurrency: int | None, drain: float, opens: bool | None, **given: Any
) -> None:
    """Serve sessions over HTTP: an API for programs, and an inspector for people.

    It prints an address that signs one browser in, once. Programs send a token: `perdure token new OWNER`. With
    --agent, --tools, --mcp, --model or --workers it answers messages itself; without, they wait for `perdure worker`.

    It runs until SIGTERM or Ctrl-C: then streams end, runs have --drain to end, and what is left is handed over. A
    second signal hands over at once.
    """
    typed = settings_of(ctx)
    has_work = bool(typed.agent or typed.tools or typed.mcp or typed.model)
    at_once = (_CONCURRENCY if has_work else 0) if concurrency is None else concurrency
    if at_once and owner_of(ctx) is not None:
        what = "Messages are answered for every owner. Leave --owner and PERDURE_OWNER out, or add --workers 0."
        raise click.UsageError(what, ctx)
    with log_lines(as_json, "uvicorn"):
        run(_serve(ctx, given, at_once, drain, as_json=as_json, opens=opens))
    end_despite_threads(0)


async def _serve(
    ctx: click.Context, given: dict[str, Any], concurrency: int, drain: float, *, as_json: bool, opens: bool | None
) -> None:
    _require_packages()
    from perdure.server.app import make_app
    from perdure.server.listening import bound, http_server
    from perdure.server.service import Service
    from perdure.server.settings import Settings

    settings = Settings(**given)
    async with AsyncExitStack() as stack:
        sessions = await stack.enter_async_context(opened(ctx, must_exist=not concurrency, serves=True, grace=0.0))
        await _require_guarded(sessions, settings)
        listener = stack.enter_context(bound(settings.host, settings.port))
        settings = Settings(**{**given, "port": listener.getsockname()[1]})
        worker = (
            await stack.enter_async_context(_worker(ctx, sessions, concurrency, drain, as_json))
            if concurrency
            else None
        )
        service = Service(sessions, settings, agents=_agents(ctx), runs_here=worker is not None)
        stack.push_async_callback(service.feeds.close)
        served = _Served(service, http_server(make_app(service), settings), worker, drain)
        with served.stopped_by_signals():
            _tell_of_start(ctx, service, concurrency, as_json=as_json)
            if worker is not None:
                warn_of_missing_models(service)
            with _shown_in_browser(service, opens):
                await served.run(listener)
        _log.info("stopped", extra={"facts": {"event": "stopped", "handed_over": served.handed_over}})


def _require_packages() -> None:
    for name in ("jinja2", "sse_starlette", "starlette", "uvicorn"):
        if find_spec(name) is None:
            raise ConfigurationError(f"Serving needs the package {name}.", "pip install 'perdure[serve]'")


async def _require_guarded(sessions: Sessions, settings: Settings) -> None:
    """Raise ConfigurationError if other machines can reach the service, and nobody has a token for it."""
    from perdure.model.ids import now
    from perdure.server.gate import BROWSER
    from perdure.server.tokens import token_book

    if settings.is_local or settings.owner_header is not None:
        return
    tokens = await token_book(sessions.store).tokens()
    if not any(each.name != BROWSER and not each.is_expired(now()) for each in tokens):
        what = f"Other machines reach {settings.host}, and nobody has a token for this store."
        raise ConfigurationError(f"{what} Make one first: {command('token', 'new', 'OWNER')}")


def _worker(ctx: click.Context, sessions: Sessions, concurrency: int, drain: float, as_json: bool) -> Worker:
    from perdure.workers.apart import ProcessApart
    from perdure.workers.worker import Worker

    typed, environment = command_apart(ctx, _WORK, as_json)
    apart = ProcessApart(typed, environment=environment)
    return Worker(sessions, apart=apart, concurrency=concurrency, drain=drain, lease=_WORK["lease"])


def _agents(ctx: click.Context) -> Sequence[AgentDefinition]:
    """Return the agents of new sessions: those of --agent, or that of a config file."""
    from msgspec.structs import replace

    first, model = agent_of(ctx), settings_of(ctx).model
    others = [replace(each, model=model) if model else each for each in typed_agents(ctx)[1:]]
    return [] if first is None else [first, *others]


class _Served:
    """A service from its first request to its end."""

    def __init__(self, service: Service, server: HttpServer, worker: Worker | None, drain: float) -> None:
        self._service = service
        self._server = server
        self._worker = worker
        self._drain = drain
        self._told = 0
        self._handing_over: asyncio.Future[None] | None = None

    @property
    def handed_over(self) -> list[str]:
        return [] if self._worker is None else sorted(self._worker.handed_over)

    async def run(self, listener: socket.socket) -> None:
        """Answer requests until a signal comes.

        Requests are still answered while runs end: /readyz then says that the service is stopping.
        """
        answering = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        working = asyncio.ensure_future(self._service.closing.wait() if self._worker is None else self._worker.run())
        try:
            await asyncio.wait({answering, working}, return_when=asyncio.FIRST_COMPLETED)
            self._begin_to_end()
            await asyncio.gather(working, self._service.sessions.runtime.close(self._drain))
        finally:
            self._server.stop()
            await answering

    def _begin_to_end(self, *, at_once: bool = False) -> None:
        self._service.closing.set()
        if self._worker is not None:
            self._worker.stop(at_once=at_once)

    def stop(self) -> None:
        """Begin to stop. If that was asked for before, stop at once."""
        self._told += 1
        at_once = self._told > 1 or not self._drain
        self._begin_to_end(at_once=at_once)
        if at_once:
            self._server.stop(at_once=True)
            self._handing_over = asyncio.ensure_future(self._service.sessions.runtime.close(0.0))
        self._tell_of_stop(at_once)

    def _tell_of_stop(self, at_once: bool) -> None:
        count = 0 if self._worker is None else len(self._worker.under_way)
        left = f": {counted(count, 'session')} may still take {self._drain:g} s; a second signal hands over at once"
        text = "stopping at once" if at_once else f"stopping{left if count else ''}"
        _log.info(text, extra={"facts": {"event": "stopping", "under_way": count, "at_once": at_once}})

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                if self._told:  # it is stopping: a further signal would only interrupt that
                    signal.signal(number, signal.SIG_IGN)


def _tell_of_start(ctx: click.Context, service: Service, concurrency: int, *, as_json: bool) -> None:
    """Print the address for signing in. It goes to stdout only and into no log: the code makes its user an operator."""
    store, url = shown_url(store_url(ctx).value), service.settings.url
    facts = {"event": "started", "store": store, "url": url, "pid": os.getpid(), "concurrency": concurrency}
    work = f"at most {counted(concurrency, 'session')} at once" if concurrency else "messages wait for `perdure worker`"
    _log.info("serving %s on %s (%d): %s", store, url, os.getpid(), work, extra={"facts": facts})
    address = f"{url}/login?code={service.gate.invite()}"
    if as_json:
        print_json({"url": url, "sign_in": address})
    else:
        say(f"To sign in, open this address. It works once, within 15 minutes:\n{address}")


def warn_of_missing_models(service: Service) -> None:
    """Log which agents have no model. Messages to their sessions would wait, and clients would not know why."""
    for agent in service.agents.values():
        if service.sessions.loops.named_model(agent) is None:
            facts = {"event": "no model", "agent": agent.name}
            advice = "new sessions of it are not answered. Add --model, or name one in its file"
            _log.warning("the agent '%s' names no model: %s", agent.name, advice, extra={"facts": facts})


@contextmanager
def _shown_in_browser(service: Service, wanted: bool | None) -> Iterator[None]:
    """Open a browser, if that is wanted and possible.

    The browser gets a file that redirects to the address: everybody on this machine sees command lines, and could use
    the code first.
    """
    has_display = sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if not has_display or not (sys.stderr.isatty() if wanted is None else wanted):
        yield
        return
    import tempfile
    import webbrowser

    address = f"{service.settings.url}/login?code={service.gate.invite()}"
    with tempfile.NamedTemporaryFile("w", prefix="perdure-", suffix=".html") as page:  # mode 0600
        page.write(f'<!doctype html><meta http-equiv="refresh" content="1; url={address}"><title>perdure</title>\n')
        page.flush()
        asyncio.get_running_loop().run_in_executor(None, webbrowser.open, f"file://{page.name}")
        yield
