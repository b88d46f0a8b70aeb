"""`--owner`: on the command line too, no other owner's session exists."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tests.cli.conftest import Said

import perdure as library
from perdure.cli.main import COMMANDS, cli
from perdure.cli.session_ids import ids_beginning_with
from perdure.model.ids import mark_of, now
from perdure.protocols import Token

STORE = "sqlite:///s.db"
IT = "<it>"
BOBS_TOKEN = "b" * 12
# Each command with another owner's session, or without a session if it takes none.
LINES: dict[str, list[list[str]]] = {
    "chat": [["-s", IT]],
    "send": [[IT, "hi"], ["mine", "hi", "--key", "bobs-key"]],
    "queue": [["ls"], ["ls", "--json"], ["retry", IT], ["drop", IT], ["drop", IT, "bobs-key"]],
    "schedule": [["ls"], ["add", "digest", "hi", "--cron", "0 7 * * MON", "-s", IT], ["remove", IT]],
    "token": [["ls"], ["ls", "--json"], ["new", "bob"], ["new", "--everyone"], ["revoke", BOBS_TOKEN]],
    "approve": [[IT]],
    "deny": [[IT, "no"]],
    "answer": [[IT, "call", "1"]],
    "cancel": [[IT]],
    "recover": [[IT], []],
    "inject": [[IT, "hi"]],
    "ls": [[], ["--all", "--json"], ["--parent", IT], ["--status", "deleted"]],
    "show": [[IT], [IT, "--json"]],
    "versions": [[IT], [IT, "--json"]],
    "inspect": [["--static", "pages", IT]],
    "tree": [[IT]],
    "events": [[IT]],
    "diff": [["mine", IT], [IT, "mine"]],
    "search": [["zanzibar"], ["zanzibar", "--in", IT]],
    "replay": [[IT], ["mine", IT], ["--all", "--model", "recorded", "--json"]],
    "stats": [[], ["--json"]],
    "fork": [[IT], ["mine", IT]],
    "trim": [[IT, "1"]],
    "compact": [[IT]],
    "uncompact": [[IT]],
    "reset": [[IT]],
    "rewind": [[IT, "1"]],
    "undo": [[IT]],
    "suspend": [[IT]],
    "resume": [[IT]],
    "rename": [[IT, "mine now"]],
    "tag": [[IT, "x"]],
    "delete": [[IT]],
    "restore": [[IT]],
    "export": [[IT], [IT, "--format", "markdown"], ["--format", "openai"]],
    "import": [["../bobs.jsonl"]],
    "fsck": [[IT], []],
    "erase": [[IT, "--yes"], ["--of", "bob", "--yes"]],
    "purge": [["--status", "completed", "--yes"], [IT, "--yes"]],
    "forget": [[IT, "--before", "2", "--yes"], [IT, "--before", "2"]],
    "redact": [[IT, "x", "--yes"]],
    "gc": [[]],
    "doctor": [[]],
}
# These are not about one owner's sessions: a first directory, a shell, a whole store, the sessions of all.
OTHERS = {"tour", "init", "completion", "backup", "keys", "copy", "worker", "serve", "acp", "mcp"}


def test_no_command_is_forgotten() -> None:
    """A new command needs a line in LINES."""
    assert set(LINES) | OTHERS == set(COMMANDS)


async def _ann_begins() -> None:
    async with library.connect(STORE, model="offline") as app:
        await (await app.of("ann").open("mine")).inject({"role": "user", "content": "hello"})


async def _bob_begins() -> list[str]:
    """Give Bob some sessions, and return all ids and names of them."""
    async with library.connect(STORE, model="offline") as app:
        bob = app.of("bob")
        await (await bob.open("order-7")).send("zanzibar", key="bobs-key")
        await bob.fork("order-7", "order-8")
        await bob.delete("order-8")
        await bob.export("../bobs.jsonl")
        token = Token(digest="b" * 64, owner="bob", may_write=True, created_at=now())
        await app.store.add_token(token)  # type: ignore[attr-defined]
        mark = mark_of("bob")
        return ["order-7", f"{mark}order-7", f"{mark}order-8", f"{mark}order", mark[:6], "@"]


async def _state() -> list[object]:
    async with library.connect(STORE) as app:
        found = [*await app.list(owner="bob"), *await app.list(owner="bob", status="deleted")]
        store: Any = app.store
        return [*[(info, await store.dump(info.id)) for info in found], *await store.tokens()]


def told_by(name: str, line: list[str], it: str) -> str:
    """Return a command's output without numbers and new ids, which depend on sizes, times and chance."""
    arguments = [it if each == IT else each for each in line]
    options = ["--store", STORE, "--owner", "ann"]
    done = CliRunner().invoke(cli, [name, *arguments, *options], input="", prog_name="perdure")
    assert done.exception is None or isinstance(done.exception, SystemExit), (name, line, done.exception)
    text = re.sub("[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32}", "<id>", f"{done.exit_code}: {done.stdout}\n{done.stderr}")
    return re.sub(r"[\d.,]+", "#", text)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LINES)
def test_a_command_says_what_it_says_where_the_other_owner_is_not(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bob has sessions in one of two stores: Ann, who has her own, gets the same output for both."""
    heard: dict[str, list[str]] = {}
    tried: list[str] = []
    for where in ("with", "without"):
        (home / where).mkdir()
        monkeypatch.chdir(home / where)
        asyncio.run(_ann_begins())
        tried = asyncio.run(_bob_begins()) if where == "with" else tried
        before = asyncio.run(_state())
        lines = [(line, it) for line in LINES[name] for it in (tried if IT in line else [""])]
        heard[where] = [told_by(name, line, it) for line, it in lines]
        assert asyncio.run(_state()) == before
        assert bool(before) == (where == "with")
    assert heard["with"] == heard["without"]
    assert not any("Traceback" in each or "No such option" in each for each in heard["with"])


@pytest.mark.parametrize("name", COMMANDS)
def test_no_two_options_of_a_command_share_a_name(name: str) -> None:
    """Otherwise one option would get the value of another: `--of` that of `--owner`."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    names = [param.name for param in command.params]
    assert sorted(names, key=str) == sorted(set(names), key=str)


def test_an_owner_erases_a_session_of_its_own_and_nobody_else(perdure: Callable[..., Said], home: Path) -> None:
    """`--owner` says who asks, and `--of` whose sessions are erased."""
    asyncio.run(_ann_begins())
    asyncio.run(_bob_begins())
    common = ("--store", STORE, "--yes", "--owner", "ann")
    refused = perdure("erase", "--of", "bob", *common, code=9)
    assert "nobody else's" in refused.err
    perdure("erase", *common, code=2)
    assert len(asyncio.run(_state())) == 3  # his token too
    assert perdure("erase", "mine", *common).out == "sessions erased: 1\n"
    assert perdure("erase", "--of", "ann", *common).out == "sessions erased: 0\n"


def test_no_id_of_anothers_is_offered_to_complete(home: Path) -> None:
    """A shell that completes an id is offered only the owner's own."""
    asyncio.run(_ann_begins())
    asyncio.run(_bob_begins())
    for owner, found in (("ann", 1), ("bob", 1), ("dan", 0)):
        with (
            cli.make_context("perdure", ["show", "x"]) as above,
            cli.get_command(above, "show").make_context(  # type: ignore[union-attr]
                "show", ["x", "--store", STORE, "--owner", owner], parent=above
            ) as context,
        ):
            assert len(ids_beginning_with(context, "o")) == found


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [*LINES, "copy"])
@pytest.mark.parametrize("how", ["behind", "before", "variable", "file"])
def test_an_empty_owner_is_not_everybody(name: str, how: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose variable is unset must not see, or erase, everybody's sessions: exit code 2, nothing is done."""
    asyncio.run(_bob_begins())
    before = asyncio.run(_state())
    monkeypatch.setenv("PERDURE_STORE", STORE)
    if how == "variable":
        monkeypatch.setenv("PERDURE_OWNER", "")
    if how == "file":
        Path("perdure.toml").write_text('owner = ""\n')
    given = ["--owner", ""] if how in ("behind", "before") else []
    for line in [["copy.db"]] if name == "copy" else LINES[name]:
        words = [name, *("@" if each == IT else each for each in line)]
        done = CliRunner().invoke(cli, given + words if how == "before" else words + given, input="")
        assert done.exit_code == 2, (line, done.stdout, done.stderr)
        assert " is empty. " in done.stderr
        assert "zanzibar" not in done.stdout
    assert asyncio.run(_state()) == before
    assert not Path("copy.db").exists()


def test_an_empty_variable_is_overruled_by_an_owner_that_is_typed(
    perdure: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typed option comes first, as for every setting."""
    asyncio.run(_bob_begins())
    monkeypatch.setenv("PERDURE_OWNER", "")
    assert "zanzibar" in perdure("ls", "--owner", "bob", "--store", STORE).out


def test_nothing_is_completed_for_an_empty_owner(home: Path) -> None:
    """A shell does not get everybody's ids."""
    asyncio.run(_bob_begins())
    words = ["show", "x", "--store", STORE, "--owner", ""]
    with (
        cli.make_context("perdure", ["show", "x"], resilient_parsing=True) as above,
        cli.get_command(above, "show").make_context(  # type: ignore[union-attr]
            "show", words[1:], parent=above, resilient_parsing=True
        ) as context,
    ):
        assert ids_beginning_with(context, "o") == []


@pytest.mark.parametrize("option", ["--store", "--model", "--agent"])
def test_no_other_setting_may_be_empty(option: str, perdure: Callable[..., Said]) -> None:
    """An empty text is a variable that a script has not set."""
    assert f"{option} is empty" in perdure("send", "--new", "hi", option, "", code=2).err
