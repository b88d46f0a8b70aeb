"""Every error that perdure raises. A constructor takes facts, keeps them, and says in its message what to do next.

A program should decide by classes and attributes, never by the words of a message: those may change.

PerdureError
├── SessionNotFound
│   └── VersionForgotten
├── SessionConflict
│   ├── ClaimConflict
│   └── ErasedMeanwhile
├── SessionBusy
│   ├── ClaimLost
│   ├── OwnerBusy
│   └── RunInterrupted
├── SessionHeld
├── QueueFull
├── SessionLocked
├── SessionNotActive
├── IllegalStatusChange
├── InvalidSessionId
├── InvalidSessionFile
├── InvalidData
│   ├── NotLoaded
│   └── PendingCallsChanged
├── CorruptRecord
│   └── BackupDamaged
├── KeyUnavailable
│   ├── KeyMissing
│   ├── WrongKey
│   └── KeyForgotten
├── StoreError
│   ├── UnreadableFile
│   ├── RestoreUnfinished
│   └── StoreNotEmpty
├── BackupNotFound
├── DriverError
│   ├── TransientDriverError
│   ├── RetriesExhausted
│   ├── RateLimited
│   ├── CompactionFailed
│   ├── RunFailed
│   │   ├── InputRefused
│   │   └── StageFailed
│   └── RequestRefused
│       └── ContextTooLong
├── ToolError
│   └── ToolUnavailable
├── RedactionFailed
├── ConfigurationError
└── AgentStop
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any, Literal, Protocol


class PerdureError(Exception):
    """The root of every error that perdure raises on purpose: what happened, and what to do about it in Python."""

    advice: str = ""
    """The end of the message, which says what to do. Empty if the message gives no advice, or not at its end."""

    def __init__(self, what: str = "", advice: str = "") -> None:
        self.advice = advice
        super().__init__(f"{what} {advice}" if advice else what)

    @property
    def what(self) -> str:
        """Return what happened: the message without its advice."""
        return str(self).removesuffix(self.advice).rstrip()


class SessionNotFound(PerdureError):
    """No session with this id, or no such version of it, is in the store."""

    def __init__(
        self, session_id: str, version: int | None = None, reason: str | None = None, advice: str = ""
    ) -> None:
        self.session_id = session_id
        self.version = version
        what = f"No session {session_id!r} is in this store."
        if reason is not None:
            what = reason
        elif version is None:
            advice = "Create it first, or list the sessions to find its id."
        else:
            what = f"No version {version} of session {session_id!r} is in this store."
            advice = "Versions are numbered from 1; the newest is loaded without a number."
        super().__init__(what, advice)


class VersionForgotten(SessionNotFound):
    """This version was erased by `forget`. The session has the versions from `oldest` on."""

    def __init__(self, session_id: str, version: int, oldest: int) -> None:
        self.oldest = oldest
        what = f"Version {version} of session {session_id!r} was forgotten: the oldest that is kept is {oldest}."
        super().__init__(session_id, version, what, "List the versions that are kept with versions().")


class SessionConflict(PerdureError):
    """Somebody else saved this session since it was loaded, or its id is taken.

    `agent` is the name of the session's agent, if the session was opened for another one.
    """

    def __init__(
        self,
        session_id: str,
        expected: int,
        found: int | None,
        reason: str | None = None,
        advice: str = "",
        *,
        agent: str | None = None,
    ) -> None:
        self.session_id = session_id
        self.expected = expected
        self.found = found
        self.agent = agent
        super().__init__(reason or self._sentence(), advice)

    def _sentence(self) -> str:
        if self.expected == 0:
            return f"Session {self.session_id!r} exists already. Open it, or choose another id."
        return (
            f"Session {self.session_id!r} is at version {self.found}, and version {self.expected} was to be replaced. "
            "Nothing was saved. Load it again and repeat the action."
        )


class ClaimConflict(SessionConflict):
    """Somebody else saved the session before this run could claim it. Nothing was done, and no tokens were spent."""


class ErasedMeanwhile(SessionConflict):
    """A save was refused because it may contain text that was erased or redacted since it was read.

    It is a new session made from another one (`expected` is 0), or a version that shows forgotten messages.
    """

    def __init__(self, session_id: str, version: int = 0) -> None:
        reason = f"Something was erased while session {session_id!r} was made of another. It was not created."
        advice = "Make it again: the other session is then read again."
        if version:
            reason = f"This version of session {session_id!r} would show forgotten messages. It was not saved."
            advice = "Load the session again, and repeat what you have changed."
        super().__init__(session_id, version, version, reason, advice)


class SessionBusy(PerdureError):
    """A run holds this session, so the request would have to wait for it."""

    def __init__(self, session_id: str, owner: str | None = None, reason: str | None = None) -> None:
        self.session_id = session_id
        self.owner = owner
        by = f" by {owner}" if owner else ""
        advice = "Wait for the run to end, or cancel() it. A message can be left with it: when_busy='queue' or 'steer'."
        super().__init__(reason or f"Session {session_id!r} is being run{by}.", "" if reason else advice)


class RunInterrupted(SessionBusy):
    """The session's last run waits to be continued: it was killed, could not be saved, or was left to a worker."""

    def __init__(self, session_id: str, reason: str | None = None) -> None:
        super().__init__(
            session_id,
            None,
            reason
            or f"The last run of session {session_id!r} waits to be continued: it was killed, could not be saved, or "
            "was left to a worker. Nothing was changed: a change would drop what the run has done. Continue it with "
            "recover(), or end it with cancel().",
        )


class ClaimLost(SessionBusy):
    """This process no longer holds the claim that it writes under. It was released, or another has taken it over."""

    def __init__(self, session_id: str, epoch: int) -> None:
        self.epoch = epoch
        super().__init__(
            session_id,
            reason=f"Claim {epoch} on session {session_id!r} has been released or taken over. Nothing was written. "
            "Stop this run; the session continues elsewhere.",
        )


class OwnerBusy(SessionBusy):
    """The owner of this session has as many runs at once as are allowed. `owner` is the owner of the session."""

    def __init__(self, session_id: str, owner: str, limit: int) -> None:
        self.limit = limit
        super().__init__(
            session_id,
            owner,
            f"Owner {owner!r} has {limit} runs under way, which is as many as are allowed at once. Session "
            f"{session_id!r} was not run. Wait until one of them has ended, or allow more: per_owner={limit + 1}.",
        )


class SessionHeld(PerdureError):
    """A legal hold is on this session: nothing of it can be erased, forgotten or redacted. Nothing was changed.

    `tag` is the tag of the hold. `holder` is the session that has the tag: this one, or the one that spawned it.
    """

    def __init__(self, session_id: str, tag: str, holder: str | None = None) -> None:
        self.session_id = session_id
        self.tag = tag
        self.holder = holder or session_id
        by = "" if self.holder == session_id else f" by session {self.holder!r}, whose sub-agent it is"
        _, has_case, case = tag.partition(":")
        named = f", {case!r}" if has_case else ""
        super().__init__(
            f"Session {session_id!r} is under hold ({tag!r}){by}. Nothing of it was erased.",
            f"Once the hold may be lifted, call sessions.lift_hold({self.holder!r}{named}); that is put on record.",
        )


class QueueFull(PerdureError):
    """Too many messages wait: in this session, or in all sessions of its `owner`. Nothing was posted.

    `owner` is None if the session itself is full. `retry_after` is a guess at the seconds to wait.
    """

    def __init__(self, session_id: str, limit: int, owner: str | None = None, retry_after: float = 5.0) -> None:
        self.session_id = session_id
        self.limit = limit
        self.owner = owner
        self.retry_after = retry_after
        where = f"in session {session_id!r}" if owner is None else f"in the sessions of owner {owner!r}"
        super().__init__(
            f"{limit} messages wait {where}, which is as many as are allowed. Nothing was posted.",
            f"Try again in {retry_after:g} s. If it stays full, start more workers: `perdure worker`.",
        )


class SessionLocked(PerdureError):
    """The lock of a session's file, or of a whole SQLite store (`session_id` is None), was not free in time.

    `holder` is the number of the process that holds it, or None if that is not known. `is_stopped` is True if that
    process was stopped, for example by Ctrl-Z.
    """

    def __init__(
        self,
        session_id: str | None,
        path: str | PathLike[str],
        timeout: float,
        *,
        holder: int | None = None,
        command: str = "",
        is_stopped: bool = False,
    ) -> None:
        self.session_id = session_id
        self.path = str(path)
        self.timeout = timeout
        self.holder = holder
        self.is_stopped = is_stopped
        what = "The store" if session_id is None else f"Session {session_id!r}"
        by = "Another process is writing it, or was stopped while it did."
        advice = "Look for one (`fuser` names it), then try again; or give the store a longer lock_timeout."
        if holder is not None:
            named = f"Process {holder}" + (f" ({command})" if command else "")
            by = f"{named} was stopped while it was writing." if is_stopped else f"{named} is writing it."
            advice = (
                f"Wait for it, then try again; or give the store a longer lock_timeout. To end it: `kill {holder}`."
            )
        if is_stopped:
            advice = f"Wake it with `kill -CONT {holder}`, or end it with `kill -KILL {holder}`; then try again."
        super().__init__(f"{what} stayed locked for {timeout:g} s ({self.path}). Nothing was written. {by}", advice)


class SessionNotActive(PerdureError):
    """The session's status does not allow what was asked.

    `pending` has the names of the calls that wait for a person to approve or deny them. `outside` has those of the
    calls that wait for a result from outside.
    """

    def __init__(
        self,
        session_id: str,
        status: str,
        pending: Iterable[str] = (),
        outside: Iterable[str] = (),
        *,
        is_parked: bool = False,
    ) -> None:
        self.session_id = session_id
        self.status = status
        self.is_parked = is_parked
        """True if workers have closed the session because its runs took their processes down."""
        self.pending = tuple(pending)
        self.outside = tuple(outside)
        advice = "Execute ResumeSession() on it first."
        if status == "deleted":
            advice = "Call restore() to continue the conversation, or fork it."
        if self.pending or self.outside:
            calls, made = ", ".join(self.pending), ", ".join(self.outside)
            decide = f"It waits for a decision about calls of: {calls}. Make it with approve() or deny()."
            answer = f"It waits for results from outside: {made}. Hand them in with answer({{call_id: result}})."
            advice = " ".join((*([decide] if calls else []), *([answer] if made else [])))
        if is_parked:
            advice = "Call unpark() to open it, or look at why first: `perdure queue`."
        is_what = "parked, since its run took its process down each time" if is_parked else f"{status}, not active"
        super().__init__(f"Session {session_id!r} is {is_what}.", advice)


class IllegalStatusChange(PerdureError):
    """A session cannot move from its status to the one asked for.

    `pending` has the names of the calls that wait for approval, `outside` those that wait for a result from outside.
    """

    def __init__(
        self,
        session_id: str,
        current: str,
        wanted: str,
        allowed: Iterable[str],
        reason: str | None = None,
        pending: Iterable[str] = (),
        outside: Iterable[str] = (),
    ) -> None:
        self.session_id = session_id
        self.current = current
        self.wanted = wanted
        self.allowed = tuple(sorted(allowed))
        self.pending = tuple(pending)
        self.outside = tuple(outside)
        why = reason or f"it can become {', '.join(self.allowed) or 'nothing else'}"
        if self.pending or self.outside:
            calls, made = ", ".join(self.pending), ", ".join(self.outside)
            decide = f"tool calls wait for approval ({calls}): execute ApproveToolCalls or DenyToolCalls instead"
            answer = f"tool calls wait for results from outside ({made}): execute AnswerToolCalls instead"
            why = "; ".join((*([decide] if calls else []), *([answer] if made else [])))
        super().__init__(f"Session {session_id!r} is {current} and cannot become {wanted}; {why}.")


class InvalidSessionId(PerdureError):
    """A session id has a form that perdure refuses."""

    def __init__(self, value: object) -> None:
        self.value = value
        shown = repr(value)[:80] if isinstance(value, str) else f"A value of type {type(value).__name__}"
        # Cut off, a long id looks right. An owner's mark counts too, and callers have not seen it.
        length = f": it has {len(value)} characters" if isinstance(value, str) and len(value) > 200 else ""
        super().__init__(
            f"{shown} is not a session id{length}.",
            "Use 1 to 200 of the characters A-Z a-z 0-9 . _ - beginning with a letter or digit. "
            "SessionId.of(text) makes an id of any text.",
        )


class InvalidSessionFile(PerdureError):
    """The content of a session's file is not that of a session."""

    def __init__(self, path: str | PathLike[str], reason: str, advice: str | None = None) -> None:
        self.path = str(path)
        self.reason = reason
        advice = advice or (
            "Restore it from a backup, or delete it: the log beside it (.jsonl) still holds the history, and the next "
            "save writes the file again."
        )
        super().__init__(f"{self.path} is not a readable session file: {reason}. {advice}")


class InvalidData(PerdureError, ValueError):
    """A value has the wrong type or form. `path` tells where."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{problem} (at {path})")


class PendingCallsChanged(InvalidData):
    """A decision was about calls that the session no longer waits for. `pending` has its calls as they are now."""

    def __init__(
        self,
        session_id: str,
        pending: Iterable[object],
        wanted: Iterable[str],
        advice: str | None = None,
        *,
        is_decided: bool = False,
    ) -> None:
        self.session_id = session_id
        self.pending = tuple(pending)
        problem = (
            f"session {session_id!r} waits for {', '.join(wanted) or 'nothing'}, and not for what was shown. "
            "Nothing was decided or made; look at the pending calls again, and decide about those"
        )
        if not self.pending:
            problem = f"no tool call of session {session_id!r} waits for a decision"
        if is_decided:
            problem += ": somebody has decided already, and the run continues with that decision"
        super().__init__("$.call_ids", problem if advice is None else f"{problem}; {advice}")


class NotLoaded(InvalidData):
    """The messages asked for were not loaded, because no view shows them. They are still in the store."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "these messages are in the store but not in memory; read them with `await history()`")


class CorruptRecord(PerdureError):
    """A stored record does not match its checksum, or cannot be decoded."""

    def __init__(
        self,
        session_id: str | None,
        position: str,
        reason: str,
        advice: str = "Restore the store from a backup, or load an earlier version of the session.",
    ) -> None:
        self.session_id = session_id
        self.position = position
        self.reason = reason
        of = f" of session {session_id!r}" if session_id else ""
        super().__init__(f"Stored record {position}{of} is damaged: {reason}. Nothing was changed.", advice)


class KeyUnavailable(PerdureError):
    """Something in the store is sealed, and its key is not available. It is not damaged, and nothing was changed.

    `key_id` is the id of the key; None if the search index is sealed, with keys of many. `session_id` is the id of the
    session, if it is known.
    """

    session_id: str | None = None

    def __init__(self, key_id: str | None, what: str, advice: str) -> None:
        self.key_id = key_id
        self._what = what
        super().__init__(what.format(of="", key=key_id), advice)

    def of_session(self, session_id: str | None) -> KeyUnavailable:
        """Add the session to the message, unless it names one already. Return this error."""
        if self.session_id is None and session_id is not None:
            self.session_id = session_id
            self.args = (f"{self._what.format(of=f' of session {session_id!r}', key=self.key_id)} {self.advice}",)
        return self


class KeyMissing(KeyUnavailable):
    """The store was opened without keys, or with a key ring that has never had this key."""

    def __init__(self, key_id: str | None, *, has_ring: bool = True) -> None:
        self.has_ring = has_ring
        what = "A record{of} is sealed with key {key}, and the store was opened without keys."
        advice = (
            "Open it with `connect(…, keys=FileKeyRing(path, master=…))`, or `perdure --keys FILE …`. "
            "Adapters of frameworks take `store=shared(url, keys=…)`."
        )
        if key_id is None:
            what = "The search index of this store is sealed, and the store was opened without keys."
        elif has_ring:
            what = "A record{of} is sealed with key {key}, which this key ring does not have."
            advice = "Open the store with the key ring that it was written with, or restore that file from a backup."
        super().__init__(key_id, what, advice)


class WrongKey(KeyUnavailable):
    """The key ring has the data key, but none of the given master keys opens it."""

    def __init__(self, key_id: str, master_id: str) -> None:
        self.master_id = master_id
        what = f"Key {{key}} is wrapped with master key {master_id}, which was not given. A record{{of}} needs it."
        advice = (
            "Give that master key too: `FileKeyRing(path, master=[newest, older])`, or `PERDURE_MASTER_KEY=NEW,OLD`."
        )
        super().__init__(key_id, what, advice)


class KeyForgotten(KeyUnavailable):
    """The data key was destroyed by `forget`. All that was sealed with it is erased, in every copy and backup."""

    def __init__(self, key_id: str, at: str) -> None:
        self.at = at
        what = f"A record{{of}} is sealed with key {{key}}, which was forgotten at {at}: what it says is erased."
        super().__init__(key_id, what, "Erase the session with `erase()`, or `perdure erase`, to clear what is left.")


class BackupDamaged(CorruptRecord):
    """A file in a directory of backups does not contain what was written.

    `path` is the file. `chunk` is the SHA-256 of the damaged chunk, if it is one.
    """

    def __init__(self, path: str | PathLike[str], reason: str, *, chunk: str | None = None) -> None:
        self.path = str(path)
        self.chunk = chunk
        where = f"chunk {chunk} in {self.path}" if chunk else self.path
        advice = "`perdure backup --verify TARGET` says which backups are whole; restore one of them with --at."
        super().__init__(None, where, reason, advice)


class BackupNotFound(PerdureError):
    """The directory has no backup, or not the one that was asked for."""

    def __init__(self, target: str | PathLike[str], asked: str | None = None) -> None:
        self.target = str(target)
        self.asked = asked
        what = f"No backup {asked} is in {self.target}." if asked else f"No backup is in {self.target}."
        listed = f"List those that are there: `perdure backup --list {self.target}`."
        super().__init__(what, listed if asked else f"Check its name, or add one: `perdure backup {self.target}`.")


class StoreError(PerdureError):
    """The store failed, or was used in a way that it does not support."""


class UnreadableFile(StoreError):
    """A session's file cannot be read because of its permissions or the disk. Its content may be sound."""

    def __init__(self, path: str | PathLike[str], reason: str) -> None:
        self.path = str(path)
        self.reason = reason
        super().__init__(f"{self.path} could not be read ({reason}). Check its permissions and the disk.")


class RestoreUnfinished(StoreError):
    """A restore into this place was cut short, or is under way. So the store there is not whole."""

    def __init__(self, place: str | PathLike[str], left: str | PathLike[str]) -> None:
        self.place = str(place)
        self.left = str(left)
        what = f"A restore of {self.place} is not finished: it is under way, or was cut short. Nothing was opened."
        super().__init__(what, f"Repeat it: `perdure restore --from TARGET`. To give it up, remove {self.left}.")


class StoreNotEmpty(StoreError):
    """A restore would overwrite sessions."""

    def __init__(self, place: str | PathLike[str], sessions: int) -> None:
        self.place = str(place)
        self.sessions = sessions
        what = (
            f"{self.place} has {sessions:,} session{'' if sessions == 1 else 's'}, and a restore writes over nothing."
        )
        super().__init__(what, "Restore into another place, or move that store away first.")


class DriverError(PerdureError):
    """A model call failed for good."""


# By name: a cause comes from the record, which keeps only the name of an error's class.
_MAY_PASS = frozenset({"TransientDriverError", "RetriesExhausted", "RateLimited", "TimeoutError", "ConnectionError"})


class TransientDriverError(DriverError):
    """A model call failed in a way that may pass. This is the only kind of error that is retried."""

    def __init__(self, model: str, reason: str, *, status: int | None = None, retry_after: float | None = None) -> None:
        self.model = model
        self.reason = reason
        self.status = status
        self.retry_after = retry_after
        answered = f" (HTTP {status})" if status else ""
        super().__init__(f"{model} could not answer{answered}: {reason}. It may if asked again.")


class RetriesExhausted(DriverError):
    """A model call failed each time it was tried, or the provider asks to wait too long before the next try."""

    def __init__(self, attempts: int, last: TransientDriverError) -> None:
        self.attempts = attempts
        self.last = last
        asked = f"; it asks to wait {last.retry_after:g} s" if last.retry_after else ""
        times = "once" if attempts == 1 else f"{attempts} times"
        super().__init__(f"{last.model} was asked {times} and could not answer: {last.reason}{asked}. Try again later.")


class RateLimited(DriverError):
    """A model was not asked: its place in a rate comes later than the run may take. No place was taken.

    `wait` is the number of seconds until the place, and `left` the number that the run had left.
    """

    def __init__(self, model: str, rate: str, wait: float, left: float) -> None:
        self.model = model
        self.rate = rate
        self.wait = wait
        self.left = left
        super().__init__(
            f"{model} was not asked: the rate {rate!r} is used up for {wait:.1f} s, and the run has {left:.1f} s left.",
            "Try again later, give the run more time, or allow more: connect(rate=…).",
        )


class CompactionFailed(DriverError):
    """The model failed to summarise a transcript."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"The transcript was not compacted, and the session is as it was: {reason.rstrip('. ')}. Try again, name "
            "another model, or use a strategy that needs none: 'truncate' or 'observation_mask'."
        )


class Cause(Protocol):
    """An error as it is on record. `perdure.ErrorRecord` is one."""

    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def code(self) -> int | str | None: ...


class RunFailed(DriverError):
    """A run ended without an answer. What was said until then is kept.

    `cause` is the error that ended it, as it is on record: its `type`, its `message`, and the provider's `code`.
    `retryable` tells whether `chat.retry()` may succeed later. `session` is the session as it was saved.
    """

    cause: Cause | None = None
    session: Any = None
    problem: str = ""
    """A sentence about the cause."""

    def __init__(
        self,
        session_id: str,
        version: int,
        reason: str,
        *,
        is_shown: bool = True,
        cause: Cause | None = None,
        session: Any = None,
    ) -> None:
        self.session_id = session_id
        self.version = version
        self.cause = cause
        self.session = session
        kind = self.kind
        self.problem = reason
        self.reason = reason = f"{kind}: {reason}" if kind else reason
        advice = "retry() sends the message again, send() says something else, and undo() takes the message back"
        if kind == "RunParked":  # its session takes no message until it is opened
            advice = (
                "unpark(), or `perdure queue retry`, opens it for the messages that wait; undo() takes this one back"
            )
        elif not is_shown:  # undo() would take back what was said before it
            advice = "the message is on record and was shown to no model; send it again once that is mended"
        super().__init__(
            f"The run in session {session_id!r} failed: {reason.rstrip('. ')}. The session is kept, "
            f"at version {version}, with all that was said: {advice}."
        )

    @property
    def kind(self) -> str | None:
        """The class of the error that ended the run."""
        return None if self.cause is None else self.cause.type

    @property
    def retryable(self) -> bool:
        """Tell whether the run failed for a reason that may pass: a provider that could not answer, or a time limit."""
        return self.kind in _MAY_PASS


class InputRefused(RunFailed):
    """An input filter has refused a message. The model was not asked, and is never shown the message."""

    def __init__(self, session_id: str, version: int, reason: str) -> None:
        self.session_id = session_id
        self.version = version
        self.reason = reason
        PerdureError.__init__(
            self,
            f"What was sent to session {session_id!r} was refused: {reason.rstrip('. ')}. The model was not asked and "
            "will not be shown it; the record keeps it. Send something else.",
        )


class StageFailed(RunFailed):
    """A stage of a workflow has no answer to pass on: it was refused, stopped, or cut off."""

    def __init__(self, session_id: str, version: int, reason: str, workflow: str, stage: str) -> None:
        self.session_id = session_id
        self.version = version
        self.reason = reason
        self.workflow = workflow
        self.stage = stage
        PerdureError.__init__(
            self,
            f"Stage {stage!r} of workflow {workflow!r} has no answer (session {session_id!r}, version {version}): "
            f"{reason.rstrip('. ')}. The stages after it were not run. Run the workflow again to try this stage again.",
        )


class RequestRefused(DriverError):
    """A provider refused a request, and would refuse it again."""

    def __init__(self, model: str, reason: str, *, status: int | None = None) -> None:
        self.model = model
        self.reason = reason
        self.status = status
        answered = f" (HTTP {status})" if status else ""
        super().__init__(f"{model} refused the request{answered}: {reason}.", self.advice)

    advice = "Asking again will not help; change the request, the model's settings or its key."


class ContextTooLong(RequestRefused):
    """The request has more tokens than the model can read at once."""

    advice = "Compact or trim the transcript, or take a model with a larger context window."


class ToolError(PerdureError):
    """A tool could not be called, or refused its arguments."""


class ToolUnavailable(ToolError):
    """The connection to a tool's server was lost before it answered. The next call starts it or connects again.

    `was_sent` is True if the call may have taken effect.
    """

    def __init__(self, server: str, reason: str, *, was_sent: bool = True) -> None:
        self.server = server
        self.reason = reason
        self.was_sent = was_sent
        outcome = (
            "Whether the call took effect is unknown: check before you repeat it."
            if was_sent
            else "The call was not made, and can be repeated later."
        )
        super().__init__(f"The server {server!r} of this tool is not available: {reason}", outcome)


class RedactionFailed(PerdureError):
    """A function of `connect(redact=…)` raised, or did not return a text. Nothing of the text is stored.

    `problem` never quotes the text, nor the message of the function's error.
    """

    def __init__(self, redactor: str, problem: str) -> None:
        self.redactor = redactor
        self.problem = problem
        what = f"The redactor {redactor!r} {problem}, so the text was not stored."
        super().__init__(what, "Mend the redactor of connect(redact=…), and repeat the call.")


class ConfigurationError(PerdureError):
    """Something is set up wrong: a missing dependency, an unknown name, a missing context.

    `missing` is set if no model is named, or a tool or a context is missing. `name` is that of the agent or the tool.
    """

    missing: Literal["model", "tool", "context"] | None = None
    name: str | None = None

    def __init__(
        self,
        what: str = "",
        advice: str = "",
        *,
        missing: Literal["model", "tool", "context"] | None = None,
        name: str | None = None,
    ) -> None:
        self.missing = missing
        self.name = name
        super().__init__(what, advice)


class AgentStop(PerdureError):
    """A request to end the run, raised by a tool or an interceptor. The run counts as stopped, not as failed."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "The run was asked to stop.")
