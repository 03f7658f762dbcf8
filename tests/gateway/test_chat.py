"""Chat over HTTP, as OpenAI's own client sees it."""

from __future__ import annotations

import openai
import pytest

from omnistage.models.toy import formulas


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hello"}], seed=5, max_completion_tokens=4)
    assert answer.choices[0].message.content == formulas.text(5, "Hello", 4)
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hello"}], seed=5, stream=True))
    whole = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hello"}], seed=5)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_unknown_model_is_told_which_there_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="toy"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hello"}])
