"""The tools of perdure's own tests, for use in yours: contracts for a store, a frozen clock, a store that fails.

Each name is imported when it is first used, so a script that needs a `ScriptedDriver` imports no contract.
Nothing but perdure is needed. The contracts are test classes that pytest runs, and do not import pytest.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if "pytest" in sys.modules:  # so that a failing contract shows values, as an assert in a test file does
    sys.modules["pytest"].register_assert_rewrite("perdure.testing.parts", "perdure.testing.scene")

# For type checkers. At run time `__getattr__` imports the name that is asked for.
if TYPE_CHECKING:
    from perdure.testing.clock import FrozenClock
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
        HistoryContract,
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
    from perdure.testing.disk_faults import DiskFaultContract
    from perdure.testing.dispatcher_contract import DispatcherContract
    from perdure.testing.engine_contract import EngineContract
    from perdure.testing.faults import FailingStore
    from perdure.testing.power_cuts import PowerCutContract
    from perdure.testing.rot.contract import RotContract
    from perdure.testing.scripted import Chunks, Delay, ScriptedDriver

_HOMES = {
    "clock": "FrozenClock",
    "contract": "ArchiveContract AttachmentsContract BulkErasureContract CheckContract ChronicleContract "
    "ErasureContract FindContract ForgetContract HeadsContract HistoryContract JournalContract NamesContract "
    "PreviewsContract QueueContract RetentionContract SaveAllContract SearchContract SketchContract StoreContract "
    "TokenContract VersionsContract",
    "disk_faults": "DiskFaultContract",
    "dispatcher_contract": "DispatcherContract",
    "engine_contract": "EngineContract",
    "faults": "FailingStore",
    "power_cuts": "PowerCutContract",
    "rot.contract": "RotContract",
    "scripted": "Chunks Delay ScriptedDriver",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "ArchiveContract",
    "AttachmentsContract",
    "BulkErasureContract",
    "CheckContract",
    "ChronicleContract",
    "Chunks",
    "Delay",
    "DiskFaultContract",
    "DispatcherContract",
    "EngineContract",
    "ErasureContract",
    "FailingStore",
    "FindContract",
    "ForgetContract",
    "FrozenClock",
    "HeadsContract",
    "HistoryContract",
    "JournalContract",
    "NamesContract",
    "PowerCutContract",
    "PreviewsContract",
    "QueueContract",
    "RetentionContract",
    "RotContract",
    "SaveAllContract",
    "ScriptedDriver",
    "SearchContract",
    "SketchContract",
    "StoreContract",
    "TokenContract",
    "VersionsContract",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'perdure.testing' has no attribute {name!r}")
    # Once the name is in the module, Python no longer calls this function for it.
    value = globals()[name] = getattr(import_module(f"perdure.testing.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
