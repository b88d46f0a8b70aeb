"""The suite of the OpenAI Agents SDK, with PerdureSession in place of its SQLiteSession."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

_INSIDE = "it reaches into SQLiteSession's connections, locks or tables"
_ENCRYPTED = "EncryptedSession takes an item back only from the SDK's own SQLiteSession, in the same transaction"
_CLOSED = "it closes the session's database, and PerdureSession shares its store with others"
_NOT_JSON = "it wants the TypeError of json.dumps, and perdure raises InvalidData"
_SESSION = "tests/memory/test_session.py::test_sqlite_session_"
_SUFFIX = "tests/memory/test_compaction_suffix.py::test_"
_COMPACTION = "tests/memory/test_openai_responses_compaction_session.py::TestOpenAIResponsesCompactionSession::test_"
_POP = "tests/extensions/memory/test_encrypt_session.py::test_encrypted_pop_"
_EXCUSED = {
    f"{_SESSION}closed_rejects_empty_add_items": _CLOSED,
    f"{_SESSION}failed_add_items_releases_write_lock": _NOT_JSON,
    f"{_SESSION}close_closes_worker_thread_connections": _INSIDE,
    f"{_SESSION}close_retries_quarantined_connection": _INSIDE,
    f"{_SESSION}closes_retired_connections_before_the_next_allocation": _INSIDE,
    f"{_SESSION}failed_clear_session_rolls_back": _INSIDE,
    f"{_SESSION}failed_pop_item_releases_write_lock": _INSIDE,
    f"{_SESSION}file_lock_is_shared_across_instances": _INSIDE,
    f"{_SESSION}get_items_limit_skips_corrupt_newest_rows": _INSIDE,
    f"{_SESSION}get_items_session_settings_limit_skips_corrupt_rows": _INSIDE,
    f"{_SESSION}keeps_connections_of_live_worker_threads": _INSIDE,
    f"{_SESSION}pop_item_returns_none_after_dropping_only_corrupt_rows": _INSIDE,
    f"{_SESSION}pop_item_skips_corrupt_most_recent": _INSIDE,
    f"{_SESSION}post_commit_cancellation_propagates_after_known_outcome*": _INSIDE,
    f"{_SESSION}reaps_connections_from_exited_worker_threads": _INSIDE,
    f"{_SESSION}rollback_failure_evicts_connection": _INSIDE,
    f"{_SUFFIX}cancelled_suffix_transaction_settles_before_newer_append[sqlite]": _INSIDE,
    f"{_SUFFIX}failed_encrypted_suffix_transaction_preserves_original_tokens[sqlite-*": _INSIDE,
    f"{_SUFFIX}suffix_transaction_rolls_back_failed_insert[sqlite]": _INSIDE,
    f"{_COMPACTION}settled_clear_failure_invalidates_response_chain*": _INSIDE,
    f"{_COMPACTION}settled_pop_failure_invalidates_response_chain*": _INSIDE,
    "tests/test_run_impl_resume_paths.py::test_handoff_resume_after_cancelled_compaction_commits*": _INSIDE,
    f"{_POP}authentication_is_atomic_with_concurrent_mutations*": _ENCRYPTED,
    f"{_POP}cancellation_waits_for_authentication_rollback": _ENCRYPTED,
    f"{_POP}rechecks_authentication_after_expired_tail": _ENCRYPTED,
    f"{_POP}wrong_key_preserves_*": _ENCRYPTED,
}

SUITES = (Suite("openai-agents", "openai-agents", _FILES, bar=1_626, excused=_EXCUSED, minutes=15),)


def pytest_configure() -> None:
    """Put PerdureSession where the tests look for SQLiteSession."""
    import agents
    from agents import memory
    from agents.extensions import memory as extensions
    from agents.memory import sqlite_session

    # These look for the SDK's own class: they must find that PerdureSession is another one, as they will elsewhere.
    _ = extensions.AdvancedSQLiteSession, extensions.EncryptedSession
    session = _session()
    for module in (agents, memory, sqlite_session):
        module.SQLiteSession = session  # type: ignore[misc]


def _session() -> type:
    """Return PerdureSession with the constructor of SQLiteSession."""
    from perdure import MemoryStore
    from perdure.adapters.openai_agents import PerdureSession

    class SQLiteSession(PerdureSession):
        def __init__(self, session_id: str, db_path: str | Path = ":memory:", **options: Any) -> None:
            options = {key: value for key, value in options.items() if key == "session_settings"}
            in_memory = str(db_path) == ":memory:"
            super().__init__(session_id, store=MemoryStore() if in_memory else f"sqlite:///{db_path}", **options)

        def close(self) -> None:
            """Leave the store open for its other users."""

    return SQLiteSession
