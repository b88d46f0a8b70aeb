"""The options of a compaction, checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Literal, TypeVar, get_args

import msgspec

from perdure.aio import raise_if_cancelled
from perdure.errors import InvalidData
from perdure.model.message import Message
from perdure.model.value import brief, with_article

CompactStrategy = Literal["llm", "truncate", "observation_mask", "custom"]
STRATEGIES: tuple[CompactStrategy, ...] = get_args(CompactStrategy)

CustomCompactor = Callable[[Sequence[Message]], Any]
"""A function from the messages before the last `keep_last` to those shown instead: messages, dicts or texts."""
MaskCallback = Callable[[Message], str | Awaitable[str]]
CompressCallback = Callable[[Sequence[Message]], str | Awaitable[str]]

T = TypeVar("T")


class CompactionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options for compacting a transcript. Any subset may be given. The page Compaction says what each does."""

    keep_last: int = 12
    """The number of the last messages that stay unchanged."""
    token_threshold: int | None = None
    """The number of tokens below which nothing happens."""
    tool_output_max_chars: int | None = None
    """The number of characters of a tool's output that are kept."""
    compact_strategy: CompactStrategy | None = None
    """The strategy. Without one it follows from the callbacks, or is "llm" if a model can be asked."""
    hard_limit_tokens: int | None = None
    """The number of tokens that the result may have. Above it `hard_limit_strategy` is applied."""
    hard_limit_strategy: CompactStrategy | None = None
    """The strategy above the hard limit, "truncate" by default."""
    custom_compactor: CustomCompactor | None = None
    """The function of the strategy "custom". It returns what is shown instead of older messages."""
    mask_callback: MaskCallback | None = None
    """The function that returns the text in place of a tool's output, for "observation_mask"."""
    compress_callback: CompressCallback | None = None
    """The function that writes the summary, in place of a model."""

    def __post_init__(self) -> None:
        _check_count("keep_last", self.keep_last)
        for name in ("token_threshold", "tool_output_max_chars", "hard_limit_tokens"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        for name in ("compact_strategy", "hard_limit_strategy"):
            self._check_strategy(name, getattr(self, name))
        for name in ("custom_compactor", "mask_callback", "compress_callback"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise InvalidData(f"$.{name}", f"{name} is a function, plain or async; got {brief(given)}")

    @classmethod
    def of(cls, options: dict[str, Any]) -> CompactionOptions:
        """Return options from a caller's keywords, the `options`. Raise InvalidData for an unknown one."""
        for name in options:
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                raise InvalidData(f"$.{name}", f"{name!r} is not an option of compaction; there are: {known}")
        return cls(**options)

    def _check_strategy(self, name: str, strategy: object) -> None:
        if strategy is None:
            return
        if strategy not in STRATEGIES:
            raise InvalidData(f"$.{name}", f"{brief(strategy)} is not a strategy; use one of {', '.join(STRATEGIES)}")
        if strategy == "custom" and self.custom_compactor is None:
            raise InvalidData(f"$.{name}", "the strategy 'custom' needs a custom_compactor: a function of messages")

    def strategy(self, *, has_model: bool) -> CompactStrategy:
        """Return the named strategy, or else the one that a callback is for.

        Without either, it is a summary if it `has_model`, a model that can write one, and otherwise truncation.
        """
        if self.compact_strategy is not None:
            return self.compact_strategy
        if self.custom_compactor is not None:
            return "custom"
        if self.mask_callback is not None:
            return "observation_mask"
        return "llm" if has_model or self.compress_callback is not None else "truncate"

    @property
    def strategy_over_limit(self) -> CompactStrategy:
        """The strategy for a view that is still over the hard limit."""
        return self.hard_limit_strategy or "truncate"

    def calls_model(self, *, has_model: bool) -> bool:
        """Tell whether a model may be asked for a summary, if it `has_model`."""
        wanted = {self.strategy(has_model=has_model)}
        if self.hard_limit_tokens is not None:
            wanted.add(self.strategy_over_limit)
        return "llm" in wanted and self.compress_callback is None


async def called(name: str, kind: type[T], function: Callable[..., Any], *given: object) -> T:
    """Call a callback, plain or async, and return its result. Raise InvalidData if that is of the wrong type."""
    answer = function(*given)
    answer = await answer if isawaitable(answer) else answer
    raise_if_cancelled()  # a callback that tidied up and returned has swallowed the cancellation
    if not isinstance(answer, kind):
        wanted = with_article(kind.__name__)
        raise InvalidData(f"$.{name}", f"{name} returned {brief(answer)}; it is to return {wanted}")
    return answer


def _check_count(name: str, count: object) -> None:
    if type(count) is not int or count < 0:
        raise InvalidData(f"$.{name}", f"{name} is a whole number of at least 0; got {brief(count)}")
