"""Access tokens on the command line: made, listed, revoked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure import connect
from perdure.model import ids
from perdure.protocols import Token
from perdure.server.tokens import holder_of, token_book
from perdure.testing import FrozenClock

from .terminal_session import TerminalSession, clean_environment, command

SECRET = re.compile("pdr_[A-Za-z0-9_-]{43}")
PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
HOSTILE = "\x1b[31mred\u202e"


@pytest.fixture
def said(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the command on a store that does not exist yet."""
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///kept.db")
    return perdure


def holder(secret: str) -> Token | None:
    """Return the holder that a service takes a client for."""

    async def asked() -> Token | None:
        async with connect("sqlite:///kept.db", model="offline") as sessions:
            return await holder_of(token_book(sessions.store), secret)

    return asyncio.run(asked())


def test_a_token_is_made_for_an_owner(said: Callable[..., Any]) -> None:
    """Only the secret goes to stdout. It opens the owner's sessions until it is revoked."""
    made = said("token", "new", "ada")
    (secret,) = made.lines
    assert SECRET.fullmatch(secret)
    assert "not shown again" in made.err
    assert secret not in made.err
    found = holder(secret)
    assert found is not None
    assert (found.owner, found.may_write, found.expires_at, found.name) == ("ada", True, None, None)
    assert f"perdure token revoke {found.id}" in made.err
    assert said("token", "revoke", found.id).out == f"revoked\t{found.id}\n"
    assert holder(secret) is None
    assert said("token", "ls").out == ""


def test_a_token_says_what_it_may_do(said: Callable[..., Any]) -> None:
    made = said("token", "new", "--everyone", "--read-only", "--expires", "30d", "--name", "the dashboard", "--json")
    form = made.json
    assert "not shown again" in made.err
    found = holder(form.pop("secret"))
    assert found is not None
    assert found.expires_at is not None
    assert (found.owner, found.may_write, found.name) == (None, False, "the dashboard")
    assert abs(found.expires_at - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=1)
    assert said("token", "ls", "--json").json == form
    assert set(form) == {"id", "owner", "may_write", "name", "created_at", "expires_at"}
    assert all(f"`{field}`" in PAGE for field in (*form, "secret", "revoked"))


def test_tokens_are_listed(said: Callable[..., Any]) -> None:
    """The oldest comes first, one a line. Without a verb they are listed too."""
    made = [
        said("token", "new", "ada", "--expires", "2126-01-31", "--json").json,
        said("token", "new", "bob", "--read-only", "--name", f"a {HOSTILE}", "--json").json,
        said("token", "new", "--everyone", "--json").json,
        said("token", "new", "--everyone", "--read-only", "--json").json,
    ]
    rows = [each.split("\t") for each in said("token").lines]
    assert [row[0] for row in rows] == [each["id"] for each in made]
    assert [row[1] for row in rows] == ["write", "read", "write all", "read all"]
    assert [row[2] for row in rows] == ["ada", "bob", "", ""]
    assert rows[0][4] == "2126-01-31T00:00:00+00:00"
    assert "\x1b" not in rows[1][5]
    assert said("token", "ls").lines == said("token").lines
    shown = said("token", "ls").out + said("token", "ls", "--json").out
    assert not any(each["secret"] in shown for each in made)


def test_an_owner_lists_makes_and_revokes_its_own_tokens_only(said: Callable[..., Any]) -> None:
    said("token", "new", "ada")
    bobs = said("token", "new", "bob", "--json").json
    said("token", "new", "ada", "--owner", "ada")
    assert [each["owner"] for each in said("token", "ls", "--json", "--owner", "ada").json_lines] == ["ada", "ada"]
    for wrong in (("bob",), ("--everyone",)):
        assert "for this owner only" in said("token", "new", *wrong, "--owner", "ada", code=2).err
    assert "No token has the id" in said("token", "revoke", bobs["id"], "--owner", "ada", code=3).err
    assert len(said("token", "ls").lines) == 3


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["new", ""], 2, "an owner is a text that is not empty"),
        (["new"], 2, "Type: perdure token new OWNER"),
        (["new", "ada", "--everyone"], 2, "Type: perdure token new OWNER"),
        (["new", "ada", "--expires", "soon"], 2, "'soon' is not a time"),
        (["new", "ada", "--expires", ""], 2, "is not a time"),
        (["new", "ada", "--expires", "-3d"], 2, "is not a time"),
        (["new", "ada", "--expires", "999999w"], 2, "is too far away"),
        (["new", "ada", "--expires", "0d"], 2, "over already"),
        (["new", "ada", "--expires", "2020-01-31"], 2, "over already"),
        (["new", "ada", "--name", ""], 2, "a name is a text"),
        (["new", "ada", "--name", "x" * 501], 2, "a name is a text"),
        (["new", "ada", "bob"], 2, "unexpected extra argument"),
        (["ls", "ada"], 2, "Type: perdure token new OWNER"),
        (["ls", "--everyone"], 2, "Type: perdure token new OWNER"),
        (["ls", "--name", ""], 2, "Type: perdure token new OWNER"),
        (["revoke"], 2, "Type: perdure token new OWNER"),
        (["revoke", "x", "--read-only"], 2, "Type: perdure token new OWNER"),
        (["revoke", "x"], 3, "No token has the id 'x'. Type: perdure token ls"),
        (["revoke", ""], 3, "No token has the id ''"),
        (["revoke", HOSTILE], 3, "No token has the id"),
        (["make"], 2, "'make' is not one of"),
    ],
    ids=str,
)
def test_what_is_typed_wrong_changes_nothing(said: Callable[..., Any], words: list[str], code: int, told: str) -> None:
    """The error has a line or two."""
    said("token", "new", "ada")
    before = said("token", "ls", "--json").out
    wrong = said("token", *words, code=code)
    assert told in wrong.err
    assert "Traceback" not in wrong.err
    assert "\x1b" not in wrong.err
    assert wrong.out == ""
    assert said("token", "ls", "--json").out == before


def test_a_store_that_is_not_there_has_no_tokens(perdure: Callable[..., Any], home: Path) -> None:
    """`new` begins one; other verbs refuse a mistyped name, and so does a wrong command line."""
    for words in (["ls"], ["revoke", "x"]):
        assert "No store is at" in perdure("token", *words, "--store", "sqlite:///new.db", code=9).err
    perdure("token", "new", "ada", "--expires", "2020-01-31", "--store", "sqlite:///new.db", code=2)
    perdure("token", "new", "", "--store", "sqlite:///new.db", code=2)
    assert not (home / "new.db").exists()
    perdure("token", "new", "ada", "--store", "sqlite:///new.db")
    assert (home / "new.db").exists()


def test_a_damaged_token_is_named_and_can_be_revoked(said: Callable[..., Any], home: Path) -> None:
    token_id = said("token", "new", "ada", "--json").json["id"]
    db = apsw.Connection(str(home / "kept.db"))
    db.execute("UPDATE token SET owner = NULL")
    db.close()
    told = said("token", "ls", code=6).err
    assert f"perdure token revoke {token_id}" in told
    assert f"token '{token_id}'" in said("fsck", code=6).out
    said("token", "revoke", token_id)
    assert said("token", "ls").out == ""


def test_tokens_in_processes_of_their_own(process: Callable[..., Any], home: Path) -> None:
    """The store is a directory of files this time, which others cannot read."""
    common = ("--store", "file://kept")
    secret = process("token", "new", "ada", *common).out.strip()
    assert SECRET.fullmatch(secret)
    assert (home / "kept" / ".tokens").stat().st_mode & 0o777 == 0o600
    assert secret not in (home / "kept" / ".tokens").read_text()
    (token_id,) = [json.loads(each)["id"] for each in process("token", "ls", "--json", *common).lines]
    told = process("token", "revoke", "nobody", *common, code=3)
    assert (told.out, told.err.count("\n")) == ("", 1)
    process("token", "revoke", token_id, *common)
    assert process("token", "ls", *common).out == ""


def test_a_person_sees_a_table(said: Callable[..., Any], home: Path) -> None:
    """It has a head, and says how soon a token expires, and which have expired."""
    said("token", "new", "ada", "--expires", "30d")
    with ids.use(clock=FrozenClock(datetime(2025, 1, 1, tzinfo=UTC))):
        said("token", "new", "bob", "--expires", "1d")
    env = clean_environment(home, PERDURE_STORE="sqlite:///kept.db")
    with TerminalSession(command("token"), cwd=home, env=env) as terminal:
        assert terminal.ends() == 0
        lines = [each.split() for each in terminal.text.splitlines() if each.strip()]
    assert lines[0] == ["ID", "MAY", "OWNER", "CREATED", "EXPIRES"]  # no token has a name
    assert [line[1:3] for line in lines[1:]] == [["write", "bob"], ["write", "ada"]]
    assert lines[1][-1] == "expired"
    assert lines[2][-3:] == ["in", "30", "d"]


def test_a_person_without_tokens_is_told_how_to_make_one(said: Callable[..., Any], home: Path) -> None:
    said("send", "--new", "a", "hello")
    env = clean_environment(home, PERDURE_STORE="sqlite:///kept.db")
    with TerminalSession(command("token"), cwd=home, env=env) as terminal:
        assert terminal.ends() == 0
        assert "token new OWNER" in terminal.text
