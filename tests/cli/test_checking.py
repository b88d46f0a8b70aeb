"""Checks of a store on the command line: the sessions they cover, and their reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from perdure import SessionId
from perdure.stores.sqlite.marks import Marker


def two_owners(perdure: Callable[..., Any]) -> None:
    for owner in ("ada", "bob"):
        perdure("--store", "s.db", "--owner", owner, "send", "--new", f"of-{owner}", "hello")


def test_an_owner_can_check_a_session_and_not_the_store(perdure: Callable[..., Any], home: Path) -> None:
    """An owner does not see even the ids of others' sessions, and does not clear up what they have left."""
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
    """People get it on two lines, and programs field by field."""
    two_owners(perdure)
    damage = apsw.Connection(str(home / "s.db"))
    damage.execute("UPDATE session SET taken = 5 WHERE id LIKE '%.of-ada'")
    damage.close()
    shown = perdure("--store", "s.db", "fsck", code=6).lines
    of_ada = SessionId.under("ada", "of-ada")
    assert shown[0].startswith(
        f"✗ {of_ada}: how far its inbox is taken: it is noted to be taken to where it does not reach"
    )
    assert shown[1].startswith("  No message is affected. Copying the store")
    (problem,) = perdure("--store", "s.db", "fsck", "--json", code=6).json["problems"]
    assert problem["session"] == of_ada


def test_a_log_that_has_lost_a_commit_can_be_given_up(perdure: Callable[..., Any], home: Path) -> None:
    """Every command refuses the file and says how to give it up. After that SQLite's state counts; the log is kept."""
    two_owners(perdure)
    db = apsw.Connection(str(home / "s.db"))
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    db.execute("CREATE TABLE x (y); DROP TABLE x")
    raw = (home / "s.db-wal").read_bytes()
    marker = Marker(home / "s.db", 4096)
    marker.set((len(raw) - 32) // 4120)
    marker.close()
    db.close()
    (home / "s.db-wal").write_bytes(raw[:-1])
    refused = perdure("--store", "s.db", "ls", code=6)
    assert "perdure fsck --accept-lost-commits" in refused.err
    assert perdure("--store", "s.db", "fsck", "of-ada", "--accept-lost-commits", code=2).out == ""
    assert perdure("--store", "file://d", "fsck", "--accept-lost-commits", code=2).out == ""
    accepted = perdure("--store", "s.db", "fsck", "--accept-lost-commits")
    assert "s.db-wal-lost-1" in accepted.err
    assert accepted.out.endswith("no problems\n")
    assert (home / "s.db-wal-lost-1").read_bytes() == raw[:-1]
    assert perdure("--store", "s.db", "fsck", "--accept-lost-commits").err == ""
