"""The memory store over the port, beside the old one until all engines are there."""

from __future__ import annotations

from pathlib import Path

from tests.stores.test_contract import EveryContract

from perdure.stores.memory_engine import MemoryStore


class TestNewMemoryStore(EveryContract):
    """Sessions in memory."""

    def open_store(self, where: Path) -> MemoryStore:
        return MemoryStore()
