"""`perdure purge` by rules, and the commands' output about sessions under hold."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import AgentDefinition, SqliteStore, connect_blocking
from perdure.model.ids import now, use
from perdure.testing import FrozenClock

STORE = "sqlite:///sessions.db"


@pytest.fixture
def old(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make five sessions that nobody has touched for a hundred days, one of them under hold, and a young one."""
    monkeypatch.setenv("PERDURE_STORE", STORE)
    with (
        use(clock=FrozenClock(now() - timedelta(days=100), tick=0.001)),
        connect_blocking(STORE, model="offline") as app,
    ):
        for number in range(5):
            chat = app.open(f"s{number}", tags=("audit",) if number == 4 else ())
            chat.send("one")
            chat.send("two")
        app.hold("s3", "case-7")
    with connect_blocking(STORE, model="offline") as app:
        app.open("young").send("hi")


def test_a_dry_run_tells_what_the_real_one_erases(perdure: Callable[..., Any], old: None) -> None:
    """Both print it in words and as JSON, with the bytes and what stays; only the real one erases."""
    told = perdure("purge", "--idle", "90d", "--dry-run", "--json").json
    assert (told["dry_run"], told["sessions"], told["versions"], told["messages"]) == (True, 4, 12, 16)
    assert told["left"] == [{"session": "s3", "why": "hold", "detail": "hold:case-7 on s3"}]
    assert told["bytes"] > 1000
    shown = perdure("purge", "--idle", "90d", "--dry-run").lines
    assert shown[:4] == ["sessions\t4", "versions\t12", "messages\t16", f"bytes\t{told['bytes']:,}"]
    assert shown[-1] == "s3\tit is under hold (hold:case-7 on s3)"
    assert len(perdure("ls", "--json").json_lines) == 6
    done = perdure("purge", "--idle", "90d", "--yes", "--json").json
    same = ("sessions", "versions", "messages", "bytes", "erased", "left")
    assert [done[key] for key in same] == [told[key] for key in same]
    assert {row["id"] for row in perdure("ls", "--json").json_lines} == {"s3", "young"}


def test_a_policy_file(perdure: Callable[..., Any], old: None, home: Path) -> None:
    """Its rules are applied; an error names the wrong field, and nothing is erased."""
    file = home / "retention.toml"
    file.write_text('idle = "90d"\n[tags.audit]\nage = "7y"\nversions = 1\n')
    assert perdure("purge", "--policy", file, "--yes", "--json").json["erased"] == ["s0", "s1", "s2"]
    file.write_text('[tags.audit]\nidle = "soon"\n')
    refused = perdure("purge", "--policy", file, "--yes", code=2)
    assert "tags.audit.idle" in refused.err
    perdure("purge", "--policy", "none.toml", "--yes", code=9)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--idle", "soon", "--yes"], "--idle: expected a text such as"),
        (["--versions", "0", "--yes"], "--versions"),
        (["--idle", "1d", "--policy", "x.toml", "--yes"], "not both"),
        (["--idle", "1d", "--status", "active", "--yes"], "or rules"),
        (["--status", "active", "--dry-run"], "go with rules"),
        (["--idle", "1d"], "Add --yes"),
    ],
)
def test_what_does_not_go_together_is_refused(
    perdure: Callable[..., Any], old: None, words: list[str], told: str
) -> None:
    """A wrong rule, or rules beside other options, erase nothing."""
    assert told in " ".join(perdure("purge", *words, code=2).err.split())
    assert len(perdure("ls", "--json").json_lines) == 6


def test_what_is_under_hold_stays_and_is_told_of(perdure: Callable[..., Any], old: None) -> None:
    """Direct commands print the command that lifts it; bulk ones name it."""
    for command in (["erase", "s3", "--yes"], ["purge", "s3", "--yes"], ["forget", "s3", "--before", "2", "--yes"]):
        assert "perdure tag s3 --remove hold:case-7" in perdure(*command, code=5).err
    purged = perdure("purge", "--older-than", "90d", "--yes")
    assert (purged.out, "s3 (hold:case-7)" in purged.err) == ("sessions erased: 4\n", True)
    assert "+hold:case-7" in perdure("events", "s3").out
    perdure("tag", "s3", "--remove", "hold:case-7")
    assert "-hold:case-7" in perdure("events", "s3").out
    assert perdure("erase", "s3", "--yes").out == "sessions erased: 1\n"


def test_an_owner_under_hold_is_not_erased_whole(perdure: Callable[..., Any], home: Path) -> None:
    """The session that stays is named, and the others are erased."""
    with connect_blocking(STORE, model="offline") as app:
        ada = app.of("ada")
        held = ada.open("a").id
        ada.open("b")
        app.hold(held)
    erased = perdure("erase", "--of", "ada", "--yes", "--store", STORE, code=5)
    assert erased.out == "sessions erased: 1\n"
    assert f"{held} (hold)" in erased.err


@pytest.mark.parametrize("verb", ["erase", "purge"])
def test_none_of_several_sessions_is_erased_if_one_is_under_hold(perdure: Callable[..., Any], verb: str) -> None:
    for name in ("a", "b"):
        perdure("send", "--new", name, "hello")
    perdure("tag", "b", "hold:case-7")
    assert "'b' is under hold" in perdure(verb, "a", "b", "--yes", code=5).err
    assert {each["id"] for each in perdure("ls", "--json").json_lines} == {"a", "b"}
    assert perdure(verb, "a", "a", "--yes").out == "sessions erased: 1\n"


async def test_an_error_says_how_many_of_several_sessions_were_erased_before(process: Callable[..., Any]) -> None:
    """Each session is one commit. A run under way keeps its own session, and no other."""
    for name in ("a", "b"):
        process("send", "--new", name, "hello", "--model", "offline", "--store", STORE)
    async with SqliteStore("sessions.db") as store:
        await store.claim("b", version=2, owner="another process", lease=60.0)
        refused = process("erase", "a", "b", "--yes", "--store", STORE, code=4)
    assert "sessions erased before the error: 1\n" in refused.err


def test_an_owner_is_told_how_a_hold_is_lifted(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "a", "hello", "--owner", "ada")
    perdure("tag", "a", "hold", "--owner", "ada")
    told = perdure("tag", "a", "--remove", "hold", "--owner", "ada", code=9).err
    assert "Without --owner" in told
    typed = told.splitlines()[-1].split("perdure ")[-1]
    perdure(*typed.split())  # it can be pasted: it names the whole id, with the owner's mark
    assert perdure("ls", "--owner", "ada", "--json").out.count('"hold"') == 0


def test_a_hold_on_a_caller_is_said_to_be_there(perdure: Callable[..., Any], home: Path) -> None:
    """The sub-agent's session, which is held too, has no such tag that could be taken away."""
    clerk = AgentDefinition("clerk", description="Books.", model="offline")
    with connect_blocking("sqlite:///s.db", model="offline", subagents=[clerk], owner="ada") as app:
        desk = app.open("desk")
        desk.send('call clerk {"prompt": "Hello"}')
        desk.hold("case-7")
    told = perdure("erase", "--of", "ada", "--yes", "--store", "sqlite:///s.db", code=5).err
    assert told.count("hold:case-7") == 2
    assert told.count("(hold:case-7, on the session that called it)") == 1


def test_an_owner_of_nothing_is_told_of(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "a", "Hello", "--owner", "ada", "--model", "offline")
    erased = perdure("erase", "--of", "adda", "--yes")
    assert erased.out == "sessions erased: 0\n"
    assert "'adda' has no session in this store." in erased.err
    assert "'adda' has no session in this store." in perdure("export", "--owner", "adda", "-o", "adda.jsonl").err
    assert "no session" not in perdure("erase", "--of", "ada", "--yes").err
