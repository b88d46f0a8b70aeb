"""The command that draws a session's tree: in a terminal, as plain lines in a pipe, or as a picture."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from perdure.cli.options import last_option, session_argument, store_command
from perdure.cli.session_ids import on_session
from perdure.cli.short_ids import learn, shown
from perdure.cli.terminal import console, counted, is_terminal, line, note, print_json, say, status_style, width
from perdure.sessions.family_tree import Node, tree_of

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from perdure.sessions.sessions import Sessions

_TITLE = 60
_SIGNS = {
    "completed": "✓",
    "failed": "✗",
    "running": "…",
    "pending": "·",
    "aborted": "■",
    "rejected": "⊘",
    "killed": "!",
    "waiting": "?",
    "handed over": "·",
    "left": "·",
}
_WORDS = {"fork": "fork ", "subagent": "sub-agent "}


@store_command(json=True)
@session_argument()
@last_option("--limit", default=50, show_default=True, help="Only the last N runs of each session.")
@click.option("--svg", metavar="FILE", help="Write a picture into this file.")
def tree(ctx: click.Context, session: str, last: int, svg: str | None, as_json: bool) -> None:
    """Draw the runs of SESSION, its branches, groups, sub-agents and forks, with status, cost and time."""

    async def verb(sessions: Sessions, session_id: str) -> Node:
        root = await tree_of(sessions, session_id, limit=last)
        if not as_json:
            await learn(sessions, root.session_ids())
        return root

    _, root = on_session(ctx, session, verb)
    if svg:
        write_svg(root, svg)
        note(f"wrote {svg}")
    elif as_json:
        print_json(root.to_json())
    else:
        print_tree(root)


def print_tree(root: Node) -> None:
    """Draw a tree on stdout."""
    if is_terminal():
        console().print(_drawn(root, max(20, (width() or 80) - 50)), overflow="ellipsis", no_wrap=True)
        return
    say(_label(root, None))
    for text in _branches(root, ""):
        say(text)


def _branches(node: Node, indent: str) -> Iterator[str]:
    for place, child in enumerate(node.children):
        last = place == len(node.children) - 1
        yield f"{indent}{'└── ' if last else '├── '}{_label(child, None)}"
        yield from _branches(child, indent + ("    " if last else "│   "))


def _label(node: Node, title: int | None) -> str:
    return "  ".join(text for text, _ in _pieces(node, title) if text)


def _pieces(node: Node, title: int | None, *, is_picture: bool = False) -> list[tuple[str, str]]:
    """Return the texts about a node, each with its style. Ids are whole in a picture, since it is kept."""
    is_run = node.kind in ("loop", "branch", "group")
    sign = ("■" if node.stop_reason and node.status == "completed" else _SIGNS.get(node.status, "")) if is_run else ""
    name = "" if is_run else _WORDS.get(node.kind, "") + line(node.id if is_picture else shown(node.id))
    spent = [counted(node.usage.total_tokens, "token")] if node.usage.total_tokens else []
    known = "" if node.usage.is_cost_known else "+"
    spent += [f"${node.usage.cost:.4f}{known}"] if node.usage.cost else []
    spent += [f"{node.seconds:.2f} s"] if node.seconds is not None else []
    return [
        (sign, status_style(node.status)),
        (name, "bold"),
        (line(node.title, title), ""),
        ("★ selected" if node.is_selected else "", "bold yellow"),
        (f"[{', '.join(line(tool) for tool in node.tools)}]" if node.tools else "", "magenta"),
        (f"outcome unknown: {', '.join(map(line, node.unknown))}" if node.unknown else "", "yellow"),
        (node.status if not is_run or node.status != "completed" else "", status_style(node.status)),
        (f"stopped: {line(node.stop_reason)}" if node.stop_reason else "", "yellow"),
        (line(node.model) if node.model else "", "blue"),
        (", ".join(spent), "dim"),
    ]


def _text(node: Node, title: int | None, *, is_picture: bool) -> Text:
    from rich.text import Text

    text = Text()
    for piece, style in _pieces(node, title, is_picture=is_picture):
        if piece:
            text.append(f"{'  ' if text else ''}{piece}", style=style)
    return text


def _drawn(node: Node, title: int | None, onto: Tree | None = None, *, is_picture: bool = False) -> Tree:
    from rich.tree import Tree

    label = _text(node, title, is_picture=is_picture)
    grown = Tree(label, guide_style="dim") if onto is None else onto.add(label)
    for child in node.children:
        _drawn(child, title, grown, is_picture=is_picture)
    return grown


def write_svg(root: Node, path: str) -> None:
    """Draw a tree into an SVG file."""
    from pathlib import Path

    from rich.console import Console

    # A recording console also prints: into a buffer, so that nothing reaches the terminal.
    out = Console(record=True, file=io.StringIO(), width=120, markup=False, highlight=False, emoji=False)
    out.print(_drawn(root, _TITLE, is_picture=True), overflow="ellipsis", no_wrap=True)
    picture = out.export_svg(title=f"perdure tree {line(root.id)}")
    Path(path).write_text(_without_fonts(picture), encoding="utf-8")


def _without_fonts(picture: str) -> str:
    """Return a picture that loads nothing when it is looked at. rich's own names a font on a server."""
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL).replace("Fira Code, ", "")
