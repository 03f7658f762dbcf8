"""A medium that is refused after it was decoded leaves nothing of it in the Thinker."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import media_files
from helpers.models import text_pieces
from helpers.processes import open_files
from helpers.run import RunStream, open_of
from helpers.servers import all_free, family_logic, local_stage, stage_stub
from omnistage.models.conversation import Media, Turn
from omnistage.models.interface import BadRequest, Failed, TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.thinker import load_thinker
from omnistage.v1 import stage_pb2

REFUSED = 6
"""Films, one after the other."""


@pytest.fixture
def resting_collector() -> Iterator[None]:
    """In a server it looks at old objects after hundreds of requests only, so nothing may wait for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pixels_here() -> tuple[int, int]:
    """Descriptors and mappings of decoded media that this process has."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return sum("omnistage-medium" in target for _, target in open_files()), sum("omnistage-medium" in mapping for mapping in mappings)


def film(seed: int) -> bytes:
    """With a sound that is too short, which is told when all of it is decoded."""
    return media_files.film(seed, 20, form="mov", sound_s=0.01, sound_codec="pcm_s16le")


@pytest.mark.usefixtures("resting_collector")
async def test_a_refusal_that_somebody_keeps_keeps_no_pixels(omni_checkpoint: Path, seed: int) -> None:
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32"))
    request = TextRequest((Turn("user", (Media("video/quicktime", film(seed), use_audio=True),)),), seed=seed, max_tokens=4)
    with pytest.raises(BadRequest, match="too short to hear anything") as refused:
        await text_pieces(model, request)
    assert refused.value.__context__ is None
    assert pixels_here() == (0, 0)
    await model.close()


@pytest.mark.usefixtures("resting_collector")
async def test_films_that_are_refused_leave_no_pixels_in_a_server(omni_checkpoint: Path, seed: int) -> None:
    logic = family_logic("qwen2_5_omni", "thinker", checkpoint=omni_checkpoint)
    async with local_stage(logic, family="qwen2_5_omni") as server, stage_stub(server.address) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        for number in range(REFUSED):
            part = stage_pb2.Part(media=stage_pb2.Media(media_type="video/quicktime", data=film(seed + number), use_audio=True))
            thinker = stage_pb2.ThinkerParams(messages=[stage_pb2.Message(role="user", parts=[part])], max_tokens=4)
            caller = RunStream(stub)
            await caller.send(open=open_of(description, params=stage_pb2.StageParams(thinker=thinker)))
            ended = (await caller.finish()).ended
            assert ended is not None
            assert "too short to hear anything" in ended.message
        await all_free([server.address])
        assert pixels_here() == (0, 0)


async def test_a_fault_of_the_sandbox_is_told_as_the_servers_own(
    omni_checkpoint: Path, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a library that wants a file in the middle of a sound."""
    (tmp_path / "soxr.py").write_text("class ResampleStream:\n    def __init__(self, *rest, **options):\n        open('/etc/hostname')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32"))
    request = TextRequest((Turn("user", (Media("audio/wav", media_files.sound(seed, 0.5, 8000)),)),), seed=seed, max_tokens=4)
    with pytest.raises(Failed, match=r"this server cannot decode a medium because of a fault of its own"):
        await text_pieces(model, request)
    await model.close()
