"""The public names of `perdure.archive.copying`."""

from perdure.archive.copying import CopyReport, copy

__all__ = ["CopyReport", "copy"]
