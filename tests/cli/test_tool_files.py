"""Names in a file of --tools besides tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

CLERK = '''
import perdure

@perdure.tool(needs_approval=True)
def refund(amount: int) -> str:
    """Give money back."""
    return f"{amount} given back"

subagents = [perdure.AgentDefinition("clerk", description="Gives money back.", model="offline")]
'''


def test_sub_agents_are_named_by_a_list(perdure: Callable[..., Any], home: Path) -> None:
    """With the same file, a person can decide on a run that a program has begun with them."""
    (home / "desk.py").write_text(CLERK)
    ask = 'call clerk {"prompt": "call refund {\\"amount\\": 4}"}'
    perdure("send", "--new", "s", ask, "--tools", "desk.py", "--model", "offline", code=10)
    assert "4 given back" in perdure("approve", "s", "--tools", "desk.py").out


def test_what_is_not_an_agent_is_refused(perdure: Callable[..., Any], home: Path) -> None:
    (home / "desk.py").write_text("subagents = ['clerk']\n")
    told = perdure("send", "--new", "s", "Hello", "--tools", "desk.py", code=9).err
    assert "subagents lists agents, and 'clerk' is not an AgentDefinition." in told


def test_a_file_may_import_those_beside_it(process: Callable[..., Any], home: Path) -> None:
    """Also when a tool is called, and from another directory."""
    (home / "app").mkdir()
    (home / "app" / "prices.py").write_text("PEN = 3\n")
    (home / "app" / "carriers.py").write_text("NAME = 'by bike'\n")
    (home / "app" / "desk.py").write_text(
        "import perdure\nfrom prices import PEN\n\n"
        "@perdure.tool\ndef ship(count: int) -> str:\n    import carriers\n"
        "    return f'{count * PEN} {carriers.NAME}'\n"
    )
    told = process("send", "--new", "s", "ship(count=2)", "--tools", "app/desk.py", "--model", "offline")
    assert "6 by bike" in told.out


def test_a_file_beside_it_takes_no_package_s_place(process: Callable[..., Any], home: Path) -> None:
    (home / "app").mkdir()
    (home / "app" / "rich.py").write_text("raise SystemExit('the wrong one')\n")
    (home / "app" / "desk.py").write_text(
        "import perdure, rich\n\n@perdure.tool\ndef ship() -> str:\n    return 'sent'\n"
    )
    assert "sent" in process("send", "--new", "s", "ship()", "--tools", "app/desk.py", "--model", "offline").out
