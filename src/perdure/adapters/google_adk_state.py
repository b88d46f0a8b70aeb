"""The state of an ADK session in perdure's metadata. Each value has a key, so that an unchanged one costs nothing.

Values that perdure's JSON cannot express (NaN, lone surrogates, numbers of more than 64 bits) are kept together as one
JSON text under one key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from perdure.adapters.foreign import is_plain
from perdure.model.value import thawed

_VALUE, _ODD = "state:", "state"


def state_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that metadata has, for a caller that may change it."""
    values = {key.removeprefix(_VALUE): thawed(value) for key, value in metadata.items() if key.startswith(_VALUE)}
    return {**values, **_odd_in(metadata)}


def with_state(metadata: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with its state changed by a delta. None is a value like any other."""
    changed, odd = dict(metadata), _odd_in(metadata)
    for key, value in delta.items():
        # The value before may be kept in the other way.
        changed.pop(_VALUE + key, None)
        odd.pop(key, None)
        if is_plain({key: value}):
            changed[_VALUE + key] = value
        else:
            odd[key] = value
    changed.pop(_ODD, None)
    return {**changed, _ODD: json.dumps(odd)} if odd else changed


def _odd_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    odd: dict[str, Any] = json.loads(metadata.get(_ODD, "{}"))
    return odd
