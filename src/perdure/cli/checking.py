"""Commands that look whether all is well: with a store, and with what perdure stands on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.errors import DAMAGED, NOT_SET_UP
from perdure.cli.naming import named
from perdure.cli.options import agent_options, json_option, session_argument, settings_of, store_options
from perdure.cli.progress import progress
from perdure.cli.setup import agent_of, config_file, model_name, opened, owner_of, run, shown_url, store_url
from perdure.cli.terminal import counted, line, note, print_json, say

if TYPE_CHECKING:
    from perdure.fsck import FsckReport

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


@click.command()
@session_argument(required=False, metavar="[SESSION]")
@json_option
@store_options
@click.pass_context
def fsck(ctx: click.Context, session: str | None, as_json: bool) -> None:
    """Verify every promise that the store, or SESSION, makes, and say how to repair what is wrong."""
    if session is None and owner_of(ctx):
        raise click.UsageError("The check is of the whole store; leave --owner out, or name a session.")
    report = run(_checked(ctx, session))
    problems = [
        {"session": each.session_id, "where": each.where, "what": each.what, "repair": each.repair}
        for each in report.problems
    ]
    if as_json:
        print_json({"sessions": report.sessions, "messages": report.messages, "problems": problems})
    else:
        for problem in problems:
            of = f"{problem['session']}: " if problem["session"] else ""
            say(f"✗ {of}{line(problem['where'])}: {line(problem['what'])}\n  {line(problem['repair'])}")
        found = counted(len(problems), "problem") if problems else "no problems"
        say(f"{counted(report.sessions, 'session')}, {counted(report.messages, 'message')}, {found}")
    if problems:
        ctx.exit(DAMAGED)


async def _checked(ctx: click.Context, session: str | None) -> FsckReport:
    from perdure.fsck import fsck as check

    async with opened(ctx, must_exist=True) as sessions:
        session_id = None if session is None else await named(sessions, session)
        with progress("checking") as tell:
            return await check(sessions.store, session_id=session_id, progress=tell)


@click.command()
@json_option
@agent_options
@store_options
@click.pass_context
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
        "store": {"url": shown_url(chosen.value), "chosen_by": chosen.by, **run(_looked_at(ctx))},
        "model": run(_model_examined(ctx)),
        "keys": {name: bool(os.environ.get(name)) for name in KEYS},
    }


async def _model_examined(ctx: click.Context) -> dict[str, Any]:
    """Return the model that a new session would ask, who chose it, and why it cannot be asked, if it cannot."""
    from perdure.cli.errors import NAME_A_MODEL, without_python_advice
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
        return {"name": model.name, "chosen_by": by, "problem": without_python_advice(str(error))}
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


async def _looked_at(ctx: click.Context) -> dict[str, Any]:
    """Whether the store opens, and whether anything is in it."""
    from perdure.errors import PerdureError

    try:
        async with opened(ctx, must_exist=True) as sessions:
            page = await sessions.list(limit=1000)
            more = "+" if page.next else ""
            return {"sessions": f"{len(page)}{more}", "error": None}
    except (PerdureError, OSError) as error:
        return {"sessions": None, "error": str(error)}


def _print_findings(found: dict[str, Any]) -> None:
    store = found["store"]
    say(f"python    {found['python']} on {found['platform']}")
    for name, installed in found["packages"].items():
        say(f"package   {name} {installed or 'not installed'}")
    sqlite = found["sqlite"]
    say(f"sqlite    {sqlite['version']}, full-text search {'yes' if sqlite['fts5'] else 'no'}")
    say(f"config    {found['config'] or 'none'}")
    say(f"store     {store['url']} (by {store['chosen_by']})")
    say(f"sessions  {store['sessions'] if store['error'] is None else 'not readable'}")
    model = found["model"]
    say(f"model     {model['name']} (by {model['chosen_by']})" if model["name"] else "model     none")
    keys = [name for name, is_set in found["keys"].items() if is_set]
    say(f"keys      {', '.join(keys) or 'none set; the model offline needs none'}")
    if model["problem"]:
        note(f"perdure: {model['problem'] if model['name'] else 'A new session has no model. ' + model['problem']}")
    if store["error"]:
        note(f"perdure: {store['error']}")
