"""Whether an answer has the form that was asked for, and the value that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from perdure.errors import ConfigurationError, InvalidData
from perdure.model.state import AgentState
from perdure.model.value import JSON

T = TypeVar("T")


def check_response(state: AgentState) -> str | None:
    """What is wrong with the final response, told so that the model can mend it; None if nothing is."""
    schema = state.context.response_format
    response = state.final_response
    if schema is None or response is None:
        return None
    try:
        _validate(_read(response.text), schema)
    except InvalidData as error:
        return f"Your answer does not fit the form that was asked for: {error}. Answer again, with the JSON alone."
    return None


def final_value(state: AgentState, kind: type[T] | None = None) -> Any:
    """The final response as the value that the response format asks for, made into `kind` if one is given."""
    response = state.final_response
    if response is None:
        raise InvalidData("$", "this run has no final response")
    value = _read(response.text)
    if state.context.response_format is not None:
        _validate(value, state.context.response_format)
    if kind is None:
        return value
    validate = getattr(kind, "model_validate", None)
    try:
        return validate(value) if callable(validate) else msgspec.convert(value, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidData("$", str(error)) from None


def _read(text: str) -> JSON:
    """JSON, also where a model has put it into a code fence."""
    stripped = text.strip()
    if stripped.startswith("```"):
        stripped = stripped.strip("`").removeprefix("json").strip()
    try:
        return msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidData("$", f"it is not JSON: {error}") from None


def _validate(value: JSON, schema: Mapping[str, Any]) -> None:
    from jsonschema import Draft202012Validator, SchemaError  # heavy, and used only where a form is asked for

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigurationError(f"The response format is not a JSON schema: {error.message}.") from None
    problem = next(iter(Draft202012Validator(schema).iter_errors(value)), None)
    if problem is not None:
        raise InvalidData(problem.json_path, problem.message[:500])
