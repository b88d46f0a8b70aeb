"""Names and addresses that carry secrets, which are never stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perdure.errors import ConfigurationError

_SECRET = re.compile(
    r"(^|[-_.])(api[-_]?(key|token)s?|private[-_]?key|secret|password|passwd|authorization|bearer|cookie"
    r"|(access|auth|refresh|session)[-_]?token)($|[-_.])",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# In an address, these name a secret too: `?key=` of Google, `?code=` and `?sig=` of Azure.
_SECRET_PARAMETER = re.compile(r"(^|[-_.])(key|token|sig|signature|auth|pwd|code)$", re.IGNORECASE)
_ADDRESS = re.compile(
    r"(?P<scheme>[^/?#]*//)?(?P<user>[^/?#]*@)?(?P<path>[^?#]*)(?P<query>\?[^#]*)?(?P<fragment>#.*)?", re.DOTALL
)


def refuse_secrets(mapping: Mapping[str, Any], path: str) -> None:
    """Raise ConfigurationError if a key, however deep in a mapping to be stored, looks like the name of a secret."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(path, mapping)]
    while todo:
        at, value = todo.pop()
        if id(value) in seen:  # a mapping may contain itself
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and value[key] and _is_secret(key):
                    raise ConfigurationError(
                        f"{at}.{key} looks like a secret, and would be stored with every session. Leave it out and "
                        "name the environment variable that holds it: ModelConfig(api_key_env='…')."
                    )
            todo.extend((f"{at}.{key}"[:200] if isinstance(key, str) else at, value[key]) for key in value)
        elif isinstance(value, list | tuple):
            todo.extend((f"{at}[{place}]"[:200], item) for place, item in enumerate(value))


def without_secrets(address: str) -> str:
    """Return an address without its user and password, and without parameters that look like secrets."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return address
    kept = [_parameters(found[name] or "") for name in ("query", "fragment")]
    return "".join((found["scheme"] or "", found["path"], *kept))


def _parameters(part: str) -> str:
    """Return the query or the fragment of an address without secrets, with its first character."""
    kept = [each for each in part[1:].split("&") if not _carries_secret(each)]
    return part[:1] + "&".join(kept) if any(kept) or not part[1:] else ""


def _carries_secret(parameter: str) -> bool:
    from urllib.parse import unquote_plus

    name, _, value = parameter.partition("=")
    plain = unquote_plus(name)
    return bool(value) and (_is_secret(plain) or bool(_SECRET_PARAMETER.search(_CAMEL.sub("_", plain))))


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(_CAMEL.sub("_", name)))
