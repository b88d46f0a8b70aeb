"""The suites of Strands Agents that keep sessions, with PerdureSessionRepository in place of their repository."""

from __future__ import annotations

import sys
from pathlib import Path

from suite import Suite

_FILES = ("tests/strands/session/test_repository_session_manager.py", "tests/strands/agent/test_agent.py")

SUITES = (Suite("strands", "strands-agents", _FILES, bar=232),)


def pytest_configure() -> None:
    """Put PerdureSessionRepository where the tests look for their repository in memory."""
    sys.path.insert(0, str(Path.cwd()))  # the tests import each other as a package
    from tests.fixtures import mock_session_repository

    from perdure import MemoryStore
    from perdure.adapters.strands import PerdureSessionRepository

    class MockedSessionRepository(PerdureSessionRepository):
        def __init__(self) -> None:
            super().__init__(store=MemoryStore())

    mock_session_repository.MockedSessionRepository = MockedSessionRepository
