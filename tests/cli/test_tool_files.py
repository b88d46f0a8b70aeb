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


def test_a_file_of_a_package_may_import_its_neighbours(process: Callable[..., Any], home: Path) -> None:
    """It is the module that the package's other files import, so no tool is there twice."""
    (home / "src" / "orders").mkdir(parents=True)
    (home / "src" / "orders" / "__init__.py").write_text("")
    (home / "src" / "orders" / "prices.py").write_text("PEN = 3\n")
    (home / "src" / "orders" / "desk.py").write_text(
        "import perdure\nfrom .prices import PEN\n\n"
        "@perdure.tool\ndef ship(count: int) -> str:\n    import orders.desk\n"
        "    return f'{count * PEN} {orders.desk.ship is ship}'\n"
    )
    told = process("send", "--new", "s", "ship(count=2)", "--tools", "src/orders/desk.py", "--model", "offline")
    assert "6 True" in told.out


def test_a_package_may_have_an_installed_one_s_name(process: Callable[..., Any], home: Path) -> None:
    """Its relative imports are its own, and it takes the place of the other nowhere else."""
    (home / "app" / "rich").mkdir(parents=True)
    (home / "app" / "rich" / "__init__.py").write_text("PEN = 3\n")
    (home / "app" / "rich" / "prices.py").write_text("from . import PEN\n")
    (home / "app" / "rich" / "desk.py").write_text(
        "import perdure, rich\nfrom .prices import PEN\n\n"
        "@perdure.tool\ndef ship(count: int) -> str:\n    return f'{count * PEN} {hasattr(rich, \"get_console\")}'\n"
    )
    told = process("send", "--new", "s", "ship(count=2)", "--tools", "app/rich/desk.py", "--model", "offline")
    assert "6 True" in told.out


def test_the_file_of_a_package_itself_runs_once(process: Callable[..., Any], home: Path) -> None:
    (home / "orders").mkdir()
    (home / "orders" / "__init__.py").write_text(
        "import perdure, sys\nprint('runs', file=sys.stderr)\n\n@perdure.tool\ndef ship() -> str:\n    return 'sent'\n"
    )
    told = process("send", "--new", "s", "ship()", "--tools", "orders/__init__.py", "--model", "offline")
    assert "sent" in told.out
    assert told.err.count("runs") == 1


def test_a_dot_in_a_name_makes_no_package(process: Callable[..., Any], home: Path) -> None:
    (home / "tools.py").write_text("raise SystemExit('the wrong one')\n")
    (home / "tools.v2.py").write_text("import perdure\n\n@perdure.tool\ndef ship() -> str:\n    return 'sent'\n")
    assert "sent" in process("send", "--new", "s", "ship()", "--tools", "tools.v2.py", "--model", "offline").out


def test_an_import_error_of_its_own_has_no_advice_about_packages(perdure: Callable[..., Any], home: Path) -> None:
    (home / "desk.py").write_text("raise ImportError('Please install pandas to use this.')\n")
    told = perdure("send", "--new", "s", "Hello", "--tools", "desk.py", "--model", "offline", code=9).err
    assert "Please install pandas" in told
    assert "__init__.py" not in told


def test_a_relative_import_without_a_package_says_what_to_do(perdure: Callable[..., Any], home: Path) -> None:
    (home / "orders").mkdir()
    (home / "orders" / "desk.py").write_text("from .prices import PEN\n")
    told = perdure("send", "--new", "s", "Hello", "--tools", "orders/desk.py", "--model", "offline", code=9).err
    assert "put an empty __init__.py into its directory." in told


def test_a_file_that_is_not_there_is_named(perdure: Callable[..., Any]) -> None:
    told = perdure("send", "--new", "s", "Hello", "--tools", "dsek.py", "--model", "offline", code=9).err
    assert "The file dsek.py does not exist." in told


def test_a_sub_agent_that_is_named_twice_is_one(perdure: Callable[..., Any], home: Path) -> None:
    (home / "desk.py").write_text(CLERK)
    (home / "clerk.yaml").write_text("description: Gives money back.\nmodel: offline\n")
    ask = 'call clerk {"prompt": "call refund {\\"amount\\": 4}"}'
    perdure("send", "--new", "s", ask, "--tools", "desk.py", "--model", "offline", code=10)
    told = perdure("approve", "s", "--tools", "desk.py", "--agent", "clerk.yaml")
    assert "4 given back" in told.out


def test_two_sub_agents_of_one_name_are_refused(perdure: Callable[..., Any], home: Path) -> None:
    (home / "desk.py").write_text(CLERK)
    perdure("send", "--new", "s", "Hello", "--tools", "desk.py", "--model", "offline")
    (home / "clerk.yaml").write_text("description: Another one.\nmodel: offline\n")
    told = perdure("send", "s", "Hello", "--tools", "desk.py", "--agent", "clerk.yaml", code=9).err
    assert "Two sub-agents are named 'clerk'" in told
