"""From the first token of an answer to the first sound of Qwen3-Omni: one row, one frame, one window."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from helpers.models import RowInputs
from helpers.talker_reference import TalkerReference
from helpers.waiting import until
from omnistage.models.interface import Piece, Profile, Sampling, SpeechRequest, TensorRows, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.talker import load_talker
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav


async def test_the_first_sound_comes_of_one_row_and_one_frame(wave: CausalCode2Wav, tmp_path: Path, seed: int) -> None:
    """While the Thinker writes its second token."""
    reference = TalkerReference("tiny", int(os.environ["OMNISTAGE_TEST_SEED"]), tmp_path / "talker")
    talker = load_talker(reference.folder, LoadOptions(path=reference.folder, dtype="float32", max_sessions=2))
    made, line, (places, prompt, reply) = talker.engine.stats().items, RowInputs(), reference.rows(reference.asked(seed, tokens=3))
    for piece in (places, prompt, TensorRows("hidden", reply.rows[:1], last=False)):
        line.put(piece)
    speech = await talker.prepare(SpeechRequest(seed, sampling=Sampling(logit_bias={talker.config.codec.eos: -100.0}), max_frames=4))

    async def codes() -> AsyncIterator[Piece]:
        first = 0
        async with aclosing(talker.speak(speech, line.inputs(), {"codes": 0})) as frames:
            async for each in frames:
                yield Piece("codes", first, each.finish_reason is not None, each.rows)
                first += len(each.rows)

    async with aclosing(wave.decode(await wave.prepare(WaveRequest(seed, Profile.LATENCY)), codes(), {"audio": 0})) as sounds:
        async with asyncio.timeout(60):
            assert len((await anext(sounds)).samples) == 1920 - 555
            await until(lambda: talker.engine.stats().starved == 1)
            assert talker.engine.stats().items == made + 1
            line.put(TensorRows("hidden", reply.rows[1:], last=True))
            assert sum([len(sound.samples) async for sound in sounds]) == 3 * 1920
    await talker.close()
