"""Clients that leave or do not read, gateways, routers and stages that end: nothing is held for who is gone, and others do not notice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from helpers import lengths, servers
from helpers.gateway import gateway, local_gateway, router_of
from helpers.memory import peak_bytes
from helpers.metrics import fetched
from helpers.openai_document import document, events_of, is_here
from helpers.ports import take_address
from helpers.raw_http import CHAT, QUESTION, HttpAnswer, answer, connected, head, heard, post
from helpers.servers import ServerProcess, ServerProcesses, all_free, watch_until
from helpers.videos import SLOW_CHAIN
from helpers.waiting import until
from omnistage.models.toy import formulas

MIB = 1 << 20
ENDLESS = {**QUESTION, "max_tokens": 32_768}
STREAM = {**ENDLESS, "stream": True}
PLACES = 2
SAMPLES = 1200
"""Samples of one frame of the toy that speaks for long."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A chain that speaks for minutes, with two places."""
    options, flags = {"interval_s": 0.02, "length": 100_000}, ("--max-sessions", str(PLACES), "--client-share", "1")
    with servers.stack(tmp_path_factory.mktemp("slow"), options=options, router_args=flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def front(endless: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcess]:
    with gateway(endless.address, tmp_path_factory.mktemp("front")) as server:
        yield server


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[servers.ServerProcesses]:
    """A chain that speaks for long as fast as it can, whose router waits for four seconds where nobody reads."""
    many = ("--max-sessions", "512")
    options = {"length": 100_000, "samples_per_frame": SAMPLES}
    with servers.stack(tmp_path, options=options, stage_args=many, router_args=("--stall-limit", "4", *many)) as stack:
        yield stack


def inflight(server: servers.ServerProcess) -> float:
    """The requests that a router or a gateway is working on."""
    names = ("omnistage_router_inflight", "omnistage_gateway_inflight")
    (family,) = [family for family in fetched(server.metrics_address) if family.name in names]
    return family.samples[0].value


async def idle(stack: servers.ServerProcesses, front: servers.ServerProcess) -> None:
    """Return when nothing of any request is left."""
    for server in (front, router_of(stack)):
        await until(partial(_is_idle, server))
    await servers.all_free(list(stack.addresses.values()))


def _is_idle(server: servers.ServerProcess) -> bool:
    return inflight(server) == 0


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Nothing more will come: it counts as leaving."""
    connection.shutdown(socket.SHUT_WR)


WAYS: dict[str, Callable[[socket.socket], None]] = {"close": socket.socket.close, "reset": reset, "half-close": half_close}

MOMENTS = ("while its body arrives", "in the queue", "before the first byte", "in the middle of a stream", "during a whole answer")


@pytest.mark.parametrize("way", WAYS)
@lengths.drawn_cells(2, "moment", MOMENTS)
async def test_a_client_that_leaves_frees_all(
    endless: servers.ServerProcesses, front: servers.ServerProcess, moment: str, way: str
) -> None:
    url = f"http://{front.address}"
    with ExitStack() as opened:
        others = [opened.enter_context(connected(url)) for _ in range(PLACES if moment == "in the queue" else 0)]
        for other in others:
            other.sendall(post(STREAM))
        await until(lambda: inflight(router_of(endless)) == len(others))
        connection = opened.enter_context(connected(url))
        if moment == "while its body arrives":
            connection.sendall(post(STREAM)[:-10])
        else:
            connection.sendall(post(ENDLESS if moment == "during a whole answer" else STREAM, x_api_key="another"))
        await until(lambda: inflight(front) == len(others) + 1)
        if moment == "in the middle of a stream":
            await until(lambda: b"delta" in connection.recv(1 << 16, socket.MSG_PEEK))
        elif moment == "during a whole answer":
            await until(lambda: inflight(router_of(endless)) == 1)
        WAYS[way](connection)
        await until(lambda: inflight(front) == len(others))
    await idle(endless, front)
    assert '"reason": "CANCELLED"' in front.log() and "http.bug" not in front.log()
    with connected(url) as connection:
        connection.sendall(post({**QUESTION, "max_tokens": 2}))
        assert (await asyncio.to_thread(heard, connection)).status == 200


@lengths.long_form(
    "gateway/test_disconnect.py::test_who_reads_nothing_at_all_loses_the_connection",
    "gateway/test_disconnect.py::test_requests_leave_nothing_behind",
    unkept="many who read nothing take little memory",
)
@lengths.rounds(16, 200)
async def test_clients_that_do_not_read_hold_little(fast: servers.ServerProcesses, tmp_path: Path, rounds: int) -> None:
    """The router soon has nothing to do with them: it has given all of an answer, or broken it off by its own rule."""
    with gateway(fast.address, tmp_path) as front, ExitStack() as opened:
        url = f"http://{front.address}"
        assert answer(url, post()).status == 200
        before = peak_bytes(front.pid)
        readers = []
        for _ in range(rounds):
            readers.append(opened.enter_context(connected(url)))
            readers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            readers[-1].sendall(post({**STREAM, "max_tokens": 3000}))
        await until(lambda: inflight(front) >= rounds // 2)
        await asyncio.to_thread(_is_answered_at_last, url)
        await until(partial(_is_idle, router_of(fast)))
        assert peak_bytes(front.pid) - before < 16 * MIB + rounds * 2 * MIB
        for reader in readers:
            reader.close()
        await until(partial(_is_idle, front))


def _is_answered_at_last(url: str) -> None:
    """Ask again after errors that pass on a busy machine, as OpenAI's clients do."""
    while (told := answer(url, post())).status != 200:
        assert (told.status, told.header("retry-after")) == (503, "1")


async def test_who_reads_nothing_at_all_loses_the_connection(fast: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.gateway.port.UNREAD_LIMIT_S", 0.5)
    async with local_gateway(fast.address) as (url, door):
        with connected(url) as reader:
            reader.sendall(post(STREAM))
            await until(lambda: door.running == 1)
            await until(lambda: door.running == 0)
            assert (await asyncio.to_thread(heard, reader)).status == 0, "a stream that was broken off looks whole"
        assert (await asyncio.to_thread(answer, url, post())).status == 200
    await until(partial(_is_idle, router_of(fast)))


@lengths.long_form(
    "router/test_sharing.py::test_a_client_that_does_not_read_loses_its_place_to_one_that_waits",
    "system/test_chain.py::test_the_thinker_stops_the_client_is_cancelled_and_the_others_do_not_notice",
    unkept="the gateway tells why the stream was cut off",
)
async def test_the_router_gives_up_who_does_not_listen(fast: servers.ServerProcesses, tmp_path: Path) -> None:
    """Sound is more than all that lies between holds; the gateway would still wait."""
    spoken = {**STREAM, "modalities": ["text", "audio"]}
    with gateway(fast.address, tmp_path) as front:
        url = f"http://{front.address}"
        with connected(url) as listener:
            listener.sendall(post(spoken))
            await until(lambda: '"reason": "CLIENT_STALLED"' in router_of(fast).log())
            await servers.all_free(list(fast.addresses.values()))
            told = await asyncio.to_thread(heard, listener)
            assert b'"CLIENT_STALLED"' in told.body, "what was cut off looks whole"
        await idle(fast, front)
        assert (await asyncio.to_thread(answer, url, post())).status == 200


async def test_who_reads_slowly_gets_all_of_a_whole_answer(fast: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a client may read nothing."""
    monkeypatch.setattr("omnistage.gateway.port.UNREAD_LIMIT_S", 0.2)
    async with local_gateway(fast.address) as (url, _):

        def slowly() -> HttpAnswer:
            with connected(url) as reader:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.sendall(post({**QUESTION, "max_tokens": 32_768}))
                whole = bytearray()
                while not whole.endswith(b"}"):
                    whole += reader.recv(8192)
                    time.sleep(0.02)
            return HttpAnswer(body=bytes(whole).partition(b"\r\n\r\n")[2])

        told = await asyncio.to_thread(slowly)
        assert json.loads(told.body)["choices"][0]["message"]["content"] == formulas.text(5, "Hello", 32_768)


async def test_a_gateway_that_is_told_to_end_lets_answers_end(endless: servers.ServerProcesses, tmp_path: Path) -> None:
    with gateway(endless.address, tmp_path, "--grace", "60") as front:
        url = f"http://{front.address}"
        with connected(url) as connection:
            connection.sendall(post({**STREAM, "max_tokens": 100}))
            await until(lambda: inflight(front) == 1)
            front.terminate()
            await until(lambda: "server.draining" in front.log())
            told = await asyncio.to_thread(answer, url, post())
            assert (told.status, told.error["reason"], told.header("retry-after")) == (503, "DRAINING", "1")
            ready = await asyncio.to_thread(answer, url, head("GET", "/ready", {"Host": "localhost"}))
            assert (ready.status, ready.header("retry-after")) == (503, "1")
            whole = await asyncio.to_thread(heard, connection)
        assert whole.body.endswith(b"data: [DONE]\n\n")
        assert await asyncio.to_thread(front.wait) == 0


async def test_after_its_grace_it_breaks_them_off(endless: servers.ServerProcesses, tmp_path: Path) -> None:
    with gateway(endless.address, tmp_path, "--grace", "0.2") as front, connected(f"http://{front.address}") as connection:
        connection.sendall(post(STREAM))
        await until(lambda: inflight(front) == 1)
        front.terminate()
        assert (await asyncio.to_thread(heard, connection)).status == 0, "a stream that was broken off looks whole"
        assert await asyncio.to_thread(front.wait) == 0
    await until(partial(_is_idle, router_of(endless)))


@lengths.drawn_cells(1, "blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_gateway_that_is_lost_holds_no_place(fast: servers.ServerProcesses, tmp_path: Path, blow: signal.Signals) -> None:
    with gateway(fast.address, tmp_path) as front, connected(f"http://{front.address}") as connection:
        connection.sendall(post(STREAM))
        assert await asyncio.to_thread(connection.recv, 1 << 10)
        os.kill(front.pid, blow)
        try:
            await until(partial(_is_idle, router_of(fast)))
        finally:
            if blow == signal.SIGSTOP:
                os.kill(front.pid, signal.SIGCONT)
        if blow == signal.SIGSTOP:
            assert (await asyncio.to_thread(answer, f"http://{front.address}", post())).status == 200


@lengths.long_form(
    "client/test_router_loss.py::test_a_router_that_is_killed_and_started_again",
    "gateway/test_film_jobs.py::test_a_film_waits_for_a_router_that_is_away",
)
async def test_a_stream_goes_on_when_its_router_is_lost_and_comes_back(tmp_path: Path) -> None:
    flags = ("--address", take_address())
    with ExitStack() as running:
        stack = running.enter_context(servers.stack(tmp_path, options={"interval_s": 0.02, "length": 200}, router_args=flags))
        front = running.enter_context(gateway(stack.address, tmp_path))
        connection = running.enter_context(connected(f"http://{front.address}"))
        connection.sendall(post({**STREAM, "max_tokens": 120}))
        assert await asyncio.to_thread(connection.recv, 64, socket.MSG_PEEK)
        await until(lambda: len(connection.recv(1 << 16, socket.MSG_PEEK)) > 4000)
        router_of(stack).process.kill()
        router_of(stack).wait()
        stages = ",".join(f"{kind}={address}" for kind, address in stack.addresses.items())
        words = ("--pipeline", "toy", "--stages", stages, "--grace", "5", *flags)
        again = running.enter_context(servers.ServerProcess("omnistage.router", *words, log_folder=tmp_path))
        again.wait_ready()
        told = await asyncio.to_thread(heard, connection)
    chunks = [json.loads(piece.removeprefix("data: ")) for piece in told.body.decode().split("\n\n") if piece not in ("", "data: [DONE]")]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk.get("choices", ()))
    assert text == formulas.text(5, "Hello", 120)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@lengths.rounds(400, 10_000)
async def test_requests_leave_nothing_behind(toy: servers.ServerProcesses, tmp_path: Path, rounds: int) -> None:
    """Good ones, bad ones, streams, by connections that are kept and by new ones."""
    changes: tuple[dict[str, object], ...] = ({}, {"stream": True}, {"temperature": 9}, {"model": "x"})
    bodies = [json.dumps({**QUESTION, **change}).encode() for change in changes]
    with gateway(toy.address, tmp_path) as front:
        host, _, port = front.address.rpartition(":")

        def ask(count: int) -> None:
            kept = HTTPConnection(host, int(port), timeout=60)
            for number in range(count):
                if number % 10 == 0:
                    kept.close()
                kept.request("POST", CHAT, bodies[number % 4], {"Content-Type": "application/json", "x-api-key": f"k{number}"})
                response = kept.getresponse()
                response.read()
                assert response.status == (200, 200, 400, 404)[number % 4]
            kept.close()

        await asyncio.to_thread(ask, rounds)
        before, opened = resident_bytes(front.pid), descriptors(front.pid)
        await asyncio.to_thread(ask, rounds)
        await until(lambda: descriptors(front.pid) <= opened)
        assert resident_bytes(front.pid) - before < 8 * MIB


# Answers that end before they are whole


HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG_TEXT = " ".join(["word"] * 20_000)
"""It would be spoken for minutes."""


@pytest.fixture
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcesses, ServerProcess]]:
    """A toy whose answers take minutes, of its own for each test, and a gateway."""
    folder = tmp_path_factory.mktemp("slow")
    with servers.stack(folder, options={"interval_s": 0.05, "length": 10_000}) as stack, gateway(stack.address, folder) as door:
        yield stack, door


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_who_leaves_ends_all_of_several_answers(toy: ServerProcesses, url: str, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="leaving", max_retries=0) as client:
        wanted: Any = {"n": 3, "stream": stream, "max_tokens": 32_768, "extra_body": {"ignore_eos": True}}
        asking = asyncio.create_task(client.chat.completions.create(model="toy", messages=HELLO, **wanted))
        await watch_until(toy.addresses["thinker"], lambda report: report.sessions >= 3)
        if stream:
            await (await asking).close()
        else:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await all_free(list(toy.addresses.values()))


def test_a_stage_that_is_lost_in_the_middle_ends_a_stream_with_why(slow: tuple[ServerProcesses, ServerProcess]) -> None:
    stack, door = slow
    with openai.OpenAI(base_url=f"http://{door.address}/v1", api_key="test", max_retries=0) as client:
        wanted: dict[str, Any] = {"model": "toy", "extra_body": {"ignore_eos": True}, "max_tokens": 10_000}
        chat = client.chat.completions.create(messages=HELLO, stream=True, n=2, **wanted)
        next(iter(chat))
        response = iter(client.responses.create(model="toy", input="Hello", stream=True, max_output_tokens=10_000))
        assert next(response).type == "response.created"
        os.kill(stack.stages["thinker"].pid, signal.SIGKILL)
        with pytest.raises(openai.APIError) as caught:
            for _ in chat:
                pass
        last: Any = list(response)[-1]
    assert caught.value.code == "stage_lost"
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert last.response.output[0].content[0].text
    if is_here():
        document().check_answer(last.to_dict(), "/responses", media_type="text/event-stream")


def asked(stream_format: str = "audio") -> dict[str, Any]:
    return {"model": "tts-1", "voice": "alloy", "input": LONG_TEXT, "response_format": "wav", "stream_format": stream_format}


def ends(door: ServerProcess) -> list[tuple[int, str]]:
    """Status and reason of each request that has ended."""
    lines = [json.loads(line) for line in door.log().splitlines()]
    return [(line["status"], line["reason"]) for line in lines if line["event"] == "http.done"]


async def test_who_leaves_in_mid_speech_frees_the_stages(slow: tuple[ServerProcesses, ServerProcess]) -> None:
    stack, door = slow
    async with httpx2.AsyncClient(base_url=f"http://{door.address}", timeout=60) as client:
        for stream_format in ("audio", "sse"):
            async with client.stream("POST", "/v1/audio/speech", json=asked(stream_format)) as answer:
                assert await anext(answer.aiter_bytes())
            await all_free(list(stack.addresses.values()))
    await until(lambda: ends(door) == [(200, "CANCELLED")] * 2)


async def test_what_a_lost_stage_cuts_off_is_not_taken_for_the_whole(slow: tuple[ServerProcesses, ServerProcess]) -> None:
    """A file has no words for it: its connection breaks. Events have."""
    stack, door = slow
    heard: list[bytes] = []
    async with (
        httpx2.AsyncClient(base_url=f"http://{door.address}", timeout=60) as client,
        client.stream("POST", "/v1/audio/speech", json=asked()) as file,
        client.stream("POST", "/v1/audio/speech", json=asked("sse")) as told,
    ):
        pieces = file.aiter_bytes()
        heard.append(await anext(pieces))
        os.kill(stack.stages["code2wav"].pid, signal.SIGKILL)
        with pytest.raises(httpx2.RemoteProtocolError):
            async for piece in pieces:
                heard.append(piece)
        *deltas, (_, last) = events_of((await told.aread()).decode())
    assert heard[0].startswith(b"RIFF") and {data["type"] for _, data in deltas} <= {"speech.audio.delta"}
    assert last["error"]["reason"] == "STAGE_LOST" and last["error"]["type"] == "server_error"
    await until(lambda: ends(door) == [(200, "STAGE_LOST")] * 2)
    await all_free([stack.addresses[kind] for kind in ("thinker", "talker")])


async def test_who_leaves_before_a_picture_is_drawn_frees_the_stage(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whether it comes whole or as events."""
    folder = tmp_path_factory.mktemp("drawing")
    with servers.stack(folder, **SLOW_CHAIN) as stack, gateway(stack.address, folder) as door:
        for stream in (False, True):
            drawing = {"prompt": "a cat", "stream": stream, "include_events": stream, "steps": 1000}
            async with httpx2.AsyncClient(base_url=f"http://{door.address}", timeout=60) as client:
                waiting = asyncio.create_task(client.post("/v1/images/generations", json=drawing))
                await watch_until(stack.addresses["diffusion"], lambda report: report.sessions > 0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            await all_free(list(stack.addresses.values()))
        await until(lambda: [reason for _, reason in ends(door)] == ["CANCELLED"] * 2)
