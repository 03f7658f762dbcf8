"""Calls and clients that were written otherwise than they can be: arguments that do not exist, have no name or an impossible value."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.client import AsyncOmni, BadRequestError, Omni, wording
from omnistage.client import request as requests
from omnistage.client.about import About, Range, keywords
from omnistage.client.options import OF_CLIENT, OPTIONS, SETTINGS
from omnistage.client.private_stack import StackPlan, with_first
from omnistage.client.wording import of_launcher

MEDIA = ("images", "audios", "videos")
MADE_UP = "xyzzy"

NOWHERE = "127.0.0.1:9"
"""Nobody listens there: whatever is told was found out before."""


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TypeError) as refused:
        call()
    return str(refused.value)


def asked(**options: Any) -> requests.Request:
    return requests.for_prompt("x", (), (), (), options)  # type: ignore[arg-type]


def each(names: str, told: str) -> list[tuple[str, str]]:
    """Rows of a table for names of which the same is told."""
    return [(name, told) for name in names.split()]


def planned(**settings: Any) -> StackPlan:
    return StackPlan(settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *each("max_token max_new_tokens max_completion_tokens", "max_tokens"),
        ("tempertaure", "did you mean temperature?"),
        ("negativ_prompt", "did you mean negative_prompt?"),
        ("model", "here it is pipeline"),
        *each("n num_images", "results"),
        ("tools", "no pipeline calls tools"),
        ("stop_sequences", "stop"),
        ("system", "'role': 'system'"),
        ("messages", "chat takes a conversation"),
        ("stream", "stream_chat"),
        ("response_format", "json_schema"),
        ("api_key", "Omni takes it"),
        ("device", "Omni(device=...)"),
        ("images", "generate takes it"),
        ("text", "the text is the first argument"),
        ("prompts", "a list of texts for several answers"),
        ("alignment", "outputs=['text', 'audio', 'alignment']"),
        ("retries", "here it is max_retries"),
        *each("pitch lang", "leave it out"),
        ("aspect_ratio", "width and height"),
        (MADE_UP, "help(Omni.generate)"),
    ],
)
def test_an_argument_of_a_call_that_does_not_exist_is_guessed(name: str, told: str) -> None:
    said = refusal(lambda: asked(**{name: 1}))
    assert said.startswith(f"a call takes no {name}: ") and told in said
    assert len(said) < 160, "no list of all that there is"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model", "model_path is a checkpoint"),
        ("base_url", "address='HOST:PORT'"),
        ("tensor_paralel_size", "did you mean tensor_parallel_size?"),
        ("replica", "did you mean replicas?"),
        ("dtypes", "did you mean dtype?"),
        *each("max_tokens max_token max_new_tokens", "omni.generate(prompt, max_tokens=...)"),
        ("voice", "omni.generate(prompt, voice=...)"),
        *each("max_retry retries", "here it is max_retries"),
        ("adress", "did you mean address?"),
        ("tempertaure", "omni.generate(prompt, temperature=...)"),
        ("max_batch_token", "did you mean max_batch_tokens?"),
        ("trust_remote_code", "leave it out"),
        ("gpus", "here it is tensor_parallel_size"),
        (MADE_UP, "help(Omni)"),
    ],
)
@pytest.mark.parametrize("kind", [Omni, AsyncOmni])
def test_an_argument_of_a_client_that_does_not_exist_is_guessed(kind: Any, name: str, told: str) -> None:
    said = refusal(lambda: kind(**{name: 1}))
    assert said.startswith(f"Omni takes no {name}: ") and told in said and len(said) < 160


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("say", {"response_format": "mp3"}, "answer.save('x.mp3')"),
        ("say", {"format": "wav"}, "answer.save('x.mp3')"),
        ("say", {"output_format": "x"}, "answer.save('x.mp3')"),
        ("say", {"instructions": "slowly"}, "no voice is changed so"),
        ("say", {"max_new_tokens": 3}, "no text is made here"),
        ("say", {"input": "x"}, "the text is the first argument, without a name"),
        ("say", {"prompt": "a"}, "the text is the first argument, without a name"),
        ("say", {"speaker": "x"}, "here it is voice"),
        ("say", {MADE_UP: 1}, "help(Omni.say)"),
        ("draw", {"response_format": "png"}, "here it is media_type, such as 'image/png'"),
        ("draw", {"format": "png"}, "here it is media_type, such as 'image/png'"),
        ("draw", {"system": "x"}, "say it in the prompt"),
        ("draw", {"guided_json": {}}, "no text is made here"),
        ("draw", {"num_images": 2}, "results"),
        ("film", {"images": "b.png"}, "here it is image, with which it begins"),
        ("film", {"outputs": ["latents"], "images": "b.png"}, "here it is image, with which it begins"),
        ("stream_film", {"format": "mp4"}, "here it is media_type, such as 'video/mp4'"),
        ("sound", {"image": "b.png"}, "no sound is made from pictures: leave it out"),
        ("stream_sound", {"format": "spam"}, "the sound is saved by answer.save('x.flac')"),
        ("generate", {"response_format": "mp3"}, "answer.save('x.mp3')"),
        ("generate", {"response_format": {"type": "json_object"}}, "json_schema"),
    ],
    ids=str,
)
async def test_a_guess_fits_the_method_that_was_called(method: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError) as refused:
        made = getattr(AsyncOmni(address=NOWHERE), method)("rain", **options)
        if inspect.isawaitable(made):
            await made
    said = str(refused.value)
    assert said.startswith(f"a call takes no {[*options][-1]}: ") and told in said
    assert ("json_schema" in said) == (told == "json_schema")


def test_say_and_draw_tell_who_takes_lists() -> None:
    for ask in (lambda: requests.for_verbatim(["a", "b"], {}), lambda: requests.for_drawing(("a", "b"), (), {})):  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match="generate takes a list of texts"):
            ask()
    assert refusal(lambda: asked(n=2, max_token=3)).count("a call takes no ") == 2, "several are told at once"


def test_whatever_is_advised_exists() -> None:
    for name in wording.SYNONYMS:
        assert name in OPTIONS or name in MEDIA
    of_clients = set(inspect.signature(Omni).parameters) | set(SETTINGS)
    assert set(OF_CLIENT) | {"tensor_parallel_size", "settings", "to_start"} == set(inspect.signature(Omni).parameters)
    for told in wording.OF_CLIENTS.values():
        if named := re.match(r"here it is (\w+)", told):
            assert named[1] in of_clients
    assert not set(wording.OF_CALLS) & set(OPTIONS), "these exist"
    assert not set(wording.OF_CLIENTS) & of_clients


def some_wrong(about: About, kind: str) -> list[object]:
    wrong: list[object] = [object(), None]
    if isinstance(about.allowed, Range) and about.allowed.high is not None:
        wrong += [about.allowed.high + 1]
    if not isinstance(about.allowed, Range) and about.allowed:
        wrong += ["nonsense"]
    return wrong + ([] if "str" in kind else ["many", float("nan")])


@pytest.mark.parametrize("keyword", keywords(SETTINGS), ids=lambda one: one.name)
def test_a_setting_that_cannot_be_says_what_can_before_anything_is_started(keyword: Any) -> None:
    for value in some_wrong(keyword.about, keyword.type_text):
        with pytest.raises(BadRequestError) as refused:
            if keyword.name == "tensor_parallel_size":
                StackPlan(tensor_parallel_size=value)  # type: ignore[arg-type]
            else:
                planned(**{keyword.name: value})
        assert [bad.field for bad in refused.value.fields] == [keyword.name]
        assert "it must be" in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": np.int64(2)},
        {"threads": {"thinker": 2, "toy/talker": 1}},
        {"gpu_memory_utilization": 1},
        {"gpu_memory_utilization": np.float32(0.5)},
        {"enable_cache": {"thinker": False}},
        {"pipeline": ("toy", "smol")},
        {"device": "cuda:0"},
        {"start_timeout_s": 5},
        {"max_sessions": 4096, "inline_limit": 0},
    ],
    ids=str,
)
def test_a_setting_that_can_be_is_taken(settings: dict[str, Any]) -> None:
    planned(**settings)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"replicas": 2}, "{'talker': 2}"),
        ({"replicas": {"talkr": 2}}, "the stages are thinker, talker"),
        ({"threads": True}, "a whole number, 1 to 64"),
        ({"enable_cache": "yes"}, "True or False"),
        ({"dtype": "fp16"}, "auto, float32 or bfloat16"),
        ({"pipeline": 5}, "text, or a list of texts"),
    ],
    ids=str,
)
def test_what_a_setting_may_be_is_told_in_words(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(told)):
        planned(**settings)


def test_what_the_launcher_says_of_its_options_comes_in_names_of_python() -> None:
    said = "--max-sessions 5: no stage has a use for it: --replicas talker=2, --checkpoint DIR, --unknown"
    assert of_launcher(said) == "max_sessions 5: no stage has a use for it: replicas={'talker': 2}, model_path DIR, --unknown"


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"role": "user", "content": "a"}, "chat takes a conversation"),
        (5, "must be text"),
        ("", "prompt: is empty; give the words"),
        (["a"], "generate also takes a list of texts"),
    ],
)
def test_what_is_no_prompt_says_what_takes_it(prompt: Any, told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        requests.for_prompt(prompt, (), (), (), {})


@pytest.mark.parametrize("medium", ["images", "audios", "videos"])
@pytest.mark.parametrize("several", [False, True])
def test_an_empty_path_is_no_folder(medium: str, several: bool) -> None:
    asked = requests.for_prompt("x", **{"images": (), "audios": (), "videos": (), medium: [""] if several else ""}, options={})
    with pytest.raises(BadRequestError, match=r"is an empty path; give that of a file"):
        asked.complete()


ASKING = ("generate", "chat", "say", "draw", "film", "sound")
CALLS = (*ASKING, "stream", *(f"stream_{name}" for name in ASKING[1:]), "pipelines", "replicas", "as_client")

OF_TEXT = "takes only its text without a name; give what else there is by name, such as "
OF_PROMPT = "takes only its prompt without a name; give what else there is by name, such as "


@pytest.fixture(params=[Omni, AsyncOmni])
def method(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., object]]:
    """By its name, a method of a client that was never opened."""

    def named(name: str) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            found = getattr(request.param, name)(None, *arguments, **options)
            return asyncio.run(found) if inspect.iscoroutine(found) else found

        return called

    return named


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
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
def test_an_argument_without_a_name_or_with_a_wrong_one_is_told_also_where_the_first_one_is_missing(
    method: Callable[[str], Callable[..., object]], name: str, arguments: tuple[object, ...] | dict[str, object], told: str
) -> None:
    with pytest.raises(TypeError) as refused:
        method(name)(**arguments) if isinstance(arguments, dict) else method(name)(*arguments)
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
    assert StackPlan(with_first("toy", {"threads": 1})).order["pipelines"] == ("toy",)
    assert StackPlan(with_first(tmp_path, {})).order["pipelines"] == (str(tmp_path),)
    assert StackPlan(with_first(["toy", "smol"], {})).pipelines == ("toy", "smol")
    assert with_first(None, {"threads": 1}) == {"threads": 1}
    limit_s: Any = np.float32(20)
    with Omni("toy", max_sessions=2) as omni:
        assert [one.name for one in omni.pipelines(timeout_s=limit_s)] == ["toy"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tokens": "3"}, "max_tokens: is '3'; it must be a whole number, 1 to 32768"),
        ({"max_tokens": 2.5}, "max_tokens: is 2.5; it must be a whole number, 1 to 32768"),
        ({"temperature": "hot"}, "temperature: is 'hot'; it must be a number, 0 to 2"),
        ({"stop": 5}, "stop: is 5; it must be text, or a list of texts"),
        ({"seed": -1}, "seed: is -1; it must be a whole number, 0 to 18446744073709551615"),
        ({"temperature": float("nan")}, "temperature: is nan; it must be a number, 0 to 2"),
        ({"temperature": True}, "temperature: is True; it must be a number, 0 to 2"),
        ({"guidance_scale": float("inf")}, "guidance_scale: is inf; it must be a number, 0 to 100"),
        ({"seed": True}, "seed: is True; it must be a whole number, 0 to 18446744073709551615"),
        ({"seed": 2**70}, "seed: is 1180591620717411303424; it must be a whole number, 0 to 18446744073709551615"),
        ({"sample_rate_hz": -1}, "sample_rate_hz: is -1; it must be 8000, 11025,"),
        ({"logprobs": 5}, "logprobs: is 5; it must be True or False"),
        ({"voice": 3}, "voice: is 3; it must be text"),
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
    options: Any = {"temperature": np.float32(0.5), "top_k": np.array(5), "logprobs": np.bool_(True)}
    options |= {"timeout_s": np.int64(3), "max_retries": np.int64(1)}
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
        ([], "conversation: must be a list of turns"),
        ([{"role": "user"}], "conversation[0]: has no content"),
        (turn(role="robot"), "conversation[0].role: is 'robot'; it must be system"),
        (turn(content=" "), "conversation: has no turn of the user with text or media in it"),
        (turn(role="assistant"), "conversation: has no turn of the user with text or media in it"),
    ],
    ids=str,
)
def test_turns_as_others_write_them(conversation: Any, told: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        requests.for_conversation(conversation, {})
    assert refused.value.message.startswith(told)
