"""The form of an answer: checks whether an answer has it, and reads the value of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from perdure import codec
from perdure.codec.values import invalid
from perdure.errors import ConfigurationError, InvalidData
from perdure.model.message import Message
from perdure.model.schema import TypeSchema, check_schema, is_pydantic, output_schema, require_validators, type_adapter
from perdure.model.state import AgentState
from perdure.model.value import JSON

T = TypeVar("T")


class Form(msgspec.Struct, frozen=True):
    """The form of an answer: its JSON schema, which is stored, and the type that it was made from, if known."""

    schema: Mapping[str, Any]
    """The JSON schema."""
    kind: Any = None
    """The type that the answer is read as, or None for plain data."""

    @classmethod
    def of(cls, wanted: object, path: str = "$.output") -> Form:
        """Return the form that a caller gives as a type or a JSON schema. Raise if it cannot be used for checks.

        `wanted` is the type or schema, and `path` names it in errors.
        """
        schema = output_schema(wanted, path)
        codec.check_json(schema, path)
        require_validators()
        try:
            check_schema(schema)
        except ConfigurationError as error:
            raise InvalidData(path, str(error)) from None
        return cls(schema, schema.kind if isinstance(schema, TypeSchema) else None)

    def value(self, text: str) -> Any:
        """Return the value of an answer, in its type if that is known. Raise InvalidData if the answer does not fit.

        `text` is the answer. A type may ask for more than its schema can say, so both are checked.
        """
        raw = _json_in(text)
        plain = _read(raw)
        _validate(plain, self.schema)
        return plain if self.kind is None else _as_type(raw, self.kind)

    def problem(self, answer: Message | None) -> str | None:
        """Return the fault of an `answer`, or None. Without an answer, there is none."""
        if answer is None:
            return None
        try:
            self.value(answer.text)
        except InvalidData as error:
            return str(error)
        return None


MARK = "asks_again"
"""The key in the metadata of a message that asks for an answer again."""


def complaint(problem: str, execution_id: str, agent_id: str) -> Message:
    """Return the message that tells the model that its answer does not fit."""
    tags = {"is_trace": True, "execution_id": execution_id, "agent_id": agent_id, MARK: True}
    text = f"Your answer does not fit the form that was asked for: {problem}. Answer again, with the JSON alone."
    return Message.user(text, metadata=tags)


def is_complaint(message: Message) -> bool:
    return bool(message.metadata.get(MARK))


def final_value(state: AgentState, kind: type[T] | None = None) -> Any:
    """Return the final response as the value that was asked for, made into `kind` if one is given.

    `state` is the state at the end of the run.
    """
    response = state.final_response
    if response is None:
        raise InvalidData("$", "this run has no final response")
    return Form({} if state.response_format is None else state.response_format, kind).value(response.text)


def _json_in(text: str) -> str:
    """Return the JSON of an answer, even if a model has put it into a code fence."""
    stripped = text.strip()
    return stripped.strip("`").removeprefix("json").strip() if stripped.startswith("```") else stripped


def _read(raw: str) -> JSON:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidData("$", f"it is not JSON: {error}") from None


def _validate(value: JSON, schema: Mapping[str, Any]) -> None:
    if not schema:
        return
    check_schema(schema)
    from jsonschema import Draft202012Validator
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    # With a registry of its own, which is empty: the default one would fetch what a schema refers to.
    validator = Draft202012Validator(schema, registry=Registry())
    try:
        problem = next(iter(validator.iter_errors(value)), None)
    except Unresolvable as error:
        raise ConfigurationError(f"The response format refers to something that is not in it: {error}.") from None
    except RecursionError:
        raise InvalidData("$", "it nests too deep") from None
    if problem is not None:
        raise InvalidData(problem.json_path, problem.message[:500])


def _as_type(raw: str, kind: Any) -> Any:
    try:
        return type_adapter(kind).validate_json(raw) if is_pydantic(kind) else msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from None
    except ValueError as error:  # pydantic's
        raise InvalidData(*_told(error)) from None


def _told(error: ValueError) -> tuple[str, str]:
    """Return the place and the text of the first fault that pydantic has found. All of them could be pages."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return "$", str(error)
    first = errors(include_url=False, include_context=False, include_input=False)[0]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    return "$" + "".join(steps), first["msg"][:500]
