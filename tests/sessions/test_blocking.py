"""The same verbs for callers that do not await."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import ConfigurationError, SessionNotFound
from perdure.testing import Chunks, Delay, ScriptedDriver

HERE = Path(__file__).parent


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


def test_a_reply_is_shown_in_a_line() -> None:
    """A notebook shows the repr of what a cell returns."""

    @perdure.tool(needs_approval=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    with perdure.connect_blocking("memory://", model="offline", tools=[pay]) as sessions:
        chat = sessions.open()
        shown = repr(chat.send("My name is Ada."))
        assert re.fullmatch(r"<Reply 'Nice to meet you, Ada\.', completed, \d+ tokens>", shown)
        assert repr(chat.send("pay()")).startswith("<Reply '', waits for pay, ")


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
    """The tool would wait for itself. The error says so, and the model sees it."""
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
    """A thread that follows events or waits for an answer gets an error and does not hang; its run can be recovered."""
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
    """Closing waits for the run, and the other thread gets its answer."""
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


def test_the_face_is_what_the_async_verbs_say() -> None:
    """A changed verb, parameter or docstring is missing here until the script has run again."""
    spec = importlib.util.spec_from_file_location("make_blocking", HERE / "make_blocking.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    there = make.WRITTEN.read_text(encoding="utf-8")
    assert there == make.written(), "run `python tests/sessions/make_blocking.py`"


@pytest.mark.parametrize(
    ("plain", "twin"),
    [
        (perdure.Sessions, perdure.BlockingSessions),
        (perdure.Chat, perdure.BlockingChat),
        (perdure.StartedRun, perdure.BlockingRun),
        (perdure.Queued, perdure.BlockingQueued),
    ],
)
def test_every_verb_has_a_twin_with_its_parameters(plain: type, twin: type) -> None:
    """`help()` and a completing prompt see the same verbs, parameters and docstrings. None is a coroutine."""
    verbs = {name: verb for name, verb in vars(plain).items() if inspect.isfunction(verb) and name[0] != "_"}
    for name, verb in verbs.items():
        if name == "leave":  # the connection's own
            continue
        same = getattr(twin, name)
        assert list(inspect.signature(same).parameters) == list(inspect.signature(verb).parameters)
        assert (inspect.getdoc(same), inspect.iscoroutinefunction(same)) == (inspect.getdoc(verb), False)


@pytest.mark.parametrize("name", ["talk", "start"])
def test_the_types_are_those_of_the_values(name: str) -> None:
    """The code that mypy checks in blocking_types.py runs as well."""
    runpy.run_path(str(HERE / "blocking_types.py"))[name]()


def test_what_a_block_gives_is_named_for_editors() -> None:
    """Jedi, which completes names in notebooks, takes a `Self` as the class that it stands in."""
    assert perdure.BlockingSessions.__enter__.__annotations__["return"] == "BlockingSessions"
    assert "__enter__" in vars(perdure.BlockingSessions)


async def test_it_works_inside_a_running_event_loop() -> None:
    """In a notebook, for example: the verbs run in another thread while the caller's loop waits."""
    with connect() as sessions:
        assert sessions.open().send("hello").text == "yes"


def test_the_sessions_of_a_chat_block_as_well() -> None:
    """A chat's `sessions` have verbs that are not awaited either."""
    with connect() as sessions:
        chat = sessions.open("mine")
        assert chat.sessions.exists("mine") is True


def test_what_a_verb_has_returned_is_closed_with_the_sessions() -> None:
    """Runs, messages, owners' sessions and streams raise an error at their next use."""
    with connect("one", "two") as sessions:
        chat = sessions.open("mine")
        run, hers, late = chat.start("hello"), sessions.of("ada"), chat.enqueue("later")
        text = run.stream()
        assert next(text) == "one"
    uses: list[Any] = [
        run.result, run.stream, late.reply, late.drop, hers.list, chat.stream, chat.send, lambda: chat.subscribe(print),
        lambda: next(text), lambda: hers.of("bo"), lambda: hers.expecting(1),
    ]  # fmt: skip
    for use in uses:
        given = ["x"] if use in (chat.stream, chat.send) else []
        with pytest.raises(ConfigurationError, match="not open"):
            use(*given)


def test_only_what_connect_returns_is_opened() -> None:
    """A second opening would leave the first thread without an end. The attempt closes nothing."""
    with connect() as sessions:
        for opened in (sessions, sessions.of("ada")):
            with pytest.raises(ConfigurationError, match="open already"), opened:
                pass
        assert sessions.open().send("hello").text == "yes"


FORK = """
import os, signal, sys
import perdure

sessions = perdure.connect_blocking(sys.argv[1], model="offline")
with sessions:
    chat = sessions.open("a")
    stream = chat.stream("hello")
    print(next(stream)[:3], flush=True)
    if os.fork() == 0:
        signal.alarm(60)  # a verb that hangs would hang for ever
        for use in (sessions.list, lambda: chat.send("again"), lambda: next(stream)):
            try:
                use()
            except perdure.ConfigurationError as error:
                print(error, flush=True)
        sessions.__exit__(None, None, None)
        os._exit(0)
    print("child", os.wait()[1], flush=True)
    print("".join(stream)[-6:], chat.length())
"""


def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    """The thread with the loop stays in the parent, as under `gunicorn --preload`: a verb would wait for ever."""
    given = [sys.executable, "-W", "error", "-c", FORK, f"sqlite:///{tmp_path / 'forked.db'}"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    said, *errors, child, last = done.stdout.splitlines()
    assert (said, child, last) == ("You", "child 0", "model. 2")
    assert len(errors) == 3
    assert all("was forked from it since" in error and "--preload" in error for error in errors)


def test_two_threads_may_wait_for_one_run() -> None:
    """Each of them gets the answer, and a third thread that stops the run ends both waits."""
    with connect("one", Delay(30, "late")) as sessions:
        chat = sessions.open()
        assert {reply.text for reply in _waited_for(chat.start("hello"))} == {"one"}
        run = chat.start("again")
        threading.Timer(0.2, run.cancel).start()
        assert len(_waited_for(run)) == 2


def _waited_for(run: perdure.BlockingRun[Any]) -> list[Any]:
    """Wait for a run in two threads. Return the result of each: a reply or an error."""
    told: list[Any] = []

    def wait() -> None:
        try:
            told.append(run.result())
        except perdure.PerdureError as error:
            told.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told
