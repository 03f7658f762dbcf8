"""The Code2Wavs of both families: the same bits however codes come, whoever else speaks, and wherever a replica goes on; and what they
refuse."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import causal_waves, lengths, waves
from helpers.checkpoints import changed
from helpers.omni_family import FAMILIES
from helpers.waves import BLOCK, STREAMED, Codes, Samples, joined, samples, sounds
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.interface import BadRequest, Code2WavModel, Piece, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.wave import config as flow_config
from omnistage.models.qwen3_omni.wave import config as causal_config
from omnistage.models.registry import load
from omnistage.models.reports import LoadError

QWEN2_5, QWEN3 = "qwen2_5_omni", "qwen3_omni"
THREE_STEPS = f"{QWEN2_5} in three steps"
CHECKPOINTS = {QWEN2_5: "omni_checkpoint", QWEN3: "qwen3_checkpoint"}
SCHEDULES = flow_config.SCHEDULES


@dataclass
class WaveMaker:
    """A Code2Wav. drawn: random codes of it, so many. counts: codes of a speech of some length, and of a long one. profiles: of speeches
    beside each other. wait_s: that a few of its windows take. wrong: codes that there are not."""

    family: str
    model: Code2WavModel[Any]
    drawn: Callable[[random.Random, int], Codes]
    counts: tuple[tuple[int, int], tuple[int, int]]
    profiles: Sequence[str]
    wait_s: float
    wrong: Sequence[int]

    def samples(self, codes: int) -> int:
        """The samples of so many codes."""
        return FAMILIES[self.family].samples(codes)

    def behind(self, profile: str) -> tuple[int, int]:
        """The least and the most codes that are needed again for a late sample: at Qwen3-Omni what the net looks back, and parts of the
        windows at both ends of it."""
        if self.family == QWEN2_5:
            return 0, (24 + 6 + 2 + 2) * BLOCK
        before: int = self.model.config.frames_before  # type: ignore[attr-defined]
        return before, before + 2 * max(causal_config.SCHEDULES[profile])


@pytest.fixture(scope="module", params=[QWEN2_5, QWEN3])
def maker(request: pytest.FixtureRequest) -> Iterator[WaveMaker]:
    """Where not said otherwise, by two evaluations: what is claimed has nothing to do with how many there are."""
    if request.param == QWEN3:
        causal = causal_waves.loaded(request.getfixturevalue("qwen3_checkpoint"))
        counts, codes = ((20, 90), (2 * causal.config.frames_before, 130)), causal.config.codes
        made = WaveMaker(
            *(QWEN3, causal, lambda source, count: causal_waves.drawn(causal, source, count), counts),
            *(tuple(SCHEDULES), 0.01, (codes, codes + 1000, 1 << 31)),
        )
    else:
        options = {"steps": 3} if request.param == THREE_STEPS else {"solver": "euler", "steps": 2}
        flow = waves.loaded(request.getfixturevalue("omni_checkpoint"), **options)
        made = WaveMaker(QWEN2_5, flow, waves.drawn, ((50, 110), (220, 350)), STREAMED, 1.0, (8194, 8293, 8296, 1 << 31))
    yield made
    asyncio.run(made.model.close())


@lengths.one_or_all("profile", SCHEDULES)
async def test_the_bits_do_not_depend_on_how_codes_come(maker: WaveMaker, seed: int, profile: str) -> None:
    """The seed counts at Qwen2.5-Omni alone."""
    source = random.Random(seed)
    profile = lengths.draw(profile, SCHEDULES, seed)
    codes = maker.drawn(source, source.randint(*maker.counts[0]))
    whole = await samples(maker.model, codes, WaveRequest(seed, profile))
    assert len(whole) == maker.samples(len(codes))
    sizes: list[Callable[[], int]] = [lambda: 1, lambda: 7, lambda: source.randint(0, 40)]
    for size in sizes:
        assert np.array_equal(joined(await sounds(maker.model, codes, WaveRequest(seed, profile), size=size)), whole)
    other = await samples(maker.model, codes, WaveRequest(seed + 1, profile))
    assert np.array_equal(other, whole) == (maker.family == QWEN3)


@pytest.mark.parametrize("maker", [pytest.param(QWEN2_5, marks=lengths.LONG), QWEN3], indirect=True)
@lengths.one_or_all("profile", SCHEDULES)
@lengths.rounds(2, 20)
async def test_sound_goes_on_at_any_sample_with_the_same_bits(maker: WaveMaker, seed: int, profile: str, rounds: int) -> None:
    """From the code that the model asks for, from that which a sound before said is needed, or from any before it."""
    source, model = random.Random(seed), maker.model
    profile = lengths.draw(profile, SCHEDULES, seed)
    codes, request = maker.drawn(source, source.randint(*maker.counts[1])), WaveRequest(seed, profile)
    made = await sounds(model, codes, request)
    whole, borders, prepared = joined(made), np.cumsum([len(sound.samples) for sound in made]).tolist(), await model.prepare(request)
    for sample in (0, 1, len(whole), *source.choices(borders, k=rounds), *(source.randrange(len(whole)) for _ in range(rounds))):
        asked, told = model.first_frame(prepared, sample), 0
        for border, each in zip(borders, made, strict=True):
            told = each.needs if border <= sample else told
        first = source.choice((asked, told, source.randint(0, max(asked, told))))
        rest = await sounds(model, codes, request, sample=sample, first=min(first, asked), size=lambda: source.randint(1, 50))
        assert np.array_equal(joined(rest), whole[sample:]), f"sample {sample}, codes from {first}"
        assert all(len(sound.samples) for sound in rest)


async def test_what_must_be_computed_again_is_bounded(maker: WaveMaker) -> None:
    """However long the speech is. Nearer to its beginning nothing more than all of it."""
    size, missing = FAMILIES[maker.family].frame
    for profile in STREAMED if maker.family == QWEN2_5 else SCHEDULES:
        prepared = await maker.model.prepare(WaveRequest(0, profile))
        behind = [sample // size - maker.model.first_frame(prepared, sample) for sample in range(0, 1 << (22 if missing else 24), 4801)]
        least, most = maker.behind(profile)
        assert min(behind) >= 0 and least <= max(behind) <= most


@pytest.mark.parametrize("maker", [THREE_STEPS, QWEN3], indirect=True)
@lengths.rounds(6, 30)
async def test_many_at_once_have_the_bits_that_each_has_alone(maker: WaveMaker, seed: int, rounds: int) -> None:
    """Speeches of all lengths and profiles, in all phases, some of which go on from elsewhere; some are given up meanwhile."""
    source, model = random.Random(seed), maker.model
    rounds = rounds if maker.family == QWEN3 else min(rounds, 14)
    asked = [(maker.drawn(source, source.randint(1, 40)), WaveRequest(seed + n, source.choice(maker.profiles))) for n in range(rounds)]

    async def later(number: int) -> Samples:
        await asyncio.sleep(maker.wait_s * source.random())
        codes, request = asked[number]
        return joined(await sounds(model, codes, request, sample=first_sample(number), size=lambda: source.randint(1, 30)))

    def first_sample(number: int) -> int:
        return maker.samples(len(asked[number][0])) // 2 if number % 3 == 2 else 0

    given_up = [asyncio.create_task(later(number)) for number in range(3)]
    together = [asyncio.create_task(later(number)) for number in range(rounds)]
    for task in given_up:
        await asyncio.sleep(0.3 * maker.wait_s * source.random())
        task.cancel()
    made = await asyncio.gather(*together)
    await asyncio.gather(*given_up, return_exceptions=True)
    for number, heard in enumerate(made):
        assert np.array_equal((await samples(model, *asked[number]))[first_sample(number) :], heard)
    assert model.load().queued == 0


@lengths.one_or_all("profile", SCHEDULES)
async def test_a_speech_has_the_samples_of_its_codes(maker: WaveMaker, seed: int, profile: str) -> None:
    """A code of Qwen2.5-Omni has 480; one of Qwen3-Omni 1920, of which the last one lacks 555, and nothing between windows is lost."""
    source, drawn = random.Random(seed), lengths.draw(profile, SCHEDULES, seed)
    for profile in [drawn] if maker.family == QWEN2_5 else SCHEDULES:
        for count in (0, 1, 2, 11, 12, 13, 24, 25, source.randint(26, 60 if maker.family == QWEN3 else 200)):
            assert len(await samples(maker.model, maker.drawn(source, count), WaveRequest(seed, profile))) == maker.samples(count)


FIRST_SOUND = {QWEN2_5: ("balanced", 2 * BLOCK, 2 * BLOCK + 1, (BLOCK, 2 * BLOCK + 1)), QWEN3: ("latency", 1, 5, (1, 2))}
"""A profile, the codes that its first sound needs, those of the speech, and those that have been heard after one sound and after two."""


async def test_the_first_sound_needs_no_more_codes_than_it_is_made_of(maker: WaveMaker, seed: int) -> None:
    """At Qwen2.5-Omni 12 codes that are heard and 12 that are looked at ahead, at Qwen3-Omni one frame. It says how long to wait."""
    profile, needed, count, ends = FIRST_SOUND[maker.family]
    codes, heard = maker.drawn(random.Random(seed), count), asyncio.Event()

    async def one_by_one() -> AsyncIterator[Piece]:
        for first in range(needed):
            yield Piece("codes", first, False, codes[first : first + 1])
        await heard.wait()
        yield Piece("codes", needed, True, codes[needed:])

    prepared = await maker.model.prepare(WaveRequest(seed, profile))
    async with aclosing(maker.model.decode(prepared, one_by_one(), {"audio": 0})) as made:
        first = await anext(made)
        heard.set()
        second = await anext(made)
    assert (len(first.samples), len(first.samples) + len(second.samples)) == tuple(map(maker.samples, ends))
    assert first.prebuffer_s is not None and first.prebuffer_s >= 0 and second.prebuffer_s is None


# Refusals --------------------------------------------------------------------------------------------------------------------------------


async def test_a_code_that_there_is_not_is_refused(maker: WaveMaker, seed: int) -> None:
    source, model = random.Random(seed), maker.model
    codes = maker.drawn(source, 60)
    whole = await samples(model, codes, WaveRequest(seed))
    for wrong in maker.wrong:
        bad = codes.copy()
        bad[50, source.randrange(bad.shape[1])] = wrong
        with pytest.raises(BadRequest, match=f"no code {wrong}; codes are below {maker.wrong[0]}"):
            await sounds(model, bad, WaveRequest(seed), size=lambda: 5)
    assert np.array_equal(await samples(model, codes, WaveRequest(seed)), whole)


async def test_codes_that_are_missing_are_told(maker: WaveMaker, seed: int) -> None:
    codes, count = maker.drawn(random.Random(seed), 60), maker.samples(60)
    with pytest.raises(BadRequest, match="code 0 and those behind it are needed; the first that came is number 3"):
        await sounds(maker.model, codes, WaveRequest(seed), first=3)
    with pytest.raises(BadRequest, match=rf"resume\.positions: the sound has {count} samples: it cannot go on at sample {count + 1}"):
        await sounds(maker.model, codes, WaveRequest(seed), sample=count + 1)


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        (QWEN2_5, {"solver": "heun"}, "option solver of the code2wav of qwen2_5_omni is 'heun'; there are rk4, midpoint, euler"),
        (QWEN2_5, {"steps": -1}, "option steps of the code2wav of qwen2_5_omni is -1; 0 leaves it to the model"),
        (QWEN2_5, {"steps": 101}, "option steps of the code2wav of qwen2_5_omni is 101; 100 is the most"),
        (QWEN2_5, {"lookahead": 37}, "option lookahead of the code2wav of qwen2_5_omni is 37; 36 is the most"),
        (QWEN2_5, {"workers": 65}, "option workers of the code2wav of qwen2_5_omni is 65; 64 is the most"),
        (QWEN2_5, {"speed": 1}, r"unknown options \['speed'\] of the code2wav of qwen2_5_omni"),
        (QWEN3, {"workers": -1}, "option workers of the code2wav of qwen3_omni is -1; 0 leaves it to the model"),
        (QWEN3, {"workers": 65}, "option workers of the code2wav of qwen3_omni is 65; 64 is the most"),
        (QWEN3, {"speed": 1}, r"unknown options \['speed'\] of the code2wav of qwen3_omni; known are \['workers'\]"),
    ],
)
def test_options_that_cannot_be_are_refused(
    family: str, options: Mapping[str, int | str], told: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(LoadError, match=told):
        load(family, "code2wav", LoadOptions(path=request.getfixturevalue(CHECKPOINTS[family]), family=options))


FLOW, CAUSAL = "token2wav_config", "code2wav_config"
VOCODER = f"{FLOW}.bigvgan_config"


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (f"{FLOW}.dit_config.block_size", 25, "'block_size' is 25, no whole number of codes of 2 frames"),
        (f"{FLOW}.dit_config.repeats", 0, "'repeats' is 0"),
        (f"{FLOW}.dit_config.look_ahead_layers", [22], "layers look ahead or back that are not among the 22 that there are"),
        (f"{FLOW}.dit_config.look_backward_layers", [0, 10, 20], "3 layers look back and 1 ahead; the published 2 and 1 are supported"),
        (f"{FLOW}.dit_config.look_ahead_layers", [10, 12], "2 layers look back and 2 ahead; the published 2 and 1 are supported"),
        (f"{FLOW}.dit_config.mel_dim", 40, "'mel_dim' is 40 of what is made, 80 of what is made to sound"),
        (f"{VOCODER}.upsample_rates", "5", "lacks the list 'upsample_rates'"),
        (f"{VOCODER}.resblock_kernel_sizes", [3, 7, 15], r"'resblock_kernel_sizes' is \[3, 7, 15\]; only the published one is supp"),
        (f"{VOCODER}.upsample_rates", [5, 3, 4, 2, 2], r"'upsample_rates' is \[5, 3, 4, 2, 2\]; only the published one is supp"),
        (f"{VOCODER}.resblock_dilation_sizes", [1, 3, 5], "lacks the list '0'"),
        (f"{CAUSAL}.hidden_act", "gelu", "'hidden_act' is 'gelu', and only 'silu' is supported"),
        (f"{CAUSAL}.rope_parameters", {"rope_type": "yarn"}, "positions of the type 'yarn' are not supported, only the default ones"),
        (f"{CAUSAL}.rope_theta", -1e4, r"'rope_theta' is -10000\.0, which must be 1 or more"),
        (f"{CAUSAL}.rms_norm_eps", -1.0, r"'rms_norm_eps' is -1\.0, which must be 0 or more"),
        (f"{CAUSAL}.num_key_value_heads", 3, "4 heads of 10 components cannot share 3 heads of keys"),
        (f"{CAUSAL}.num_attention_heads", 8, "8 heads of 5 components cannot share 2 heads of keys"),
        (f"{CAUSAL}.decoder_dim", 24, "'decoder_dim' is 24, which cannot be halved 4 times"),
        (f"{CAUSAL}.upsampling_ratios", [1], "one frame makes 480 samples and the end of a speech lacks 555"),
        (f"{CAUSAL}.upsample_rates", [8, 0], r"'upsample_rates' is \[8, 0\]; give rates of 1 and more"),
        (f"{CAUSAL}.upsample_rates", [], r"'upsample_rates' is \[\]; give rates of 1 and more"),
        (f"{CAUSAL}.upsample_rates", [8, 5000], r"'upsample_rates' is \[8, 5000\]; give rates of 1 and more, 24000 in all at most"),
        (f"{CAUSAL}.sliding_window", 0, "'sliding_window' is 0, which must be 1 to 4096"),
        (f"{CAUSAL}.num_quantizers", None, "lacks 'num_quantizers'"),
        (f"{CAUSAL}.quantization_config", {"quant_method": "fp8"}, "quantized by fp8"),
    ],
)
def test_a_config_that_cannot_be_is_told(request: pytest.FixtureRequest, tmp_path: Path, path: str, value: object, told: str) -> None:
    family, read = (QWEN2_5, flow_config.read_wave_config) if path.startswith(FLOW) else (QWEN3, causal_config.read_wave_config)
    whole = json.loads((request.getfixturevalue(CHECKPOINTS[family]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(changed(whole, {path: value})))
    with pytest.raises(BadCheckpoint, match=told):
        read(tmp_path)
