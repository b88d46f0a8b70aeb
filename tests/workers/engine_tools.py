"""Tools for the examples that run under workflow engines: they note their calls, and one may kill its process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

from perdure import tool

EXAMPLES = Path(__file__).parents[2] / "examples"
LEDGER, DEADLY = "ENGINE_LEDGER", "ENGINE_DEADLY"


def example(name: str) -> ModuleType:
    """Return the module of an example, with tools that write into the ledger."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # Temporal's sandbox imports the module again, by its name
    module = importlib.import_module(name)
    module.OPTIONS["tools"] = [pack, ship]
    return module


def noted(what: str) -> str:
    with open(os.environ[LEDGER], "a") as ledger:
        ledger.write(f"{what}\n")
    return what


@tool
def pack(order: int) -> str:
    """Pack an order: never twice."""
    return noted(f"packed {order}")


@tool(idempotent=True)
def ship(order: int) -> str:
    """Ship an order. The first time kills the process, if it is told to."""
    noted(f"shipping {order}")
    if DEADLY in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return noted(f"shipped {order}")
