"""A client that asks for 100 MB of sound and does not read it: it is cut off, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio

from helpers.ask import ask, read, read_all, refusal, request
from helpers.servers import ServerProcess, all_free, local_stage, omni_stub, stack
from omnistage.link.replay import MAX_UNSENT, MAX_UNSENT_CODES
from omnistage.models.interface import Piece, TensorRows, TextPiece, TextRequest, Wanted
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions, ToyThinker
from omnistage.router.answer import WINDOW as CLIENT_WINDOW
from omnistage.stage.inputs import CODES_WINDOW, WINDOW
from omnistage.thinker.stage import ThinkerStage

SAMPLES = 24_000
"""Samples of one frame: 48,000 bytes, so that a token is 96,000."""

TOKENS = 1_100
OPTIONS = {"samples_per_frame": SAMPLES, "max_chunk": 1}
STALL_S = 1


class EndlessThinker(ToyThinker):
    """The toy Thinker, and how many tokens of its endless answers were ever made."""

    made = 0

    async def generate(
        self, prepared: TextRequest, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[TextPiece | TensorRows, None]:
        async with aclosing(super().generate(prepared, inputs, ports)) as pieces:
            async for piece in pieces:
                if prepared.ignore_eos and isinstance(piece, TextPiece):
                    self.made += len(piece.token_ids)
                yield piece


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[tuple[EndlessThinker, str, list[str]]]:
    """Talker, Code2Wav and router as processes, the Thinker here, where it can be counted: the Thinker, the router, all stages."""
    thinker = EndlessThinker(ToyOptions.from_settings(OPTIONS))
    with stack(folder, kinds=("talker", "code2wav"), options=OPTIONS, router_args=None) as running:
        async with local_stage(ThinkerStage(thinker)) as local:
            addresses = {"thinker": local.address, **running.addresses}
            stages = ",".join(f"{kind}={address}" for kind, address in addresses.items())
            flags = ["--pipeline", "toy", "--stages", stages, "--stall-limit", str(STALL_S), "--grace", "5"]
            with ServerProcess("omnistage.router", *flags, log_folder=folder) as router:
                await asyncio.to_thread(router.wait_ready)
                yield thinker, router.address, list(addresses.values())


async def test_the_thinker_stops_the_client_is_cancelled_and_the_others_do_not_notice(tmp_path: Path):
    async with house(tmp_path) as (thinker, address, stages), omni_stub(address) as stub, omni_stub(address) as others:
        call = stub.Generate(request("all of it", 1, thinker={"max_tokens": TOKENS, "ignore_eos": True}), timeout=100)
        assert (await read(call)).HasField("started")
        assert (await read(call)).HasField("chunk")

        for seed in range(3):  # The same connection and another one; while the first client stalls and after it was cut off.
            answers = await asyncio.gather(*[ask(own, request(f"other {seed}", seed)) for own in (stub, others)])
            for answer in answers:
                answer.check_toy(seed, f"other {seed}", samples_per_frame=SAMPLES)
        await all_free(stages)
        made = thinker.made

        sound = 1  # The one chunk above was text or sound; counting it as sound only widens the bound.
        try:
            async for event in read_all(call):
                sound += event.chunk.port == "audio"
            raise AssertionError("the answer came to its end")
        except grpc.aio.AioRpcError as error:
            told = refusal(error)
        assert (told.code, told.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_STALLED")

        frames = sound + CLIENT_WINDOW + 1 + CODES_WINDOW + MAX_UNSENT_CODES + 2
        bound = frames // formulas.FRAMES_PER_ROW + 1 + WINDOW + MAX_UNSENT + 2
        print(f"{made} of {TOKENS} tokens were made, the bound is {bound}; {sound * SAMPLES * 2} bytes of sound were under way")
        assert made == thinker.made <= bound < TOKENS

        (await ask(stub, request("next", 9))).check_toy(9, "next", samples_per_frame=SAMPLES)
        await all_free(stages)
