"""An impossible request is refused at once, each in its own words; a call that takes too long ends, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.peer import PlayingPeer, listening
from omnistage.client import AsyncOmni, BadRequestError, DeadlineError, Omni, UnavailableError
from omnistage.wire.errors import StageError

GRPC_WORDS = ("Deadline Exceeded", "Stream removed", "DEADLINE_EXCEEDED")
"""gRPC's own texts for a time limit that passed: none of them says whose limit it was."""


def is_in_our_words(error: DeadlineError) -> bool:
    return not any(word in error.message + error.hint for word in GRPC_WORDS)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("", "is empty"),
        ("127.0.0.1:1,", "is empty"),
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
def test_an_address_that_cannot_be_one(kind: Callable[..., object], address: str, told: str) -> None:
    with pytest.raises(BadRequestError, match=told) as caught:
        kind(address=address)
    assert caught.value.fields[0].field == "address"
    assert "omnistage serve" in caught.value.hint


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
            assert "timeout_s" in caught.value.hint
            assert is_in_our_words(caught.value)


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
    assert "is ending" in caught.value.hint
    assert "Check the address" not in caught.value.hint


def test_a_model_path_that_is_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadRequestError, match=f"model_path: {tmp_path}/absent is not a folder") as caught:
        Omni(model_path=tmp_path / "absent")
    assert "--checkpoint" not in caught.value.message + caught.value.hint
    assert capfd.readouterr() == ("", "")


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
        lambda omni: omni.say("a" * 1_100_000),
        lambda omni: omni.say("a" * (9 << 20)),
        lambda omni: omni.generate("Hi", images=[b"\x89PNG\r\n\x1a\n" + bytes(9 << 20)]),
    ],
    ids=["too many characters", "far too many", "a picture that the router's own limit refuses"],
)
def test_what_is_too_large_is_a_mistake_of_the_request(toy_address: str, ask: Callable[[Omni], Any]) -> None:
    """And nothing that another attempt could mend. A router for text takes requests up to 8 MiB."""
    with Omni(address=toy_address) as omni:
        with pytest.raises(BadRequestError) as caught:
            ask(omni)
        assert [violation.field for violation in caught.value.fields] == ["request"]
        assert "again after" not in caught.value.hint
        assert omni.generate("Hi").text


@pytest.mark.parametrize("name", ["max_tokens", "sample_rate_hz", "width", "height", "steps", "results"])
async def test_zero_is_not_the_default(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"{name}: is 0; give at least 1"):
        await AsyncOmni(address="127.0.0.1:1").generate("Hi", **{name: 0})  # type: ignore[call-overload]
