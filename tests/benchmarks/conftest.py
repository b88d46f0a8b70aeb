"""The commands of the benchmarks silence the logs of their process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _heard_again() -> Iterator[None]:
    """Let the logs be heard again: the next tests of this process may look at them."""
    yield
    logging.disable(logging.NOTSET)
