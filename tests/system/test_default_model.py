"""The whole chain with the default model: four real processes that speak what they print."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import pytest_asyncio

from benchmarks.asr import recognise, recogniser, word_error_rate
from helpers import lengths
from helpers.gateway import gateway, local_gateway
from helpers.openai_document import events_of
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack
from omnistage.client import AsyncOmni
from omnistage.client.answer import Answer
from omnistage.client.files import to_pcm16
from omnistage.models.text.thinker import USUAL_TOKENS

QUESTIONS = ("How do plants make food?", "What is a river?", "Why should I drink water?")
MAX_TOKENS = 30
LULLABY = "Write a lullaby."

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address() -> AsyncIterator[str]:
    """The address of a stack as the command starts it: its tensors are small enough to travel inline."""
    stack = Stack(layout_of(Choice(["smol"])))
    await stack.start()
    try:
        yield stack.address
    finally:
        await stack.stop()


async def ask(omni: AsyncOmni, question: str, seed: int) -> Answer:
    return await omni.generate(question, seed=seed, max_tokens=MAX_TOKENS, temperature=0.7)


def sound(answer: Answer) -> np.ndarray:
    assert answer.audio is not None
    return answer.audio.samples


async def test_an_endless_repetition_ends_and_is_told(address: str, tmp_path: Path) -> None:
    """The model repeats itself if nothing makes words less likely that were there before."""
    options: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0}
    async with AsyncOmni(address=address) as omni:
        answer = await omni.generate(LULLABY, outputs=["text"], **options)
        tokens = len(answer.token_ids)
        sentence = f"ended at {tokens} tokens, because it repeated itself; "
        assert (answer.finish_reason, answer.notes) == ("repetition", (f"{sentence}max_tokens=N lets it say more",))
        assert tokens < USUAL_TOKENS
    turns: Any = [{"role": "user", "content": LULLABY}]
    with gateway(address, tmp_path) as http:
        async with openai.AsyncOpenAI(base_url=f"http://{http.address}/v1", api_key="any") as client:
            extra = {"repetition_penalty": 1.0}
            completion = await client.chat.completions.create(model="smol", messages=turns, temperature=0, extra_body=extra)
    choice: Any = completion.choices[0]
    assert (choice.message.content, choice.finish_reason) == (answer.text, "stop")
    assert choice.notes == [f"{sentence}a higher max_tokens lets it say more"]


@lengths.one_or_all("question", QUESTIONS)
async def test_the_words_in_the_sound_are_the_words_on_the_screen(address: str, question: str, seed: int) -> None:
    async with AsyncOmni(address=address) as omni:
        await check_heard(await ask(omni, lengths.draw(question, QUESTIONS, seed), 1))


async def check_heard(answer: Answer) -> None:
    model = await asyncio.to_thread(recogniser)
    assert answer.audio is not None
    pair = answer.text, recognise(model, answer.audio.samples, answer.audio.sample_rate)
    assert word_error_rate([pair]) <= 0.1, pair


@lengths.long_form(
    "models/contract/test_contract.py::test_contract_of_a_slow_model",
    "engine/test_engine.py::test_answers_do_not_depend_on_company_order_or_a_break",
    "models/test_code2wav.py::test_sessions_at_once_do_not_touch_each_other",
)
async def test_three_who_ask_at_once_each_hear_their_own_answer(address: str, seed: int) -> None:
    """Bit-equal to what each hears alone: neighbours in a batch change nothing."""
    async with AsyncOmni(address=address) as omni:
        alone = [await ask(omni, question, seed) for question in QUESTIONS]
        together = await asyncio.gather(*(ask(omni, question, seed) for question in QUESTIONS))
    for one, other in zip(alone, together, strict=True):
        assert one.text == other.text
        np.testing.assert_array_equal(sound(one), sound(other))


@lengths.long_form(
    "models/test_smol_thinker.py::test_verbatim_text_comes_out_exactly_and_in_pieces",
    "models/test_voice.py::test_written_forms_are_heard_as_their_words",
)
async def test_say_speaks_exactly_this_text(address: str) -> None:
    text = "The number 42 costs $3.50, said Dr. Smith."
    async with AsyncOmni(address=address) as omni:
        answer = await omni.say(text)
    assert answer.text == text
    await check_heard(answer)


async def test_events_of_speech_over_http_have_the_times_of_words_that_python_gives(address: str) -> None:
    """No later than their sound, which is the same as without them."""
    text = "Dr. Lee came on March 3, 1999: **nobody** was at home."
    async with AsyncOmni(address=address) as omni:
        said = await omni.say(text, outputs=["text", "audio", "alignment"], sample_rate_hz=24_000)
    assert said.audio is not None and len(said.words) > 5
    async with local_gateway(address) as (url, _), httpx2.AsyncClient(base_url=url, timeout=60) as client:
        for granularities in (["word"], None):
            body = {"input": text, "response_format": "pcm", "stream_format": "sse", "timestamp_granularities": granularities}
            words, samples = list[dict[str, Any]](), b""
            for _, event in events_of((await client.post("/v1/audio/speech", json=body)).text):
                if event["type"] == "omnistage.words":
                    words += event["words"]
                    assert min(word["begin_s"] for word in event["words"]) >= len(samples) / 2 / 24_000
                elif event["type"] == "speech.audio.delta":
                    samples += b64decode(event["audio"])
            assert samples == to_pcm16(said.audio.samples)
            assert words == ([asdict(word) for word in said.words] if granularities else [])


async def test_completions_have_the_logprobs_of_chat(address: str) -> None:
    common = {"model": "smol", "max_tokens": 6, "temperature": 0}
    async with local_gateway(address) as (url, _), httpx2.AsyncClient(base_url=url, timeout=60) as client:
        of_chat = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "logprobs": True, "top_logprobs": 2}
        rows = (await client.post("/v1/chat/completions", json={**common, **of_chat})).json()["choices"][0]["logprobs"]["content"]
        (choice,) = (await client.post("/v1/completions", json={**common, "prompt": QUESTIONS[0], "logprobs": 2})).json()["choices"]
    assert choice["logprobs"]["tokens"] == [row["token"] for row in rows] and "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["token_logprobs"] == [row["logprob"] for row in rows]
    tops = [{one["token"]: one["logprob"] for one in row["top_logprobs"]} for row in rows]
    assert choice["logprobs"]["top_logprobs"] == tops and all(len(top) == 2 for top in tops)
    begins = [len("".join(choice["logprobs"]["tokens"][:number])) for number in range(6)]
    assert choice["logprobs"]["text_offset"] == begins
