"""The refusals of a Code2Wav of Qwen2.5-Omni: codes, voices, options and checkpoints, each with what is wrong; and the facts in its
revision."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths
from helpers.waves import drawn, loaded, samples, sounds
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.interface import BadRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav
from omnistage.models.qwen2_5_omni.wave.config import read_wave_config
from omnistage.models.reports import LoadError
from omnistage.models.speech.code2wav import sessions_of


async def test_a_code_that_there_is_not_is_refused(quick: FlowCode2Wav, seed: int) -> None:
    codes = drawn(random.Random(seed), 60)
    whole = await samples(quick, codes, WaveRequest(seed))
    for wrong in (8194, 8293, 8296, 1 << 31):
        bad = codes.copy()
        bad[50] = wrong
        with pytest.raises(BadRequest, match=f"no code {wrong}; codes are below 8194"):
            await sounds(quick, bad, WaveRequest(seed), size=lambda: 5)
    assert np.array_equal(await samples(quick, codes, WaveRequest(seed)), whole)


async def test_codes_that_are_missing_are_told(quick: FlowCode2Wav, seed: int) -> None:
    codes = drawn(random.Random(seed), 60)
    with pytest.raises(BadRequest, match="code 0 and those behind it are needed; the first that came is number 3"):
        await sounds(quick, codes, WaveRequest(seed), first=3)
    with pytest.raises(BadRequest, match=r"the sound has 28800 samples: it cannot go on at sample 28801"):
        await sounds(quick, codes, WaveRequest(seed), sample=28801)


async def test_a_voice_that_there_is_not_is_refused(quick: FlowCode2Wav) -> None:
    with pytest.raises(BadRequest, match=r"code2wav\.voice: there is no voice 'Nobody'; the voices are Chelsie and Ethan"):
        await quick.prepare(WaveRequest(0, voice="Nobody"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"solver": "heun"}, "option solver of the code2wav of qwen2_5_omni is 'heun'; there are rk4, midpoint, euler"),
        ({"steps": -1}, "option steps of the code2wav of qwen2_5_omni is -1; 0 leaves it to the model"),
        ({"steps": 101}, "option steps of the code2wav of qwen2_5_omni is 101; 100 is the most"),
        ({"lookahead": 37}, "option lookahead of the code2wav of qwen2_5_omni is 37; 36 is the most"),
        ({"workers": 65}, "option workers of the code2wav of qwen2_5_omni is 65; 64 is the most"),
        ({"speed": 1}, r"unknown options \['speed'\] of the code2wav of qwen2_5_omni"),
    ],
)
def test_options_that_cannot_be_are_refused(omni_checkpoint: Path, options: dict[str, int | str], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        loaded(omni_checkpoint, **options)


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        ("dit_config", "block_size", 25, "'block_size' is 25, no whole number of codes of 2 frames"),
        ("dit_config", "repeats", 0, "'repeats' is 0"),
        ("dit_config", "look_ahead_layers", [22], "layers look ahead or back that are not among the 22 that there are"),
        ("dit_config", "look_backward_layers", [0, 10, 20], "3 layers look back and 1 ahead; the published 2 and 1 are supported"),
        ("dit_config", "look_ahead_layers", [10, 12], "2 layers look back and 2 ahead; the published 2 and 1 are supported"),
        ("dit_config", "mel_dim", 40, "'mel_dim' is 40 of what is made, 80 of what is made to sound"),
        ("bigvgan_config", "upsample_rates", "5", "lacks the list 'upsample_rates'"),
        ("bigvgan_config", "resblock_kernel_sizes", [3, 7, 15], r"'resblock_kernel_sizes' is \[3, 7, 15\]; only the published one is supp"),
        ("bigvgan_config", "upsample_rates", [5, 3, 4, 2, 2], r"'upsample_rates' is \[5, 3, 4, 2, 2\]; only the published one is supp"),
        ("bigvgan_config", "resblock_dilation_sizes", [1, 3, 5], "lacks the list '0'"),
    ],
)
def test_a_config_that_cannot_be_is_told(copied: Path, section: str, name: str, value: object, told: str) -> None:
    config = json.loads((copied / "config.json").read_text())
    config["token2wav_config"][section][name] = value
    (copied / "config.json").unlink()
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=told):
        read_wave_config(copied)


@pytest.mark.parametrize(("free", "sessions"), [(1 << 40, 64), (1000, 20), (99, 1), (0, 1)])
def test_there_are_as_many_speeches_as_there_is_memory_for(free: int, sessions: int) -> None:
    assert sessions_of(10, LoadOptions(), free)[0] == sessions
    assert sessions_of(10, LoadOptions(max_sessions=7), free) == (7, "7")


@lengths.long_form(
    "models/test_revision.py::test_a_revision_changes_with_each_of_its_parts",
    unkept="solver, steps and lookahead change the results that a revision is made of",
)
def test_whatever_changes_a_sample_changes_the_revision(quick: FlowCode2Wav, omni_checkpoint: Path) -> None:
    others = (loaded(omni_checkpoint, solver="midpoint", steps=1), loaded(omni_checkpoint, solver="euler", steps=2, lookahead=2))
    for other in others:
        asyncio.run(other.close())
    assert len({quick.info.revision, *(other.info.revision for other in others)}) == 3
