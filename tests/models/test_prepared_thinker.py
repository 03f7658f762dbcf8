"""The work of the default Thinker before a run: on a thread of its own that is watched, once, and not on the loop, so that no prompt holds
up anybody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.link import opening
from helpers.models import text_pieces
from helpers.run import RunStream, params
from helpers.servers import all_free, local_stage, stage_stub
from helpers.waiting import until
from omnistage.engine.request import Constraint
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.smol.thinker import PreparedAnswer, SmolThinker, load_thinker
from omnistage.thinker.stage import ThinkerStage


class Hanging(SmolThinker):
    """Makes tokens when it is let go, and counts how often it is asked to."""

    go: threading.Event
    asked = 0
    clients: list[str]

    def _tokenized(self, request: TextRequest, grammar: Constraint | None) -> PreparedAnswer:
        self.asked += 1
        self.clients.append(request.client)
        assert self.go.wait(60)
        return super()._tokenized(request, grammar)


@pytest.fixture
async def thinker(default_model: Path) -> AsyncIterator[Hanging]:
    model = load_thinker(default_model / "thinker", LoadOptions(kv_cache_bytes=384 << 20))
    model.__class__ = Hanging
    assert isinstance(model, Hanging)
    model.go, model.clients = threading.Event(), []
    yield model
    model.go.set()
    await model.close()


def ask(text: str) -> TextRequest:
    return TextRequest((Turn("user", (text,)),), seed=1, max_tokens=2)


async def test_a_tokenizer_that_hangs_is_seen_by_whoever_watches_the_threads(thinker: Hanging) -> None:
    assert not any(thread.busy for thread in thinker.threads)
    asked = asyncio.create_task(thinker.prepare(ask("Hello!")))
    await until(lambda: thinker.asked)
    (busy,) = [thread for thread in thinker.threads if thread.busy]
    assert busy.name == "tokenizer"
    steps = busy.steps
    thinker.go.set()
    await asked
    assert busy.steps >= steps


async def test_many_that_wait_for_their_tokens_are_counted_as_waiting(thinker: Hanging) -> None:
    asked = [asyncio.create_task(thinker.prepare(ask(f"Hello {n}!"))) for n in range(4)]
    await until(lambda: thinker.load().queued == 3)
    asked[3].cancel()
    await asyncio.wait([asked[3]])
    assert thinker.load().queued == 2
    thinker.go.set()
    assert len(await asyncio.gather(*asked[:3])) == 3
    assert thinker.load().queued == 0


async def test_many_texts_of_one_client_hold_up_one_of_another_client_by_one(thinker: Hanging) -> None:
    clients = ["greedy"] * 5 + ["honest", "greedy", "honest"]
    asked = [asyncio.create_task(thinker.prepare(replace(ask("Hello!"), client=client))) for client in clients]
    await until(lambda: thinker.load().queued == len(clients) - 1)
    thinker.go.set()
    await asyncio.gather(*asked)
    assert thinker.clients == ["greedy", "honest"] * 2 + ["greedy"] * 4


async def test_a_prompt_that_was_computed_before_is_told(thinker: Hanging) -> None:
    """With the first piece and nowhere else."""
    thinker.go.set()
    request = ask("Tell me about the sea. " * 12)
    first, again = [await text_pieces(thinker, request) for _ in range(2)]
    assert thinker.asked == 2, "each becomes tokens once"
    assert again[0].cached_tokens > first[0].cached_tokens
    assert not any(piece.cached_tokens for piece in again[1:])
    whole = len(thinker.prompt(request.turns))
    assert whole > 64 and [piece.prompt_tokens for piece in again] == [whole, *[None] * (len(again) - 1)]


async def test_a_huge_prompt_is_refused_and_the_short_ones_beside_it_go_on(thinker: Hanging) -> None:
    thinker.go.set()
    async with local_stage(ThinkerStage(thinker)) as stage, stage_stub(stage.address) as stub:
        callers = []
        for number, text in enumerate(["Hello!", "\U0001f600" * 1_000_000, "Hi!"]):
            caller = RunStream(stub)
            asked = params("thinker", text, max_tokens=3, ignore_eos=True)
            await caller.send(open=opening("thinker", {"text": 64}, session_id=f"s{number}", model=thinker.info.name, params=asked))
            callers.append(caller)
        ends = [(await caller.finish()).ended for caller in callers]
        assert [ended is not None and ended.reason for ended in ends] == ["", "BAD_REQUEST", ""]
        assert ends[1] is not None and ends[1].metadata["field"] == "thinker.messages" and "characters" in ends[1].message
        await all_free([stage.address])
