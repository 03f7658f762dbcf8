"""A pipeline that is starting is waited for, so that the first request right after `omnistage serve` is answered."""

from __future__ import annotations

import asyncio

import httpx2
import openai
import pytest

from helpers.chain import addresses_of
from helpers.gateway import local_gateway
from helpers.ports import take_address
from helpers.servers import family_logic, local_chain, local_router, local_stage
from omnistage.gateway import door
from omnistage.router.pipeline import load_pipeline

TOY, PICTURE = load_pipeline("toy"), load_pipeline("toy-picture")


async def test_the_first_picture_of_openais_client_comes_when_its_pipeline_has_started() -> None:
    address = take_address()
    async with (
        local_chain() as chain,
        local_router({**addresses_of(chain), "toy-picture/diffusion": address}, TOY, PICTURE) as router,
        local_gateway(router.address) as (url, _),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="ann", max_retries=0) as client,
    ):
        picture = asyncio.create_task(client.images.generate(model="toy-picture", prompt="a walk", size="256x256"))
        answer = await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content and not picture.done()
        async with local_stage(family_logic("toy", "diffusion"), address=address):
            pictures = await picture
    assert pictures.data and pictures.data[0].b64_json


async def test_one_that_does_not_start_is_told_with_when_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "START_PATIENCE_S", 1.5)
    async with (
        local_chain() as chain,
        local_router({**addresses_of(chain), "toy-picture/diffusion": take_address()}, TOY, PICTURE) as router,
        local_gateway(router.address) as (url, _),
        httpx2.AsyncClient() as client,
    ):
        refused = await client.post(f"{url}/v1/images/generations", json={"model": "toy-picture", "prompt": "a walk"}, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
    assert float(refused.headers["retry-after"]) > 0
