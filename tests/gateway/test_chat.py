"""Chat and responses over HTTP, as OpenAI's own client sees them: text, speech, and what cannot be done."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx2
import openai
import pytest
import soundfile
from openai.types.chat import ChatCompletionChunk

from helpers import servers
from helpers.openai_document import document, events_of
from omnistage.client import Omni
from omnistage.client.files import to_pcm16
from omnistage.models.toy import formulas

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
SAMPLES = to_pcm16(formulas.audio(5, "Hello", formulas.NATURAL_LENGTH)[:, 0])


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HELLO, seed=5, max_completion_tokens=4)
    assert answer.choices[0].message.content == formulas.text(5, "Hello", 4)
    choice: Any = answer.choices[0]
    assert (choice.finish_reason, choice.notes) == ("length", ["cut at 4 tokens; a higher max_completion_tokens lets it say more"])
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert answer.system_fingerprint is not None and answer.system_fingerprint.startswith("toy-")


def test_a_streamed_answer_is_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}}
    *pieces, finish, usage = client.chat.completions.create(model="toy", messages=HELLO, seed=5, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
    assert (pieces[0].choices[0].delta.role, finish.choices[0].finish_reason) == ("assistant", "stop")
    assert usage.choices == [] and usage.usage is not None and usage.usage.completion_tokens == formulas.NATURAL_LENGTH
    assert {chunk.usage for chunk in pieces} == {None}


def test_text_and_samples_are_those_over_grpc(client: openai.OpenAI, toy: servers.ServerProcesses) -> None:
    answer = client.chat.completions.create(model="toy", messages=HELLO, seed=5, **SPOKEN)
    with Omni(address=toy.address) as omni:
        same = omni.chat(HELLO, seed=5)
    message = answer.choices[0].message
    assert message.content is None and message.audio is not None and same.audio is not None
    assert message.audio.transcript == same.text
    assert base64.b64decode(message.audio.data) == to_pcm16(same.audio.samples) == SAMPLES
    details = answer.usage and answer.usage.completion_tokens_details
    assert details is not None and details.audio_tokens == formulas.FRAMES_PER_ROW * formulas.NATURAL_LENGTH
    assert answer.usage is not None and answer.usage.completion_tokens == details.audio_tokens + formulas.NATURAL_LENGTH


def test_streamed_sound_comes_as_the_types_of_openai_have_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"stream_options": {"include_usage": True}, **SPOKEN}
    *chunks, finish, usage = client.chat.completions.create(model="toy", messages=HELLO, seed=5, stream=True, **asked)
    sounds = [chunk.choices[0].delta.audio for chunk in chunks]
    assert all(sounds) and not any(chunk.choices[0].delta.content for chunk in chunks)
    first, last = sounds[0], sounds[-1]
    assert first is not None and first.id is not None and first.id.startswith("audio_")
    assert [sound.id for sound in sounds[1:] if sound is not None] == [None] * (len(sounds) - 1)
    assert "".join(sound.transcript or "" for sound in sounds if sound) == formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
    assert b"".join(base64.b64decode(sound.data or "") for sound in sounds if sound) == SAMPLES
    assert last is not None and last.model_dump(exclude_none=True).keys() == {"expires_at"}
    assert finish.choices[0].finish_reason == "stop"
    assert usage.usage is not None and usage.usage.completion_tokens_details is not None
    assert usage.usage.completion_tokens_details.audio_tokens == formulas.FRAMES_PER_ROW * formulas.NATURAL_LENGTH


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_a_file_of_a_whole_answer_has_every_sample(client: openai.OpenAI, form: Any) -> None:
    spoken: dict[str, Any] = {**SPOKEN, "audio": {"voice": "alloy", "format": form}}
    answer = client.chat.completions.create(model="toy", messages=HELLO, seed=5, **spoken)
    sound = answer.choices[0].message.audio
    assert sound is not None
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(sound.data)), dtype="int16")
    assert (rate_hz, samples.astype("<i2").tobytes()) == (24_000, SAMPLES)


def test_a_streamed_file_is_one_file(client: openai.OpenAI) -> None:
    wanted = {"modalities": ["text", "audio"], "audio": {"voice": {"id": "nova"}, "format": "wav"}}
    chunks: Any = client.chat.completions.create(model="toy", messages=HELLO, seed=5, stream=True, extra_body=wanted)
    sounds = [chunk.choices[0].delta.audio for chunk in chunks if chunk.choices]
    data = b"".join(base64.b64decode(sound.data) for sound in sounds if sound and sound.data)
    assert data.startswith(b"RIFF") and data.endswith(SAMPLES) and len(data) == 44 + len(SAMPLES)


def test_several_answers_have_seeds_that_count_on(client: openai.OpenAI) -> None:
    texts = [formulas.text(5 + number, "Hello", 4) for number in range(3)]
    whole = client.chat.completions.create(model="toy", messages=HELLO, seed=5, n=3, max_tokens=4)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == list(enumerate(texts))
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    streamed = ["", "", ""]
    ends: list[int] = []
    for chunk in client.chat.completions.create(model="toy", messages=HELLO, seed=5, n=3, max_tokens=4, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert (streamed, sorted(ends)) == (texts, [0, 1, 2])


def test_an_answer_stops_where_it_is_told(client: openai.OpenAI) -> None:
    words = formulas.text(5, "Hello", 6).split()
    answer = client.chat.completions.create(model="toy", messages=HELLO, seed=5, stop=words[3])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" ".join(words[:3]) + " ", "stop")


def test_what_an_earlier_sound_said_stands_for_its_id(client: openai.OpenAI) -> None:
    sound = client.chat.completions.create(model="toy", messages=HELLO, seed=5, **SPOKEN).choices[0].message.audio
    assert sound is not None
    by_id: list[Any] = [*HELLO, {"role": "assistant", "audio": {"id": sound.id}}, {"role": "user", "content": "And?"}]
    by_text: list[Any] = [*HELLO, {"role": "assistant", "content": sound.transcript}, {"role": "user", "content": "And?"}]
    answers = [client.chat.completions.create(model="toy", messages=turns, seed=5) for turns in (by_id, by_text)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="send what it said as content") as caught:
        client.with_options(api_key="another").chat.completions.create(model="toy", messages=by_id)
    assert caught.value.param == "messages[1].audio.id"


def test_the_id_of_a_streamed_sound_stands_for_it_too(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="toy", messages=HELLO, seed=5, stream=True, **SPOKEN))
    name = next(chunk.choices[0].delta.audio.id for chunk in chunks if chunk.choices[0].delta.audio)
    turns: list[Any] = [*HELLO, {"role": "assistant", "content": None, "audio": {"id": name}}, {"role": "user", "content": "And?"}]
    assert client.chat.completions.create(model="toy", messages=turns).choices[0].message.content


def test_events_of_ours_come_where_they_are_asked_for(client: openai.OpenAI) -> None:
    wanted = {"stream_options": {"include_events": True, "include_usage": True}}
    chunks: Any = list(client.chat.completions.create(model="toy", messages=HELLO, seed=5, stream=True, extra_body=wanted, **SPOKEN))
    ours = [(i, chunk.omnistage) for i, chunk in enumerate(chunks) if not chunk.choices and chunk.usage is None]
    assert [sorted(one) for _, one in ours] == [["sound"], ["pipeline", "seed", "session_id", "usage"]]
    (before, sound), (last, account) = ours
    assert sound["sound"]["sample_rate_hz"] == 24_000 and "prebuffer_s" in sound["sound"]
    assert not any(chunk.choices[0].delta.audio.data for chunk in chunks[:before])
    assert chunks[before + 1].choices[0].delta.audio.data
    assert last == len(chunks) - 2 and chunks[-1].usage is not None
    assert (account["seed"], account["pipeline"]) == (5, "toy")
    assert [stage["stage"] for stage in account["usage"]["stages"]] == ["thinker", "talker", "code2wav"]
    first = formulas.word(formulas.token(5, "Hello", 0)).strip()
    told = {name: account["usage"][name] for name in ("unspoken", "unspoken_words", "notes", "drew")}
    assert told == {"unspoken": len(first), "unspoken_words": first, "notes": [], "drew": True}
    assert account["usage"]["stages"][1]["output_items"] == {"codes": formulas.FRAMES_PER_ROW * formulas.NATURAL_LENGTH}


def test_each_answer_of_a_stream_says_that_it_was_cut(client: openai.OpenAI) -> None:
    options = {"stream_options": {"include_events": True}}
    chunks: Any = list(client.chat.completions.create(model="toy", messages=HELLO, n=2, max_tokens=4, stream=True, extra_body=options))
    notes = {chunk.omnistage["index"]: chunk.omnistage["usage"]["notes"] for chunk in chunks if not chunk.choices}
    assert notes == {number: ["cut at 4 tokens; a higher max_tokens lets it say more"] for number in (0, 1)}


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="toy", messages=HELLO, seed=5) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == formulas.text(5, "Hello", formulas.NATURAL_LENGTH)


def test_what_means_nothing_here_is_taken(client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "assistant", "content": None, "refusal": "No."}, *HELLO]
    ours: dict[str, Any] = {"user": "ann", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "x"}
    ours |= {"prompt_cache_key": "y", "reasoning_effort": "low", "verbosity": "low", "parallel_tool_calls": True, "tools": []}
    ours |= {"tool_choice": "auto", "logit_bias": {}, "logprobs": False, "top_p": 0, "response_format": {"type": "text"}, "max_tokens": 4}
    assert client.chat.completions.create(model="toy", messages=turns, **ours).choices[0].message.content


SENT_BACK: dict[str, Any] = {
    "name": "bob",
    "annotations": [{"type": "url_citation"}],
    "refusal": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "parsed": {"a": 1},
    "provider_specific_fields": {"a": 1},
    "extra_content": {"a": 1},
    "cache_control": {"type": "ephemeral"},
    "id": "msg_1",
    "reasoning_content": None,
    "reasoning": None,
    "reasoning_details": [{"text": "x"}],
}
"""Fields of messages that clients send, or send back from some server's answer, and that change nothing."""


def test_what_clients_send_back_changes_no_answer(client: openai.OpenAI) -> None:
    texts = {"system": "Be brief.", "user": "Hello", "assistant": "Good day.", "developer": "In verse."}
    bare: list[Any] = [{"role": role, "content": text} for role, text in texts.items()]
    parts = [{"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    ends: list[Any] = [{"role": "user", "content": "And now?"}, {"role": "user", "content": parts, **SENT_BACK}]
    thought: list[Any] = [{"role": "assistant", "content": None, key: "Hm."} for key in ("reasoning", "reasoning_content")]
    asked = [[*bare, ends[0]], [{**turn, **SENT_BACK} for turn in bare] + ends[1:]]
    asked += [[*bare, {**turn, "content": text}, ends[0]] for text in ("", None) for turn in thought]
    said = [client.chat.completions.create(model="toy", messages=turns, seed=5).choices[0].message.content for turns in asked]
    assert said[0] == said[1] and said[2] == said[3] == said[4] == said[5]
    items: list[Any] = [{"type": "message", **turn, "name": "bob"} for turn in asked[0]]
    answer = client.responses.create(model="toy", input=items, extra_body={"seed": 5, "client_metadata": {"a": "b"}})
    assert answer.output_text == said[0]


def test_errors_are_of_the_form_that_the_document_has(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/chat/completions", json={"model": "toy", "messages": HELLO, "colour": 1})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    document().check(answer.json(), "ErrorResponse")


# Responses


WHOLE = formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
SEED = {"seed": 5}
AS_TEXT = {"text": {"format": {"type": "text"}}}
CREATED = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def test_a_whole_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="toy", input="Hello", extra_body=SEED)
    assert (answer.output_text, answer.status, answer.error) == (WHOLE, "completed", None)
    assert answer.usage is not None and answer.usage.output_tokens == formulas.NATURAL_LENGTH
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_response_that_is_cut_says_so(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="toy", input="Hello", max_output_tokens=3, extra_body=SEED)
    assert (answer.output_text, answer.status) == (formulas.text(5, "Hello", 3), "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.to_dict()["notes"] == ["cut at 3 tokens; a higher max_output_tokens lets it say more"]


@pytest.mark.parametrize(("most", "end"), [(None, "completed"), (3, "incomplete")])
def test_a_streamed_response_has_all_events_in_order(client: openai.OpenAI, most: int | None, end: str) -> None:
    events: list[Any] = list(client.responses.create(model="toy", input="Hello", stream=True, max_output_tokens=most, extra_body=SEED))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [*CREATED, *["response.output_text.delta"] * len(deltas), *DONE, f"response.{end}"]
    text = formulas.text(5, "Hello", most or formulas.NATURAL_LENGTH)
    assert "".join(event.delta for event in deltas) == text
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert (events[-1].response.status, events[-1].response.output_text, events[-1].response.id) == (end, text, events[0].response.id)
    assert {event.item_id for event in deltas} == {events[-1].response.output[0].id}


def test_instructions_and_items_are_turns(client: openai.OpenAI) -> None:
    said = {"content": [{"type": "output_text", "text": "Good day.", "annotations": []}], "id": "msg_1", "status": "completed"}
    items: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "assistant", **said},
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    answer = client.responses.create(model="toy", instructions="Be brief.", input=items, extra_body=SEED)
    texts = {"Be brief.": "system", "Hello": "user", "Good day.": "assistant", "And now?": "user"}
    messages: list[Any] = [{"role": role, "content": text} for text, role in texts.items()]
    chat = client.chat.completions.create(model="toy", messages=messages, seed=5)
    assert (answer.output_text, answer.instructions) == (chat.choices[0].message.content, "Be brief.")


# Both


async def test_the_client_for_asyncio_gets_the_same(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test", max_retries=0) as client:
        whole = await client.chat.completions.create(model="toy", messages=HELLO, seed=5)
        chunks = [chunk async for chunk in await client.chat.completions.create(model="toy", messages=HELLO, seed=5, stream=True)]
        async with client.responses.stream(model="toy", input="Hello", extra_body=SEED) as stream:
            answer = await stream.get_final_response()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content == WHOLE
    assert answer.output_text == WHOLE


CHAT, RESPONSES = ("/chat/completions", {"messages": HELLO}), ("/responses", {"input": "Hello"})
BODIES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "text": (CHAT, {}),
    "spoken": (CHAT, SPOKEN),
    "several": (CHAT, {"n": 2, "max_tokens": 3}),
    "logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "usage": (CHAT, {"stream_options": {"include_usage": True}}),
    "response": (RESPONSES, {}),
    "response that is cut": (RESPONSES, {"max_output_tokens": 3, "instructions": "Be brief."}),
    "response with logprobs": (RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    "response with options": (RESPONSES, {"metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "store": False, **AS_TEXT}),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_document_of_openai_has_such_answers(url: str, name: str, stream: bool) -> None:
    (path, question), body = BODIES[name]
    asked = {"model": "toy", "seed": 5, **question, **body, "stream": stream}
    if not stream:
        asked.pop("stream_options", None)
    answer = httpx2.post(f"{url}/v1{path}", json=asked)
    assert answer.status_code == 200
    if not stream:
        document().check_answer(answer.json(), path)
        return
    events = list(events_of(answer.text))
    if path == "/chat/completions":
        assert events.pop()[1] == "[DONE]"
    for kind, event in events:
        document().check_answer(event, path, media_type="text/event-stream")
        if path == "/chat/completions":
            ChatCompletionChunk.model_validate(event, strict=True, extra="forbid")
        else:
            assert kind == event["type"]
