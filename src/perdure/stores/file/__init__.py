"""Sessions as files in a directory, which people can read and any number of processes may share.

`{id}.json` is the current session; `{id}.jsonl` its log, the truth for every version; `{id}.lock` keeps writers apart.
"""

from __future__ import annotations

from perdure.stores.file.store import FileStore

__all__ = ["FileStore"]
