"""Checks arguments of tools with a schema from elsewhere: from an MCP server, or from a caller outside."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from perdure.errors import ToolError
from perdure.model.schema import require_validators
from perdure.model.value import thawed


class SchemaCheck:
    """A check of one tool's arguments against a JSON schema. A schema that cannot be applied here lets all pass."""

    def __init__(self, name: str, schema: Mapping[str, Any]) -> None:
        require_validators()  # now, and not in the middle of a run
        self._name = name
        self._schema = schema

    def __call__(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments. Raise ToolError, with what is wrong and where, if they do not fit."""
        given: dict[str, Any] = thawed(arguments)
        problem = self._problem(given)
        if problem is not None:
            schema = msgspec.json.encode(self._schema).decode()[:2000]
            where = f"{problem.message[:500]} at {problem.json_path}"
            raise ToolError(f"The arguments do not fit {self._name}: {where}. Its schema: {schema}")
        return given

    def _problem(self, arguments: Mapping[str, Any]) -> Any:
        from referencing.exceptions import Unresolvable

        try:
            return None if self._validator is None else next(self._validator.iter_errors(arguments), None)
        except Unresolvable:  # the schema refers to something else, which is never fetched
            return None

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        schema = thawed(self._schema)
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError:
            return None
        return kind(schema, registry=Registry())  # empty: a schema must not make us fetch an address
