"""The frameworks that adapters sit under, each of which is an extra of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perdure.errors import ConfigurationError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import a framework. ConfigurationError that says what to install, if it is missing or too old."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"This adapter needs a package that is not here, or a newer one ({error}).",
            f"pip install 'perdure[{name}]'",
        ) from error
