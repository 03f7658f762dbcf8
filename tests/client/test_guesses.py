"""The errors for an argument that does not exist, or that has an impossible value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omnistage.client import AsyncOmni, BadRequestError, Omni, wording
from omnistage.client import request as requests
from omnistage.client.options import OF_CLIENT, OPTIONS, SETTINGS, About, Range, keywords
from omnistage.client.private_stack import StackPlan
from omnistage.client.wording import of_launcher

MEDIA = ("images", "audios", "videos")
MADE_UP = "xyzzy"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TypeError) as refused:
        call()
    return str(refused.value)


def asked(**options: Any) -> requests.Request:
    return requests.for_prompt("x", (), (), (), options)  # type: ignore[arg-type]


def planned(**settings: Any) -> StackPlan:
    return StackPlan(settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("tempertaure", "did you mean temperature?"),
        ("negativ_prompt", "did you mean negative_prompt?"),
        ("model", "here it is pipeline"),
        ("n", "results"),
        ("num_images", "results"),
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
        ("pitch", "leave it out"),
        ("lang", "leave it out"),
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
        ("max_tokens", "omni.generate(prompt, max_tokens=...)"),
        ("voice", "omni.generate(prompt, voice=...)"),
        ("max_retry", "here it is max_retries"),
        ("retries", "here it is max_retries"),
        ("adress", "did you mean address?"),
        ("max_token", "omni.generate(prompt, max_tokens=...)"),
        ("max_new_tokens", "omni.generate(prompt, max_tokens=...)"),
        ("tempertaure", "omni.generate(prompt, temperature=...)"),
        ("max_batch_token", "did you mean max_batch_tokens?"),
        ("trust_remote_code", "leave it out"),
        (MADE_UP, "help(Omni)"),
    ],
)
@pytest.mark.parametrize("kind", [Omni, AsyncOmni])
def test_an_argument_of_a_client_that_does_not_exist_is_guessed(kind: Any, name: str, told: str) -> None:
    said = refusal(lambda: kind(**{name: 1}))
    assert said.startswith(f"Omni takes no {name}: ") and told in said
    assert len(said) < 160


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("say", {"response_format": "mp3"}, "answer.save('x.mp3')"),
        ("say", {"format": "wav"}, "answer.save('x.mp3')"),
        ("say", {"output_format": "x"}, "answer.save('x.mp3')"),
        ("say", {"instructions": "slowly"}, "no voice is changed so"),
        ("say", {"max_new_tokens": 3}, "no text is made here"),
        ("say", {"input": "x"}, "the text is the first argument, without a name"),
        ("say", {"speaker": "x"}, "here it is voice"),
        ("say", {MADE_UP: 1}, "help(Omni.say)"),
        ("draw", {"response_format": "png"}, "here it is media_type"),
        ("draw", {"system": "x"}, "say it in the prompt"),
        ("draw", {"guided_json": {}}, "no text is made here"),
        ("draw", {"num_images": 2}, "results"),
        ("generate", {"response_format": "mp3"}, "answer.save('x.mp3')"),
        ("generate", {"response_format": {"type": "json_object"}}, "json_schema"),
    ],
    ids=str,
)
def test_a_guess_fits_the_method_that_was_called(method: str, options: dict[str, Any], told: str) -> None:
    ask = {
        "say": lambda: requests.for_verbatim("x", options),  # type: ignore[arg-type]
        "draw": lambda: requests.for_drawing("x", (), options),  # type: ignore[arg-type]
        "generate": lambda: asked(**options),
    }
    said = refusal(ask[method])
    assert told in said and ("json_schema" in said) == (told == "json_schema")


def test_say_and_draw_tell_who_takes_lists() -> None:
    for ask in (lambda: requests.for_verbatim(["a", "b"], {}), lambda: requests.for_drawing(("a", "b"), (), {})):  # type: ignore[arg-type]
        with pytest.raises(BadRequestError, match="generate takes a list of texts"):
            ask()


def test_several_are_told_at_once() -> None:
    assert refusal(lambda: asked(n=2, max_token=3)).count("a call takes no ") == 2


def test_whatever_is_advised_exists() -> None:
    for name in wording.SAME:
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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tokens": "3"}, "max_tokens: is '3'; it must be a whole number, 1 to 32768"),
        ({"max_tokens": 2.5}, "max_tokens: is 2.5; it must be a whole number, 1 to 32768"),
        ({"temperature": "hot"}, "temperature: is 'hot'; it must be a number, 0 to 2"),
        ({"voice": 3}, "voice: is 3; it must be text"),
        ({"stop": 5}, "stop: is 5; it must be text, or a list of texts"),
        ({"logprobs": "yes"}, "logprobs: is 'yes'; it must be True or False"),
        ({"seed": -1}, "seed: is -1; it must be a whole number, 0 to 18446744073709551615"),
    ],
    ids=str,
)
def test_an_option_of_another_type_says_what_it_may_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        asked(**options)
    assert str(refused.value) == told


def test_an_address_of_another_type_is_a_typed_error() -> None:
    with pytest.raises(BadRequestError, match="address: is 50050; give text, HOST:PORT"):
        AsyncOmni(address=50050)  # type: ignore[arg-type]


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
