"""Backups and repairs on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

Perdure = Callable[..., Any]


@pytest.fixture
def store(perdure: Perdure, tmp_path: Path) -> str:
    """The URL of a store with one session."""
    url = f"sqlite:////{tmp_path}/sessions.db"
    perdure("send", "--new", "hello", "--model", "offline", "--store", url)
    return url


def test_a_store_is_backed_up_and_restored(perdure: Perdure, store: str, tmp_path: Path) -> None:
    """Each command says what it did, and --json prints the documented form."""
    target, other = str(tmp_path / "backups"), f"sqlite:////{tmp_path}/other.db"
    made = perdure("backup", target, "--store", store, "--json").json
    assert made.keys() == {
        *("id", "store", "engine", "schema", "release", "at", "counts", "bytes", "added", "removed", "freed"),
    }
    assert made["engine"] == "sqlite"
    second = perdure("backup", target, "--keep", "1", "--store", store)
    listed = perdure("backup", "--list", target)
    assert listed.out.split()[0] == second.out.strip()
    verified = perdure("backup", "--verify", target, "--json").json
    assert [each["id"] for each in verified["backups"]] == [second.out.strip()]
    restored = perdure("restore", "--from", target, "--verify", "--store", other)
    assert "no problems" in restored.out
    assert perdure("ls", "--store", other).out == perdure("ls", "--store", store).out
    assert "writes over nothing" in perdure("restore", "--from", target, "--store", other, code=4).err


def test_what_is_typed_wrong_is_refused(perdure: Perdure, store: str, tmp_path: Path) -> None:
    """It is refused before anything is done."""
    target = str(tmp_path / "backups")
    perdure("backup", target, "--owner", "ada", "--store", store, code=2)
    perdure("backup", target, "--list", "--verify", "--store", store, code=2)
    perdure("restore", "--store", store, code=2)
    perdure("restore", "x", "--from", target, "--store", store, code=2)
    perdure("restore", "x", "--verify", "--store", store, code=2)
    perdure("restore", "--from", target, "--store", store, code=3)
    perdure("fsck", "--dry-run", "--store", store, code=2)
    perdure("fsck", "@", "--repair", "--store", store, code=2)
    assert not (tmp_path / "backups").exists()


def test_damage_in_backups_has_an_exit_code_of_its_own(perdure: Perdure, store: str, tmp_path: Path) -> None:
    """The error names the chunk, and says how to continue."""
    target = tmp_path / "backups"
    perdure("backup", str(target), "--store", store)
    (pack,) = (target / "packs").iterdir()
    raw = pack.read_bytes()
    pack.write_bytes(raw[:9000] + bytes([raw[9000] ^ 4]) + raw[9001:])
    found = perdure("backup", "--verify", str(target), code=6)
    assert "its hash does not match" in found.out
    assert "--full" in found.err
    other = f"sqlite:////{tmp_path}/other.db"
    assert "chunk" in perdure("restore", "--from", str(target), "--store", other, code=6).err
    (tmp_path / "other.db").touch()  # otherwise no store has that name, which is another error
    assert "not finished" in perdure("ls", "--store", other, code=7).err


def test_a_damaged_file_that_no_backup_needs_is_a_warning(perdure: Perdure, store: str, tmp_path: Path) -> None:
    """The check succeeds from then on, and names the command that removes the file."""
    target = tmp_path / "my backups"
    perdure("backup", str(target), "--store", store)
    (pack,) = (target / "packs").iterdir()
    raw = pack.read_bytes()
    pack.write_bytes(raw[:-20] + bytes([raw[-20] ^ 4]) + raw[-19:])
    perdure("backup", "--verify", str(target), code=6)
    perdure("backup", str(target), "--full", "--keep", "1", "--store", store)
    checked = perdure("backup", "--verify", str(target))
    assert checked.out == "1 backup whole, 0 backups damaged\n"
    assert f"rm '{pack}'" in checked.err
    assert len(perdure("backup", "--verify", str(target), "--json").json["unneeded"]) == 1


def test_a_store_is_repaired(perdure: Perdure, store: str, tmp_path: Path) -> None:
    """A check points to it, a dry run changes nothing, and the next check is clean."""
    connection = apsw.Connection(str(tmp_path / "sessions.db"))
    connection.execute("UPDATE session SET owner = 'eve'")
    connection.close()
    assert "--repair" in perdure("fsck", "--store", store, code=6).err
    dry = perdure("fsck", "--repair", "--dry-run", "--json", "--store", store, code=6).json
    assert [each["where"] for each in dry["repaired"]] == ["column owner"]
    perdure("fsck", "--store", store, code=6)
    assert "1 repaired, 0 left" in perdure("fsck", "--repair", "--store", store).out
    perdure("fsck", "--store", store, code=0)
    (session,) = perdure("ls", "--store", store, "--json").json_lines
    repaired = perdure("events", session["id"], "--last", "1", "--store", store).out
    assert repaired.endswith("\trepaired\tcolumn owner\n")
    assert "1970" not in repaired


@pytest.mark.parametrize("command", [("ls",), ("fsck",), ("fsck", "--repair")], ids=" ".join)
def test_a_file_that_was_cut_short_is_to_be_restored(
    perdure: Perdure, store: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It cannot even be opened. The advice is a backup, not to check which store is used."""
    path = tmp_path / "sessions.db"
    path.write_bytes(path.read_bytes()[:100])
    refused = perdure(*command, "--store", store, code=7).err
    assert "restore the store from a backup" in refused
    assert path.stat().st_size == 100


def test_a_damaged_manifest_is_counted_and_can_be_removed(perdure: Perdure, store: str, tmp_path: Path) -> None:
    """A list does not say that nothing is there, and does not advise copying everything again."""
    target = tmp_path / "backups"
    perdure("backup", str(target), "--store", store)
    (manifest,) = (target / "backups").iterdir()
    manifest.write_text("garbage")
    listed = perdure("backup", "--list", str(target))
    assert "1 backup cannot be read" in listed.err
    assert "No backup" not in listed.err
    checked = perdure("backup", "--verify", str(target), code=6)
    assert f"rm {manifest}" in checked.err
    assert "--full" not in checked.err
    assert "Restore one" not in checked.err


@pytest.mark.parametrize(
    "words",
    [("backup", ""), ("backup", "--list", ""), ("restore", "--from", ""), ("restore", "--from", "b", "--at", "")],
    ids=" ".join,
)
def test_an_empty_name_is_a_usage_error(perdure: Perdure, store: str, words: tuple[str, ...]) -> None:
    """A variable that a script forgot to set does not mean this directory, or any backup."""
    perdure(*words, "--store", store, code=2)


def test_a_directory_without_backups_says_how_to_add_one(perdure: Perdure) -> None:
    """The advice is not the command that has just failed."""
    told = perdure("backup", "--list", "nosuch", code=3).err
    assert "add one: `perdure backup /" in told
    assert "--list" not in told


@pytest.mark.parametrize("kind", ["sqlite", "file"])
def test_every_command_says_that_a_restore_is_not_finished(perdure: Perdure, tmp_path: Path, kind: str) -> None:
    """A killed restore has left only its beginning. No command advises beginning a store there."""
    url = f"sqlite:////{tmp_path}/shop" if kind == "sqlite" else f"file://{tmp_path}/shop"
    left = tmp_path / "shop-restoring"
    left.touch() if kind == "sqlite" else left.mkdir()
    for words in (("ls",), ("fsck",), ("backup", "x"), ("send", "--new", "hello", "--model", "offline"), ("queue",)):
        told = perdure(*words, "--store", url, code=7).err
        assert "not finished" in told, words


@pytest.mark.parametrize(
    "words",
    [
        ("backup", "bkd"),
        ("fsck",),
        ("fsck", "--repair"),
        ("export", "-o", "x"),
        ("copy", "sqlite:///y.db"),
        ("purge", "z"),
    ],
)
def test_a_store_that_was_forgotten_is_not_begun(perdure: Perdure, home: Path, words: tuple[str, ...]) -> None:
    """Without --store and PERDURE_STORE a cron job fails, and does not succeed with an empty backup."""
    told = perdure(*words, code=9).err
    assert "PERDURE_STORE" in told
    assert not [*home.rglob("*.db"), *home.rglob("bkd")]
