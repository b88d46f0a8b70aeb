"""A worker of the example for Temporal, with tools that note their calls."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from functools import partial

from tests.workers.engine_tools import example

if __name__ == "__main__":
    app = example("temporal_workflow")
    app.SERVER = sys.argv[1]
    # The time that Temporal waits for the worker that had a workflow last: here it may be dead.
    app.Worker = partial(app.Worker, sticky_queue_schedule_to_start_timeout=timedelta(seconds=0.5))
    asyncio.run(app.work())
