"""Agent definitions load from Markdown, YAML, TOML and JSON, and the error for a wrong file names the place."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.definition_files import load_definition, load_definitions
from perdure.definition_files.files import MAX_BYTES, READERS
from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget

SUPPORT = AgentDefinition(
    name="support",
    label="Support: first line",
    description="Answers customers.",
    system_prompt="You are brief.\n\n    quote = indented",
    model=ModelConfig("openai:gpt-5", api_key_env="OPENAI_API_KEY", temperature=0.5, settings={"seed": 7}),
    tools=("search", "no"),
    tools_deny=("refund",),
    capabilities=("memory",),
    budget=ExecutionBudget(max_steps=12, max_cost=0.25, deadline=datetime(2030, 1, 31, 18, tzinfo=UTC)),
    metadata={"team": "ops", "on call": {"since": "2030-01-01", "days": [1, None, True]}},
)

YAML = """\
name: support
label: "Support: first line"
description: Answers customers.
model:
  name: openai:gpt-5
  api_key_env: OPENAI_API_KEY
  temperature: 0.5
  settings: {seed: 7}
tools:
  - search
  - no  # a word, not a boolean
tools_deny: [refund]
capabilities: [memory]
budget:
  max_steps: 12
  max_cost: 0.25
  deadline: 2030-01-31T18:00:00Z
metadata:
  team: ops
  on call: {since: 2030-01-01, days: [1, null, true]}
"""
PROMPT = """\
You are brief.

    quote = indented
"""
TOML = '''\
name = "support"
label = "Support: first line"
description = "Answers customers."
system_prompt = """
You are brief.

    quote = indented"""
tools = [
    "search",  # a comment, with ] and "
    "no",
]
tools_deny = ["refund"]
capabilities = ["memory"]
budget = { max_steps = 12, max_cost = 0.25, deadline = 2030-01-31T18:00:00Z }
metadata.team = "ops"
metadata."on call" = { since = "2030-01-01", days = [1, true] }

[model]
name = "openai:gpt-5"
api_key_env = "OPENAI_API_KEY"
temperature = 0.5

[model.settings]
seed = 7
'''
FILES = {
    "agent.md": f"---\n{YAML}---\n\n{PROMPT}",
    "agent.markdown": f"---  \n{YAML}---\n{PROMPT}\n\n",
    "agent.yaml": YAML + "system_prompt: |-\n" + "".join(f"  {line}\n" for line in PROMPT.splitlines()),
    "agent.YML": "---\n" + YAML + f"system_prompt: {json.dumps(PROMPT.rstrip())}\n",
    "agent.toml": TOML,
    "agent.json": json.dumps(msgspec.to_builtins(SUPPORT), indent="\t"),
}


def write(directory: Path, name: str, content: str | bytes) -> Path:
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path, kind: type[PerdureError] = InvalidData) -> str:
    with pytest.raises(kind) as caught:
        load_definition(path)
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_every_format_gives_the_same_definition(tmp_path: Path, name: str, newline: str, mark: str) -> None:
    """One agent is the same agent in each format, with either line ending, with or without a byte order mark."""
    expected = SUPPORT
    if name.endswith("toml"):  # TOML has no null
        expected = msgspec.structs.replace(
            SUPPORT, metadata={"team": "ops", "on call": {"since": "2030-01-01", "days": [1, True]}}
        )
    assert load_definition(write(tmp_path, name, mark + FILES[name].replace("\n", newline))) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ops.md", "---\n---\nBe brief."),
        ("ops.md", "---\n# nothing yet\n---\nBe brief."),
        ("ops.md", "---\nsystem_prompt: Be brief.\n---\n \n"),
        ("ops.yaml", "system_prompt: Be brief."),
        ("ops.toml", "system_prompt = 'Be brief.'"),
        ("ops.json", '{"system_prompt": "Be brief."}'),
    ],
)
def test_the_file_names_an_agent_that_has_no_name(tmp_path: Path, name: str, content: str) -> None:
    """Without a name the agent has the file's name, and every other field has its default."""
    assert load_definition(str(write(tmp_path, name, content))) == AgentDefinition(
        name="ops", system_prompt="Be brief."
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.md", "---\nmodel: offline\n---"), ("a.toml", "model = 'offline'"), ("a.json", '{"model": "offline"}')],
)
def test_a_model_may_be_just_its_name(tmp_path: Path, name: str, content: str) -> None:
    """A text in the model's place is the model's name."""
    assert load_definition(write(tmp_path, name, content)).model == ModelConfig("offline")


@pytest.mark.parametrize(
    "written", ["no", "off", "Yes", "2030-01-31", "1:30", "0x1F", "007", "1_000", ".5", ".inf", "<<"]
)
def test_yaml_that_other_readers_guess_at_is_text(tmp_path: Path, written: str) -> None:
    """Only null, true, false and numbers in JSON's form are more than text in YAML."""
    assert load_definition(write(tmp_path, "a.yaml", f"label: {written}")).label == written


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.md", "---\noutput:\n  type: object\n  properties:\n    token: {type: string}\n---\nBe brief.\n"),
        ("a.yaml", "output:\n  type: object\n  properties:\n    token: {type: string}\nsystem_prompt: Be brief.\n"),
        ("a.toml", 'system_prompt = "Be brief."\n[output]\ntype = "object"\nproperties.token.type = "string"\n'),
        (
            "a.json",
            '{"output": {"type": "object", "properties": {"token": {"type": "string"}}}, "system_prompt": "Be brief."}',
        ),
    ],
)
def test_an_output_is_a_json_schema(tmp_path: Path, name: str, content: str) -> None:
    """It is one in every format; a field there may have a name that elsewhere would look like a secret."""
    schema = {"type": "object", "properties": {"token": {"type": "string"}}}
    agent = AgentDefinition("a", system_prompt="Be brief.", output=schema)
    assert load_definition(write(tmp_path, name, content)) == agent


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("output: City", "a.yaml:1: output: expected a type or a JSON schema"),
        ("name: a\noutput: [1]", "a.yaml:2: output: expected a type or a JSON schema"),
        ("name: a\noutput:\n  type: objekt", "a.yaml:2: output: The response format is not a JSON schema"),
        ("output:\n  $ref: other.json", "a.yaml:1: output: The response format refers to 'other.json'"),
    ],
)
def test_an_output_that_is_no_schema_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    """The error names the file, the field and the line."""
    message = refusal(write(tmp_path, "a.yaml", content))
    where, what = problem.split(": ", 2)[0], problem.split(": ", 2)[2]
    assert what in message
    assert where in message


def test_every_field_of_the_model_can_be_written_in_a_file(tmp_path: Path) -> None:
    """A new field of a definition, its model or its budget can be in its files as well."""
    for kind, form in (
        (AgentDefinition, "{%s}"),
        (ModelConfig, '{"model": {%s}}'),
        (ExecutionBudget, '{"budget": {%s}}'),
    ):
        for field in set(kind.__struct_fields__) - {"unknown"}:
            message = refusal(write(tmp_path, "a.json", form % f'"{field}": null'))
            assert "got nothing; fill it in, or leave the field out" in message


@pytest.mark.parametrize(
    ("name", "content", "where", "problem"),
    [
        (
            "a.md",
            "---\nname: a\nbudget:\n  max_steps: twelve\n---\n",
            ":4: budget.max_steps",
            "expected an integer, got text",
        ),
        ("a.yaml", "budget:\n  max_steps: 1.5", ":2: budget.max_steps", "expected an integer, got a number"),
        ("a.toml", "[budget]\n\nmax_steps = '12'", ": budget.max_steps", "expected an integer, got text"),
        ("a.toml", "\nbudget.max_steps = true", ": budget.max_steps", "expected an integer, got a boolean"),
        (
            "a.toml",
            "budget = {max_cost = 1,\tmax_steps = []}",
            ": budget.max_steps",
            "expected an integer, got a list",
        ),
        ("a.json", '{\n"budget": {\n\t"max_steps": "12"}}', ": budget.max_steps", "expected an integer, got text"),
        ("a.yaml", "\nlabel: 42", ":2: label", "expected text, got an integer; put it in quotes"),
        ("a.yaml", "label: true", ":1: label", "expected text, got a boolean; put it in quotes"),
        ("a.yaml", "label: a\ntools:\n# - search\n", ":2: tools", "got nothing; fill it in, or leave the field out"),
        ("a.yaml", "tools: search", ":1: tools", "expected a list of names, got text"),
        ("a.yaml", "tools:\n- a\n- 1", ":3: tools[1]", "expected text, got an integer"),
        ("a.toml", "tools = [\n'a', # ]\n1]", ": tools[1]", "expected text, got an integer"),
        ("a.json", '{"tools": ["]}",\n\n1]}', ": tools[1]", "expected text, got an integer"),
        ("a.yaml", "tools:\n- a\n-", ":3: tools[1]", "expected text, got nothing; fill it in"),
        ("a.yaml", "budget: 5", ":1: budget", "expected a mapping, got an integer"),
        ("a.json", '{"metadata": []}', ": metadata", "expected a mapping, got a list"),
        ("a.yaml", "model: [a]", ":1: model", "expected the name of a model, or a mapping of its settings"),
        ("a.yaml", "model:\n  temperature: hot", ":2: model.temperature", "expected a number, got text"),
        ("a.yaml", "label: x\nmodel:\n  temperature: 1", ":2: model.name", "a model needs a name"),
        ("a.yaml", "label: x\nmodel: ' '", ":2: model.name", "a model needs a name"),
        ("a.yaml", "label: x\nname: ' '", ":2: name", "an agent needs a name"),
        ("a.yaml", "model:\n  name: x\n  settings: 5", ":3: model.settings", "expected a mapping, got an integer"),
        (
            "a.json",
            '{"metadata":' + '{"a":' * 101 + "1" + "}" * 102,
            f": metadata{'.a' * 96}",
            "deeper than 100 levels",
        ),
        ("a.toml", "tools = [\n" + "'a',\n" * 10_000 + "]", ": tools[9999]", "at most 10,000 values"),
        ("a.json", '{"tools": [\n' + '"a",\n' * 10_000 + '"a"]}', ": tools[9999]", "at most 10,000 values"),
        ("a.toml", "x.y = 1", ": x", "no such field; the fields are name, label, description, system_prompt, model"),
        ("a.md", "---\n\nprompt: x\n---\n", ":3: prompt", "no such field; the fields are name, label"),
        ("a.json", '{"name": "a",\n"~": {}}', ": ~", "no such field"),
        ("a.yaml", "budget:\n  steps: 1", ":2: budget.steps", "the fields are max_steps, max_tokens, max_seconds"),
        ("a.yaml", "model:\n  name: a\n  top: 1", ":3: model.top", "the fields are name, base_url, api_key_env"),
        ("a.yaml", "budget:\n  max_steps: -1", ":2: budget.max_steps", "at least 0"),
        ("a.yaml", "budget:\n  deadline: 2030-01-31T18:00:00", ":2: budget.deadline", "this one has no time zone"),
        ("a.toml", "[budget]\ndeadline = 2030-01-31", ": budget.deadline", "such as 2030-01-31T18:00:00Z"),
        ("a.json", '{"budget": {"deadline": "soon"}}', ": budget.deadline", "expected a date and time"),
        ("a.json", '{"budget": {"deadline": 5}}', ": budget.deadline", "expected a date and time"),
        ("a.md", "---\nsystem_prompt: x\n---\n\ny", ":2: system_prompt", "as the text from line 5 on; keep one"),
    ],
)
def test_a_wrong_field_is_named_with_file_and_line(
    tmp_path: Path, name: str, content: str, where: str, problem: str
) -> None:
    """The error for a wrong type, an unknown field or a value out of range has the place and the allowed values.

    YAML has the line; the parsers of TOML and JSON give none, so there the error names only the field.
    """
    message = refusal(write(tmp_path, name, content))
    assert message.endswith(f"(at {tmp_path / name}{where})")
    assert problem in message


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.yaml", "label: x\nlabel: y", ":2: label"),
        ("a.yaml", "metadata:\n  1: x\n  '1': y", ":3: metadata.1"),
        ("a.md", "---\nbudget: {max_steps: 1,\n  max_steps: 2}\n---\n", ":3: budget.max_steps"),
        ("a.json", '{"label": "x",\n"l\\u0061bel": "y"}', ": label"),
        ("a.json", '{"metadata": {"a": [{"b": 1,\n"b": 1}]}}', ": metadata.a[0].b"),
    ],
)
def test_a_key_given_twice_is_refused(tmp_path: Path, name: str, content: str, where: str) -> None:
    """Neither of two values is dropped silently."""
    message = refusal(write(tmp_path, name, content))
    assert message.endswith(f"(at {tmp_path / name}{where})")
    first = ", first on line 1; keep" if where.startswith(":2:") else ", first on line 2; keep"
    assert ("given twice; keep" if name == "a.json" else f"given twice{first}") in message


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("label = 'x'\n\"l\\u0061bel\" = 'y'", 2),
        ("[budget]\nmax_steps = 1\n[budget]", 3),
        ("[[metadata.a]]\nb = 1\n[[metadata.a]]\nb = 1\n[[metadata.a.c]]\n[[metadata.a.c]]\nd = 1\nd = 2\n", 8),
        ("metadata = {a = {b = 1, b = 2}}", 1),
    ],
)
def test_a_key_given_twice_is_bad_toml(tmp_path: Path, content: str, line: int) -> None:
    """TOML itself refuses the second of two values, and names the line."""
    message = refusal(write(tmp_path, "a.toml", content))
    assert message.startswith("bad TOML: ")
    assert message.endswith(f"(at {tmp_path / 'a.toml'}:{line})")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "content", "line", "problem"),
    [
        ("a.yaml", "label: x\ntools: [a", 2, "bad YAML"),
        ("a.yaml", "label: x\n\tdescription: y", 2, "bad YAML"),
        ("a.yaml", "label: x\n\ndescription: '\x07'", 3, "bad YAML"),
        ("a.yaml", 'label: x\ndescription: "\\UFFFFFFFF"', 2, "bad YAML"),
        ("a.yaml", "label: x\n---\nlabel: y", 2, "a file defines one agent"),
        ("a.yaml", "label: &x y", 1, "anchors (&) and aliases (*) are not read"),
        ("a.yaml", "tools:\n- *x", 2, "anchors (&) and aliases (*) are not read"),
        ("a.yaml", "label: !!python/object/apply:os.getcwd []", 1, "tags (!) are not read"),
        ("a.yaml", "label: x\n!!str description: y", 2, "tags (!) are not read"),
        ("a.yaml", "metadata:\n  ? [a]\n  : b", 2, "expected text as a key"),
        ("a.yaml", "- a", 1, "expected a mapping of fields, got a list"),
        ("a.toml", "label = 'x'\n\n" + "a lot of words. " * 200, 3, "bad TOML: Expected '='"),
        ("a.md", "Be brief.", 1, "expected front matter"),
        ("a.md", "---\nlabel: x\n", 1, "the front matter is not closed"),
        ("a.md", "---\nlabel: x\ntools: [a\n---\nBe brief.", 4, "bad YAML"),
        ("a.md", "---\njust text\n---\nBe brief.", 1, "expected a mapping of fields, got text"),
        ("a.json", '{\n"label": }', 2, "bad JSON: Expecting value"),
        ("a.json", '{"label": "x"} {}', 1, "bad JSON"),
        ("a.json", '["a"]', 1, "expected a mapping of fields, got a list"),
        ("a.json", "[" * 100_000, 1, "nested deeper than 100 levels"),
        ("a.yaml", "\nmetadata: " + "[" * 5_000, 2, "nested deeper than 100 levels"),
        ("a.toml", "metadata.a = " + "[" * 5_000, 1, "nested deeper than 100 levels"),
        ("a.toml", "\n" + "a." * 200_000 + "a = 1", 2, "nested deeper than 100 levels"),
        ("a.toml", "\n[" + "a." * 200_000 + "a]", 2, "nested deeper than 100 levels"),
        ("a.toml", "label = 'x'\ntools = [", 2, "bad TOML"),
        ("a.toml", "label = 'x'\nname = a\n", 2, "bad TOML: Invalid value"),
        ("a.toml", "label = 'x'\nlabel.a = 1\n", 2, "bad TOML"),
        ("a.yaml", "tools:\n" + "- a\n" * 10_000, 10_001, "at most 10,000 values"),
        ("a.yaml", "tools:\n" + "- a\n" * 200_000, 20_000, "at most 10,000 values"),
        ("a.toml", "metadata.b = 1\nmetadata.a = " + "9" * 5_000 + "\n\n", 2, "an integer must fit into 64 bits"),
        ("a.json", b'{"label":\n"caf\xe9"}', 2, "not UTF-8"),
        ("a.md", b"---\nlabel: caf\xe9\n---\n", 2, "not UTF-8"),
        ("a.toml", " \n\t", 1, "the file is empty"),
        ("a.yaml", "", 1, "the file is empty"),
        ("a.md", b"---\n---\n" + b"x" * MAX_BYTES, 1, "at most 1,048,576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_line(
    tmp_path: Path, name: str, content: str | bytes, line: int, problem: str
) -> None:
    """Bad syntax, and a value that perdure refuses, is reported with its line."""
    message = refusal(write(tmp_path, name, content))
    assert f"(at {tmp_path / name}:{line}" in message
    assert problem in message


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.json", '{"metadata": {"a":\n1e999}}', ": metadata.a"),
        ("a.json", '{"budget": {\n"max_cost": NaN}}', ": budget.max_cost"),
        ("a.toml", "[metadata]\na = [1, inf]", ": metadata.a[1]"),
        ("a.json", '{"label": "\\ud800"}', ": label"),
        ("a.json", '{"metadata": {"\\ud800": 1}}', ": metadata.\ufffd"),
        ("a.yaml", 'label: "\\ud800"', ":1: label"),
        ("a.yaml", "budget:\n  max_steps: " + "9" * 5_000, ":2: budget.max_steps"),
        ("a.json", '{"metadata": {"a": ' + "9" * 5_000 + "}}", ": metadata.a"),
        ("a.toml", "metadata.a = 99999999999999999999", ": metadata.a"),
    ],
)
def test_what_json_cannot_carry_is_refused(tmp_path: Path, name: str, content: str, where: str) -> None:
    """A value that could not be stored is refused when the file is read, in every format."""
    assert refusal(write(tmp_path, name, content)).endswith(f"(at {tmp_path / name}{where})")


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.yaml", "label: x\napi_key: sk-123", ":2: api_key:"),
        ("a.md", "---\nmodel:\n  name: x\n  api_key: sk-123\n---\n", ":4: model.api_key:"),
        (
            "a.toml",
            "[model]\nname = 'x'\n[model.settings.headers]\nAuthorization = 'sk-123'",
            ": model.settings.headers.Auth",
        ),
        ("a.json", '{"metadata": {"a": [\n{"password": "sk-123"}]}}', ": metadata.a[0].password:"),
        ("a.yaml", "model:\n  name: x\n  base_url: https://me:sk-123@host/v1", ":3: model.base_url:"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(tmp_path: Path, name: str, content: str, where: str) -> None:
    """A key that looks like a secret's is refused in any place, and its value is not in the message."""
    message = refusal(write(tmp_path, name, content), ConfigurationError)
    assert message.startswith(f"{tmp_path / name}{where}")
    assert "api_key_env" in message
    assert "sk-123" not in message


def test_the_environment_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that looks like a variable stays a text."""
    monkeypatch.setenv("SECRET_PLAN", "leaked")
    assert load_definition(write(tmp_path, "a.yaml", "label: ${SECRET_PLAN} $SECRET_PLAN")).label == (
        "${SECRET_PLAN} $SECRET_PLAN"
    )


@pytest.mark.parametrize("name", ["a.txt", "a", ".yaml"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    """The suffix sets the format, and the message lists the known ones."""
    message = refusal(write(tmp_path, name, "label: x"), ConfigurationError)
    assert str(tmp_path / name) in message
    assert ".md, .markdown, .yaml, .yml, .toml, .json" in message


@pytest.mark.parametrize("name", ["missing.md", "nul\0.md", "x" * 300 + ".md", "folder.md", "pipe.md"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    """The error names a path without a plain file, and opening a pipe does not wait for its writer."""
    (tmp_path / "folder.md").mkdir()
    os.mkfifo(tmp_path / "pipe.md")
    assert name in refusal(tmp_path / name, ConfigurationError)


def test_a_file_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """A file name that is not UTF-8 cannot be an agent's name, and the message can be printed."""
    try:
        path = write(tmp_path, os.fsdecode(b"caf\xe9.yaml"), "label: x")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    assert ": name)" in refusal(path).encode().decode()


def test_a_directory_gives_its_agents_by_name(tmp_path: Path) -> None:
    """Definition files of every format are read; other files, hidden ones and folders are not."""
    write(tmp_path, "b.md", "---\nname: writer\n---\nWrite.")
    write(tmp_path, "a.toml", "label = 'A'")
    write(tmp_path, "notes.txt", "not an agent")
    write(tmp_path, ".hidden.yaml", "not: an agent")
    (tmp_path / "folder.md").mkdir()
    assert load_definitions(tmp_path) == {
        "a": AgentDefinition(name="a", label="A"),
        "writer": AgentDefinition(name="writer", system_prompt="Write."),
    }


def test_two_agents_of_one_name_are_refused(tmp_path: Path) -> None:
    """The error names both files, and the field that gives the second its name."""
    first = write(tmp_path, "a.yaml", "label: A")
    second = write(tmp_path, "b.json", '{\n"name": "a"}')
    with pytest.raises(InvalidData) as caught:
        load_definitions(str(tmp_path))
    assert str(first) in caught.value.problem
    assert caught.value.path == f"{second}: name"


def test_one_bad_file_is_named(tmp_path: Path) -> None:
    """A directory with a wrong or unreadable file raises, instead of loading without it."""
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"gone\.md"):
        load_definitions(tmp_path)


@pytest.mark.parametrize("name", ["missing", "file.md"])
def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    """A wrong directory raises, instead of giving no agents."""
    write(tmp_path, "file.md", "---\n---\n")
    with pytest.raises(ConfigurationError, match=name):
        load_definitions(tmp_path / name)


texts = st.text(st.characters(exclude_categories=["Cs"]))
names = texts.filter(str.strip)
plain_keys = texts.filter(lambda key: not definition_looks_secret(key))
plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_keys, inner, max_size=3),
    max_leaves=8,
)
limits = st.none() | st.integers(0, 2**53)
budgets = st.builds(
    ExecutionBudget,
    max_steps=limits,
    max_cost=limits | st.floats(0, 1e9),
    deadline=st.none() | st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5.5))])),
)
models = st.builds(
    ModelConfig, names, thinking=st.none() | texts, settings=st.dictionaries(plain_keys, plain_data, max_size=3)
)
definitions = st.builds(
    AgentDefinition,
    names,
    label=st.none() | texts,
    description=texts,
    system_prompt=texts,
    model=st.none() | names | models,
    tools=st.none() | st.lists(texts, max_size=3),
    tools_deny=st.lists(texts, max_size=3),
    capabilities=st.lists(texts, max_size=3),
    budget=budgets,
    metadata=st.dictionaries(plain_keys, plain_data, max_size=3),
)


def definition_looks_secret(key: str) -> bool:
    try:
        AgentDefinition(name="a", metadata={key: True})
    except ConfigurationError:
        return True
    return False


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("definitions")


@given(definition=definitions, indent=st.sampled_from([None, 2, "\t"]), ascii_only=st.booleans())
def test_a_definition_dumped_as_json_loads_back(
    scratch: Path, definition: AgentDefinition, indent: Any, ascii_only: bool
) -> None:
    """Any definition survives being written as JSON, in any layout."""
    plain = msgspec.to_builtins(definition)
    dumped = json.dumps(plain, indent=indent, ensure_ascii=ascii_only)
    assert load_definition(write(scratch, "dumped.json", dumped)) == definition


WORDS = (
    """--- ... name budget metadata a.b : - [ ] [[ ]] { } , = . " ' ''' \\ # &a *a !x | > ? %YAML %TAG é 1 1e9 nan"""
)
SPACES = (" ", "  ", "\t", "\n", "\n---\n", ": ", "- ", "\r", "\x00", "\u2028", "\ufeff")
SCRAPS = st.sampled_from((*WORDS.split(), *SPACES, '"""', "\\ud800", "\\U00110000", "2030-01-31"))


def assert_loads_or_is_refused(path: Path) -> None:
    message = str(path)
    try:
        assert isinstance(load_definition(path), AgentDefinition)
    except PerdureError as error:
        message = str(error)
    assert str(path) in message


@given(
    suffix=st.sampled_from(sorted(READERS)),
    content=st.lists(SCRAPS, max_size=40).map("".join).map(str.encode) | st.binary(max_size=60),
)
@example(suffix=".yaml", content=b"%YAML " + b"9" * 5_000 + b".1\n---\n")
@example(suffix=".toml", content=b'"\\"' * 30_000)
@example(suffix=".toml", content=b'"a".' * 200_000)
@example(suffix=".toml", content=b'"""\\' * 30_000)
@example(suffix=".yaml", content=b"#\n" * 30_000)
def test_a_hostile_file_raises_nothing_but_perdures_errors(scratch: Path, suffix: str, content: bytes) -> None:
    """Any file gives a definition or a typed error that names the file."""
    path = write(scratch, f"hostile{suffix}", content)
    assert_loads_or_is_refused(path)


@given(content=st.lists(SCRAPS, max_size=30).map("".join), place=st.integers(0), suffix=st.sampled_from(sorted(FILES)))
def test_a_damaged_file_raises_nothing_but_perdures_errors(
    scratch: Path, content: str, place: int, suffix: str
) -> None:
    """A good file with a random change gives a definition or a typed error that names the file."""
    good = FILES[suffix]
    at = place % len(good)
    path = write(scratch, f"damaged-{suffix}", good[:at] + content + good[at:])
    assert_loads_or_is_refused(path)
