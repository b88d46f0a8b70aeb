"""Sessions that leave their store, for a file or for another store; and whether a store is what it should be."""

from perdure.archive.checking import FsckReport, fsck
from perdure.archive.copying import CopyReport, copy
from perdure.archive.moving import MoveReport, Progress, export_sessions, import_sessions
from perdure.archive.repairing import RepairReport, repair
from perdure.protocols import ArchivingStore

__all__ = [
    "ArchivingStore",
    "CopyReport",
    "FsckReport",
    "MoveReport",
    "Progress",
    "RepairReport",
    "copy",
    "export_sessions",
    "fsck",
    "import_sessions",
    "repair",
]
