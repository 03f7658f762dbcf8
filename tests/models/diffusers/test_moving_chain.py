"""Films and sound of pipelines that have no loop of our own, asked of a router, which learns from the stage which of them it makes."""

from __future__ import annotations

import pytest

from helpers.ask import ask, refused
from helpers.moving import CHANNELS, FILM_SIDE, RATE_HZ, film_maker, frames_of, sound_maker
from helpers.servers import all_free, family_logic, local_router, local_stage, omni_stub
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # of a VAE's of sound


def request(**fields: object) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=1, diffusion=stage_pb2.DiffusionParams(prompt="a dog", steps=2, **fields))  # type: ignore[arg-type]


async def test_a_film_comes_as_a_file() -> None:
    sizes = {"width": FILM_SIDE, "height": FILM_SIDE}
    async with (
        local_stage(family_logic("diffusers", "diffusion", sizes, film_maker())) as stage,
        local_router({"diffusion": stage.address}, load_pipeline("diffusers")) as router,
        omni_stub(router.address) as stub,
    ):
        answer = await ask(stub, request(frames=13))
        assert sorted(answer.chunks) == ["progress", "video"]
        data = b"".join(chunk.video.data for chunk in answer.of("video"))
        assert len(frames_of(data)[0]) == sum(chunk.count for chunk in answer.of("video")) == 13
        said = {(chunk.video.media_type, chunk.video.codecs) for chunk in answer.of("video") if chunk.HasField("video")}
        assert said == {("video/webm", "vp9")}
        answer = await ask(stub, request(frames=13, media_type='video/mp4; codecs="avc1"'))
        chunks = [chunk for chunk in answer.of("video") if chunk.HasField("video")]
        assert {(chunk.video.media_type, chunk.video.codecs[:5]) for chunk in chunks} == {("video/mp4", "avc1.")}
        assert len(frames_of(b"".join(chunk.video.data for chunk in chunks))[0]) == 13
        for fields, field in (({"duration_s": 2, "frames": 5}, "duration_s"), ({"media_type": "video/mp4; codecs=hvc1"}, "media_type")):
            bad = await refused(stub, request(**fields))
            assert (bad.reason, bad.fields) == ("BAD_REQUEST", [f"diffusion.{field}"])
        await all_free([stage.address])


async def test_sound_comes_as_samples() -> None:
    async with (
        local_stage(family_logic("diffusers", "diffusion", {}, sound_maker())) as stage,
        local_router({"diffusion": stage.address}, load_pipeline("diffusers")) as router,
        omni_stub(router.address) as stub,
    ):
        answer = await ask(stub, request(duration_s=0.5))
        assert sorted(answer.chunks) == ["audio", "progress"]
        assert answer.samples().size == RATE_HZ // 2 * CHANNELS
        await all_free([stage.address])
