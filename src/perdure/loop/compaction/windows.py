"""Context windows: how many tokens each model can read at once, as far as that is known without a request."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from perdure.model.definition import OWN_DRIVER, ModelConfig

_BY_FAMILY = {
    "claude": 200_000,
    "gemini-1.5-pro": 2_097_152,
    "gemini": 1_048_576,
    "gpt-4.1": 1_047_576,
    "gpt-4o": 128_000,
    "gpt-4-turbo": 128_000,
    "gpt-5": 400_000,
    "o1": 200_000,
    "o3": 200_000,
    "o4": 200_000,
}
"""Windows of models that genai-prices does not know, or for when it is not installed. The longest prefix counts."""


def window_of(model: ModelConfig) -> int | None:
    """Return a model's context window in tokens: as configured, or else as known, or None."""
    if model.context_window is not None:
        return model.context_window
    provider, _, name = model.name.partition(":")
    if not name or provider == OWN_DRIVER:  # no price list has these, and its import takes time
        return None
    return _known_window(provider, name)


@lru_cache(maxsize=256)
def _known_window(provider: str, name: str) -> int | None:
    return _listed_window(provider, name) or _family_window(name)


def _family_window(name: str) -> int | None:
    fitting = [family for family in _BY_FAMILY if name == family or name.startswith((f"{family}-", f"{family}."))]
    return _BY_FAMILY[max(fitting, key=len)] if fitting else None


def _listed_window(provider: str, name: str) -> int | None:
    """Return the window in the price list of genai-prices. The list is data in that package, and nothing is fetched."""
    from importlib.util import find_spec

    if find_spec("genai_prices") is None:
        return None
    snapshot = import_module("genai_prices.data_snapshot").get_snapshot()
    try:
        _, found = snapshot.find_provider_model(name, None, provider.partition("-")[0], None)
    except LookupError:
        return None
    window: int | None = found.context_window
    return window
