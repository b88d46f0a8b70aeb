"""Adapters where their frameworks are not installed."""

from __future__ import annotations

import json
import subprocess
import sys

ADAPTERS = {
    "openai_agents": ("openai-agents", "agents"),
    "langgraph": ("langgraph", "langgraph"),
    "google_adk": ("google-adk", "google.adk"),
    "claude_agent_sdk": ("claude", "claude_agent_sdk"),
    "pydantic_ai": ("pydantic-ai", "pydantic_ai"),
    "strands": ("strands", "strands"),
}
PROGRAM = """
import importlib, json, sys
from perdure import ConfigurationError

told = {}
for adapter, (_, framework) in json.loads(sys.argv[1]).items():
    sys.modules[framework] = None  # as if it were not there
    try:
        importlib.import_module(f"perdure.adapters.{adapter}")
    except ConfigurationError as error:
        told[adapter] = str(error)
print(json.dumps(told))
"""


def test_an_adapter_without_its_framework_says_what_to_install() -> None:
    """It says so whichever package is missing first."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(ADAPTERS)], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert told.keys() == ADAPTERS.keys()
    for adapter, (extra, _) in ADAPTERS.items():
        assert f"pip install 'perdure[{extra}]'" in told[adapter]
