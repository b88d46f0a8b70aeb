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
