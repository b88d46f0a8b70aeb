"""Checks of a store from the command line: whose they are, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from perdure import SessionId


def two_owners(perdure: Callable[..., Any]) -> None:
    for owner in ("ada", "bob"):
        perdure("--store", "s.db", "--owner", owner, "send", "--new", f"of-{owner}", "hello")


def test_an_owner_can_check_a_session_and_not_the_store(perdure: Callable[..., Any], home: Path) -> None:
    """Of others' not even their ids are told; nor does an owner clear up what they have left."""
    two_owners(perdure)
    damage = apsw.Connection(str(home / "s.db"))
    damage.execute("UPDATE session SET taken = 5 WHERE id LIKE '%.of-bob'")
    damage.close()
    assert perdure("--store", "s.db", "--owner", "ada", "fsck", "of-ada").out.endswith("no problems\n")
    for arguments, code in ((("fsck",), 2), (("fsck", "of-bob"), 3), (("gc",), 9)):
        refused = perdure("--store", "s.db", "--owner", "ada", *arguments, code=code)
        assert refused.out == ""
        assert "of-bob" not in refused.err or "of-bob" in arguments
    assert "of-bob" in perdure("--store", "s.db", "fsck", code=6).out


def test_a_problem_is_told_with_its_place_and_its_repair(perdure: Callable[..., Any], home: Path) -> None:
    """On two lines for people, and field by field for programs."""
    two_owners(perdure)
    damage = apsw.Connection(str(home / "s.db"))
    damage.execute("UPDATE session SET taken = 5 WHERE id LIKE '%.of-ada'")
    damage.close()
    shown = perdure("--store", "s.db", "fsck", code=6).lines
    of_ada = SessionId.under("ada", "of-ada")
    assert shown[0].startswith(
        f"✗ {of_ada}: how far its inbox is taken: it is noted to be taken to where it does not reach"
    )
    assert shown[1].startswith("  Nothing that was said is touched by it. Copying the store")
    (problem,) = perdure("--store", "s.db", "fsck", "--json", code=6).json["problems"]
    assert problem["session"] == of_ada
