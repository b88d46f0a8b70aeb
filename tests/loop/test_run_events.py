"""The record of the model that ran a loop."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from perdure import ModelConfig
from perdure.loop.run_events import snapshot

CONFIG = ModelConfig(
    "anthropic:claude-opus-4-6", thinking="high", temperature=0.5, max_tokens=100, settings={"seed": 7}
)


def test_a_snapshot_says_which_model_ran_and_how_it_was_asked() -> None:
    """It has every field that seeds/002 names, and does not say where the key comes from."""
    made = snapshot(replace(CONFIG, api_key_env="SECRET_KEY", base_url="https://x.test", context_window=9))
    assert (made.provider, made.model, made.name) == ("anthropic", "claude-opus-4-6", "anthropic:claude-opus-4-6")
    assert (made.api, made.base_url, made.reasoning) == ("anthropic_messages", "https://x.test", True)
    assert (made.context_window, made.max_tokens, made.thinking_level, made.temperature) == (9, 100, "high", 0.5)
    assert made.config_id
    assert "SECRET_KEY" not in str(made.to_dict())


def test_equal_configs_have_one_id() -> None:
    """The id is the same in every process, whichever variable holds the key; another setting is another config."""
    first = snapshot(CONFIG).config_id
    assert first == snapshot(replace(CONFIG, api_key_env="OTHER")).config_id == "2e96f919a51f9db6"
    assert first != snapshot(replace(CONFIG, settings={"seed": 8})).config_id
    assert first != snapshot(replace(CONFIG, temperature=0.6)).config_id


@pytest.mark.parametrize(
    ("model", "api", "reasoning"),
    [
        (ModelConfig("openai:gpt-5"), "openai_responses", None),
        (ModelConfig("openai:local", base_url="http://localhost:1/v1"), "openai_completions", None),
        (ModelConfig("openai-chat:gpt-5", thinking="off"), "openai_completions", False),
        (ModelConfig("offline"), None, None),
    ],
)
def test_what_is_not_known_is_none(model: ModelConfig, api: str | None, reasoning: bool | None) -> None:
    """The protocol is unknown if the client chooses it, and so is reasoning if it was not set."""
    made = snapshot(model)
    assert (made.api, made.reasoning) == (api, reasoning)
