"""Messages of Pydantic AI as JSON, and back. Its conversations and its harness share this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse

from perdure.model.value import JSON


def read(items: Sequence[JSON]) -> list[ModelMessage]:
    """Return the messages in items."""
    return ModelMessagesTypeAdapter.validate_python(items)


def told(messages: Sequence[ModelMessage]) -> list[JSON]:
    """Return messages as Pydantic AI writes them, without empty fields, which would be half of the bytes."""
    items = ModelMessagesTypeAdapter.dump_python([*messages], mode="json")
    return [_message_told(message, item) for message, item in zip(messages, items, strict=True)]


def _message_told(message: ModelMessage, item: dict[str, Any]) -> JSON:
    said = _said(message, item)
    said["parts"] = [_said(part, each) for part, each in zip(message.parts, item["parts"], strict=True)]
    if isinstance(message, ModelResponse) and isinstance(item.get("usage"), dict):
        said["usage"] = _said(message.usage, item["usage"])
    return said


def _said(value: Any, item: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a value without the fields that have their default."""
    kind: Any = type(value)
    silent = _silent_fields(kind)
    return {key: each for key, each in item.items() if each or key not in silent or each != silent[key]}


@cache
def _silent_fields(kind: Any) -> Mapping[str, Any]:
    """Return the fields of a class that are None, 0 or 0.0 unless they are given."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field.default for field in fields if field.default is None or field.default == 0}
