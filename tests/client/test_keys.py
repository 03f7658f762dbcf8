"""API keys: a key goes with every call, sets clients apart, and is shown to nobody else."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer

from helpers.chain import addresses_of
from helpers.command import omnistage
from helpers.peer import Doorkeeper, PlayingPeer, Wire, listening, playing
from helpers.processes import ProcessFamily
from helpers.servers import all_free, family_logic, local_chain, local_router, local_stage
from helpers.toy_pipeline import toy_pipeline
from helpers.waiting import until
from omnistage.cli.main import app
from omnistage.client import AsyncOmni, BadRequestError, ClosedError, Omni, OmniError, OverloadedError, TextDelta, UnencryptedKeyWarning
from omnistage.client import routers as keys
from omnistage.client.connection import find_router
from omnistage.client.routers import KEY_VARIABLE, MAX_KEY_CHARACTERS, ApiKey, is_local, key_of
from omnistage.router.callers import API_KEY
from omnistage.router.pipeline import load_pipeline

SECRET, OTHER = "swordfish-1", "swordfish-2"
LONG: Any = {"max_tokens": 20_000, "ignore_eos": True}


@pytest.fixture
def lines() -> Iterator[list[MutableMapping[str, Any]]]:
    """The log of this process's servers meanwhile."""
    with structlog.testing.capture_logs() as logged:
        yield logged
    assert SECRET not in repr(logged) and OTHER not in repr(logged)


def shown(secret: str) -> str:
    """As a router logs it."""
    return f"key:{hashlib.sha256(secret.encode()).hexdigest()[:16]}"


def test_the_client_and_the_router_call_it_alike() -> None:
    assert keys.KEY_METADATA == API_KEY


async def test_it_goes_with_every_call(lines: list[MutableMapping[str, Any]], tmp_path: Path) -> None:
    """With a resumed one and an upload too, before and after the loss of a router."""
    film = tmp_path / "film.mp4"
    film.write_bytes(b"\0\0\0\x18ftypmp42")
    os.truncate(film, 17 << 20)
    door = Doorkeeper()
    options = {"thinker": {"films": True, "interval_s": 0.01}}
    async with AsyncExitStack() as servers, AsyncExitStack() as first:
        stages = {}
        for kind in ("thinker", "talker", "code2wav"):
            logic = family_logic("toy-omni", kind, options.get(kind))
            stages[kind] = (await servers.enter_async_context(local_stage(logic, family="toy-omni"))).address
        second = await servers.enter_async_context(local_router(stages, load_pipeline("toy-omni"), interceptors=[door]))
        lost = await first.enter_async_context(local_router(stages, load_pipeline("toy-omni"), interceptors=[door]))
        async with AsyncOmni(address=f"{lost.address},{second.address}", api_key=SECRET) as omni:
            await omni.generate("Hi", max_tokens=4, outputs=["text"])
            assert [pipeline.name for pipeline in await omni.pipelines()] == ["toy-omni"]
            assert await omni.replicas()
            async for event in omni.stream("?", videos=[film], max_tokens=20, outputs=["text"]):
                if isinstance(event, TextDelta):
                    await first.aclose()
        await all_free(list(stages.values()))
    assert [method for method, _ in door.calls] == ["Generate", "ListModels", "ListReplicas", "Converse", "Converse"]
    assert {key for _, key in door.calls} == {SECRET}
    ended = [line["client"] for line in lines if line["event"] == "answer.done"]
    assert len(ended) == 3 and set(ended) == {shown(SECRET)}


async def test_an_answer_that_goes_on_is_the_same_clients() -> None:
    async with playing(6, api_key=SECRET) as (peer, wire, omni), aclosing(omni.stream("Hi")) as events:
        for _ in range(5):
            await anext(events)
        wire.cut()
        async for _ in events:
            pass
    assert [request.HasField("resume") for request in peer.requests] == [False, True]
    assert peer.keys == [SECRET, SECRET]


async def test_two_views_share_a_connection_and_nothing_else(lines: list[MutableMapping[str, Any]]) -> None:
    """One of them has taken all that a client may have, half of the places, and is refused. Others of its host wait, and are next."""
    async with local_chain() as stages, local_router(addresses_of(stages), max_sessions=4, client_share=0.5) as router:
        wire = Wire(router.address)
        wire.connect()
        async with AsyncOmni(address=wire.address, max_retries=0) as omni, AsyncExitStack() as running:
            greedy, other = omni.as_client(SECRET), omni.as_client(OTHER)
            streams = [await running.enter_async_context(aclosing(greedy.stream("long", **LONG))) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(OverloadedError) as refused:
                await greedy.generate("Hi")
            assert SECRET not in repr(refused.value) + refused.value.message + refused.value.hint + repr(refused.value.metadata)
            answering = asyncio.gather(other.generate("Hi", seed=1, request_id="same"), omni.generate("Hi", seed=1, request_id="same"))
            await until(lambda: router.registry.get_sample_value("omnistage_router_waiting") == 2)
            for stream in streams:
                await stream.aclose()
            answers = await answering
            assert answers[0].text == answers[1].text, "one request id of two clients is two requests"
            assert wire.taken == 1
        await wire.disconnect()
        await all_free(list(addresses_of(stages).values()))
    told = [(line["event"], line["client"]) for line in lines if line["event"] in ("answer.done", "request.refused")]
    assert {("request.refused", shown(SECRET)), ("answer.done", shown(OTHER)), ("answer.done", "127.0.0.1")} <= set(told)


async def test_a_view_ends_with_the_client_that_it_is_of(toy_address: str) -> None:
    omni = AsyncOmni(address=toy_address, api_key=SECRET)
    async with omni.as_client(OTHER) as view:
        assert (await view.generate("Hi", outputs=["text"])).text
    assert (await view.generate("Hi", outputs=["text"])).text, "closing it closes nothing"
    assert (view.address, type(view)) == (omni.address, AsyncOmni)
    await omni.close()
    with pytest.raises(ClosedError):
        await view.generate("Hi")


async def test_a_visitor_without_a_key_has_that_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    async with playing() as (peer, _, omni):
        for client in (omni, omni.as_client(None), omni.as_client(SECRET).as_client(None)):
            await client.generate("Hi")
    assert peer.keys == [OTHER, None, None]


async def test_views_beside_each_other_on_threads() -> None:
    """Each call has the key of the view that it was made on."""
    peer = PlayingPeer()

    def ask(omni: Omni, number: int) -> None:
        for _ in range(5):
            with omni.as_client(f"{SECRET}-{number}") as view:
                view.generate("Hi", conversation_id=f"c-{number}")

    def ask_all(address: str) -> None:
        with Omni(address=address) as omni, ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, [omni] * 4, range(4)))
            kept = omni.as_client(SECRET)
        with pytest.raises(ClosedError):
            kept.generate("Hi")

    async with listening(peer) as wire:
        await asyncio.to_thread(ask_all, wire.address)
    found = {(request.conversation_id, key) for request, key in zip(peer.requests, peer.keys, strict=True)}
    assert found == {(f"c-{number}", f"{SECRET}-{number}") for number in range(4)}


def test_a_view_keeps_its_client_open(toy_address: str) -> None:
    """Without either, nobody waits for the collector of cycles."""
    omni = Omni(address=toy_address)
    owner, view = weakref.ref(omni), omni.as_client(OTHER).as_client(SECRET)
    del omni
    assert view.generate("Hi", outputs=["text"]).text
    del view
    assert owner() is None


async def test_the_router_that_runs_here_is_looked_at_as_this_client(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Doorkeeper()
    monkeypatch.delenv("OMNISTAGE_ROUTER")
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    async with local_chain() as stages, local_router(addresses_of(stages), interceptors=[door]) as router:
        monkeypatch.setattr("omnistage.client.connection.LOCAL_ADDRESS", router.address)
        async with AsyncOmni() as omni:
            await omni.generate("Hi", outputs=["text"], max_tokens=2)
        assert await find_router() is not None
    assert door.calls == [("ListModels", SECRET), ("Generate", SECRET), ("ListModels", None)]


@pytest.mark.parametrize(
    ("secret", "told"),
    [
        ("", "is empty"),
        (7, "is no text"),
        (b"swordfish", "is no text"),
        (" swordfish", "characters that a key cannot have"),
        ("swordfish\n", "characters that a key cannot have"),
        ("sword\tfish", "characters that a key cannot have"),
        ("schwertfisch-ä", "characters that a key cannot have"),
        ("swordfish" * 456, "has 4104 characters; give at most 4096"),
    ],
)
def test_what_is_no_key_is_refused_and_not_repeated(secret: Any, told: str, toy_address: str) -> None:
    with Omni(address=toy_address) as omni:
        for give in (lambda: AsyncOmni(api_key=secret), lambda: Omni(api_key=secret), lambda: omni.as_client(secret)):
            with pytest.raises(BadRequestError, match=told) as refused:
                give()
            assert refused.value.fields[0].field == "api_key"
            assert "fish" not in refused.value.message + refused.value.hint + str(refused.value)


def test_a_key_of_the_variable_counts_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert key_of(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert key_of(None) is None
    monkeypatch.setenv(KEY_VARIABLE, SECRET)
    longest = "a b" + "c" * (MAX_KEY_CHARACTERS - 3)
    for key, expected in ((None, SECRET), (OTHER, OTHER), (longest, longest)):
        found = key_of(key)
        assert found is not None and found.metadata == ((API_KEY, expected),)
    monkeypatch.setenv(KEY_VARIABLE, f"{SECRET} ")
    with pytest.raises(BadRequestError, match=f"{KEY_VARIABLE}: has characters") as refused:
        AsyncOmni()
    assert SECRET not in refused.value.message


async def test_it_is_in_nothing_that_is_printed_or_kept(toy_address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with warnings.catch_warnings(record=True) as warned, Omni(address=toy_address, api_key=SECRET) as omni:
        view = omni.as_client(OTHER)
        client = AsyncOmni(address=toy_address, api_key=SECRET)
        router = await client._connection.connect(5, client._api_key)
        errors: list[OmniError] = []
        for call in (lambda: view.generate("Hi", pipeline="none"), lambda: omni.generate("Hi", max_tokens=99_999)):
            with pytest.raises(OmniError) as refused:
                call()
            errors.append(refused.value)
        told = [omni, view, client, client.as_client(OTHER), ApiKey(SECRET), router, *errors, *(error.__cause__ for error in errors)]
        text = "".join(f"{one!r}{one!s}" for one in told) + caplog.text + "".join(str(one.message) for one in warned)
        assert SECRET not in text and OTHER not in text
        for kept in (ApiKey(SECRET), client):
            with pytest.raises(TypeError):
                pickle.dumps(kept)
        await client.close()


def test_no_process_of_a_private_stack_has_it_on_its_command_line(family: ProcessFamily, tmp_path: Path) -> None:
    with Omni(pipeline=toy_pipeline(tmp_path), api_key=SECRET) as omni:
        assert omni.generate("Hi").text
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family.pids()]
        assert len(lines) >= 3 and not any(SECRET.encode() in line for line in lines)


HERE = ("127.0.0.1:50050", "127.3.2.1:50050", "[::1]:50050", "localhost:50050", "unix:/run/router.sock", "unix-abstract:router")
NAMED_HERE = ("dns:///localhost:50050", "dns:localhost", "ipv4:127.0.0.1:50050,127.0.0.2:50050", "ipv6:[::1]:50050")
THERE = ("ipv4:127.0.0.1:50050,192.0.2.1:50050", "192.0.2.1:50050", "[2001:db8::1]:50050", "0.0.0.0:50050", "dns:///192.0.2.1:50050")
NAMED_THERE = ("dns://[2001:db8::53]/localhost:50050", "no-such-host.invalid:50050", "vsock:2:50050", "xds:///router")


@pytest.mark.parametrize("address", [*HERE, *NAMED_HERE, *THERE, *NAMED_THERE])
async def test_what_stays_on_this_machine(address: str) -> None:
    assert await is_local(address) == (address in HERE + NAMED_HERE)


@pytest.fixture
def elsewhere(toy_address: str) -> str:
    """An address that is not known to stay on this machine; it leads to the toy."""
    return f"0.0.0.0:{toy_address.rpartition(':')[2]}"


async def test_who_sends_it_in_the_clear_is_warned_once_for_each_address(elsewhere: str, toy_address: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with AsyncOmni(address=elsewhere) as omni:
            await omni.pipelines()
            assert not warned, "there is no key"
            for key in (SECRET, OTHER):
                await omni.as_client(key).pipelines()
                await omni.as_client(key).generate("Hi", outputs=["text"])
        async with AsyncOmni(address=toy_address, api_key=SECRET) as omni:
            await omni.pipelines()
    (only,) = warned
    assert only.category is UnencryptedKeyWarning
    assert str(only.message).startswith(f"the API key goes to {elsewhere} unencrypted")


async def test_who_makes_an_error_of_that_sends_nothing(elsewhere: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnencryptedKeyWarning)
        async with AsyncOmni(address=elsewhere) as omni:
            for _ in range(2):
                with pytest.raises(UnencryptedKeyWarning):
                    await omni.as_client(SECRET).generate("Hi")
            assert (await omni.generate("Hi", outputs=["text"])).text, "whoever has no key goes on"


@pytest.mark.parametrize("command", ["ask", "say", "chat", "draw", "pipelines", "status", "voices", "bench"])
def test_every_command_that_asks_takes_a_key(command: str) -> None:
    (option,) = [one for one in typer.main.get_group(app).commands[command].params if one.name == "api_key"]
    assert option.opts == ["--api-key"] and KEY_VARIABLE in (getattr(option, "help", None) or "")


def test_a_command_says_it_in_a_line(elsewhere: str, toy_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = omnistage("ask", "Hi", "--text-only", "--address", elsewhere, "--api-key", SECRET)
    assert asked.returncode == 0 and asked.stderr.count("warning: the API key goes to") == 1
    for words in (["pipelines"], ["status"], ["say", "Hi"]):
        done = omnistage(*words, "--address", toy_address, "--api-key", SECRET)
        assert done.returncode == 0 and "warning" not in done.stderr and SECRET not in done.stdout + done.stderr
    monkeypatch.setenv(KEY_VARIABLE, f"{OTHER} ")
    refused = omnistage("status", "--address", toy_address)
    assert refused.returncode == 1 and f"{KEY_VARIABLE}: has characters" in refused.stderr and "--api-key" not in refused.stderr
    refused = omnistage("status", "--address", toy_address, "--api-key", f"{SECRET}\n")
    assert refused.returncode == 1 and "--api-key: has characters" in refused.stderr and SECRET not in refused.stderr
