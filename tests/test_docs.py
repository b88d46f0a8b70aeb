"""Every Python block in README.md and docs/ runs: a page's blocks in order, in one namespace, in an empty directory."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>py[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL | re.IGNORECASE)


class Block(NamedTuple):
    info: str
    body: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield Block(found["info"].strip(), found["body"], text.count("\n", 0, found.start("body")))


def run(page: Path, block: Block, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    source = "\n" * block.line + block.body  # so that a traceback names the page's own lines
    code = compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, namespace)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader copies from the page, top to bottom, works; a block left out says why."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks(page):
            where = f"{page.relative_to(ROOT)}:{block.line}"
            if block.info == "python no-run":
                assert block.body.startswith("# "), f"{where}: a no-run block begins with a comment that says why"
                continue
            assert block.info == "python", f"{where}: write ```python, or ```python no-run, not ```{block.info}"
            run(page, block, namespace, runner)
