"""The public address of `perdure.archive.fsck`."""

from perdure.archive.checking import FsckReport, fsck

__all__ = ["FsckReport", "fsck"]
