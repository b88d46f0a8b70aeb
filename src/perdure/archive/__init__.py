"""Sessions moved to a file or to another store, and checks and repairs of whole stores."""

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
