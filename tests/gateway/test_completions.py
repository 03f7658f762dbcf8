"""Completions over HTTP, as OpenAI's own client asks for them: each prompt is answered as chat answers it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import httpx2
import openai
import pytest

from omnistage.gateway.completions import CompletionRequest, LegacyChoices
from omnistage.models.toy import formulas

ASKED: dict[str, Any] = {"model": "toy", "seed": 5, "max_tokens": 3}
PROMPTS = ["Hello", "Good day"]


def text(prompt: str, number: int = 0) -> str:
    return formulas.text(5 + number, prompt, 3)


def test_a_prompt_is_one_turn_of_chat(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="Hello", **ASKED)
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **ASKED)
    assert (answer.object, answer.id[:5], answer.model) == ("text_completion", "cmpl-", "toy")
    assert [(one.index, one.text, one.finish_reason, one.logprobs) for one in answer.choices] == [(0, text("Hello"), "length", None)]
    assert answer.choices[0].text == chat.choices[0].message.content and answer.usage == chat.usage


def test_without_a_limit_the_whole_answer_comes(client: openai.OpenAI) -> None:
    """OpenAI's own limit was 16 tokens; here it is the pipeline's, as in chat."""
    answer = client.completions.create(model="toy", prompt="Hello", seed=5)
    assert answer.choices[0].text == formulas.text(5, "Hello", formulas.NATURAL_LENGTH) and formulas.NATURAL_LENGTH > 16
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("echo", [False, True])
def test_each_prompt_gets_its_answers_whole_or_streamed(client: openai.OpenAI, echo: bool) -> None:
    expected = [(prompt if echo else "") + text(prompt, number) for prompt in PROMPTS for number in range(2)]
    whole = client.completions.create(prompt=PROMPTS, n=2, best_of=2, echo=echo, **ASKED)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    streamed, ends = defaultdict[int, str](str), list[int]()
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=PROMPTS, n=2, echo=echo, stream=True, **usage, **ASKED)
    for chunk in chunks:
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert ([streamed[number] for number in range(4)], sorted(ends)) == (expected, [0, 1, 2, 3])
    assert last.choices == [] and last.usage == whole.usage and whole.usage is not None
    alone = [client.completions.create(prompt=prompt, **ASKED).usage for prompt in PROMPTS]
    assert whole.usage.prompt_tokens == sum(usage.prompt_tokens for usage in alone if usage is not None)
    assert whole.usage.completion_tokens == 12


def test_it_stops_where_it_is_told(client: openai.OpenAI) -> None:
    words = formulas.text(5, "Hello", 6).split()
    answer = client.completions.create(model="toy", prompt="Hello", seed=5, stop=[words[3]], suffix=None, logit_bias={}, user="ann")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" ".join(words[:3]) + " ", "stop")


@pytest.mark.parametrize("count", [0, 2])
def test_rows_of_logprobs_have_their_old_shape(count: int) -> None:
    """And the place of each token in the text of its answer, also in a stream."""

    def row(token: str) -> dict[str, Any]:
        likely = [{"token": token, "logprob": -0.5, "bytes": []}, {"token": "x", "logprob": -2.0, "bytes": []}]
        return {"token": token, "logprob": -0.5, "bytes": [], "top_logprobs": likely[:count]}

    choices = LegacyChoices(CompletionRequest(model="toy", prompt=["a", "b"], logprobs=count))
    first = choices.choice(1, "An apple", None, [row("An"), row(" apple")])["logprobs"]
    second = choices.choice(1, ".", "stop", [row(".")])["logprobs"]
    assert (first["tokens"], first["token_logprobs"], first["text_offset"]) == (["An", " apple"], [-0.5, -0.5], [0, 2])
    assert (second["tokens"], second["text_offset"]) == (["."], [8])
    assert second["top_logprobs"] == ([{".": -0.5, "x": -2.0}] if count else None)


def test_a_stream_that_fails_says_so_at_once(url: str) -> None:
    refused = httpx2.post(f"{url}/v1/completions", json={**ASKED, "prompt": "Hello", "max_tokens": 100_000, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
