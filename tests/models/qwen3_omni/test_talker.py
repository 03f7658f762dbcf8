"""The Talker of Qwen3-Omni: it says what Transformers says with the same weights, the same after any cut, as soon as it can, and tells
what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import lengths
from helpers.checkpoints import Change, Weights, changed, in_blocks
from helpers.models import RowInputs
from helpers.talker_reference import CHAT, PENALTY, SIZES, TTS, SpokenFrames, TalkerConversation, TalkerReference
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.interface import BadRequest, Sampling, SpeechRequest, TensorRows
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.talker import Qwen3Talker, load_talker
from omnistage.models.qwen3_omni.talker_config import read_talker_config

DRAWN = Sampling(temperature=0.9, top_k=50, repetition_penalty=PENALTY)
GREEDY = Sampling(repetition_penalty=PENALTY)
FRAMES = 12
CLOSE = 1e-4

Frame = tuple[int, ...]


@pytest.fixture(scope="module", params=lengths.undrawn_long(1, "reference", sorted(SIZES)))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TalkerReference:
    return TalkerReference(request.param, int(os.environ["OMNISTAGE_TEST_SEED"]), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def talker(reference: TalkerReference) -> Iterator[Qwen3Talker]:
    model = load(reference.folder)
    yield model
    asyncio.run(model.close())


def load(folder: Path, **options: Any) -> Qwen3Talker:
    return load_talker(folder, LoadOptions(path=folder, **{"dtype": "float32", "max_sessions": 16, **options}))


def speech(seed: int, asked: TalkerConversation | None = None, frames: int = FRAMES, sampling: Sampling = DRAWN) -> SpeechRequest:
    return SpeechRequest(seed, asked.voice if asked else "", sampling, max_frames=frames)


async def spoken(talker: Qwen3Talker, rows: Sequence[TensorRows], request: SpeechRequest) -> list[Frame]:
    line = RowInputs()
    for piece in rows:
        line.put(piece)
    async with aclosing(talker.speak(await talker.prepare(request), line.inputs(), {"codes": 0})) as frames:
        return [tuple(frame) async for made in frames for frame in made.rows.tolist()]


def config_of(reference: TalkerReference) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((reference.folder / "config.json").read_text())
    return whole


def copied(reference: TalkerReference, folder: Path, change: Change, weights: Weights | None = None) -> Path:
    """A checkpoint with a changed config. weights: other ones."""
    (folder / "config.json").write_text(json.dumps(changed(config_of(reference), change)))
    if weights is None:
        (folder / "model.safetensors").symlink_to(reference.folder / "model.safetensors")
    else:
        reference.save(weights, folder)
    return folder


def some(reference: TalkerReference, seed: int, count: int) -> list[TalkerConversation]:
    """Conversations of all kinds: text, a picture, a sound."""
    kinds: tuple[dict[str, bool], ...] = ({}, {"picture": True}, {"sound": True})
    return [reference.asked(seed + n, tokens=3 + 5 * n % 17, words=2 + 31 * n % 75, **kinds[n % 3]) for n in range(count)]


def sure_frames(expected: SpokenFrames) -> int:
    """The frames before the first one with two codes that are almost equally good."""
    return next((n for n, gap in enumerate(expected.gaps) if gap < CLOSE), len(expected.gaps))


@lengths.rounds(2, 12)
async def test_greedy_frames_are_those_of_transformers(reference: TalkerReference, talker: Qwen3Talker, rounds: int, seed: int) -> None:
    """Its `generate` and a loop that computes everything anew say the same."""
    compared = 0
    for asked in some(reference, seed, rounds + 1)[1:]:
        expected = reference.spoken(asked, FRAMES)
        sure = sure_frames(expected)
        assert reference.generated(asked, sure + 1)[:sure] == expected.frames[:sure]
        assert (await spoken(talker, reference.rows(asked), speech(1, asked, sampling=GREEDY)))[:sure] == expected.frames[:sure]
        assert len(set(expected.frames)) > len(expected.frames) // 2
        compared += sure
    assert compared > FRAMES * rounds // 2


@lengths.rounds(1, 6)
async def test_logprobs_of_first_codes_are_those_of_transformers(
    reference: TalkerReference, talker: Qwen3Talker, rounds: int, seed: int
) -> None:
    """Each frame is the history of the next one, so that a code which is almost as good changes nothing."""
    tts = {name: TTS[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")}
    for asked in some(reference, seed, rounds):
        expected, (places, prompt, reply) = reference.spoken(asked, FRAMES), reference.rows(asked)
        items, positions = talker.lay_out(places.rows.T.astype(np.int64), asked.voice)
        between = reference.embedding[[*[tts["pad"]] * 4, tts["bos"]]]
        given = torch.cat((torch.from_numpy(prompt.rows), between, torch.from_numpy(reply.rows[:1])))
        behind = torch.cat((torch.from_numpy(reply.rows[1:]), reference.embedding[[tts["eos"], tts["pad"]]]))
        request = SequenceRequest(
            Prompt(items, (Given(0, given),), positions, int(positions.max()) + 1 - len(items)),
            seed=0,
            max_items=FRAMES + 1,
            logprobs=True,
            top_logprobs=talker.engine.spec.drawn_ids,
            appended=True,
        )
        for number in range(0, len(expected.frames), 4):
            stream = talker.engine.submit(replace(request, history=tuple(expected.frames[:number])))
            async with aclosing(stream):
                stream.append(behind, end=True)
                (event, *_) = await stream.take()
            found = torch.empty(talker.engine.spec.drawn_ids)
            for item, logprob in event.top:
                found[item] = logprob
            assert torch.allclose(found, expected.logprobs[number], atol=CLOSE), (found - expected.logprobs[number]).abs().max()


def endless(talker: Qwen3Talker, seed: int, asked: TalkerConversation) -> SpeechRequest:
    return speech(seed, asked, sampling=replace(DRAWN, logit_bias={talker.config.codec.eos: -100.0}))


async def test_a_speech_ends_with_its_end_or_with_as_many_frames_as_it_may_have(
    reference: TalkerReference, talker: Qwen3Talker, seed: int
) -> None:
    """Nothing of the end is put out."""
    asked = reference.asked(seed)
    rows, unended = reference.rows(asked), endless(talker, seed, asked)
    ended = speech(seed, asked, sampling=replace(GREEDY, logit_bias={talker.config.codec.eos: 100.0}))
    assert await spoken(talker, rows, ended) == []
    first, *_ = await spoken(talker, rows, unended)
    assert len(first) == reference.size["groups"]
    assert await spoken(talker, rows, replace(unended, max_frames=1)) == [first]


@pytest.mark.parametrize("tokens", [1, 3000])
async def test_an_answer_may_be_one_token_or_thousands(reference: TalkerReference, talker: Qwen3Talker, tokens: int, seed: int) -> None:
    asked = reference.asked(seed, tokens=tokens)
    expected = reference.spoken(asked, 4)
    sure = sure_frames(expected)
    frames = await spoken(talker, reference.rows(asked), speech(seed, asked, frames=4, sampling=GREEDY))
    assert frames[:sure] == expected.frames[:sure]
    assert talker.engine.stats().pages_used == 0


async def test_what_is_no_code_is_never_drawn(reference: TalkerReference, talker: Qwen3Talker, seed: int) -> None:
    """Whatever a request says of it: Code2Wav could make nothing of it."""
    asked, config = reference.asked(seed), talker.config
    likely = dict.fromkeys((config.codes, config.codec.bos, config.codec.pad, *config.speakers.values()), 200.0)
    for sampling in (Sampling(), Sampling(temperature=1.5, top_p=0.99), Sampling(temperature=0.7, top_k=1, min_p=0.1)):
        request = speech(seed, asked, sampling=replace(sampling, logit_bias={**likely, config.codec.eos: -100.0}))
        frames = await spoken(talker, reference.rows(asked), request)
        assert len(frames) == FRAMES and max(code for frame in frames for code in frame) < config.codes


async def test_a_voice_has_its_name_in_any_letters(reference: TalkerReference, talker: Qwen3Talker, seed: int) -> None:
    asked = reference.asked(seed)
    request = replace(endless(talker, seed, asked), voice="chelsie")
    lower = await spoken(talker, reference.rows(asked), request)
    assert await spoken(talker, reference.rows(asked), replace(request, voice="Chelsie")) == lower
    assert await spoken(talker, reference.rows(asked), replace(request, voice="Aiden")) != lower


async def test_a_checkpoint_may_have_one_voice(reference: TalkerReference, tmp_path: Path, seed: int) -> None:
    """Which speaks where none is named."""
    voices = {"aiden": config_of(reference)["talker_config"]["speaker_id"]["aiden"]}
    talker, asked = load(copied(reference, tmp_path, {"talker_config.speaker_id": voices})), reference.asked(seed)
    with pytest.raises(BadRequest, match="there is no voice 'Ethan'; the only voice is aiden"):
        await talker.prepare(replace(speech(1), voice="Ethan"))
    made = [await spoken(talker, reference.rows(asked), replace(endless(talker, seed, asked), voice=voice)) for voice in ("", "AIDEN")]
    assert made[0] == made[1] and len(made[0]) == FRAMES and talker.info.voices == ("aiden",)
    await talker.close()


async def test_a_row_that_is_neither_text_nor_a_medium_is_refused(reference: TalkerReference, talker: Qwen3Talker, seed: int) -> None:
    places, prompt, reply = reference.rows(reference.asked(seed))
    for kind in (2, -1):
        changed = np.array(places.rows)
        changed[-1, -1] = kind
        with pytest.raises(BadRequest, match="0 of text or 1 of a medium") as told:
            await spoken(talker, [TensorRows("places", changed, last=True), prompt, reply], speech(seed))
        assert told.value.field == "talker"


BAD: dict[str, tuple[str, Any, str]] = {
    "no talker": ("enable_audio_output", False, "has no Talker"),
    "no section of it": ("talker_config", {}, "has no Talker"),
    "nothing that makes sound of its codes": ("code2wav_config", None, "has no Talker"),
    "a switch of another type": ("enable_audio_output", "no", "'enable_audio_output' is 'no', which is no bool"),
    "a section of another type": ("code2wav_config", [1], "lacks the object 'code2wav_config'"),
    "another model": ("model_type", "qwen2_5_omni", "not a 'qwen3_omni_moe'"),
    "rows of another width": ("thinker_config.text_config.hidden_size", 7, "is not that of the rows of the Thinker"),
    "another number of codes": ("talker_config.code_predictor_config.num_code_groups", 3, "a frame of the Talker has 3"),
    "codes that the sound has not": ("code2wav_config.codebook_size", 8, "'codebook_size' is 8"),
    "codes that the sound has not one of": ("code2wav_config.num_quantizers", 4, "'num_quantizers' is 4"),
    "an end that is a code": ("talker_config.codec_eos_token_id", 3, "item 3 is a code"),
    "a voice that there is not": ("talker_config.speaker_id", {"eve": 1 << 20}, "item 1048576 is a code, or none"),
    "no voice": ("talker_config.speaker_id", {}, "names no voice"),
    "no codes": ("talker_config.text_config.vocab_size", 1024, "none is left"),
    "too many experts": ("talker_config.text_config.num_experts_per_tok", 500, "is 500, of "),
    "no turning": ("talker_config.code_predictor_config.rope_theta", 0, "'rope_theta' is 0"),
    "less than nothing": ("talker_config.text_config.rms_norm_eps", -1.0, "'rms_norm_eps' is -1"),
    "biases that there are not": ("talker_config.text_config.attention_bias", True, r"lacks .*talker\.model\..*q_proj\.bias"),
    "biases of the predictor": ("talker_config.code_predictor_config.attention_bias", True, r"code_predictor\..*q_proj\.bias"),
    "another activation": ("talker_config.text_config.hidden_act", "gelu", "only 'silu'"),
    "windows": ("talker_config.code_predictor_config.layer_types", ["sliding_attention"], "sliding windows"),
    "positions of another kind": ("talker_config.text_config.rope_scaling.rope_type", "yarn", "'yarn' are not supported"),
    "two axes": ("talker_config.text_config.rope_scaling.mrope_section", [8, 8], r"is \[8, 8\]: it needs"),
    "an axis without a pair": ("talker_config.text_config.rope_scaling.mrope_section", [16, 0, 0], "above 0 for each of 3"),
    "packed weights": ("talker_config.quantization_config", {"quant_method": "gptq"}, "quantized by gptq"),
    "a token that there is not": ("tts_eos_token_id", 1 << 20, "the Thinker has 90 tokens"),
    "no upsampling": ("code2wav_config.upsample_rates", [8, 0], "give rates of 1 and more"),
    "more samples than a frame may have": ("code2wav_config.upsample_rates", [1 << 40], "24000 in all at most"),
    "more samples of both": ("code2wav_config.upsample_rates", [20000], "make 80000 samples of a frame: 24000 are the most"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_config_that_does_not_fit_is_refused(reference: TalkerReference, tmp_path: Path, name: str) -> None:
    path, value, told = BAD[name]
    with pytest.raises(BadCheckpoint, match=told):
        load(copied(reference, tmp_path, {path: value}))


def test_what_a_config_says_of_frames(reference: TalkerReference) -> None:
    config = read_talker_config(reference.folder)
    assert (config.groups, config.codes, config.rate_hz) == (reference.size["groups"], reference.size["codes"], 12.5)
    assert config.silent == frozenset(reference.silent) and len(CHAT) == 3


@lengths.long_form(
    "models/omni/test_thinker_loading.py::test_what_transformers_saves_is_read", unkept="the Talker is read as Transformers saves it"
)
async def test_weights_as_transformers_saves_them_say_the_same(
    reference: TalkerReference, talker: Qwen3Talker, tmp_path: Path, seed: int
) -> None:
    """Experts of a layer together, modules by other names, and the config as Transformers 5 spells it."""
    whole = {**reference.whole, "talker_config": reference.talker.config.to_dict()}
    assert "num_local_experts" in whole["talker_config"]["text_config"] and "rope_parameters" in whole["talker_config"]["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    weights = {f"talker.{name}": value for name, value in reference.talker.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in weights)
    reference.save(weights, tmp_path, text="thinker.model.language_model.")
    other, asked = load(tmp_path), reference.asked(seed, picture=True)
    assert await spoken(other, reference.rows(asked), speech(seed, asked)) == await spoken(
        talker, reference.rows(asked), speech(seed, asked)
    )
    await other.close()


async def test_a_packed_thinker_is_unpacked(reference: TalkerReference, tmp_path: Path) -> None:
    """The Talker reads some embeddings of the Thinker."""
    weights = load_file(reference.folder / "model.safetensors")
    (name,) = (name for name in weights if name.startswith("thinker.") and name.endswith("embed_tokens.weight"))
    weights |= {**in_blocks(name, weights[name], (128, 128)), f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config_of(reference), "quantization_config": {"quant_method": "fp8"}}))
    await load(tmp_path).close()


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.2.up_proj", "code_predictor.lm_head.1", "text_projection.linear_fc2", "codec_head"]
)
def test_a_weight_that_is_missing_is_named(reference: TalkerReference, tmp_path: Path, name: str) -> None:
    weights = reference.published()
    del weights[f"talker.{name}.weight"]
    with pytest.raises((BadCheckpoint, ValueError), match=re.escape(f"{name.removeprefix('model.')}.weight")):
        load(copied(reference, tmp_path, {}, weights))


def test_an_expert_of_another_shape_is_named(reference: TalkerReference, tmp_path: Path) -> None:
    """The check is of all experts together too: one too many would not be missed."""
    name = "talker.model.layers.1.mlp.experts.2.up_proj.weight"
    weights = reference.published()
    copied(reference, tmp_path, {}, {**weights, name: weights[name][1:].clone()})
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(name)} is \[.*, and by config\.json it is"):
        load(tmp_path)
    weights = {f"talker.{name}": value for name, value in reference.talker.state_dict().items()}
    name = "talker.model.layers.1.mlp.experts.down_proj"
    reference.save({**weights, name: torch.cat([weights[name], weights[name][:1]])}, tmp_path)
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(name)} is \[.*, and by config\.json it is"):
        load(tmp_path)


def test_a_weight_that_nobody_reads_is_named(reference: TalkerReference, tmp_path: Path) -> None:
    extra = {"talker.model.layers.0.mlp.experts.99.up_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(BadCheckpoint, match=r"experts\.99\.up_proj"):
        load(copied(reference, tmp_path, {}, {**reference.published(), **extra}))


MUTATIONS: dict[str, tuple[str, Any]] = {
    "another base of positions": ("text_config.rope_scaling.rope_theta", 100.0),
    "weights of experts that do not add up to 1": ("text_config.norm_topk_prob", False),
    "another base of positions within a frame": ("code_predictor_config.rope_theta", 100.0),
    "another item before the first code": ("codec_bos_id", None),
}


@lengths.long_form(
    "models/qwen3_omni/test_talker.py::test_greedy_frames_are_those_of_transformers",
    unkept="small mistakes would be seen by the comparison with Transformers",
)
@pytest.mark.parametrize("name", sorted(MUTATIONS))
async def test_a_talker_that_is_a_little_different_says_something_else(
    reference: TalkerReference, talker: Qwen3Talker, tmp_path: Path, name: str, seed: int
) -> None:
    """So the comparisons above would see it."""
    path, value = MUTATIONS[name]
    value = config_of(reference)["talker_config"]["codec_bos_id"] + 11 if value is None else value
    other = load(copied(reference, tmp_path, {f"talker_config.{path}": value}))
    assert await pictured(other, reference, seed) != await pictured(talker, reference, seed)
    await other.close()


async def pictured(talker: Qwen3Talker, reference: TalkerReference, seed: int, axes: Sequence[int] = (0, 1, 2, 3)) -> list[list[Frame]]:
    """Speeches about pictures that are not square: several, for a small difference need not change the codes of one. axes: where those of
    places are taken from."""
    heard = []
    for number in range(2):
        asked = reference.asked(seed + number, picture=True)
        places, *others = reference.rows(asked)
        turned = replace(places, rows=np.ascontiguousarray(places.rows[:, axes]))
        heard.append(spoken(talker, [turned, *others], endless(talker, seed, asked)))
    return await asyncio.gather(*heard)


async def test_axes_of_positions_are_not_alike(reference: TalkerReference, talker: Qwen3Talker, seed: int) -> None:
    """In another order they make other speeches: the comparisons above would see it."""
    assert await pictured(talker, reference, seed, (0, 2, 1, 3)) != await pictured(talker, reference, seed)
