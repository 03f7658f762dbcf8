"""The refusals of a Code2Wav of Qwen3-Omni: codes, options and checkpoints, each with what is wrong; and the facts in its revision."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.causal_waves import drawn, loaded, samples, section, sounds, written
from omnistage.models.checkpoint.files import WEIGHTS, BadCheckpoint
from omnistage.models.interface import BadRequest, WaveRequest
from omnistage.models.qwen3_omni.config import MODEL_TYPE
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav
from omnistage.models.qwen3_omni.wave.config import read_wave_config
from omnistage.models.reports import LoadError
from omnistage.models.tiny import qwen3_omni as tiny


async def test_a_code_that_there_is_not_is_refused(wave: CausalCode2Wav, seed: int) -> None:
    source = random.Random(seed)
    codes = drawn(wave, source, 20)
    whole = await samples(wave, codes, WaveRequest(seed))
    for wrong in (2048, 3000, 1 << 31):
        bad = codes.copy()
        bad[17, source.randrange(16)] = wrong
        with pytest.raises(BadRequest, match=f"codes: there is no code {wrong}; codes are below 2048"):
            await sounds(wave, bad, WaveRequest(seed), size=lambda: 5)
    assert np.array_equal(await samples(wave, codes, WaveRequest(seed)), whole)


async def test_frames_that_are_missing_are_told(wave: CausalCode2Wav, seed: int) -> None:
    codes = drawn(wave, random.Random(seed), 20)
    with pytest.raises(BadRequest, match="code 0 and those behind it are needed; the first that came is number 3"):
        await sounds(wave, codes, WaveRequest(seed), first=3)
    with pytest.raises(BadRequest, match=r"resume\.positions: the sound has 37845 samples: it cannot go on at sample 37846"):
        await sounds(wave, codes, WaveRequest(seed), sample=37846)


async def test_a_voice_is_the_business_of_the_talker(wave: CausalCode2Wav, seed: int) -> None:
    """The router tells both of them; the codes have it."""
    codes = drawn(wave, random.Random(seed), 3)
    assert np.array_equal(await samples(wave, codes, WaveRequest(0, voice="Ethan")), await samples(wave, codes, WaveRequest(1)))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"workers": -1}, "option workers of the code2wav of qwen3_omni is -1; 0 leaves it to the model"),
        ({"workers": 65}, "option workers of the code2wav of qwen3_omni is 65; 64 is the most"),
        ({"speed": 1}, r"unknown options \['speed'\] of the code2wav of qwen3_omni; known are \['workers'\]"),
    ],
)
def test_options_that_cannot_be_are_refused(wave_folders: dict[str, Path], options: dict[str, int | str], told: str) -> None:
    with pytest.raises(LoadError, match=told):
        loaded(wave_folders["tiny"], **options)


def configured(folder: Path, whole: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, **whole}))
    return folder


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu', and only 'silu' is supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "positions of the type 'yarn' are not supported, only the default ones"),
        ({"rope_theta": -1e4}, r"'rope_theta' is -10000\.0, which must be 1 or more"),
        ({"rms_norm_eps": -1.0}, r"'rms_norm_eps' is -1\.0, which must be 0 or more"),
        ({"num_key_value_heads": 3}, "4 heads of 10 components cannot share 3 heads of keys"),
        ({"num_attention_heads": 8, "hidden_size": 40}, "8 heads of 5 components cannot share 2 heads of keys"),
        ({"decoder_dim": 24}, "'decoder_dim' is 24, which cannot be halved 4 times"),
        ({"upsampling_ratios": [1]}, "one frame makes 480 samples and the end of a speech lacks 555"),
        ({"upsample_rates": [8, 0]}, r"'upsample_rates' is \[8, 0\]; give rates of 1 and more"),
        ({"upsample_rates": []}, r"'upsample_rates' is \[\]; give rates of 1 and more"),
        ({"upsample_rates": [8, 5000]}, r"'upsample_rates' is \[8, 5000\]; give rates of 1 and more, 24000 in all at most"),
        ({"sliding_window": 0}, "'sliding_window' is 0, which must be 1 to 4096"),
        ({"num_quantizers": None}, "lacks 'num_quantizers'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by fp8"),
    ],
)
def test_a_config_that_cannot_be_is_told(tmp_path: Path, changed: dict[str, object], told: str) -> None:
    with pytest.raises(BadCheckpoint, match=told):
        read_wave_config(configured(tmp_path, {"code2wav_config": {**tiny.code2wav_config(), **changed}}))


@pytest.mark.parametrize("whole", [{}, {"code2wav_config": tiny.code2wav_config(), "enable_audio_output": False}], ids=["none", "off"])
def test_a_checkpoint_that_does_not_speak_says_so(tmp_path: Path, whole: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match="this checkpoint has no Code2Wav; serve a pipeline of its Thinker alone"):
        read_wave_config(configured(tmp_path, whole))


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    config = {**tiny.code2wav_config(), "rope_theta": 700.0}
    published = read_wave_config(configured(tmp_path, {"code2wav_config": config}))
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 700.0}
    assert read_wave_config(configured(tmp_path, {"code2wav_config": config})) == published and published.rope_theta == 700


def test_weights_that_are_missing_unused_or_misshapen_are_told(wave_folders: dict[str, Path], tmp_path: Path) -> None:
    """Those of other parts are nothing that it looks at."""
    folder, name = configured(tmp_path, {"code2wav_config": section(wave_folders["other"])}), "code2wav.decoder.2.block.3.conv1.conv.weight"
    whole = load_file(wave_folders["other"] / WEIGHTS)
    cases = {
        f"lacks the weight {name}": {key: value for key, value in whole.items() if key != name},
        f"{name} is": {**whole, name: whole[name][:, :, :5].contiguous()},
        "has 1 weights that this model does not, the first is code2wav.decoder.9.conv.bias": {
            **whole,
            "code2wav.decoder.9.conv.bias": torch.zeros(3),
        },
        f"{name}.*": {**whole, name: torch.full_like(whole[name], float("nan"))},
    }
    for told, tensors in cases.items():
        save_file({**tensors, "thinker.lm_head.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
        with pytest.raises(BadCheckpoint, match=told):
            loaded(folder)
    save_file({**whole, "talker.codec_head.weight": torch.zeros(2, 2)}, folder / WEIGHTS)
    asyncio.run(loaded(folder).close())


def test_whatever_changes_a_sample_changes_the_revision(wave: CausalCode2Wav, tmp_path: Path) -> None:
    other = loaded(written(tmp_path / "other", tiny.code2wav_config(), 6))
    asyncio.run(other.close())
    assert other.info.revision != wave.info.revision
