"""Conversations on the command line: OpenAI's messages in and out, Markdown out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .conftest import Said

Perdure = Callable[..., Said]
CHAT = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]


def test_messages_go_in_and_out(perdure: Perdure, home: Path) -> None:
    """An import prints the id of the new session, which can be sent to; an export prints the messages."""
    (home / "chat.json").write_text(json.dumps(CHAT))
    made = perdure("import", "--format", "openai", "chat.json")
    assert "imported 1 session with 2 messages" in made.err
    [session_id] = made.lines
    assert perdure("export", session_id, "--format", "openai").json == CHAT
    perdure("send", session_id, "Thanks.")
    assert perdure("export", session_id, "--format", "openai").json[:3] == [
        *CHAT,
        {"role": "user", "content": "Thanks."},
    ]
    assert "## Assistant\n\n> 5\n" in perdure("export", session_id, "--format", "markdown").out


def test_several_sessions_are_lines(perdure: Perdure) -> None:
    """They come from stdin and go to stdout, so that they pass through a pipe."""
    lines = "\n".join(json.dumps({"messages": CHAT[:count]}) for count in (1, 2))
    made = perdure("import", "--format", "openai", "-", "--json", stdin=lines).json
    assert (made["sessions"], made["messages"], len(made["created"])) == (2, 3, 2)
    out = perdure("export", "--format", "openai")
    assert sorted(len(each["messages"]) for each in out.json_lines) == [1, 2]


def test_all_is_what_was_trimmed_too(perdure: Perdure, home: Path) -> None:
    """Without --all, an export has what the model is shown."""
    (home / "chat.json").write_text(json.dumps(CHAT))
    [session_id] = perdure("import", "--format", "openai", "chat.json").lines
    perdure("trim", session_id, "1")
    assert perdure("export", session_id, "--format", "openai").json == CHAT[1:]
    assert perdure("export", session_id, "--format", "openai", "--all").json == CHAT


def test_an_agent_of_ones_own(perdure: Perdure, home: Path) -> None:
    """An imported conversation belongs to the agent that --agent names."""
    (home / "clerk.md").write_text("---\nname: clerk\n---\nYou add.\n")
    (home / "chat.json").write_text(json.dumps(CHAT))
    [session_id] = perdure("import", "--format", "openai", "chat.json", "--agent", "clerk.md").lines
    first = perdure("export", session_id, "--format", "openai").json[0]
    assert first == {"role": "system", "content": "You add."}
    refused = perdure("import", "chat.json", "--agent", "clerk.md", code=2)
    assert "--agent goes with --format openai" in refused.err


def test_what_is_wrong_is_told_with_its_place(perdure: Perdure, home: Path) -> None:
    """The error names a line that is not a message; options that do not fit together are refused."""
    (home / "chat.jsonl").write_text(json.dumps(CHAT[0]) + '\n{"role": "robot"}\n')
    refused = perdure("import", "--format", "openai", "chat.jsonl", code=2)
    assert "line 2: $.role" in refused.err
    assert "--all goes with" in perdure("export", "--all", code=2).err


def test_a_file_that_is_not_there_says_nothing_of_the_store(perdure: Callable[..., Said], home: Path) -> None:
    """The error is about the file; an error of the store is reported as before."""
    for words in (("import", "none.jsonl"), ("import", "none.json", "--format", "openai")):
        refused = perdure(*words, code=7).err
        assert "could not be read: No such file or directory. Name another file." in refused
        assert "doctor" not in refused
    (home / "chat.json").write_text('[{"role": "user", "content": "hi"}]')
    assert "--format openai" in perdure("import", "chat.json", code=2).err
