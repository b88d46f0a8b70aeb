"""The suite of the OpenAI Agents SDK, with PerdureSession in place of its SQLiteSession."""

from __future__ import annotations

from suite import Suite

_FILES = (
    "tests/memory/test_session.py",
    "tests/memory/test_session_limit.py",
    "tests/memory/test_compaction_suffix.py",
    "tests/memory/test_compaction_model_visibility.py",
    "tests/memory/test_openai_responses_compaction_session.py",
    "tests/extensions/memory/test_encrypt_session.py",
    "tests/sandbox/test_memory.py",
    "tests/sandbox/test_runtime.py",
    "tests/test_agent_runner.py",
    "tests/test_agent_runner_streamed.py",
    "tests/test_max_turns.py",
    "tests/test_native_tool_failure_history.py",
    "tests/test_programmatic_tool_calling.py",
    "tests/test_run_impl_resume_paths.py",
    "tests/test_soft_cancel.py",
    "tests/test_tool_batch_failure_history.py",
    "tests/test_tool_failure_boundaries.py",
)

SUITES = (Suite("openai-agents", "openai-agents", _FILES, bar=1_400, minutes=15),)


def pytest_configure() -> None:
    """Put PerdureSession where the tests look for SQLiteSession."""
    import agents
    from agents import memory
    from agents.memory import sqlite_session
    from perdure.adapters.openai_agents import PerdureSession

    for module in (agents, memory, sqlite_session):
        module.SQLiteSession = PerdureSession
