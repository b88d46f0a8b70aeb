"""Commands for the first five minutes: files to start from, completion in the shell, and a check of the set-up."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.errors import NOT_SET_UP
from perdure.cli.hints import command
from perdure.cli.options import settings_of, store_command
from perdure.cli.setup import agent_of, model_name, on_sessions, run, shown_url, store_url
from perdure.cli.terminal import note, print_json, say
from perdure.sessions.default_store import config_file

if TYPE_CHECKING:
    from perdure.sessions.sessions import Sessions

PACKAGES = ("perdure", "msgspec", "apsw", "click", "rich", "psycopg", "pydantic-ai-slim", "genai-prices")
KEYS = (
    "ANTHROPIC_API_KEY",
    "AZURE_OPENAI_API_KEY",
    "COHERE_API_KEY",
    "DEEPSEEK_API_KEY",
    "GEMINI_API_KEY",
    "GOOGLE_API_KEY",
    "GROQ_API_KEY",
    "HF_TOKEN",
    "MISTRAL_API_KEY",
    "OPENAI_API_KEY",
    "OPENROUTER_API_KEY",
    "TOGETHER_API_KEY",
    "XAI_API_KEY",
)
AGENT = """\
---
label: An assistant of your own
description: Answers questions, and works out sums and dates with its tools.
model: offline               # built in, needs no key; a language model is named with its provider: openai:gpt-5
tools: [add, days_until, send_note]
budget:
  max_steps: 12
---

You are a friendly assistant. Be brief. Use your tools rather than guess.
"""
TOOLS = '''\
"""Tools for the agent in assistant.md. Each is a typed function; its docstring is what the model reads of it."""

from datetime import date

from perdure import tool


@tool(idempotent=True)
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@tool(idempotent=True)
def days_until(year: int, month: int, day: int) -> int:
    """How many days there are until a date."""
    return (date(year, month, day) - date.today()).days


@tool(needs_approval=True)
def send_note(to: str, text: str) -> str:
    """Send a note to somebody. A person is asked before it is sent."""
    return f"The note to {to} is sent."
'''


@store_command()
@click.argument("directory", default=".", type=click.Path(file_okay=False))
@click.option("--force", is_flag=True, help="Write over files that are there.")
def init(_: click.Context, directory: str, force: bool) -> None:
    """Write assistant.md and tools.py into DIRECTORY, to start from."""
    folder = Path(directory)
    files = {folder / "assistant.md": AGENT, folder / "tools.py": TOOLS}
    taken = [str(path) for path in files if path.exists()]
    if taken and not force:
        are = "are" if len(taken) > 1 else "is"
        raise click.UsageError(f"{' and '.join(taken)} {are} there already. Choose another directory, or add --force.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
        say(f"wrote {path}")
    agent, tools = files
    say(f"Next: {command('chat', '--agent', agent, '--tools', tools)}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands, options and ids in SHELL.

    bash: add to ~/.bashrc   eval "$(perdure completion bash)"; zsh the same in ~/.zshrc;
    fish: perdure completion fish > ~/.config/fish/completions/perdure.fish
    """
    from click.shell_completion import get_completion_class

    from perdure.cli.main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"Completion is not available for {shell}.")
    click.echo(kind(cli, {}, "perdure", "_PERDURE_COMPLETE").source())


@store_command(json=True, agent=True)
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show versions, the store, the model of a new session and whether it can be asked, and which keys are set: their
    names, never their values."""
    found = _examined(ctx)
    if as_json:
        print_json(found)
    else:
        _print_findings(found)
    if found["store"]["error"]:
        ctx.exit(NOT_SET_UP)


def _examined(ctx: click.Context) -> dict[str, Any]:
    chosen, config = store_url(ctx), config_file()
    return {
        "python": platform.python_version(),
        "platform": platform.system(),
        "packages": {name: _version(name) for name in PACKAGES},
        "sqlite": _sqlite(),
        "config": config and str(config),
        "store": {"url": shown_url(chosen.value), "chosen_by": chosen.by, **_looked_at(ctx)},
        "model": run(_model_examined(ctx)),
        "keys": {name: bool(os.environ.get(name)) for name in (*KEYS, *_key_of_agent(ctx))},
    }


def _key_of_agent(ctx: click.Context) -> list[str]:
    """Return the variable that the agent's file names for its model's key, if it is not among the usual ones."""
    from perdure.errors import PerdureError

    try:
        agent = agent_of(ctx)
    except (PerdureError, OSError):  # the model's line says what is wrong
        return []
    named = agent.model_config.api_key_env if agent is not None and agent.model_config is not None else None
    return [named] if named and named not in KEYS else []


async def _model_examined(ctx: click.Context) -> dict[str, Any]:
    """Return the model of a new session, the setting that chose it, and the problem if it cannot be asked."""
    from perdure.cli.errors import NAME_A_MODEL
    from perdure.errors import PerdureError
    from perdure.loop.factory import LoopFactory
    from perdure.model.definition import ModelConfig

    try:
        chosen, agent = model_name(ctx), agent_of(ctx)
        if agent is not None and agent.model_config is not None and not settings_of(ctx).model:
            model, by = agent.model_config, f"the agent {agent.name}"
        elif chosen is not None:
            model, by = ModelConfig(chosen.value), chosen.by
        else:
            return {"name": None, "chosen_by": None, "problem": NAME_A_MODEL}
    except (PerdureError, OSError) as error:
        return {"name": None, "chosen_by": None, "problem": str(error)}
    loops = LoopFactory()
    try:
        await loops.require(model)
        return {"name": model.name, "chosen_by": by, "problem": None}
    except PerdureError as error:
        return {"name": model.name, "chosen_by": by, "problem": error.what}
    finally:
        await loops.aclose()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _sqlite() -> dict[str, Any]:
    import apsw

    options = set(apsw.compile_options)
    return {"version": apsw.sqlite_lib_version(), "fts5": "ENABLE_FTS5" in options, "threadsafe": _threads(options)}


def _threads(options: set[str]) -> str | None:
    return next((option.partition("=")[2] for option in options if option.startswith("THREADSAFE")), None)


def _looked_at(ctx: click.Context) -> dict[str, Any]:
    """Return the number of sessions in the store, or the error if it does not open."""
    from perdure.errors import PerdureError

    async def work(sessions: Sessions) -> tuple[str, int]:
        page = await sessions.headers(limit=1000)
        return f"{len(page) + len(page.damaged)}{'+' if page.next else ''}", len(page.damaged)

    try:
        count, unread = on_sessions(ctx, work)
    except (PerdureError, OSError) as error:
        return {"sessions": None, "unread": None, "error": str(error)}
    return {"sessions": count, "unread": unread, "error": None}


def _print_findings(found: dict[str, Any]) -> None:
    store = found["store"]
    say(f"python    {found['python']} on {found['platform']}")
    for name, installed in found["packages"].items():
        say(f"package   {name} {installed or 'not installed'}")
    sqlite = found["sqlite"]
    say(f"sqlite    {sqlite['version']}, full-text search {'yes' if sqlite['fts5'] else 'no'}")
    say(f"config    {found['config'] or 'none'}")
    say(f"store     {store['url']} (by {store['chosen_by']})")
    unread = f", {store['unread']} of them not readable; see: perdure ls" if store["unread"] else ""
    say(f"sessions  {store['sessions'] + unread if store['error'] is None else 'not readable'}")
    model = found["model"]
    say(f"model     {model['name']} (by {model['chosen_by']})" if model["name"] else "model     none")
    keys = [name for name, is_set in found["keys"].items() if is_set]
    say(f"keys      {', '.join(keys) or 'none set; the model offline needs none'}")
    if model["problem"]:
        note(f"perdure: {model['problem'] if model['name'] else 'A new session has no model. ' + model['problem']}")
    if store["error"]:
        note(f"perdure: {store['error']}")
