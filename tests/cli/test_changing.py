"""Commands that change a session's view, move it, erase it, or begin something."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import AgentDefinition, ModelRequest, ToolCall, connect_blocking
from perdure.cli import terminal as bars
from perdure.model.ids import SessionId
from perdure.testing import ScriptedDriver

from .conftest import COMMAND


@pytest.fixture
def session(perdure: Callable[..., Any]) -> str:
    """A session of three turns."""
    perdure("send", "--new", "s", "one")
    perdure("send", "s", "two")
    perdure("send", "s", "three")
    return "s"


def shown(perdure: Callable[..., Any], session: str = "s") -> int:
    return len(perdure("show", session, "--json").json["messages"])


def test_what_is_shown(perdure: Callable[..., Any], session: str) -> None:
    """Each verb prints how many messages are then shown; none loses any."""
    assert perdure("trim", session, "2").out == "messages shown: 2\n"
    assert perdure("undo", session).out == "messages shown: 6\n"
    assert perdure("compact", session, "--strategy", "truncate", "--keep-last", "2", "--json").json == {
        "session": "s",
        "messages": shown(perdure),
        "before": 6,
        "by": "truncate",
    }
    assert "covers" in perdure("show", session).out
    again = perdure("compact", session, "--json")
    assert ("nothing to compact" in again.err, again.json["by"]) == (True, None)
    assert perdure("uncompact", session).out == "messages shown: 6, before 3\n"
    assert perdure("rewind", session, "2").out == "messages shown: 2\n"
    assert perdure("rewind", session, "--version", "2").out == "messages shown: 2\n"
    assert "Say once" in perdure("rewind", session, "2", "--version", "2", code=2).err
    assert "Say where" in perdure("rewind", session, code=2).err
    assert perdure("reset", session).out == "messages shown: 0\n"
    assert len(perdure("show", session, "--all", "--json").json["messages"]) == 6


def test_a_compaction_says_what_it_did(perdure: Callable[..., Any], session: str) -> None:
    """It says how many messages are shown, and how: the offline model sums up nothing. Its costs belong to no model."""
    done = perdure("compact", session, "--keep-last", "2").out
    assert done == "messages shown: 3, before 6; 1 in place of 4 messages: what is older is cut off, not summed up\n"
    assert [row["key"] for row in perdure("stats", "--json").json["by_model"]] == ["none (compaction)", "offline"]


def test_a_note_in_place_of_one_message_is_told_as_such(perdure: Callable[..., Any], session: str) -> None:
    """As many messages are shown as before, and the line says why; remaining compactions are counted."""
    perdure("inject", session, "four")
    compact = ("compact", session, "--strategy", "truncate", "--keep-last")
    done = [perdure(*compact, kept).out for kept in (6, 5)]
    assert done[0].startswith("messages shown: 7, before 7; 1 in place of 1 message: what is older is cut off")
    assert done[1].startswith("messages shown: 6, before 7; 1 in place of 2 messages: ")
    assert perdure("uncompact", session).out == "messages shown: 7, before 6; 1 older compaction left\n"
    assert perdure("uncompact", session).out == "messages shown: 7, before 7\n"
    assert "no compaction block" in perdure("uncompact", session, code=2).err


def test_a_fork(perdure: Callable[..., Any], session: str) -> None:
    assert perdure("fork", session, "f").out == "f\n"
    assert perdure("fork", session, "g", "--at", "2", "--json").json == {"session": "g", "parent": "s"}
    perdure("fork", session, "h", "--version", "2")
    assert [shown(perdure, each) for each in "fgh"] == [6, 2, 2]
    made = perdure("fork", session).out.strip()
    assert perdure("show", made[:30], "--json").json["parent"] == "s"


def test_a_fork_that_ends_in_calls_says_so(perdure: Callable[..., Any], session: str) -> None:
    """The fork is made, and the command to fork before the calls is printed, unless the calls have their results."""
    call = {"id": "c-1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "Add up."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c-1", "content": "3"},
    ]
    (made,) = perdure("import", "--format", "openai", "-", stdin=json.dumps(said)).lines
    for at, is_open in ((1, False), (2, True), (3, False)):
        forked = perdure("fork", made, f"f-{at}", "--at", at)
        assert forked.out == f"f-{at}\n"
        assert ("1 tool call without a result: add." in forked.err) is is_open
        assert (f"perdure fork {made} --at 1" in forked.err) is is_open


def test_a_session_by_its_name(perdure: Callable[..., Any], session: str) -> None:
    """An exact name is enough if only one session has it; if several do, their ids are listed. An id comes first."""
    perdure("rename", session, "user@x.com/42 ä")
    assert perdure("show", "user@x.com/42 ä", "--json").json["id"] == session
    perdure("show", "user@x.com/42", code=2)
    perdure("fork", session, "other")
    perdure("rename", "other", "user@x.com/42 ä")
    refused = perdure("undo", "user@x.com/42 ä", code=2).err
    assert "2 sessions have the name 'user@x.com/42 ä': other, s" in refused
    perdure("rename", "other", session)
    assert perdure("show", session, "--json").json["id"] == session
    perdure("rename", session, "Elsewhere")
    assert perdure("show", "Elsewhere", "--json").json["id"] == session


def test_a_session_by_what_its_framework_calls_it(perdure: Callable[..., Any], session: str) -> None:
    """Its id is made from that text, whatever name it or another session has now."""
    made = SessionId.of("user@x.com/42 ä")
    perdure("fork", session, made)
    perdure("rename", session, "user@x.com/42 ä")
    assert perdure("show", "user@x.com/42 ä", "--json").json["id"] == made


def test_an_empty_session_says_where_the_conversation_is(perdure: Callable[..., Any], home: Path) -> None:
    """In the first layout of Strands' sessions a sub-agent has it. A session with messages gets no such note."""
    golden = Path(__file__).parents[1] / "golden" / "strands-1" / "sessions.jsonl"
    store = ("--store", "s.db")
    perdure(*store, "import", golden)
    shell, child = SessionId.of("user@x / 4"), SessionId.of("user@x / 4", "default")
    for verb, code in (
        (("show", shell), 0),
        (("fork", shell), 0),
        (("undo", shell), 2),
        (("diff", shell, "s-2"), 0),
        (("redact", shell, "nobody", "--yes"), 2),
        (("send", shell, "hello", "--model", "offline"), 0),
    ):
        assert f"2 messages: perdure show {child} --store s.db" in perdure(*store, *verb, code=code).err, verb
    assert "sub-agent" not in perdure(*store, "show", "s-2").err  # it has messages of its own
    assert "sub-agent" not in perdure(*store, "show", shell).err  # it was sent a message
    said = perdure(*store, "show", SessionId.of("s-1", "default"), "--json").json["messages"][0]["id"]
    redacted = perdure(*store, "redact", SessionId.of("s-1", "default"), said, "--yes")
    assert "messages replaced: 1" in redacted.out
    assert "copies" not in redacted.err


def test_status_name_and_tags(perdure: Callable[..., Any], session: str) -> None:
    assert perdure("suspend", session).out == "s is suspended\n"
    assert perdure("resume", session).out == "s is active\n"
    perdure("rename", session, "A long talk")
    assert perdure("tag", session, "a", "b").out == "a b\n"
    assert perdure("tag", session, "--remove", "a").out == "b\n"
    again = perdure("tag", session, "--remove", "a")
    assert (again.out, again.err) == ("b\n", "Session s does not have the tag 'a'.\n")
    found = perdure("ls", "--json").json
    assert (found["name"], found["tags"]) == ("A long talk", ["b"])
    perdure("rename", session, "")
    perdure("delete", session)
    assert perdure("ls").out == ""
    assert perdure("ls", "--status", "deleted", "--json").json["name"] is None


def test_export_and_import(perdure: Callable[..., Any], session: str, home: Path) -> None:
    """It works through a file or a pipe, for all sessions or some."""
    perdure("send", "--new", "t", "hello")
    assert "exported 2 sessions" in perdure("export", "-o", "all.jsonl").err
    assert perdure("--store", "other.db", "import", "all.jsonl", "--json").json["sessions"] == 2
    assert "2 were there already" in perdure("--store", "other.db", "import", "all.jsonl").out
    one = perdure("export", "t").out
    assert "imported 1 session with" in perdure("--store", "third.db", "import", "-", stdin=one).out
    assert shown(perdure) == len(perdure("--store", "other.db", "show", "s", "--json").json["messages"])


def test_a_copy(perdure: Callable[..., Any], session: str) -> None:
    report = perdure("copy", "file://copied", "--json").json
    assert (report["sessions"], report["verified"], report["differing"]) == (1, 1, [])
    assert "1 was there already" in perdure("copy", "file://copied").out
    assert perdure("copy", "file://copied", "sqlite:///again.db", "--json").json["verified"] == 1
    assert perdure("--store", "again.db", "ls").lines[0].startswith(session)
    assert "nowhere.db" in perdure("copy", "nowhere.db", "sqlite:///again.db", code=9).err
    assert perdure("--store", "file://copied", "ls").out.startswith("s\t")
    perdure("--store", "file://copied", "copy", "file://copied", code=2)
    perdure("--owner", "ada", "copy", "x.db", code=2)


def test_erasing(perdure: Callable[..., Any], session: str) -> None:
    """It requires --yes if nobody can be asked."""
    message = perdure("show", session, "--json").json["messages"][0]["id"]
    assert "--yes" in perdure("redact", session, message, code=2).err
    assert "no message 'nope'" in perdure("redact", session, message, "nope", code=2).err
    assert "No session 'nobody'" in perdure("redact", "nobody", message, code=3).err
    assert perdure("redact", session, message, "--yes").out == "messages replaced: 1\n"
    assert "[redacted]" in perdure("show", session, "--version", "2").out
    perdure("purge", session, code=2)
    assert perdure("purge", "--older-than", "1d", "--yes").out == "sessions erased: 0\n"
    perdure("send", "--new", "t", "hello")
    assert perdure("purge", session, "-y").out == "sessions erased: 1\n"
    perdure("show", session, code=3)
    assert perdure("purge", "--status", "active", "-y").out == "sessions erased: 1\n"
    assert perdure("gc").out == "messages erased: 0\n"


def test_forgetting(perdure: Callable[..., Any], session: str) -> None:
    """It requires --yes if nobody can be asked, unless there is nothing to erase."""
    newest = perdure("show", session, "--json").json["version"]
    assert "erase versions 1 to" in perdure("forget", session, "--before", str(newest), code=2).err
    told = perdure("forget", session, "--before", str(newest), "--yes", "--json").json
    assert (told["session"], told["versions"]) == (session, newest - 1)
    assert perdure("forget", session, "--before", "2").out == "versions erased: 0, messages: 0, bytes: 0\n"
    assert "was forgotten" in perdure("show", session, "--version", "1", code=3).err
    assert [each["version"] for each in perdure("versions", session, "--json").json_lines] == [newest + 1, newest]
    assert perdure("show", session, "--json").json["first_version"] == newest
    assert "no problems" in perdure("fsck").out
    perdure("forget", session, code=2)
    perdure("forget", "nobody", "--before", "2", "-y", code=3)


def test_a_redaction_names_the_sessions_that_may_have_copies(perdure: Callable[..., Any], home: Path) -> None:
    """A sub-agent and its caller have each other's texts in messages of their own; a search shows which."""
    clerk = AgentDefinition("clerk", description="Books.", system_prompt="Book it.", tools=())

    def reply(request: ModelRequest) -> Any:
        if request.system_prompt == "Book it.":
            return "booked on 4111"
        return "Done." if request.step else ToolCall("clerk", {"prompt": "book it on 4111"})

    url = f"sqlite:///{home / 'told.db'}"
    with connect_blocking(url, driver=ScriptedDriver(reply), subagents=[clerk]) as sessions:
        sessions.open("caller", AgentDefinition("desk", tools=("clerk",))).send("Pay.")
    child = next(
        each["id"] for each in perdure("--store", url, "ls", "--all", "--json").json_lines if each["spawned_by"]
    )
    for session, other in ((child, "caller"), ("caller", child)):
        hits = perdure("--store", url, "search", "4111", "--json").json_lines
        messages = [hit["message"] for hit in hits if hit["session"] == session]
        told = perdure("--store", url, "redact", session, *messages, "--yes")
        assert told.out == "messages replaced: 2\n"
        assert other in told.err
        assert "perdure search" in told.err
    assert perdure("--store", url, "search", "4111", "--json").json_lines == []


def test_a_person_is_asked(session: str, perdure: Callable[..., Any]) -> None:
    """A person in a terminal who answers no keeps the session."""
    leader, follower = pty.openpty()
    child = subprocess.Popen([*COMMAND, "purge", "s"], stdin=follower, stdout=follower, stderr=follower)
    os.write(leader, b"n\n")
    assert child.wait(60) == 130
    os.close(follower)
    os.close(leader)
    assert perdure("ls").out.startswith("s\t")


def test_init(perdure: Callable[..., Any], home: Path) -> None:
    """It writes two files, and overwrites none."""
    assert "perdure chat --agent" in perdure("init", "deep/er").lines[-1]
    assert (home / "deep" / "er" / "tools.py").is_file()
    (home / "tools.py").write_text("mine")
    assert "tools.py is there already" in perdure("init", code=2).err
    assert not (home / "assistant.md").exists()
    perdure("init", "--force")
    assert (home / "tools.py").read_text() != "mine"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(perdure: Callable[..., Any], shell: str) -> None:
    assert "_PERDURE_COMPLETE" in perdure("completion", shell).out


@pytest.mark.parametrize(
    ("words", "found"),
    [("perdure sea", "search"), ("perdure show s", "sess-1"), ("perdure show sess-1 --js", "--json")],
)
def test_what_is_completed(perdure: Callable[..., Any], process: Callable[..., Any], words: str, found: str) -> None:
    """A shell completes commands, options, and ids of sessions."""
    perdure("send", "--new", "sess-1", "hello")
    count = str(len(words.split()) - 1)
    env = {"_PERDURE_COMPLETE": "zsh_complete", "COMP_WORDS": words, "COMP_CWORD": count}
    script = "from perdure.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | env, capture_output=True, text=True, timeout=60
    )
    assert found in done.stdout.splitlines()


def test_doctor(perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It names keys, never their values, and reports the store's problems with an exit code."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    for options in ([], ["--json"]):
        told = perdure("doctor", *options)
        assert "OPENAI_API_KEY" in told.out
        assert "sk-very-secret" not in told.out + told.err
    assert perdure("doctor", "--json").json["keys"]["ANTHROPIC_API_KEY"] is False
    told = perdure("--store", "postgresql://ada:hush@localhost:1/none", "doctor", "--json", code=9)
    assert "hush" not in told.out + told.err
    assert json.loads(told.out)["store"]["error"]


def test_a_bar_for_what_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It appears only in a terminal, and only after a second."""
    with bars.progress("working") as tell:
        tell(1, 2)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bars.progress("working") as tell:
        tell(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(bars, "PATIENCE", 0.0)
    with bars.progress("working") as tell:
        tell(1, 2)
        tell(2, 2)
    assert "working" in capsys.readouterr().err
