"""A router that runs already is asked by whoever names none, and nobody else's is."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import grpc
import pytest

from helpers import lengths
from helpers.chain import addresses_of
from helpers.processes import StartedProcess
from helpers.servers import family_logic, local_chain, local_router, local_stage, toy_logic
from helpers.squatter import squatter
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli import options, targets
from omnistage.cli.stack.layout import DEFAULT_ADDRESS, Layout
from omnistage.cli.targets import Need, must_run, running, target_for
from omnistage.client import AsyncOmni, Omni, Options, UnavailableError, connection
from omnistage.client import options as client_options
from omnistage.client.connection import ROUTER_VARIABLE, SEARCH_OFF, Connection, Found, find_router
from omnistage.client.errors import BadRequestError, DeadlineError, RequestError, StackError, UnknownModelError
from omnistage.client.private_stack import StackPlan
from omnistage.client.routers import CHANNEL_OPTIONS, ClientCredentials, Routers
from omnistage.router.pipeline import load_pipeline

ASKED = Need(["text"], ["text"], "thinker")
DRAWN = Need(["text"], ["image"], "diffusion")


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As a person's shell has it."""
    monkeypatch.delenv(ROUTER_VARIABLE)
    return monkeypatch


@pytest.fixture
def serving(looking: pytest.MonkeyPatch, toy_address: str) -> str:
    """The toy stack is where `omnistage serve` listens; that of this machine may have anything behind it."""
    looking.setattr(connection, "LOCAL_ADDRESS", toy_address)
    return toy_address


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Somebody of this user who is no router. answer: to whoever connects; None: nobody is even accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    connection.sendall(answer or b"")
                    connection.close()
            except OSError:
                pass

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_what_commands_and_servers_say_without_importing_the_client_is_the_same() -> None:
    assert (connection.LOCAL_ADDRESS, client_options.DEFAULT_TIMEOUT_S) == (DEFAULT_ADDRESS, options.DEFAULT_TIMEOUT_S)


async def test_the_one_that_runs_is_found(serving: str) -> None:
    router = await find_router()
    assert router is not None and (router.address, router.is_named) == (serving, False)
    assert [(pipeline.name, pipeline.state) for pipeline in router.pipelines] == [("toy", "ready")]


async def test_a_named_one_counts_more_and_is_not_even_tried(serving: str, looking: pytest.MonkeyPatch) -> None:
    looking.setenv(ROUTER_VARIABLE, "127.0.0.1:1")
    assert await find_router() == Found("127.0.0.1:1", is_named=True)
    looking.setenv(ROUTER_VARIABLE, SEARCH_OFF)
    assert await find_router() is None
    looking.setenv(ROUTER_VARIABLE, " ")
    router = await find_router()
    assert router is not None and router.address == serving


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "closing", "http"])
async def test_who_is_no_router_is_left_alone_soon(looking: pytest.MonkeyPatch, answer: bytes | None) -> None:
    with listening(answer) as address:
        looking.setattr(connection, "LOCAL_ADDRESS", address)
        async with asyncio.timeout(30):
            assert await find_router() is None


async def test_nobody_is_asked_where_nobody_listens(looking: pytest.MonkeyPatch, free_port: int) -> None:
    looking.setattr(connection, "LOCAL_ADDRESS", f"127.0.0.1:{free_port}")
    assert await find_router() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
async def test_a_router_of_another_user_is_not_asked(looking: pytest.MonkeyPatch, free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    looking.setattr(connection, "LOCAL_ADDRESS", address)
    with squatter(address) as other:
        assert other.tries().startswith("took ") and connection.is_address_taken(address)
        assert not connection.is_router_ours(address) and await find_router() is None
        with pytest.raises(UnavailableError, match="another user of this machine"):
            must_run()


def test_a_socket_that_only_has_a_connection_there_is_no_listener(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)) as server:
        assert connection.is_router_ours(f"127.0.0.1:{free_port}")
        with socket.create_connection(("127.0.0.1", free_port)) as client:
            assert not connection.is_address_taken(f"127.0.0.1:{client.getsockname()[1]}")
        server.close()
    assert not connection.is_address_taken(f"127.0.0.1:{free_port}")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_one_that_listens_everywhere_is_found_too(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as server:
        assert connection.is_router_ours(f"127.0.0.1:{server.getsockname()[1]}")


@lengths.long_form(
    "client/test_found.py::test_who_is_trusted_is_asked_with_every_connection",
    "client/test_found.py::test_a_router_of_another_user_is_not_asked",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_router_that_was_found_is_not_trusted_for_ever(looking: pytest.MonkeyPatch, free_port: int, tmp_path: Path) -> None:
    """When it has ended, anybody may take its port; a client that is open goes on to nobody."""
    address = f"127.0.0.1:{free_port}"
    looking.setattr(connection, "LOCAL_ADDRESS", address)
    command = [sys.executable, "-m", "omnistage.cli", "serve", toy_pipeline(tmp_path), "--address", address]
    with StartedProcess(command, stderr=subprocess.PIPE, text=True) as serving, ExitStack() as others:
        assert serving.stderr is not None and serving.stderr.readline().startswith("serving on")
        omni = others.enter_context(Omni(resume_timeout_s=0))
        assert omni.address == address and omni.generate("Hi").text
        serving.terminate()
        assert serving.wait(30) == 0
        other = others.enter_context(squatter(address))
        assert other.tries().startswith("took ")
        with pytest.raises((UnavailableError, DeadlineError)):  # It does not even speak gRPC.
            omni.generate("Hi", timeout_s=5)


async def test_who_is_trusted_is_asked_with_every_connection(toy_address: str) -> None:
    """Also over one that is there already: it may be somebody else's by now."""
    trusted = [True, False, True]
    routers = Routers(toy_address, lambda address: trusted.pop(0))
    try:
        assert (await routers.connect(5)).address == toy_address
        with pytest.raises(UnavailableError, match="another user of this machine"):
            await routers.connect(5)
        assert (await routers.connect(5)).address == toy_address
    finally:
        await routers.close()


async def test_one_that_another_user_takes_over_is_asked_no_more(serving: str, looking: pytest.MonkeyPatch) -> None:
    """Between the look and the call of the look, and between the look and the first call."""
    trusted = [True, False, True, True, False]
    looking.setattr(connection, "is_router_ours", lambda address: trusted.pop(0))
    assert await find_router() is None
    link = Connection(StackPlan())
    try:
        with pytest.raises(UnavailableError, match="another user of this machine"):
            await link.connect(5, None)
    finally:
        await link.disconnect()


@pytest.mark.parametrize("need", [ASKED, DRAWN], ids=["asked", "drawn"])
def test_a_command_asks_it_whatever_is_asked(serving: str, need: Need) -> None:
    """It decides; nobody starts a second stack beside it."""
    where = target_for(need, None, "")
    assert isinstance(where.at, Found) and where.address == serving and not where.at.is_named
    assert where.options(Options(seed=1)) == {"seed": 1}


def test_a_command_that_names_its_pipeline_asks_it_for_that(serving: str) -> None:
    where = target_for(ASKED, None, "toy")
    assert (where.address, where.options(Options(seed=1))) == (serving, {"seed": 1, "pipeline": "toy"})
    with pytest.raises(UnknownModelError, match=rf"the router at {serving} serves toy \(toy-thinker\), not toy-picture") as refused:
        target_for(DRAWN, None, "toy-picture")
    assert refused.value.hint == (
        f"`omnistage stop {serving}` ends it; start it again with toy-picture added: `omnistage serve ... toy-picture`, where the dots are"
        " what toy was started with. OMNISTAGE_ROUTER=none gives a stack of your own instead."
    )
    with pytest.raises(UnknownModelError, match=r"serves toy \(toy-thinker\), not toy-pictur") as unknown:
        target_for(DRAWN, None, "toy-pictur")
    assert unknown.value.hint == UnknownModelError.hint, "no start helps where there is no such pipeline"


def test_what_is_to_be_started_is_started(serving: str, tmp_path: Path) -> None:
    """Settings, a file: no router that runs has those."""
    film = target_for(DRAWN, None, "toy-film", devices={"": "cpu"})
    file = target_for(ASKED, None, toy_pipeline(tmp_path))
    assert isinstance(film.at, Layout) and isinstance(file.at, Layout)
    assert film.options(Options()) == {}, "the router that is started has no other"


@pytest.mark.parametrize("pipeline", ["", "smol", "words", "toy", "a.yaml", "./a", "own/er", "folder", "a=folder"])
def test_what_may_be_the_name_of_a_pipeline(tmp_path: Path, looking: pytest.MonkeyPatch, pipeline: str) -> None:
    """A folder is a checkpoint, unless a pipeline that comes with omnistage is called so. A router may know it, and a name at a hub."""
    looking.chdir(tmp_path)
    for name in ("folder", "toy"):
        (tmp_path / name).mkdir()
    assert targets._is_file(pipeline) == (pipeline in ("a.yaml", "./a", "a=folder"))
    assert targets._can_start(pipeline) == (pipeline in ("./a", "own/er", "folder"))


@pytest.mark.parametrize("is_named", [False, True], ids=["found", "named"])
def test_a_checkpoint_that_a_router_serves_is_asked_there_and_another_one_is_started(
    toy_address: str, looking: pytest.MonkeyPatch, tmp_path: Path, is_named: bool
) -> None:
    """By the name that the toy's checkpoint would have. The folder of this name may be another one, and its path means that."""
    if is_named:
        looking.setenv(ROUTER_VARIABLE, toy_address)
    else:
        looking.setattr(connection, "LOCAL_ADDRESS", toy_address)
    looking.chdir(tmp_path)
    for name in ("Toy-Thinker", "other"):
        (tmp_path / name).mkdir()
    assert target_for(ASKED, None, "Toy-Thinker").address == toy_address
    for pipeline in ("./Toy-Thinker", "other", "film=Toy-Thinker"):
        with pytest.raises(StackError, match=f"{pipeline.rpartition('=')[2].removeprefix('./')}/thinker/config.json is missing"):
            target_for(ASKED, None, pipeline)


def test_a_router_that_is_typed_is_asked(serving: str) -> None:
    where = target_for(ASKED, "127.0.0.1:7", "words")
    assert (where.address, where.pipeline) == ("127.0.0.1:7", "words")


def test_commands_that_start_nothing_mean_it_too(serving: str, looking: pytest.MonkeyPatch) -> None:
    assert must_run().address == serving
    looking.setenv(ROUTER_VARIABLE, "127.0.0.1:9")
    assert running() == Found("127.0.0.1:9", is_named=True)
    looking.setenv(ROUTER_VARIABLE, SEARCH_OFF)
    assert running() is None
    with pytest.raises(UnavailableError, match="no router is looked for"):
        must_run()


def test_omni_asks_it_and_tells_which_one_it_asks(serving: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "omnistage.client")
    with Omni() as omni:
        assert omni.address == serving and omni.generate("Hi", seed=1).text and "private" not in repr(omni)
    assert f"asking the router at {serving}" in caplog.text
    with Omni(address=serving) as still_there:
        assert still_there.replicas()


def test_omni_asks_the_named_one_and_tells_if_it_is_not_there(toy_address: str, looking: pytest.MonkeyPatch, free_port: int) -> None:
    looking.setenv(ROUTER_VARIABLE, toy_address)
    with Omni() as omni:
        assert omni.address == toy_address
    looking.setenv(ROUTER_VARIABLE, f"127.0.0.1:{free_port}")
    with pytest.raises(UnavailableError, match="no server answers"):
        Omni(connect_timeout_s=0.5)
    looking.setenv(ROUTER_VARIABLE, "nonsense")
    with pytest.raises(BadRequestError, match="no port"):
        Omni()


def test_what_says_nothing_is_what_has_no_settings() -> None:
    assert StackPlan().says_nothing and StackPlan({"start_timeout_s": 5}).says_nothing
    for plan in (StackPlan({"device": "cpu"}), StackPlan({"pipeline": "toy", "max_sessions": 4}), StackPlan({}, None, 2)):
        assert not plan.says_nothing


class Noted(ClientCredentials):
    """Credentials that note where they are used."""

    addresses: ClassVar[list[str]] = []

    def channel(self, address: str, options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        self.addresses.append(address)
        return super().channel(address, options)


async def test_the_one_that_runs_is_looked_at_as_it_will_be_asked(serving: str) -> None:
    """A router that only takes encrypted connections is no other thing for a look."""
    async with AsyncOmni.over(Connection(StackPlan(), credentials=Noted()), None) as omni:
        assert omni.address == serving and (await omni.generate("Hi", outputs=["text"])).text
    assert Noted.addresses == [serving, serving], "for the look, and for the calls"


def test_the_refusal_of_one_that_was_found_says_how_it_gets_what_it_lacks(serving: str) -> None:
    with Omni() as omni:
        for ask in (lambda: omni.draw("a red circle"), lambda: omni.generate("a red circle", width=32)):
            with pytest.raises(RequestError, match="serve a checkpoint that does, such as Qwen-Image") as error:
                ask()
            assert error.value.hint.startswith("Omni(model_path='DIR') gives a stack of your own for it")
            assert "start that again as `omnistage serve ... DIR`, where the dots are what toy was started with" in error.value.hint
        with pytest.raises(RequestError) as named_error:
            omni.say("Good morning.", pipeline="smol")
        command = "start it again with smol added: `omnistage serve ... smol`, where the dots are what toy was started with."
        assert named_error.value.hint.startswith(f"`omnistage stop {serving}` ends it; {command}")
        with pytest.raises(BadRequestError, match="toy does not draw") as named:
            omni.draw("a red circle", pipeline="toy")
        assert named.value.hint == "", "the refusal says who draws"
        assert omni.address == serving and [pipeline.name for pipeline in omni.pipelines()] == ["toy"]
    with Omni(address=serving) as omni, pytest.raises(BadRequestError) as told:
        omni.draw("a red circle")
    assert told.value.hint == "", "whose it is, who named it knows"


async def test_where_several_could_be_meant_the_hint_is_to_name_one() -> None:
    film = family_logic("toy-film", "diffusion")
    async with local_stage(toy_logic("diffusion")) as one, local_stage(film, family="toy-film") as other, local_chain() as stages:
        addresses = {"toy-picture/diffusion": one.address, "toy-film/diffusion": other.address}
        addresses |= {f"toy/{kind}": address for kind, address in addresses_of(stages).items()}
        pipelines = [load_pipeline(name) for name in ("toy", "toy-picture", "toy-film")]
        async with local_router(addresses, *pipelines) as router, AsyncOmni(address=router.address) as omni:
            with pytest.raises(BadRequestError, match="name one") as refused:
                await omni.draw("a hill")
    names = refused.value.metadata["candidates"].split(",")
    assert refused.value.hint == f"Name one of {', '.join(names)}: pipeline={names[0]!r}."
    assert sorted(names) == ["toy-film", "toy-picture"]
