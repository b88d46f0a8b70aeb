"""The store, the model and the tools: from options, environment and config files, in this order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import SessionId
from perdure.cli.setup import shown_url


def chosen(perdure: Callable[..., Any], *options: str) -> dict[str, Any]:
    found: dict[str, Any] = perdure(*options, "doctor", "--json").json["store"]
    return found


def test_the_default_is_a_file_in_the_data_directory(perdure: Callable[..., Any], tmp_path: Path) -> None:
    perdure("send", "--new", "s", "hello")
    file = tmp_path / "data" / "perdure" / "sessions.db"
    assert file.stat().st_mode & 0o777 == 0o600
    assert chosen(perdure) == {
        "url": f"sqlite:///{file}",
        "chosen_by": "default",
        "sessions": "1",
        "unread": 0,
        "error": None,
    }


def test_who_names_the_store(
    perdure: Callable[..., Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's config, the project's, the environment and the option: each one overrides those before it."""
    for name in ("user", "project", "variable", "option"):
        perdure("--store", home / f"{name}.db", "send", "--new", name, "hello")
    config = tmp_path / "config" / "perdure"
    config.mkdir(parents=True)
    (config / "config.toml").write_text(f'store = "{home}/user.db"')
    assert perdure("ls").out.startswith("user\t")
    (home / "perdure.toml").write_text('store = "sqlite:///project.db"')
    (home / "deep").mkdir()
    monkeypatch.chdir(home / "deep")
    assert perdure("ls").out.startswith("project\t")
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{home}/variable.db")
    assert perdure("ls").out.startswith("variable\t")
    assert perdure("ls", "--store", "../option.db").out.startswith("option\t")
    assert perdure("--store", "../option.db", "ls").out.startswith("option\t")


def test_a_directory_serves_as_well(perdure: Callable[..., Any], home: Path) -> None:
    perdure("--store", "file://kept", "send", "--new", "s", "hello")
    assert perdure("--store", "file://kept", "ls").out.startswith("s\t")
    assert (home / "kept" / "s.json").is_file()


@pytest.mark.parametrize("content", ["store = 3", 'colour = "red"', "store = ", 'tools = "evil.py"'])
def test_a_config_that_is_not_understood(perdure: Callable[..., Any], home: Path, content: str) -> None:
    """The error says so. A config that names tools is refused: code runs on request, not because a file is there."""
    (home / "evil.py").write_text('open("ran", "w")')
    (home / "perdure.toml").write_text(content)
    assert "perdure.toml" in perdure("ls", code=9).err
    assert not (home / "ran").exists()


def test_an_agent_and_its_tools(perdure: Callable[..., Any], home: Path) -> None:
    """They come from the files that `init` writes."""
    perdure("init")
    shown = perdure("send", "--new", "s", "What is 2 + 3?", "--agent", "assistant.md", "--tools", "tools.py", "--json")
    assert "5" in shown.json["text"]
    assert perdure("ls", "--json").json["agent"] == "assistant"
    assert "→ add(a=2, b=3)" in perdure("show", "s").out


def test_tools_that_were_left_out(perdure: Callable[..., Any]) -> None:
    """The error says how to name them."""
    perdure("init")
    assert "--tools" in perdure("send", "--new", "s", "hello", "--agent", "assistant.md", code=9).err


def test_an_agent_named_in_the_config(perdure: Callable[..., Any], home: Path) -> None:
    (home / "poet.md").write_text("---\nlabel: Poet\n---\n\nYou rhyme.\n")
    (home / "perdure.toml").write_text('agent = "poet.md"')
    perdure("send", "--new", "s", "hello")
    assert perdure("show", "s", "--json").json["system_prompt"] == "You rhyme."


def test_public_functions_are_tools_where_none_is_marked(perdure: Callable[..., Any], home: Path) -> None:
    (home / "plain.py").write_text(
        'from json import dumps\n\ndef add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n\n'
        'def _hidden() -> None:\n    """No."""\n\ndef silent() -> None: ...\n'
    )
    perdure("send", "--new", "s", "What is 2 + 3?", "--tools", "plain.py")
    assert "→ add(a=2, b=3)" in perdure("show", "s").out


@pytest.mark.parametrize(
    ("content", "said"),
    [("x = 1\nboom\n", "(line 2): NameError"), ("def (", "SyntaxError"), ("x = 1", "has no tools")],
)
def test_a_tools_file_that_fails(perdure: Callable[..., Any], home: Path, content: str, said: str) -> None:
    """Its own error is shown, with its line."""
    (home / "bad.py").write_text(content)
    assert said in perdure("send", "--new", "s", "hello", "--tools", "bad.py", code=9).err
    assert perdure("ls").out == ""


def test_a_model_is_changed_by_naming_it(perdure: Callable[..., Any], home: Path) -> None:
    """This holds even if the session's agent names another."""
    (home / "bot.md").write_text("---\nmodel: openai:none\n---\n\nBe brief.\n")
    perdure("send", "--new", "s", "hello", "--agent", "bot.md", code=9)
    perdure("send", "s", "hello", "--model", "offline")
    assert perdure("show", "s", "--json").json["model"] == "offline"


def test_an_owner_sees_no_other(perdure: Callable[..., Any]) -> None:
    perdure("--owner", "ada", "send", "--new", "hers", "hello")
    perdure("--owner", "bob", "send", "--new", "his", "hello")
    assert [line.split("\t")[0] for line in perdure("ls", "--owner", "ada").lines] == [SessionId.under("ada", "hers")]
    assert perdure("--owner", "ada", "show", "hers").out == perdure("show", SessionId.under("ada", "hers")).out
    perdure("--owner", "ada", "show", "his", code=3)
    perdure("--owner", "ada", "show", "hi", code=3)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ada:secret@db.example/x", "postgresql://ada:…@db.example/x"),
        ("postgresql://db.example/x?password=secret", "postgresql://db.example/x?…"),
        ("postgresql://postgres@/a?schema=b", "postgresql://postgres@/a?schema=b"),
        ("postgresql://postgres@/a?host=/x&schema=b", "postgresql://postgres@/a?schema=b&…"),
        ("sqlite:///x.db", "sqlite:///x.db"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_an_option_of_a_url_is_no_part_of_its_path(perdure: Callable[..., Any], home: Path) -> None:
    """An option that the store does not have is refused."""
    perdure("--store", "sqlite:///s.db?commit_in_loop=off", "send", "--new", "s", "hello")
    assert perdure("--store", "s.db", "show", "s", "--json").json["id"] == "s"
    assert "has an option" in perdure("--store", "sqlite:///s.db?cache=1", "ls", code=9).err
    assert "takes none" in perdure("--store", "file://dir?cache=1", "chat", code=9).err
    assert not (home / "dir").exists()


def test_the_key_that_an_agent_names_is_looked_for(
    perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "clerk.md").write_text("---\nmodel:\n  name: openai:qwen3\n  api_key_env: LOCAL_KEY\n---\nBe brief.\n")
    assert perdure("doctor", "--agent", "clerk.md", "--json").json["keys"]["LOCAL_KEY"] is False
    monkeypatch.setenv("LOCAL_KEY", "none")
    assert "LOCAL_KEY" in perdure("doctor", "--agent", "clerk.md").out
