"""Calls that were written otherwise than they can be: an argument without its name, no first argument, values of another kind, turns as
other clients write them. Each is told in a line, before anything is sent, and by both clients alike."""

from __future__ import annotations

import asyncio
import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnistage.client import AsyncOmni, BadRequestError, Omni
from omnistage.client import request as requests
from omnistage.client.private_stack import StackPlan, with_first

NOWHERE = "127.0.0.1:9"
"""Nobody listens there: whatever is told was found out before."""

ASKING = ("generate", "chat", "say", "draw", "film", "sound")
CALLS = (*ASKING, "stream", *(f"stream_{name}" for name in ASKING[1:]), "pipelines", "replicas", "as_client")

OF_TEXT = "takes only its text without a name; give what else there is by name, such as "
OF_PROMPT = "takes only its prompt without a name; give what else there is by name, such as "


@pytest.fixture(params=[Omni, AsyncOmni])
def method(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Callable[..., object]]]:
    """By its name, a method of a client that was never opened."""

    def named(name: str) -> Callable[..., object]:
        function = getattr(request.param, name)

        def called(*given: object, **options: object) -> object:
            found = function(None, *given, **options)
            return asyncio.run(found) if inspect.iscoroutine(found) else found

        return called

    yield named


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("generate", ("a", "b.png"), f"generate {OF_PROMPT}generate(prompt, images='b.png')"),
        ("generate", ("a", ["b.wav"]), f"generate {OF_PROMPT}generate(prompt, audios=['b.wav'])"),
        ("stream", ("a", Path("b.mp4")), f"stream {OF_PROMPT}stream(prompt, videos=PosixPath('b.mp4'))"),
        ("generate", ("a", 100), f"generate {OF_PROMPT}generate(prompt, max_tokens=100)"),
        ("draw", ("a", "b"), f"draw {OF_PROMPT}draw(prompt, images='b')"),
        ("stream_draw", ("a", 7), f"stream_draw {OF_PROMPT}stream_draw(prompt, seed=7)"),
        ("film", ("a", "b"), f"film {OF_PROMPT}film(prompt, image='b')"),
        ("stream_film", ("a", 49), f"stream_film {OF_PROMPT}stream_film(prompt, frames=49)"),
        ("sound", ("rain", 10.5), f"sound {OF_PROMPT}sound(prompt, seconds=10.5)"),
        ("say", ("a", "ann"), f"say {OF_TEXT}say(text, voice='ann')"),
        ("stream_say", ("a", 1.5), f"stream_say {OF_TEXT}stream_say(text, speed=1.5)"),
        ("chat", ([], "b.png"), "chat takes only its conversation without a name; a turn has its media: {'role': 'user', "),
        ("pipelines", (5,), "pipelines takes no argument without a name; give it by name: pipelines(timeout_s=5)"),
        ("as_client", ("a", "b"), "as_client takes one argument, the key"),
        ("generate", (), "generate needs its prompt, as the first argument: generate('What is a kite?')"),
        ("chat", (), "chat needs its conversation, as the first argument: chat([{'role': 'user', 'content': 'Hello'}])"),
        ("say", (), "say needs its text, as the first argument: say('Good morning.')"),
    ],
    ids=str,
)
def test_an_argument_without_a_name_or_without_a_first_one(
    method: Callable[[str], Callable[..., object]], name: str, given: tuple[object, ...], told: str
) -> None:
    with pytest.raises(TypeError) as refused:
        method(name)(*given)
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("generate", {"text": "a"}, "a call takes no text: the text is the first argument"),
        ("chat", {"messages": []}, "a call takes no messages: chat takes a conversation, as its first argument"),
        ("say", {"prompt": "a"}, "a call takes no prompt: the text is the first argument"),
        ("draw", {"text": "a"}, "a call takes no text: the text is the first argument"),
        ("film", {"images": "b.png"}, "a call takes no images: here it is image, with which it begins"),
        ("sound", {"image": "b.png"}, "a call takes no image: no sound is made from pictures: leave it out"),
        ("sound", {"duration": 3}, "a call takes no duration: here it is seconds"),
        ("stream_film", {"fps": 3, "num_frames": 5}, "a call takes no fps: here it is frames_per_second; a call takes no num_frames: here"),
        ("pipelines", {"timeout": 3}, "pipelines takes no timeout: did you mean timeout_s?"),
        ("replicas", {"xyzzy": 3}, "replicas takes no xyzzy: it takes timeout_s alone"),
    ],
    ids=str,
)
def test_a_wrong_name_is_told_also_where_the_first_argument_is_missing(
    method: Callable[[str], Callable[..., object]], name: str, options: dict[str, object], told: str
) -> None:
    with pytest.raises(TypeError) as refused:
        method(name)(**options)
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("say", {"prompt": "a"}, "a call takes no prompt: the text is the first argument"),
        ("draw", {"format": "png"}, "a call takes no format: here it is media_type, such as 'image/png'"),
        ("film", {"images": "b.png"}, "a call takes no images: here it is image, with which it begins"),
        ("film", {"outputs": ["latents"], "images": "b.png"}, "a call takes no images: here it is image, with which it begins"),
        ("stream_film", {"format": "mp4"}, "a call takes no format: here it is media_type, such as 'video/mp4'"),
        ("sound", {"image": "b.png"}, "a call takes no image: no sound is made from pictures: leave it out"),
        ("stream_sound", {"format": "spam"}, "a call takes no format: the sound is saved by answer.save('x.flac')"),
    ],
    ids=str,
)
async def test_a_wrong_name_is_told_by_what_was_called(name: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(TypeError) as refused:
        made = getattr(AsyncOmni(address=NOWHERE), name)("rain", **options)
        if inspect.isawaitable(made):
            await made
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize("kind", [Omni, AsyncOmni])
def test_the_signatures_are_those_that_were_written(kind: Any) -> None:
    for name in CALLS:
        function = getattr(kind, name)
        assert "given" not in inspect.signature(function).parameters and function.__doc__, name
        assert inspect.iscoroutinefunction(function) == inspect.iscoroutinefunction(inspect.unwrap(function)), name


@pytest.mark.parametrize("kind", [Omni, AsyncOmni])
@pytest.mark.parametrize(
    ("given", "named", "error", "told"),
    [
        ((NOWHERE,), {}, BadRequestError, f"pipeline: is the address of a router, {NOWHERE}; give it by name: Omni(address='{NOWHERE}')"),
        (("http://host:50050/v1",), {}, BadRequestError, "Omni(address='host:50050')"),
        (("",), {}, BadRequestError, "pipeline: is empty"),
        ((5,), {}, BadRequestError, "pipeline: is 5; it must be text, or a list of texts"),
        (("localhost", 50050), {}, TypeError, "such as Omni(address='localhost:50050')"),
        (("toy", "smol"), {}, TypeError, "Omni takes only its pipeline without a name"),
        (("toy",), {"pipeline": "smol"}, TypeError, "the first argument is the pipeline, and pipeline is another one"),
        (("toy",), {"address": NOWHERE}, TypeError, "address is for a running router"),
        ((), {"to_start": "toy"}, TypeError, "Omni takes no to_start"),
        ((), {"model_path": 3}, BadRequestError, "model_path: is 3; give the folder of a checkpoint"),
        ((), {"model_path": ""}, BadRequestError, "model_path: is empty; give the folder of a checkpoint"),
        ((), {"address": NOWHERE, "resume_timeout_s": None}, BadRequestError, "resume_timeout_s: is None; give a number of seconds from 0"),
    ],
    ids=str,
)
def test_a_client_that_cannot_be(kind: Any, given: tuple[object, ...], named: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error) as refused:
        kind(*given, **named)
    assert told in str(refused.value)


def test_the_first_argument_of_a_client_is_what_it_starts(tmp_path: Path) -> None:
    assert StackPlan(with_first("toy", {"threads": 1})).command(1, 2)[-2:] == ["--", "toy"]
    assert StackPlan(with_first(tmp_path, {})).command(1, 2)[-2:] == ["--", str(tmp_path)]
    assert StackPlan(with_first(["toy", "smol"], {})).pipelines == ("toy", "smol")
    assert with_first(None, {"threads": 1}) == {"threads": 1}
    limit_s: Any = np.float32(20)
    with Omni("toy", max_sessions=2) as omni:
        assert [one.name for one in omni.pipelines(timeout_s=limit_s)] == ["toy"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": float("nan")}, "temperature: is nan; it must be a number, 0 to 2"),
        ({"temperature": True}, "temperature: is True; it must be a number, 0 to 2"),
        ({"guidance_scale": float("inf")}, "guidance_scale: is inf; it must be a number, 0 to 100"),
        ({"seed": True}, "seed: is True; it must be a whole number, 0 to 18446744073709551615"),
        ({"seed": 2**70}, "seed: is 1180591620717411303424; it must be a whole number, 0 to 18446744073709551615"),
        ({"sample_rate_hz": -1}, "sample_rate_hz: is -1; it must be 8000, 11025,"),
        ({"logprobs": 5}, "logprobs: is 5; it must be True or False"),
        ({"voice": b"ann"}, "voice: is b'ann'; it must be text"),
        ({"json_schema": 3}, "json_schema: is 3; it must be text, or a dict"),
        ({"encoding": 3}, "encoding: is 3; it must be pcm16 or float32"),
        ({"outputs": b"text"}, "outputs: is b'text'; it must be text, or a list of texts"),
        ({"outputs": ["text", None]}, "outputs[1]: is None; it must be text"),
        ({"stop": {"a": 1}}, "stop: is {'a': 1}; it must be text, or a list of texts"),
        ({"choice": "yes"}, "choice: is 'yes'; it must be a list of texts"),
        ({"timeout_s": "5"}, "timeout_s: is '5'; give a number of seconds above 0"),
        ({"timeout_s": 1e30}, "timeout_s: is 1e+30; give a number of seconds above 0, at most 1000000000"),
        ({"timeout_s": 10**400}, "timeout_s: is 1000"),
        ({"max_tokens": 10**400}, "max_tokens: is 1000"),
        ({"temperature": 10**400}, "temperature: is 1000"),
        ({"max_retries": 2.5}, "max_retries: is 2.5; give a whole number from 0"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_a_value_of_another_kind_is_told_by_both_clients_in_a_line(toy_address: str, options: dict[str, Any], told: str) -> None:
    with Omni(address=toy_address) as omni, pytest.raises(BadRequestError) as of_one:
        omni.generate("a", **options)

    async def asked() -> None:
        await AsyncOmni(address=NOWHERE).generate(["a", "b"], **options)

    with pytest.raises(BadRequestError) as of_other:
        asyncio.run(asked())
    for refused in (of_one.value, of_other.value):
        assert refused.message.startswith(told) and "\n" not in refused.message


def test_numbers_of_numpy_are_numbers() -> None:
    options: Any = {
        "temperature": np.float32(0.5),
        "top_k": np.array(5),
        "logprobs": np.bool_(True),
        "timeout_s": np.int64(3),
        "max_retries": np.int64(1),
    }
    request = requests.for_prompt("a", (), (), (), options)
    sent = request.complete().thinker
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.logprobs) == (0.5, 5, True)
    assert (request.timeout_s, request.max_retries) == (3.0, 1)


def turn(**said: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": "a", **said}]


@pytest.mark.parametrize(
    ("conversation", "told"),
    [
        ("hi", "conversation: must be a list of turns: [{'role': 'user', 'content': 'Hello'}]; generate takes a text"),
        (3, "conversation: must be a list of turns"),
        (np.zeros(2), "conversation[0]: is np.float64(0.0); it must be a dict with role and content"),
        (["hi"], "conversation[0]: is 'hi'; it must be a dict with role and content"),
        (turn(role="human"), "conversation[0].role: is 'human'; did you mean user?"),
        (turn(role="Assistent"), "conversation[0].role: is 'Assistent'; did you mean assistant?"),
        (turn(role=3), "conversation[0].role: is 3; it must be system, developer, user or assistant"),
        ([{"content": "a"}], "conversation[0]: has no role"),
        ([{"role": "user", "text": "a"}], "conversation[0]: has unknown keys text; did you mean content?"),
        (turn(image="a.png"), "conversation[0]: has unknown keys image; did you mean images?"),
        (turn(image="a.png", xyzzy=1), "conversation[0]: has unknown keys image, xyzzy; known: role, content, images"),
        (turn(content=[{"type": "image", "url": "a.png"}]), "conversation[0].content[0]: has unknown keys url; did you mean image?"),
        (turn(content=[{"type": "input_text", "text": "a"}]), "conversation[0].content[0].type: is 'input_text'; did you mean text?"),
        (turn(content=[{"type": "input_audio", "input_audio": {}}]), "conversation[0].content[0].input_audio: has no data"),
        (turn(content=" "), "conversation: has no turn of the user with text or media in it"),
        (turn(role="assistant"), "conversation: has no turn of the user with text or media in it"),
    ],
    ids=str,
)
def test_turns_as_others_write_them(conversation: Any, told: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        requests.for_conversation(conversation, {})
    assert refused.value.message.startswith(told)


def read_before() -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file


@pytest.mark.parametrize(
    ("media", "told"),
    [
        ({"audios": (16000, np.zeros(5, np.int16))}, "audios: has the rate first, as SciPy reads it"),
        ({"audios": (np.zeros(5), "16000")}, "audios: has the rate '16000'; give samples a second"),
        ({"audios": (np.zeros(5), None)}, "audios: has the rate None; give samples a second"),
        ({"images": read_before()}, "images: is empty; if it was written or read before, file.seek(0) goes to its beginning"),
        ({"images": Image.new("RGB", (0, 3))}, "images: is a picture of 0 by 3 pixels: it is empty"),
        ({"images": [None]}, "images[0]: is None; give a path, bytes or an open file"),
    ],
    ids=["rate first", "rate as text", "no rate", "read before", "no pixels", "none"],
)
def test_media_that_are_nearly_right(media: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        requests.for_prompt("a", **{"images": (), "audios": (), "videos": (), **media}, options={}).complete()
    assert refused.value.message.startswith(told)
