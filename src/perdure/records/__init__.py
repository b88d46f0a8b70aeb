"""The records of runs: their types, the recorder that makes them from events, and the files that keep them."""

from perdure.model.record import LoopRecord, LoopStatus, ParallelGroupRecord, SessionRecord, Turn
from perdure.recorder import SessionRecorder, SessionRecorderConfig
from perdure.records.files import (
    FileRecordStore,
    SessionRecordList,
    delete_session,
    list_session_ids,
    load_session,
    load_sessions_for_agent,
    redact_session,
    save_session,
)

__all__ = [
    "FileRecordStore",
    "LoopRecord",
    "LoopStatus",
    "ParallelGroupRecord",
    "SessionRecord",
    "SessionRecordList",
    "SessionRecorder",
    "SessionRecorderConfig",
    "Turn",
    "delete_session",
    "list_session_ids",
    "load_session",
    "load_sessions_for_agent",
    "redact_session",
    "save_session",
]
