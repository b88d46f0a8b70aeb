"""Workers, which run sessions in one process or in many, on one machine or on several.

A dispatcher decides which worker looks at a session, and when. The claim on a session decides who may run it, and the
record what is done. So it does no harm to look at a session twice, early or late.
"""

from perdure.protocols import Dispatcher as Dispatcher
from perdure.protocols import Outcome as Outcome
from perdure.protocols import WorkerOptions as WorkerOptions
from perdure.workers.advancing import advance as advance
from perdure.workers.inbox import InboxDispatcher as InboxDispatcher
from perdure.workers.worker import Worker as Worker

__all__ = ["Dispatcher", "InboxDispatcher", "Outcome", "Worker", "WorkerOptions", "advance"]
