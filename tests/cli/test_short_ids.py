"""Ids as a terminal shows them, and as a person may type them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import perdure as P
from perdure.actions.lifecycle import DeleteSession
from perdure.cli import short_ids
from perdure.cli.main import cli
from perdure.cli.options import settings_of
from perdure.cli.session_ids import ids_beginning_with, named
from perdure.cli.short_ids import learn, shown
from perdure.model.ids import SessionId, mark_of
from perdure.stores.memory import MemoryStore
from perdure.testing.samples import fork, new_session

from .terminal_session import TerminalSession, clean_environment, command

FIRST = "0192f000-0000-7000-8000-00000000{end}"
"""Ids made at about the same time, as most ids in a store are."""


def uuid_with(end: str) -> str:
    return FIRST.format(end=end)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show ids as in a terminal, and nothing else."""
    monkeypatch.setattr(short_ids, "is_terminal", lambda: True)


def stored(home: Path, *ids: str, **attributes: Any) -> None:
    """Store sessions in a file that the command finds by itself, the first one first."""

    async def fill() -> None:
        async with P.SqliteStore(home / "s.db") as store:
            for session_id in ids:
                await store.create(new_session("hello", id=session_id, **attributes))

    asyncio.run(fill())
    (home / "perdure.toml").write_text('store = "sqlite:///s.db"\n')


def test_a_list_shows_ends_that_no_other_session_has(perdure: Callable[..., Any], home: Path, terminal: None) -> None:
    """An end has four characters or more, as needed; each is accepted. Ids that people chose are shown whole."""
    stored(home, uuid_with("4af2"), uuid_with("4bf2"), uuid_with("1bf2"), "order-7")
    rows = [line.split("\t")[0] for line in perdure("ls").lines]
    assert rows == ["order-7", "1bf2", "4bf2", "4af2"]
    for row, whole in zip(rows, ("order-7", *map(uuid_with, rows[1:])), strict=True):
        assert perdure("show", row, "--json").json["id"] == whole
    stored(home, uuid_with("4af2").replace("00004af2", "00104af2"))
    rows = [line.split("\t")[0] for line in perdure("ls").lines]
    assert rows == ["104af2", "order-7", "1bf2", "4bf2", "004af2"]
    for row in rows:
        assert perdure("show", row, "--json").json["id"].endswith(row)


def test_a_long_id_is_shown_by_a_beginning_that_no_other_has(
    perdure: Callable[..., Any], home: Path, terminal: None
) -> None:
    """It has twenty characters or more, or all but the hash; each is accepted. An owner's id is shown by its end."""
    app = [SessionId.of("assistant", "ada", f"{number}c9e4f1a-session") for number in (1, 2)]
    odd, marked = SessionId.of("order 7"), SessionId.under("ada", SessionId.of("assistant", "ada", "3"))
    nested = "assistant-of-the-whole-company-and-more"
    stored(home, *app, odd, marked, nested, "assistant-of-the-who")
    rows = [line.split("\t")[0] for line in perdure("ls").lines]
    assert rows == ["assistant-of-the-who", nested[:21], marked[-4:], "order-7", app[1][:20], app[0][:20]]
    for row, whole in zip(rows, ["assistant-of-the-who", nested, marked, odd, app[1], app[0]], strict=True):
        assert perdure("show", row, "--json").json["id"] == whole
    stored(home, SessionId.of("order 7", "again"), app[0].replace("1c9e4f1a-s", "1c9e4f1a-t"))
    rows = [line.split("\t")[0] for line in perdure("ls").lines]
    assert rows[0] == app[0].replace("1c9e4f1a-s", "1c9e4f1a-t")[:24]
    assert rows[-1] == app[0][:24]
    assert rows[-3] == odd[:8]


def test_the_state_of_apps_is_left_out_of_a_persons_list(
    perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter keeps it in sessions of its own, which pipes, JSON and --all show."""
    states = [
        SessionId.of("google-adk", "state", "app", "weather"),
        mark_of("ada") + "google-adk-state-user-x.h" + "a" * 26,
    ]

    async def fill() -> None:
        async with P.SqliteStore(home / "s.db") as store:
            for state in states:
                await store.create(new_session(id=state))
            await store.create(new_session("hello", id="google-adk-state-app-of-mine"))

    asyncio.run(fill())
    (home / "perdure.toml").write_text('store = "sqlite:///s.db"\n')
    assert len(perdure("ls").lines) == len(perdure("ls", "--json").lines) == 3
    monkeypatch.setattr("perdure.cli.looking.is_terminal", lambda: True)
    listed = perdure("ls")
    assert [line.split("\t")[0] for line in listed.lines] == ["google-adk-state-app-of-mine"]
    assert "2 sessions with the state of apps and users. Add --all" in listed.err
    assert len(perdure("ls", "--all").lines) == 3


def test_pipes_and_json_have_whole_ids(perdure: Callable[..., Any], home: Path) -> None:
    """A script reads what it can keep: tomorrow another session may have the same end."""
    stored(home, uuid_with("4af2"))
    whole = uuid_with("4af2")
    assert [line.split("\t")[0] for line in perdure("ls").lines] == [whole]
    assert perdure("tree", "4af2").lines[0].startswith(whole)
    assert perdure("search", "hello").lines[0].startswith(whole)
    for verb in (["ls"], ["show", "4af2"], ["tree", "4af2"]):
        assert perdure(*verb, "--json").json["id"] == whole


def test_json_has_whole_ids_in_a_terminal_too(perdure: Callable[..., Any], home: Path, terminal: None) -> None:
    stored(home, uuid_with("4af2"))
    for verb in (["ls"], ["show", "4af2"], ["tree", "4af2"]):
        assert perdure(*verb, "--json").json["id"] == uuid_with("4af2")
    assert perdure("search", "hello", "--json").json["session"] == uuid_with("4af2")
    assert perdure("fork", "4af2", "--json").json["parent"] == uuid_with("4af2")


def test_an_end_that_several_have_is_ambiguous(perdure: Callable[..., Any], home: Path) -> None:
    """They are named, at most five, and nothing is done."""
    stored(home, "a-4af2", "b-4af2")
    assert (
        "2 sessions begin or end with '4af2': a-4af2, b-4af2\nType more of the id."
        in perdure("delete", "4af2", code=2).err
    )
    stored(home, "4af2-c", *(f"{each}-4af2" for each in "defg"))
    told = perdure("delete", "4af2", code=2).err
    assert "More than 5 sessions begin or end with '4af2': 4af2-c, a-4af2, b-4af2, d-4af2, e-4af2 …" in told
    assert {each["status"] for each in perdure("ls", "--json").json_lines} == {"active"}
    stored(home, "4af2")
    assert perdure("show", "4af2", "--json").json["id"] == "4af2"  # a whole id is never ambiguous


def test_an_end_of_three_characters_names_nothing(perdure: Callable[..., Any], home: Path) -> None:
    """Too many ids have it; a beginning may be as short as a person likes."""
    stored(home, "x-4af2")
    perdure("show", "af2", code=3)
    assert perdure("show", "x", "--json").json["id"] == "x-4af2"


def test_a_deleted_session_is_found_by_its_end(perdure: Callable[..., Any], home: Path, terminal: None) -> None:
    """If another session has the same end, that one is meant, and the deleted one is shown longer."""
    stored(home, uuid_with("4af2"), uuid_with("4af2").replace("00004af2", "00014af2"))
    perdure("delete", uuid_with("4af2"))
    assert perdure("ls", "--json").json["id"].endswith("14af2")
    assert [line.split("\t")[0] for line in perdure("ls").lines] == ["4af2"]
    assert [line.split("\t")[0] for line in perdure("ls", "--status", "deleted").lines] == ["04af2"]
    assert perdure("show", "4af2", "--json").json["status"] == "active"
    assert perdure("show", "04af2", "--json").json["status"] == "deleted"


def test_an_owner_sees_and_types_names_without_a_mark(perdure: Callable[..., Any], home: Path, terminal: None) -> None:
    """This holds for beginnings and ends too. Others' ids change nothing, not even the length of a shown end."""
    ada, ben = mark_of("ada"), mark_of("ben")
    stored(home, f"{ada}{uuid_with('4af2')}", f"{ada}order-7", owner="ada")
    stored(home, f"{ben}{uuid_with('4af2')}", f"{ben}4af2", f"{ben}order-8", owner="ben")
    rows = [line.split("\t")[0] for line in perdure("--owner", "ada", "ls").lines]
    assert rows == ["order-7", "4af2"]
    for typed in ("order-7", "ord", "er-7", "4af2", "0192f", ada + "ord"):
        assert perdure("--owner", "ada", "show", typed, "--json").json["owner"] == "ada"
    for typed in ("order-8", "er-8", ben, ben + "order-8"):
        assert "No session" in perdure("--owner", "ada", "show", typed, code=3).err
    rows = [line.split("\t")[0] for line in perdure("--owner", "ben", "ls").lines]
    assert rows == ["order-8", "4af2", "04af2"]  # its own 4af2 is another session
    with click.Context(cli) as ctx:
        settings_of(ctx).store, settings_of(ctx).owner = "s.db", "ada"
        assert ids_beginning_with(ctx, "ord") == ["order-7"]
        assert ids_beginning_with(ctx, "er-7") == ["order-7"]
        assert ids_beginning_with(ctx, "er-8") == ids_beginning_with(ctx, ben) == []
        assert len(ids_beginning_with(ctx, "")) == 2


def test_the_last_used_session_is_named_by_a_sign(perdure: Callable[..., Any]) -> None:
    """It works for every command: the session that was changed last, not created last, and of the owner only."""
    for name in ("first", "second"):
        perdure("send", "--new", name, f"I am {name}")
    perdure("--owner", "ada", "send", "--new", "hers", "I am hers")
    perdure("send", "first", "again")
    assert perdure("show", "@", "--json").json["id"] == "first"
    assert perdure("search", "again", "--in", "@").lines
    assert perdure("diff", "@", "second", "--json").json["sessions"] == ["first", "second"]
    assert "I am first" in perdure("export", "@", "--format", "markdown").out
    assert perdure("--owner", "ada", "show", "@", "--json").json["owner"] == "ada"
    perdure("tag", "second", "late")
    assert perdure("show", "@", "--json").json["id"] == "second"
    for options in (["-s", "@"], ["-c"]):
        assert "To come back: perdure chat -s second" in perdure("chat", *options, stdin="hello\n").err


def test_nobody_has_used_anything_yet(perdure: Callable[..., Any]) -> None:
    """The error says whose sessions were searched, and how to begin one."""
    for options in (["show", "@"], ["chat", "-s", "@"], ["chat", "-c"], ["send", "@", "hello"]):
        assert "No session exists yet. Begin one: perdure chat" in perdure(*options, code=3).err
    perdure("send", "--new", "his", "hello")
    told = perdure("--owner", "ada", "show", "@", code=3).err
    assert "No session of 'ada' exists yet. Begin one: perdure chat --owner ada" in told


def test_a_sub_agent_is_not_what_was_used_last(perdure: Callable[..., Any], home: Path) -> None:
    stored(home, "mine")
    stored(home, "child", parent_id=SessionId("mine"), spawn_ref=P.SpawnRef("mine", "run", "call", "ask"))
    assert perdure("show", "@", "--json").json["id"] == "mine"


def test_hints_name_a_session_as_lists_do(perdure: Callable[..., Any], home: Path, terminal: None) -> None:
    """A hint can be typed as it is."""
    stored(home, uuid_with("4af2"))
    perdure("suspend", "4af2")
    hint = perdure("send", "4af2", "hello", code=5).err.strip().splitlines()[-1].partition("Type: ")[2]
    assert hint == "perdure resume 4af2"
    perdure(*hint.split()[1:])
    assert perdure("show", "4af2", "--json").json["status"] == "active"


def test_a_real_terminal_shows_what_it_takes(home: Path, tmp_path: Path) -> None:
    """A list, a tree and hits are shown in a terminal of its own."""
    stored(home, uuid_with("4af2"), "order-7")

    async def branch() -> None:
        async with P.SqliteStore(home / "s.db") as store:
            parent = await store.load(uuid_with("4af2"))
            assert parent is not None
            await store.create(fork(parent, id=uuid_with("beef")))

    asyncio.run(branch())

    def said(*arguments: str) -> str:
        with TerminalSession(command(*arguments), cwd=home, env=clean_environment(tmp_path)) as process:
            assert process.ends() == 0
            return process.text

    assert [row.split()[0] for row in said("ls").splitlines()] == ["SESSION", "beef", "order-7", "4af2"]
    tree = said("tree", "4af2").splitlines()
    assert tree[0].startswith("4af2  ")
    assert "fork beef" in tree[1]
    assert said("search", "hello", "--in", "4af2").startswith("4af2  ")
    assert json.loads(said("show", "beef", "--json"))["parent"] == uuid_with("4af2")
    said("tree", "4af2", "--svg", "tree.svg")
    picture = (home / "tree.svg").read_text()
    assert picture.count(uuid_with("4af2")) >= 2  # its title and its root: a picture is kept, so its ids are whole


made_up = st.tuples(st.sampled_from(["0192", "4af2", "00f2"]), st.sampled_from(["0192", "4af2", "10f2", "00f2"])).map(
    lambda parts: str(uuid.UUID(hex=f"{parts[0]}f0000000700080000000{parts[1]}".ljust(32, "0")[:28] + parts[1]))
)
chosen = st.sampled_from(["4af2", "4af2-1", "x-4af2", "0192", "00f2", "order-7", "f2"])
owners = st.sampled_from([None, "ada", "ben"])


@given(st.lists(st.tuples(made_up | chosen, owners, st.booleans()), max_size=12))
@example([("4af2", None, True), ("0192f000-0000-7000-8000-00004af24af2", None, False)])  # a whole id, though deleted
async def test_what_is_shown_names_its_session_and_no_other(
    several: list[tuple[str, str | None, bool]],
) -> None:
    """This holds beside hidden sessions, other owners' sessions, and ids that begin with that end."""
    async with MemoryStore() as store:
        for name, owner, is_deleted in several:
            session_id = name if owner is None else SessionId.under(owner, name)
            if not await store.exists(session_id):
                session = await store.create(new_session("hello", id=session_id, owner=owner))
                if is_deleted:
                    await store.save(await DeleteSession().execute_on(session))
        await _require_named(store)


async def _require_named(store: MemoryStore) -> None:
    before, short_ids.is_terminal = short_ids.is_terminal, lambda: True
    try:
        async with P.connect(store) as sessions:
            for seen in (sessions, sessions.of("ada"), sessions.of("ben")):
                infos = [*await seen.list(), *await seen.list(status="deleted")]
                with click.Context(cli):
                    await learn(seen, [info.id for info in infos])
                    for info in infos:
                        assert await named(seen, shown(info.id)) == info.id
    finally:
        short_ids.is_terminal = before
