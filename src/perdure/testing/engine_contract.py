"""The promises of an engine, as a test class. Apply it to yours in three lines:

    class TestMyEngine(EngineContract):
        def open_engine(self, where):
            return MyEngine(where / "sessions")

It tries every statement of `perdure.stores.engine`, then everything that a store over the engine promises. As for a
store, set `shared = True` if several processes may open the tables there at once.
"""

from __future__ import annotations

from pathlib import Path

from perdure.stores.engine import IndexedEngine
from perdure.stores.store import IndexedStore, Store
from perdure.testing.contract import (
    ArchiveContract,
    AttachmentsContract,
    BulkErasureContract,
    CheckContract,
    ChronicleContract,
    ErasureContract,
    FindContract,
    ForgetContract,
    HeadsContract,
    JournalContract,
    NamesContract,
    PreviewsContract,
    QueueContract,
    RetentionContract,
    SaveAllContract,
    SearchContract,
    SketchContract,
    StoreContract,
    TokenContract,
    VersionsContract,
)
from perdure.testing.parts.damages import Damages
from perdure.testing.parts.statements import Reading, Transactions, Writing


class EngineContract(
    Reading,
    Writing,
    Transactions,
    Damages,
    StoreContract,
    JournalContract,
    SearchContract,
    ErasureContract,
    ForgetContract,
    RetentionContract,
    ArchiveContract,
    AttachmentsContract,
    BulkErasureContract,
    CheckContract,
    ChronicleContract,
    NamesContract,
    PreviewsContract,
    FindContract,
    HeadsContract,
    SaveAllContract,
    SketchContract,
    QueueContract,
    TokenContract,
    VersionsContract,
):
    """The contract of `perdure.stores.engine.Engine`, and of a store over it."""

    def open_store(self, where: Path) -> Store:
        engine = self.open_engine(where)
        return IndexedStore(engine) if isinstance(engine, IndexedEngine) else Store(engine)
