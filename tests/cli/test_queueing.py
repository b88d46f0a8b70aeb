"""Work for workers, as an operator sees it: left, listed, opened again, taken back."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import InputRefused, Sessions, SuspendSession, TagSession, connect
from perdure.protocols import Entry

from .terminal_session import TerminalSession, clean_environment, command

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
HOSTILE = "\x1b[31mred\u202e"


def on_store(work: Callable[[Sessions], Any]) -> Any:
    async def done() -> Any:
        async with connect("sqlite:///kept.db", model="offline") as sessions:
            return await work(sessions)

    return asyncio.run(done())


@pytest.fixture
def said(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the command on a store with the sessions a and b."""
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///kept.db")
    for name in ("a", "b"):
        perdure("send", "--new", name, "hello")
    return perdure


async def _parked(sessions: Sessions) -> None:
    """Leave b in the state of a parked session."""
    # Not with the verbs of sessions, which would send the waiting messages from here.
    await sessions.runtime.execute("b", TagSession("parked"))
    await sessions.runtime.execute("b", SuspendSession())
    facts = {"reason": f"its process has died {HOSTILE}", "tries": 3, "at": datetime.now(UTC).isoformat()}
    await sessions.store.note("b", [Entry("parked", facts)])  # type: ignore[attr-defined]


def test_a_message_is_left_and_its_key_printed(said: Callable[..., Any]) -> None:
    """The key finds its answer; the same key again leaves nothing."""
    key = said("send", "a", "Ship it.", "--no-wait", "--priority", 5).out.strip()
    assert said("send", "a", "Ship it.", "--no-wait", "--key", key).out.strip() == key
    (waits,) = said("queue", "--json").json["waiting"]
    assert (waits["session"], waits["count"], waits["priority"]) == ("a", 1, 5)
    assert on_store(lambda sessions: sessions.result("a", key)).queued
    assert said("send", "a", "Ship it.", "--no-wait", "--key", "k", "--json").json == {
        "session": "a",
        "key": "k",
        "at": None,
    }


def test_a_message_can_begin_a_session_and_wait_there(said: Callable[..., Any]) -> None:
    said("send", "--new", "c", "Begin.", "--no-wait")
    assert [each["session"] for each in said("queue", "--json").json["waiting"]] == ["c"]
    assert said("show", "c", "--json").json["messages"] == []


@pytest.mark.parametrize(("typed", "days"), [("3d", 3), ("36h", 1.5), ("1.5d", 1.5), ("90min", 0.0625)])
def test_a_message_is_sent_later(said: Callable[..., Any], typed: str, days: float) -> None:
    key = said("send", "a", "Did it arrive?", "--later", typed).out.strip()
    (timer,) = said("queue", "--json").json["delayed"]
    assert (timer["session"], timer["name"], timer["text"]) == ("a", key, "Did it arrive?")
    due = datetime.fromisoformat(timer["due"]) - datetime.now(UTC)
    assert abs(due - timedelta(days=days)) < timedelta(minutes=1)


def test_a_message_is_sent_at_a_time(said: Callable[..., Any]) -> None:
    told = said("send", "a", "Did it arrive?", "--later", "2126-01-31T18:00:00+01:00", "--key", "k")
    assert "A worker sends it at 2126-01-31T18:00:00+01:00" in told.err
    assert "perdure queue drop a k" in told.err
    assert said("queue", "--json").json["delayed"][0]["due"] == "2126-01-31T17:00:00+00:00"


@pytest.fixture
def in_oslo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set this machine's time zone to Oslo."""
    monkeypatch.setenv("TZ", "Europe/Oslo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "words",
    [
        ("schedule", "add", "e", " ", "--cron", "0 7 * * *"),
        ("schedule", "add", "e", "x", "--cron", "0 7 * * *", "--priority", "99999999999"),
        ("send", "--new", "e", "x", "--no-wait", "--priority", "99999999999"),
        ("send", "--new", "e", "x", "--no-wait", "--key", "k" * 501),
    ],
)
def test_what_is_refused_begins_no_session(perdure: Callable[..., Any], words: tuple[str, ...]) -> None:
    perdure(*words, "--model", "offline", code=2)
    assert perdure("ls").out == ""


def test_a_time_without_a_zone_is_local(said: Callable[..., Any], in_oslo: None) -> None:
    """This holds in summer and winter. The output has the offset."""
    told = said("send", "a", "Did it?", "--later", "2120-07-31T18:00", "--key", "k")
    assert "A worker sends it at 2120-07-31T18:00:00+02:00." in told.err
    winter = said("send", "a", "Did it?", "--later", "2120-01-31T18:00", "--json").json
    assert winter["at"] == "2120-01-31T17:00:00+00:00"
    assert "until 2120-01-31T00:00:00+01:00" in said("suspend", "b", "--resume", "2120-01-31").out
    assert "+0" in said("send", "a", "Did it?", "--later", "3d").err
    due = [each["due"] for each in said("queue", "--json").json["delayed"]]
    assert {"2120-07-31T16:00:00+00:00", "2120-01-30T23:00:00+00:00"} <= set(due)


def test_a_time_that_has_passed_means_at_once(said: Callable[..., Any]) -> None:
    passed = "2020-01-31T18:00:00+00:00, which has passed: it is done at once"
    assert passed in said("send", "a", "Did it?", "--later", "2020-01-31T18:00:00+00:00").err
    assert passed in said("suspend", "a", "--resume", "2020-01-31T18:00:00+00:00").out


def test_what_cannot_be_left(said: Callable[..., Any]) -> None:
    """The command is refused, and nothing is stored."""
    for later in ("soon", "3"):
        assert "is not a time" in said("send", "a", "x", "--later", later, code=2).err
    for later in ("9999999d", "999999999999w"):
        assert "is too far away" in said("send", "a", "x", "--later", later, code=2).err
    assert "waits for its turn" in said("send", "a", "x", "--no-wait", "--when-busy", "steer", code=2).err
    assert "--no-wait, or --later" in said("send", "a", "x", "--priority", "1", code=2).err
    assert said("send", "nobody", "x", "--no-wait", code=3).err.endswith(
        "To begin a session of that name, add --new.\n"
    )
    for words in (["a", "x"], ["a", "x", "--no-wait"], ["--new", "c", "x", "--later", "3d"]):
        assert "--key is empty" in said("send", *words, "--key", "", code=2).err
    assert said("show", "c", code=3).out == ""
    assert said("queue", "--json").json == {"waiting": [], "held": [], "running": [], "delayed": [], "parked": []}


def test_every_field_stands_in_the_page(said: Callable[..., Any]) -> None:
    said("send", "a", "Ship it.", "--no-wait")
    said("send", "a", "Did it?", "--later", "3d")
    on_store(_parked)
    on_store(lambda sessions: sessions.store.claim("a", version=2, owner="host:1", lease=60.0))
    row = next(each for each in PAGE.splitlines() if each.startswith("| `queue` "))
    promised = set(re.findall(r"`(\w+)`", row.split("|", 2)[2]))
    found = said("queue", "--json").json
    assert set(found) <= promised
    assert all(part or name in ("waiting", "held") for name, part in found.items())  # a waits, and is being run
    assert {field for part in found.values() for each in part for field in each} <= promised


def test_hostile_text_is_written_out(said: Callable[..., Any]) -> None:
    """It may be a timer's name, a message, or an entry on record."""
    said("send", "a", f"say {HOSTILE}", "--later", "3d", "--key", f"key {HOSTILE}")
    said("send", "a", f"now {HOSTILE}", "--no-wait")
    on_store(_parked)
    shown = said("queue")
    dropped = said("queue", "drop", "a")
    for text in (shown.out + shown.err, dropped.out, said("queue", "--json").out):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "\\x1b[31mred" in shown.out
    assert "\\x1b[31mred" in dropped.out


def test_what_is_dropped_is_said_and_refused(said: Callable[..., Any]) -> None:
    """Waiting for the answer raises InputRefused."""
    asked = [on_store(lambda sessions, text=text: sessions.enqueue("a", text, key=text)) for text in ("one", "two")]
    assert said("queue", "drop", "a").lines == ["dropped\tone\tone", "dropped\ttwo\ttwo"]
    assert said("queue", "drop", "a").lines == ["nothing waits in a"]
    assert said("queue", "drop", "a", "--json").json == {"session": "a", "dropped": []}

    async def answered(sessions: Sessions) -> None:
        again = await sessions.enqueue("a", "one", key="one")
        assert again.key == "one"
        with pytest.raises(InputRefused, match="taken back"):
            await _of(sessions, asked[0]).reply(5)

    on_store(answered)


def _of(sessions: Sessions, queued: Any) -> Any:
    """Return the queued message, as another connection sees it."""
    queued._sessions = sessions
    return queued


def test_what_is_to_be_sent_later_can_be_dropped(said: Callable[..., Any]) -> None:
    said("send", "a", "Did it?", "--later", "3d", "--key", "k")
    assert said("queue", "drop", "a", "k").lines == ["dropped\tk"]
    assert said("queue", "drop", "a", "k", "--json", code=3).json == {"session": "a", "name": "k", "dropped": False}
    assert "Nothing is to be sent to session 'a' under 'k'" in said("queue", "drop", "a", "k", code=3).err
    assert said("queue", "--json").json["delayed"] == []


def test_what_is_not_to_be_sent_later_is_not_dropped(said: Callable[..., Any]) -> None:
    """The message waits already, or has its answer."""
    said("send", "a", "Ship it.", "--no-wait", "--key", "evt-1")
    told = said("queue", "drop", "a", "evt-1", code=5).err
    assert "The message 'evt-1' waits in session 'a' already" in told
    assert told.endswith("perdure queue drop a\n")
    said("queue", "drop", "a")
    said("queue", "drop", "a", "evt-1", code=3)
    said("send", "b", "Hello.", "--key", "evt-2")
    assert "'evt-2' is answered" in said("queue", "drop", "b", "evt-2", code=5).err


def test_a_pause_without_its_end_goes_on(said: Callable[..., Any]) -> None:
    said("suspend", "a", "--resume", "3d")
    assert said("queue").out.split("\t")[5] == "until: resumes the session"
    assert "a stays suspended. To open it: perdure resume a" in said("queue", "drop", "a", "until").err
    assert said("show", "a", "--json").json["status"] == "suspended"


def test_nothing_is_dropped_while_the_session_is_run(said: Callable[..., Any]) -> None:
    said("send", "a", "one", "--no-wait")
    on_store(lambda sessions: sessions.store.claim("a", version=2, owner="host:1", lease=60.0))
    said("queue", "drop", "a", code=4)
    assert [each["holder"] for each in said("queue", "--json").json["running"]] == ["host:1"]


def test_a_parked_session_is_opened_again(said: Callable[..., Any]) -> None:
    """Its waiting messages are left to a worker."""
    on_store(lambda sessions: sessions.enqueue("b", "one"))
    on_store(_parked)
    (parked,) = said("queue", "--json").json["parked"]
    assert (parked["session"], parked["tries"], parked["waiting"]) == ("b", 3, 1)
    assert "perdure queue retry b" in said("queue").err
    assert said("queue", "retry", "b").out == "b is active; for a worker: 1 message\n"
    assert "is not parked" in said("queue", "retry", "b", code=5).err
    found = said("queue", "--json").json
    assert (found["parked"], found["waiting"][0]["count"]) == ([], 1)


@pytest.mark.parametrize("words", [["retry"], ["drop"], ["ls", "a"], ["retry", "a", "b"], ["look"]])
def test_what_is_typed_wrong(said: Callable[..., Any], words: list[str]) -> None:
    said("queue", *words, code=2)


def test_an_owner_sees_nobody_elses(said: Callable[..., Any]) -> None:
    for owner in ("ann", "ben"):
        said("send", "--new", "x", "hello", "--no-wait", "--owner", owner)
    assert [each["owner"] for each in said("queue", "--json", "--owner", "ann").json["waiting"]] == ["ann"]
    assert len(said("queue", "--json").json["waiting"]) == 2


def test_a_schedule_is_kept_listed_and_ended(said: Callable[..., Any]) -> None:
    """It belongs to a session of its name, unless another one is given."""
    cron = ("--cron", "0 7 * * MON", "--timezone", "Europe/Oslo")
    made = said("schedule", "add", "digest", "Write it.", *cron, "--json").json
    assert (made["session"], made["name"], made["cron"]) == ("digest", "schedule:digest", "0 7 * * MON")
    said("schedule", "add", "check", "Look.", "--cron", "*/5 * * * *", "-s", "a", "--priority", 2)
    listed = said("schedule", "--json").json_lines
    assert [(each["session"], each["text"], each["priority"]) for each in listed] == [
        ("digest", "Write it.", 0),
        ("a", "Look.", 2),
    ]
    assert said("schedule", "remove", "digest").lines == ["dropped\tschedule:digest"]
    assert said("schedule", "remove", "check", "-s", "a", "--json").json["dropped"] is True
    assert said("schedule", "--json").out == ""


def test_a_schedule_is_looked_for_where_it_is(said: Callable[..., Any]) -> None:
    said("schedule", "add", "check", "Look.", "--cron", "*/5 * * * *", "-s", "a")
    told = said("schedule", "remove", "check", code=3).err
    assert "The schedule 'check' is in session 'a'. Type: perdure schedule remove check -s a" in told
    assert "No schedule has the name 'nosuch'" in said("schedule", "remove", "nosuch", code=3).err
    assert "No schedule has the name 'nosuch'" in said("schedule", "remove", "nosuch", "-s", "a", code=3).err
    assert said("schedule", "remove", "b", "--json", code=3).json["dropped"] is False


def test_a_schedule_begins_a_session_that_can_answer(
    said: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs a model, as `send --new` does. --agent and --model are for the session."""
    monkeypatch.delenv("PERDURE_MODEL", raising=False)
    (home / "clerk.md").write_text("---\nname: clerk\nmodel: offline\n---\nBe brief.")
    daily = ("--cron", "0 7 * * *")
    assert "--model offline" in said("schedule", "add", "digest", "Write it.", *daily, code=9).err
    said("show", "digest", code=3)
    said("schedule", "add", "digest", "Write it.", "--cron", "at dawn", "--model", "offline", code=2)
    said("show", "digest", code=3)
    said("schedule", "add", "digest", "Write it.", *daily, "--agent", "clerk.md")
    assert said("show", "digest", "--json").json["agent"] == "clerk"
    said("schedule", "add", "other", "Write it.", *daily, "--model", "offline")
    assert said("show", "other", "--json").json["model"] == "offline"
    said("schedule", "add", "digest", "Write more.", *daily)  # its session has a model
    said("schedule", "add", "digest", "Write more.", *daily, "--model", "test")
    assert said("show", "digest", "--json").json["model"] == "test"


def test_without_cronsim(said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    told = said("schedule", "add", "x", "y", "--cron", "0 7 * * *", code=9).err
    assert "pip install 'perdure[workers]'" in told


def test_a_schedule_that_is_none(said: Callable[..., Any]) -> None:
    told = said("schedule", "add", "x", "y", "--cron", "at dawn", code=2).err
    assert "(cron)" not in told
    assert "is not a schedule" in said("schedule", "add", "x", "y", "--cron", "at dawn", code=2).err
    assert "it needs 5 fields" in said("schedule", "add", "x", "y", "--cron", "*/5 * * * * *", code=2).err
    zone = ("--cron", "0 7 * * *", "--timezone", "Mars/Base")
    assert "no time zone" in said("schedule", "add", "x", "y", *zone, code=2).err
    assert "--cron is missing" in said("schedule", "add", "x", "y", code=2).err
    for words in (["add", "x"], ["add", "x", "--cron", "0 7 * * *"], ["remove"], ["ls", "x"]):
        said("schedule", *words, code=2)
    assert said("schedule", "--json").out == ""


def test_a_pause_ends_by_itself(said: Callable[..., Any]) -> None:
    """A worker opens the session again at that time."""
    assert "a is suspended until 2126-01-31T00:00:00" in said("suspend", "a", "--resume", "2126-01-31").out
    (timer,) = said("queue", "--json").json["delayed"]
    assert (timer["session"], timer["name"], timer["text"]) == ("a", "until", None)
    said("resume", "a")
    assert said("queue", "--json").json["delayed"] == []


def test_in_a_terminal(said: Callable[..., Any], home: Path) -> None:
    """The table has a head, and times as a person says them."""
    said("send", "a", "Ship it.", "--no-wait")
    said("send", "b", "Did it?", "--later", "3d", "--key", "k")
    env = clean_environment(home, PERDURE_STORE="sqlite:///kept.db")
    with TerminalSession(command("queue"), cwd=home, env=env) as terminal:
        assert terminal.ends() == 0
        lines = [each.split() for each in terminal.text.splitlines() if each.strip()]
    assert lines[0] == ["SESSION", "STATE", "PRIORITY", "MESSAGES", "WHEN", "WHAT"]
    assert lines[1][:4] == ["a", "waiting", "0", "1"]
    assert lines[2] == ["b", "delayed", "0", "in", "3", "d", "k:", "Did", "it?"]
