"""Estimates the tokens of messages. Counts that providers report correct the estimates; no request is ever made.

Texts are counted by tiktoken where it is installed and has its vocabulary cached, by their characters otherwise.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from perdure.aio import in_slices
from perdure.model.message import Envelope, Media, Message, Part, Text, Thinking, ToolCall, ToolResult
from perdure.protocols import ModelRequest, ToolSpec

PER_MESSAGE = 4
"""Tokens for the role and the separators of a message, whatever it says."""
PER_CALL = 8
PER_IMAGE = 1_000
CHARS_PER_TOKEN = 4.0
TOKENS_PER_OTHER_BYTE = 0.4
"""Tokens per UTF-8 byte of text that is not ASCII: about right for Chinese, high for Cyrillic, never far too low."""
LONGEST_COUNTED = 50_000
"""The most characters that are counted. Longer texts are estimated: a tokeniser takes quadratic time for some."""
MODELS_KEPT = 256
TEXTS_KEPT = 50_000

CountText = Callable[[str], int]


class TokenEstimator:
    """An estimator of prompts that learns, for each model, by what ratio it was wrong. Its memory is bounded."""

    def __init__(self, count_text: CountText | None = None) -> None:
        self._count_text = count_text
        self._ratios: OrderedDict[str, float] = OrderedDict()
        self._counted: OrderedDict[int, int] = OrderedDict()

    def messages(self, messages: Iterable[Message], model: str | None = None) -> int:
        """Return the tokens of messages, as a model is expected to count them."""
        return self._corrected(sum(map(self._message, messages)), model)

    async def count(self, messages: Sequence[Message], model: str | None = None) -> int:
        """Return the same as `messages`, for many messages: other tasks can run in between."""
        return self._corrected(sum(await self._each(messages)), model)

    async def count_each(self, messages: Sequence[Message], model: str | None = None) -> list[int]:
        """Return the tokens of each message. Other tasks can run in between."""
        return [self._corrected(tokens, model) for tokens in await self._each(messages)]

    async def _each(self, messages: Sequence[Message]) -> list[int]:
        return [tokens async for some in in_slices(messages) for tokens in map(self._message, some)]

    def request(self, request: ModelRequest) -> int:
        """Return the tokens of a whole model call: prompt, tools and messages."""
        return self._corrected(self._raw_request(request), request.model.name)

    def overhead(self, system_prompt: str, tools: Sequence[ToolSpec], model: str | None = None) -> int:
        """Return the tokens of what is sent with every call, whatever the messages."""
        return self._corrected(self._raw_overhead(system_prompt, tools), model)

    def learn(self, request: ModelRequest, reported: int) -> None:
        """Learn from the number of input tokens that a provider has counted in a request.

        A number that is far too low is ignored: some providers count only what was not in their cache.
        """
        estimated = self._raw_request(request)
        if estimated < 50 or reported < estimated / 4:  # in a short request, fixed costs hide the ratio
            return
        name = request.model.name
        # Bounded here and averaged below: one odd report must not spoil the estimates that follow.
        ratio = min(4.0, max(0.5, reported / estimated))
        known = self._ratios.pop(name, None)
        self._ratios[name] = ratio if known is None else (known + ratio) / 2
        while len(self._ratios) > MODELS_KEPT:
            self._ratios.popitem(last=False)

    def ratio(self, model: str | None) -> float:
        """Return the factor by which an estimate for a model is multiplied."""
        return self._ratios.get(model or "", 1.0)

    def _corrected(self, tokens: int, model: str | None) -> int:
        return round(tokens * self.ratio(model))

    def _raw_request(self, request: ModelRequest) -> int:
        return self._raw_overhead(request.system_prompt, request.tools) + sum(map(self._message, request.messages))

    def _raw_overhead(self, system_prompt: str, tools: Sequence[ToolSpec]) -> int:
        told = "".join(f"{tool.name} {tool.description} {_json(tool.parameters)}" for tool in tools)
        return self._text(system_prompt) + self._text(told) + PER_CALL * len(tools)

    def _message(self, message: Message) -> int:
        return PER_MESSAGE + sum(map(self._part, message.parts))

    def _part(self, part: Part) -> int:
        match part:
            case Text() | Thinking():
                return self._text(part.text)
            case ToolCall():
                return PER_CALL + self._text(part.name) + self._text(_json(part.arguments))
            case ToolResult():
                return PER_CALL + self._text(part.text)
            case Media():
                return PER_IMAGE if part.media_type.startswith("image/") else self._media(part)
            case Envelope():
                return 0
        return self._text(_json(part.body))

    def _media(self, part: Media) -> int:
        return max(PER_IMAGE, (part.length or 0) // 4)

    def _text(self, text: str) -> int:
        count = self._count_text or cached_tokeniser()
        if count is None or len(text) > LONGEST_COUNTED:
            return by_characters(text)
        key = hash(text)  # not the text: what is counted must not be kept in memory by its count
        if key not in self._counted:
            self._counted[key] = count(text)
            if len(self._counted) > TEXTS_KEPT:
                self._counted.popitem(last=False)
        return self._counted[key]


def by_characters(text: str) -> int:
    """Return an estimate by length alone. ASCII and other text weigh differently."""
    if text.isascii():
        return _rounded_up(len(text) / CHARS_PER_TOKEN)
    ascii_chars = len(text.encode("ascii", "ignore"))
    other_bytes = len(text.encode("utf-8", "surrogatepass")) - ascii_chars
    return _rounded_up(ascii_chars / CHARS_PER_TOKEN + other_bytes * TOKENS_PER_OTHER_BYTE)


def _rounded_up(number: float) -> int:
    return -int(-number // 1)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


_VOCABULARY = "https://openaipublic.blob.core.windows.net/encodings/o200k_base.tiktoken"
_VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


@cache
def cached_tokeniser() -> CountText | None:
    """Return tiktoken's count of a text, or None if it is not installed.

    None also if its vocabulary is not cached here: tiktoken would download it.
    """
    from importlib.util import find_spec

    if find_spec("tiktoken") is None or not is_vocabulary_cached():
        return None
    encoding = import_module("tiktoken").get_encoding("o200k_base")
    return lambda text: len(encoding.encode_ordinary(text))


def is_vocabulary_cached() -> bool:
    """Tell whether the file that tiktoken would read is there, whole. It downloads one with another hash again."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if folder == "":
        return False  # tiktoken's way to say: no cache
    import tempfile

    place = Path(folder) if folder else Path(tempfile.gettempdir()) / "data-gym-cache"
    # tiktoken names its cached files by the SHA-1 of their URL.
    try:
        body = (place / hashlib.sha1(_VOCABULARY.encode(), usedforsecurity=False).hexdigest()).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(body).hexdigest() == _VOCABULARY_SHA256
