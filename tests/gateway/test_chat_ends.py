"""Answers over HTTP that end before they are whole."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.openai_document import document, is_here

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ENDLESS = {"interval_s": 0.05, "length": 10_000}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_who_leaves_ends_all_of_several_answers(toy: servers.ServerProcesses, url: str, stream: bool) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="leaving", max_retries=0) as client:
        wanted: Any = {"n": 3, "stream": stream, "max_tokens": 32_768, "extra_body": {"ignore_eos": True}}
        asking = asyncio.create_task(client.chat.completions.create(model="toy", messages=HELLO, **wanted))
        await servers.watch_until(toy.addresses["thinker"], lambda report: report.sessions >= 3)
        if stream:
            await (await asking).close()
        else:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        await servers.all_free(list(toy.addresses.values()))


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[servers.ServerProcesses, openai.OpenAI]]:
    """A chain whose answers take minutes, and a client in front of it."""
    with (
        servers.stack(tmp_path, options=ENDLESS) as stack,
        gateway(stack.address, tmp_path) as server,
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as client,
    ):
        yield stack, client


def test_a_stage_that_is_lost_in_the_middle_ends_a_stream_with_why(slow: tuple[servers.ServerProcesses, openai.OpenAI]) -> None:
    stack, client = slow
    wanted: dict[str, Any] = {"model": "toy", "extra_body": {"ignore_eos": True}, "max_tokens": 10_000}
    chat = client.chat.completions.create(messages=HELLO, stream=True, n=2, **wanted)
    next(iter(chat))
    wanted["extra_body"] = {}
    response = iter(client.responses.create(model="toy", input="Hello", stream=True, max_output_tokens=10_000))
    assert next(response).type == "response.created"
    stack.stages["thinker"].process.send_signal(signal.SIGKILL)
    with pytest.raises(openai.APIError) as caught:
        for _ in chat:
            pass
    assert caught.value.code == "stage_lost"
    last: Any = list(response)[-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert last.response.output[0].content[0].text
    if is_here():
        document().check_answer(last.to_dict(), "/responses", media_type="text/event-stream")
