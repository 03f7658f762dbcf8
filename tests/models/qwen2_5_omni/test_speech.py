"""Greedy speech is that of Transformers' layers, code for code, whatever was seen and heard, and however text and speech end."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from helpers import lengths, media_files
from helpers.models import speak
from helpers.speech_reference import PENALTY, SpeechReference, SpokenCodes
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.interface import Sampling, SpeechRequest, TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.talker import Qwen2_5Talker, load_talker
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker

CODES = 40
CODE_END = 8294
KINDS = ("text", "image", "audio", "video")


@dataclass(frozen=True, slots=True)
class SpeechCase:
    """kind: what is shown. tokens: of the answer. ends: whether it ends by itself, else it is cut there."""

    kind: str
    tokens: int
    ends: bool


CASES = [SpeechCase(kind, tokens, ends) for kind in KINDS for tokens in (3, 24) for ends in (True, False)]


def parts(kind: str, source: random.Random) -> tuple[Part, ...]:
    match kind:
        case "image":
            return (
                Media("image/png", media_files.picture(source.getrandbits(30), source.randint(20, 120), source.randint(20, 120))),
                "What?",
            )
        case "audio":
            return (Media("audio/wav", media_files.sound(source.getrandbits(30), source.uniform(0.2, 3))), "What is this?")
        case "video":
            frames = source.randint(8, 40)
            made = media_files.film(source.getrandbits(30), frames, sound_s=frames / 10)
            return ("Look: ", Media("video/mp4", made, use_audio=source.random() < 0.7), "What?")
    return ("".join(source.choices("abcdefgh ", k=source.randint(1, 90))),)


def check_codes(made: list[int], expected: SpokenCodes, what: object) -> None:
    differing = [place for place, (one, other) in enumerate(zip(made, expected.codes, strict=False)) if one != other]
    if differing and expected.close[differing[0]]:
        return  # two were almost equally good: from there on another speech is as right
    assert made == expected.codes, f"{what}: from {differing[:1]} on"


async def test_what_is_no_code_is_not_said(thinker: Qwen2_5Thinker, talker: Qwen2_5Talker, copied: Path, seed: int) -> None:
    """The special ids of the codec that the conversation consists of count as seen, and the one that stands before the first code is never
    drawn. Here all of them are likelier than the code with which speech began."""
    text, turns = "It is far away.", (Turn("user", ("How far is it?",)),)
    asked = TextRequest(turns, seed=seed, verbatim=text)
    greedy = SpeechRequest(0, "Ethan", Sampling(repetition_penalty=PENALTY), max_frames=CODES)
    (usual,) = (await speak(thinker, talker, asked, replace(greedy, max_frames=1))).codes
    codec = talker.config.codec
    _make_likelier(copied, usual, {codec.mask: 1.03, codec.pad: 1.02, codec.bos: 2.0})
    reference = SpeechReference(copied)
    expected = reference.spoken(reference.rows(turns, ([], []), thinker.tokenizer.encode(text), "Ethan"), CODES)
    assert expected.codes[0] == usual
    changed = load_talker(copied, LoadOptions(path=copied, dtype="float32"))
    check_codes((await speak(thinker, changed, asked, greedy)).codes, expected, text)
    await changed.close()


def _make_likelier(checkpoint: Path, than: int, factors: Mapping[int, float]) -> None:
    """Ids of the Talker, by how much than a code whose logit is positive."""
    name = "talker.codec_head.weight"
    shard = checkpoint / json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"][name]
    weights = load_file(shard)
    for item, factor in factors.items():
        weights[name][item] = weights[name][than] * factor
    shard.unlink()
    save_file(weights, shard, {"format": "pt"})


@lengths.rounds(5, len(CASES))
async def test_codes_are_those_of_the_references(
    rounds: int, thinker: Qwen2_5Thinker, talker: Qwen2_5Talker, omni_checkpoint: Path, seed: int
) -> None:
    source, reference = random.Random(seed), SpeechReference(omni_checkpoint)
    never = thinker.tokenizer.unsayable | thinker.tokenizer.ends
    (end,) = thinker.tokenizer.ends
    for case in CASES if rounds == len(CASES) else source.sample(CASES, rounds):
        turns = (Turn("user", parts(case.kind, source)),)
        seen = await reference.read(turns)
        tokens = reference.answer(turns, seen, case.tokens, never).tokens
        voice = source.choice(talker.info.voices)
        # The last token that was drawn has no row: the end is one, where an answer ends by itself.
        given = reference.rows(turns, seen, tokens if case.ends else tokens[:-1], voice)
        expected = reference.spoken(given, CODES)
        # With random weights, speech may also end by itself.
        assert len(set(expected.codes)) >= 15 or len(expected.codes) < CODES
        assert reference.generated(given, CODES) == expected.codes or any(expected.close)
        asked = TextRequest(turns, seed=0, max_tokens=case.tokens, ignore_eos=True)
        if case.ends:
            drawn = Sampling(logit_bias={end: 100.0})
            asked = replace(asked, sampling=drawn, max_tokens=64, min_tokens=case.tokens, ignore_eos=False)
        speech = SpeechRequest(0, voice, Sampling(repetition_penalty=PENALTY), max_frames=CODES)
        said = await speak(thinker, talker, asked, speech)
        assert said.tokens == tokens, case
        check_codes(said.codes, expected, case)
        # Speech that ends by itself: the end is made so likely that it comes where it was closest, and not before.
        if not expected.codes:
            continue
        at = int(np.argmin(expected.gaps))
        likelier = (expected.gaps[at] + min(expected.gaps[:at], default=expected.gaps[at] + 1)) / 2
        ending = replace(speech, sampling=replace(speech.sampling, logit_bias={CODE_END: likelier}), max_frames=0)
        said = await speak(thinker, talker, asked, ending)
        check_codes(said.codes, SpokenCodes(expected.codes[:at], [], expected.close), case)
