"""Sessions given out and taken in whole.

In an archive a log is named by its session's id (`id`, `id/branch`); see `ArchivedSession`. In a store that keeps
another's messages on behalf of a session, they are in a log of that session's own, whose name begins with LENT.
"""

from __future__ import annotations

from perdure.stores.jobs.archive.dumping import dump
from perdure.stores.jobs.archive.restoring import restore

__all__ = ["dump", "restore"]
