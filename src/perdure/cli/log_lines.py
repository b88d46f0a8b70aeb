"""The log of a command that runs for long: lines on stderr, plain or as JSON."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

import click

from perdure.cli.terminal import json_line, note


class _Lines(logging.Handler):
    """A handler that writes log records as lines. In JSON, the facts of `extra={"facts": …}` become fields."""

    def __init__(self, as_json: bool) -> None:
        super().__init__(logging.INFO)
        self._as_json = as_json
        self._plain = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        if self._as_json:
            click.echo(json_line(_fields(record, self._plain)), err=True)
        else:
            note(self._plain.format(record))


def _fields(record: logging.LogRecord, plain: logging.Formatter) -> dict[str, Any]:
    facts: dict[str, Any] = getattr(record, "facts", {})
    raised = {"traceback": plain.formatException(record.exc_info)} if record.exc_info else {}
    return {
        "at": datetime.fromtimestamp(record.created, UTC),
        "level": record.levelname.lower(),
        "message": record.getMessage(),
        **facts,
        **raised,
    }


@contextmanager
def log_lines(as_json: bool, *others: str) -> Iterator[None]:
    """Show the log of perdure while the block lasts, and warnings and errors of other loggers."""
    handler = _Lines(as_json)
    with ExitStack() as stack:
        stack.enter_context(_shown("perdure", logging.INFO, handler))
        for name in others:
            stack.enter_context(_shown(name, logging.WARNING, handler))
        yield


@contextmanager
def _shown(name: str, level: int, handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # handlers of the root, such as a tool file's, would write each line a second time
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
