"""Metadata as heads have it: a large value is stored apart, under its own hash, and written again only if it changes.

A head names it in `hashed` as `metadata KEY`. Null holds its place among the other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure import codec
from perdure.model.value import EMPTY
from perdure.stores.cache import CachedSession, StoredMetadata
from perdure.stores.format.rows import Namer, Values, hash_of

LARGE = 4096
"""The most bytes of a value that is kept among the others. A row of its own takes four pages to write."""
_PART = "metadata "


def stored_metadata(
    metadata: Mapping[str, Any], at_hand: CachedSession | None, name_of: Namer = hash_of
) -> tuple[StoredMetadata, Values]:
    """Return metadata as it is stored, and its new values that are stored apart.

    A value that is the same object in the version at hand is neither checked nor encoded again.
    """
    if at_hand is None or at_hand.metadata is None:
        return taken_apart(metadata, name_of=name_of)
    before, stored = at_hand.session.state.context.metadata, at_hand.metadata
    if metadata is before:
        return stored, {}
    if not stored.apart:
        return taken_apart(metadata, name_of=name_of)
    same = {key: name for key, name in stored.apart.items() if key in metadata and metadata[key] is before[key]}
    return taken_apart(metadata, same, name_of)


def taken_apart(
    metadata: Mapping[str, Any], known: Mapping[str, str] = EMPTY, name_of: Namer = hash_of
) -> tuple[StoredMetadata, Values]:
    """Return metadata as it is stored, and its large values except for those that are known to be stored apart."""
    among = _without(metadata, known) if known else metadata
    codec.check_json(among, "$.state.metadata")
    rest = codec.encode(among)
    if len(rest) > LARGE:
        bodies = {key: codec.encode(value) for key, value in among.items() if isinstance(value, str | Mapping | list)}
        if large := {key: body for key, body in bodies.items() if len(body) > LARGE}:
            apart = {**known, **{key: name_of(body) for key, body in large.items()}}
            rest = codec.encode(_without(metadata, apart))
            return StoredMetadata(rest, apart), {apart[key]: body for key, body in large.items()}
    return StoredMetadata(rest, known), {}


def put_together(rest: Mapping[str, Any], apart: Mapping[str, str], values: Mapping[str, bytes]) -> Mapping[str, Any]:
    """Return metadata as it was before it was taken apart, its keys in the same order."""
    # `rest` has null in the place of each value that is put in, which keeps that place.
    return {**rest, **{key: codec.decode_plain(values[name]) for key, name in apart.items()}} if apart else rest


def parts_of(apart: Mapping[str, str]) -> dict[str, str]:
    """Return the names of values that are stored apart, as entries of a head's `hashed`."""
    return {f"{_PART}{key}": name for key, name in apart.items()}


def apart_in(hashed: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the values that are stored apart, by their keys, from a head's `hashed`."""
    return {part.removeprefix(_PART): name for part, name in hashed.items() if part.startswith(_PART)}


def _without(metadata: Mapping[str, Any], apart: Mapping[str, str]) -> dict[str, Any]:
    return {key: None if key in apart else value for key, value in metadata.items()}
