"""Errors as a person reads them: one or two lines on stderr, and an exit code by their kind."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from perdure.cli.options import settings_of

if TYPE_CHECKING:
    from perdure.errors import RunFailed

FAILED = 1
USAGE = 2
NOT_FOUND = 3
CONFLICT = 4
NOT_ALLOWED = 5
DAMAGED = 6
STORE_FAILED = 7
RUN_FAILED = 8
NOT_SET_UP = 9
WAITS = 10
INTERRUPTED = 130
BROKEN_PIPE = 141

EXIT_CODES: dict[str, int] = {
    "InvalidData": USAGE,
    "InvalidSessionId": USAGE,
    "SessionNotFound": NOT_FOUND,
    "SessionConflict": CONFLICT,
    "SessionBusy": CONFLICT,
    "SessionLocked": CONFLICT,
    "SessionNotActive": NOT_ALLOWED,
    "IllegalStatusChange": NOT_ALLOWED,
    "CorruptRecord": DAMAGED,
    "InvalidSessionFile": DAMAGED,
    "StoreError": STORE_FAILED,
    "DriverError": RUN_FAILED,
    "ToolError": RUN_FAILED,
    "AgentStop": RUN_FAILED,
    "ConfigurationError": NOT_SET_UP,
}
"""The exit code of each error of `perdure.errors`; one that is not named here has that of the kind it belongs to."""


class Failure(Exception):
    """What ends a command: the lines to show, and the exit code."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def show(self) -> None:
        from perdure.cli.terminal import safe

        click.echo(f"perdure: {safe(str(self))}", err=True)


def exit_code_of(error: BaseException) -> int:
    if _is_not_set_up(error):
        return NOT_SET_UP
    for kind in type(error).__mro__:
        if kind.__name__ in EXIT_CODES:
            return EXIT_CODES[kind.__name__]
    return FAILED


@contextmanager
def reported(ctx: click.Context) -> Iterator[None]:
    """Turn errors into lines and exit codes. With --debug those that are not the user's keep their traceback."""
    try:
        yield
        sys.stdout.flush()
    except click.UsageError as error:
        refuse(error)
    except (click.ClickException, click.exceptions.Exit):
        raise
    except BrokenPipeError:
        _stop_writing()
        ctx.exit(BROKEN_PIPE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("perdure: interrupted", err=True)
        ctx.exit(INTERRUPTED)
    except Exception as error:
        if settings_of(ctx).debug:
            _show_traceback()
        failure = error if isinstance(error, Failure) else _failure(error)
        failure.show()
        ctx.exit(failure.exit_code)


def refuse(error: click.UsageError) -> NoReturn:
    """End a command that was typed wrong. Where nothing was typed, click shows the help instead."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    where = f"\nSee: {error.ctx.command_path} --help" if error.ctx is not None else ""
    Failure(f"{error.format_message()}{where}", USAGE).show()
    raise click.exceptions.Exit(USAGE) from None


def _failure(error: Exception) -> Failure:
    from perdure.errors import PerdureError

    if isinstance(error, PerdureError):
        return Failure(advised(error), exit_code_of(error))
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return Failure(f"{named}{error.strerror or error}", STORE_FAILED)
    kind = type(error).__name__
    return Failure(f"{kind}: {error}\nThis is a fault of perdure's. Run it again with --debug to see where.", FAILED)


def advised(error: Exception) -> str:
    """What an error says, with what to type where the library's own advice speaks of Python."""
    from perdure.cli.hints import command
    from perdure.cli.killed import needs_tools_there, subagents_there, to_go_on
    from perdure.errors import (
        ConfigurationError,
        IllegalStatusChange,
        InvalidData,
        InvalidSessionId,
        RunFailed,
        RunInterrupted,
        SessionBusy,
        SessionConflict,
        SessionNotActive,
        SessionNotFound,
        StoreError,
    )

    match error:
        case SessionNotActive(pending=pending) if pending:
            waits = f"Session {error.session_id!r} waits for a person to approve or deny: {', '.join(pending)}."
            return f"{waits}\n{to_decide(error.session_id)}"
        case RunInterrupted():
            key = error.session_id
            killed = f"The last run of session {key!r} was killed. Nothing was changed."
            tools = needs_tools_there(click.get_current_context(silent=True), key)
            return f"{killed}\n{to_go_on(key, tools=tools)}"
        case IllegalStatusChange() if "ApproveToolCalls" in str(error):
            return f"Session {error.session_id!r} waits for approval.\n{to_decide(error.session_id)}"
        case InvalidSessionId():
            return f"{str(error).partition('. ')[0]}. Type: {command('ls')}"
        case InvalidData() if error.path.startswith("$"):
            where = error.path.removeprefix("$").removeprefix(".")
            where = "" if where in _PARAMETERS else where
            return f"{error.problem} ({where})" if where else error.problem
        case SessionNotActive():
            return f"Session {error.session_id!r} is {error.status}. Type: {command('resume', error.session_id)}"
        case SessionNotFound():
            return f"{str(error).partition('. ')[0]}. Type: {command('ls')}"
        case SessionConflict() if "belongs to the agent" in str(error):
            advice = f"Leave --agent out, or begin another session: {command('chat', begins=True)}"
            return f"{str(error).partition('. ')[0]}. {advice}"
        case SessionConflict() if "to be brought in" in str(error):
            said = str(error).partition(" Nothing was changed.")[0]
            erase = command("purge", error.session_id, "--yes")
            return f"{said} Bring it into another store, or erase the one that is there first: {erase}"
        case RunFailed():
            return _of_run(error)
        case StoreError():
            return f"{' '.join(str(error).split())}\n{_of_store(str(error))}"
        case SessionBusy(owner=owner) if type(error) is SessionBusy and owner:
            cancel = command("cancel", error.session_id)
            return f"{str(error).partition('. ')[0]}. Wait for it, or type: {cancel}"
    if isinstance(error, ConfigurationError):
        return _of_setup(str(error), lambda: subagents_there(click.get_current_context(silent=True)))
    return str(error)


def _of_setup(said: str, subagents: Callable[[], set[str]]) -> str:
    if NO_TOOL.search(said):
        missing = missing_tool(said, subagents())
        assert missing is not None, "it was just found"
        return f"{without_python_advice(said)}\n{missing.what}: {missing.option}"
    if said.startswith(_NO_MODEL):
        return f"{said.partition('. ')[0]}.\n{NAME_A_MODEL}"
    return without_python_advice(said)


def _of_store(said: str) -> str:
    from perdure.cli.hints import command

    if "readonly" in said or "Permission denied" in said:
        return (
            "A store is written to even when it is read. Copy it to where you may write, or name another: --store URL"
        )
    return f"Which store is used, and why, says: {command('doctor')}"


NO_TOOL = re.compile("no tool (named|of that name)")
_TOOL_NAME = re.compile("(?:calling|call of|no tool named) '([^']*)'")
_NO_MODEL = "No model is named"
NAME_A_MODEL = (
    "Name one: --model openai:gpt-5, or PERDURE_MODEL, or a line in perdure.toml. To try it without a key: "
    "--model offline"
)
_IN_PYTHON = re.compile(
    r", or name another that holds the key: ModelConfig\(api_key_env='…'\)"
    r"| Decide where the model can be asked, or give the session another one with ChangeModel\."
    r"| Recover it where the model can be asked, or end it with cancel\."
)
"""Advice that speaks of Python, or that the command line gives in its own words."""
_NOT_SET_UP = "ConfigurationError: "
_PARAMETERS = ("call_ids", "reason")
"""Where the library means a parameter of Python's, which is none of a command's."""


class Missing(NamedTuple):
    """What is to be named where a tool is missing, and the option that does it."""

    what: str
    option: str


def missing_tool(said: str, subagents: set[str]) -> Missing | None:
    """Return what to name for the tool that an error misses: an agent's file, if it has spawned one. None without."""
    from perdure.cli.hints import AGENT_FILE, TOOLS_FILE

    if not NO_TOOL.search(said):
        return None
    name = _TOOL_NAME.search(said)
    if name is not None and name[1] in subagents:
        return Missing("It is an agent. Name the file that defines it", f"--agent {AGENT_FILE}")
    return Missing("Name the Python file that has it", f"--tools {TOOLS_FILE}")


def without_python_advice(said: str) -> str:
    """Return what an error says, less what is to be done about it in Python."""
    found, parted, advice = said.rpartition("is here. ")
    said = f"{found}is here." if parted and "tools" in advice else said
    return _IN_PYTHON.sub("", said)


def to_decide(session_id: str) -> str:
    """What to type where a call waits for a person."""
    from perdure.cli.hints import command

    approve, deny = (command(verb, session_id, tools=True) for verb in ("approve", "deny"))
    return f"Type: {approve}\nor: {deny}"


def _of_run(error: RunFailed) -> str:
    """What a run failed of. Where the model cannot be asked at all, that is no fault of the run."""
    from perdure.cli.hints import command

    undo = command("undo", error.session_id)
    if _is_not_set_up(error):
        reason = without_python_advice(error.reason.removeprefix(_NOT_SET_UP)).rstrip(". ")
        advice = f"Set that up and send again, or choose another model: --model offline. To take it back: {undo}"
        return f"Session {error.session_id!r} has the message, and no answer: {reason}.\n{advice}"
    failed = f"The run in session {error.session_id!r} failed: {error.reason.rstrip('. ')}."
    return f"{failed}\nWhat was said is kept. Send again to go on, or type: {undo}"


def _is_not_set_up(error: BaseException) -> bool:
    from perdure.errors import RunFailed

    return isinstance(error, RunFailed) and getattr(error, "reason", "").startswith(_NOT_SET_UP)


def _show_traceback() -> None:
    import traceback

    from perdure.cli.terminal import safe

    click.echo(safe(traceback.format_exc()), err=True, nl=False)


def _stop_writing() -> None:
    """Nobody reads any more: what is still buffered goes nowhere, and does not raise at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as in tests
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
