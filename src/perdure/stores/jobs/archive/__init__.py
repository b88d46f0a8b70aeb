"""Export and import of whole sessions.

In an archive a log is named by its session's id (`id`, `id/branch`); see `ArchivedSession`. A store may keep messages
of another session for one that shows them. They are in a log of the latter, whose name begins with LENT.
"""

from __future__ import annotations

from perdure.stores.jobs.archive.dumping import dump
from perdure.stores.jobs.archive.restoring import restore

__all__ = ["dump", "restore"]
