"""The memory store over the port, beside the old one until all of its jobs are there."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.memory_engine import MemoryStore
from perdure.testing import ErasureContract, JournalContract, SearchContract, StoreContract


class TestNewMemoryStore(StoreContract, JournalContract, SearchContract, ErasureContract):
    """Sessions in memory."""

    def open_store(self, where: Path) -> MemoryStore:
        return MemoryStore()
