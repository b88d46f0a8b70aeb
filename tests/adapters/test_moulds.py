"""A mould makes copies of a model that equal it and share nothing that could be changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("pydantic")

from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, PrivateAttr

from perdure.adapters.moulds import Mould


class Inner(BaseModel):
    name: str = ""
    numbers: list[int] = []
    anything: Any = None


class Outer(BaseModel):
    text: str | None = None
    inner: Inner | None = None
    several: list[Inner] | None = None
    by_name: dict[str, Any] = {}
    words: set[str] | None = None
    anything: Any = None


class Loose(Inner):
    model_config = ConfigDict(extra="allow")


class Secretive(Inner):
    _kept: list[int] = PrivateAttr(default_factory=list)


plain = st.none() | st.integers() | st.text(max_size=3) | st.booleans()
anything = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)
inners = st.builds(Inner, anything=anything) | st.builds(
    Inner, name=st.text(max_size=3), numbers=st.lists(st.integers())
)
outers = st.builds(
    Outer,
    inner=st.none() | inners,
    several=st.none() | st.lists(inners, max_size=3),
    by_name=st.dictionaries(st.text(max_size=2), anything | inners, max_size=3),
    anything=anything | inners,
)


def changeable(value: Any) -> list[Any]:
    """Return every object within a value that could be changed."""
    if isinstance(value, BaseModel):
        return [
            value,
            value.__pydantic_fields_set__,
            *(x for each in value.__dict__.values() for x in changeable(each)),
        ]
    if isinstance(value, dict):
        return [value, *(x for each in value.values() for x in changeable(each))]
    if isinstance(value, list | set):
        return [value, *(x for each in value for x in changeable(each))]
    return []


@given(outers)
def test_copies_are_equal_and_apart(model: Outer) -> None:
    """They have the same values and the same fields set, and each has its own changeable objects."""
    before = copy.deepcopy(model)
    mould = Mould(model)
    one, other = mould.copy(), mould.copy()
    for made in (one, other):
        assert made == before
        assert made.model_dump_json() == before.model_dump_json()
        assert made.model_dump(exclude_unset=True) == before.model_dump(exclude_unset=True)
        assert list(made.__dict__) == list(before.__dict__)
    mine, others = {id(each) for each in changeable(one)}, {id(each) for each in changeable(other)}
    assert not mine & others
    one.text = "changed"
    one.by_name["changed"] = 1
    assert mould.copy() == other == before


@pytest.mark.parametrize("kind", [Loose, Secretive])
def test_models_with_more_than_fields_are_copied_whole(kind: type[Inner]) -> None:
    """This holds for models that allow unknown fields, and for models with private attributes."""
    model = kind.model_validate({"name": "a", **({"more": [1]} if kind is Loose else {})})
    if isinstance(model, Secretive):
        model._kept.append(1)
    mould = Mould(Outer(inner=model, several=[model]))
    one, other = mould.copy(), mould.copy()
    assert one == other == Outer(inner=model, several=[model])
    for made in (one.inner, other.inner):
        assert isinstance(made, kind)
        (made._kept if isinstance(made, Secretive) else made.more).append(2)  # type: ignore[attr-defined]
    assert (model._kept if isinstance(model, Secretive) else model.more) == [1]  # type: ignore[attr-defined]
