"""Sums in plain text: found, and worked out on numbers alone. Nothing is ever passed to `eval`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from perdure.loop.drivers.offline_text import LONGEST, Number, without_thousands

_LONGEST_SUM = 200
_LARGEST_DIGITS = 100

_INFIX = (
    (" plus ", " + "),
    (" added to ", " + "),
    (" minus ", " - "),
    (" times ", " * "),
    (" multiplied by ", " * "),
    (" divided by ", " / "),
    (" to the power of ", " ** "),
    (" modulo ", " % "),
    (" mod ", " % "),
    (" squared", " ** 2"),
    (" cubed", " ** 3"),
    (" x ", " * "),
    ("×", "*"),
    ("÷", "/"),
    ("−", "-"),
    ("^", "**"),
)
_NUMBER = r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?"
_BETWEEN = r"(?:\s{0,4},\s{0,4}(?:and\s{1,4})?|\s{1,4}(?:and|to|by|from|with)\s{1,4})"
_PREFIX = re.compile(
    r"\b(add|sum|total|subtract|take|difference|multiply|product|divide|quotient)"
    r"(?:\s{1,4}(?:up|the|numbers|of|between)){0,3}"
    rf"\s{{1,4}}({_NUMBER}(?:{_BETWEEN}{_NUMBER}){{1,50}})(?![\w.]*\w)"
)
_VERBS = {"add": "+", "sum": "+", "total": "+", "subtract": "-", "take": "-", "difference": "-"} | {
    "multiply": "*",
    "product": "*",
    "divide": "/",
    "quotient": "/",
}
_PERCENT = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s?(?:%|percent) of (?=[0-9])")
_LEADING_ZEROS = re.compile(r"(?<![0-9.])0+(?=[0-9])")
_RUN = re.compile(r"[-+(0-9.][-+*/%()0-9. ]*")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}(-[0-9]{2})?|[0-9]{1,2}/[0-9]{1,2}/[0-9]{2,4}")
_ASKED = re.compile(
    r"^\s*(?:please\s+)?(?:what is|what's|what’s|how much is|calculate|compute|evaluate|solve|work out)\s"
)
_ASKING = re.compile(r"\b(?:what|how much|calculate|compute|evaluate|solve|work out|sum|result)\b|\?")
_CLEAR = re.compile(r"\s[-+/%]\s|[+*]")


class Sum(NamedTuple):
    """A sum that was asked for. `operator` is set where it is one operator between plain numbers."""

    expression: str
    tree: ast.expr
    operator: str | None
    operands: tuple[Number, ...]

    def value(self) -> Number:
        """The result; ArithmeticError where there is none, or none of a sensible size."""
        return _evaluate(self.tree)


def read_sum(text: str) -> Sum | None:
    """The sum that a text asks for, if it asks for one."""
    lowered = without_thousands(text[:LONGEST].lower())
    said = _PREFIX.search(lowered)
    if said:
        return _parse(_spelled_out(said[1], said[2]))
    lowered = _PERCENT.sub(r"\1 / 100 * ", lowered)
    for words, symbol in _INFIX:
        lowered = lowered.replace(words, symbol)
    return _find(_ASKED.sub("", lowered).strip(" ?=.!\n"), is_asked=bool(_ASKING.search(lowered)))


def written(value: Number) -> str:
    """A number as people write it."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _find(text: str, *, is_asked: bool) -> Sum | None:
    for run in _RUN.findall(text):
        found = run.strip()
        is_whole = found == text and not _DATE.fullmatch(found)
        if is_whole or (is_asked and _CLEAR.search(found)):
            read = _parse(found.rstrip(" +-*/%(.")) or _parse(found.strip(" +*/%.()"))
            if read is not None:
                return read
    return None


def _spelled_out(verb: str, listed: str) -> str:
    numbers = re.findall(_NUMBER, listed)
    if "from" in listed and _VERBS[verb] == "-":
        numbers.reverse()
    return f" {_VERBS[verb]} ".join(numbers)


def _parse(expression: str) -> Sum | None:
    if len(expression) > _LONGEST_SUM:
        return None
    try:
        tree = ast.parse(_LEADING_ZEROS.sub("", expression), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.BinOp) or not all(map(_is_allowed, ast.walk(tree))):
        return None
    symbol = _OPERATORS[type(tree.op)][0]
    operands = _operands(tree, type(tree.op))
    return Sum(expression, tree, symbol if operands else None, operands)


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.BinOp):
        return type(node.op) in _OPERATORS
    return isinstance(node, ast.UnaryOp | ast.USub | ast.UAdd | ast.operator)


def _operands(tree: ast.expr, joined_by: type[ast.operator]) -> tuple[Number, ...]:
    """The numbers of a chain such as 1 + 2 + 3; none where it is anything else."""
    match tree:
        case ast.Constant(value=int() | float() as value):
            return (value,)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return tuple(-number for number in _operands(tree.operand, joined_by))
        case ast.BinOp(op=op, right=ast.Constant() | ast.UnaryOp()) if type(op) is joined_by:
            left, right = _operands(tree.left, joined_by), _operands(tree.right, joined_by)
            return (*left, *right) if left and right else ()
    return ()


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand):
            value = _evaluate(operand)
            return -value if isinstance(op, ast.USub) else value
        case ast.BinOp(left=left, op=op, right=right):
            return _bounded(_OPERATORS[type(op)][1](_evaluate(left), _evaluate(right)))
    raise ArithmeticError("that is not a sum")


def _bounded(value: Number) -> Number:
    if isinstance(value, complex) or not abs(value) < 10**_LARGEST_DIGITS:
        raise OverflowError("the result is too large for me, or not a real number")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if base and abs(exponent) * math.log10(abs(base)) > _LARGEST_DIGITS:
        raise OverflowError("that power is too large for me")
    result: Number = base**exponent
    return result


_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Number, Number], Number]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", _power),
}
