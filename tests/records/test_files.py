"""Session records as files: whole or missing, found again, and with one writer at a time on request."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import (
    AgentEnd,
    AgentStart,
    ChildLoopRef,
    ExecutionStatus,
    FileRecordStore,
    InferenceResponse,
    InvalidData,
    InvalidSessionFile,
    InvalidSessionId,
    Message,
    MessageEnd,
    SessionLocked,
    SessionNotFound,
    SessionRecord,
    SessionRecorder,
    SpawnRef,
    StoreError,
    ToolCall,
    ToolExecution,
    ToolExecutionEnd,
    TurnEnd,
    TurnStart,
    UnreadableFile,
    Usage,
    delete_session,
    list_session_ids,
    load_session,
    load_sessions_for_agent,
    redact_session,
    save_session,
)
from perdure.model.ids import now
from perdure.model.loop_events import LoopConfigSnapshot
from perdure.model.record_form import with_messages_whole


def record_of(session_id: str = "sess-1", agent_id: str = "agent-1") -> SessionRecord:
    """Return a session of one loop in which a tool has spawned another session."""
    recorder = SessionRecorder()
    ids = {"loop_id": f"{session_id}-loop", "session_id": session_id, "agent_id": agent_id}
    call = ToolCall("sub_agent", {"task": "look"}, "call-1")
    answer = Message.assistant("looking", tool_calls=[call], metadata={"step_id": "step-1"})
    used = Usage(input_tokens=7, output_tokens=2, cost=0.5)
    child = ChildLoopRef("call-1", "sub_agent", "loop-C", "sess-C")
    spawn = SpawnRef("sess-P", "loop-P", "call-0", "sub_agent")
    for event in (
        AgentStart(**ids, config=LoopConfigSnapshot("m", "p"), metadata={"why": ["ü", 1]}, spawn_ref=spawn),
        TurnStart(**ids, step_id="step-1", index=0),
        MessageEnd(**ids, message=answer, response=InferenceResponse("tool_call", used)),
        ToolExecutionEnd(**ids, execution=ToolExecution(call, now(), now(), {"x": 1}), step_id="step-1", child=child),
        TurnEnd(**ids, step_id="step-1", index=0, usage=used),
        AgentEnd(**ids, status=ExecutionStatus.COMPLETED, messages=(answer,), usage=used),
    ):
        assert recorder.on_event(event)
    recorder.flush()
    (record,) = recorder.drain_completed()
    return record


def age(directory: Path, *session_ids: str) -> None:
    """Make files look as if they had been written one second after the other, the last one now."""
    for seconds, session_id in enumerate(reversed(session_ids)):
        at = os.stat(directory / f"{session_id}.json").st_mtime - seconds
        os.utime(directory / f"{session_id}.json", (at, at))


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Loops, turns, events, links and usage are the same after a save and a load."""
    record = record_of()
    save_session(record, tmp_path)
    assert load_session("sess-1", tmp_path) == record
    save_session(record, str(tmp_path))
    assert load_session("sess-1", str(tmp_path)) == record


def test_the_directory_is_made_and_flat(tmp_path: Path) -> None:
    """A save leaves `{dir}/{session_id}.json` and no other file, also no temporary one."""
    save_session(record_of(), tmp_path / "a" / "b")
    save_session(record_of(), tmp_path / "a" / "b")
    assert os.listdir(tmp_path / "a" / "b") == ["sess-1.json"]


def test_the_file_is_pretty_json(tmp_path: Path) -> None:
    """A person can read the file, and so can any JSON tool."""
    save_session(record_of(), tmp_path)
    text = (tmp_path / "sess-1.json").read_text(encoding="utf-8")
    plain = json.loads(text)
    assert '\n  "session_id": "sess-1"' in text
    assert plain["session_id"] == "sess-1"
    assert plain["loops"][0]["events"][0]["type"] == "agent_start"


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the new file cannot be put in place, the old one stays and no temporary file is left."""
    old = record_of()
    save_session(old, tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        with pytest.raises(StoreError, match="no"):
            save_session(record_of(agent_id="another"), tmp_path)
    assert load_session("sess-1", tmp_path) == old
    assert os.listdir(tmp_path) == ["sess-1.json"]


def test_writers_at_once_never_leave_half_a_file(tmp_path: Path) -> None:
    """A reader always finds a whole record while many write the same session."""
    records = [record_of(agent_id=f"agent-{number}") for number in range(4)]
    save_session(records[0], tmp_path)
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save_session, record, tmp_path) for _ in range(10) for record in records]
        while not all(save.done() for save in saves):
            assert load_session("sess-1", tmp_path) in records
        for save in saves:
            save.result()
    assert os.listdir(tmp_path) == ["sess-1.json"]


def test_ids_are_listed_newest_first(tmp_path: Path) -> None:
    """The record that was written last comes first, whatever its id."""
    for session_id in ("b", "c", "a"):
        save_session(record_of(session_id), tmp_path)
    age(tmp_path, "b", "c", "a")
    assert list_session_ids(tmp_path) == ["a", "c", "b"]
    (tmp_path / "empty").mkdir()
    assert list_session_ids(tmp_path / "empty") == []


def test_other_files_are_not_listed(tmp_path: Path) -> None:
    """Locks, temporary files and files whose names are not session ids are skipped."""
    save_session(record_of(), tmp_path)
    for name in ("sess-1.lock", "sess-2.json.tmp", "my notes.json", ".hidden.json", "readme.txt", ".json"):
        (tmp_path / name).write_text("{}")
    assert list_session_ids(tmp_path) == ["sess-1"]


def test_the_sessions_of_an_agent_are_loaded(tmp_path: Path) -> None:
    """Only those of the given agent are loaded, newest first."""
    for session_id, agent_id in (("s1", "ada"), ("s2", "bob"), ("s3", "ada")):
        save_session(record_of(session_id, agent_id), tmp_path)
    age(tmp_path, "s1", "s2", "s3")
    assert [record.session_id for record in load_sessions_for_agent("ada", tmp_path)] == ["s3", "s1"]
    assert load_sessions_for_agent("eve", tmp_path) == []


def test_a_record_is_deleted(tmp_path: Path) -> None:
    """It is gone; loading or deleting it again raises SessionNotFound."""
    save_session(record_of(), tmp_path)
    delete_session("sess-1", tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(SessionNotFound):
        load_session("sess-1", tmp_path)
    with pytest.raises(SessionNotFound):
        delete_session("sess-1", tmp_path)


async def test_messages_of_a_saved_record_are_redacted(tmp_path: Path) -> None:
    """The file is written again without their text, by the function and the store, whichever process wrote it."""
    save_session(record_of(), tmp_path)
    said = load_session("sess-1", tmp_path).loops[0].messages[0]
    assert not redact_session("sess-1", tmp_path, ["unknown"])
    assert redact_session("sess-1", tmp_path, [said.id])
    body = (tmp_path / "sess-1.json").read_text()
    assert "looking" not in body
    assert '"look"' not in body, "an argument of its call"
    assert not redact_session("sess-1", tmp_path, [said.id])
    store, other = FileRecordStore(tmp_path), record_of("sess-2")
    await store.save(other)
    assert await store.redact("sess-2", [other.loops[0].messages[0].id])
    assert [message.text for message in (await store.load("sess-2")).loops[0].messages] == ["[redacted]"]
    with pytest.raises(SessionNotFound):
        redact_session("sess-3", tmp_path, [said.id])
    with pytest.raises(InvalidData, match="several ids"):
        redact_session("sess-1", tmp_path, said.id)
    with pytest.raises(SessionNotFound):
        await FileRecordStore(tmp_path / "none").redact("sess-1", [said.id])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": 99, "session_id": "sess-1"}',
        b'{"format": 1, "session_id": "sess-1", "loops": 3}',
        b'{"format": 1, "session_id": "sess-2"}',
        b'{"format": 1, "session_id": "sess-1", "loops": [{"loop_id": "l"}]}',
    ],
)
def test_a_corrupt_file_is_named(tmp_path: Path, body: bytes) -> None:
    """A file that does not hold this session's record raises InvalidSessionFile with its path, and is unchanged."""
    path = tmp_path / "sess-1.json"
    path.write_bytes(body)
    with pytest.raises(InvalidSessionFile) as caught:
        load_session("sess-1", tmp_path)
    assert caught.value.path == str(path)
    assert path.read_bytes() == body


def test_half_a_file_is_corrupt(tmp_path: Path) -> None:
    """A record cut short at any tested place is refused, never read as a shorter one."""
    save_session(record_of(), tmp_path)
    path = tmp_path / "sess-1.json"
    whole = path.read_bytes()
    for end in range(0, len(whole) - 2, 97):
        path.write_bytes(whole[:end])
        with pytest.raises(InvalidSessionFile):
            load_session("sess-1", tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """A link under a record's name does not count as a record, and a save replaces it without touching its target."""
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    directory = tmp_path / "records"
    directory.mkdir()
    (directory / "sess-1.json").symlink_to(outside)
    with pytest.raises(InvalidSessionFile):
        load_session("sess-1", directory)
    save_session(record_of(), directory)
    assert (outside.read_text(), load_session("sess-1", directory)) == ("mine", record_of_loaded(directory))


def record_of_loaded(directory: Path) -> SessionRecord:
    """Return the one record of a directory, by its listing."""
    (session_id,) = list_session_ids(directory)
    return load_session(session_id, directory)


@pytest.mark.parametrize("session_id", ["../evil", "a/b", "/etc/passwd", "..", ".", "", "a\0b", "a\\b", "x" * 300])
@pytest.mark.parametrize(
    "use",
    [
        lambda session_id, directory: save_session(SessionRecord(session_id=session_id), directory),
        load_session,
        delete_session,
        lambda session_id, directory: redact_session(session_id, directory, ["m"]),
    ],
    ids=["save", "load", "delete", "redact"],
)
def test_ids_that_are_paths_are_refused(tmp_path: Path, use: Callable[..., object], session_id: str) -> None:
    """No id leads out of the directory."""
    with pytest.raises(InvalidSessionId):
        use(session_id, tmp_path / "records")
    assert set(os.listdir(tmp_path)) <= {"records"}


async def test_the_store_does_the_same(tmp_path: Path) -> None:
    """It saves, loads, lists and deletes, awaited."""
    store = FileRecordStore(tmp_path)
    record = record_of()
    await store.save(record)
    assert await store.load("sess-1") == record
    assert load_session("sess-1", tmp_path) == record
    assert await store.list_ids() == ["sess-1"]
    await store.delete("sess-1")
    assert await store.list_ids() == []
    with pytest.raises(SessionNotFound):
        await store.load("sess-1")
    with pytest.raises(SessionNotFound):
        await store.delete("sess-1")


async def test_a_second_writer_is_told_that_the_session_is_locked(tmp_path: Path) -> None:
    """Under another's lock, a session can be read but not written or deleted; other sessions can be written."""
    store = FileRecordStore(tmp_path)
    await store.save(record_of())
    handle = os.open(tmp_path / "sess-1.lock", os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(SessionLocked) as caught:
            await store.save(record_of(agent_id="another"))
        assert caught.value.session_id == "sess-1"
        with pytest.raises(SessionLocked):
            await store.delete("sess-1")
        assert (await store.load("sess-1")).agent_id == "agent-1"
        await store.save(record_of("sess-2"))
    finally:
        os.close(handle)
    await store.save(record_of(agent_id="another"))
    assert (await store.load("sess-1")).agent_id == "another"


@pytest.mark.parametrize("session_id", ["../evil", "", "a/b"])
async def test_the_store_refuses_paths_too(tmp_path: Path, session_id: str) -> None:
    """An id that is a path makes no lock file either."""
    store = FileRecordStore(tmp_path)
    with pytest.raises(InvalidSessionId):
        await store.save(SessionRecord(session_id=session_id))
    with pytest.raises(InvalidSessionId):
        await store.delete(session_id)
    assert os.listdir(tmp_path) == []


def test_each_message_stands_once_in_the_file(tmp_path: Path) -> None:
    """A loop has its messages; its events, its end and loops that share them name them. They come back the same."""
    record = record_of()
    (loop,) = record.loops
    twin = msgspec.structs.replace(loop, loop_id="twin")
    record = msgspec.structs.replace(record, loops=(loop, twin))
    save_session(record, tmp_path)
    document = json.loads((tmp_path / "sess-1.json").read_text())
    assert json.dumps(document).count('"looking"') == 1
    first, second = document["loops"]
    assert first["messages"][0]["id"] == loop.messages[0].id
    assert second["messages"] == [{"$message": loop.messages[0].id}]
    assert load_session("sess-1", tmp_path) == record
    del document["checksum"]
    assert record.to_dict() == document


def test_a_message_that_differs_from_its_namesake_stands_whole(tmp_path: Path) -> None:
    """An event with a different version of a message than the loop's end keeps that version."""
    record = record_of()
    (loop,) = record.loops
    other = msgspec.structs.replace(loop.messages[0], metadata={"other": True})
    record = msgspec.structs.replace(record, loops=(msgspec.structs.replace(loop, messages=(other,)),))
    save_session(record, tmp_path)
    assert load_session("sess-1", tmp_path) == record


def test_a_file_of_an_older_release_is_read(tmp_path: Path) -> None:
    """Such a file has messages whole in every place."""
    record = record_of()
    save_session(record, tmp_path)
    path = tmp_path / "sess-1.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    whole = with_messages_whole(document)
    assert json.dumps(whole).count('"looking"') == 3
    path.write_text(json.dumps(whole))
    assert load_session("sess-1", tmp_path) == record


@pytest.mark.parametrize("named", ["nobody", 7, None])
def test_a_message_that_stands_nowhere_is_told(tmp_path: Path, named: object) -> None:
    """A file that names it was not written by perdure, or was damaged."""
    save_session(record_of(), tmp_path)
    path = tmp_path / "sess-1.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    document["loops"][0]["messages"] = [{"$message": named}]
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidSessionFile, match="is named, and stands nowhere"):
        load_session("sess-1", tmp_path)


def test_a_flipped_bit_never_loads_as_something_else(tmp_path: Path) -> None:
    """With any one bit flipped, a file loads unchanged or raises InvalidSessionFile."""
    record = record_of()
    save_session(record, tmp_path)
    path = tmp_path / "sess-1.json"
    whole = path.read_bytes()
    chosen = random.Random(11)
    places = [*range(40), *(chosen.randrange(len(whole)) for _ in range(1000))]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << chosen.randrange(8))]) + whole[place + 1 :])
        try:
            assert load_session("sess-1", tmp_path) == record
        except InvalidSessionFile:
            continue


def test_a_checksum_survives_another_layout(tmp_path: Path) -> None:
    """The checksum is of the content: a JSON tool may change the layout."""
    record = record_of()
    save_session(record, tmp_path)
    path = tmp_path / "sess-1.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert load_session("sess-1", tmp_path) == record


def test_a_file_that_an_older_release_has_rewritten_is_read(tmp_path: Path) -> None:
    """That release keeps the checksum as an unknown field behind the format, even if it changes the record."""
    record = record_of()
    save_session(record, tmp_path)
    path = tmp_path / "sess-1.json"
    document = json.loads(path.read_text())
    document["agent_id"] = "renamed"
    path.write_text(json.dumps({"format": document.pop("format"), **document}))
    found = load_session("sess-1", tmp_path)
    assert (found.agent_id, found.loops) == ("renamed", record.loops)
    save_session(found, tmp_path)
    assert load_session("sess-1", tmp_path) == found


def test_one_damaged_file_stops_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other records of the agent are returned; the damaged one is logged, and named beside them."""
    for session_id in ("s1", "s2", "s3"):
        save_session(record_of(session_id, "ada"), tmp_path)
    age(tmp_path, "s1", "s2", "s3")
    (tmp_path / "s2.json").write_text("{")
    with caplog.at_level(logging.WARNING, "perdure.stores"):
        found = load_sessions_for_agent("ada", tmp_path)
    assert [record.session_id for record in found] == ["s3", "s1"]
    assert [error.path for error in found.damaged] == [str(tmp_path / "s2.json")]
    assert "s2.json" in caplog.text


def test_one_unreadable_file_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the disk cannot read is named beside the readable records."""
    for session_id in ("s1", "s2"):
        save_session(record_of(session_id, "ada"), tmp_path)
    opening = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == "s2.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opening(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    found = load_sessions_for_agent("ada", tmp_path)
    assert [record.session_id for record in found] == ["s1"]
    assert [type(error) for error in found.damaged] == [UnreadableFile]


def test_the_advice_for_a_damaged_record_is_true(tmp_path: Path) -> None:
    """A record has no log beside it; it can be restored, saved again or deleted, and each of these works."""
    save_session(record_of(), tmp_path)
    (tmp_path / "sess-1.json").write_text("{")
    with pytest.raises(InvalidSessionFile, match=r"delete_session\(\)") as caught:
        load_session("sess-1", tmp_path)
    assert ".jsonl" not in str(caught.value)
    delete_session("sess-1", tmp_path)
    save_session(record_of(), tmp_path)
    assert load_session("sess-1", tmp_path).session_id == "sess-1"


def test_a_full_disk_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and what to do; the old record stays, and no temporary file is left."""
    old = record_of()
    save_session(old, tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StoreError, match=r"sess-1\.json could not be written \(No space left on device\)"):
            save_session(record_of(agent_id="another"), tmp_path)
    assert load_session("sess-1", tmp_path) == old
    assert os.listdir(tmp_path) == ["sess-1.json"]


async def test_reading_makes_no_directory(tmp_path: Path) -> None:
    """A missing directory has no records, and is not created."""
    nowhere = tmp_path / "nowhere"
    store = FileRecordStore(nowhere)
    assert list_session_ids(nowhere) == load_sessions_for_agent("ada", nowhere) == await store.list_ids() == []
    for reading in (load_session, delete_session):
        with pytest.raises(SessionNotFound):
            reading("sess-1", nowhere)
    for verb in (store.load, store.delete):
        with pytest.raises(SessionNotFound):
            await verb("sess-1")
    assert not nowhere.exists()
