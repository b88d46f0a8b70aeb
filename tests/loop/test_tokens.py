"""The estimate of tokens: what counts, what providers teach it, and that it never uses the network."""

from __future__ import annotations

import hashlib
import socket

import pytest

from perdure import Envelope, Media, Message, ModelConfig, ModelRequest, ToolCall, ToolSpec
from perdure.loop import tokens
from perdure.loop.compaction.windows import window_of
from perdure.loop.tokens import TokenEstimator, by_characters


@pytest.fixture(autouse=True)
def no_tokeniser(monkeypatch, tmp_path):
    """Count texts by their characters, whatever this machine has cached."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    tokens.cached_tokeniser.cache_clear()
    yield
    tokens.cached_tokeniser.cache_clear()


def asked(*texts: str, model: str = "test:model", **request: object) -> ModelRequest:
    return ModelRequest(ModelConfig(model), [Message.user(text) for text in texts], **request)


def test_plain_text_is_about_four_characters_a_token():
    """The estimate for English is near a tokeniser's."""
    assert by_characters("The quick brown fox jumps over the lazy dog.") == 11
    assert by_characters("") == 0


@pytest.mark.parametrize(
    ("text", "least", "most"), [("你好世界" * 25, 80, 160), ("привет" * 20, 40, 110), ("😀" * 50, 50, 150)]
)
def test_other_scripts_weigh_more(text, least, most):
    """A character that is not ASCII is half a token to three."""
    assert least <= by_characters(text) <= most


def test_lone_surrogates_are_counted():
    """A text that UTF-8 cannot encode is counted like any other."""
    assert by_characters("\ud800") > 0


def test_every_part_counts():
    """Each message costs something; so do calls, their arguments, results, files, prompt and tools."""
    count = TokenEstimator().messages
    assert count([]) == 0
    assert count([Message.user("")]) == tokens.PER_MESSAGE
    assert count([Message.user("x" * 400)]) == 100 + tokens.PER_MESSAGE
    bare = count([Message.assistant(tool_calls=[ToolCall("f")])])
    assert count([Message.assistant(tool_calls=[ToolCall("f", {"a": "x" * 400})])]) > bare + 99
    assert count([Message.tool("c", {"rows": ["x" * 400]})]) > 100
    assert count([Message.user(Media("image/png", url="x:y"))]) > 500
    assert count([Message.user(Media("application/pdf", data=b"x" * 40_000))]) > 9_000
    estimate = TokenEstimator()
    plain = estimate.request(asked("hi"))
    assert estimate.request(asked("hi", system_prompt="x" * 400)) == plain + 100
    tool = ToolSpec("f", "x" * 400, {"type": "object"})
    assert estimate.request(asked("hi", tools=(tool,))) > plain + 100
    assert estimate.overhead("x" * 400, (tool,)) > 200


def test_what_a_provider_reports_corrects_the_estimate():
    """The first report sets a model's ratio, later ones move it half way; other models are not touched."""
    estimate = TokenEstimator()
    request = asked("x" * 4_000)
    guess = estimate.request(request)
    estimate.learn(request, guess * 2)
    assert estimate.request(request) == guess * 2
    assert estimate.messages(request.messages, "test:model") == guess * 2
    assert estimate.messages(request.messages, "test:other") == estimate.messages(request.messages) == guess
    estimate.learn(request, guess)
    assert estimate.ratio("test:model") == 1.5


def test_wild_reports_do_little():
    """Zero, tiny and senseless values from a proxy leave the estimate usable."""
    estimate = TokenEstimator()
    estimate.learn(asked("x" * 4_000), 0)
    estimate.learn(asked("x" * 4_000), 20)
    estimate.learn(asked("hi"), 900)
    assert estimate.ratio("test:model") == 1.0
    estimate.learn(asked("x" * 4_000), 10**9)
    assert estimate.ratio("test:model") == 4.0


def test_what_is_learned_is_bounded(monkeypatch):
    """Neither models nor texts pile up in memory."""
    monkeypatch.setattr(tokens, "MODELS_KEPT", 3)
    monkeypatch.setattr(tokens, "TEXTS_KEPT", 5)
    estimate = TokenEstimator(count_text=by_characters)
    for n in range(9):
        estimate.learn(asked("x" * 4_000, model=f"test:{n}"), 3_000)
    assert [n for n in range(9) if estimate.ratio(f"test:{n}") != 1.0] == [6, 7, 8]
    estimate.messages(Message.user(f"text {n}") for n in range(9))
    assert len(estimate._counted) == 5


def test_a_tokeniser_is_used_if_there_is_one():
    """Its count replaces that of characters, except for texts that would take it too long."""
    estimate = TokenEstimator(count_text=lambda text: 7)
    assert estimate.messages([Message.user("hello")]) == 7 + tokens.PER_MESSAGE
    assert estimate.messages([Message.user("x" * 100_000)]) == 25_000 + tokens.PER_MESSAGE


@pytest.mark.parametrize("content", [None, b"not the vocabulary"])
def test_tiktoken_is_never_made_to_download(content, monkeypatch, tmp_path):
    """Without its whole vocabulary in the cache it is not used, and its cache is unchanged."""
    path = tmp_path / hashlib.sha1(tokens._VOCABULARY.encode()).hexdigest()
    if content is not None:
        path.write_bytes(content)

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert tokens.cached_tokeniser() is None
    assert path.exists() is (content is not None)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert not tokens.is_vocabulary_cached()


def test_windows_are_known_offline():
    """The window is the configured one, or from the price list or the model's family; else it is unknown."""
    assert window_of(ModelConfig("openai:gpt-4o", context_window=9)) == 9
    assert window_of(ModelConfig("openai:gpt-4o")) == 128_000
    assert window_of(ModelConfig("anthropic:claude-sonnet-4-5")) == 200_000
    assert window_of(ModelConfig("google:gemini-2.5-pro")) == 1_048_576
    assert window_of(ModelConfig("offline")) is None
    assert window_of(ModelConfig("openai:my-own-model")) is None
    assert window_of(ModelConfig("nobody:knows")) is None


def test_an_envelope_does_not_count():
    """An envelope is never sent, so it does not bring a compaction nearer."""
    count = TokenEstimator().messages
    envelope = Envelope("acme", {"long": "word " * 1_000})
    assert count([Message.user("Hi", envelope)]) == count([Message.user("Hi")])
