"""Google ADK. Its source distribution has no tests, so perdure's own tests of its contracts are run instead.

They are in `tests/adapters/test_google_adk*.py`: the contract of ADK's own backends, a lock-step with its in-memory
service, stale writers and kills. `make test` runs the same with fewer rounds.
"""

from __future__ import annotations

from pathlib import Path

from suite import Suite

_TESTS = Path(__file__).parents[1] / "adapters"
_FILES = tuple(str(path) for path in sorted(_TESTS.glob("test_google_adk*.py")))

SUITES = (
    Suite(
        "google-adk",
        "google-adk",
        _FILES,
        bar=130,
        # They need no plug-in for asyncio, and a warning from it would be an error here.
        arguments=("-p", "no:asyncio", f"--rootdir={_TESTS.parents[1]}", f"--confcutdir={_TESTS.parent}"),
        environment={"PERDURE_TORTURE": "1"},
        minutes=30,
    ),
)
