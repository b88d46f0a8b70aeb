"""Runs that are handed out: to one process or to many, on one machine or on several.

A dispatcher decides who looks at a session, and when. The claim on a session decides who may run it, and its record
what is done. So a session that is looked at twice, early or late is no fault.
"""

from perdure.protocols import Dispatcher as Dispatcher
from perdure.protocols import Outcome as Outcome
from perdure.protocols import WorkerOptions as WorkerOptions
from perdure.workers.advancing import advance as advance
from perdure.workers.inbox import InboxDispatcher as InboxDispatcher
from perdure.workers.worker import Worker as Worker

__all__ = ["Dispatcher", "InboxDispatcher", "Outcome", "Worker", "WorkerOptions", "advance"]
