"""From Python arguments to the request on the wire."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnistage.client import request as requests
from omnistage.client.errors import BadRequestError
from omnistage.client.private_stack import StackPlan, StackSettings
from omnistage.client.request import Options
from omnistage.diffusion import stage
from omnistage.gateway import films
from omnistage.v1 import stage_pb2
from omnistage.wire import limits

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def test_what_is_not_given_stays_absent() -> None:
    request = requests.for_prompt("hello", (), (), (), Options()).complete()
    assert not request.HasField("seed")
    assert not request.HasField("talker")
    assert not request.HasField("code2wav")
    assert not request.thinker.HasField("sampling")
    assert request.thinker.max_tokens == 0
    assert request.thinker.messages[0].role == "user"
    assert request.thinker.messages[0].parts[0].text == "hello"


def test_options_reach_their_fields() -> None:
    options = Options(
        pipeline="toy",
        outputs=["text"],
        seed=0,
        max_tokens=5,
        stop="END",
        temperature=0.5,
        top_p=0.9,
        voice="anna",
        profile="latency",
        logprobs=True,
        top_logprobs=3,
    )
    request = requests.for_prompt("hello", (), (), (), options).complete()
    assert request.HasField("seed")
    assert list(request.outputs) == ["text"]
    assert list(request.thinker.stop) == ["END"]
    assert (request.thinker.max_tokens, request.thinker.sampling.temperature, request.thinker.logprobs) == (5, 0.5, True)
    assert request.thinker.sampling.top_p == pytest.approx(0.9)
    assert (request.talker.voice, request.code2wav.profile) == ("anna", "latency")
    assert (request.thinker.logprobs, request.thinker.top_logprobs) == (True, 3)
    assert not request.thinker.HasField("constraint")


@pytest.mark.parametrize(
    ("option", "constraint"),
    [
        ({"json_schema": {"type": "string", "const": "é"}}, stage_pb2.Constraint(json_schema='{"type": "string", "const": "\\u00e9"}')),
        ({"json_schema": '{"type": "null"}'}, stage_pb2.Constraint(json_schema='{"type": "null"}')),
        ({"regex": "a|b"}, stage_pb2.Constraint(regex="a|b")),
        ({"choice": ("yes", "no")}, stage_pb2.Constraint(choice=stage_pb2.Choices(texts=["yes", "no"]))),
    ],
)
def test_what_a_text_is_kept_to(option: Options, constraint: stage_pb2.Constraint) -> None:
    assert requests.for_prompt("x", (), (), (), option).complete().thinker.constraint == constraint


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"a": object()}}, "json_schema"),
        ({"json_schema": 3}, "json_schema"),
        ({"regex": b"a"}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"choice": "yes"}, "choice"),
        ({"choice": []}, "choice"),
        ({"choice": 3}, "choice"),
        ({"choice": ["yes", 3]}, r"choice\[1\]"),
        ({"regex": "a", "choice": ["yes"]}, "choice: a text keeps to one thing only"),
        ({"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_what_no_text_can_be_kept_to(options: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError, match=field):
        requests.for_prompt("x", (), (), (), options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("conversation", "field"),
    [
        ([], "conversation"),
        ("hello", "conversation"),
        ([{"role": "user"}], r"conversation\[0\]: has no content"),
        ([{"role": "robot", "content": "x"}], r"conversation\[0\].role"),
        ([{"role": "user", "content": "x", "image": PNG}], "unknown keys image"),
        (["hello"], r"conversation\[0\]"),
    ],
)
def test_a_turn_that_is_not_one(conversation: Any, field: str) -> None:
    with pytest.raises(BadRequestError, match=field):
        requests.for_conversation(conversation, Options())


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 2**64}, {"max_tokens": "many"}, {"temperature": "hot"}])
def test_values_that_fit_no_field(options: dict[str, object]) -> None:
    with pytest.raises(BadRequestError, match=next(iter(options))):
        requests.for_prompt("x", (), (), (), options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["guidance_scale", "steps", "seed", "strength", "sigmas", "options"])
def test_a_number_that_python_does_not_write_is_refused_too(name: str) -> None:
    number = 10**5000
    given = {"sigmas": [number], "options": {"eta": number}}.get(name, number)
    with pytest.raises(BadRequestError, match=f"^{name}.*: .*(too many digits|too large)"):
        requests.for_drawing("x", (), {name: given})  # type: ignore[misc]


def test_numbers_of_numpy_are_numbers_in_a_drawing() -> None:
    own = {"a": np.float64(0.5), "b": np.float32(0.25), "c": np.int64(3), "d": np.bool_(True), "e": np.array(2.0)}
    for sigmas in (np.linspace(1, 0.5, 2), np.array([1, 0.5], np.float32), [np.int64(1), np.float32(0.5)], (np.array(1), 0.5)):
        options: Any = {"sigmas": sigmas, "strength": np.float32(0.5), "steps": np.int64(2), "options": own}
        said = requests.for_drawing("x", (), options).complete().diffusion
        assert (list(said.sigmas), said.strength, said.steps) == ([1.0, 0.5], 0.5, 2)
        assert dict(said.options) == {"a": "0.5", "b": "0.25", "c": "3", "d": "true", "e": "2.0"}
    with pytest.raises(BadRequestError, match=r"options\['a'\].* is of type ndarray; give"):
        requests.for_drawing("x", (), {"options": {"a": np.ones(2)}})


def test_more_characters_than_a_router_takes_are_not_sent() -> None:
    most = limits.MAX_TEXT_CHARACTERS
    assert most == requests.MAX_TEXT_CHARACTERS
    assert stage.MAX_PROMPT_CHARACTERS == films.MAX_PROMPT_CHARACTERS
    assert len(requests.for_verbatim("\N{SNOWMAN}" * most, Options()).complete().thinker.verbatim) == most
    half = {"role": "user", "content": "a" * (most // 2)}
    assert len(requests.for_conversation([half, half], Options()).complete().thinker.messages) == 2
    for too_much in (
        lambda: requests.for_verbatim("a" * (most + 1), Options()),
        lambda: requests.for_prompt("a" * (most + 1), (), (), (), Options()),
        lambda: requests.for_conversation([half, half, {"role": "user", "content": "a"}], Options()),
    ):
        with pytest.raises(BadRequestError, match=f"request: has {most + 1} characters of text; at most {most} are allowed"):
            too_much()


def test_verbatim_text_must_not_be_empty() -> None:
    assert requests.for_verbatim("Hello.", Options()).complete().thinker.verbatim == "Hello."
    with pytest.raises(BadRequestError, match="text"):
        requests.for_verbatim(" \n", Options())


def test_settings_become_the_command_line_of_the_launcher(tmp_path: Path) -> None:
    settings: StackSettings = {
        "pipeline": "toy",
        "device": {"talker": "cuda:0"},
        "replicas": {"talker": 2},
        "max_sessions": 4,
        "max_batch_size": {"thinker": 8},
        "kv_cache_bytes": 65536,
        "enable_cache": False,
        "gpu_memory_utilization": 0.5,
        "memory_share": {"thinker": 0.25},
    }
    plan = StackPlan(settings, tmp_path, 2)
    words = " ".join(plan.command(5, 6))
    for part in (
        "--ready-fd 5 --lifeline-fd 6",
        "--client-share 1",
        f"--checkpoint {tmp_path}",
        "--device talker=cuda:0",
        "--replicas talker=2",
        "--max-sessions 4",
        "--max-batch-size thinker=8 --kv-cache-bytes 65536 --enable-cache false --gpu-memory-utilization 0.5 --memory-share thinker=0.25",
        "--tensor-parallel-size 2",
    ):
        assert part in words
    assert words.endswith("-- toy")
