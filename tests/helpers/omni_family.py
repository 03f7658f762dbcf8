"""The families of omni models whose chains are tested alike, and what differs of them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers import lengths, media_files
from omnistage.v1 import omni_pb2, stage_pb2

PIPELINE = """
name: {family}
description: the shipped one, whose codes can be asked for too
inputs: [text, image, audio, video]
outputs: [text, codes, audio]
stages:
  - {{kind: thinker, family: {family}}}
  - {{kind: talker, family: {family}, takes: [prompt, places, hidden]}}
  - {{kind: code2wav, family: {family}, takes: [codes]}}
defaults:
  thinker: {{max_tokens: 64}}
  talker: {{max_frames: 40}}
"""

STEPS = 1
"""The steps of the flow of Qwen2.5-Omni: losing and finding a stage has nothing to do with their number."""


@dataclass(frozen=True, slots=True)
class OmniFamily:
    """ends: items of its Talker that end a speech. groups: codes of a frame. frame: samples of one, and how many the end lacks. first:
    frames of the first sound. frames: of a long speech, and of a short one."""

    name: str
    ends: tuple[int, ...]
    groups: int
    frame: tuple[int, int]
    first: int
    frames: tuple[int, int]
    options_of: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    args_of: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def samples(self, frames: int) -> int:
        size, missing = self.frame
        return max(size * frames - missing, 0)

    def pipeline(self, folder: Path) -> str:
        """Its file, which is written into the folder."""
        (path := folder / "pipeline.yaml").write_text(PIPELINE.format(family=self.name))
        return str(path)

    def endless(self, **sampling: Any) -> stage_pb2.Sampling:
        """The sampling of a speech that lasts as long as is asked for."""
        return stage_pb2.Sampling(logit_bias=dict.fromkeys(self.ends, -100.0), **sampling)


FAMILIES = {
    one.name: one
    for one in (
        OmniFamily(
            *("qwen2_5_omni", (8292, 8294), 1, (480, 0), 12, (250, 40)),
            {"code2wav": {"steps": STEPS}},
            # Each that starts would try for seconds which windows it may compute together.
            {"code2wav": ("--max-batch-size", "1")},
        ),
        OmniFamily("qwen3_omni", (262,), 16, (1920, 555), 2, (150, 12)),
    )
}


def drawn_family(place: str) -> str:
    return lengths.draw("", FAMILIES, random.Random(f"{os.environ['OMNISTAGE_TEST_SEED']} {place}").getrandbits(32))


def family_params() -> list[Any]:
    """For a fixture that starts a chain: that of one family, which is drawn, and in the long form that of each."""
    return [pytest.param("", id="drawn"), *[pytest.param(name, marks=lengths.LONG) for name in FAMILIES]]


def seen(seed: int) -> tuple[stage_pb2.Media, ...]:
    return (
        stage_pb2.Media(data=media_files.picture(seed), media_type="image/png"),
        stage_pb2.Media(data=media_files.sound(seed), media_type="audio/wav"),
        stage_pb2.Media(data=media_files.film(seed, sound_s=1), media_type="video/mp4", use_audio=True),
    )


def question(family: OmniFamily, seed: int, *media: stage_pb2.Media, tokens: int, frames: int) -> omni_pb2.GenerateRequest:
    """Drawn text and speech that end where it is said."""
    parts = [*(stage_pb2.Part(media=medium) for medium in media), stage_pb2.Part(text="What?")]
    thinker = stage_pb2.ThinkerParams(
        messages=[stage_pb2.Message(role="user", parts=parts)],
        sampling=stage_pb2.Sampling(temperature=1, top_p=0.9),
        max_tokens=tokens,
        ignore_eos=True,
    )
    speech = family.endless(temperature=1, top_p=0.9, repetition_penalty=1.05)
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker, talker=stage_pb2.TalkerParams(max_frames=frames, sampling=speech))
