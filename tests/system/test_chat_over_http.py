"""Features over HTTP that only a model with a tokenizer shows: how likely tokens were, texts that follow a constraint, and pictures. Its
weights are random, so words mean nothing."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

from helpers.gateway import gateway
from helpers.media_files import picture
from helpers.omni_family import OmniFamily
from omnistage.client import Omni, TextDelta

HELLO: list[Any] = [{"role": "user", "content": "What is a kite?"}]
TOKENS = 12


@pytest.fixture(scope="module")
def model(omni_family: OmniFamily) -> str:
    """The pipeline."""
    return f"{omni_family.name}-text"


@pytest.fixture(scope="module")
def omni(omni_folder: Path, model: str) -> Iterator[Omni]:
    with Omni(model_path=omni_folder, pipeline=model, max_sessions=8) as omni:
        yield omni


@pytest.fixture(scope="module")
def client(omni: Omni, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        gateway(omni.address, tmp_path_factory.mktemp("gateway")) as server,
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as client,
    ):
        yield client


def likely(choice: Choice) -> list[Any]:
    assert choice.logprobs is not None and choice.logprobs.content is not None
    return list(choice.logprobs.content)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_tokens_are_told_with_their_texts_and_how_likely_they_were(
    client: openai.OpenAI, model: str, omni: Omni, temperature: float
) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": TOKENS, "temperature": temperature, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(model=model, messages=HELLO, extra_body={"ignore_eos": True}, **options).choices[0]
    deltas = [event for event in omni.stream_chat(HELLO, ignore_eos=True, outputs=["text"], **options) if isinstance(event, TextDelta)]
    rows = likely(answer)
    assert answer.message.content == "".join(delta.text for delta in deltas)
    assert [row.logprob for row in rows] == [logprob for delta in deltas for logprob in delta.logprobs]
    tops = [[(one.piece, one.logprob) for one in top] for delta in deltas for top in delta.top_logprobs]
    assert [[(bytes(one.bytes), one.logprob) for one in row.top_logprobs] for row in rows] == tops
    assert b"".join(bytes(row.bytes) for row in rows).decode("utf-8", "replace") == answer.message.content
    streamed = client.chat.completions.create(model=model, messages=HELLO, extra_body={"ignore_eos": True}, stream=True, **options)
    pieces = [piece for chunk in streamed for piece in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()]
    assert [piece.to_dict() for piece in pieces] == [row.to_dict() for row in rows]


class PersonSchema(BaseModel):
    is_tall: bool
    kind: Literal["child", "adult"]


def test_a_text_keeps_to_a_schema(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=HELLO, response_format=PersonSchema, temperature=0.9)
    assert isinstance(answer.choices[0].message.parsed, PersonSchema) and answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(model=model, input="Who?", text_format=PersonSchema, temperature=0.9)
    assert isinstance(response.output_parsed, PersonSchema) and response.status == "completed"


def test_a_text_keeps_to_a_choice_and_to_json(client: openai.OpenAI, model: str) -> None:
    chosen = client.chat.completions.create(model=model, messages=HELLO, extra_body={"choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    matched = client.chat.completions.create(model=model, messages=HELLO, extra_body={"regex": "[ab]{3}"})
    assert re.fullmatch("[ab]{3}", matched.choices[0].message.content or "")
    flag: Any = {"type": "json_schema", "json_schema": {"name": "flag", "strict": True, "schema": {"type": "boolean"}}}
    answers = client.chat.completions.create(model=model, messages=HELLO, n=4, temperature=1.5, response_format=flag)
    assert {type(json.loads(choice.message.content or "")) for choice in answers.choices} == {bool}


@pytest.mark.parametrize(
    ("schema", "told"), [({"type": "stringy"}, "response_format"), ({"$ref": "#/nowhere"}, "response_format")], ids=["type", "reference"]
)
def test_a_schema_that_is_none_is_refused(client: openai.OpenAI, model: str, schema: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=HELLO, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
    assert caught.value.param == told


def test_pictures_are_seen_and_their_tokens_count(client: openai.OpenAI, model: str) -> None:
    def asked(seed: int) -> Any:
        url = f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"
        content: Any = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        return client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], max_tokens=TOKENS, logprobs=True, extra_body={"ignore_eos": True}
        )

    first, same, other = asked(1), asked(1), asked(2)
    assert [row.logprob for row in likely(first.choices[0])] == [row.logprob for row in likely(same.choices[0])]
    assert [row.logprob for row in likely(first.choices[0])] != [row.logprob for row in likely(other.choices[0])]
    plain = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "What is this?"}], max_tokens=1)
    assert first.usage.prompt_tokens > plain.usage.prompt_tokens > 0 if plain.usage else False


def test_what_was_computed_before_is_told(client: openai.OpenAI, model: str) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is a kite? " * 60}]
    first, second = (client.chat.completions.create(model=model, messages=turns, max_tokens=1).usage for _ in range(2))
    assert first is not None and second is not None and first.prompt_tokens_details and second.prompt_tokens_details
    assert (first.prompt_tokens_details.cached_tokens, first.prompt_tokens) == (0, second.prompt_tokens)
    assert 0 < (second.prompt_tokens_details.cached_tokens or 0) < second.prompt_tokens
