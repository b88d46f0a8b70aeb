"""What protects a store, taken away in the process that calls: the controls of attacks.

Each function is given `setattr`, or `monkeypatch.setattr` where it is to be put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from perdure.model.session import AgentSession
from perdure.protocols import Claim
from perdure.stores import folder
from perdure.stores.jobs import claiming, saving
from perdure.stores.jobs.claiming import Facts

Put = Callable[[Any, str, Any], None]


def without_file_locks(put: Put = setattr) -> None:
    """Write to files without the locks of their sessions."""
    put(folder, "_flock", lambda handle, deadline: True)


def without_versions(put: Put = setattr) -> None:
    """Save a session on top of whatever version there is by now."""
    refuse = saving.Keep.refuse

    def refused(self: saving.Keep, facts: Facts) -> None:
        if not self.is_new and facts.sid is not None:
            self.session = AgentSession.reconstitute(self.session, version=facts.version, updated_at=self.at)
            self.version = facts.version + 1
        refuse(self, facts)

    put(saving.Keep, "refuse", refused)


def without_epochs(put: Put = setattr) -> None:
    """Write under a claim that another has taken over, as long as some claim lies there."""
    refusal = saving.refusal

    def refused(session_id: str, facts: Facts, claim: Claim | None, **more: Any) -> Any:
        return refusal(session_id, facts, claim and replace(claim, epoch=facts.epoch), **more)

    put(saving, "refusal", refused)
    put(claiming, "held", lambda claim: {"id": str(claim.session_id), "claim !=": None})
    try:
        from perdure.stores.postgres import parcel
    except ImportError:  # without psycopg there is no such store
        return
    statement = parcel.statement
    put(parcel, "statement", lambda parts: statement(parts).replace("AND now_epoch = epoch", ""))
