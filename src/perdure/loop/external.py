"""Tools that are called outside: a call ends the run as pending, and its answer is handed in later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn

from perdure import codec
from perdure.errors import ConfigurationError, InvalidData
from perdure.loop.schema_check import SchemaCheck
from perdure.loop.tools import CalledOutside, ToolRegistry, is_tool_name
from perdure.model.checks import expect, expect_several
from perdure.model.execution import ExternalToolSpec
from perdure.model.value import thawed
from perdure.protocols import ToolContext

_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}
MOST = 128
"""The most tools that a message may bring."""


class ExternalTool(CalledOutside):
    """A `Tool` that perdure never calls. `external_tool` makes one of a `spec`."""

    timeout: float | None = None
    """None: perdure waits for the answer for as long as it takes."""
    idempotent = False
    on_unknown: Literal["ask"] = "ask"
    """"ask": a call without an answer waits for one."""

    def __init__(self, spec: ExternalToolSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.description = spec.description
        self.parameters: Mapping[str, Any] = thawed(spec.parameters)
        self.check = SchemaCheck(spec.name, self.parameters)

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Return True: a call always waits for its answer, whatever its `arguments`."""
        return True

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> NoReturn:
        """Raise ConfigurationError: nobody calls it here, with any `arguments` in any `context`."""
        raise ConfigurationError(f"{self.name} is called outside. Hand its answer in: chat.answer({{call_id: …}}).")

    def __repr__(self) -> str:
        return f"<external tool {self.name}>"


def external_tool(name: str, description: str = "", parameters: Mapping[str, Any] | None = None) -> ExternalTool:
    """Declare a tool that is called outside, such as in a browser. `parameters` is the JSON schema of its arguments.

    The model calls it by its `name`, and reads its `description`. Give it to `connect(tools=…)`, or to one message:
    `chat.send(…, external_tools=[…])`. A call of it suspends the session, like one that needs approval, and
    `chat.answer({call_id: result})` lets the run continue.
    """
    if not is_tool_name(expect(name, str, "$.name")):
        raise ConfigurationError(f"{name!r} cannot be the name of a tool: use up to 64 letters, digits, _ and -.")
    expect(description, str, "$.description")
    expect(parameters or {}, Mapping, "$.parameters")  # type: ignore[type-abstract]
    # Through the codec: a schema that cannot be stored fails here, and the caller's dict may change later.
    schema = codec.decode_plain(codec.encode_json(dict(parameters or _NOTHING), "$.parameters"))
    return ExternalTool(ExternalToolSpec(name, description, schema))


def specs_of(tools: object) -> tuple[ExternalToolSpec, ...]:
    """Return the declarations of the tools that a message brings. Raise InvalidData if one is something else."""
    if tools is None:
        return ()
    given: tuple[object, ...] = expect_several(tools, "$.external_tools")  # type: ignore[arg-type]  # as it checks
    if len(given) > MOST:
        raise InvalidData("$.external_tools", f"a message can bring {MOST} tools, and {len(given)} were given")
    specs = [_spec_of(each, place) for place, each in enumerate(given)]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidData("$.external_tools", f"two tools are named {name!r}; give one of them another name")
    return tuple(specs)


def _spec_of(given: object, place: int) -> ExternalToolSpec:
    if isinstance(given, ExternalTool):
        return given.spec
    if isinstance(given, Mapping):  # the form that it has in an inbox, or on record
        return codec.convert(ExternalToolSpec, given)
    problem = f"expected a tool of external_tool(…), got {type(given).__name__}"
    raise InvalidData(f"$.external_tools[{place}]", problem)


def with_external(tools: ToolRegistry, specs: Iterable[ExternalToolSpec]) -> ToolRegistry:
    """Return the tools, with those of one run alone. Raise InvalidData if one of these has the name of another tool."""
    for spec in specs:
        if spec.name in tools:
            raise InvalidData("$.external_tools", f"the agent has a tool named {spec.name!r}; use another name")
    return ToolRegistry((*tools, *map(ExternalTool, specs))) if specs else tools
