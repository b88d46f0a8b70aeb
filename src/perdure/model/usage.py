"""The cost of a model call."""

from __future__ import annotations

from perdure.model.value import Value


class Usage(Value, frozen=True):
    """Tokens and money. Cache and reasoning tokens are included in input and output tokens."""

    input_tokens: int = 0
    """Tokens of prompts."""
    output_tokens: int = 0
    """Tokens of answers."""
    cache_read_tokens: int = 0
    """Tokens of prompts that the provider had in its cache."""
    cache_write_tokens: int = 0
    """Tokens of prompts that the provider has put into its cache."""
    reasoning_tokens: int = 0
    """Tokens of answers that were thoughts."""
    cost: float = 0.0
    """Dollars, for the tokens whose price is known."""
    unpriced_tokens: int = 0
    """The number of tokens without a known price. They are not in `cost`."""

    @property
    def total_tokens(self) -> int:
        """Input and output tokens together."""
        return self.input_tokens + self.output_tokens

    @property
    def is_cost_known(self) -> bool:
        """True if `cost` covers all tokens. A free model costs 0, and that is known."""
        return self.unpriced_tokens == 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cost + other.cost,
            self.unpriced_tokens + other.unpriced_tokens,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens - other.input_tokens,
            self.output_tokens - other.output_tokens,
            self.cache_read_tokens - other.cache_read_tokens,
            self.cache_write_tokens - other.cache_write_tokens,
            self.reasoning_tokens - other.reasoning_tokens,
            self.cost - other.cost,
            self.unpriced_tokens - other.unpriced_tokens,
        )
