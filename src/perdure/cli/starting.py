"""Commands for the first five minutes: files to start from, and completion in the shell."""

from __future__ import annotations

from pathlib import Path

import click

from perdure.cli.hints import command
from perdure.cli.options import store_options
from perdure.cli.terminal import say

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


@click.command()
@click.argument("directory", default=".", type=click.Path(file_okay=False))
@click.option("--force", is_flag=True, help="Write over files that are there.")
@store_options
def init(directory: str, force: bool) -> None:
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
        raise click.UsageError(f"There is no completion for {shell}.")
    click.echo(kind(cli, {}, "perdure", "_PERDURE_COMPLETE").source())
