"""Write the blocking face from the async one: `python tests/sessions/make_blocking.py`.

Each public verb of `Sessions`, `Chat`, `StartedRun` and `Queued` gets a twin without `await`: the same signature, the
same docstring, and one line that waits for the verb. Nobody edits the outcome, `perdure/sessions/blocking.py`.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import NamedTuple

from perdure.sessions.chat import Chat
from perdure.sessions.queueing import Queued
from perdure.sessions.sessions import Sessions
from perdure.sessions.started_run import StartedRun

WRITTEN = Path(__file__).parents[2] / "src" / "perdure" / "sessions" / "blocking.py"
TWINS: dict[type, tuple[str, str]] = {
    Sessions: ("BlockingSessions(AwaitedSessions)", "`Sessions` whose verbs are not awaited. Use them with `with`."),
    Chat: ("BlockingChat(Awaited[Chat])", "A `Chat` whose verbs are not awaited."),
    StartedRun: ("BlockingRun(Awaited[StartedRun[T]], Generic[T])", "A `StartedRun` whose verbs are not awaited."),
    Queued: ("BlockingQueued(Awaited[Queued])", "A `Queued` whose verbs are not awaited."),
}
TWIN_OF = {cls.__name__: head.partition("(")[0] for cls, (head, _) in TWINS.items()}
OWN = {
    Sessions: """    def __enter__(self) -> BlockingSessions:
        # By name: Jedi, which completes names in notebooks, takes the base class for what a Self in it stands for.
        self._open()
        return self
"""
}
"""The methods of twins that are not of the async class."""
SHARED = "Parameters that several verbs have:"
"""The sentence that ends the paragraph before the list of these in a docstring."""
LEFT_OUT = {"leave"}
"""The verbs that belong to the connection."""
HEAD = '''"""The verbs of `Sessions` and `Chat` without `await`: a thread with an event loop awaits them.

Written by tests/sessions/make_blocking.py. Change the async verbs, and run that.
"""
'''
OWN_IMPORTS = """
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from perdure.sessions.awaited import Awaited, AwaitedSessions
from perdure.sessions.chat import Chat
from perdure.sessions.queueing import Queued
from perdure.sessions.started_run import StartedRun
"""


class Verb(NamedTuple):
    module: ModuleType
    overloads: list[ast.FunctionDef | ast.AsyncFunctionDef]
    definition: ast.FunctionDef | ast.AsyncFunctionDef


class Fact(NamedTuple):
    """An attribute that a constructor takes over from a parameter of the same name."""

    module: ModuleType
    name: str
    type: ast.expr
    docstring: str | None


def written() -> str:
    """Return the text of the module, laid out."""
    classes, needed = [], Needed()
    for cls, (head, about) in TWINS.items():
        members = [OWN.get(cls, ""), *(_member(each, needed) for each in _members(cls))]
        classes.append(f"class {head}:\n{_about(cls, about)}\n" + "\n".join(members))
    parts = [HEAD, "from __future__ import annotations", OWN_IMPORTS, needed.imports()]
    return _laid_out("\n".join([*parts, 'T = TypeVar("T")', *classes]))


def _about(cls: type, about: str) -> str:
    """Return the docstring of a twin, with the parameters that the async class explains for all of its verbs."""
    paragraphs = (inspect.getdoc(cls) or "").split("\n\n")
    start = next((place for place, each in enumerate(paragraphs) if each.endswith(SHARED)), len(paragraphs))
    text = "\n\n".join([about, *paragraphs[start:]])
    return indent(f'"""{text}"""' if start == len(paragraphs) else f'"""{text}\n"""', "    ") + "\n"


def _members(cls: type) -> Iterator[Verb | Fact]:
    seen = set(LEFT_OUT)
    for base in cls.__mro__:
        module = sys.modules[base.__module__]
        if not module.__name__.startswith("perdure."):
            continue
        overloads: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        for node in _definition_of(base).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name == "__init__":
                yield from (fact for fact in _facts(node, module) if fact.name not in seen)
            if node.name.startswith("_") or node.name in seen:
                continue
            if any(ast.unparse(each) == "overload" for each in node.decorator_list):
                overloads.append(node)
                continue
            yield Verb(module, overloads, node)
            overloads = []
            seen.add(node.name)


def _definition_of(cls: type) -> ast.ClassDef:
    tree = _tree(sys.modules[cls.__module__])
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _facts(init: ast.FunctionDef | ast.AsyncFunctionDef, module: ModuleType) -> Iterator[Fact]:
    types = {arg.arg: arg.annotation for arg in (*init.args.args, *init.args.kwonlyargs)}
    for node, following in zip(init.body, [*init.body[1:], None], strict=True):
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Name(id=value)) if name == value:
                kind = types[name]
                assert kind is not None
                yield Fact(module, name, kind, _text_in(following))


def _text_in(node: ast.stmt | None) -> str | None:
    match node:
        case ast.Expr(value=ast.Constant(value=str() as text)):
            return text
    return None


def _member(member: Verb | Fact, needed: Needed) -> str:
    return _twin_of_fact(member, needed) if isinstance(member, Fact) else _twin_of_verb(member, needed)


def _twin_of_fact(fact: Fact, needed: Needed) -> str:
    needed.for_types(fact.module, fact.type)
    body = [] if fact.docstring is None else [f'"""{fact.docstring}"""']
    return _lines(
        "@property", f"def {fact.name}(self) -> {_twin(fact.type)}:", [*body, f"return self._target.{fact.name}"]
    )


def _twin_of_verb(verb: Verb, needed: Needed) -> str:
    for each in (*verb.overloads, verb.definition):
        needed.for_signature(verb.module, each)
    if verb.overloads:
        needed.names["overload"] = "from typing import overload"
    overloads = [_lines("@overload", f"{_signature(each)}: ...", []) for each in verb.overloads]
    node = verb.definition
    is_property = any(ast.unparse(each) == "property" for each in node.decorator_list)
    docstring = _docstring(verb)
    body = ([docstring] if docstring else []) + _body(node, is_property)
    return "\n".join([*overloads, _lines("@property" if is_property else "", f"{_signature(node)}:", body)])


def _docstring(verb: Verb) -> str | None:
    """Return the docstring as it stands in the source."""
    if ast.get_docstring(verb.definition) is None:
        return None
    return ast.get_source_segment(inspect.getsource(verb.module), verb.definition.body[0])


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef, is_property: bool) -> list[str]:
    assert node.returns is not None
    returned = ast.unparse(node.returns)
    called = f"self._target.{node.name}" + ("" if is_property else f"({_passed_on(node.args)})")
    if returned.startswith("AsyncIterator["):
        return [f"return self._iterate({called})"]
    is_awaited = isinstance(node, ast.AsyncFunctionDef)
    outcome = f"self._wait({called})" if is_awaited else called
    twin = TWIN_OF.get(returned.partition("[")[0])
    checked = [] if is_awaited or is_property else ["self._running()"]
    return [*checked, f"return {outcome}" if twin is None else f"return {twin}({outcome}, self._loop)"]


def _passed_on(args: ast.arguments) -> str:
    assert not args.posonlyargs
    given = [_given(arg) for arg in args.args[1:]]
    given += [f"*{args.vararg.arg}"] if args.vararg else []
    given += [f"{arg.arg}={_given(arg)}" for arg in args.kwonlyargs]
    given += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return ", ".join(given)


def _given(arg: ast.arg) -> str:
    """Return a parameter, or its twin: a verb that takes a `Chat` needs a blocking one."""
    assert arg.annotation is not None
    names = {each.id for each in ast.walk(arg.annotation) if isinstance(each, ast.Name)}
    twin = next((TWIN_OF[name] for name in sorted(names & TWIN_OF.keys())), None)
    return arg.arg if twin is None else f"{arg.arg}._target if isinstance({arg.arg}, {twin}) else {arg.arg}"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    assert node.returns is not None
    return f"def {node.name}({_twin(node.args)}) -> {_twin(node.returns)}"


def _twin(node: ast.expr | ast.arguments) -> str:
    """Return the source of a type or of parameters, with twins in place of the async classes."""
    return ast.unparse(_Twins().visit(deepcopy(node)))


class _Twins(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Name:
        plain = {"AsyncIterator": "Iterator", **TWIN_OF}
        return ast.Name(plain.get(node.id, node.id), node.ctx)


def _lines(decorator: str, head: str, body: list[str]) -> str:
    lines = [decorator] if decorator else []
    return "".join(f"    {line}\n" for line in (*lines, head, *(f"    {line}" for line in body)))


class Needed:
    """The imports that signatures need, by the name that each one brings."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.types: dict[str, str] = {}

    def for_signature(self, module: ModuleType, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        assert node.returns is not None
        args = node.args
        every = [*args.args, *args.kwonlyargs, *(each for each in (args.vararg, args.kwarg) if each is not None)]
        self.for_types(module, node.returns, *(arg.annotation for arg in every if arg.annotation is not None))
        for default in (*args.defaults, *args.kw_defaults):
            if default is not None:
                self.names |= _imports_of(module, default)

    def for_types(self, module: ModuleType, *types: ast.expr) -> None:
        for each in types:
            self.types |= _imports_of(module, each)

    def imports(self) -> str:
        types = "".join(f"    {line}\n" for name, line in self.types.items() if name not in self.names)
        return "\n".join([*self.names.values(), f"\nif TYPE_CHECKING:\n{types}"])


def _imports_of(module: ModuleType, node: ast.expr) -> dict[str, str]:
    known = _importable(module)
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    plain = {name for name in names if hasattr(builtins, name) or name in {"T", "Any", *TWIN_OF}}
    found = {name: known[name] for name in sorted(names - plain)}
    if found.pop("AsyncIterator", None):
        found["Iterator"] = "from collections.abc import Iterator"
    return found


@cache
def _importable(module: ModuleType) -> dict[str, str]:
    """Return how to import each name that a module's own annotations may use."""
    found: dict[str, str] = {}
    for node in ast.walk(_tree(module)):
        match node:
            case ast.ImportFrom(module=source, names=names):
                found |= {each.name: f"from {source} import {each.name}" for each in names}
            case ast.Import(names=names):
                found |= {each.name: f"import {each.name}" for each in names}
    for statement in _tree(module).body:
        match statement:
            case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = f"from {module.__name__} import {name}"
    return found


def _laid_out(source: str) -> str:
    for command in (["check", "--fix-only", "--select", "I,F401"], ["format"]):
        given = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(WRITTEN), "-"]
        source = subprocess.run(given, input=source, capture_output=True, text=True, check=True).stdout
    return source


if __name__ == "__main__":
    WRITTEN.write_text(written(), encoding="utf-8")
