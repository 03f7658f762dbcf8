"""On a GPU the Thinker computes in float32 what it computes on the processor.

Its parts are tried on a device that is not there where there is no GPU; whole answers need one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from helpers import media_files
from helpers.elsewhere import GPU, Device
from helpers.models import text_pieces
from omnistage.engine.attention import choose_backend
from omnistage.engine.results import fixed_results
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.encoders.preparing import read_pictures
from omnistage.models.encoders.starting import ThinkerParts, encoded_rows
from omnistage.models.interface import TextRequest, TokenLogprob
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import ThinkerConfig, read_thinker_config
from omnistage.models.qwen2_5_omni.thinker import WEIGHTS, Qwen2_5Thinker, load_thinker

TOKENS = 24
NEAR = 1e-3
"""Between two logits, and two numbers of a row: sums of float32 in another order, through all layers."""

IS_THERE = torch.cuda.is_available()


def entered() -> AbstractContextManager[object]:
    return nullcontext() if IS_THERE else Device().there()


def computed(parts: ThinkerParts, folder: Path, config: ThinkerConfig) -> list[torch.Tensor]:
    """Hidden rows and logits of fixed tokens, and rows of fixed pictures and sounds."""
    results = fixed_results(parts.decoder, parts.decoder.logits, choose_backend(parts.decoder.spec).backend)
    _, encoded = encoded_rows(parts, read_pictures(folder, config.vision).colours)
    return [result.cpu() for result in (*results, *encoded)]


def test_rows_and_logits_of_a_device_are_those_of_the_processor(omni_checkpoint: Path) -> None:
    config = read_thinker_config(omni_checkpoint)
    here = computed(WEIGHTS.read_parts(omni_checkpoint, config, torch.float32, torch.device("cpu")), omni_checkpoint, config)
    with torch.inference_mode(), entered():
        there = computed(WEIGHTS.read_parts(omni_checkpoint, config, torch.float32, GPU), omni_checkpoint, config)
    for one, other in zip(there, here, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= NEAR * max(1.0, float(other.abs().max()))


@dataclass(frozen=True, slots=True)
class DeviceAnswer:
    """tokens, and in the place of each the likeliest two."""

    tokens: Sequence[int]
    top: Sequence[Sequence[TokenLogprob]]


async def answers(model: Qwen2_5Thinker, requests: Sequence[TextRequest]) -> list[DeviceAnswer]:
    """All at once."""
    made = await asyncio.gather(*(text_pieces(model, request) for request in requests))
    return [
        DeviceAnswer([token for piece in pieces for token in piece.token_ids], [two for piece in pieces for two in piece.top_logprobs])
        for pieces in made
    ]


@pytest.mark.skipif(not IS_THERE, reason="no GPU can be reached: greedy answers of one are compared with those of the processor")
async def test_greedy_answers_of_a_gpu_are_those_of_the_processor(omni_checkpoint: Path, seed: int) -> None:
    await agree(omni_checkpoint, str(GPU), seed)


async def agree(folder: Path, device: str, seed: int) -> None:
    """Where the two best logits are nearer than rounding, the answers may part."""
    asked: list[tuple[Part, ...]] = [
        (),
        ("word " * 150,),
        (Media("image/png", media_files.picture(seed, 60, 80)),),
        (Media("audio/flac", media_files.sound(seed, form="FLAC")),),
        (Media("video/mp4", media_files.film(seed, sound_s=2), use_audio=True),),
    ]
    requests = [
        TextRequest((Turn("user", (*parts, "What is this?")),), seed=0, max_tokens=TOKENS, ignore_eos=True, logprobs=True, top_logprobs=2)
        for parts in asked * 2
    ]
    here, there = (
        load_thinker(folder, LoadOptions(path=folder, dtype="float32", device=one, kv_cache_bytes=64 << 20)) for one in ("cpu", device)
    )
    print(there.info.settings)
    expected, made = await answers(here, requests), await answers(there, requests)
    again = await answers(there, [replace(requests[0], history=tuple(made[0].tokens[:9]))])
    await here.close()
    await there.close()
    parted = 0
    for one, other in zip(made, expected, strict=True):
        for place in range(TOKENS):
            for mine, theirs in zip(one.top[place], other.top[place], strict=True):
                assert abs(mine.logprob - theirs.logprob) <= NEAR
            if one.tokens[place] != other.tokens[place]:
                assert other.top[place][0].logprob - other.top[place][1].logprob <= 2 * NEAR
                parted += 1
                break
    assert parted <= 1, "answers part by chance, and hardly ever"
    assert again[0].tokens == made[0].tokens[9:]
