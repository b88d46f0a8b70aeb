"""The state of an ADK session in perdure's metadata: a key for each value, so that one that stays costs nothing.

What perdure's JSON cannot say (NaN, half characters, numbers of more than 64 bits) is kept as a JSON text, all of it
under one key.
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
    """Return metadata whose state a delta has changed. None is a value, as any other is."""
    changed, odd = dict(metadata), _odd_in(metadata)
    for key, value in delta.items():
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
