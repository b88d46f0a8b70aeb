"""Tools: typed functions that a model may call."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import copy_context
from enum import Enum
from functools import partial
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    Optional,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
    overload,
)

import msgspec

from perdure.errors import ConfigurationError, ToolError
from perdure.model.checks import expect, expect_several
from perdure.model.value import JSON, thawed
from perdure.protocols import Tool, ToolContext

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

NeedsApproval = bool | Callable[[Mapping[str, Any]], bool]
OnUnknown = Literal["error", "rerun", "ask"]

if TYPE_CHECKING:
    # With defaults, a plain `FunctionTool` is complete for type checkers. Python has them from 3.13 on.
    from typing_extensions import ParamSpec as ParamSpecWithDefault
    from typing_extensions import TypeVar as TypeVarWithDefault

    P = ParamSpecWithDefault("P", default=...)
    R = TypeVarWithDefault("R", default=Any)
else:
    P, R = ParamSpec("P"), TypeVar("R")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class CalledOutside:
    """The kind of tool that perdure never calls: its calls wait for their answers."""


class FunctionTool(Generic[P, R]):
    """A Python `function` as a tool: its schema comes from its type hints, its descriptions from its docstring.

    `name` and `description` replace those of the function. `idempotent` says that a call whose outcome is unknown after
    a crash may be made again. `needs_approval`, a bool or a predicate on the arguments, suspends the session until a
    person agrees. A call has `timeout` seconds. `on_unknown` overrides what happens to a call whose outcome is unknown:
    tell the model ("error"), call again ("rerun"), or wait for a person ("ask").
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        idempotent: bool = False,
        needs_approval: NeedsApproval = False,
        timeout: float | None = None,
        on_unknown: OnUnknown | None = None,
    ) -> None:
        self.name: str = expect(name, str, "$.name") if name else str(getattr(function, "__name__", ""))
        if not is_tool_name(self.name):
            raise ConfigurationError(f"{self.name!r} cannot name a tool: use up to 64 letters, digits, _ and -.")
        check_tool_options(self.name, timeout, on_unknown)
        if not callable(needs_approval):
            expect(needs_approval, bool, "$.needs_approval")
        summary, described = _read_docstring(function)
        self.description = summary if description is None else expect(description, str, "$.description")
        self.idempotent = expect(idempotent, bool, "$.idempotent")
        self.timeout = timeout
        self.on_unknown: OnUnknown = on_unknown or ("rerun" if idempotent else "error")
        self._needs_approval = needs_approval
        self._function: Callable[..., Any] = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._arguments, self._context_name, wanted = _arguments_of(self.name, function, described)
        self.needs_context = _is_needed(wanted)
        self.context_type = _class_in(wanted)
        """The class that its context must have; None if any will do, or if `isinstance` cannot tell."""
        self.parameters = _schema_of(self.name, self._arguments)

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Tell whether a person must agree to a call with these `arguments`."""
        wanted = self._needs_approval
        return bool(wanted(arguments)) if callable(wanted) else wanted

    def check(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `arguments` as the function takes them. Raise ToolError, with the fault, if they do not fit."""
        try:
            fitted = msgspec.convert(thawed(arguments), self._arguments, strict=False, dec_hook=_revive)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            schema = _brief(self.parameters)
            raise ToolError(f"The arguments do not fit {self.name}: {error}. Its schema: {schema}") from None
        return {name: getattr(fitted, name) for name in fitted.__struct_fields__}

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> JSON:
        """Call the function. A plain function runs in a thread, where it holds up nothing else.

        `arguments` are those of the model. `context` goes to the parameter of the type `ToolContext`.
        """
        given = dict(self.check(arguments))
        if self._context_name is not None:
            given[self._context_name] = context
        if self._is_async:
            return await self._function(**given)
        outcome = await in_a_thread(self.name, partial(_called, self._function, given))
        return await outcome if inspect.isawaitable(outcome) else outcome

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, for code that uses it directly."""
        result: R = self._function(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<tool {self.name}>"


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    idempotent: bool = False,
    needs_approval: NeedsApproval = False,
    timeout: float | None = None,
    on_unknown: OnUnknown | None = None,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a `function` a tool: `@tool`, or `@tool(idempotent=True, needs_approval=…, timeout=…)`.

    The `options` are the parameters of `FunctionTool`. `idempotent` says that a call whose outcome is unknown after a
    crash may be made again. `needs_approval`, a bool or a predicate on the arguments, suspends the session until a
    person agrees. `on_unknown` overrides what happens to a call whose outcome is unknown: tell the model ("error"),
    call again ("rerun"), or wait for a person ("ask").
    """
    if function is not None:
        return FunctionTool(function)
    known = inspect.signature(FunctionTool).parameters.keys() - {"function"}
    for name in options.keys() - known:
        raise ConfigurationError(f"@tool has no option {name!r}. It has: {', '.join(sorted(known))}.")
    return lambda function: FunctionTool(function, **options)


class ToolRegistry:
    """The registered `tools`, by name."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for given in expect_several(tools, "$.tools"):
            self.add(given)

    def add(self, given: Tool | Callable[..., Any]) -> None:
        # Most are functions. Asking anything else for the members of a protocol takes 12 µs.
        """Register a tool. `given` is a tool or a function. Raise ConfigurationError if its name is taken."""
        is_tool = type(given) is FunctionTool or isinstance(given, Tool)
        self._put(given if is_tool else _as_tool(given))  # type: ignore[arg-type]  # as was just asked

    def _put(self, made: Tool) -> None:
        if made.name in self._tools:
            raise ConfigurationError(f"Two tools are named {made.name!r}. Give one of them another name.")
        self._tools[made.name] = made

    def select(self, allow: Iterable[str] | None, deny: Iterable[str] = ()) -> ToolRegistry:
        """Return the tools that `allow` names (None: all), without those of `deny`.

        Raise ConfigurationError if one is unknown.
        """
        denied = set(deny)
        for name in (*(allow or ()), *denied):
            if name not in self._tools:
                known = ", ".join(sorted(self._tools)) or "none"
                what = f"No tool is named {name!r}. Registered are: {known}."
                raise ConfigurationError(what, missing="tool", name=name)
        names = self._tools if allow is None else allow
        return self._of(self._tools[name] for name in names if name not in denied)

    def without(self, kind: type) -> ToolRegistry:
        """Return the tools that are not of a `kind`, a class."""
        return self._of(each for each in self._tools.values() if not isinstance(each, kind))

    def _of(self, tools: Iterable[Tool]) -> ToolRegistry:
        """Return a registry of tools that were checked when they came into this one."""
        chosen = ToolRegistry()
        for each in tools:
            chosen._put(each)
        return chosen

    def get(self, name: str) -> Tool | None:
        """Return the tool of a `name`, or None."""
        return self._tools.get(name)

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools


class _Threads:
    """The threads that plain functions run in. No call waits for another: behind slow ones, a quick one would time out.

    A few threads stay for the next calls, since starting one takes longer than most tools. While all of these are busy,
    a call gets a thread of its own.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._busy = 0
        self._counting = threading.Lock()  # a call begins in an event loop's thread, and ends in one of these

    def begin(self, name: str, work: Callable[[], None]) -> None:
        """Start work at once."""
        with self._counting:
            is_one_free = self._busy < _KEPT_THREADS
            self._busy += is_one_free
            if is_one_free and self._executor is None:
                from concurrent.futures import ThreadPoolExecutor

                self._executor = ThreadPoolExecutor(_KEPT_THREADS, "perdure tools")
        if not is_one_free:
            threading.Thread(target=work, name=f"perdure tool {name}").start()
            return
        assert self._executor is not None
        try:
            self._executor.submit(self._do, work)
        except BaseException:  # the interpreter is shutting down
            self._end()
            raise

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._end()

    def _end(self) -> None:
        with self._counting:
            self._busy -= 1


_KEPT_THREADS = 4
_threads = _Threads()


def _forget_threads() -> None:
    """Start with new threads in a forked child, which has none of its parent's."""
    global _threads
    _threads = _Threads()


os.register_at_fork(after_in_child=_forget_threads)


async def in_a_thread(name: str, work: Callable[[], Any]) -> Any:
    """Do work in a thread, and return its result."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # a future that runs cannot be cancelled, so its result can always be set
    context = copy_context()  # the tool sees the caller's context variables, such as the current session

    def settle() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # around a tool: whatever it raises goes to the caller that waits for it
            future.set_exception(error)

    _threads.begin(name, settle)
    return await asyncio.wrap_future(future)


def _called(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        return function(**given)
    except StopIteration as error:  # asyncio cannot carry it from a thread: the caller would wait for ever
        raise RuntimeError("the tool raised StopIteration") from error


def is_tool_name(name: str) -> bool:
    """Tell whether every provider accepts this name for a tool."""
    return _NAME.fullmatch(name) is not None


def check_tool_options(name: str, timeout: object, on_unknown: object) -> None:
    """Raise ConfigurationError if a time-out or `on_unknown` is not valid."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and (not is_number or not 0 < timeout < math.inf):  # type: ignore[operator]  # as was asked
        raise ConfigurationError(f"Tool {name}: a time-out is a number of seconds over 0, not {timeout!r}.")
    if on_unknown not in (None, *get_args(OnUnknown)):
        known = ", ".join(map(repr, get_args(OnUnknown)))
        raise ConfigurationError(f"Tool {name}: on_unknown is one of {known}, not {on_unknown!r}.")


def _as_tool(function: Callable[..., Any]) -> Tool:
    if not callable(function):
        raise ConfigurationError(f"{function!r} is not a tool: give a function, or an object with the members of Tool.")
    return FunctionTool(function)


def _arguments_of(
    name: str, function: Callable[..., Any], described: Mapping[str, str]
) -> tuple[type[msgspec.Struct], str | None, Any]:
    """Return a struct with a field for each parameter, and the name and type hint of the one that takes the context."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigurationError(f"The type hints of tool {name} cannot be read: {error}.") from None
    fields: list[Any] = []
    context_name, context_hint = None, None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigurationError(f"Tool {name}: a model calls by name, so {parameter} cannot be filled in.")
        hint = hints.get(parameter.name, Any)
        wanted = _context_in(hint)
        if wanted is not None:
            context_name, context_hint = parameter.name, wanted
            continue
        if parameter.default is None:
            hint = Optional[hint]  # noqa: UP045  # a hint may be a text or a special form, which have no `|`
        if parameter.name in described:
            hint = Annotated[hint, msgspec.Meta(description=described[parameter.name])]
        required = parameter.default is parameter.empty
        fields.append((parameter.name, hint) if required else (parameter.name, hint, _default(parameter.default)))
    # No type of a user's can have this name, with blanks in it: msgspec tells types apart by their names.
    made = msgspec.defstruct(f"arguments of {name}", fields, kw_only=True, forbid_unknown_fields=True)
    return made, context_name, context_hint


def _context_in(hint: Any) -> Any:
    """Return the ToolContext that a type hint names, alone or among others; None if it names none."""
    return next((each for each in (hint, *get_args(hint)) if ToolContext in (each, get_origin(each))), None)


def _is_needed(wanted: Any) -> bool:
    """Tell whether `ToolContext[…]` says what the context is, and does not allow None."""
    return any(each is not Any and NoneType not in (each, *get_args(each)) for each in get_args(wanted))


def _class_in(wanted: Any) -> type | None:
    """Return the class that `ToolContext[…]` names, if `isinstance` can check for it.

    It cannot for a protocol, a TypedDict or a generic. An int may be given for a float.
    """
    (named,) = get_args(wanted) or (None,)
    is_plain = isinstance(named, type) and get_origin(named) is None and named not in (Any, float, complex)
    is_structural = is_typeddict(named) or getattr(named, "_is_protocol", False)
    return named if is_plain and not is_structural else None


def _default(value: Any) -> Any:
    """Return a parameter's default for the struct. One that is not a plain value is left out of the schema."""
    is_empty = isinstance(value, list | dict | set) and not value
    is_plain = value is None or is_empty or isinstance(value, str | int | float | Enum)
    return value if is_plain else msgspec.field(default_factory=lambda: value)


def _schema_of(name: str, arguments: type[msgspec.Struct]) -> dict[str, Any]:
    hoisted: dict[str, Any] = {}
    try:
        (schema,), components = msgspec.json.schema_components([arguments], schema_hook=partial(_describe, hoisted))
    except TypeError as error:
        raise ConfigurationError(f"Tool {name} has a parameter whose type has no JSON schema: {error}.") from None
    own = components.pop(schema["$ref"].rpartition("/")[2])
    own.pop("title", None)
    defined = {**components, **hoisted}
    parts = {"$defs": defined} if defined else {}
    return {"type": "object", "properties": {}, "required": [], **own, "additionalProperties": False, **parts}


def _describe(hoisted: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the schema of a type that brings its own, as pydantic models do. Its definitions go to the root."""
    described = getattr(kind, "model_json_schema", None)
    if described is None:
        raise TypeError(f"{kind.__name__} is not supported")
    schema: dict[str, Any] = described(ref_template=f"#/$defs/{kind.__name__}.{{model}}")
    hoisted.update((f"{kind.__name__}.{name}", each) for name, each in schema.pop("$defs", {}).items())
    return schema


def _revive(kind: type, value: Any) -> Any:
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise TypeError(f"{kind.__name__} cannot be made from JSON")
    return validate(value)


_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters):\s*$")
_ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its `Args:` section, and that section's entries by name."""
    lines = (inspect.getdoc(function) or "").splitlines()
    start = next((place for place, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    described: dict[str, str] = {}
    last = None
    for line in lines[start + 1 :]:
        if not line.strip() or not line.startswith((" ", "\t")):
            break
        entry = _ENTRY.match(line)
        if entry:
            last = entry[1]
            described[last] = entry[2].strip()
        elif last is not None:
            described[last] += " " + line.strip()
    return "\n".join(lines[:start]).strip(), described


def _brief(schema: Mapping[str, Any]) -> str:
    return msgspec.json.encode(schema).decode()[:2000]
