"""Commands that look: lists, transcripts, trees, events, differences, searches, sums."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from tests import stories

from perdure import Envelope, Message, SqliteStore, ToolCall, ToolResult
from perdure.cli.looking import _row
from perdure.cli.main import cli
from perdure.cli.options import settings_of
from perdure.cli.session_ids import ids_beginning_with
from perdure.model.ids import SessionId, use
from perdure.model.message import Text
from perdure.model.session import ListedSession
from perdure.testing import FrozenClock
from perdure.testing.samples import new_session, note
from perdure.testing.samples import tell as tell_messages

from .conftest import COMMAND


@pytest.fixture
def told(perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a store with some of everything in it."""

    async def tell() -> None:
        clock = FrozenClock(tick=0.001)
        with use(clock=clock):
            async with SqliteStore(home / "told.db") as store:
                await stories.tell(store, clock)

    asyncio.run(tell())
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{home}/told.db")


def test_versions(perdure: Callable[..., Any], told: None) -> None:
    """They are listed newest first; a partial page says how to see more."""
    shown = perdure("versions", "talk", "--limit", "2")
    newest = perdure("show", "talk", "--json").json["version"]
    assert [line.split()[0] for line in shown.out.splitlines()] == [str(newest), str(newest - 1)]
    assert f"perdure versions talk --before {newest - 1}" in shown.err
    older = perdure("versions", "talk", "--before", str(newest - 1), "--json").json_lines
    assert [each["version"] for each in older] == [*range(newest - 2, 0, -1)]
    assert {each["id"] for each in older} == {"talk"}
    assert perdure("versions", "talk", "--before", "1").out == ""
    perdure("versions", "nobody", code=3)


def test_filters(perdure: Callable[..., Any], told: None) -> None:
    """Each filter narrows the list; --json prints one document a line."""

    def ids(*options: str) -> set[str]:
        return {each["id"] for each in perdure("ls", "--json", *options).json_lines}

    assert ids("--tag", "vip") == {"talk", "a-fork", "a-fork-of-it"}
    assert ids("--status", "deleted") == {"hidden"}
    assert ids("--parent", "talk") == {"a-fork"}
    assert ids("--agent-name", "nobody") == set()
    assert len(ids("--limit", "2")) == 2
    assert len(ids("--all")) == 10
    assert ids("--since", "1d", "--until", "2020-01-01") == set()


def test_a_list_shows_titles_costs_and_last_words(perdure: Callable[..., Any], told: None) -> None:
    """A pipe gets all of them; a session that has spent nothing has an empty field."""
    listed = {each["id"]: each for each in perdure("ls", "--json", "--all").json_lines}
    assert all(each["title"] for each in listed.values() if each["message_count"])
    rows = {row.split("\t")[0]: row.split("\t") for row in perdure("ls", "--all").lines}
    for name, each in listed.items():
        title, _, count, cost, last, owner = rows[name][6:]
        assert (title, count, last) == (each["title"] or "", str(each["message_count"]), each["last_words"] or "")
        assert owner == (each["owner"] or "")
        assert bool(cost) == bool(each["usage"]["input_tokens"] + each["usage"]["output_tokens"])


def test_an_owner_is_shown_to_those_who_see_several(perdure: Callable[..., Any]) -> None:
    """`ls` names owners, except for an owner, and if no session has one. The other fields stay."""
    perdure("send", "--new", "plain", "hi")
    assert [len(row.split("\t")) for row in perdure("ls").lines] == [11]
    perdure("send", "--new", "hers", "hi", "--owner", "ada")
    rows = [row.split("\t") for row in perdure("ls").lines]
    assert [(len(row), row[11]) for row in rows] == [(12, "ada"), (12, "")]
    assert [row.split("\t")[:11] for row in perdure("ls", "--owner", "ada").lines] == [rows[0][:11]]
    assert [len(row.split("\t")) for row in perdure("ls", "--owner", "ada").lines] == [11]
    whole = rows[0][0]
    assert "# owner ada" in perdure("show", whole).lines
    assert "# owner ada" in perdure("show", "hers", "--owner", "ada").lines
    assert not any(row.startswith("# owner") for row in perdure("show", "plain").lines)


def test_the_fields_of_a_pipe_are_those_that_are_documented() -> None:
    """Their order is fixed, since scripts cut by number."""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    told = re.search(r"in this order:\s(.*?)\swhere", page, re.DOTALL)
    assert told is not None
    assert re.split(r",\s(?:then\s)?", told[1]) == list(_row(ListedSession(SessionId("s"), "guide"), False))


APPROVING = '''
from perdure import tool

@tool(needs_approval=True)
def refund(order: int) -> str:
    """Refund an order."""
    return "done"
'''


def test_a_run_that_waits_for_a_person_is_shown_as_waiting(perdure: Callable[..., Any], home: Path) -> None:
    """Its record has no end, and the session says why. After the decision the run has ended."""
    (home / "tools.py").write_text(APPROVING)
    perdure("send", "--new", "s", "refund(7)", "--tools", "tools.py", code=10)
    (run,) = perdure("tree", "s", "--json").json["children"]
    assert run["status"] == "waiting"
    assert any("? " in each and "waiting" in each for each in perdure("tree", "s").lines)
    perdure("fork", "s", "f", "--at", "1")
    assert [each["status"] for each in perdure("tree", "s", "--json").json["children"]] == ["waiting", "active"]
    perdure("approve", "s", "--tools", "tools.py")
    assert perdure("tree", "s", "--json").json["children"][0]["status"] == "completed"


def test_a_list_is_narrowed_by_metadata(perdure: Callable[..., Any], home: Path) -> None:
    """The keys are those that a program has declared; a number is not a text."""

    async def fill() -> None:
        async with SqliteStore(home / "filed.db") as store:
            for name, value in (("text", "7"), ("number", 7), ("word", "acme")):
                await store.create(note(new_session("Hi", id=name), "plan", value).with_indexed(["plan"]))

    asyncio.run(fill())

    def ids(*options: str) -> list[str]:
        return [each["id"] for each in perdure("--store", "filed.db", "ls", "--json", *options).json_lines]

    assert ids("--metadata", "plan=acme") == ["word"]
    assert ids("--metadata", "plan=7") == ["number"]
    assert ids("--metadata", 'plan="7"') == ["text"]
    assert ids("--metadata", "other=7") == []
    empty = perdure("--store", "filed.db", "ls", "--metadata", "other=7")
    assert empty.err.startswith("No session is indexed by other=7.")
    assert "connect(filters=['other'])" in empty.err
    assert "indexed" not in perdure("--store", "filed.db", "ls", "--metadata", "plan=7").err
    assert "KEY=VALUE" in perdure("--store", "filed.db", "ls", "--metadata", "plan", code=2).err


def test_lists_by_update_and_without_sub_agents(perdure: Callable[..., Any], told: None) -> None:
    """The last changed comes first; the sessions of sub-agents are left out on request."""
    shown = perdure("ls", "--json", "--all", "--order", "updated").json_lines
    times = [info["updated_at"] for info in shown]
    assert times == sorted(times, reverse=True)
    assert times != [info["updated_at"] for info in perdure("ls", "--json", "--all").json_lines]
    top = perdure("ls", "--json", "--all", "--order", "updated", "--top-level").json_lines
    assert [info["id"] for info in top] == [info["id"] for info in shown if not info["spawned_by"]]
    assert len(top) < len(shown)


def test_a_list_is_shortened_and_says_so(perdure: Callable[..., Any], told: None) -> None:
    assert "--all" in perdure("ls", "--limit", "3").err
    assert "--all" not in perdure("ls", "--all").err


def test_every_session_is_shown_and_drawn(perdure: Callable[..., Any], told: None) -> None:
    """The store has some of everything."""
    for info in perdure("ls", "--all", "--json").json_lines:
        for options in ([], ["--json"]):
            perdure("show", info["id"], *options)
            perdure("tree", info["id"], *options)
            perdure("events", info["id"], *options)
        assert perdure("show", info["id"], "--json").json["version"] == info["version"]
        perdure("show", info["id"], "--all")


def test_all_that_was_said(perdure: Callable[..., Any]) -> None:
    """Trimmed messages are shown with --all, and with an older version."""
    perdure("send", "--new", "s", "first")
    perdure("send", "s", "second")
    perdure("trim", "s", "2")
    assert "first" not in perdure("show", "s").out
    assert "first" in perdure("show", "s", "--all").out
    assert "first" in perdure("show", "s", "--version", "3").out
    assert "second" not in perdure("show", "s", "--version", "2").out
    assert len(perdure("show", "s", "--all", "--last", "1", "--json").json["messages"]) == 1
    perdure("show", "s", "--all", "--version", "2", code=2)


def test_a_beginning_is_enough(perdure: Callable[..., Any]) -> None:
    """It works if only one session has it; a whole id wins over longer ones; @ is the newest."""
    for name in ("abc", "abcd-1", "abcd-2"):
        perdure("send", "--new", name, f"I am {name}")
    assert "I am abc\n" in perdure("show", "abc").out
    assert "I am abcd-2" in perdure("show", "@").out
    assert "I am abcd-1" in perdure("show", "abcd-1").out
    shown = perdure("show", "abcd", code=2).err
    assert "abcd-1" in shown
    assert "abcd-2" in shown
    perdure("delete", "abcd-2")
    assert "I am abcd-1" in perdure("show", "abcd").out


def test_many_that_begin_alike(perdure: Callable[..., Any], home: Path) -> None:
    """A few are named, and no more are looked for. Another owner's are unknown, also to a shell's completion."""

    async def fill() -> None:
        async with SqliteStore(home / "many.db") as store:
            for number in range(20):
                await store.create(new_session(id=f"n-{number:02}", owner="ada" if number == 7 else "ben"))

    asyncio.run(fill())
    shown = perdure("--store", "many.db", "show", "n", code=2).err
    assert "More than 5 sessions begin with 'n': n-00, n-01, n-02, n-03, n-04 …" in shown
    assert perdure("--store", "many.db", "--owner", "ada", "show", "n").out.startswith("# n-07")
    assert "begin with" not in perdure("--store", "many.db", "--owner", "eve", "show", "n", code=3).err
    with click.Context(cli) as ctx:
        settings_of(ctx).store, settings_of(ctx).owner = "many.db", "ada"
        assert ids_beginning_with(ctx, "n-") == ["n-07"]
        assert ids_beginning_with(ctx, "../") == []


def test_a_list_is_in_the_order_that_it_shows(perdure: Callable[..., Any]) -> None:
    """The order is that of creation, whichever was changed last; both times are shown."""
    for name in ("first", "second", "third"):
        perdure("send", "--new", name, "hello")
    perdure("send", "first", "hello")
    rows = [line.split("\t") for line in perdure("ls").lines]
    assert [row[0] for row in rows] == ["third", "second", "first"]
    assert [row[4] for row in rows] == sorted((row[4] for row in rows), reverse=True)
    shown = perdure("ls", "--json").json_lines
    assert [each["id"] for each in shown] == ["third", "second", "first"]
    assert max(shown, key=lambda each: each["updated_at"])["id"] == "first"


def test_the_newest_of_none(perdure: Callable[..., Any]) -> None:
    perdure("show", "@", code=3)


def test_a_tree(perdure: Callable[..., Any], told: None, home: Path) -> None:
    """It has branches with the selected one, sub-agents below their run, and forks below their session."""
    branches = perdure("tree", "branches").lines
    assert "2 branches" in branches[1]
    assert sum("★ selected" in line for line in branches) == 1
    talk = perdure("tree", "talk", "--json").json
    forks = [child for child in talk["children"] if child["kind"] == "fork"]
    assert [fork["id"] for fork in forks] == ["a-fork"]
    assert forks[0]["children"][-1]["id"] == "a-fork-of-it"
    asked = [info for info in perdure("ls", "--all", "--json").json_lines if info["spawned_by"]]
    caller = perdure("tree", asked[0]["parent"]).out
    assert f"sub-agent {asked[0]['id']}" in caller
    perdure("tree", "branches", "--svg", "tree.svg")
    assert (home / "tree.svg").read_text().startswith("<svg")


def test_sub_agents_are_not_counted_twice(perdure: Callable[..., Any], told: None) -> None:
    """Their usage is part of their callers'; the total is that of the roots."""
    found = perdure("stats", "--json").json
    roots = [info["id"] for info in perdure("ls", "--all", "--json").json_lines if not info["spawned_by"]]
    used = sum(perdure("tree", each, "--json").json["usage"]["input_tokens"] for each in roots)
    assert found["total"]["input_tokens"] == used > 0
    for by in ("agent", "model", "day"):
        assert sum(row["input_tokens"] for row in found[f"by_{by}"]) == used
    assert {row["key"] for row in found["by_agent"]} >= {"helper"}


def test_sums(perdure: Callable[..., Any]) -> None:
    perdure("stats")
    perdure("send", "--new", "s", "hello")
    assert [line.split("\t")[:3] for line in perdure("stats", "--by", "model").lines] == [["model", "offline", "1"]]
    assert perdure("stats", "--since", "2999-01-01").out == ""
    assert len(perdure("stats", "--since", "1h", "--by", "day").lines) == 1
    assert perdure("stats", "--agent-name", "nobody").out == ""


def test_events(perdure: Callable[..., Any]) -> None:
    """Each has a line; as JSON with a cursor that --after accepts."""
    perdure("send", "--new", "s", "hello")
    shown = perdure("events", "s").lines
    assert "agent_start" in shown[0]
    assert "agent_end" in shown[-1]
    found = perdure("events", "s", "--json").json_lines
    assert found[0]["type"] == "agent_start"
    rest = perdure("events", "s", "--json", "--after", str(found[1]["cursor"])).json_lines
    assert rest == found[2:]
    assert perdure("events", "s", "--json", "--last", "2").json_lines == found[-2:]


def test_events_as_they_come(perdure: Callable[..., Any]) -> None:
    """They come from another process, until Ctrl-C."""
    perdure("send", "--new", "s", "hello")
    following = subprocess.Popen(
        [*COMMAND, "events", "s", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert following.stdout is not None
    for wanted in ("agent_end", "and again"):
        line = following.stdout.readline()
        while line and wanted not in line:
            line = following.stdout.readline()
        assert wanted in line
        if wanted == "agent_end":
            perdure("send", "s", "and again")
    os.kill(following.pid, signal.SIGINT)
    _, err = following.communicate(timeout=30)
    assert following.returncode == 130
    assert err == "perdure: interrupted\n"


def test_a_difference(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "left", "hello")
    perdure("fork", "left", "right")
    perdure("inject", "left", "this way")
    perdure("inject", "right", "that way", "--role", "assistant")
    shown = perdure("diff", "left", "right").out
    assert shown.startswith("--- left\n+++ right\n@@ 2 messages in common @@\n")
    assert "-   this way" in shown
    assert "+   that way" in shown
    found = perdure("diff", "left", "right", "--json").json
    assert found["sessions"] == ["left", "right"]
    assert found["common"] == 2
    assert found["right"][0]["role"] == "assistant"


def test_a_search(perdure: Callable[..., Any]) -> None:
    perdure("send", "--new", "s", "the quick brown fox")
    perdure("send", "--new", "t", "the slow snail")
    perdure("reset", "s")
    assert perdure("search", "quick fox").out.split("\t")[0] == "s"
    hit = perdure("search", "snail", "--json", "--limit", "1").json_lines[0]
    assert (hit["session"], hit["role"]) == ("t", "user")
    assert perdure("search", "quick", "--in", "t").out == ""


def test_damage_does_not_stop_a_list(perdure: Callable[..., Any], home: Path) -> None:
    """It is reported beside the rest, and `fsck` says what to do."""
    for name in ("good", "bad"):
        perdure("--store", "file://kept", "send", "--new", name, "hello")
    (home / "kept" / "bad.json").write_text("{")
    shown = perdure("--store", "file://kept", "ls")
    assert shown.out.startswith("good\t")
    assert "damaged" in shown.err
    report = perdure("--store", "file://kept", "fsck", code=6).out
    assert "bad" in report
    assert perdure("--store", "file://kept", "fsck", "--json", code=6).json["problems"][0]["repair"]
    assert perdure("--store", "file://kept", "fsck", "good").out == "1 session, 2 messages, no problems\n"


def test_a_thousand_and_more(perdure: Callable[..., Any], home: Path) -> None:
    """A list continues over pages."""

    async def fill() -> None:
        async with SqliteStore(home / "many.db") as store:
            await asyncio.gather(*(store.create(new_session(id=f"n{number}")) for number in range(1100)))

    asyncio.run(fill())
    assert len(perdure("--store", "many.db", "ls", "--all").lines) == 1100
    assert len(perdure("--store", "many.db", "ls", "--limit", "1050").lines) == 1050
    assert len(perdure("--store", "many.db", "ls").lines) == 50
    assert perdure("--store", "many.db", "show", "n1099").out.startswith("# n1099")


def test_a_killed_run_is_told_of(perdure: Callable[..., Any], told: None) -> None:
    """Commands about the session say that its last run was killed, and that a change is refused until it is ended."""
    assert "killed-early was killed. Only the program that ran it has its model." in perdure("ls").err
    assert "connect(…, recover=True)" in perdure("show", "killed-early").err
    refused = perdure("tag", "killed-early", "vip", code=4).err
    assert "was killed" in refused
    assert "perdure cancel killed-early" in refused
    perdure("cancel", "killed-early")
    perdure("tag", "killed-early", "vip")
    assert "killed-early" not in perdure("ls").err


def test_an_envelope_is_found_nowhere(perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign item's rest is not shown, searched or exported for people; perdure's own export keeps it."""

    async def tell() -> None:
        async with SqliteStore(home / "told.db") as store:
            call = ToolCall("look", {"at": "door"}, "c-1")
            parts = [Text("Hello"), call, Envelope("acme", {"type": "zebra"})]
            result = (ToolResult("c-1", "open"), Envelope("acme", {"type": "zebra"}))
            session = tell_messages(new_session(id="s"), Message.assistant(*parts), Message("tool", result))
            await store.create(session)

    asyncio.run(tell())
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{home}/told.db")
    shown = perdure("show", "s").out
    people = [shown, *(perdure("export", "s", "--format", form).out for form in ("markdown", "openai"))]
    assert ["→ look(at=" in shown, "← open" in shown] == [True, True]
    for told in people:
        assert "Hello" in told
        assert [word for word in ("nvelope", "zebra", "does not know") if word in told] == []
    assert "zebra" not in perdure("search", "zebra").out.replace("'zebra'", "")
    assert perdure("search", "door", "--json").json_lines
    assert "zebra" in perdure("export", "s").out


def test_hidden_messages_are_not_counted(perdure: Callable[..., Any], home: Path) -> None:
    """`--last` counts the printed messages, and a note says how many messages a framework keeps for itself."""

    async def tell() -> None:
        async with SqliteStore(home / "s.db") as store:
            hidden = [Message("system", (Envelope("acme", {"n": n}),)) for n in range(4)]
            said = [Message.user(f"Question {n}") for n in range(4)]
            mixed = [each for pair in zip(said, hidden, strict=True) for each in pair]
            await store.create(tell_messages(new_session(id="s"), *mixed, Message("system", (Envelope("acme", 9),))))

    asyncio.run(tell())
    shown = perdure("--store", "s.db", "show", "s", "--last", "2")
    assert re.findall("Question .", shown.out) == ["Question 2", "Question 3"]
    assert "Hidden: 3 messages that support keeps for itself" in shown.err
    assert len(perdure("--store", "s.db", "show", "s", "--last", "2", "--json").json["messages"]) == 5
    assert len(re.findall("Question .", perdure("--store", "s.db", "show", "s", "--last", "9").out)) == 4
