"""Images and files in a directory of sessions: each has one file, also when something goes wrong."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import CorruptRecord, FileStore, InvalidData, Media, Message, StoreError, UnreadableFile, codec
from perdure.archive import fsck
from perdure.stores.folder import Folder
from perdure.testing.parts.attaching import HASH, PHOTO, files_in, photo
from perdure.testing.samples import new_session, say, tell


def blobs(where: Path) -> list[str]:
    return sorted(path.name for path in (where / "blobs").iterdir())


async def test_there_is_no_directory_before_it_is_needed(tmp_path: Path) -> None:
    """Small bytes stay in the log, so no directory is made."""
    async with FileStore(tmp_path) as store:
        await store.create(tell(new_session(id="it"), Message.user(Media("image/png", data=PHOTO[:100]))))
        await store.gc()
        assert not (tmp_path / "blobs").exists()


async def test_a_file_has_the_bytes_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Any program can open it; logs and documents name it, and contain none of its bytes."""
    async with FileStore(tmp_path) as store:
        await store.create(tell(new_session(id="it"), photo()))
        await store.create(tell(new_session(id="other"), photo()))
    assert blobs(tmp_path) == [HASH]
    assert (tmp_path / "blobs" / HASH).read_bytes() == PHOTO
    assert stat.S_IMODE((tmp_path / "blobs" / HASH).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "blobs").stat().st_mode) == 0o700
    assert HASH in (tmp_path / "it.json").read_text()
    assert sum((tmp_path / f"it.{ending}").stat().st_size for ending in ("json", "jsonl")) < 4_000


@pytest.mark.parametrize("how", ["removed", "cut short", "changed", "a link", "a directory"])
async def test_damage_names_the_session_and_the_message(tmp_path: Path, how: str) -> None:
    """The conversation still loads, and a session that sends the same bytes mends the file."""
    async with FileStore(tmp_path) as store:
        await store.create(tell(say(new_session(id="it"), "Hello"), photo()))
    path = tmp_path / "blobs" / HASH
    body = path.read_bytes()
    path.unlink()
    match how:
        case "cut short":
            path.write_bytes(body[:-1])
        case "changed":
            path.write_bytes(b"x" + body[1:])
        case "a link":
            path.symlink_to(tmp_path / "it.json")
        case "a directory":
            path.mkdir()
    async with FileStore(tmp_path) as store:
        assert len(files_in(await store.load("it"))) == 1
        with pytest.raises(CorruptRecord) as refused:
            await store.attachments("it", [HASH])
        report = await fsck(store)
        assert (refused.value.session_id, refused.value.position.partition(" of")[0]) == ("it", "message 1")
        assert any(each.session_id == "it" for each in report.problems)
        if how not in ("a link", "a directory"):
            await store.create(tell(new_session(id="other"), photo()))
            assert await store.attachments("it", [HASH]) == {HASH: PHOTO}
            assert (await fsck(store)).is_sound


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
async def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    async with FileStore(tmp_path) as store:
        await store.create(tell(new_session(id="it"), photo()))
        (tmp_path / "blobs" / HASH).chmod(0)
        with pytest.raises(UnreadableFile):
            await store.attachments("it", [HASH])


async def test_a_save_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are written before the log, and removed if the log cannot be written. A second try succeeds."""
    async with FileStore(tmp_path) as store:
        it = await store.create(new_session("Hello", id="it"))
        append = Folder.append

        def full(self: Folder, name: str, end: int, body: bytes) -> None:
            assert blobs(tmp_path) == [HASH]
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Folder, "append", full)
        with pytest.raises(StoreError, match="No space left"):
            await store.save(tell(it, photo()))
        assert blobs(tmp_path) == []
        monkeypatch.setattr(Folder, "append", append)
        await store.save(tell(it, photo()))
        assert blobs(tmp_path) == [HASH]
        assert (await fsck(store)).is_sound


async def test_bytes_that_a_log_names_stay_when_the_rest_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that was appended is kept, so the bytes that it names are kept too."""
    async with FileStore(tmp_path) as store:
        it = await store.create(new_session("Hello", id="it"))
        append = Folder.append

        def failing(self: Folder, name: str, end: int, body: bytes) -> None:
            append(self, name, end, body)
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Folder, "append", failing)
        with pytest.raises(StoreError):
            await store.save(tell(it, photo()))
        monkeypatch.setattr(Folder, "append", append)
        assert len(files_in(await store.load("it"))) == 1
        assert await store.attachments("it", [HASH]) == {HASH: PHOTO}


KILLED = """
import asyncio, os, signal, sys
from perdure import FileStore
from perdure.stores.folder import Folder
from perdure.testing.parts.attaching import photo
from perdure.testing.samples import tell

step = sys.argv[2]
wrapped = getattr(Folder, step)

def killing(self, name, *given):
    if step == "put_in_place" and len(name) != 64:
        return wrapped(self, name, *given)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with FileStore(sys.argv[1]) as store:
        it = await store.load("it")
        setattr(Folder, step, killing)
        await store.save(tell(it, photo()))

asyncio.run(main())
"""


def killed_at(where: Path, step: str) -> int:
    """Save an image in a process that is killed before a step. Return its exit status."""
    return subprocess.run([sys.executable, "-c", KILLED, str(where), step], check=False).returncode


@pytest.mark.parametrize(("step", "left"), [("put_in_place", [f"{HASH}.tmp"]), ("append", [HASH])])
async def test_what_a_killed_writer_leaves_is_cleared_up(tmp_path: Path, step: str, left: list[str]) -> None:
    """A message never names bytes that are not on the disk; `gc` removes bytes that no message names."""
    async with FileStore(tmp_path) as store:
        it = await store.create(new_session("Hello", id="it"))
    assert killed_at(tmp_path, step) == -signal.SIGKILL
    assert blobs(tmp_path) == left
    async with FileStore(tmp_path) as store:
        assert await store.load("it") == it
        report = await fsck(store)
        assert [each.what for each in report.problems] == ["it belongs to no message"] * (step == "append")
        with pytest.raises(InvalidData):
            await store.attachments("it", [HASH])
        await store.gc()
        assert blobs(tmp_path) == []
        await store.save(tell(it, photo()))
        assert blobs(tmp_path) == [HASH]
        assert (await fsck(store)).is_sound


async def test_what_another_process_has_come_to_show_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may write a message with these bytes after the erasure has looked for messages that show them."""
    from perdure.stores.jobs import attachments

    async with FileStore(tmp_path) as one, FileStore(tmp_path) as other:
        await one.create(tell(new_session(id="old"), photo()))
        forgotten: Any = attachments.forget_unused

        def late(*given: Any) -> Any:
            yield from forgotten(*given)
            for log in [*tmp_path.glob("old.jsonl")]:  # as if another process had written it just now
                (tmp_path / "late.jsonl").write_bytes(log.read_bytes())

        monkeypatch.setattr(attachments, "forget_unused", late)
        await other.delete("old")
        assert blobs(tmp_path) == [HASH]


def test_the_hash_is_the_name() -> None:
    assert codec.hash_of_bytes(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
