"""OpenAI's published document judges: it passes its own examples of an answer, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.openai_document import document, events_of


def an_answer(**changed: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "finish_reason": "stop", "logprobs": None}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "toy", "choices": [{**choice, **changed}]}


def test_it_passes_an_answer() -> None:
    document().check_answer(an_answer(), "/chat/completions")


def test_it_names_what_is_wrong_with_one() -> None:
    with pytest.raises(AssertionError, match="finish_reason"):
        document().check_answer(an_answer(finish_reason="bored"), "/chat/completions")


def test_an_event_of_no_known_kind_is_none() -> None:
    with pytest.raises(AssertionError, match="anyOf"):
        document().check_answer({"type": "response.bored"}, "/responses", media_type="text/event-stream")


def test_events_are_read_by_name_and_data() -> None:
    body = 'event: error\ndata: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    assert list(events_of(body)) == [("error", {"a": 1}), ("", {"b": 2}), ("", "[DONE]")]
