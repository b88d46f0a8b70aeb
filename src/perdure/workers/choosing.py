"""The choice of a dispatcher for a store, if the user names none."""

from __future__ import annotations

from importlib.util import find_spec

from perdure.protocols import Dispatcher, Queue
from perdure.workers.inbox import InboxDispatcher


def dispatcher_of(queue: Queue) -> Dispatcher:
    """Return a dispatcher: procrastinate's on PostgreSQL, if it is installed, or else the store's own inboxes."""
    # Told by its attribute: to import PostgresStore would need psycopg, which may not be installed.
    if hasattr(queue, "link") and find_spec("procrastinate") is not None:
        from perdure.workers.procrastinate import ProcrastinateDispatcher

        return ProcrastinateDispatcher(queue)
    return InboxDispatcher(queue)
