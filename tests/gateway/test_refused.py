"""Requests for what cannot be done: each endpoint refuses them by the name of the field, before anything of an answer is sent."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import httpx2
import numpy as np
import pytest

from helpers.videos import get
from omnistage.models.toy.files import png

SKETCH = png(np.add.outer(np.arange(16), 3 * np.arange(16)).astype(np.uint8))
DATA_URL = "data:image/png;base64," + b64encode(SKETCH).decode()
SOUND: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
LONG = "x" * ((1 << 20) + 1)
MANY_OPTIONS = {f"o{n}": n for n in range(65)}

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"model": "toy", "prompt": "Hello"},
    "/v1/responses": {"model": "toy", "input": "Hello"},
    "/v1/audio/speech": {"model": "tts-1", "voice": "alloy", "input": "Hello"},
    "/v1/audio/generate": {"prompt": "rain", "seconds": 1.5},
    "/v1/images/generations": {"prompt": "a cat"},
    "/v1/images/edits": {"prompt": "a cat", "images": [{"image_url": DATA_URL}]},
    "/v1/videos": {"prompt": "a cat", "seed": 5, "frames": 11},
}
CHAT, COMPLETIONS, RESPONSES, SPEECH, RAIN, PICTURE, EDIT, FILM = GOOD
OF_TOY = (CHAT, COMPLETIONS, RESPONSES, SPEECH)
"""Endpoints that are asked at the toy that speaks, the others at the one that draws."""

NOT_YET, UNKNOWN, NUMBER = "nothing here does that yet", "Unrecognized request argument supplied: ", "must be a number"
CANNOT, NONE_KNOWN, EMPTY = "cannot constrain", "knows none", "at least 1 character"
TOO_LONG = f"at most {1 << 20} are allowed"
SEED, STEPS, GUIDANCE = {str((1 << 64) - 1): [1 << 64]}, "1 to 1000", {"0 to 100": [-1]}

VALUES: dict[str, dict[str, dict[str, list[Any]]]] = {
    CHAT: {
        "n": {"at most 8": [9]},
        "temperature": {NUMBER: ["hot"]},
        "max_tokens": {"from 1 to 32768": [100_000]},
        "max_completion_tokens": {"from 1 to 32768": [100_000]},
        "top_k": {"is -1; it must be a whole number": [-1]},
        "stop": {"must be a list": [5]},
        "choice": {"list of texts": [[]]},
        "colour": {f"{UNKNOWN}colour": ["red"]},
        "messages": {"at least 1": [[]]},
        "background": {"colour as #rrggbb": ["red"]},
        "regex": {CANNOT: ["a+"], TOO_LONG: [LONG]},
        "top_logprobs": {"goes with logprobs": [2]},
        "response_format": {CANNOT: [{"type": "json_object"}]},
        "functions": {NOT_YET: [[{"name": "f"}]]},
        "tool_choice": {NOT_YET: ["required"]},
        "tools": {NOT_YET: [[{"type": "function", "function": {"name": "f"}}]]},
        "logit_bias": {NOT_YET: [{"50256": -100}]},
        "prediction": {NOT_YET: [{"type": "content", "content": "x"}]},
        "web_search_options": {NOT_YET: [{"search_context_size": "low"}]},
    },
    COMPLETIONS: {
        "prompt": {
            "ids of tokens": [[1, 2], [[1, 2]], ["a", 1]],
            "text, or a list of texts": [5, {"a": 1}, [{}]],
            "is empty": ["", " ", ["a", ""]],
            "at least 1": [[]],
            "at most 8": [["a"] * 9],
            TOO_LONG: [LONG, ["a", LONG]],
        },
        "n": {"at most 8": [9]},
        "max_tokens": {"at least 1": [0], "from 1 to 32768": [100_000]},
        "logprobs": {"at most 20": [21]},
        "best_of": {"give what n is": [2]},
        "suffix": {NOT_YET: ["the end"]},
        "logit_bias": {NOT_YET: [{"50256": -100}]},
        "messages": {f"{UNKNOWN}messages": [[]]},
        "top_k": {"is -1; it must be a whole number": [-1]},
    },
    RESPONSES: {
        "tools": {NOT_YET: [[{"type": "web_search"}]]},
        "previous_response_id": {NOT_YET: ["resp_1"]},
        "conversation": {NOT_YET: ["conv_1"]},
        "background": {NOT_YET: [True]},
        "prompt": {NOT_YET: [{"id": "pmpt_1"}]},
        "colour": {f"{UNKNOWN}colour": ["red"]},
        "max_output_tokens": {"from 1 to 32768": [100_000]},
        "input": {"at least 1": [[]], TOO_LONG: [LONG]},
    },
    SPEECH: {
        "speed": {"at least 0.5": [0.4], "at most 2": [2.5], NUMBER: ["fast"]},
        "input": {"is empty": [" "], TOO_LONG: [LONG]},
        "voice": {"no voice 'bob'": ["bob"]},
        "response_format": {"'mp3', 'opus'": ["ogg"]},
        "sample_rate_hz": {"8000, 11025": [12345]},
        "seed": {**SEED, "whole number": [[]]},
        "loudness": {f"{UNKNOWN}loudness": [1]},
        "model": {"there are: toy": ["whisper-1"]},
        "markdown": {"true or false": ["maybe"]},
        "timestamp_granularities": {"must be a list": ["word"]},
    },
    RAIN: {
        "prompt": {EMPTY: [""], "is missing": [None]},
        "seconds": {"above 0": [0, -1], "at most 10": [11], "at most 3600": [3601], NUMBER: ["long"]},
        "begin_s": {"at least 0": [-1]},
        "steps": {STEPS: [1001]},
        "guidance_scale": GUIDANCE,
        "seed": SEED,
        "response_format": {"'mp3', 'opus'": ["midi"]},
        "voice": {f"{UNKNOWN}voice": ["alloy"]},
    },
    PICTURE: {
        "size": {"at most 256": ["300x300"], "give WIDTHxHEIGHT": ["large"]},
        "n": {"at least 1": [0], "at most 8": [9]},
        "prompt": {EMPTY: [""], TOO_LONG: [LONG]},
        "background": {"drawn opaque": ["transparent"]},
        "output_format": {"makes image/png": ["webp"], "'png', 'jpeg' or 'webp'": ["gif"]},
        "partial_images": {"at most 3": [4]},
        "steps": {STEPS: [5000]},
        "guidance_scale": GUIDANCE,
        "seed": SEED,
        "layers": {"0 to 64": [65]},
        "tools": {f"{UNKNOWN}tools": [[]]},
        "sigmas": {NONE_KNOWN: [[1.0, 0.5]], "at least 1": [[]]},
        "strength": {NONE_KNOWN: [0.5]},
        "control_image": {NONE_KNOWN: [{"image_url": DATA_URL}]},
        "options": {NONE_KNOWN: [{"eta": 0.5, "on": True}], "at most 64": [MANY_OPTIONS]},
    },
    EDIT: {
        "images": {"at least 1": [[]], "at most 16": [[{"image_url": DATA_URL}] * 17]},
        "mask": {NONE_KNOWN: [{"image_url": DATA_URL}]},
        "prompt": {TOO_LONG: [LONG]},
    },
    FILM: {
        "prompt": {EMPTY: [""], "at most 32000": ["x" * 32_001], "is missing": [None]},
        "size": {"give WIDTHxHEIGHT": ["large", "0x32"], "1 to 16384": ["99999x32"]},
        "frames": {"at least 1": [0], "whole number": [1.5], "at most 65536": [1 << 17]},
        "seconds": {"frames say how long": [4]},
        "frames_per_second": {"at least 0.1": [0], "at most 120": [121]},
        "steps": {STEPS: [0, 1001]},
        "guidance_scale": GUIDANCE,
        "guidance_scale_2": {"0 to 100": [101]},
        "flow_shift": {"above 0, at most 100": [-1]},
        "seed": SEED,
        "format": {"'webm', 'mp4'": ["gif"]},
        "model": {"there are: toy-film": ["none-such"]},
        "options": {"at most 64": [MANY_OPTIONS], "at most 65536": [{"one": "x" * 40_000, "two": "x" * 40_000}]},
        "negative_prompt": {"at most 32000": ["\N{CAT}" * 32_001]},
        "tools": {f"{UNKNOWN}tools": [[]]},
        "remix_id": {f"{UNKNOWN}remix_id": ["video_1"]},
        "input_reference": {"is not base64": [{"image_url": "data:image/png;base64,!"}]},
    },
}
"""Values that a field cannot have, by endpoint, field, and a part of the message; None: without the field."""


def turn(*, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **fields}]}


def part(**fields: Any) -> dict[str, Any]:
    return turn(content=[fields])


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def seen(**fields: str) -> dict[str, Any]:
    return item(role="user", content=[fields])


def spoken(voice: object = "alloy", **fields: Any) -> dict[str, Any]:
    return {"modalities": ["text", "audio"], "audio": {"voice": voice, **fields}}


IN_CHAT = "messages[0].content[0]"
MOVIE, HEARD = "data:video/mp4;base64,AAAAGGZ0eXBpc29t", {"mm_processor_kwargs": {"use_audio_in_video": True}}
URLS = {"cat.png": "https", "file:///cat.png": "https", "https://a.example.com/cat.png": "nothing is fetched from the web"}

NAMED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"stream_options": {"colour": 1}}, "stream_options.colour", "Unrecognized request argument supplied"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (CHAT, {"profile": "loud", **SOUND}, "profile", "one of latency"),
    (CHAT, {"speed": 9, **SOUND}, "speed", "speed"),
    (CHAT, spoken("nobody"), "audio.voice", "nobody"),
    (CHAT, spoken({"id": 5}), "audio.voice", "text"),
    (CHAT, spoken(format="midi"), "audio.format", "'wav'"),
    (CHAT, {"model": "gpt-9"}, "model", "there are: toy"),
    (CHAT, {"n": 3, "stop": [""]}, "stop", "stop"),
    (CHAT, {"mm_processor_kwargs": {"use_audio_in_video": "perhaps"}}, "mm_processor_kwargs.use_audio_in_video", "must be"),
    (CHAT, {"mm_processor_kwargs": {"fps": 3}}, "mm_processor_kwargs.fps", "Unrecognized"),
    (CHAT, part(type="video_url", video_url=MOVIE, use_audio=1), f"{IN_CHAT}.use_audio", "use_audio"),
    (CHAT, part(type="video_url", video_url=MOVIE, use_audio="true") | HEARD, f"{IN_CHAT}.use_audio", "use_audio"),
    (CHAT, part(type="video_url", video_url={"url": MOVIE, "use_audio": True}, use_audio=True), f"{IN_CHAT}.use_audio", "use_audio"),
    (CHAT, turn(role="tool", tool_call_id="1", content="18"), "messages[0].role", "calls tools"),
    (CHAT, turn(role="function", name="f", content="18"), "messages[0].role", "calls tools"),
    (CHAT, turn(role="assistant", content=None, tool_calls=[{"id": "1"}]), "messages[0].tool_calls", "calls tools"),
    (CHAT, turn(role="owner", content="x"), "messages[0].role", "'owner'"),
    (CHAT, turn(content="x", images=["cat.png"]), "messages[0].images", "Unrecognized"),
    *((CHAT, part(type=kind, file="cat"), f"{IN_CHAT}.type", f"'{kind}'") for kind in ("image", "audio", "video", "file")),
    (CHAT, turn(content=5), "messages[0].content", "must be text"),
    (CHAT, turn(role="assistant", content="x", reasoning_content=5), "messages[0].reasoning_content", "must be text"),
    (CHAT, turn(content="x", reasoning_content="y"), "messages[0].reasoning_content", "of an assistant"),
    (CHAT, turn(role="assistant", content="x", reasoning=5), "messages[0].reasoning", "must be text"),
    (CHAT, turn(content="x", name=5), "messages[0].name", "must be text"),
    (COMPLETIONS, {"prompt": ["a"] * 4, "n": 3}, "n", "is 12"),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", "no logprobs"),
    (CHAT, turn(role="assistant", content=None, reasoning_content=None), "messages[0].content", "must be text"),
    (CHAT, turn(role="assistant", audio={"id": "audio_1"}), "messages[0].audio.id", "send what it said"),
    *((CHAT, part(type="image_url", image_url={"url": url}), f"{IN_CHAT}.image_url.url", words) for url, words in URLS.items()),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format", "cannot constrain"),
    (RESPONSES, item(type="function_call_output", call_id="1", output="18"), "input[0].type", "other than messages"),
    (RESPONSES, item(role="tool", content="18"), "input[0].role", "'tool'"),
    (RESPONSES, item(type="reasoning", thought="x"), "input[0].thought", "Unrecognized"),
    (RESPONSES, item(type="reasoning", summary="x"), "input[0].summary", "must be a list"),
    (RESPONSES, item(type="reasoning", summary=[5]), "input[0].summary[0].type", "must be summary_text"),
    (RESPONSES, item(type="reasoning", content=[{"type": "output_text"}]), "input[0].content[0].type", "must be reasoning_text"),
    (RESPONSES, item(type="reasoning", content=[{"type": "reasoning_text"}]), "input[0].content[0].text", "must be text"),
    (RESPONSES, item(type="reasoning", encrypted_content=5), "input[0].encrypted_content", "must be text"),
    (RESPONSES, item(role="user", content="x", images=["cat.png"]), "input[0].images", "Unrecognized"),
    (RESPONSES, item(role="user", content="x", name=["bob"]), "input[0].name", "must be text"),
    (RESPONSES, seen(type="input_file", file_id="1"), "input[0].content[0].type", "'input_file'"),
    (RESPONSES, seen(type="image", image="cat.png"), "input[0].content[0].type", "'image'"),
    (RESPONSES, seen(type="input_image", image_url="cat.png"), "input[0].content[0].image_url", "https"),
    (RESPONSES, {"instructions": "Look.", **seen(type="input_image", image_url="data:,")}, "input[0].content[0].image_url", "is empty"),
    (RESPONSES, seen(type="input_image", file_id="file-1"), "input[0].content[0].file_id", "give image_url"),
    (SPEECH, {"response_format": "opus", "sample_rate_hz": 22050}, "response_format", "22050"),
    (SPEECH, {"voice": {"name": "bob"}}, "voice", "text"),
    (SPEECH, {"timestamp_granularities": ["segment"]}, "timestamp_granularities[0]", "must be 'word'"),
    (PICTURE, {"stream": True, "response_format": "url"}, "response_format", "b64_json"),
    (EDIT, {"images": [{"image_url": DATA_URL}, {"file_id": "file-1"}]}, "images[1].file_id", "no files are kept"),
    (EDIT, {"images": [{"image_url": DATA_URL}, {"image_url": "data:image/png;base64,!"}]}, "images[1]", "images[1]"),
    (EDIT, {"mask": {"file_id": "file-1"}}, "mask.file_id", "no files are kept"),
    (FILM, {"frames": None, "seconds": 0}, "seconds", "seconds"),
    (FILM, {"frames": None, "seconds": "long"}, "seconds", "seconds"),
    (FILM, {"frames": None, "seconds": 3601}, "seconds", "seconds"),
    (FILM, {"input_reference": {"file_id": "file-1"}}, "input_reference.file_id", "no files are kept"),
    (FILM, {"input_reference": {}}, "input_reference.image_url", "is missing"),
    # Above all a text that is no data: URL, because it would name a file of the gateway's machine.
    *(
        (path, {field: [{"image_url": url}] if field == "images" else {"image_url": url}}, f"{place}.image_url", "image_url: ")
        for path, field, place in ((EDIT, "images", "images[0]"), (EDIT, "mask", "mask"), (FILM, "input_reference", "input_reference"))
        for url in ("/etc/passwd", "https://media.example.com/cat.png")
    ),
]
"""By endpoint: changes, the field that is named, and a part of the message."""

ROWS = [
    *(
        (path, {field: value}, field, words)
        for path, fields in VALUES.items()
        for field, reasons in fields.items()
        for words, values in reasons.items()
        for value in values
    ),
    *NAMED,
]


@pytest.mark.parametrize(("path", "change", "param", "words"), ROWS, ids=[f"{n}-{row[0]}-{row[2]}" for n, row in enumerate(ROWS)])
def test_what_cannot_be_done_is_refused_by_name(path: str, change: dict[str, Any], param: str, words: str, url: str, film_url: str) -> None:
    """Whole or streamed; and of a film nothing is kept."""
    status = 404 if param == "model" else 400
    streamed: dict[str, Any] = {"stream_format": "sse"} if path in (SPEECH, RAIN) else {"stream": True}
    for options in [{}] if path == FILM else [{}, streamed]:
        body = {name: value for name, value in {**GOOD[path], **options, **change}.items() if value is not None or param != name}
        answer = httpx2.post(f"{url if path in OF_TOY else film_url}{path}", json=body, headers={"Authorization": "Bearer eve"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param) and words in error["message"], error
        assert status == 404 or param in error["message"]
        assert words != TOO_LONG or error["code"] == "invalid_value"
        assert not [word for word in ("Input should", "Value error", "unable to parse") if word in error["message"]]
    assert path != FILM or get(film_url, "", "eve").json()["data"] == []


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    (SPEECH, {"model": "toy-film"}, "speak"),
    (SPEECH, {}, "no pipeline here can speak"),
    (SPEECH, {"stream_format": "sse"}, "no pipeline here can speak"),
    (CHAT, {"model": "toy-film"}, "cannot answer"),
    (COMPLETIONS, {"model": "toy-film"}, "cannot answer"),
    (RESPONSES, {"model": "toy-film"}, "cannot answer"),
    (PICTURE, {}, "no pipeline here can draw"),
    (PICTURE, {"model": "toy", "stream": True}, "toy cannot draw"),
    (PICTURE, {"model": "dall-e-3"}, "no pipeline here can draw"),
    (EDIT, {}, "no pipeline here can draw"),
    (FILM, {}, "no pipeline here can make films"),
    (FILM, {"model": "toy"}, "toy cannot make films"),
    (RAIN, {"model": "toy"}, "toy cannot make sound of a prompt"),
]
"""Questions to a gateway that cannot answer them: to the toy that draws, or to the one that speaks."""


@pytest.mark.parametrize(("path", "change", "words"), MISFITS)
def test_a_model_is_refused_for_what_it_cannot_do_and_told_who_can(
    path: str, change: dict[str, Any], words: str, url: str, film_url: str
) -> None:
    answer = httpx2.post(f"{film_url if path in OF_TOY else url}{path}", json={**GOOD[path], **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"], error["reason"]) == (400, "model", "unsupported", "BAD_REQUEST")
    assert words in error["message"] and "/v1/" in error["hint"], error
    assert change.get("model") != "toy" or error["hint"] == "Ask POST /v1/chat/completions for it."


BOUNDARY = {"Content-Type": "multipart/form-data; boundary=x"}
CAT = {"prompt": "a cat"}
IMAGE, FIRST_FRAME = {"image": SKETCH}, {"input_reference": SKETCH}

FORMS: list[tuple[str, dict[str, Any], str | None]] = [
    (EDIT, {"files": {"image": b"no picture"}, "data": CAT}, "image[0]"),
    (EDIT, {"files": {"image": b""}, "data": CAT}, "image[0]"),
    (EDIT, {"files": {"mast": SKETCH}, "data": CAT}, "mast"),
    (EDIT, {"files": {**IMAGE, "mask": SKETCH}, "data": CAT}, "mask"),
    (EDIT, {"files": {**IMAGE, "prompt": b"a cat"}}, "prompt"),
    (EDIT, {"files": IMAGE}, "prompt"),
    *(
        (EDIT, {"files": IMAGE, "data": {**CAT, field: value if isinstance(value, str) else json.dumps(value)}}, field)
        for field in ("sigmas", "strength", "options", "n", "style_of")
        for values in VALUES[PICTURE].get(field, {"": ["x"]}).values()
        for value in values
    ),
    (EDIT, {"files": [("image[]", SKETCH)] * 17, "data": CAT}, "image"),
    (EDIT, {"files": [("image[]", SKETCH)] * 19, "data": CAT}, None),
    (EDIT, {"content": b"nothing", "headers": BOUNDARY}, None),
    (EDIT, {"content": b"--x\r\n\r\nnothing", "headers": BOUNDARY}, None),
    (EDIT, {"content": b"", "headers": BOUNDARY}, "image"),
    (EDIT, {"content": b"nothing", "headers": {"Content-Type": "multipart/form-data"}}, None),
    (EDIT, {"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, None),
    (EDIT, {"content": b"a cat", "headers": {"Content-Type": "text/plain"}}, None),
    (EDIT, {}, None),
    (FILM, {"files": {"input_reference": b"no picture"}, "data": CAT}, "input_reference"),
    (FILM, {"files": {"input_reference": b""}, "data": CAT}, "input_reference"),
    (FILM, {"files": IMAGE, "data": CAT}, "image"),
    (FILM, {"files": FIRST_FRAME}, "prompt"),
    (FILM, {"files": FIRST_FRAME, "data": {**CAT, "frames": "many"}}, "frames"),
    (FILM, {"files": [("input_reference", SKETCH)] * 2, "data": CAT}, None),
    (FILM, {"data": CAT}, None),
    (FILM, {"content": b"", "headers": {"Content-Type": "text/plain"}}, None),
]
"""By endpoint: what is sent, and the field that is named."""


@pytest.mark.parametrize(("path", "sent", "param"), FORMS)
def test_a_form_that_is_none_is_refused(path: str, sent: dict[str, Any], param: str | None, film_url: str) -> None:
    answer = httpx2.post(f"{film_url}{path}", **sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert httpx2.post(f"{film_url}{PICTURE}", json=GOOD[PICTURE]).status_code == 200
