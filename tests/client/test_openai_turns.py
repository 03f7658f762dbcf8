"""Messages in the form in which OpenAI's clients send them, as those put them on the wire."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest

from helpers.families import PICTURE, SOUND
from helpers.servers import CHAIN, family_logic, local_router, local_stage
from omnistage.client import AsyncOmni, BadRequestError, Options
from omnistage.client import request as requests
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import stage_pb2

PNG = png(PICTURE)
WAV = wav(SOUND, formulas.SAMPLE_RATE_HZ)


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is in this image?"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(PNG)}", "detail": "auto"}},
        ],
    },
    {
        "role": "assistant",
        "content": "A cat.",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    },
    {"role": "user", "content": [{"type": "text", "text": "Who is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "That "}, {"type": "refusal", "refusal": "I cannot say."}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And what is said here?"},
            {"type": "input_audio", "input_audio": {"data": text_of(WAV), "format": "wav"}},
        ],
    },
]
"""A conversation with all that the models here take of it."""


def test_each_message_arrives_with_its_role_and_its_parts_in_order() -> None:
    sent = requests.for_conversation(MESSAGES, Options()).complete().thinker.messages
    assert [message.role for message in sent] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [[_told(part) for part in message.parts] for message in sent] == [
        ["Be brief."],
        ["What is in this image?", ("image/png", PNG)],
        ["A cat."],
        ["Who is it?"],
        ["That ", "I cannot say."],
        ["And what is said here?", ("audio/wav", WAV)],
    ]


def _told(part: stage_pb2.Part) -> str | tuple[str, bytes]:
    return part.text if part.HasField("text") else (part.media.media_type, part.media.data)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Address of a router whose pipeline sees pictures and hears sound."""
    async with AsyncExitStack() as house:
        stages = {kind: (await house.enter_async_context(local_stage(family_logic("toy-omni", kind)))).address for kind in CHAIN}
        yield (await house.enter_async_context(local_router(stages, load_pipeline("toy-omni")))).address


async def test_a_model_sees_and_hears_what_was_sent_so(address: str) -> None:
    items = formulas.items(
        [
            *("s", "Be brief.", "u", "What is in this image?", PICTURE, "a", "A cat.", "u", "Who is it?"),
            *("a", "That ", "I cannot say.", "u", "And what is said here?", SOUND),
        ]
    )
    expected = "".join(formulas.word(formulas.omni_token(3, items, number)) for number in range(formulas.NATURAL_LENGTH))
    async with AsyncOmni(address=address) as omni:
        answer = await omni.chat(MESSAGES, seed=3)
    assert answer.text == expected
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(items), formulas.NATURAL_LENGTH)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "tool", "tool_call_id": "1", "content": "18"}, "conversation[0].role: is 'tool'; no pipeline calls tools or functions"),
        ({"role": "function", "content": "18"}, "conversation[0].role: is 'function'; no pipeline calls tools or functions"),
        ({"role": ["user"], "content": "x"}, "conversation[0].role: is ['user']"),
        ({"role": "user", "name": "Bob", "content": "x"}, "conversation[0].name: speakers have no names here"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
            "conversation[0].tool_calls: no pipeline calls tools",
        ),
        ({"role": "assistant", "content": None, "audio": {"id": "audio_1"}}, "conversation[0].audio: sounds go into audios"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "conversation[0].refusal: is said as text"),
        ({"role": "assistant", "content": None, "refusal": None}, "conversation[0].content: is None; it must be text, or a list of parts"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://127.0.0.1/cat.png"}}]},
            "conversation[0].content[0].image_url.url: https://127.0.0.1/cat.png is a URL",
        ),
        ({"role": "user", "content": "x", "weight": 1}, "conversation[0]: has unknown keys weight; known: role, content"),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]},
            "conversation[0].content[0].type: is 'file'; known: text",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "not base64", "format": "wav"}}]},
            "conversation[0].content[0].input_audio.data: ",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": text_of(PNG), "format": "wav"}}]},
            "conversation[0].content[0].input_audio.data: ",
        ),
    ],
)
def test_what_the_models_here_do_not_take_is_named(message: Mapping[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        requests.for_conversation([message], Options()).complete()
    assert caught.value.message.startswith(told)
