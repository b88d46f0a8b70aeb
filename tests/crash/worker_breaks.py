"""What tests break in worker processes on purpose: each function breaks one thing in the process that calls it."""

from __future__ import annotations

import uuid

from perdure.stores import claims


def elsewhere() -> None:
    """Stand on another machine, as far as anybody can see."""
    machine = str(uuid.uuid4())
    claims._boot_id = lambda: machine
