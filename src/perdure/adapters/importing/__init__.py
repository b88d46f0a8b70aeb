"""Imports of other libraries' stored sessions, in the layout that the adapters use.

None of the libraries has to be installed, and none of their files is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.adapters.importing.arriving import ImportReport, Pieces, Refused, Target, take_in
from perdure.errors import InvalidData, StoreError
from perdure.model.session import check_owner

if TYPE_CHECKING:
    from perdure.stores.store import Store

__all__ = ["FRAMEWORKS", "ImportReport", "Refused", "import_from"]

FRAMEWORKS: Mapping[str, tuple[str, str]] = {
    "openai-agents": ("openai_agents", "openai-agents"),
    "langgraph": ("langgraph", "langgraph"),
    "adk": ("google_adk", "google-adk"),
    "google-adk": ("google_adk", "google-adk"),
    "agno": ("agno", "agno"),
    "claude": ("claude", "claude-agent-sdk"),
    "claude-agent-sdk": ("claude", "claude-agent-sdk"),
    "strands": ("strands", "strands"),
}
"""The libraries to import from, also by package name, with the module that reads each and the agent of its sessions."""


async def import_from(
    store: Store,
    framework: str,
    source: str | PathLike[str],
    *,
    owner: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Take the sessions of another library's file or directory into a store. Return how many came.

    Each session arrives in one commit. A session that has arrived before is skipped, and if it has grown since, only
    what is new is added. So you can simply repeat an import that was killed. A session that was changed both here and
    there is `refused`. Raise InvalidData that names the row if something cannot be read.
    """
    check_owner(owner)
    pieces = read_source(framework, source)
    return await take_in(pieces, Target(store, FRAMEWORKS[framework][1], owner), progress)


def read_source(framework: str, source: str | PathLike[str]) -> Pieces:
    """Return the sessions of a source, to be read later. Raise StoreError or InvalidData if it is not a source."""
    if framework not in FRAMEWORKS:
        raise InvalidData("$.framework", f"{framework!r} cannot be imported from; use one of {', '.join(FRAMEWORKS)}")
    found: Pieces = import_module(f"perdure.adapters.importing.{FRAMEWORKS[framework][0]}").pieces(
        _path_of(source, framework)
    )
    return found


def _path_of(source: str | PathLike[str], framework: str) -> Path:
    path = Path(fspath(source)).expanduser()
    if not path.exists():
        raise StoreError(f"There is nothing at {path}.", f"Name the file or directory that {framework} has written.")
    return path
