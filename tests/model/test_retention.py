"""Rules for how long sessions are kept, and which rules a session has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import InvalidData, Retention, RetentionPolicy
from perdure.model.retention import hold_tag, is_hold, keep_mark, rule_of_mark, span_of
from perdure.model.session import AgentSessionInfo, SessionId

DAY = timedelta(days=1)
NOW = datetime(2026, 6, 1, tzinfo=UTC)
spans = st.none() | st.timedeltas(timedelta(microseconds=1), timedelta(days=20_000))
rules = st.builds(Retention, age=spans, idle=spans, versions=st.none() | st.integers(1, 10**6))


def info(created: float = 0.0, updated: float = 0.0, **more: Any) -> AgentSessionInfo:
    """Return a header of a session that was created and updated that many days ago."""
    times = {"created_at": NOW - created * DAY, "updated_at": NOW - updated * DAY}
    return AgentSessionInfo(SessionId("s"), "agent", **{**times, **more})


def test_age_counts_from_the_creation_and_idle_from_the_last_update() -> None:
    """A session is over once it is older than one of both, but not at that very moment."""
    rule = Retention(age=10 * DAY, idle=3 * DAY)
    assert not rule.is_over(info(9, 2), NOW)
    assert not rule.is_over(info(10, 3), NOW)
    assert rule.is_over(info(10.1, 0), NOW)
    assert rule.is_over(info(5, 3.1), NOW)
    assert not Retention().is_over(info(10_000, 10_000), NOW)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40))
def test_older_versions_are_kept_by_number(kept: int, first: int, more: int) -> None:
    """Once the rule is applied, exactly that number is left before the newest, and it has nothing more to do."""
    before = info(version=first + more, first_version=first)
    oldest = Retention(versions=kept).forgets_before(before)
    if oldest is None:
        assert more <= kept
        return
    after = info(version=before.version + 1, first_version=oldest)  # forgetting makes a version
    assert after.version - after.first_version == kept
    assert Retention(versions=kept).forgets_before(after) is None


@given(st.lists(rules, min_size=1, max_size=4), st.floats(0, 30_000), st.floats(0, 30_000))
def test_of_several_tags_the_longest_keeps(several: list[Retention], old: float, rest: float) -> None:
    """A session or a version goes only once the rules of all its tags let it go."""
    policy = RetentionPolicy(tags={str(number): rule for number, rule in enumerate(several)})
    header = info(old, min(old, rest), tags=tuple(policy.tags), version=500_000)
    assert policy.is_over(header, NOW) == all(rule.is_over(header, NOW) for rule in several)
    found = [rule.forgets_before(header) for rule in several]
    assert policy.forgets_before(header) == (None if None in found else min(filter(None, found)))


def test_the_most_specific_rule_counts_alone() -> None:
    """A session's own rule comes first, then its tags', its owner's, the default; a rule keeps all it does not name."""
    week, month, year = (Retention(idle=days * DAY) for days in (7, 30, 365))
    policy = RetentionPolicy(default=week, tags={"a": month, "b": year}, owners={"ada": Retention(versions=5)})
    assert policy.rules_of(info()) == [week]
    assert policy.rules_of(info(owner="bob", tags=("c",))) == [week]
    assert policy.rules_of(info(owner="ada")) == [Retention(versions=5)]
    assert policy.rules_of(info(owner="ada", tags=("a",))) == [month]
    assert policy.rules_of(info(owner="ada", tags=("a", "c", "b"))) == [month, year]
    assert policy.rules_of(info(owner="ada", tags=("a",), keep=Retention())) == [Retention()]
    assert RetentionPolicy().rules_of(info()) == [Retention()]
    assert RetentionPolicy.of(week) == RetentionPolicy(default=week)


@given(rules)
def test_a_mark_stands_for_one_rule(rule: Retention) -> None:
    """A session is found by its mark, and the rule is read from it."""
    assert rule_of_mark(keep_mark(rule)) == rule


def test_a_mark_that_cannot_be_read_stands_for_none() -> None:
    """A newer release may know rules that this one does not."""
    assert rule_of_mark(keep_mark(Retention()) + "]") is None
    assert rule_of_mark('{"versions": -4}') is None


@pytest.mark.parametrize(
    ("text", "days"), [("1d", 1), ("2w", 14), ("1y", 365), ("36h", 1.5), ("30min", 1 / 48), ("30m", 1 / 48)]
)
def test_spans_as_people_write_them(text: str, days: float) -> None:
    """A span is a number and a unit."""
    assert span_of(text, "$") == days * DAY


def test_a_policy_as_a_file_says_it() -> None:
    """The default is at the top; an empty table keeps for ever."""
    plain = {
        "idle": "90d",
        "tags": {"audit": {"age": "7y", "versions": 3}, "vip": {}},
        "owners": {"ada": {"age": "1d"}},
    }
    assert RetentionPolicy.from_dict(plain) == RetentionPolicy(
        default=Retention(idle=90 * DAY),
        tags={"audit": Retention(age=7 * 365 * DAY, versions=3), "vip": Retention()},
        owners={"ada": Retention(age=DAY)},
    )
    assert RetentionPolicy.from_dict({}) == RetentionPolicy()


@pytest.mark.parametrize(
    ("plain", "path"),
    [
        ({"idle": 90}, "$.idle"),
        ({"idle": "90 days"}, "$.idle"),
        ({"idle": "0d"}, "$.idle"),
        ({"age": "999999999y"}, "$.age"),
        ({"age": "-1d"}, "$.age"),
        ({"versions": 0}, "$.versions"),
        ({"versions": "3"}, "$.versions"),
        ({"idel": "90d"}, "$.idel"),
        ({"tags": ["audit"]}, "$.tags"),
        ({"tags": {"audit": "7y"}}, "$.tags.audit"),
        ({"tags": {"audit": {"age": True}}}, "$.tags.audit.age"),
        ({"tags": {"audit": {"versions": -1}}}, "$.tags.audit.versions"),
        ({"owners": {"ada": {"tags": {}}}}, "$.owners.ada.tags"),
        (["idle"], "$"),
    ],
)
def test_a_wrong_policy_names_the_field(plain: Any, path: str) -> None:
    """InvalidData has the path to the wrong value."""
    with pytest.raises(InvalidData) as caught:
        RetentionPolicy.from_dict(plain)
    assert caught.value.path == path


@pytest.mark.parametrize(
    "wrong", [{"idle": 3}, {"age": timedelta(0)}, {"idle": -DAY}, {"versions": 0}, {"versions": 1.5}]
)
def test_a_wrong_rule_is_refused(wrong: dict[str, Any]) -> None:
    """A time is a positive timedelta, and a number is at least 1."""
    with pytest.raises(InvalidData) as caught:
        Retention(**wrong)
    assert caught.value.path == f"$.{next(iter(wrong))}"


def test_the_tags_of_a_hold() -> None:
    """The tags are `hold`, and `hold:` with the name of a case."""
    assert [tag for tag in ("hold", "hold:", "hold:a", "holder", "on-hold", "HOLD", "") if is_hold(tag)] == [
        *("hold", "hold:", "hold:a")
    ]
    assert (hold_tag(None), hold_tag("a")) == ("hold", "hold:a")
