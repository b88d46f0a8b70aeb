"""What perdure's own tests stand on, for yours: contracts for a store, a clock that stands still, a store that fails.

Needs nothing but perdure; the contracts are test classes that pytest runs, and import none of it.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # so that a failing contract shows values, as an assert in a test file does
    sys.modules["pytest"].register_assert_rewrite("perdure.testing.parts", "perdure.testing.scene")

from perdure.testing.clock import FrozenClock
from perdure.testing.contract import (
    ArchiveContract,
    CheckContract,
    ChronicleContract,
    ErasureContract,
    JournalContract,
    NamesContract,
    SearchContract,
    StoreContract,
)
from perdure.testing.engine_contract import EngineContract
from perdure.testing.faults import FailingStore
from perdure.testing.scripted import Chunks, Delay, ScriptedDriver

__all__ = [
    "ArchiveContract",
    "CheckContract",
    "ChronicleContract",
    "Chunks",
    "Delay",
    "EngineContract",
    "ErasureContract",
    "FailingStore",
    "FrozenClock",
    "JournalContract",
    "NamesContract",
    "ScriptedDriver",
    "SearchContract",
    "StoreContract",
]
