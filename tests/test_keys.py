"""The key ring in a file: the keys of each owner, races of processes, and changes of the master key."""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from perdure import ConfigurationError, FileKeyRing, KeyForgotten, KeyMissing, KeyRing, StoreError, WrongKey
from perdure.errors import InvalidData
from perdure.keys import new_master, ring_at

OLD, NEW = b"the older master key, 32 bytes...", b"the newer master key, 32 bytes..."
MAKES_KEYS = """
import sys
from perdure import FileKeyRing
ring = FileKeyRing(sys.argv[1], master=b"the older master key, 32 bytes...")
sys.stdin.readline()
for number in range(20):
    print(ring.current(f"owner {number}").id.hex(), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    FileKeyRing(tmp_path / "keys.json", master=OLD, create=True)
    return tmp_path / "keys.json"


def test_each_owner_has_a_key_and_sessions_without_one_share_one(path: Path) -> None:
    """It is made at the first request, and the same from then on, in every process that opens the file."""
    ring = FileKeyRing(path, master=OLD)
    assert isinstance(ring, KeyRing)
    made = {owner: ring.current(owner) for owner in ("ada", "bob", None)}
    assert len({key.secret for key in made.values()}) == 3
    again = FileKeyRing(path, master=OLD)
    assert {owner: again.current(owner) for owner in made} == made
    assert [again.find(key.id) for key in made.values()] == [*made.values()]
    assert {*again.owners()} == {*made}
    assert again.first("carol") is None


def test_no_secret_is_shown_or_stored(path: Path) -> None:
    """Neither the file nor a representation shows a key, and the file is readable only by its owner."""
    ring = FileKeyRing(path, master=OLD)
    key = ring.current("ada")
    assert path.stat().st_mode & 0o777 == 0o600
    held = path.read_bytes()
    for secret in (key.secret, OLD):
        assert secret not in held
        assert urlsafe_b64encode(secret) not in held
        assert secret.hex().encode() not in held
    assert key.secret.hex() not in f"{key!r} {ring!r} {ring.keys()!r}"
    assert repr(key) == f"DataKey({key.id.hex()})"


def test_processes_that_make_a_key_at_once_agree(path: Path) -> None:
    """One of them makes it, and the others find it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", MAKES_KEYS, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    for each in racing:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    said = [each.communicate(timeout=60)[0].split() for each in racing]
    assert len(said[0]) == 20
    assert said[0] == said[1] == said[2]
    assert len(FileKeyRing(path, master=OLD).keys()) == 20


def test_a_key_that_another_process_has_made_is_found_at_once(path: Path) -> None:
    """A row that it has sealed can be read as soon as it is committed."""
    one, other = FileKeyRing(path, master=OLD), FileKeyRing(path, master=OLD)
    other.owners()
    key = one.current("ada")
    assert other.find(key.id) == key


def test_rotation_wraps_keys_with_the_newest_master(path: Path) -> None:
    """The data keys stay, so no row changes; afterwards the older master is not needed."""
    keys = [FileKeyRing(path, master=OLD).current(owner) for owner in ("ada", "bob")]
    with pytest.raises(WrongKey) as wrong:
        FileKeyRing(path, master=NEW).find(keys[0].id)
    assert wrong.value.key_id == keys[0].id.hex()
    both = FileKeyRing(path, master=[NEW, OLD])
    assert both.current("ada") == keys[0]
    assert both.rotate() == 2
    assert both.rotate() == 0
    assert [FileKeyRing(path, master=NEW).find(key.id) for key in keys] == keys
    with pytest.raises(WrongKey):
        FileKeyRing(path, master=OLD).current("ada")


def test_a_renewed_key_is_used_for_what_is_written_from_then_on(path: Path) -> None:
    """The older one still opens, and names are still derived from it."""
    ring = FileKeyRing(path, master=OLD)
    old = ring.current("ada")
    new = ring.renew("ada")
    assert (ring.current("ada"), ring.first("ada"), ring.find(old.id)) == (new, old, old)
    assert old.secret != new.secret
    before = path.read_bytes()
    for nobody in ("adda", None):
        with pytest.raises(InvalidData, match="does not have"):
            ring.renew(nobody)
    assert path.read_bytes() == before


def test_a_forgotten_key_is_gone_in_every_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of the owner are gone. Their ids are left, so an error can say so."""
    monkeypatch.setattr("perdure.keys.ring._LOOK_AGAIN", 0.0)
    one, other = FileKeyRing(path, master=OLD), FileKeyRing(path, master=OLD)
    keys = [one.current("ada"), one.renew("ada")]
    bobs = one.current("bob")
    assert other.find(keys[0].id) == keys[0]
    with path.open("rb") as held:
        assert one.forget("ada") == 2
        assert held.read().strip(b"\0") == b"", "the old file is overwritten"
    for ring in (one, other, FileKeyRing(path, master=OLD)):
        for key in keys:
            with pytest.raises(KeyForgotten):
                ring.find(key.id)
        assert ring.find(bobs.id) == bobs
        assert ring.first("ada") is None
    assert b'"ada"' not in path.read_bytes()  # in quotes: an id may have these letters
    assert one.forget("ada") == 0
    assert one.current("ada").id not in {key.id for key in keys}


def test_a_foreign_master_key_makes_no_keys(path: Path) -> None:
    """A key that only it could open would keep an owner's words from every other process."""
    ring = FileKeyRing(path, master=OLD)
    ring.current("ada")
    held = path.read_bytes()
    foreign = FileKeyRing(path, master=NEW)
    for make in (lambda: foreign.current("bob"), lambda: foreign.renew("ada"), foreign.rotate):
        with pytest.raises(WrongKey):
            make()
    assert path.read_bytes() == held
    assert FileKeyRing(path, master=[NEW, OLD]).renew("ada") != ring.first("ada")


def test_an_unknown_key_is_missing(path: Path) -> None:
    with pytest.raises(KeyMissing) as missing:
        FileKeyRing(path, master=OLD).find(b"12345678")
    assert missing.value.key_id == b"12345678".hex()


def test_a_ring_is_not_made_by_mistake(tmp_path: Path) -> None:
    """A mistyped path would seal with keys that are in no backup."""
    with pytest.raises(ConfigurationError, match="perdure keys new"):
        FileKeyRing(tmp_path / "typo.json", master=OLD)
    ring = FileKeyRing(tmp_path / "new.json", master=OLD, create=True)
    ring.current("ada")
    (tmp_path / "new.json").unlink()
    with pytest.raises(StoreError, match="restore it"):
        ring.renew("ada")
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"keys": 3}', b'{"format": 9}'])
def test_a_damaged_ring_is_refused(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    with pytest.raises(StoreError):
        FileKeyRing(path, master=OLD).current("ada")


def test_a_wrapped_key_that_was_changed_is_refused(path: Path) -> None:
    """The key of one owner cannot be passed off as another's either."""
    ring = FileKeyRing(path, master=OLD)
    key = ring.current("ada")
    path.write_bytes(path.read_bytes().replace(b'"ada"', b'"eve"'))
    with pytest.raises(StoreError, match="damaged"):
        FileKeyRing(path, master=OLD).find(key.id)


@pytest.mark.parametrize("master", [b"short", b"", [], "PERDURE_NOT_SET", 7])
def test_a_master_key_is_refused_unless_it_is_one(path: Path, master: object) -> None:
    with pytest.raises(ConfigurationError):
        FileKeyRing(path, master=master)  # type: ignore[arg-type]  # which is the point


def test_a_path_is_refused_unless_it_is_one() -> None:
    with pytest.raises(InvalidData):
        FileKeyRing("", master=OLD)


def test_master_keys_come_from_the_environment_or_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be several, the newest first: so a rotation needs no secret on a command line."""
    older, newer = new_master(), new_master()
    monkeypatch.setenv("PERDURE_MASTER_KEY", older)
    path.unlink()
    key = ring_at(str(path), create=True).current("ada")
    monkeypatch.setenv("PERDURE_MASTER_KEY", f"{newer},{older}")
    assert FileKeyRing(path, master="PERDURE_MASTER_KEY").rotate() == 1
    monkeypatch.delenv("PERDURE_MASTER_KEY")
    held = path.with_name("master")
    held.write_text(f"{newer}\n")
    monkeypatch.setenv("PERDURE_MASTER_KEY_FILE", str(held))
    assert ring_at(str(path)).find(key.id) == key
    held.write_text("not base64!\n")
    with pytest.raises(ConfigurationError, match="base64"):
        ring_at(str(path))
    held.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ring_at(str(path))


@pytest.mark.parametrize("content", ["{}", '{"name": "my-app"}', '{"keys": [], "forgotten": []}', "[]", "", "ring"])
@pytest.mark.parametrize("create", [False, True])
def test_another_file_is_not_taken_for_a_ring(tmp_path: Path, content: str, create: bool) -> None:
    """It is refused when the ring is opened, and never overwritten, whatever JSON it has."""
    path = tmp_path / "package.json"
    path.write_text(content)
    with pytest.raises(StoreError, match="not a key ring"):
        FileKeyRing(path, master=OLD, create=create).current("ada")
    assert path.read_text() == content
