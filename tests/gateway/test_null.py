"""A field that is null counts as not given, in every body and in every object within one."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import ValidationError

from omnistage.gateway import audio, chat, films, pictures, responses
from omnistage.gateway.body import Body

MODULES = (audio, chat, films, pictures, responses)
VALUES: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "Hello"}],
    "input": "Hello",
    "prompt": "Hello",
    "name": "answer",
    "type": "text",
    "voice": "toy",
    "images": [{"image_url": "data:image/png;base64,"}],
}
"""Good values for required fields."""


def bodies() -> list[type[Body]]:
    """The bodies of all endpoints, and the objects within them."""
    found = [one for module in MODULES for one in vars(module).values() if isinstance(one, type) and issubclass(one, Body)]
    return sorted({one for one in found if one.__module__ != Body.__module__}, key=lambda one: one.__name__)


@pytest.mark.parametrize("body", bodies())
def test_null_is_not_given(body: type[Body]) -> None:
    required = {name: VALUES[name] for name, field in body.model_fields.items() if field.is_required()}
    expected = body.model_validate(required)
    optional = [field.alias or name for name, field in body.model_fields.items() if not field.is_required()]
    assert optional
    for name in optional:
        assert body.model_validate({**required, name: None}) == expected, name
    assert body.model_validate({**required, **dict.fromkeys(optional)}) == expected


@pytest.mark.parametrize("body", bodies())
def test_null_is_no_value_of_a_field_that_must_be_given_and_makes_no_field_known(body: type[Body]) -> None:
    required = {name: VALUES[name] for name, field in body.model_fields.items() if field.is_required()}
    for name in required:
        with pytest.raises(ValidationError, match="Field required"):
            body.model_validate({**required, name: None})
    with pytest.raises(ValidationError, match="Extra inputs"):
        body.model_validate({**required, "no_such_field": None})


def test_a_speech_with_nulls_is_the_speech_without(client: openai.OpenAI) -> None:
    asked = {"model": "toy", "voice": "toy", "input": "Hello", "extra_body": {"seed": 7}}
    nulls = {"response_format": None, "stream_format": None, "speed": None, "instructions": None}
    one = client.audio.speech.create(**asked)  # type: ignore[arg-type]
    other = client.audio.speech.create(**{**asked, "extra_body": {"seed": 7, **nulls}})  # type: ignore[arg-type]
    assert one.content == other.content
