"""The engine of `examples/own_engine.py`: the contract, and its files after a cut or damage."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from perdure import CorruptRecord
from perdure.stores.engine import Engine
from perdure.stores.store import Store
from perdure.testing import EngineContract
from perdure.testing.samples import new_session

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"
spec = importlib.util.spec_from_file_location("own_engine", EXAMPLE)
assert spec is not None
assert spec.loader is not None
own_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_engine)


@pytest.mark.sample(4)
class TestOwnEngine(EngineContract):
    shared = True

    def open_engine(self, where: Path) -> Engine:
        return own_engine.FrameEngine(where / "sessions")


async def talk(path: Path, *names: str) -> list[str]:
    """Create a session of each name, and return the names of all sessions that can be loaded."""
    async with Store(own_engine.FrameEngine(path)) as store:
        for name in names:
            await store.create(new_session("Hello", id=name))
        return sorted([session.id for info in await store.list() if (session := await store.load(info.id))])


@pytest.mark.parametrize("left", [1, 11, 12, 13, -1], ids=lambda left: f"{left} bytes")
async def test_a_torn_last_frame_is_dropped(tmp_path: Path, left: int) -> None:
    """All commits before it are kept, and the next one is written in its place."""
    path = tmp_path / "sessions"
    await talk(path, "one")
    before = path.read_bytes()
    await talk(path, "two")
    frame = path.read_bytes()[len(before) :]
    path.write_bytes(before + frame[:left])
    assert await talk(path) == ["one"]
    assert await talk(path, "three") == ["one", "three"]
    assert await talk(path) == ["one", "three"]


@pytest.mark.parametrize("tail", [bytes(5), bytes(4096)], ids=["few", "many"])
async def test_room_that_was_never_written_is_a_torn_frame(tmp_path: Path, tail: bytes) -> None:
    """A power cut may leave a longer file with zeros at its end."""
    path = tmp_path / "sessions"
    await talk(path, "one")
    path.write_bytes(path.read_bytes() + tail)
    assert await talk(path, "two") == ["one", "two"]
    assert await talk(path) == ["one", "two"]


@pytest.mark.parametrize("at", [0, 3, 4, 8, 12, 40])
async def test_damage_before_the_last_frame_is_no_torn_frame(tmp_path: Path, at: int) -> None:
    """Nothing behind the damage is silently dropped: the store is not opened, and the file is left unchanged."""
    path = tmp_path / "sessions"
    await talk(path, "one")
    start = len(path.read_bytes())
    await talk(path, "two", "three")
    data = bytearray(path.read_bytes())
    data[start + at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord):
        await talk(path)
    assert path.read_bytes() == data
