"""The command that runs sessions in which others have left messages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.log_lines import log_lines
from perdure.cli.options import settings_of, span_option, store_command
from perdure.cli.session_ids import named
from perdure.cli.setup import opened, owner_of, run, shown_url, store_url
from perdure.cli.terminal import counted

if TYPE_CHECKING:
    from perdure.model.retention import RetentionPolicy
    from perdure.protocols import Outcome
    from perdure.workers.worker import Worker

_log = logging.getLogger("perdure.cli")
_MCP = "PERDURE_WORKER_MCP"
"""The variable with the MCP servers of a process apart, as a JSON list. Not an option, as a URL may have a secret."""
_QUEUES = {"high": 1, "default": 0}
_NAMED = 10
"""The most handed-over sessions that are named in the log."""
_OUTCOMES = {
    "WAITS": "waits for a person",
    "BUSY": "another process runs it",
    "OWNER_BUSY": "its owner has as many runs as are allowed",
    "PARKED": "is parked",
}
"""The outcomes of a look at one session that the log tells. A failure is logged where it happens."""
_TO_END = 0.25
"""Seconds that threads have to end once all is closed. Idle ones need a few milliseconds, busy ones do not end."""


class _Queue(click.ParamType[int]):
    """The type of an option for a priority: a number, or its name."""

    name = "queue"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value in _QUEUES:
            return _QUEUES[value]
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a priority nor the name of one. Use high, default, or a number.")


@store_command(json=True, agent=True, owner=False)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    metavar="N",
    help="How many sessions it runs at once.",
)
@span_option("--lease", default="20s", help="How long a session is its own without a sign of life; 1s or more.")
@span_option("--drain", default="60s", help="How long runs may still take when it is told to stop.")
@click.option(
    "--tries",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="How often a run may die with its process until its session is parked.",
)
@click.option(
    "--per-owner",
    type=click.IntRange(1),
    metavar="N",
    help="How many sessions of one owner are run at once, by all workers together.",
)
@click.option(
    "--rate",
    metavar="RATE",
    help="How often models are asked, by all processes together: 60/m, 10/s, or openai=60/m,anthropic=10/m.",
)
@click.option(
    "--queue",
    "least_priority",
    type=_Queue(),
    metavar="LEAST",
    help="Only messages of this priority or a higher one: high (1), default (0), or a number.",
)
@click.option("--policy", metavar="FILE", help="Keep sessions as long as the rules of this TOML file say.")
@span_option("--retain-every", default="10min", help="How often sessions are looked for whose time is over.")
@click.option("--only", metavar="SESSION", help="Look at this session, and end.")
@click.option("--apart", "is_apart", is_flag=True, hidden=True, help="End with the process at the other end of stdin.")
def worker(ctx: click.Context, /, as_json: bool, only: str | None, is_apart: bool, **settings: Any) -> None:
    """Run sessions that others have left messages with, and continue runs whose processes have died.

    It runs until SIGTERM or Ctrl-C: then it takes no further session, runs have --drain to end, and what is left is
    handed over to other workers. A second signal hands over at once. Give the --tools that the agents use, and an
    --agent for each sub-agent.
    """
    if owner_of(ctx) is not None:
        raise click.UsageError("A worker runs the sessions of every owner. Leave --owner and PERDURE_OWNER out.", ctx)
    if store_url(ctx).value.startswith("memory:"):
        alone = "A store in memory belongs to one process, so nobody could leave a message for this worker."
        raise click.UsageError(f"{alone} Name another: --store sqlite:///sessions.db", ctx)
    if is_apart:
        settings_of(ctx).mcp = tuple(json.loads(os.environ.get(_MCP, "[]")))
    with log_lines(as_json):
        if only is None:
            run(_work(ctx, settings, as_json))
            return
        ctx.exit(run(_look_at(ctx, settings, only, is_apart)))


async def _work(ctx: click.Context, settings: dict[str, Any], as_json: bool) -> None:
    from perdure.workers.apart import ProcessApart
    from perdure.workers.worker import Worker

    keep = _policy(settings.pop("policy"))
    command, environment = command_apart(ctx, settings, as_json)
    apart = ProcessApart(command, environment=environment)
    async with (
        opened(ctx, must_exist=True, serves=True, rate=settings.pop("rate"), keep=keep) as sessions,
        Worker(sessions, apart=apart, **settings) as made,
    ):
        with _stopped_by_signals(made):
            _tell_of_start(ctx, made)
            await made.run()
    _tell_of_end(made)
    end_despite_threads(0)


def _policy(file: str | None) -> RetentionPolicy | None:
    from perdure.sessions.rounds import load_policy

    return None if file is None else load_policy(file)


async def _look_at(ctx: click.Context, settings: dict[str, Any], only: str, is_apart: bool) -> int:
    """Look at one session. Return the exit code for the outcome."""
    from perdure.workers.apart import EXIT_CODES, hold_leash
    from perdure.workers.worker import Worker

    rate, _ = settings.pop("rate"), settings.pop("policy")
    async with opened(ctx, must_exist=True, serves=True, rate=rate) as sessions, Worker(sessions, **settings) as made:
        with _stopped_by_signals(made, then=made.options.drain):
            if is_apart:
                hold_leash(lambda: made.stop(at_once=True))
            session_id = await named(sessions, only)
            outcome: Outcome = await made.only(session_id)
    if outcome.name in _OUTCOMES and not is_apart:  # otherwise the worker that has started it tells of the session
        _log.info("session %s: %s", session_id, _OUTCOMES[outcome.name], extra={"facts": _facts(session_id, outcome)})
    end_despite_threads(EXIT_CODES[outcome])
    return EXIT_CODES[outcome]


def _facts(session_id: str, outcome: Outcome) -> dict[str, Any]:
    return {"event": "looked", "session": session_id, "outcome": outcome.value}


def end_despite_threads(code: int) -> None:
    """End this process soon after all is closed, even if a tool still runs in a thread.

    Python would wait for that thread. Meanwhile another worker repeats the tool, which must not run twice at once.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the process is ending already: Ctrl-C would only print a traceback

    def watch() -> None:
        threading.Event().wait(_TO_END)
        if any(not each.daemon and each is not threading.main_thread() for each in threading.enumerate()):
            sys.stdout.flush()  # by hand, since os._exit drops what is buffered
            sys.stderr.flush()
            os._exit(code)

    threading.Thread(target=watch, name="perdure end", daemon=True).start()


def command_apart(ctx: click.Context, settings: Mapping[str, Any], as_json: bool) -> tuple[list[str], dict[str, str]]:
    """Return a command that looks at one session with the settings of this process, and the environment it needs."""
    from perdure.workers.apart import python_with

    given = settings_of(ctx)
    options: list[tuple[str, Any]] = [
        *(("--tools", file) for file in given.tools),
        *(("--agent", file) for file in given.agent),
        *(("--redactor", name) for name in given.redactor),
        ("--model", given.model),
        ("--telemetry", given.telemetry),
        ("--keys", given.keys),
        ("--lease", f"{settings['lease']:f}s"),
        ("--tries", settings["tries"]),
        ("--per-owner", settings["per_owner"]),
        ("--rate", settings["rate"]),
    ]
    typed = [str(word) for option, value in options if value is not None for word in (option, value)]
    # No drain: the process that started it has waited already when it tells this one to stop.
    flags = ["--apart", "--drain", "0s", *(["--json"] if as_json else []), *(["--debug"] if given.debug else [])]
    flags += ["--telemetry-content"] if given.telemetry_content else []
    flags += ["--redact"] if given.redact else []
    # In the environment: a URL may have a password in it, and everybody on the machine sees command lines.
    environment = {"PERDURE_STORE": store_url(ctx).value, _MCP: json.dumps(given.mcp)}
    return python_with("worker", *flags, *typed, "--only"), environment


@contextmanager
def _stopped_by_signals(made: Worker, *, then: float | None = None) -> Iterator[None]:
    """Stop a worker at a first signal. Stop it at once at a second, or `then` seconds after the first."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    told = 0

    def stop() -> None:
        nonlocal told
        told += 1
        at_once = told > 1 or not made.options.drain
        made.stop(at_once=at_once)
        _tell_of_stop(made, at_once=at_once)
        if told == 1 and then is not None:
            loop.call_later(then, lambda: made.stop(at_once=True))

    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            if told:  # it is stopping: a further signal would only interrupt that
                signal.signal(number, signal.SIG_IGN)


def _tell_of_start(ctx: click.Context, made: Worker) -> None:
    url, options = shown_url(store_url(ctx).value), made.options
    facts = {"event": "started", "store": url, "pid": os.getpid(), "concurrency": options.concurrency}
    text = "started (%d): %s, at most %s at once"
    _log.info(text, os.getpid(), url, counted(options.concurrency, "session"), extra={"facts": facts})


def _tell_of_stop(made: Worker, *, at_once: bool) -> None:
    count = len(made.under_way)
    facts = {"event": "stopping", "under_way": count, "at_once": at_once}
    if at_once and count:
        _log.info("handing over at once: %s", counted(count, "session"), extra={"facts": facts})
        return
    left = f": {counted(count, 'session')} may still take {made.options.drain:g} s; a second signal hands over at once"
    _log.info(f"stopping{left if count else ''}", extra={"facts": facts})


def _tell_of_end(made: Worker) -> None:
    left = sorted(made.handed_over)
    facts = {"event": "stopped", "handed_over": left}
    text = f"stopped; handed over: {_listed(left)}" if left else "stopped; nothing was left to hand over"
    _log.info(text, extra={"facts": facts})


def _listed(ids: Sequence[str]) -> str:
    first, rest = ids[:_NAMED], ids[_NAMED:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")
