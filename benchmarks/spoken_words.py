"""How well the sound says the words of the text: the word error rate of spoken answers, by a recogniser from a package."""

from __future__ import annotations

import asyncio

from benchmarks.asr import recognise, recogniser, word_error_rate
from benchmarks.figures import Figure, Report
from benchmarks.prompts import SPOKEN
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack
from omnistage.client import AsyncOmni


async def measure(report: Report) -> None:
    """Let the default model speak, and compare what a recogniser hears with the texts."""
    stack = Stack(layout_of(Choice(["smol"])))
    await stack.start()
    try:
        async with AsyncOmni(address=stack.address, max_retries=0) as omni:
            answers = [await omni.generate(question, seed=number) for number, question in enumerate(SPOKEN)]
    finally:
        await stack.stop()
    model = await asyncio.to_thread(recogniser)
    pairs = [
        (answer.text, recognise(model, answer.audio.samples, answer.audio.sample_rate)) for answer in answers if answer.audio is not None
    ]
    seconds = sum(answer.timing.audio_s for answer in answers)
    report.add(Figure("word_error_rate", word_error_rate(pairs), "", "<= 0.04", f"{len(pairs)} answers, {seconds:.0f} s of sound"))
