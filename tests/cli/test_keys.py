"""The keys of a sealed store on the command line: made, listed, rotated, forgotten; and every command with --keys."""

from __future__ import annotations

import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure.keys import new_master
from perdure.model.ids import now, use
from perdure.testing import FrozenClock

WORD = "zebrafinch"


@pytest.fixture
def said(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the command, with a key ring and a store that has one session of each of two owners."""
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///kept.db")
    monkeypatch.setenv("PERDURE_MASTER_KEY", new_master())
    assert perdure("keys", "new", "ring.json").out == "ring.json\n"
    for owner in ("ada", "bob"):
        perdure("send", "--new", f"a {WORD} for {owner}", "--owner", owner, "--keys", "ring.json")
    return perdure


def test_a_ring_is_made_once_and_for_its_owner_only(said: Callable[..., Any]) -> None:
    """It is not made again over keys that are needed, and nobody else may read it."""
    assert stat.S_IMODE(Path("ring.json").stat().st_mode) == 0o600
    again = said("keys", "new", "ring.json", code=2)
    assert "is there already" in again.err
    assert len(said("keys", "list", "--keys", "ring.json").lines) == 2


def test_sealed_sessions_are_read_with_the_keys_and_named_without(said: Callable[..., Any]) -> None:
    """`ls` names them without the keys; `show` says what to do, and never shows an empty session."""
    assert WORD.encode() not in Path("kept.db").read_bytes()
    assert said("ls", "--keys", "ring.json").out.count(WORD) >= 2
    bare = said("ls")
    assert bare.out == ""
    assert bare.err.count("sealed: ") == 2
    assert bare.err.count("with --keys FILE.") == 1
    refused = said("show", "@", code=9)
    assert "with --keys FILE." in refused.err
    assert "connect(" not in bare.err + refused.err
    assert said("fsck", "--keys", "ring.json").out.endswith("no problems\n")
    bare = said("fsck", code=6)
    assert "could not be checked" in bare.out
    assert bare.err.endswith("Give its master key in PERDURE_MASTER_KEY, and type: perdure fsck --keys FILE\n")
    assert "perdure fsck --repair --keys FILE" in said("fsck", "--repair", code=6).err


@pytest.mark.parametrize("words", [["show"], ["events"], ["versions"], ["tag"], ["erase", "--yes"], ["fsck"], ["tree"]])
@pytest.mark.parametrize("keys", [["--keys", "ring.json"], []])
def test_an_owners_session_is_found_with_the_owner(said: Callable[..., Any], words: list[str], keys: list[str]) -> None:
    """An id that only its owner may use is not found. The error says to name the owner, with the keys and without."""
    missing = said(words[0], "a1", *words[1:], *keys, code=3).err
    assert "No session 'a1'" in missing
    assert "--owner OWNER" in missing
    assert "--owner OWNER" not in said(words[0], "a1", *words[1:], *keys, "--owner", "cleo", code=3).err


def test_the_ring_may_be_named_in_the_environment(said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_KEYS", "ring.json")
    assert said("search", WORD).out.count(WORD) >= 2
    monkeypatch.setenv("PERDURE_KEYS", "typo.json")
    assert "perdure keys new typo.json" in said("ls", code=9).err


def test_rotation_needs_both_masters_once(said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards the newest is enough. No secret is ever an argument."""
    import os

    old, new = os.environ["PERDURE_MASTER_KEY"], said("keys", "master").out.strip()
    monkeypatch.setenv("PERDURE_MASTER_KEY", new)
    for words in (["show", "@"], ["keys", "rotate"]):
        refused = said(*words, "--keys", "ring.json", code=9).err
        assert "which was not given" in refused
        assert "PERDURE_MASTER_KEY=NEW,OLD perdure keys rotate --keys ring.json" in refused
        assert "FileKeyRing" not in refused
    monkeypatch.setenv("PERDURE_MASTER_KEY", f"{new},{old}")
    assert said("keys", "rotate", "--keys", "ring.json").out.endswith(": 2\n")
    monkeypatch.setenv("PERDURE_MASTER_KEY", new)
    assert WORD in said("show", "@", "--keys", "ring.json").out


def test_an_owner_is_forgotten(said: Callable[..., Any]) -> None:
    """It requires --yes if nobody can be asked. The owner's remains can be erased."""
    assert "--yes" in said("keys", "forget", "ada", "--keys", "ring.json", code=2).err
    assert said("keys", "forget", "ada", "--keys", "ring.json", "--yes").out == "keys forgotten: 1\n"
    assert "has no key" in said("keys", "forget", "ada", "--keys", "ring.json", "--yes", code=3).err
    listed = said("ls", "--keys", "ring.json")
    assert "forgotten" in listed.err
    assert "perdure erase ID --keys ring.json" in listed.err
    assert "for bob" in listed.out
    (gone,) = [each for each in said("keys", "--keys", "ring.json", "--json").json_lines if "forgotten" in each]
    assert gone["id"] in listed.err
    assert said("erase", "--of", "ada", "--yes", "--keys", "ring.json").out == "sessions erased: 1\n"
    assert said("fsck", "--keys", "ring.json").out.endswith("no problems\n")


def test_keys_of_a_session_under_hold_stay(said: Callable[..., Any]) -> None:
    """The error names the hold, and nothing is destroyed. Keys of others, and of a missing store, can be forgotten."""
    (held,) = said("ls", "--owner", "ada", "--json", "--keys", "ring.json").json_lines
    said("tag", held["id"], "hold:case-7", "--keys", "ring.json")
    refused = said("keys", "forget", "ada", "--yes", "--keys", "ring.json", code=5)
    assert held["id"] in refused.err
    assert "under hold" in refused.err
    assert len(said("keys", "list", "--keys", "ring.json").lines) == 2
    assert said("keys", "forget", "bob", "--yes", "--keys", "ring.json").out == "keys forgotten: 1\n"
    mistyped = said("keys", "forget", "ada", "--yes", "--keys", "ring.json", "--store", "sqlite:///gone.db", code=2)
    assert "No store is at gone.db" in mistyped.err
    assert len(said("keys", "list", "--keys", "ring.json").lines) == 2
    gone = said("keys", "forget", "ada", "--yes", "--keys", "ring.json", "--no-store")
    assert gone.out == "keys forgotten: 1\n"
    assert not Path("gone.db").exists()


def test_keys_of_a_held_session_stay_if_its_header_cannot_be_read(
    said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying a key needs no master key, so a hold counts even with a wrong one, and on a hidden session."""
    (held,) = said("ls", "--owner", "ada", "--json", "--keys", "ring.json").json_lines
    said("tag", held["id"], "hold:case-7", "--keys", "ring.json")
    shared = said("send", "--new", "minutes", f"a {WORD}", "--json", "--keys", "ring.json").json["session"]
    said("tag", shared, "hold", "--keys", "ring.json")
    said("delete", shared, "--keys", "ring.json")
    monkeypatch.setenv("PERDURE_MASTER_KEY", new_master())
    assert held["id"] in said("keys", "forget", "ada", "--yes", "--keys", "ring.json", code=5).err
    assert shared in said("keys", "forget", "--no-owner", "--yes", "--keys", "ring.json", code=5).err
    assert said("keys", "forget", "bob", "--yes", "--keys", "ring.json").out == "keys forgotten: 1\n"
    assert len(said("keys", "list", "--keys", "ring.json").lines) == 3


def test_sessions_without_their_keys_are_never_counted_as_none(said: Callable[..., Any]) -> None:
    """A job that forgot the option does not look like one that had nothing to do."""
    ids = {each["id"] for each in said("ls", "--json", "--keys", "ring.json").json_lines}
    assert {*said("stats", "--json").json["damaged"]} == ids
    assert "2 sessions could not be read" in said("stats").err
    assert "sessions  2, 2 of them not readable" in said("doctor").out
    assert said("doctor", "--json").json["store"]["unread"] == 2
    kept = said("purge", "--status", "active", "--yes")
    assert kept.out == "sessions erased: 0\n"
    assert "2 sessions left that cannot be read" in kept.err
    for mode in ("--dry-run", "--yes"):
        with use(clock=FrozenClock(now() + timedelta(hours=1))):
            left = said("purge", "--idle", "1min", mode, "--json").json["left"]
        assert {(each["session"], each["why"]) for each in left} == {(each, "damaged") for each in ids}
    assert said("purge", "--status", "active", "--yes", "--keys", "ring.json").out == "sessions erased: 2\n"


def test_a_damaged_ring_is_refused_before_a_store_is_made(said: Callable[..., Any]) -> None:
    Path("broken.json").write_text("{")
    words = ("send", "--new", "hello", "--keys", "broken.json", "--store", "sqlite:///new.db")
    assert "not a key ring" in said(*words, code=7).err
    assert not Path("new.db").exists()


def test_erasing_an_owner_can_forget_the_key(said: Callable[..., Any]) -> None:
    done = said("erase", "--of", "bob", "--forget-key", "--yes", "--keys", "ring.json")
    assert done.out == "sessions erased: 1\nkeys forgotten: 1\n"
    assert "without keys" in said("erase", "--of", "ada", "--forget-key", "--yes", code=9).err
    assert "--of" in said("erase", "@", "--forget-key", "--yes", code=2).err


def test_a_copy_is_sealed_unless_asked_otherwise(said: Callable[..., Any]) -> None:
    said("copy", "sqlite:///sealed.db", "--keys", "ring.json")
    said("copy", "sqlite:///plain.db", "--keys", "ring.json", "--unsealed")
    assert WORD.encode() not in Path("sealed.db").read_bytes()
    assert WORD.encode() in Path("plain.db").read_bytes()
    refused = said("copy", "file://files", "--keys", "ring.json", code=9)
    assert "cannot be sealed" in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("renew",),
        ("forget",),
        ("forget", "ada", "--no-owner"),
        ("renew", "ada", "--no-store"),
        ("list", "ada"),
        ("rotate", "x"),
        ("new",),
        ("list",),
    ],
)
def test_what_is_typed_wrong_is_refused(said: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    """Nothing is changed, and the line says what to type."""
    before = Path("ring.json").read_bytes()
    assert said("keys", *arguments, code=2).err
    assert Path("ring.json").read_bytes() == before


def test_a_key_is_renewed(said: Callable[..., Any]) -> None:
    """It may be an owner's key, or the one for sessions without an owner."""
    said("send", "--new", "of nobody", "--keys", "ring.json")
    for whose in (["ada"], ["--no-owner"]):
        (made,) = said("keys", "renew", *whose, "--keys", "ring.json").lines
        assert made in said("keys", "list", "--keys", "ring.json").out


def test_a_restored_store_is_verified_with_the_keys(said: Callable[..., Any]) -> None:
    """Without --verify, no keys are needed."""
    said("backup", "backups", "--keys", "ring.json")
    other = ("--store", "sqlite:///other.db")
    told = said("restore", "--from", "backups", "--verify", *other, "--keys", "ring.json")
    assert "no problems" in told.out
    assert said("ls", *other, "--keys", "ring.json").out.count(WORD) >= 2
    said("restore", "--from", "backups", "--store", "sqlite:///third.db", "--keys", "lost.json")
    unchecked = said("restore", "--from", "backups", "--verify", "--store", "sqlite:///fourth.db", code=6)
    assert "perdure fsck --store sqlite:///fourth.db --keys FILE" in unchecked.err


def test_a_key_is_renewed_only_where_one_is(said: Callable[..., Any]) -> None:
    """A mistyped owner does not get a key; sessions without an owner do not get one either if there are none."""
    before = Path("ring.json").read_bytes()
    for whose in ("adda", "--no-owner"):
        refused = said("keys", "renew", whose, "--keys", "ring.json", code=3)
        assert "has no key in this ring. To see who has one: perdure keys --keys ring.json" in refused.err
    assert Path("ring.json").read_bytes() == before


def test_a_ring_asks_for_its_own_master_key(said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one would not open it: only for a ring that is to be made does the error say how to get one."""
    monkeypatch.delenv("PERDURE_MASTER_KEY")
    for command in ("ls", "keys"):
        refused = said(command, "--keys", "ring.json", code=9).err
        assert "Give the one that ring.json was made with" in refused
        assert "keys master" not in refused
    assert "perdure keys master" in said("keys", "new", "other.json", code=9).err


def test_a_sealed_search_needs_the_keys(said: Callable[..., Any]) -> None:
    """The error says that a search with keys has made the index."""
    said("search", WORD, "--keys", "ring.json")
    refused = said("search", WORD, code=9).err
    assert "without keys" in refused
    assert "key of the search" not in refused


def test_a_hold_is_lifted_from_a_forgotten_session(said: Callable[..., Any]) -> None:
    """Without the store, holds cannot be checked. Both errors lead to what can still be done."""
    (info,) = said("ls", "--owner", "ada", "--json", "--keys", "ring.json").json_lines
    held = info["id"]
    said("tag", held, "hold:case-7", "--keys", "ring.json")
    Path("kept.db").rename("away.db")
    said("keys", "forget", "ada", "--keys", "ring.json", "--yes", "--no-store")
    Path("away.db").rename("kept.db")
    refused = said("erase", held, "--yes", "--keys", "ring.json", code=5).err
    assert f"perdure tag {held} --remove hold:case-7 --keys ring.json" in refused
    assert "erase" in said("tag", held, "vip", "--keys", "ring.json", code=3).err
    lifted = said("tag", held, "--remove", "hold:case-7", "--remove", "hold:case-8", "--keys", "ring.json")
    assert f"perdure erase {held} --keys ring.json" in lifted.err
    assert "does not have the tag 'hold:case-8'" in lifted.err  # as for a readable session
    assert said("erase", held, "--yes", "--keys", "ring.json").out == "sessions erased: 1\n"
