"""The store-facing suites of the Claude Agent SDK, with PerdureSessionStore in place of its InMemorySessionStore."""

from __future__ import annotations

from typing import Any

from suite import Suite

_FILES = (
    "tests/test_session_store_conformance.py",
    "tests/test_session_summary.py",
    "tests/test_session_import.py",
    "tests/test_session_resume.py",
    "tests/test_session_helpers_store.py",
    "tests/test_transcript_mirror.py",
)
_SETS_TIMES = "sets the times of sessions in the dictionary that the in-memory class has them in"
_AT_ONCE = "wants an answer within a few `sleep(0)`, which no store with input and output gives"
_RESUME = "tests/test_session_resume.py::TestHappyPath::test_continue_"

SUITES = (
    Suite(
        "claude-agent-sdk",
        "claude-agent-sdk",
        _FILES,
        bar=343,
        excused={
            f"{_RESUME}picks_most_recent*": _SETS_TIMES,
            f"{_RESUME}skips_sidechain_sessions*": _SETS_TIMES,
            f"{_RESUME}tie_break_is_deterministic*": _SETS_TIMES,
            "*gap_fill_bounded_concurrency*": _AT_ONCE,
            "*load_concurrency_is_bounded*": _AT_ONCE,
            "*cancelled_after_mkdtemp*": _AT_ONCE,
            "*eager_flush_mode_appends_per_frame*": _AT_ONCE,
        },
    ),
)


def pytest_configure() -> None:
    """Put PerdureSessionStore where the tests look for InMemorySessionStore."""
    import claude_agent_sdk
    from claude_agent_sdk._internal import session_store

    store = _store()
    for module in (claude_agent_sdk, session_store):
        module.InMemorySessionStore = store  # type: ignore[misc]


def _store() -> type:
    """Return PerdureSessionStore with the test methods of the in-memory class."""
    from perdure import MemoryStore
    from perdure.adapters.claude_agent_sdk import PerdureSessionStore

    class InMemorySessionStore(PerdureSessionStore):
        def __init__(self) -> None:
            super().__init__(store=MemoryStore())

        def get_entries(self, key: Any) -> Any:
            return self._home.wait(self._load(key)) or []

        @property
        def size(self) -> int:
            return len(self._infos(top_level=True))

        def clear(self) -> None:
            for info in self._infos():
                self._home.wait(self._home.store.delete(info.id))

        def _infos(self, **filters: Any) -> Any:
            return self._home.wait(self._home.store.list(limit=1000, **filters))

    return InMemorySessionStore
