"""Redaction: the content of messages is replaced for good, wherever a store has it.

A message is one row of a log, and every version and fork shows that row. Its content may also be in summaries, in steps
and events of tool calls, in errors of runs, in the inbox, and in a session's own notes.
"""

from perdure.stores.jobs.redaction.redacting import redact as redact
from perdure.stores.jobs.redaction.request import Request as Request
