"""Draw the pictures of docs/concepts.md from the code itself: `python docs/pictures/draw.py`.

layers.svg comes from the imports of every module, send.svg from the calls that one `chat.send` makes. Neither is drawn
by hand, and a test compares both with the code.

Both leave out what would hide the shape: an import that follows from others, and the small functions on the way.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import sys
import tempfile
import threading
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import FrameType, ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "perdure"
HERE = Path(__file__).parent
_STYLE = """
  .band { fill: #f4f5f8; } .box { fill: #ffffff; stroke: #8b93a7; }
  .edge { stroke: #8b93a7; stroke-opacity: .7; fill: none; }
  text { font: 13px system-ui, sans-serif; fill: #20242e; } .small { font-size: 11px; fill: #5b6275; }
  .step { fill: #3b5bdb; } .hop { fill: #c2410c; } .path { stroke: #3b5bdb; stroke-opacity: .5; fill: none; }
  .call { font: 12px ui-monospace, monospace; paint-order: stroke; stroke: #f4f5f8; stroke-width: 4px; }
  @media (prefers-color-scheme: dark) {
    .band { fill: #1c2029; } .box { fill: #262b36; stroke: #5b6275; } .edge { stroke: #9aa3b8; }
    text { fill: #e6e8ee; } .small { fill: #9aa3b8; }
    .step { fill: #91a7ff; } .path { stroke: #91a7ff; } .hop { fill: #ffa94d; } .call { stroke: #1c2029; }
  }
"""


def _rules() -> ModuleType:
    """Load the test of the layers, which has the rules and reads imports."""
    spec = importlib.util.spec_from_file_location("layers", ROOT / "tests" / "test_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["layers"] = module
    spec.loader.exec_module(module)
    return module


class Box(NamedTuple):
    name: str
    lines: int
    x: float
    y: float
    width: float


def _svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>", ""])


def _lines_of(unit: str) -> int:
    path = PACKAGE / unit
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return sum(len(each.read_text().splitlines()) for each in files)


def layers() -> str:
    """Draw each part of the package on its level, with a line for each import that does not follow from others."""
    rules = _rules()
    levels = [sorted(unit for unit in level if _has_code(unit)) for level in rules.LEVELS]
    width, row = 980, 76
    boxes: dict[str, Box] = {}
    parts: list[str] = []
    for height, level in enumerate(reversed(levels)):
        top = 20 + height * row
        parts.append(f'<rect class="band" x="10" y="{top}" width="{width - 20}" height="{row - 14}" rx="8"/>')
        parts.append(f'<text class="small" x="22" y="{top + 36}">{len(levels) - 1 - height}</text>')
        room = (width - 70) / len(level)
        for place, unit in enumerate(level):
            boxes[unit] = Box(unit, _lines_of(unit), 46 + place * room, top + 10, room - 10)
    # Imports on one level, and the one import that points up, are named in CONTRIBUTING.md.
    imports: dict[str, set[str]] = {unit: set() for unit in boxes}
    for path in rules.FILES:
        unit = rules.unit_of(path)
        found = {each.unit for each in rules.imports(path)} & boxes.keys()
        imports.get(unit, set()).update(below for below in found if rules.HEIGHT[below] < rules.HEIGHT[unit])
    parts += [_edge(boxes[unit], boxes[below]) for unit in boxes for below in sorted(_direct(unit, imports))]
    parts += [part for box in boxes.values() for part in _box(box)]
    return _svg(width, 20 + len(levels) * row, parts)


def _direct(unit: str, imports: dict[str, set[str]]) -> set[str]:
    """Return what a part imports, except what another of its imports imports too, at whatever distance."""
    return {found for found in imports[unit] if not any(found in _below(other, imports) for other in imports[unit])}


def _below(unit: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [unit]
    while ahead:
        new = imports[ahead.pop()] - found
        ahead += new
        found.update(new)
    return found


def _has_code(unit: str) -> bool:
    """Tell whether a part is drawn: a package, or a module that does more than to give names of another a place."""
    if (PACKAGE / unit).is_dir():
        return True
    path = PACKAGE / f"{unit}.py"
    if unit in ("__init__", "__main__") or not path.is_file():
        return False
    statements = ast.parse(path.read_text()).body
    return not all(isinstance(each, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign) for each in statements)


def _edge(upper: Box, lower: Box) -> str:
    """Draw a line that is as upright as the widths of its boxes allow."""
    y1, y2 = upper.y + 42, lower.y
    x1 = _within(lower.x + lower.width / 2, upper)
    x2 = _within(x1, lower)
    return (
        f'<path class="edge" d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + 30:.0f} {x2:.0f},{y2 - 30:.0f} {x2:.0f},{y2:.0f}"/>'
    )


def _within(x: float, box: Box) -> float:
    return min(max(x, box.x + 12), box.x + box.width - 12)


def _box(box: Box) -> Iterator[str]:
    yield f'<rect class="box" x="{box.x:.0f}" y="{box.y}" width="{box.width:.0f}" height="42" rx="6"/>'
    yield f'<text x="{box.x + 10:.0f}" y="{box.y + 19}">{escape(box.name)}</text>'
    yield f'<text class="small" x="{box.x + 10:.0f}" y="{box.y + 34}">{_about(box.lines)}</text>'


def _about(lines: int) -> str:
    """Return a count that stays true after small changes: to the nearest hundred, or thousand if it is large."""
    return f"~{max(round(lines, -3 if lines > 2_000 else -2), 100):,} lines"


class Step(NamedTuple):
    """A call from one part of the package into another."""

    unit: str
    name: str
    thread: bool


_LANES = ("sessions", "runtime", "actions", "loop", "driver", "run_journal", "stores", "engine", "jobs")
# Called all the time, and not part of the way.
_PASSING = {"checks", "codec", "errors", "protocols", "model", "aio", "__init__"}
_WAITS = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR


def trace() -> list[Step]:
    """Return the calls between parts that one `chat.send` makes, in order, each the first time it is made.

    Of hundreds, these are left: calls that may wait, and those by which a job in the store's thread makes its rows.
    """
    steps: dict[Step, None] = {}
    main, is_on = threading.get_ident(), threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_back is None or not is_on.is_set():
            return
        unit, name = _place(frame)
        if not unit or unit == _place(frame.f_back)[0] or "<" in name or "._" in f".{name}":
            return
        in_thread = threading.get_ident() != main
        if name.endswith(".columns") if in_thread else frame.f_code.co_flags & _WAITS:
            steps.setdefault(Step(unit, name, in_thread))

    threading.setprofile(note)  # for the threads that the store is about to start
    sys.setprofile(note)
    try:
        asyncio.run(_send(is_on))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # which is how it is taken off
    return list(steps)


def _place(frame: FrameType) -> tuple[str, str]:
    """Return the part of the package that a frame is in, and its function; two empty texts if it is elsewhere."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return "", ""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    unit = inside[0]
    if unit == "stores" and len(inside) > 2:
        unit = inside[1] if inside[1] in ("jobs", "format") else "engine"
    if inside[:2] == ("loop", "drivers"):
        unit = "driver"
    return ("" if unit in _PASSING else unit), frame.f_code.co_qualname


async def _send(is_on: threading.Event) -> None:
    """Send twice, and note the second time: the first one imports modules."""
    import perdure

    with tempfile.TemporaryDirectory() as folder:
        async with perdure.connect(f"sqlite:///{folder}/sessions.db", model="offline") as sessions:
            chat = await sessions.open("talk")
            await chat.send("hello")
            is_on.set()
            await chat.send("hi")
            is_on.clear()


def send() -> str:
    """Draw the way of one send through the parts, from top to bottom: a column for each part, a row for each call."""
    steps = trace()
    lanes = [*(unit for unit in _LANES if any(step.unit == unit for step in steps))]
    lanes += sorted({step.unit for step in steps} - {*lanes})
    width, top, row = 980, 48, 26
    gap, height = (width - 20) / len(lanes), top + len(steps) * row
    parts = [part for place, lane in enumerate(lanes) for part in _lane(10 + place * gap, gap - 8, height, lane)]
    points = [(22 + lanes.index(step.unit) * gap, top + place * row) for place, step in enumerate(steps)]
    parts.append(f'<polyline class="path" points="{" ".join(f"{x:.0f},{y}" for x, y in points)}"/>')
    for step, (x, y) in zip(steps, points, strict=True):
        parts.append(f'<circle class="{"hop" if step.thread else "step"}" cx="{x:.0f}" cy="{y}" r="5"/>')
        is_late = x > width - 150  # its name would leave the picture
        anchor = f'x="{x - 10:.0f}" text-anchor="end"' if is_late else f'x="{x + 10:.0f}"'
        parts.append(f'<text class="call" {anchor} y="{y + 4}">{escape(step.name)}</text>')
    return _svg(width, height + 10, parts)


def _lane(x: float, width: float, height: float, name: str) -> Iterator[str]:
    yield f'<rect class="band" x="{x:.0f}" y="10" width="{width:.0f}" height="{height - 10}" rx="8"/>'
    yield f'<text class="small" x="{x + 8:.0f}" y="26">{escape(name)}</text>'


if __name__ == "__main__":
    (HERE / "layers.svg").write_text(layers())
    (HERE / "send.svg").write_text(send())
    print(*(HERE.relative_to(ROOT) / name for name in ("layers.svg", "send.svg")), sep="\n")
