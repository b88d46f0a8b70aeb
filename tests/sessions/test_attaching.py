"""Images and files in a conversation: how they are given, that the model gets them, and who may read them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

import perdure
import perdure.fsck
from perdure import (
    ConfigurationError,
    InvalidData,
    Media,
    Message,
    ModelReply,
    ModelRequest,
    RunFailed,
    SessionNotFound,
    attach,
    codec,
)
from perdure.protocols import OnDelta
from perdure.stores.jobs import attachments
from perdure.testing import FailingStore, ScriptedDriver

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
PHOTO = Media("image/png", data=PNG, name="a.png")


class Seeing:
    """A model that answers with the files that it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def respond(self, request: ModelRequest, on_delta: OnDelta) -> ModelReply:
        await self.gate.wait()
        messages = await request.messages_with_files()
        shown = [part for message in messages for part in message.parts if isinstance(part, Media)]
        self.seen.append([part.data or b"" for part in shown])
        return ModelReply(Message.assistant(f"{len(shown)} files"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'sessions.db'}"


@pytest.mark.parametrize(
    ("name", "body", "media_type"),
    [
        ("a.png", PNG, "image/png"),
        ("wrong.jpg", PNG, "image/png"),
        ("b.jpeg", b"\xff\xd8\xff\xe0..", "image/jpeg"),
        ("c.gif", b"GIF89a", "image/gif"),
        ("d.webp", b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        ("e.wav", b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/wav"),
        ("f", b"%PDF-1.7", "application/pdf"),
        ("g.md", b"# Title", "text/markdown"),
        ("h.py", b"print(1)", "text/plain"),
        ("Makefile", "größer".encode(), "text/plain"),
        ("i.docx", b"PK\x03\x04", "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
    ],
)
def test_a_file_is_what_its_bytes_or_its_name_say(tmp_path: Path, name: str, body: bytes, media_type: str) -> None:
    """The bytes decide before the name's ending: providers refuse an image of another type than it says."""
    path = tmp_path / name
    path.write_bytes(body)
    for source in (path, str(path)):
        assert attach(source) == Media(media_type, data=body, name=name)
    assert attach(body, name=name) == Media(media_type, data=body, name=name)
    assert attach(path, name="b", media_type="x/y") == Media("x/y", data=body, name="b")


def test_an_address_is_left_to_the_provider() -> None:
    """Its ending gives its type; a `data:` address contains the bytes."""
    assert attach("https://a.example/x/b.PNG?q=1") == Media(
        "image/png", url="https://a.example/x/b.PNG?q=1", name="b.PNG"
    )
    assert attach("https://a.example/", media_type="image/png").name is None
    assert attach("data:image/gif;base64,R0lGODlh") == Media("image/gif", data=b"GIF89a")
    assert attach("data:,hello%20there") == Media("text/plain", data=b"hello there")


def test_what_cannot_be_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error says what is wrong with it."""
    (tmp_path / "empty.png").touch()
    (tmp_path / "what").write_bytes(b"\x00\x01\xff")
    monkeypatch.setattr("perdure.sessions.attaching.MOST_BYTES", 100)
    (tmp_path / "large.txt").write_bytes(b"x" * 101)
    problems = {
        tmp_path / "none.png": "does not exist",
        tmp_path: r"^\S+ is a directory; name a file in it \(at \$\.source\)$",
        tmp_path / "empty.png": "nothing in it",
        tmp_path / "what": "type is not known; say what it is",
        tmp_path / "large.txt": "more than the",
        "a\0b": "cannot be read",
        "https://a.example/b": "cannot be told from its address",
        "data:image/png;base64,???": "data: address is incomplete",
        b"": "nothing in it",
        5: "got int",
    }
    for source, problem in problems.items():
        with pytest.raises(InvalidData, match=problem):
            attach(source)  # type: ignore[arg-type]
    if os.geteuid():
        (tmp_path / "large.txt").chmod(0)
        with pytest.raises(InvalidData, match="cannot be read"):
            attach(tmp_path / "large.txt")


async def test_a_model_is_shown_what_was_sent(url: str, tmp_path: Path) -> None:
    """It may be sent with a text, alone, as a path, streamed or injected; later turns and processes show it too."""
    path = tmp_path / "b.png"
    path.write_bytes(PNG[::-1] + b"\x00")
    model = Seeing()
    async with perdure.connect(url, driver=model) as sessions:
        chat = await sessions.open("it")
        assert (await chat.send("What is this?", PHOTO, "Be brief.")).text == "1 files"
        assert [type(part).__name__ for part in (await chat.history())[0].parts] == ["Text", "Media", "Text"]
        await chat.send(Message.user("And"), attach(path, media_type="image/png"))
        async for _ in chat.stream("Again", PHOTO):
            pass
        await chat.inject({"role": "user", "content": "This too"}, PHOTO)
        await chat.send(PHOTO)
    async with perdure.connect(url, driver=model) as sessions:
        await (await sessions.open("it")).send("So?")
    other = path.read_bytes()
    everything = [PNG, other, PNG, PNG, PNG]
    assert model.seen == [everything[:1], everything[:2], everything[:3], everything, everything]


async def test_a_path_is_read_and_a_text_is_a_text(url: str, tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("hello")
    async with perdure.connect(url, driver=Seeing()) as sessions:
        chat = await sessions.open()
        await chat.send("See", path)
        await chat.send(path)
        await chat.send(str(path))
        parts = [message.parts for message in (await chat.history())[::2]]
    file = Media("text/plain", data=b"hello", name="b.txt")
    assert [each[-1] for each in parts] == [file, file, perdure.Text(str(path))]


async def test_files_do_not_go_behind_a_list(url: str) -> None:
    async with perdure.connect(url, driver=Seeing()) as sessions:
        chat = await sessions.open()
        for wrong in (["a", "b"], {"role": "user", "content": "a"}, 5):
            with pytest.raises(InvalidData, match="follow a text"):
                await chat.send(wrong, PHOTO)
        with pytest.raises(InvalidData, match="expected a text or a part"):
            await chat.send("a", 5)  # type: ignore[arg-type]
        assert await chat.length() == 0


async def test_bytes_are_read_when_they_are_asked_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load reads none of them, however many images there are; small ones and addresses need no read."""
    read: list[str] = []
    original = attachments.read_bodies

    def counted(session_id: Any, places: Any) -> Any:
        read.extend(places)
        return original(session_id, places)

    monkeypatch.setattr(attachments, "read_bodies", counted)
    small, linked = Media("image/png", data=b"x"), Media("image/png", url="https://a.example/b.png")
    async with perdure.connect(url, driver=Seeing()) as sessions:
        chat = await sessions.open("it")
        for number in range(20):
            await chat.inject(Message.user(Media("image/png", data=PNG + bytes([number]))))
        await chat.inject(Message.user(small, linked))
    async with perdure.connect(url, driver=ScriptedDriver(["no look"])) as sessions:
        chat = await sessions.open("it")
        session, said = await chat.session(), await chat.history()
        await chat.send("What?")
        assert read == []
        (shown,) = said[3].parts
        assert isinstance(shown, Media)
        assert (shown.data, shown.length, shown.label) == (None, len(PNG) + 1, "image, 10.2 KB")
        assert await chat.read(shown) == Media("image/png", data=PNG + bytes([3]))
        assert read == [shown.hash]
        assert [await chat.read(part) for part in said[20].parts] == [small, linked]  # type: ignore[arg-type]
        assert session.state.messages[3] == said[3]


async def test_another_owner_cannot_read_or_send_a_file_by_its_hash(url: str) -> None:
    """Nor can another owner learn whether anybody has it."""
    async with perdure.connect(url, driver=Seeing()) as sessions:
        ada, bob = sessions.of("ada"), sessions.of("bob")
        theirs = await ada.open("mine")
        await theirs.send("Look", PHOTO)
        part = (await theirs.history())[0].parts[1]
        assert isinstance(part, Media)
        mine = await bob.open("mine")
        unknown = Media("image/png", hash="0" * 64, size=1)
        said = []
        for each in (part, unknown):
            with pytest.raises(InvalidData) as read:
                await mine.read(each)
            with pytest.raises(InvalidData) as sent:
                await mine.send("Look", each)
            said.append([str(error.value).replace(each.hash or "", "#") for error in (read, sent)])
        assert said[0] == said[1]
        with pytest.raises(SessionNotFound):
            await bob.read(theirs.id, part)
        assert await mine.length() == 0
        assert (await theirs.read(part)).data == PNG
        with pytest.raises(InvalidData, match="not a SHA-256"):
            await theirs.read("x")
        with pytest.raises(InvalidData, match="expected a Media"):
            await theirs.read(5)  # type: ignore[arg-type]


async def test_a_file_is_read_by_its_hash_alone(url: str) -> None:
    """As a page asks for it. Its bytes tell the type: the name and the type of an upload are anybody's words."""
    page = b"<script>alert(1)</script>" * 400
    async with perdure.connect(url, driver=Seeing()) as sessions:
        ada, bob = sessions.of("ada"), sessions.of("bob")
        chat, other = await ada.open("mine"), await bob.open("mine")
        await chat.inject("Look", PHOTO, Media("image/png", data=page, name="b.png"))
        hashes = [part.hash or "" for part in (await chat.history())[0].parts if isinstance(part, Media)]
        assert await ada.read("mine", hashes[0]) == Media("image/png", data=PNG)
        assert await chat.read(hashes[1]) == Media("application/octet-stream", data=page)
        with pytest.raises(InvalidData):
            await other.read(hashes[0])


async def test_a_file_may_be_sent_again_by_its_hash(url: str) -> None:
    """It works in the session that has it, and in its forks, while a key keeps a request from running twice."""
    model = Seeing()
    async with perdure.connect(url, driver=model) as sessions:
        chat = await sessions.open("it")
        for _ in range(2):
            await chat.send("Look", PHOTO, key="k")
        part = (await chat.history())[0].parts[1]
        fork = await chat.fork("fork")
        await fork.send("Again", part)
        await chat.send("Again", part)
        await sessions.erase("it")
        await fork.send("So?")
    assert model.seen == [[PNG], [PNG, PNG], [PNG, PNG], [PNG, PNG]]


async def test_what_is_queued_keeps_its_files(url: str) -> None:
    """A queued message is delivered with its bytes, and its key holds."""
    model = Seeing()
    async with perdure.connect(url, driver=model) as sessions:
        chat = await sessions.open("it")
        model.gate.clear()
        first = asyncio.create_task(chat.send("One"))
        await until(lambda: sessions.runtime.journal.is_claimed("it"))
        assert (await chat.send("Two", PHOTO, when_busy="queue", key="k")).queued
        model.gate.set()
        await first
        await until(lambda: model.seen[1:])
        assert (await chat.send("Two", PHOTO, key="k")).text == "1 files"
        assert [*await sessions.store.check()] == []  # type: ignore[attr-defined]
    assert model.seen == [[], [PNG]]


async def test_what_steers_a_run_may_have_files(url: str) -> None:
    """The model is shown them in another step of the run or, if that has ended, in the next run."""
    model = Seeing()
    async with perdure.connect(url, driver=model) as sessions:
        chat = await sessions.open("it")
        model.gate.clear()
        first = asyncio.create_task(chat.send("One"))
        await until(lambda: sessions.runtime.journal.is_claimed("it"))  # type: ignore[union-attr]
        assert (await chat.send("Two", PHOTO, when_busy="steer")).queued
        model.gate.set()
        await first
        await until(lambda: model.seen[1:])
        await sessions.runtime.idle()
        assert [*await sessions.store.check()] == []  # type: ignore[attr-defined]
    assert model.seen == [[], [PNG]]


async def test_a_read_that_fails_once_is_tried_again_with_the_next_message() -> None:
    """The run fails and says why; the session is as it was, with the message."""
    store = FailingStore(perdure.MemoryStore())
    async with perdure.connect(store, driver=Seeing()) as sessions:
        chat = await sessions.open("it")
        store.fail("attachments")
        await chat.inject(Message.user(PHOTO))
        with pytest.raises(RunFailed, match="was told to fail"):
            await chat.send("What is it?")
        assert (await chat.send("And now?")).text == "1 files"


async def test_a_message_is_found_by_the_name_of_its_file(url: str) -> None:
    """It is not found by its bytes, which no index has."""
    async with perdure.connect(url, driver=Seeing()) as sessions:
        chat = await sessions.open("it")
        await chat.send("Look", Media("text/plain", data=b"zebra " * 2_000, name="invoice.txt"))
        assert [hit.role for hit in await chat.search("invoice")] == ["user"]
        assert await chat.search("zebra") == []


async def test_a_run_that_was_interrupted_is_recovered_with_its_files(url: str) -> None:
    model = Seeing()
    model.gate.clear()
    async with perdure.connect(url, driver=model) as sessions:
        chat = await sessions.open("it")
        run = asyncio.create_task(chat.send("Look", PHOTO))
        await until(lambda: sessions.runtime.journal.is_claimed("it"))
        await sessions._connection.end_runs(at_once=True)
        await asyncio.gather(run, return_exceptions=True)
    model.gate.set()
    async with perdure.connect(url, driver=model) as sessions:
        assert (await sessions.recover("it")).resumed == ("it",)
        assert (await sessions.snapshot("it") or {})["messages"][-1]["parts"][0]["text"] == "1 files"
    assert model.seen == [[PNG]]


async def test_a_missing_file_fails_the_run_and_says_where(url: str, tmp_path: Path) -> None:
    """The damage names the session and the message; the conversation is otherwise whole."""
    import apsw

    async with perdure.connect(url, driver=Seeing()) as sessions:
        await (await sessions.open("it")).send("Look", PHOTO)
    db = apsw.Connection(str(tmp_path / "sessions.db"))
    db.execute("DELETE FROM blob")
    db.close()
    async with perdure.connect(url, driver=Seeing()) as sessions:
        chat = await sessions.open("it")
        with pytest.raises(RunFailed, match="message 0 of log"):
            await chat.send("So?")
        report = await perdure.fsck.fsck(sessions.store, session_id="it")
        assert any("message 0 of log" in problem.where for problem in report.problems)


async def test_a_request_without_a_store_cannot_read_files() -> None:
    request = ModelRequest(perdure.ModelConfig("a:b"), [Message.user(Media("image/png", hash="0" * 64, size=1))])
    with pytest.raises(ConfigurationError, match="no store to read it from"):
        await request.messages_with_files()
    plain = ModelRequest(perdure.ModelConfig("a:b"), [Message.user("hi")])
    assert await plain.messages_with_files() is plain.messages


def test_without_await(url: str) -> None:
    with perdure.connect_blocking(url, driver=Seeing()) as sessions:
        chat = sessions.open("it")
        assert chat.send("Look", PHOTO).text == "1 files"
        part = chat.history()[0].parts[1]
        assert chat.read(part).data == PNG


async def test_masking_shows_a_few_words_instead(url: str) -> None:
    """Masked images are not sent any more; without compaction, they are sent."""
    model = Seeing()
    async with perdure.connect(url, driver=model) as sessions:
        chat = await sessions.open("it")
        await chat.send("One", PHOTO)
        await chat.send(
            "Two", Media("application/pdf", data=b"%PDF" + PNG), Media("image/png", url="https://a.example")
        )
        await chat.send("Three", PHOTO)
        await chat.compact(compact_strategy="observation_mask", keep_last=2)
        shown = (await chat.session()).state.messages
        assert shown[0].text == "One[image a.png, 10.2 KB: left out]"
        assert shown[2].text == "Two[file, 10.3 KB: left out][image: left out]"
        assert shown[4].parts[1] == Media("image/png", name="a.png", hash=attach_hash(), size=len(PNG))
        await chat.send("So?")
        await chat.compact(compact_strategy="observation_mask", keep_last=0)
        await chat.send("So?")
        for _ in range(2):
            await chat.uncompact()
        await chat.send("And now?")
    assert [len(files) for files in model.seen] == [1, 3, 4, 1, 0, 4]


def attach_hash() -> str:
    return codec.hash_of_bytes(PNG)
