"""The fields of a definition: which there are, what each may hold, and the values they make."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from perdure.codec import check_json
from perdure.definition_files.source import Source, Where
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.definition import AgentDefinition, ModelConfig, refuse_secrets
from perdure.model.execution import ExecutionBudget

V = TypeVar("V")
_Field = Callable[[Source, Where, Any], Any]


def definition_in(source: Source) -> AgentDefinition:
    """The agent that a file's fields define; what is wrong with them is named with its line."""
    _check_values(source, (), source.fields)
    return _built(source, AgentDefinition, _known(source, (), source.fields, AGENT))


def _check_values(source: Source, where: Where, value: Any) -> None:
    """Refuse what may stand nowhere in a definition: secrets, and values that JSON does not carry."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_secret(source, (*where, key), key, item)
            _check_values(source, (*where, key), key)
            _check_values(source, (*where, key), item)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            _check_values(source, (*where, place), item)
    else:
        try:
            check_json(value)
        except InvalidData as error:
            raise source.invalid(where, error.problem) from None


def _refuse_secret(source: Source, where: Where, key: str, value: object) -> None:
    if where == ("model", "api_key_env"):
        return
    try:
        refuse_secrets({key: bool(value)}, "$")
    except ConfigurationError:
        raise ConfigurationError(
            f"{source.at(where)}: this looks like a secret, and would be stored with every session. Leave it out and "
            "name the environment variable that holds it in model.api_key_env."
        ) from None


def _built(source: Source, kind: Callable[..., V], fields: dict[str, Any]) -> V:
    try:
        return kind(**fields)
    except InvalidData as error:
        raise source.invalid(tuple(error.path.removeprefix("$.").split(".")), error.problem) from None


def _known(source: Source, where: Where, value: Any, fields: dict[str, _Field]) -> dict[str, Any]:
    """A mapping whose every field is known and of its type."""
    for key in _mapping(source, where, value):
        if key not in fields:
            raise source.invalid((*where, key), f"there is no such field; the fields are {', '.join(fields)}")
    return {key: fields[key](source, (*where, key), item) for key, item in value.items()}


def _string(source: Source, where: Where, value: Any) -> str:
    if not isinstance(value, str):
        raise source.expected(where, "text", value)
    return value


def _integer(source: Source, where: Where, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise source.expected(where, "an integer", value)
    return value


def _number(source: Source, where: Where, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise source.expected(where, "a number", value)
    return value


def _mapping(source: Source, where: Where, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise source.expected(where, "a mapping", value)
    return value


def _names(source: Source, where: Where, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise source.expected(where, "a list of names", value)
    return tuple(_string(source, (*where, place), name) for place, name in enumerate(value))


def _moment(source: Source, where: Where, value: Any) -> datetime:
    allowed = "a date and time with its time zone, such as 2030-01-31T18:00:00Z"
    if not isinstance(value, str):
        raise source.expected(where, allowed, value)
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise source.invalid(where, f"expected {allowed}") from None
    if moment.tzinfo is None:
        raise source.invalid(where, f"expected {allowed}; this one has no time zone")
    return moment


def _model(source: Source, where: Where, value: Any) -> ModelConfig:
    if not isinstance(value, str | dict):
        raise source.expected(where, "the name of a model, or a mapping of its settings", value)
    fields = {"name": value} if isinstance(value, str) else _known(source, where, value, MODEL)
    try:
        return _built(source, ModelConfig, {"name": "", **fields})
    except ConfigurationError as error:  # secret keys were refused before, which leaves credentials in the address
        raise ConfigurationError(f"{source.at((*where, 'base_url'))}: {error}") from None


def _budget(source: Source, where: Where, value: Any) -> ExecutionBudget:
    return _built(source, ExecutionBudget, _known(source, where, value, BUDGET))


BUDGET: dict[str, _Field] = {
    "max_steps": _integer,
    "max_tokens": _integer,
    "max_seconds": _number,
    "max_cost": _number,
    "deadline": _moment,
}
MODEL: dict[str, _Field] = {
    "name": _string,
    "base_url": _string,
    "api_key_env": _string,
    "temperature": _number,
    "max_tokens": _integer,
    "thinking": _string,
    "context_window": _integer,
    "settings": _mapping,
}
AGENT: dict[str, _Field] = {
    "name": _string,
    "label": _string,
    "description": _string,
    "system_prompt": _string,
    "model": _model,
    "tools": _names,
    "tools_deny": _names,
    "capabilities": _names,
    "budget": _budget,
    "metadata": _mapping,
}
