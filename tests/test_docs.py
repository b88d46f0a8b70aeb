"""Every example in README.md and docs/ runs: a page's blocks in order, in one namespace, in an empty directory.

A `python` block is run, one with `title="name.py"` is written to that file, and the commands of a `console` block are
typed into a shell. Their output is compared with the page, where `…` stands for any text.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import pytest
from tests import postgres_server
from tests.model_server import model_server
from tests.server.serve_process import Serving

from perdure.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [page for page in PAGES[1:] if page.parent.name != "decisions" and page != ROOT / "docs/index.md"]
FENCE = re.compile(r"^```(?P<info>(py|console)[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL | re.IGNORECASE)
NOT_RUN = re.compile(r"^\$ perdure (.*)$", re.MULTILINE)
TITLE = re.compile(r'python title="(?P<name>[a-z_]+\.py)"')
SHOWN_FILE = re.compile(r"^--8<--\n(.+)\n--8<--$", re.MULTILINE)
PART = re.compile(r"# A part of (?P<name>examples/[a-z_]+\.py)")
ANYTHING = "…"
LOCAL_MODELS = re.compile(r"http://localhost:(11434|8000|8080|1234)\b")
"""Addresses of model servers on a reader's machine. Where a page has one, a stand-in answers."""
SERVICE, TOKEN = "http://127.0.0.1:7433", "pdr_…"
"""The address of a reader's service, and a token for it. Where a page has both, a real service answers."""
DATABASE = "postgresql://app@db.internal/agents?schema=support"
"""The address of a reader's database. Where a page has it, a real PostgreSQL answers."""


class Block(NamedTuple):
    info: str
    body: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield Block(found["info"].strip(), found["body"], text.count("\n", 0, found.start("body")))


@contextmanager
def runnable_blocks(page: Path) -> Iterator[list[Block]]:
    """Return the blocks of a page. What they ask on a reader's machine answers here, on another port."""
    text = page.read_text(encoding="utf-8")
    with ExitStack() as servers:
        real: dict[str, str] = {}
        if models := {found.group() for found in LOCAL_MODELS.finditer(text)}:
            real |= dict.fromkeys(models, servers.enter_context(model_server()))
        if f'"{SERVICE}' in text and f'"{TOKEN}"' in text:
            real[SERVICE], real[TOKEN] = servers.enter_context(service())
        if DATABASE in text:
            real[DATABASE] = postgres_server.url_of(Path.cwd())
        yield [block._replace(body=replaced(block.body, real)) for block in blocks(page)]


@contextmanager
def service() -> Iterator[tuple[str, str]]:
    """Serve the offline agent "clerk" in a directory of its own. The value is the address, and a token."""
    with TemporaryDirectory() as directory:
        server = Serving(Path(directory))
        (server.where / "clerk.md").write_text("---\nmodel: offline\n---\nBe brief.\n", encoding="utf-8")
        server.start("--agent", "clerk.md")
        try:
            with server.client("ada") as ada:
                yield server.url, ada.headers["Authorization"].removeprefix("Bearer ")
        finally:
            server.kill()


def replaced(text: str, real: Mapping[str, str]) -> str:
    for shown, there in real.items():
        text = text.replace(shown, there)
    return text


def run(page: Path, block: Block, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    source = "\n" * block.line + block.body  # so that a traceback names the page's own lines
    code = compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, namespace)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)


def type_in(block: Block, where: str) -> None:
    """Type the commands of a block into a shell, and compare their output."""
    command, expected = "", ""
    for line in [*block.body.splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                printed = printed_by(command)
                assert is_as_shown(printed, expected), f"{where}: `{command}` prints\n{printed}\nand not\n{expected}"
            command, expected = line.removeprefix("$ "), ""
        else:
            expected += f"{line}\n"


def printed_by(command: str) -> str:
    """Run a command. Its exports are there for the page's next commands, as in a reader's shell."""
    exported = Path(f"{Path.cwd()}.exported")
    exported.touch()
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    plain = {"PATH": beside, "COLUMNS": "100", "NO_COLOR": "1", "PERDURE_STORE": "sqlite:///sessions.db"}
    # A reader's pytest has few plugins. Loading those of all packages installed here takes seconds.
    plain["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    readers = {name: value for name, value in os.environ.items() if name != "CI"}  # under CI pytest cuts no lines
    done = subprocess.run(
        f"source {exported}\n{command}\nexport -p > {exported}",
        shell=True,  # the commands are from perdure's own pages
        executable="/bin/bash",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**readers, **plain},
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def is_as_shown(printed: str, expected: str) -> bool:
    """Tell whether a page shows the output. An ellipsis may replace the ends of lines, and lines."""
    pattern = re.escape(expected.rstrip()).replace(re.escape(f"\n{ANYTHING}\n"), r"\n(.*\n)*")
    pattern = pattern.replace(re.escape(ANYTHING), ".*")
    printed = "\n".join(line.rstrip() for line in printed.splitlines())
    return re.fullmatch(pattern, printed.rstrip()) is not None


def example(page: Path, block: Block, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    """Run one block, or write it as a file."""
    where = f"{page.relative_to(ROOT)}:{block.line}"
    if block.info.endswith(" {.no-run}"):
        assert block.body.startswith("# "), f"{where}: a .no-run block begins with a comment that says why"
    elif titled := TITLE.fullmatch(block.info):
        Path(titled["name"]).write_text(block.body, encoding="utf-8")
    elif block.info == "console":
        type_in(block, where)
    else:
        assert block.info == "python", f"{where}: write ```python, or ```python {{.no-run}}, not ```{block.info}"
        run(page, block, namespace, runner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples work if copied from top to bottom; a block that is not run says why."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner, runnable_blocks(page) as found:
        for block in found:
            example(page, block, namespace, runner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_site_knows_every_fence(page: Path) -> None:
    """The site shows a block as plain text if anything but a title or `{.class}` follows its language."""
    for info in re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.fullmatch(r'([a-z]+( title="[^"]+"| \{\.[a-z-]+\})?)?', info), f"{page.name}: ```{info}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_site_finds_the_files_that_a_page_shows(page: Path) -> None:
    """The site knows the mark, with the name on a line of its own: otherwise the formatter takes it for Python."""
    text = page.read_text(encoding="utf-8")
    shown = SHOWN_FILE.findall(text)
    assert len(re.findall(r"--8\s*<\s*--", text)) == 2 * len(shown)
    assert all((ROOT / name).is_file() for name in shown)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_part_of_a_program_is_in_the_program(page: Path) -> None:
    """Its lines stand there in this order, however far they are indented."""
    for block in blocks(page):
        if part := PART.match(block.body):
            rest = iter([line.strip() for line in (ROOT / part["name"]).read_text(encoding="utf-8").splitlines()])
            for line in block.body.splitlines()[1:]:
                assert line.strip() in rest, f"{page.name}:{block.line}: {line}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_opens_with_its_use(page: Path) -> None:
    """The first sentence says what a reader can do after the page."""
    opening = page.read_text(encoding="utf-8").split("\n\n", 2)[1]
    assert opening.startswith(("After this page ", "Here you can look up ")), f"{page.name} opens with: {opening[:80]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_perdure_takes_the_commands_that_are_not_run(page: Path) -> None:
    """A command that runs until it is stopped, or needs a key, has options that exist."""
    for block in blocks(page):
        for line in NOT_RUN.findall(block.body) if block.info == "console {.no-run}" else ():
            words = shlex.split(line, comments=True)
            command: click.Command = cli
            while isinstance(command, click.Group) and words:
                found = command.get_command(click.Context(command), words.pop(0))
                assert found is not None, line
                command = found
            command.make_context("perdure", words)


def test_an_export_lasts_for_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that one command exports is there for the next, and leaves no file in the page's directory."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    assert printed_by("export GREETING='two words'  # a comment") == ""
    assert printed_by("echo $GREETING") == "two words\n"
    assert [*home.iterdir()] == []


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("one\ntwo\n", "one\ntwo\n", True),
        ("one  \ntwo", "one\ntwo\n", True),
        ("took 0.31 s\n", "took … s\n", True),
        ("a\nb\nc\nd\n", "a\n…\nd\n", True),
        ("a\nd\n", "a\n…\nd\n", True),
        ("one\ntwo\n", "one\n", False),
        ("took 0.31 min\n", "took … s\n", False),
    ],
)
def test_what_a_command_prints_is_compared(printed: str, expected: str, same: bool) -> None:
    """Every line counts, except for those that an ellipsis replaces."""
    assert is_as_shown(printed, expected) is same
