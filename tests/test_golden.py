"""Files of earlier releases load for ever, with the same content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.golden.make import CURRENT, FORGETFUL, HERE, RECORD, STORES, describe, describe_record, timers, tokens

from perdure import MemoryStore, load_session, save_session
from perdure.archive import import_sessions
from perdure.errors import VersionForgotten
from perdure.model.session import AgentSession
from perdure.protocols import Entry, Timer, said_in
from perdure.testing.samples import say, show, texts

FORMATS = sorted(path for path in HERE.glob("format-*") if path.is_dir())
RECORDS = sorted(path for path in HERE.glob("record-*") if path.is_dir())
STORED = [(path, name) for path in FORMATS for name in STORES if (path / name).exists()]
_UNSKETCHED = {"format-1", *(f"format-1{head}-schema-{number}" for head in ("", "-head-2") for number in range(2, 9))}
SKETCHED = [(path, name) for path, name in STORED if path.name not in _UNSKETCHED]
"""The stores that keep the text of an answer while it is being written."""
QUEUED = [(path, name) for path, name in SKETCHED if "-schema-9" not in path.name]
"""The stores that have timers."""
WITH_TOKENS = [(path, name) for path, name in QUEUED if "-schema-10" not in path.name]
"""The stores that have access tokens."""


def expected(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "expected.json").read_text())
    return found


def copied(directory: Path, name: str, where: Path) -> Path:
    """Return a copy to open: a store may migrate its files."""
    source = directory / name
    return Path(shutil.copytree(source, where / name) if source.is_dir() else shutil.copy(source, where / name))


def named(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def as_values(described: dict[str, Any]) -> dict[str, Any]:
    """Return a description with each document as its session, in any format."""
    for session in described["sessions"].values():
        for version in session["versions"]:
            version["document"] = AgentSession.from_dict(version["document"])
    return described


def test_the_current_format_has_golden_files() -> None:
    """A new format comes with files of its own: `python tests/golden/make.py` writes them, once."""
    assert CURRENT in [path.name for path in FORMATS]


@pytest.mark.parametrize("directory", [path for path in FORMATS if (path / "export.jsonl").exists()], ids=named)
async def test_an_export_of_any_format_is_taken_in(directory: Path) -> None:
    """Every version, header, record and inbox is the same as in its source."""
    async with MemoryStore() as store:
        await import_sessions(store, directory / "export.jsonl")
        found = as_values(json.loads(json.dumps(await describe(store))))["sessions"]
        then = as_values(expected(directory))["sessions"]
        assert found.keys() == then.keys()
        for name, session in then.items():
            assert found[name]["versions"] == session["versions"]
            assert found[name]["record"] == session["record"]
            assert [item[1:] for item in found[name]["inbox"]] == [item[1:] for item in session["inbox"]]


@pytest.mark.parametrize(("directory", "name"), STORED, ids=named)
async def test_a_store_of_any_format_loads(directory: Path, name: str, tmp_path: Path) -> None:
    """Every version, header, record and inbox is the same as when it was written."""
    opened: Callable[[Path], Any] = STORES[name]
    async with opened(copied(directory, name, tmp_path)) as store:
        assert as_values(json.loads(json.dumps(await describe(store)))) == as_values(expected(directory))


@pytest.mark.parametrize("name", [*STORES, "export.jsonl"])
async def test_a_session_that_has_forgotten_loads_and_goes_on(name: str, tmp_path: Path) -> None:
    """It has the same content as then, no damage is reported, and more can be forgotten."""
    directory = HERE / FORGETFUL
    opened: Callable[[Path], Any] = STORES.get(name, lambda path: MemoryStore())
    async with opened(copied(directory, name, tmp_path)) as store:
        if name not in STORES:
            await import_sessions(store, directory / name)
        found = as_values(json.loads(json.dumps(await describe(store))))
        assert found["sessions"] == as_values(expected(directory))["sessions"]
        assert [*await store.check()] == []
        for version in range(1, 10):
            with pytest.raises(VersionForgotten):
                await store.load("theta", version)
        for run in await store.runs("theta"):
            said = [message.text for message in await store.messages(run.log, run.start, run.stop)]
            assert f"Said by {run.loop_id}" in said
        assert [run.loop_id for run in await store.runs("theta")] == ["run-5", "run-6"]
        assert texts(await store.load("iota")) == ["First", "Asked of run-1", "Said by run-1"]
        session = await store.save(say(await store.load("theta"), "Still here"))
        assert (await store.forget("theta", before=session.version)).versions == 3
        await store.delete("iota")
        assert await store.search("run-1") == []
        assert [*await store.check()] == []


@pytest.mark.parametrize(("directory", "name"), STORED, ids=named)
async def test_a_store_of_any_format_goes_on(directory: Path, name: str, tmp_path: Path) -> None:
    """A session of an older release can be saved, and its history stays the same."""
    opened: Callable[[Path], Any] = STORES[name]
    async with opened(copied(directory, name, tmp_path)) as store:
        older = await store.load("alpha")
        newer = await store.save(say(older, "Still here"))
        assert texts(newer) == [*texts(older), "Still here"]
        assert await store.load("alpha", older.version) == older
        assert [*await store.lapsed()] == ["gamma"]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("directory", "name"), [each for each in STORED if "-head-" in each[0].name], ids=named)
async def test_blocks_of_any_format_come_off(directory: Path, name: str, tmp_path: Path) -> None:
    """Compactions of compactions are removed one by one, down to the first messages."""
    opened: Callable[[Path], Any] = STORES[name]
    async with opened(copied(directory, name, tmp_path)) as store:
        session = await store.load("epsilon")
        while any(session.state.transcript.blocks()):
            session = await store.save(show(session, session.state.transcript.uncover()))
        assert texts(session)[:4] == ["One", "Two", "Three", "Said at 0"]


@pytest.mark.parametrize(("directory", "name"), SKETCHED, ids=named)
async def test_what_was_being_said_is_read(directory: Path, name: str, tmp_path: Path) -> None:
    """The text of a killed process's answer is read, piece by piece."""
    opened: Callable[[Path], Any] = STORES[name]
    async with opened(copied(directory, name, tmp_path)) as store:
        found = await store.progress("gamma")
        assert (said_in(found.sketches), len(found.sketches), found.is_interrupted) == ("Half an answer", 2, True)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("directory", "name"), STORED, ids=named)
async def test_what_waits_in_a_store_of_any_format_is_found(directory: Path, name: str, tmp_path: Path) -> None:
    """An older store has the time of the last change. Items can be posted there, and timers set."""
    opened: Callable[[Path], Any] = STORES[name]
    async with opened(copied(directory, name, tmp_path)) as store:
        found = {each.session_id: each for each in await store.waiting()}
        gamma = await store.load("gamma")
        assert (found["gamma"].priority, found["gamma"].count) == (0, 1)
        assert found.keys() - {"kappa"} == {"gamma"}
        if "kappa" not in found:
            assert found["gamma"].since == gamma.info.updated_at.timestamp()
            assert [*await store.timers()] == []
        timer = await store.set_timer(Timer(gamma.id, "t", 5.0, Entry("queue", {"n": 1}), priority=9))
        assert await store.ring(timer)
        assert [(each.session_id, each.priority, each.count) for each in await store.waiting(1)] == [("gamma", 9, 2)]
        assert [each.since is None for each in await store.running()] == ["kappa" not in found]
        assert [problem for problem in await store.check() if problem.session_id] == []


@pytest.mark.parametrize(("directory", "name"), QUEUED, ids=named)
async def test_timers_of_any_format_are_read(directory: Path, name: str, tmp_path: Path) -> None:
    """They come with their items, and waiting items with their priority; rung and dropped timers are gone."""
    opened: Callable[[Path], Any] = STORES[name]
    async with opened(copied(directory, name, tmp_path)) as store:
        (kappa,) = [each for each in await store.waiting() if each.session_id == "kappa"]
        assert (kappa.owner, kappa.priority, kappa.count) == ("ann", 7, 3)
        kept = await store.timers("kappa")
        assert [replace(each, id=0) for each in kept] == timers(kappa.session_id)[::2]
        assert [each.name for each in await store.due(1_800_000_060.0)] == ["once", "digest"]
        assert await store.ring(kept[0])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("directory", "name"), STORED, ids=named)
async def test_tokens_of_any_format_are_read(directory: Path, name: str, tmp_path: Path) -> None:
    """An older store has none, and takes new ones. Dropped tokens are gone."""
    opened: Callable[[Path], Any] = STORES[name]
    kept = tokens()[:-1] if (directory, name) in WITH_TOKENS else []
    async with opened(copied(directory, name, tmp_path)) as store:
        assert [*await store.tokens()] == kept
        assert [await store.token(each.digest) for each in kept] == kept
        await store.add_token(tokens()[-1])
        assert [*await store.tokens()] == [*kept, tokens()[-1]]
        assert [await store.drop_token(each.id) for each in kept] == [True] * len(kept)
        assert [problem for problem in await store.check() if "token" in problem.where] == []


@pytest.mark.parametrize("directory", FORMATS, ids=named)
def test_a_document_of_any_format_loads(directory: Path) -> None:
    """`from_dict` reads the result of `to_dict`, and loses no field of it."""
    document = json.loads((directory / "session.json").read_text())
    session = AgentSession.from_dict(document)
    then = expected(directory)["sessions"]["alpha"]["versions"][session.version - 1]
    assert (texts(session), session.state.metadata) == (then["texts"], then["metadata"])
    assert session.to_dict()["from_the_future"] == {"kept": True}
    assert AgentSession.from_dict(session.to_dict()) == session


def test_the_current_form_of_a_session_record_has_a_golden_file() -> None:
    """A new form of the file comes with one of its own: `python tests/golden/make.py` writes it, once."""
    assert RECORD in [path.name for path in RECORDS]


@pytest.mark.parametrize("directory", RECORDS, ids=named)
def test_a_session_record_of_any_form_loads(directory: Path, tmp_path: Path) -> None:
    """Its loops, links, messages, turns, events and usage are the same, also after they are saved again."""
    then = json.loads((directory / "expected.txt").read_text())
    record = load_session("golden", directory)
    assert json.loads(json.dumps(describe_record(record))) == then
    save_session(record, tmp_path)
    assert load_session("golden", tmp_path) == record
