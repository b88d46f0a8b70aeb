"""Small JSON, packed: deflate with a dictionary of what a typical run writes.

Runs put many small rows of the same shape on record. A row alone has little that repeats. With a dictionary of the
words that all rows share, it shrinks to a quarter. The dictionary is part of the stored format. It never changes: a
better one would be added under a mark of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.value import JSON
from perdure.protocols import Entry

_MARK = b"\x01"
# JSON begins with one of these bytes, and packed JSON with its mark.
_PLAIN = b'{["-0123456789tfn'
# The strings that deflate looks back for: the rarest first, the commonest last, where a reference is cheapest.
_DICTIONARY = (
    b'"parallel_loop_start""parallel_loop_end""input_rejected","reason":"redacted""compaction""tags":["owner":"'
    b'"parent_id":""spawn_ref":{"session_id":"","loop_id":"","call_id":"","label":"","tool_call_id":"'
    b'"title":""metadata":{"system_prompt":"prefix":"response_format":"pending_calls":["denied":{"approved":{'
    b'"group":{"group_id":"","all_loop_ids":[""selected_loop_id":"","branch":"rerun","tag":"","key":""'
    b'"error":{"type":"TimeoutError","message":"ToolError","traceback":"},"errors":[{"type":"is_error":true'
    b'"stop_signals":[{"reason":"steps_limit_reached","token_limit_reached","time_limit_reached","user_requested"'
    b'"limit":"status":"failed""stopped""in_progress""suspended""finish_reason":"length""thinking_level":"'
    b'"temperature":0,"max_tokens":4096,"context_window":200000,"base_url":"https://","model":"offline","provider":'
    b'"offline"openai"anthropic"google"scripted"gpt-5claude-gemini-'
    b'"resumed":true,"cache_read_tokens":0,"cache_write_tokens":0,"reasoning_tokens":0,"response_id":"resp_'
    b'{"info":{"id":"0","agent_name":"","status":"active","version":1,"created_at":"2026-","updated_at":"2026-01-'
    b'"},"definition":"","state":{"agent_id":"0","created_at":"2026-0","updated_at":"202","execution_count":1},"op":"'
    b'","parts":{"transcript":[[1,0,1]],"metadata":{}},"hashed":{"execution":"'
    b'{"execution_id":"0","status":"completed","started_at":"2026-","completed_at":"2026-","step_executions":[{"step":'
    b'{"id":"01","input_messages":[[1,0,1],[1,1,2]],"output_messages":[[1,2,3],[1,3,4]],"inference_response":'
    b'{"finish_reason":"tool_call","usage":{"input_tokens":10,"output_tokens":5,"cost":0.0},"model":"","provider":""},'
    b'"tool_executions":[{"call":{"type":"tool_call","name":"","arguments":{},"id":"0"},"started_at":"2026-",'
    b'"completed_at":"2026-","result":{"$said":true},"usage":{}}]},"started_at":"2026-","completed_at":"2026-",'
    b'"continuation":{}},{"step":{"id":"01"}],"continuation":{}}'
    b'[["agent_start",{"agent_id":"01","seq":1,"at":"2026-","parent_loop_id":"01","continuation":{"kind":"initial"'
    b'{"kind":"default"},"config":{"model":"","provider":""},"base_version":1}],["message_end",{"seq":2,"at":"2026-",'
    b'"message":{"role":"user","id":"01"}}],["turn_start",{"seq":3,"at":"2026-","step_id":"01","index":0}],'
    b'["message_start",{"seq":4,"at":"2026-","message_id":"01","role":"assistant"}],["message_end",{"seq":5,"at":'
    b'"2026-","message":{"role":"user","id":"01"},"response":{"finish_reason":"tool_call","usage":{"input_tokens":10,'
    b'"output_tokens":5,"cost":0.0},"model":"","provider":""}}],["tool_execution_start",{"seq":8,"at":"2026-","call":'
    b'{"type":"tool_call","name":"","arguments":{},"id":"01"},"step_id":"01"}],["tool_execution_end",{"seq":9,"at":'
    b'"2026-","execution":{"call":{"type":"tool_call","name":"","id":"01"},"started_at":"2026-","completed_at":"2026-"'
    b',"result":{"$said":true},"usage":{}},"step_id":"01"}],["message_end",{"seq":10,"at":"2026-","message":{"role":'
    b'"user","id":"01"}}],["turn_end",{"seq":11,"at":"2026-","step_id":"01","index":0,"usage":{"input_tokens":10,'
    b'"output_tokens":5,"cost":0.0}}],["turn_start",{"seq":12,"at":"2026-","step_id":"01","index":1}],["message_start",'
    b'{"seq":13,"at":"2026-","message_id":"01","role":"assistant"}],["message_end",{"seq":14,"at":"2026-","message":'
    b'{"role":"user","id":"01"},"response":{"finish_reason":"stop","usage":{"input_tokens":1,"output_tokens":'
    b'}}],["turn_end",{"seq":15,"at":"2026-","step_id":"01","index":1,"usage":{"input_tokens":1,"output_tokens":5}}],'
    b'["agent_end",{"seq":16,"at":"2026-","status":"completed","messages":[{"role":"user","id":"01"},{"role":"user",'
    b'"id":"01"},{"role":"user","id":"01"}],"usage":{"input_tokens":20,"output_tokens":10,"cost":0.0}}]]'
)


def _deflating(window: int, memory: int) -> zlib._Compress:
    # Negative: without the header and checksum of zlib, since rows have checksums of their own.
    return zlib.compressobj(6, zlib.DEFLATED, -window, memory, zdict=_DICTIONARY)


_SMALL = 4096
# A window of 8 KB has room for the dictionary and a small row. A larger window or table takes longer to copy.
_small = _deflating(window=13, memory=5)


def pack(plain: bytes) -> bytes:
    """Return JSON packed, or as it is if packing does not make it shorter, or if it is too long to be unpacked."""
    if len(plain) > MOST:
        return plain
    # To read the dictionary takes longer than to pack a small row. For those, a state that has read it is copied.
    deflate = _small.copy() if len(plain) <= _SMALL else _deflating(zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL)
    packed = _MARK + deflate.compress(plain) + deflate.flush()
    return packed if len(packed) < len(plain) else plain


def unpack(stored: bytes) -> bytes:
    """Return the JSON in bytes that may be packed. Raise InvalidData if they are neither."""
    if stored[:1] in _PLAIN:
        return stored
    if stored[:1] != _MARK:
        raise InvalidData("$", "neither JSON nor packed JSON")
    inflate = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_DICTIONARY)
    try:
        plain = inflate.decompress(stored[1:], MOST)
    except zlib.error as error:
        raise InvalidData("$", f"cannot be unpacked: {error}") from None
    if not inflate.eof:
        raise InvalidData("$", "it is cut short, or unpacks to more than is ever stored")
    return plain


MOST = 4 * codec.MAX_BYTES
"""The most bytes that a row is unpacked to, so that a damaged one cannot fill the memory."""


def pack_entries(
    entries: Sequence[tuple[Entry, bytes]], smaller: Callable[[bytes], bytes] | None = None
) -> tuple[str | None, bytes]:
    """Return the run of a batch's first entry, and all entries in one row. Entries of other runs name theirs."""
    run = entries[0][0].run if entries else None
    rows = [
        [entry.kind, msgspec.Raw(body)] if entry.run == run else [entry.kind, msgspec.Raw(body), entry.run]
        for entry, body in entries
    ]
    return run, (smaller or pack)(msgspec.json.encode(rows))


def unpack_entries(run: str | None, stored: bytes) -> list[Entry]:
    """Return the entries of a batch. Raise InvalidData if it contains anything else."""
    rows = codec.decode_plain(unpack(stored))
    return list(_entries(run, rows))


def _entries(run: str | None, rows: JSON) -> Iterable[Entry]:
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or len(row) not in (2, 3) or not isinstance(row[0], str):
            raise InvalidData("$", "not an entry of a record")
        named = run if len(row) == 2 else row[2]
        if not isinstance(named, str | None):
            raise InvalidData("$", "not the id of a run")
        yield Entry(row[0], row[1], named)
