"""Hints about the next command to type: it works as it is, with the options that this call needed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from shlex import quote
from urllib.parse import parse_qsl, urlencode, urlsplit
from urllib.parse import quote as url_quote

import click

from perdure.cli.options import Settings, settings_of
from perdure.model.secrets import without_secrets

_ASKING = ("chat", "send", "approve", "deny", "answer", "recover", "compact")
"""The commands that run a model, and so need its name and its tools again."""
TOOLS_FILE = "FILE.py"
"""The placeholder for a file that only the user knows."""
AGENT_FILE = "FILE"
_SECRETS = ("password", "sslpassword")


def command(*words: object, begins: bool = False, tools: bool = False, owner: bool = True) -> str:
    """Return a command line for the same store and owner, with the same tools, model and sub-agents as this call.

    With `begins` it names the agent too: an existing session has its own. With `tools` it has a placeholder for the
    file of tools, if this call named none. Without `owner` it is for all sessions: write their ids as texts then.
    """
    from perdure.cli.short_ids import shown
    from perdure.model.ids import SessionId

    ctx = click.get_current_context(silent=True)
    given = settings_of(ctx) if ctx is not None else Settings()
    whose = given.owner if owner else None
    options = [("--store", repeatable(given.store)), ("--owner", whose), ("--keys", given.keys)]
    if words[0] in _ASKING:
        named = given.tools or ((TOOLS_FILE,) if tools and not given.mcp else ())
        options += [("--model", given.model), *(("--tools", file) for file in named)]
        options += [("--mcp", without_secrets(server) if "://" in server else server) for server in given.mcp]
    if begins or (words[0] in _ASKING and len(given.agent) > 1):
        options += [("--agent", file) for file in given.agent]
    repeated = [word for option, value in options if value for word in (option, value)]
    said = [shown(word) if isinstance(word, SessionId) else str(word) for word in words]
    return " ".join([program(), *map(quote, (*said, *repeated))])


def program() -> str:
    """Return the word that starts perdure from here: its name if the shell finds it, or else its path."""
    typed = Path(sys.argv[0])
    mine = typed if typed.name == "perdure" else Path(sys.executable).with_name("perdure")
    found = shutil.which("perdure")
    if not mine.exists():
        return "perdure" if found else f"{quote(sys.executable)} -m perdure"
    if found is not None and os.path.samefile(found, mine):
        return "perdure"
    here = Path.cwd()
    shown = str(mine.relative_to(here) if mine.is_relative_to(here) else mine)
    return quote(shown if os.sep in shown else f"./{shown}")


def repeatable(url: str | None) -> str | None:
    """Return a store's URL that can be shown and typed again. It has no password: drivers find that elsewhere."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True)
        if parts.password is None and not any(name in _SECRETS for name, _ in query):
            return url
        host = parts.netloc.rpartition("@")[2]
        user = f"{parts.username}@" if parts.username else ""
        kept = urlencode([each for each in query if each[0] not in _SECRETS], quote_via=url_quote, safe="/")
        # By hand: urlunsplit drops the slashes before a host that is not named.
        return f"{parts.scheme}://{user}{host}{parts.path}" + (f"?{kept}" if kept else "")
    except ValueError:
        return None
