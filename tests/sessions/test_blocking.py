"""The same verbs for those who do not await."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import ConfigurationError, SessionNotFound
from perdure.testing import Chunks, Delay, ScriptedDriver


def connect(*replies: Any, **options: Any) -> perdure.BlockingSessions:
    given = list(replies)
    driver = ScriptedDriver(lambda _: given.pop(0) if given else "yes")
    return perdure.connect_blocking("memory://", driver=driver, **options)


def test_no_verb_is_awaited() -> None:
    with connect() as sessions:
        chat = sessions.open("mine")
        assert chat.send("hello").text == "yes"
        chat.inject({"role": "user", "content": "by the way"})
        branch = chat.fork()
        assert (branch.length(), chat.trim(keep_last=1), sessions.length(branch.id)) == (3, 1, 3)
        chat.adopt(branch)
        assert len(chat.diff(branch).common) == 3
        assert chat.snapshot()["id"] == chat.id == "mine"
        assert [message.text for message in chat.history()] == ["hello", "yes", "by the way"]
        assert sessions.run("once").text == "yes"
        assert len(sessions.list()) == 2
        chat.close()


def test_a_stream_is_a_plain_iterator() -> None:
    with connect(Chunks(["Hel", "lo"])) as sessions:
        chunks = list(sessions.open().stream("hi"))
        assert chunks == ["Hel", "lo", ""]
        assert chunks[-1].reply.text == "Hello"


def test_a_stream_that_is_left_stops_its_run() -> None:
    with connect(Chunks(["one ", Delay(30, "two")])) as sessions:
        chat = sessions.open()
        for chunk in chat.stream("count"):
            assert chunk == "one "
            break
        assert chat.send("and?").text == "yes"


def test_an_error_reaches_the_caller() -> None:
    with connect() as sessions:
        with pytest.raises(SessionNotFound):
            sessions.length("nobody")
        assert sessions.exists("nobody") is False


def test_it_can_be_used_from_any_thread() -> None:
    with connect() as sessions:
        chats = [sessions.open(f"s{number}") for number in range(4)]
        threads = [threading.Thread(target=chat.send, args=("hi",)) for chat in chats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [chat.length() for chat in chats] == [2] * 4


def test_ctrl_c_cancels_the_run_and_leaves_the_session_usable() -> None:
    with connect(Delay(30, "too late")) as sessions:
        chat = sessions.open()
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            chat.send("hello")
        timer.join()
        assert time.monotonic() - began < 10
        assert chat.send("again").text == "yes"
        assert chat.history()[0].text == "hello"


def test_subscribers_are_called_as_ever() -> None:
    heard: list[object] = []
    with connect() as sessions:
        chat = sessions.open()
        handle = chat.subscribe(heard.append)
        chat.send("hi")
        assert heard
        handle.cancel()


def test_a_tool_may_not_block_on_the_loop_it_runs_in() -> None:
    """It would wait for itself; the error says so, and the model is told."""
    held: list[Any] = []

    async def ask() -> str:
        return str(held[0].length("mine"))

    with connect(perdure.ToolCall(name="ask"), tools=[ask]) as sessions:
        held.append(sessions)
        reply = sessions.open("mine").send("hi")
        assert reply.text == "yes"
        assert any("use await" in message.text for message in reply.session.state.messages)


def test_outside_of_with_nothing_works() -> None:
    sessions = connect()
    with pytest.raises(ConfigurationError, match="not open"):
        sessions.length("x")
    with sessions:
        chat = sessions.open()
    with pytest.raises(ConfigurationError, match="not open"):
        sessions.open()
    with pytest.raises(ConfigurationError, match="not open"):
        chat.length()


def test_a_store_that_does_not_open_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database")
    before = set(threading.enumerate())
    with pytest.raises(perdure.PerdureError), perdure.connect_blocking(f"sqlite:///{tmp_path}/file"):
        pass
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


def test_whoever_still_waits_when_the_sessions_close_is_told() -> None:
    """A thread that follows events, or waits for an answer, would wait for ever; its run is left to be recovered."""
    told: list[Any] = []

    def wait_for(what: Any) -> None:
        try:
            for _ in what():
                pass
        except perdure.PerdureError as error:
            told.append(type(error))

    store = perdure.MemoryStore()
    with perdure.connect_blocking(store, driver=ScriptedDriver([Delay(30, "late")]), grace=0.05) as sessions:
        chat = sessions.open("mine")
        waiting = (lambda: chat.events(follow=True), lambda: [chat.send("hello")])
        threads = [threading.Thread(target=wait_for, args=(what,), daemon=True) for what in waiting]
        for thread in threads:
            thread.start()
        while not chat.history():
            time.sleep(0.01)
    for thread in threads:
        thread.join(5)
    assert set(told) == {ConfigurationError, perdure.RunInterrupted}
    with perdure.connect_blocking(store, driver=ScriptedDriver(["yes"])) as sessions:
        assert sessions.recover().resumed == ("mine",)


def test_a_run_of_another_thread_has_its_grace() -> None:
    """Leaving waits for it, and that thread has its answer."""
    told: list[str] = []
    with perdure.connect_blocking("memory://", driver=ScriptedDriver([Delay(0.1, "late")])) as sessions:
        chat = sessions.open("mine")
        thread = threading.Thread(target=lambda: told.append(chat.send("hello").text))
        thread.start()
        while not chat.history():
            time.sleep(0.01)
    thread.join(5)
    assert told == ["late"]


def test_a_chat_may_be_named() -> None:
    with connect() as sessions:
        chat = sessions.open()
        chat.send("hello")
        assert len(chat.diff(other=chat.fork()).common) == 2
