"""Turns pydantic-ai's errors into ours. This module imports pydantic-ai, so nothing imports it at the top."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit

from pydantic_ai.exceptions import AgentRunError, ModelHTTPError, UserError
from pydantic_ai.models import Model

from perdure.errors import ConfigurationError, ContextTooLong, PerdureError, RequestRefused, TransientDriverError
from perdure.model.definition import ModelConfig
from perdure.model.value import clean_text

FAILURES = (AgentRunError, UserError)
"""The errors that pydantic-ai raises when a request fails."""

# Time-out, conflict and rate limit: another try may help, as it may for any status of 500 and more.
_PASSING = {408, 409, 429}
_VARIABLE = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`")
_SECRET_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
# A shorter value may be a plain word, as in TOKENIZERS_PARALLELISM=false.
_SHORTEST = 8
_NO_CREDIT = re.compile(r"quota|billing|credit|(spend|usage)_limit")
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|(prompt|input|request)( is |_)too[ _](long|large)"
    r"|too many (input )?tokens|token count .*exceeds",
    re.IGNORECASE,
)


def driver_error(error: Exception, config: ModelConfig, model: Model[Any]) -> PerdureError:
    """Return our error for one of pydantic-ai's: what failed and why, without headers and without the key.

    The status and the provider's text decide which, because pydantic-ai's finer classes come and go with its releases.
    """
    reason = _reason(error, config, model)
    if isinstance(error, UserError):
        return ConfigurationError(f"{config.name} cannot be asked this: {reason}.")
    status = error.status_code if isinstance(error, ModelHTTPError) else None
    if status in (None, 400, 413, 422) and _TOO_LONG.search(f"{_kind(error)} {reason}"):
        return ContextTooLong(config.name, reason, status=status)
    if _may_pass(error, status):
        retry_after = getattr(error, "retry_after", None)
        reason = reason if status else f"{reason} ({_address(config, model)})"
        return TransientDriverError(config.name, reason, status=status, retry_after=retry_after)
    return RequestRefused(config.name, reason, status=status)


def _address(config: ModelConfig, model: Model[Any]) -> str:
    """Return the address at which a model is asked, without credentials, path or parameters."""
    parts = urlsplit(config.base_url or getattr(model, "base_url", None) or "")
    return f"at {parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else f"of {config.provider}"


def not_set_up(config: ModelConfig, error: UserError) -> ConfigurationError:
    """Return the error for a model that cannot be made. pydantic-ai names the missing variable, in its own terms."""
    variable = _VARIABLE.search(str(error))
    return unset(config, variable[1]) if variable else ConfigurationError(f"{config.name} cannot be asked: {error}")


def unknown(config: ModelConfig, error: Exception) -> ConfigurationError:
    what = f"{config.name} cannot be asked: {str(error).rstrip('.')}".rstrip("?. ")
    advice = "Name a model with its provider, such as 'openai:gpt-5'. The model 'offline' needs none."
    return ConfigurationError(f"{what}.", advice, missing="model", name=config.name)


def unset(config: ModelConfig, variable: str) -> ConfigurationError:
    other = " The model's api_key_env may name another that holds the key." if "KEY" in variable else ""
    return ConfigurationError(
        f"{config.name} cannot be asked: the environment variable {variable} is not set. Set it.{other}"
    )


def unfit(config: ModelConfig) -> ConfigurationError:
    where = config.api_key_env or "its environment variable"
    return ConfigurationError(
        f"{config.name} cannot be asked: the key in {where} cannot be sent, because it contains a line break or a "
        "character outside ASCII. Copy the key again."
    )


def _may_pass(error: Exception, status: int | None) -> bool:
    """Tell whether another try may help. Without a status, the connection failed. An empty account stays empty."""
    if status is None:
        return True
    if status == 429 and _NO_CREDIT.search(_kind(error)):
        return False
    advised: bool | None = getattr(error, "provider_retry_hint", None)
    return status in _PASSING or status >= 500 if advised is None else advised


def _said(error: Exception) -> Mapping[str, Any]:
    """Return the object in which a provider reports an error, wherever it is in the body."""
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, Mapping) else body
    return inner if isinstance(inner, Mapping) else {"message": inner}


def _kind(error: Exception) -> str:
    said = _said(error)
    return f"{said.get('code')} {said.get('type')}"


def _reason(error: Exception, config: ModelConfig, model: Model[Any]) -> str:
    """Return what the provider said, in one line of bounded length, with secrets struck out."""
    message = _said(error).get("message")
    text = message if isinstance(message, str) and message.strip() else str(error)
    return " ".join(clean_text(_struck(text, config, model)).split())[:500].rstrip(". ")


def keys_of(model: Model[Any]) -> list[str]:
    """Return the keys that a model's client holds, wherever its maker keeps them."""
    client = getattr(model.provider, "client", None)
    holders = (client, getattr(client, "_api_client", None))  # the second is Google's
    found = [getattr(holder, name, None) for holder in holders for name in ("api_key", "auth_token")]
    return [key for key in found if isinstance(key, str)]


def _struck(text: str, config: ModelConfig, model: Model[Any]) -> str:
    """Return a text without secrets, in whichever form it quotes them."""
    # The longest first: one may contain another, and its rest would stay.
    for secret in sorted(_secrets(config, model), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _secrets(config: ModelConfig, model: Model[Any]) -> set[str]:
    named = [value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)]
    known = {value.strip() for value in named if len(value.strip()) >= _SHORTEST}
    # A known key counts at almost any length.
    keys = (os.environ.get(config.api_key_env or "", "").strip(), *(key.strip() for key in keys_of(model)))
    known |= {key for key in keys if len(key) > 3}
    return {form for secret in known for form in _forms(secret)}


def _forms(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, as Python and JSON escape it, and as an address contains it."""
    plain = secret.encode("utf-8", "surrogateescape")
    return secret, repr(secret)[1:-1], repr(plain)[2:-1], json.dumps(secret)[1:-1], quote(plain), quote_plus(plain)
