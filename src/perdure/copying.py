"""The public address of `perdure.archive.copy`."""

from perdure.archive.copying import CopyReport, copy

__all__ = ["CopyReport", "copy"]
