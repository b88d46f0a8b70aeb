"""The index behind `perdure search`: brought up to date with a bar, and rebuilt on request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.stores.sqlite import SqliteStore
from perdure.testing.samples import new_session

from .terminal_session import TerminalSession, clean_environment

# The same as the installed command, except that a bar does not wait for a second to pass.
HURRIED = "from perdure.cli import terminal; terminal.PATIENCE = 0.0; from perdure.cli.main import main; main()"


async def fill(path: Path, messages: int) -> None:
    async with SqliteStore(path) as store:
        await store.create(new_session(*(f"word{n} tea" for n in range(messages)), id="s"))


@pytest.mark.parametrize("options", [[], ["--reindex"]], ids=["lagging", "anew"])
def test_a_person_sees_how_far_the_index_is(home: Path, options: list[str]) -> None:
    """A real terminal shows a bar with the count of messages, and then the hits."""
    asyncio.run(fill(home / "sessions.db", 5_000))
    arguments = [sys.executable, "-c", HURRIED, "--store", "sessions.db", "search", "word4999", *options]
    with TerminalSession(arguments, cwd=home, env=clean_environment(home)) as terminal:
        terminal.expect("indexing", "/5000", "word4999 tea")
        assert terminal.ends() == 0


def test_the_index_is_made_anew_on_request(perdure: Callable[..., Any], home: Path) -> None:
    """It may be done alone or before a search. A pipe gets no bar, and only hits go to stdout."""
    asyncio.run(fill(home / "sessions.db", 30))
    store = ("--store", "sessions.db")
    assert "messages indexed: 30" in perdure(*store, "search", "--reindex").err
    said = perdure(*store, "search", "word7", "--reindex")
    assert (said.out.split("\t")[0], len(said.lines)) == ("s", 1)
    assert said.err == "messages indexed: 30\n"
    assert perdure(*store, "search", "word7").err == ""


def test_a_fork_in_which_nothing_is_found(perdure: Callable[..., Any], home: Path) -> None:
    """Messages from before the fork belong to its parent, so the note says to search there."""
    asyncio.run(fill(home / "sessions.db", 3))
    store = ("--store", "sessions.db")
    perdure(*store, "fork", "s", "f")
    told = perdure(*store, "search", "a snail", "--in", "f").err
    assert "forked from s: perdure search 'a snail' --in s --store sessions.db\n" in told
    assert perdure(*store, "search", "nothing", "--in", "s").err == "Nothing was found in this session.\n"


def test_what_cannot_be_indexed_or_sought_is_refused(perdure: Callable[..., Any], home: Path) -> None:
    """It is refused before an index is made."""
    asyncio.run(fill(home / "sessions.db", 3))
    store = ("--store", "sessions.db")
    assert "Missing argument 'TEXT'" in perdure(*store, "search", code=2).err
    assert "leave --owner out" in perdure(*store, "search", "--reindex", "--owner", "ann", code=2).err
    assert "some words" in perdure(*store, "search", "--reindex", " ", code=2).err
    assert not (home / "sessions.db-search").exists()
    perdure("--store", f"file://{home / 'files'}", "send", "--new", "f", "hello")
    told = perdure("--store", f"file://{home / 'files'}", "search", "--reindex", code=2)
    assert "FileStore has no search index" in told.err
