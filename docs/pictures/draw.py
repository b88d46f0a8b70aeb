"""Draw the pictures of docs/concepts.md from the code itself: `python docs/pictures/draw.py`.

layers.svg comes from the imports of every module, send.svg from the calls that one `chat.send` makes. Neither is drawn
by hand, and a test compares both with the code.
"""

from __future__ import annotations

import asyncio
import importlib.util
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
  .edge { stroke: #8b93a7; stroke-opacity: .28; fill: none; }
  text { font: 13px system-ui, sans-serif; fill: #20242e; } .small { font-size: 11px; fill: #5b6275; }
  .step { fill: #3b5bdb; } .hop { fill: #c2410c; } .path { stroke: #3b5bdb; stroke-opacity: .5; fill: none; }
  .number { font-size: 9px; fill: #ffffff; text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    .band { fill: #1c2029; } .box { fill: #262b36; stroke: #5b6275; } .edge { stroke: #9aa3b8; }
    text { fill: #e6e8ee; } .small { fill: #9aa3b8; }
    .step { fill: #91a7ff; } .path { stroke: #91a7ff; } .hop { fill: #ffa94d; }
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
    """Draw each part of the package on its level, with a line for each import between parts."""
    rules = _rules()
    levels = [sorted(unit for unit in level if _exists(unit)) for level in rules.LEVELS]
    levels = [level for level in levels if level]
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
    edges = sorted({(rules.unit_of(path), found.unit) for path in rules.FILES for found in rules.imports(path)})
    for importer, imported in edges:
        if importer != imported and {importer, imported} <= boxes.keys():
            parts.append(_edge(boxes[importer], boxes[imported]))
    parts += [part for box in boxes.values() for part in _box(box)]
    return _svg(width, 20 + len(levels) * row, parts)


def _exists(unit: str) -> bool:
    return unit not in ("__init__", "__main__") and ((PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").is_file())


def _edge(upper: Box, lower: Box) -> str:
    x1, y1, x2, y2 = upper.x + upper.width / 2, upper.y + 42, lower.x + lower.width / 2, lower.y
    return (
        f'<path class="edge" d="M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + 40:.0f} {x2:.0f},{y2 - 40:.0f} {x2:.0f},{y2:.0f}"/>'
    )


def _box(box: Box) -> Iterator[str]:
    yield f'<rect class="box" x="{box.x:.0f}" y="{box.y}" width="{box.width:.0f}" height="42" rx="6"/>'
    yield f'<text x="{box.x + 10:.0f}" y="{box.y + 19}">{escape(box.name)}</text>'
    yield f'<text class="small" x="{box.x + 10:.0f}" y="{box.y + 34}">{_about(box.lines)}</text>'


def _about(lines: int) -> str:
    """Return a count that stays true after small changes: to the nearest hundred, or thousand if it is large."""
    return f"~{round(lines, -3 if lines > 2_000 else -2):,} lines"


_LANE = 38


class Step(NamedTuple):
    """A call from one part of the package into another."""

    unit: str
    name: str
    thread: bool


_LANES = ("sessions", "runtime", "actions", "loop", "run_journal", "stores", "jobs", "format", "engine")
# Called all the time, and not part of the way.
_PASSING = {"checks", "codec", "errors", "protocols", "model", "aio", "__init__"}


def trace() -> list[Step]:
    """Return the calls between parts that one `chat.send` makes, in order, each the first time it is made."""
    steps: dict[Step, None] = {}
    main, is_on = threading.get_ident(), threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_back is None or not is_on.is_set():
            return
        unit, name = _place(frame)
        if unit and unit != _place(frame.f_back)[0] and "<" not in name and "._" not in f".{name}":
            steps.setdefault(Step(unit, name, threading.get_ident() != main))

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
    """Draw the way of one send through the parts, from left to right, a lane for each part; steps are named below."""
    steps = trace()
    lanes = [*(unit for unit in _LANES if any(step.unit == unit for step in steps))]
    lanes += sorted({step.unit for step in steps} - {*lanes})
    row, width, columns = 46, 1180, 4
    parts = [part for place, lane in enumerate(lanes) for part in _lane(14 + place * row, width, lane)]
    gap = (width - 150) / max(len(steps) - 1, 1)
    points = [(125 + place * gap, 14 + lanes.index(step.unit) * row + 19) for place, step in enumerate(steps)]
    parts.append(f'<polyline class="path" points="{" ".join(f"{x:.0f},{y}" for x, y in points)}"/>')
    for number, (step, (x, y)) in enumerate(zip(steps, points, strict=True), 1):
        parts.append(f'<circle class="{_kind(step)}" cx="{x:.0f}" cy="{y}" r="9"/>')
        parts.append(f'<text class="number" x="{x:.0f}" y="{y + 3}">{number}</text>')
    top, rows = 14 + len(lanes) * row + 16, -(-len(steps) // columns)
    for at, step in enumerate(steps):
        x, y = 20 + at // rows * (width - 30) / columns, top + at % rows * 17
        parts.append(
            f'<text class="small" x="{x:.0f}" y="{y}">{at + 1}  {escape(step.unit)}: {escape(step.name)}</text>'
        )
    return _svg(width, top + rows * 17, parts)


def _kind(step: Step) -> str:
    return "hop" if step.thread else "step"


def _lane(top: int, width: int, name: str) -> Iterator[str]:
    yield f'<rect class="band" x="10" y="{top}" width="{width - 20}" height="{_LANE}" rx="8"/>'
    yield f'<text x="20" y="{top + 23}">{escape(name)}</text>'


if __name__ == "__main__":
    (HERE / "layers.svg").write_text(layers())
    (HERE / "send.svg").write_text(send())
    print(*(HERE.relative_to(ROOT) / name for name in ("layers.svg", "send.svg")), sep="\n")
