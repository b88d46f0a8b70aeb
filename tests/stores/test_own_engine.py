"""The engine of `examples/own_engine.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from perdure.stores.engine import Engine
from perdure.testing import EngineContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine.py"
spec = importlib.util.spec_from_file_location("own_engine", EXAMPLE)
assert spec is not None
assert spec.loader is not None
own_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own_engine)


class TestOwnEngine(EngineContract):
    shared = True

    def open_engine(self, where: Path) -> Engine:
        return own_engine.FrameEngine(where / "sessions")
