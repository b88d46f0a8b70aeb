"""Addresses of the stores that perdure ships, for tests that run on each of them."""

from __future__ import annotations

from pathlib import Path

from tests import postgres_server

KINDS = ("memory", "sqlite", "file", "postgresql")


def url_of(kind: str, where: Path) -> str:
    """Return the address of a store of that kind that keeps its sessions in a directory, or for it."""
    if kind == "postgresql":
        return postgres_server.url_of(where)
    return {"memory": "memory://", "sqlite": f"sqlite:///{where}/s.db", "file": f"file://{where}/sessions"}[kind]
