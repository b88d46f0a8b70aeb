"""Retention of sessions: rules, which of them a session has, and tags that keep a session against all rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from perdure.errors import InvalidData
from perdure.model.checks import expect, expect_count
from perdure.model.indexed import MARK
from perdure.model.value import EMPTY, Value, brief

if TYPE_CHECKING:
    from perdure.model.session import AgentSessionInfo

HOLD = "hold"
"""The tag of a legal hold. `hold:` with the name of a case is one, too."""
HOLD_CHANGED = "hold_changed"
"""The kind of the entries on record that say when a hold was placed or lifted."""
KEEP_MARK = f"{MARK}{MARK}keep{MARK}"
"""The beginning of the mark of a session's own rule, among its tags. A mark of metadata has a key after MARK."""
_SPAN = re.compile(r"(\d{1,9})\s*(s|min|m|h|d|w|y)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 365 * 86_400}
_LONGEST = timedelta(days=365_000)


class Retention(Value, frozen=True):
    """A rule for how long a session is kept. What it does not name is kept for ever.

    A session is erased, with those of its sub-agents, when it is older than `age` or was not updated for `idle`. Of its
    older versions the last `versions` are kept.
    """

    age: timedelta | None = None
    """The time since it was created."""
    idle: timedelta | None = None
    """The time since it was last updated."""
    versions: int | None = None
    """The number of versions that are kept before the newest. It is at least 1: forgetting versions makes a new one."""

    def __post_init__(self) -> None:
        for name in ("age", "idle"):
            span = getattr(self, name)
            if span is None:
                continue
            if not timedelta(0) < expect(span, timedelta, f"$.{name}") <= _LONGEST:
                raise InvalidData(f"$.{name}", f"expected a time of more than 0 and at most 1,000 years, got {span}")
        if self.versions is not None:
            expect_count(self.versions, "$.versions", least=1)

    def is_over(self, info: AgentSessionInfo, at: datetime) -> bool:
        """Tell whether a session has been kept for as long as the rule says."""
        too_old = self.age is not None and info.created_at < at - self.age
        return too_old or (self.idle is not None and info.updated_at < at - self.idle)

    def forgets_before(self, info: AgentSessionInfo) -> int | None:
        """Return the oldest version that stays; None if no version has to go.

        Forgetting itself makes a version, so one fewer of the others stays.
        """
        if self.versions is None or info.version - info.first_version <= self.versions:
            return None
        return info.version - self.versions + 1


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules for sessions: each has its own, or that of its tags, or that of its owner, or the `default`.

    Only the first of these counts. If several tags have a rule, the session is kept until it is over by each of them.
    """

    default: Retention | None = None
    tags: Mapping[str, Retention] = EMPTY
    """Rules by tag."""
    owners: Mapping[str, Retention] = EMPTY
    """Rules by owner."""

    def __post_init__(self) -> None:
        if self.default is not None:
            expect(self.default, Retention, "$.default")
        for name in ("tags", "owners"):
            given = expect(getattr(self, name), Mapping, f"$.{name}")  # type: ignore[type-abstract]  # it is only asked
            for key, rule in given.items():
                expect(key, str, f"$.{name}")
                expect(rule, Retention, f"$.{name}.{key}")
            force_setattr(self, name, dict(given))

    def rules_of(self, info: AgentSessionInfo) -> Sequence[Retention]:
        """Return the rules of a session. It has several if several of its tags have one."""
        if info.keep is not None:
            return [info.keep]
        tagged = [self.tags[tag] for tag in info.tags if tag in self.tags]
        if tagged:
            return tagged
        if info.owner is not None and info.owner in self.owners:
            return [self.owners[info.owner]]
        return [self.default or _FOR_EVER]

    def is_over(self, info: AgentSessionInfo, at: datetime) -> bool:
        """Tell whether a session has been kept for as long as each of its rules says."""
        return all(rule.is_over(info, at) for rule in self.rules_of(info))

    def forgets_before(self, info: AgentSessionInfo) -> int | None:
        """Return the oldest version that stays by all of a session's rules; None if no version has to go."""
        # A rule that forgets nothing wins against all others.
        found = [rule.forgets_before(info) for rule in self.rules_of(info)]
        return min((each for each in found if each is not None), default=None) if None not in found else None

    @classmethod
    def of(cls, given: Retention | RetentionPolicy | None) -> RetentionPolicy:
        """Return the policy that a caller gives. One rule alone is the default of all sessions."""
        if isinstance(given, RetentionPolicy):
            return given
        return cls(default=None if given is None else expect(given, Retention, "$.keep"))

    @classmethod
    def from_dict(cls, plain: object) -> RetentionPolicy:
        """Return the policy of a file: `{"idle": "90d", "tags": {"audit": {"age": "7y"}}}`.

        `age`, `idle` and `versions` outside of `tags` and `owners` are the default.
        """
        table = dict(_table(plain, "$"))
        groups = {name: _table(table.pop(name, {}), f"$.{name}") for name in ("tags", "owners")}
        made = {
            name: {key: _rule(rule, f"$.{name}.{key}") for key, rule in group.items()} for name, group in groups.items()
        }
        return cls(default=_rule(table, "$") if table else None, **made)


_FOR_EVER = Retention()


def span_of(given: object, path: str) -> timedelta:
    """Return a time span as people write it: `90s`, `10min`, `2h`, `30d`, `4w` or `7y`, which is 365 days each."""
    found = _SPAN.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise InvalidData(path, f"expected a text such as '12h', '30d', '4w' or '7y', got {brief(given)}")
    # Bounded, or a large number would overflow. What is over the longest time is refused where it is used.
    return timedelta(seconds=min(int(found[1]) * _SECONDS[found[2]], 2 * _LONGEST.total_seconds()))


def is_hold(tag: str) -> bool:
    """Tell whether a tag is that of a legal hold."""
    return tag == HOLD or tag.startswith(f"{HOLD}:")


def hold_tag(case: str | None) -> str:
    """Return the tag of a hold: for a case, or without a name."""
    return HOLD if case is None else f"{HOLD}:{expect(case, str, '$.case')}"


def no_hold(session_id: str, tag: str, tags: Iterable[str]) -> InvalidData:
    """Return the error for a hold that is to be lifted from a session with other tags."""
    known = ", ".join(filter(is_hold, tags)) or "none"
    return InvalidData("$.case", f"session {session_id!r} has no hold {tag!r}; it has {known}")


def keep_mark(rule: Retention) -> str:
    """Return the mark of a session's own rule among its tags, by which sessions are found."""
    return KEEP_MARK + msgspec.json.encode(rule).decode()


def rule_of_mark(mark: str) -> Retention | None:
    """Return the rule of a mark; None if this release cannot read it."""
    try:
        return msgspec.json.decode(mark.removeprefix(KEEP_MARK), type=Retention)
    except (msgspec.MsgspecError, InvalidData):
        return None


def _table(given: object, path: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidData(path, f"expected a table, got {brief(given)}")
    return given


def _rule(given: object, path: str) -> Retention:
    table = _table(given, path)
    for name in table:
        if name not in _FIELDS:
            known = ", ".join(_FIELDS) if path != "$" else ", ".join((*_FIELDS, "tags", "owners"))
            raise InvalidData(f"{path}.{name}", f"this is not a setting; there are {known}")
    made = {name: span_of(table[name], f"{path}.{name}") for name in ("age", "idle") if name in table}
    versions = table.get("versions")
    try:
        return Retention(age=made.get("age"), idle=made.get("idle"), versions=versions)
    except InvalidData as error:
        raise InvalidData(path + error.path.removeprefix("$"), error.problem) from None


_FIELDS = ("age", "idle", "versions")
