"""The errors of pydantic-ai as ours. It imports pydantic-ai, so nothing imports it at the top."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pydantic_ai.exceptions import (
    AgentRunError,
    ModelAPIError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRequestRejectedError,
    UserError,
)
from pydantic_ai.models import Model

from perdure.errors import ConfigurationError, PerdureError
from perdure.loop.drivers.retry import ContextTooLong, RequestRefused, TransientDriverError
from perdure.model.definition import ModelConfig
from perdure.model.value import clean_text

FAILURES = (AgentRunError, UserError)
"""What pydantic-ai raises when a request fails."""

_PASSING = {408, 409, 429}
_VARIABLE = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`")
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|(prompt|input|request) is too (long|large)|too many (input )?tokens",
    re.IGNORECASE,
)


def driver_error(error: Exception, config: ModelConfig, model: Model[Any]) -> PerdureError:
    """The error of ours for one of pydantic-ai's: what failed and why, without headers and without the key."""
    reason = _reason(error, config, model)
    if isinstance(error, UserError):
        return ConfigurationError(f"{config.name} cannot be asked this: {reason}.")
    if not isinstance(error, ModelAPIError):
        return TransientDriverError(config.name, reason)
    status = error.status_code if isinstance(error, ModelHTTPError) else None
    if _may_pass(error, status):
        return TransientDriverError(config.name, reason, status=status, retry_after=error.retry_after)
    if _is_too_long(error, status, reason):
        return ContextTooLong(config.name, reason, status=status)
    return RequestRefused(config.name, reason, status=status)


def not_set_up(config: ModelConfig, error: UserError) -> ConfigurationError:
    """The error for a model that cannot be made: pydantic-ai names the variable that is missing, in its own terms."""
    variable = _VARIABLE.search(str(error))
    return unset(config, variable[1]) if variable else ConfigurationError(f"{config.name} cannot be asked: {error}")


def unset(config: ModelConfig, variable: str) -> ConfigurationError:
    other = ", or name another that holds the key: ModelConfig(api_key_env='…')" if "KEY" in variable else ""
    return ConfigurationError(
        f"{config.name} cannot be asked: the environment variable {variable} is not set. Set it{other}."
    )


def _may_pass(error: ModelAPIError, status: int | None) -> bool:
    """Whether asking again may help: the provider's own word counts most, then the status, then the kind of error."""
    if isinstance(error, ModelQuotaExceededError):
        return False
    hint = error.provider_retry_hint if isinstance(error, ModelHTTPError) else None
    if hint is not None:
        return hint
    if status is not None:
        return status in _PASSING or status >= 500
    return not isinstance(error, ModelRequestRejectedError)


def _is_too_long(error: ModelAPIError, status: int | None, reason: str) -> bool:
    if isinstance(error, ModelContextWindowExceededError) or status == 413:
        return True
    return status in (400, 422) and _TOO_LONG.search(reason) is not None


def _reason(error: Exception, config: ModelConfig, model: Model[Any]) -> str:
    """What the provider said, in one line of bounded length, with the key struck out should it have been quoted."""
    body = getattr(error, "body", None)
    body = body.get("error", body) if isinstance(body, Mapping) else body
    said = body.get("message") if isinstance(body, Mapping) else body
    text = said if isinstance(said, str) and said.strip() else str(error)
    for secret in _secrets(config, model):
        text = text.replace(secret, "…")
    return " ".join(clean_text(text).split())[:500].rstrip(". ")


def _secrets(config: ModelConfig, model: Model[Any]) -> set[str]:
    client = getattr(model.provider, "client", None)
    known = [os.environ.get(config.api_key_env or ""), getattr(client, "api_key", None)]
    return {secret for secret in known if isinstance(secret, str) and len(secret) > 3}
