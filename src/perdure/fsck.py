"""The public names of `perdure.archive.checking`."""

from perdure.archive.checking import FsckReport, fsck

__all__ = ["FsckReport", "fsck"]
