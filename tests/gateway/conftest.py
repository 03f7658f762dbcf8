"""Gateways that the tests of this folder ask."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.videos import CHAIN


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A toy chain and its router, as processes, for all tests that only ask. The first word of an answer has no sound."""
    with servers.stack(tmp_path_factory.mktemp("toy"), options_of={"talker": {"mute_every": 1000}}) as stack:
        yield stack


@pytest.fixture(scope="session")
def url(toy: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the gateway in front of it listens."""
    with gateway(toy.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which asks once."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="test", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def film_maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A toy that makes pictures, films and sound of a prompt. A piece of a film is one frame to four."""
    with servers.stack(tmp_path_factory.mktemp("film"), **CHAIN) as stack:
        yield stack


@pytest.fixture(scope="session")
def film_url(film_maker: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the gateway in front of it listens."""
    with gateway(film_maker.address, tmp_path_factory.mktemp("film-gateway")) as server:
        yield f"http://{server.address}"
