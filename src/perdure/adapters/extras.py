"""The extras of perdure that adapters need: one for each framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perdure.errors import ConfigurationError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Guard the import of a framework. Raise ConfigurationError with what to install if it is missing or too old."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"This adapter needs a package that is not here, or a newer one ({error}).",
            f"pip install 'perdure[{name}]'",
        ) from error
