"""YAML, read as its harmless part: no tags, anchors or aliases, and `no`, `off` and dates are text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from perdure.definition_files.source import Source, Where, line_at, whole


def read_yaml(source: Source) -> Any:
    return read_yaml_document(source, source.text)


def read_yaml_document(source: Source, text: str) -> Any:
    events = _yaml_events(source, text)
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        return {}
    plain = _yaml_value(source, events, next(events), ())
    next(events)
    after = next(events)
    if not isinstance(after, yaml.StreamEndEvent):
        raise source.invalid((), "a file defines one agent; put the second document into its own", _yaml_line(after))
    return {} if plain is None else plain


def _yaml_events(source: Source, text: str) -> Iterator[yaml.Event]:
    """The events of a YAML stream; its composer would unfold aliases and its constructors guess at types."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        raise source.invalid((), f"bad YAML: {error.reason}", line_at(text, error.position)) from None
    try:
        while loader.check_event():
            yield loader.get_event()  # type: ignore[no-untyped-call]  # the stubs leave it untyped
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line if error.problem_mark else loader.line) + 1
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise source.invalid((), f"bad YAML: {problem}", line) from None
    except (ValueError, OverflowError) as error:  # PyYAML lets these out for an escape such as "\UFFFFFFFF"
        raise source.invalid((), f"bad YAML: {error}", loader.line + 1) from None


def _yaml_line(event: yaml.Event) -> int:
    return event.start_mark.line + 1  # type: ignore[union-attr]  # a loader marks all that it reads


def _yaml_value(source: Source, events: Iterator[yaml.Event], event: yaml.Event, where: Where) -> Any:
    _refuse_yaml_extras(source, event, where)
    if isinstance(event, yaml.ScalarEvent):
        return _yaml_scalar(event)
    if isinstance(event, yaml.SequenceStartEvent):
        return _yaml_list(source, events, where)
    return _yaml_mapping(source, events, where)


def _yaml_list(source: Source, events: Iterator[yaml.Event], where: Where) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        place = (*where, len(items))
        source.note(place, _yaml_line(event))
        items.append(_yaml_value(source, events, event, place))
    return items


def _yaml_mapping(source: Source, events: Iterator[yaml.Event], where: Where) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    while not isinstance(key := next(events), yaml.MappingEndEvent):
        _refuse_yaml_extras(source, key, where)
        if not isinstance(key, yaml.ScalarEvent):
            raise source.invalid(where, "expected text as a key, got a list or a mapping", _yaml_line(key))
        place = (*where, key.value)
        source.note(place, _yaml_line(key))
        fields[key.value] = _yaml_value(source, events, next(events), place)
    return fields


def _refuse_yaml_extras(source: Source, event: yaml.Event, where: Where) -> None:
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise source.invalid(where, "anchors (&) and aliases (*) are not read; write it out", _yaml_line(event))
    if getattr(event, "tag", None) is not None:
        raise source.invalid(where, "tags (!) are not read; leave it out", _yaml_line(event))


_YAML_NUMBER = re.compile(r"(?P<whole>-?(?:0|[1-9][0-9]*))(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_YAML_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


def _yaml_scalar(event: yaml.ScalarEvent) -> Any:
    """YAML 1.2: what looks like JSON is what JSON says, and all the rest is text."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    if text.lower() in _YAML_WORDS:
        return _YAML_WORDS[text.lower()]
    number = _YAML_NUMBER.fullmatch(text)
    if number is None:
        return text
    return whole(text) if number["whole"] == text else float(text)
