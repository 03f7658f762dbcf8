"""From Python arguments to the request on the wire: an impossible one is refused at once, in words; one that takes too long ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from helpers.peer import PlayingPeer, listening
from omnistage.client import AsyncOmni, BadRequestError, DeadlineError, Omni, UnavailableError
from omnistage.client import request as requests
from omnistage.client.private_stack import StackPlan, StackSettings
from omnistage.client.request import Options
from omnistage.gateway import films
from omnistage.v1 import stage_pb2
from omnistage.wire import limits
from omnistage.wire.errors import StageError
from omnistage.wire.fields import descriptor_of, rule_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def test_what_is_not_given_stays_absent() -> None:
    request = requests.for_prompt("hello", (), (), (), Options()).complete()
    assert not request.HasField("seed") and not request.HasField("talker") and not request.HasField("code2wav")
    assert not request.thinker.HasField("sampling") and request.thinker.max_tokens == 0
    assert (request.thinker.messages[0].role, request.thinker.messages[0].parts[0].text) == ("user", "hello")


def test_options_reach_their_fields() -> None:
    options = Options(pipeline="toy", outputs=["text"], seed=0, max_tokens=5, stop="END", temperature=0.5, top_p=0.9)
    options |= Options(voice="anna", profile="latency", logprobs=True, top_logprobs=3)
    request = requests.for_prompt("hello", (), (), (), options).complete()
    assert request.HasField("seed") and list(request.outputs) == ["text"]
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
        ({"regex": b"a"}, "regex"),
        ({"regex": "\ud800"}, "regex"),
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
    prompt = rule_of(descriptor_of(stage_pb2.DiffusionParams).fields_by_name["prompt"])
    assert (most, prompt.max_characters) == (requests.MAX_TEXT_CHARACTERS, films.MAX_PROMPT_CHARACTERS)
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


def test_settings_become_the_order_of_the_launcher(tmp_path: Path) -> None:
    settings: StackSettings = {"pipeline": "toy", "device": {"talker": "cuda:0"}, "replicas": {"talker": 2}, "max_sessions": 4}
    settings |= {"max_batch_size": {"thinker": 8}, "kv_cache_bytes": 65536, "enable_cache": False}
    settings |= {"gpu_memory_utilization": 0.5, "memory_share": {"thinker": 0.25}}
    assert json.loads(json.dumps(StackPlan(settings, tmp_path, 2).order)) == {
        "pipelines": ["toy"],
        "checkpoints": {"": str(tmp_path)},
        "dtype": "auto",
        "loras": [],
        "devices": {"talker": "cuda:0"},
        "replicas": {"talker": "2"},
        "servers": {"max_sessions": 4, "settings": {"client_share": 1.0}},
        "settings": {
            "max_batch_size": {"thinker": "8"},
            "kv_cache_bytes": {"": "65536"},
            "enable_cache": {"": "false"},
            "gpu_memory_utilization": {"": "0.5"},
            "memory_share": {"thinker": "0.25"},
            "tensor_parallel_size": {"": "2"},
        },
        "log_folder": None,
        "verbose": False,
        "is_private": True,
    }
    for empty in ({"device": ""}, {"device": {"talker": ""}}):
        with pytest.raises(BadRequestError, match="device: is empty"):
            StackPlan(cast(StackSettings, empty))


GRPC_WORDS = ("Deadline Exceeded", "Stream removed", "DEADLINE_EXCEEDED")
"""gRPC's own texts for a time limit that passed: none of them says whose limit it was."""


def is_in_our_words(error: DeadlineError) -> bool:
    return not any(word in error.message + error.hint for word in GRPC_WORDS)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("", "is empty"),
        ("127.0.0.1:1,", "is empty"),
        (50050, "is 50050; give text, HOST:PORT"),
        ("localhost", "localhost has no port; give HOST:PORT, such as localhost:50050"),
        (":50051", ":50051 has no host"),
        ("50051", "50051 has no host; give HOST:PORT, such as 127.0.0.1:50051"),
        ("http://127.0.0.1:50050", "is a URL; give HOST:PORT alone, without http://"),
        ("https://example.com/path", "is a URL"),
        ("127.0.0.1:99999", "has port 99999; ports are 1 to 65535"),
        ("127.0.0.1:0", "has port 0"),
        ("127.0.0.1:grpc", "the port of 127.0.0.1:grpc is not a number"),
        ("::1:50050", r"in brackets: \[::1\]:50050"),
        ("a host:50050", "is not HOST:PORT"),
        ("a..b:50050", "names no possible host"),
        (f"{'x' * 64}:1", "names no possible host"),
        ("127.0.0.1:50050, http://x:1", "http://x:1 is a URL"),
    ],
)
@pytest.mark.parametrize("kind", [Omni, AsyncOmni])
def test_an_address_that_cannot_be_one(kind: Callable[..., object], address: Any, told: str) -> None:
    with pytest.raises(BadRequestError, match=told) as caught:
        kind(address=address)
    assert caught.value.fields[0].field == "address" and "omnistage serve" in caught.value.hint


@pytest.mark.parametrize("address", ["[::1]:1", "dns:///localhost:1", "unix:absent.sock", "localhost:1"])
async def test_an_address_that_may_be_one(address: str) -> None:
    with pytest.raises(UnavailableError, match="no server answers"):
        await AsyncOmni(address=address, connect_timeout_s=0.2).start()


async def test_a_host_that_nobody_knows() -> None:
    async with listening(PlayingPeer()) as wire:
        with pytest.raises(UnavailableError, match=r"no such host: absent\.invalid:1") as caught:
            await AsyncOmni(address="absent.invalid:1", connect_timeout_s=60.0).start()
        assert "spelling" in caught.value.hint
        async with AsyncOmni(address=f"absent.invalid:1,{wire.address}") as omni:
            assert omni.address == wire.address


@pytest.mark.parametrize(
    ("greeting", "answer", "says"),
    [
        (b"", b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n", "HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", b"", "another protocol"),
        (b"", b"\x15\x03\x01\x00\x02\x02\x0a", "another protocol"),
    ],
    ids=["HTTP", "SSH", "TLS"],
)
async def test_a_server_that_is_no_router_is_told_at_once(greeting: bytes, answer: bytes, says: str) -> None:
    """And another router of the same list is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read(1000)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, listening(PlayingPeer()) as wire:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no router answers at {address}, but a server that speaks {says}") as caught:
            await AsyncOmni(address=address, connect_timeout_s=250.0).start()
        assert "127.0.0.1:50050" in caught.value.hint
        async with AsyncOmni(address=f"{address},{wire.address}") as omni:
            assert omni.address == wire.address


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "soon", True])
async def test_a_time_limit_that_is_none(timeout_s: Any) -> None:
    async with listening(PlayingPeer()) as wire, AsyncOmni(address=wire.address) as omni:
        for act in (omni.generate("Hi", timeout_s=timeout_s), omni.pipelines(timeout_s=timeout_s), omni.replicas(timeout_s=timeout_s)):
            with pytest.raises(BadRequestError, match=r"timeout_s: is .*; give a number of seconds above 0"):
                await act
        for name in ("connect_timeout_s", "resume_timeout_s", "start_timeout_s"):
            if timeout_s != 0 or name != "resume_timeout_s":
                with pytest.raises(BadRequestError, match=name):
                    AsyncOmni(**{name: timeout_s})

    def ask() -> None:
        with Omni(address=wire.address) as sync:
            for act in (lambda: sync.say("Hi", timeout_s=timeout_s), lambda: sync.stream("Hi", timeout_s=timeout_s)):
                with pytest.raises(BadRequestError, match="timeout_s"):
                    act()

    async with listening(PlayingPeer()) as wire:
        await asyncio.to_thread(ask)


@pytest.mark.parametrize("timeout_s", [0.01, 0.05, 0.2])
async def test_a_time_limit_that_passes(timeout_s: float) -> None:
    async with listening(PlayingPeer(3, 0)) as wire, AsyncOmni(address=wire.address) as omni:
        for _ in range(2):
            with pytest.raises(DeadlineError) as caught:
                await omni.generate("Hi", timeout_s=timeout_s)
            assert caught.value.message == f"the answer was not complete within {timeout_s:g} s"
            assert "timeout_s" in caught.value.hint and is_in_our_words(caught.value)


async def test_a_time_limit_that_passes_before_there_is_a_connection(free_port: int) -> None:
    omni = AsyncOmni(address=f"127.0.0.1:{free_port}")
    with pytest.raises(DeadlineError, match=rf"not complete within 0.05 s; no server answers at 127.0.0.1:{free_port}") as caught:
        await omni.generate("Hi", timeout_s=0.05)
    assert is_in_our_words(caught.value)
    await omni.close()


async def test_a_router_that_ends_is_not_called_absent() -> None:
    async with listening(PlayingPeer(StageError("DRAINING", "this router ends", retry_delay_s=1.0))) as wire:
        omni = AsyncOmni(address=wire.address, max_retries=0)
        with pytest.raises(UnavailableError, match="this router ends") as caught:
            await omni.generate("Hi")
        await omni.close()
    assert "is ending" in caught.value.hint and "Check the address" not in caught.value.hint


def test_a_model_path_that_is_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadRequestError, match=f"model_path: {tmp_path}/absent is not a folder") as caught:
        Omni(model_path=tmp_path / "absent")
    assert "--checkpoint" not in caught.value.message + caught.value.hint and capfd.readouterr() == ("", "")


HALF = "a \ud83d smile"
"""The rest of an emoji when its text is cut in the middle, or of bytes that were not UTF-8."""


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda omni: omni.generate(HALF), "prompt"),
        (lambda omni: omni.stream(HALF), "prompt"),
        (lambda omni: omni.chat([{"role": "user", "content": "Hi"}, {"role": "user", "content": HALF}]), "conversation[1].content"),
        (lambda omni: omni.say(HALF), "text"),
        (lambda omni: omni.draw(HALF), "prompt"),
        (lambda omni: omni.generate("Hi", stop=["x", HALF]), "stop[1]"),
        (lambda omni: omni.generate("Hi", stop=HALF), "stop[0]"),
        (lambda omni: omni.generate("Hi", outputs=[HALF]), "outputs[0]"),
        *[
            (lambda omni, name=name: omni.generate("Hi", **{name: HALF}), name)
            for name in ("pipeline", "voice", "profile", "negative_prompt", "conversation_id", "request_id")
        ],
    ],
)
async def test_text_that_utf_8_cannot_say(ask: Callable[[AsyncOmni], Any], field: str) -> None:
    omni = AsyncOmni(address="127.0.0.1:1")
    with pytest.raises(BadRequestError) as caught:
        await ask(omni)
    assert [violation.field for violation in caught.value.fields] == [field]
    assert "character 2 is " in caught.value.message
    caught.value.message.encode()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda omni: omni.say("a" * 1_100_000), id="too many characters"),
        pytest.param(lambda omni: omni.say("a" * (9 << 20)), id="far too many"),
        pytest.param(lambda omni: omni.generate("Hi", images=[PNG + bytes(9 << 20)]), id="a picture that the router's own limit refuses"),
    ],
)
def test_what_is_too_large_is_a_mistake_of_the_request(toy_address: str, ask: Callable[[Omni], Any]) -> None:
    """And nothing that another attempt could mend. A router for text takes requests up to 8 MiB."""
    with Omni(address=toy_address) as omni:
        with pytest.raises(BadRequestError) as caught:
            ask(omni)
        assert [violation.field for violation in caught.value.fields] == ["request"]
        assert "again after" not in caught.value.hint and omni.generate("Hi").text


@pytest.mark.parametrize("name", ["max_tokens", "sample_rate_hz", "width", "height", "steps", "results"])
async def test_zero_is_not_the_default(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"{name}: is 0; give at least 1"):
        await AsyncOmni(address="127.0.0.1:1").generate("Hi", **{name: 0})  # type: ignore[call-overload]
