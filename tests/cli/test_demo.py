"""The tour that `make demo` runs: it really does what it shows."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import perdure

sys.path.insert(0, str(Path(__file__).parent))

from terminal_session import TerminalSession, clean_environment, command

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENES = (
    "An agent talks",
    "Nice to meet you, Ada.",
    "It is killed",
    "ended with SIGKILL",
    "It recovers",
    "outcome is unknown",
    "It is forked",
    "It is evaluated in parallel",
    "selected",
    "It is compacted, and uncompacted",
    "uncompacted: the model is shown 18 messages of 18",
    "All of it is on record",
    "Where the two branches part",
    "What it cost",
    "chat -s",
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the directory of a tour, and its output."""
    home = tmp_path_factory.mktemp("tour")
    done = subprocess.run(
        command("tour", "here"), capture_output=True, text=True, cwd=home, env=clean_environment(home), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return home / "here", done.stdout


def test_every_part_is_shown_in_order(shown: tuple[Path, str]) -> None:
    """All scenes come one after the other; in a pipe they are plain text."""
    _, text = shown
    place = 0
    for scene in SCENES:
        place = text.find(scene, place)
        assert place >= 0, f"{scene!r} is missing, or out of order"
    assert "\x1b" not in text


def test_no_card_was_charged_twice(shown: tuple[Path, str]) -> None:
    """The ledger that the tools wrote has every charge once, and the one that was killed before its end."""
    where, _ = shown
    lines = (where / "ledger.txt").read_text().splitlines()
    assert lines == ["Ada 12 begun", "Ada 12 taken", "Ben 30 begun", "Cleo 7 begun", "Cleo 7 taken"]


def test_what_it_says_to_type_next_works(shown: tuple[Path, str]) -> None:
    """Every command that it ends with works as it is printed, on the store that it leaves."""
    where, text = shown
    typed = [line.partition("#")[0].split() for line in text.partition("Look around.")[2].splitlines()[1:]]
    (_, setting), *commands = typed
    name, _, url = setting.partition("=")
    names = ["chat", "tree", "diff", "show", "serve"]
    assert [words[1] for words in commands] == names
    env = clean_environment(where, **{name: url})
    for _, *arguments in commands[:-1]:
        done = subprocess.run(
            command(*arguments), input="What is my name?\n", capture_output=True, text=True, env=env, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "Ada" in done.stdout or arguments[0] == "diff"
    with subprocess.Popen(command("serve", "--port", "0"), stdout=subprocess.PIPE, text=True, env=env) as service:
        assert service.stdout is not None
        said = service.stdout.readline()
        service.terminate()
    assert (service.returncode, said.partition(",")[0]) == (0, "To sign in")


def test_it_leaves_a_session_and_two_branches(shown: tuple[Path, str]) -> None:
    where, _ = shown

    async def look() -> list[perdure.AgentSessionInfo]:
        async with perdure.connect(f"sqlite:///{where / 'sessions.db'}") as sessions:
            return list((await sessions.list()).all())

    found = asyncio.run(look())
    assert len(found) == 3
    assert {info.parent_id for info in found} == {None, found[-1].id}


def test_a_second_tour_in_the_same_place_is_refused(shown: tuple[Path, str]) -> None:
    where, _ = shown
    again = subprocess.run(command("tour", str(where)), capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert "already" in again.stderr


def test_it_is_drawn_in_a_terminal(tmp_path: Path) -> None:
    """In a terminal the same tour is drawn."""
    with TerminalSession(command("tour"), cwd=tmp_path, env=clean_environment(tmp_path)) as terminal:
        terminal.expect("An agent talks", "It recovers", "Where the two branches part", "chat -s")
        assert terminal.ends() == 0


SERVED = {"web_app.py", "web_and_worker.py", "dbos_workflow.py", "temporal_workflow.py"}
"""Examples that run until they are stopped, or that need an engine; each has a test of its own."""


@pytest.mark.parametrize(
    "example", sorted(path for path in EXAMPLES.glob("*.py") if path.name not in SERVED), ids=lambda path: path.stem
)
def test_the_examples_run(example: Path, tmp_path: Path) -> None:
    """Each example is a script of its own that prints something."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
