"""The agents that are served, as models."""

from __future__ import annotations

from typing import TypedDict

from perdure.server.call import Call
from perdure.server.openai.errors import not_found


class ModelForm(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str


class ModelsForm(TypedDict):
    object: str
    data: list[ModelForm]


async def list_models(call: Call) -> ModelsForm:
    """Return the agents that a request can name as its model."""
    return {"object": "list", "data": [_form(name) for name in call.service.agents]}


async def get_model(call: Call) -> ModelForm:
    name = call.path("model")
    if name not in call.service.agents:
        raise not_found("Model", name)
    return _form(name)


def _form(name: str) -> ModelForm:
    return {"id": name, "object": "model", "created": 0, "owned_by": "perdure"}
