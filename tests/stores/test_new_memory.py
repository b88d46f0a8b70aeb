"""The memory store over the port, beside the old one until all engines are there."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.memory_engine import MemoryEngine
from perdure.testing import EngineContract


class TestMemoryEngine(EngineContract):
    """The tables in memory, and every verb of a store over them."""

    def open_engine(self, where: Path) -> MemoryEngine:
        return MemoryEngine()
