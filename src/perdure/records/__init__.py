"""The records of runs: what they are, the recorder that makes them of events, and the files they are kept in."""

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
