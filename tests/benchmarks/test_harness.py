"""The benchmarks' measurements and their command's report, with benchmarks of no cost in place of the real ones."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.bars import BARS, Bar
from benchmarks.harness import Run, interleaved, rate

from benchmarks import __main__ as command
from benchmarks import bench_bounded, bench_stalls, setting
from perdure import SessionRuntime, SqliteStore

BARS_OF_THE_TEST = (Bar("one.a", "a", "b", 1), Bar("one.b", "b", "c", 1), Bar("two.a", "c", "d", 1))


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch):
    """Topics that the command measures, by name; a test fills them in."""
    found: dict[str, object] = {}
    monkeypatch.setattr(command, "BARS", BARS_OF_THE_TEST)
    monkeypatch.setattr(command, "TOPICS", ("one", "two"))
    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(measure=found[name.rpartition("_")[2]]))
    return found


def reports(**values: float):
    async def measure(run: Run) -> None:
        for key, value in values.items():
            run.report(key.replace("_", "."), value)

    return measure


def test_every_figure_has_a_benchmark_and_a_bound_that_its_aim_is_inside_of() -> None:
    """Keys are unique, a topic is a module, and every aim meets its bound."""
    assert len({bar.key for bar in BARS}) == len(BARS)
    for bar in BARS:
        assert find_spec(f"benchmarks.bench_{bar.topic}"), bar.key
        assert bar.aim is None or bar.is_met_by(bar.aim), bar.key


async def test_every_side_is_called_once_a_round_and_each_begins_in_turn() -> None:
    """No side always comes after another."""
    calls: list[str] = []

    async def one() -> None:
        calls.append("one")

    async def two() -> None:
        calls.append("two")

    assert len(await interleaved(one, two, rounds=3, warm_up=1)) == 2
    assert calls == ["one", "two", "two", "one", "one", "two", "two", "one"]


async def test_a_rate_counts_the_work_of_all_tasks() -> None:
    """Every task does its own pieces."""
    done: list[int] = []

    async def work(number: int) -> None:
        done.append(number)
        await asyncio.sleep(0)

    found = await rate(work, tasks=3, seconds=0.01)
    assert set(done) == {0, 1, 2}
    assert found.a_second > 0
    assert found.cpu >= 0


async def test_a_ticker_notes_how_long_the_loop_stood_still() -> None:
    """It notes at least the time that the loop was blocked."""
    async with bench_stalls.Ticker() as ticker:
        time.sleep(0.05)  # noqa: ASYNC251  # what is measured is just that
    assert ticker.longest >= 0.045
    assert ticker.late >= 1


def test_a_turn_has_a_tool_call_and_its_result() -> None:
    """It is four messages of 2.5 KB, different from those of another turn."""
    question, call, result, answer = setting.turn()
    assert [each.role for each in (question, call, result, answer)] == ["user", "assistant", "tool", "assistant"]
    assert [each.id for each in call.tool_calls] == [each.call_id for each in result.tool_results]
    assert 2_400 < setting.json_size([question, call, result, answer]) < 2_800
    assert setting.turn()[0].text != question.text


async def test_the_pages_of_the_log_are_those_in_the_file(tmp_path: Path) -> None:
    """The log's index agrees with the log: a header, then frames of a page each."""
    path = tmp_path / "sessions.db"
    async with SqliteStore(path) as store:
        saver = setting.Saver(store, await SessionRuntime(store).create(setting.AGENT))
        before = setting.wal_frames(path)
        await saver()
        frames = setting.wal_frames(path)
        size = size_of(Path(f"{path}-wal"))
    assert frames - before >= 5
    assert size >= 32 + frames * (4096 + 24)


def size_of(path: Path) -> int:
    return path.stat().st_size


async def test_without_the_other_library_its_figures_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are never met."""
    monkeypatch.setitem(sys.modules, "agents", None)
    run = Run()
    await bench_bounded.measure(run)
    assert {key: reading.value for key, reading in run.readings.items()} == {"bounded.warm": None, "bounded.cold": None}
    assert "OpenAI Agents cannot be imported" in run.readings["bounded.warm"].detail


def test_a_missed_figure_fails_only_a_strict_run(topics, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says missed either way."""
    topics["one"], topics["two"] = reports(one_a=2, one_b=1), reports(two_a=1)
    assert command.main([]) == 0
    assert "2 met, 1 missed, 0 not measured" in capsys.readouterr().out
    assert command.main(["--strict"]) == 1
    topics["one"] = reports(one_a=1, one_b=1)
    assert command.main(["--strict"]) == 0


def test_a_benchmark_that_fails_leaves_its_figures_not_measured(topics, capsys: pytest.CaptureFixture[str]) -> None:
    """Its earlier readings count, the other topics are measured, and a strict run fails."""

    async def broken(run: Run) -> None:
        run.report("one.a", 1)
        raise OSError("no disk")

    topics["one"], topics["two"] = broken, reports(two_a=1)
    assert command.main(["--strict"]) == 1
    out = capsys.readouterr().out
    assert "2 met, 0 missed, 1 not measured" in out
    assert "OSError: no disk" in out


def test_one_topic_can_be_measured_alone_and_written_as_json(topics, tmp_path: Path, capsys) -> None:
    """The file of one run is shown beside the next, and can replace a run."""
    file = tmp_path / "figures.json"
    topics["two"] = reports(two_a=0.5)
    assert command.main(["two", "--json", str(file)]) == 0
    assert [each["key"] for each in json.loads(file.read_text())["figures"]] == ["two.a"]
    topics["two"] = reports(two_a=0.25)
    assert command.main(["two", "--before", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split()[1:3] == ["0.25×", "0.50×"]
    topics.clear()
    assert command.main(["two", "--reuse", str(file), "--strict"]) == 0


def test_an_unknown_topic_is_refused_with_those_that_there_are(topics, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before anything is measured."""
    with pytest.raises(SystemExit):
        command.main(["three"])
    assert "no such topic: three. There are: one, two" in capsys.readouterr().err
