"""The package that checks JSON schemas is an extra: without it, its features raise before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import perdure
from perdure.errors import ConfigurationError

INSTALL = r"pip install 'perdure\[schema\]'"
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}


@pytest.fixture(autouse=True)
def _without_jsonschema(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("jsonschema", "referencing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    monkeypatch.setitem(sys.modules, "referencing", None)


async def test_a_form_of_answers_names_the_extra_and_sends_nothing() -> None:
    """A message that asks for a form raises ConfigurationError with the extra, and the session stays as it is."""
    async with perdure.connect("memory://", model="offline") as sessions:
        chat = await sessions.open("a")
        with pytest.raises(ConfigurationError, match=INSTALL):
            await chat.send("2 + 3?", output=SCHEMA)
        assert await chat.history() == []


async def test_an_agent_with_a_form_names_the_extra_and_creates_nothing() -> None:
    """An agent that keeps a form raises ConfigurationError with the extra, and no session is created."""
    async with perdure.connect("memory://", model="offline") as sessions:
        with pytest.raises(ConfigurationError, match=INSTALL):
            await sessions.open("a", agent=perdure.AgentDefinition("a", output=SCHEMA))
        assert not await sessions.exists("a")


async def test_a_session_that_keeps_its_form_names_the_extra_and_sends_nothing(tmp_path: Path) -> None:
    """A process without the package opens such a session of another process, and sends it nothing."""
    url = f"sqlite:///{tmp_path}/chats.db"
    async with perdure.SqliteStore(tmp_path / "chats.db") as store:
        made = await perdure.SessionRuntime(store).create(perdure.AgentDefinition("a", output=SCHEMA))
    async with perdure.connect(url, model="offline") as sessions:
        chat = await sessions.open(made.id)
        with pytest.raises(ConfigurationError, match=INSTALL):
            await chat.send("2 + 3?")
        assert await chat.history() == []


def test_a_tool_that_is_called_outside_names_the_extra_when_it_is_declared() -> None:
    """Its arguments could not be checked, so it is refused before any session has it."""
    with pytest.raises(ConfigurationError, match=INSTALL):
        perdure.external_tool("weather", "Tell the weather.", {"type": "object"})


async def test_tools_in_python_need_no_package_for_schemas() -> None:
    """A function's arguments are checked by its own types."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async with perdure.connect("memory://", model="offline", tools=[add]) as sessions:
        assert (await (await sessions.open("a")).send("What is 2 + 3?")).text == "The answer is 5."


def test_an_agent_file_with_a_form_names_the_extra(tmp_path: Path) -> None:
    """The file is valid, so the error is about the package and not about the file."""
    (tmp_path / "a.yaml").write_text("name: a\noutput: {type: object}\n")
    with pytest.raises(ConfigurationError, match=INSTALL):
        perdure.load_definition(tmp_path / "a.yaml")
