"""The definition of an agent."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from perdure import codec
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.definition import AgentDefinition, ModelConfig
from perdure.model.execution import ExecutionBudget
from perdure.model.loop_events import LoopConfigSnapshot


def test_a_name_is_enough():
    """Everything but the name has a default: every tool allowed, nothing limited."""
    agent = AgentDefinition("support")
    assert (agent.name, agent.label, agent.description, agent.system_prompt) == ("support", None, "", "")
    assert (agent.model, agent.tools, agent.tools_deny, agent.capabilities) == (None, None, (), ())
    assert (agent.budget, agent.metadata) == (ExecutionBudget.unlimited(), {})


def test_only_the_name_is_positional():
    """The other fields are given by name, so their order means nothing."""
    with pytest.raises(TypeError):
        AgentDefinition("support", "label")


def test_names_may_come_as_lists():
    """Lists of names become tuples; no tools and every tool are different."""
    agent = AgentDefinition("a", tools=["x"], tools_deny=["y"], capabilities=["z"])
    assert (agent.tools, agent.tools_deny, agent.capabilities) == (("x",), ("y",), ("z",))
    assert AgentDefinition("a", tools=()).tools == ()


def test_a_model_may_be_given_by_name():
    """A model's name means a config of that name."""
    assert AgentDefinition("a", model="openai:gpt-5") == AgentDefinition("a", model=ModelConfig("openai:gpt-5"))
    assert AgentDefinition("a", model="offline").model_config == ModelConfig("offline")
    assert AgentDefinition("a").model_config is None


def test_the_provider_is_what_stands_before_the_colon():
    """A name without a colon is its own provider."""
    assert ModelConfig("openai:gpt-5").provider == "openai"
    assert ModelConfig("offline").provider == "offline"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"name": ""}, "$.name"),
        ({"name": "  "}, "$.name"),
        ({"name": 5}, "$.name"),
        ({"label": 5}, "$.label"),
        ({"description": None}, "$.description"),
        ({"system_prompt": b"x"}, "$.system_prompt"),
        ({"model": ""}, "$.model.name"),
        ({"model": 5}, "$.model.name"),
        ({"tools": "search"}, "$.tools"),
        ({"tools": 5}, "$.tools"),
        ({"tools": ["ok", 5]}, "$.tools[1]"),
        ({"tools_deny": None}, "$.tools_deny"),
        ({"capabilities": {"a": 1}}, "$.capabilities"),
        ({"budget": {"max_steps": 5}}, "$.budget"),
        ({"metadata": 5}, "$.metadata"),
        ({"metadata": None}, "$.metadata"),
    ],
)
def test_wrong_types_are_refused_where_they_stand(given, path):
    """A field of a wrong type is InvalidData that names the field."""
    with pytest.raises(InvalidData) as caught:
        AgentDefinition(**{"name": "a", **given})
    assert caught.value.path == path


@pytest.mark.parametrize(
    "metadata",
    [
        {"api_key": "sk-1"},
        {"OPENAI_API_KEY": "sk-1"},
        {"x-api-key": "sk-1"},
        {"apiKey": "sk-1"},
        {"password": "x"},
        {"headers": {"Authorization": "Bearer x"}},
        {"servers": [{"headers": {"authorization": "Bearer x"}}]},
        {"deep": ({"refresh_token": "x"},)},
    ],
)
def test_secrets_are_refused(metadata):
    """A key that names a secret is refused at any depth, in metadata and in model settings."""
    with pytest.raises(ConfigurationError, match="looks like a secret"):
        AgentDefinition("a", metadata=metadata)
    with pytest.raises(ConfigurationError, match="looks like a secret"):
        ModelConfig("m", settings=metadata)


@pytest.mark.parametrize("metadata", [{"api_key": None}, {"max_tokens": 5}, {"keys": ["a"]}, {"tokenizer": "x"}])
def test_what_holds_no_secret_is_kept(metadata):
    """An empty value for a secret, and words that only resemble one, are accepted."""
    assert AgentDefinition("a", metadata=metadata).metadata == metadata


def test_looking_for_secrets_ends():
    """Metadata that contains itself, or is very deep, does not make the search for secrets endless."""
    circle: dict = {"a": [1, 2]}
    circle["self"], circle["again"] = circle, [circle, circle]
    deep: dict = {}
    for _ in range(2000):
        deep = {"in": deep, "and": deep}
    for metadata in (circle, deep):
        with pytest.raises(InvalidData, match="nested deeper"):
            AgentDefinition("a", metadata=metadata).to_dict()


@pytest.mark.parametrize("url", ["https://user:pw@host/v1", "https://token@host", "user:pw@host"])
def test_an_address_with_credentials_is_refused(url):
    """A base URL that carries credentials would be stored with every session."""
    with pytest.raises(ConfigurationError, match="credentials"):
        ModelConfig("m", base_url=url)


@pytest.mark.parametrize(
    "query",
    ["?api_key=s3cr3t", "?v=1&key=s3cr3t", "?a%70i-key=s3cr3t", "?accessToken=s3cr3t", "?sig=s3cr3t", "#token=s3cr3t"],
)
def test_a_key_in_the_parameters_of_an_address_is_refused(query):
    """It would be stored with every definition, session and record. The error does not repeat it."""
    with pytest.raises(ConfigurationError, match="credentials") as refusal:
        ModelConfig("m", base_url=f"https://host/v1{query}")
    assert "s3cr3t" not in str(refusal.value)


@pytest.mark.parametrize("query", ["?api-version=2026-01-01", "?api_key=", "?", "?a=1&b=2#part", "?keyword=x"])
def test_other_parameters_of_an_address_are_kept(query):
    """Azure, for one, needs its version there."""
    assert ModelConfig("m", base_url=f"https://host/v1{query}").base_url == f"https://host/v1{query}"


def test_a_key_that_an_earlier_release_has_stored_is_left_out():
    """The definition still loads; from then on, the key is not written again."""
    plain = AgentDefinition("a", model=ModelConfig("m", base_url="https://host/v1?a=1&b=2")).to_dict()
    plain["model"]["base_url"] = "https://host/v1?a=1&api_key=s3cr3t&b=2"
    assert AgentDefinition.from_dict(plain).model.base_url == "https://host/v1?a=1&b=2"
    raw = msgspec.json.encode({name: each for name, each in plain.items() if name != "format"})
    assert codec.decode(AgentDefinition, raw).model.base_url == "https://host/v1?a=1&b=2"


def test_a_record_tells_no_key_in_an_address():
    """It has none even for another program's run, whose events a recorder has heard."""
    snapshot = LoopConfigSnapshot("m", "p", base_url="https://me:s3cr3t@host/v1?key=s3cr3t")
    assert snapshot.base_url == "https://host/v1"


def test_an_address_may_have_an_at_sign_in_its_path():
    """Only the host part can carry credentials."""
    assert ModelConfig("m", base_url="https://host/v1/@me").base_url == "https://host/v1/@me"


def test_mappings_refuse_mutation():
    """Metadata and settings are frozen, and copied from the given mapping."""
    source = {"a": 1}
    for mapping in (AgentDefinition("a", metadata=source).metadata, ModelConfig("m", settings=source).settings):
        with pytest.raises(TypeError):
            mapping["a"] = 2
    with pytest.raises(AttributeError):
        AgentDefinition("a").name = "b"


def test_copies_are_equal():
    """deepcopy and pickle give an equal definition."""
    definition = AgentDefinition("a", model="offline", tools=["x"], budget=ExecutionBudget(5), metadata={"a": [1]})
    assert copy.deepcopy(definition) == definition
    assert pickle.loads(pickle.dumps(definition)) == definition


def test_a_key_given_for_the_name_of_its_variable_is_refused_and_not_shown() -> None:
    """A pasted key would be stored with every session, and must not be in the error either."""
    with pytest.raises(ConfigurationError, match="environment variable") as caught:
        ModelConfig("openai:gpt-5", api_key_env="sk-123-abc")
    assert "sk-123" not in str(caught.value)
    assert ModelConfig("openai:gpt-5", api_key_env="MY_KEY").api_key_env == "MY_KEY"


@pytest.mark.parametrize("key", ["clientSecret", "private_key", "api_token", "apiKey", "Cookie", "session-token"])
def test_what_looks_like_a_secret_is_refused(key: str) -> None:
    """Names of secrets are recognised in any spelling."""
    with pytest.raises(ConfigurationError, match="looks like a secret"):
        AgentDefinition("agent", metadata={key: "x"})


@pytest.mark.parametrize("key", ["token_count", "author", "keyboard", "sessions", "secretary"])
def test_what_only_sounds_like_a_secret_passes(key: str) -> None:
    """Ordinary words with a secret's letters in them are accepted."""
    assert AgentDefinition("agent", metadata={key: "x"}).metadata == {key: "x"}
