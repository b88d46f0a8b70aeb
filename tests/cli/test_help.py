"""The help of all commands, side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest

from perdure.cli.main import COMMANDS, EXAMPLES, cli

CONTEXT = click.Context(cli)


def command(name: str) -> click.Command:
    found = cli.get_command(CONTEXT, name)
    assert found is not None
    return found


def options() -> Iterator[tuple[str, click.Option]]:
    for name in COMMANDS:
        yield from ((name, param) for param in command(name).params if isinstance(param, click.Option))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example(perdure: Callable[..., Any], name: str) -> None:
    """It has a line of its own, however narrow the terminal is."""
    shown = perdure(name, "--help").lines
    assert all(f"    {example}" in shown for example in EXAMPLES[name])


@pytest.mark.parametrize("example", [each for examples in EXAMPLES.values() for each in examples])
def test_every_example_can_be_typed(home: Any, example: str) -> None:
    """It has no option or argument that the command does not accept."""
    program, name, *arguments = shlex.split(example)
    assert program == "perdure"
    command(name).make_context(name, arguments, parent=click.Context(cli))


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


def test_a_name_means_the_same_everywhere() -> None:
    """An option has the same short form, the same aliases and the same form of value in every command."""
    forms: dict[str, set[tuple[tuple[str, ...], str | None, str]]] = {}
    for name, option in options():
        if (name, option.opts[-1]) in (("export", "--output"), ("tree", "--limit")):  # `tree` had it before --last
            continue
        if (name, option.opts[-1]) in (
            ("restore", "--from"),
            ("restore", "--at"),
            ("backup", "--keep"),
        ):  # of a whole store, not a session
            continue
        for spelled in option.opts:
            form = (tuple(sorted(option.opts)), option.metavar, type(option.type).__name__)
            forms.setdefault(spelled, set()).add(form)
    assert {name: found for name, found in forms.items() if len(found) > 1} == {}


def test_every_option_is_explained() -> None:
    assert [(name, option.opts) for name, option in options() if not option.help] == []


def test_a_short_form_comes_first() -> None:
    both = [option.opts for _, option in options() if any(not each.startswith("--") for each in option.opts)]
    assert all(not spelled[0].startswith("--") for spelled in both)
